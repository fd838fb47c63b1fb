"""The optimisers by name, activation checkpointing, and what both leave as it was."""

import asyncio
import dataclasses
import importlib
import importlib.util
import threading
import time

import pytest
import torch
from loop_helpers import NAMES, flat, fresh, rows_of
from transformers import LlamaConfig, LlamaForCausalLM

from grpolab.arithmetic import Task, generate
from grpolab.models.load import Policy
from grpolab.runs.run import Run
from grpolab.train import loop as optimise
from grpolab.train.dpo import DPOConfig, dpo
from grpolab.train.grpo import GRPOConfig, grpo
from grpolab.train.loop import OPTIMISERS, Optimisation, make_optimiser
from grpolab.train.preferences import load_preferences
from grpolab.train.reward_model import RewardConfig, RewardModel, reward_model
from grpolab.train.sft import SFTConfig, demonstrations, sft

PROBLEMS, _ = generate(24, 0, seed=3, task=Task("+-", max_operand=20))
CONFIG = SFTConfig(steps=5, batch_size=6, lr=1e-3, save_every=1, weight_decay=0.1)

def train(policy, config, run=None, stop=None):
    return rows_of(sft(policy, demonstrations(policy, PROBLEMS), config, run=run), stop)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(tiny, name):
    config = dataclasses.replace(CONFIG, steps=30, optimiser=name, lr=1e-2 if name == "adafactor" else 2e-3)
    rows = train(tiny, config)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]


def test_the_missing_extra_is_named(tiny, monkeypatch):
    def gone(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", gone)
    with pytest.raises(ImportError, match=r"adamw_8bit.*grpolab\[8bit\]"):
        make_optimiser(tiny, Optimisation(optimiser="adamw_8bit"))


# --- the event loop keeps answering -----------------------------------------------------------------------------------


async def longest_stall(work) -> float:
    """The longest time in seconds that a heartbeat of 5 ms had to wait while `work` ran."""
    worst = 0.0

    async def beat():
        nonlocal worst
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            worst = max(worst, time.perf_counter() - began - 0.005)

    heart = asyncio.create_task(beat())
    await asyncio.sleep(0.02)
    await work
    heart.cancel()
    return worst


def slow_rule(text, problem, rollout):
    time.sleep(0.05)
    return float(rollout.seed % 3)


def method(name, tiny, run, reward=slow_rule):
    """A loop of a few steps, and the policy that it trains."""
    pairs = load_preferences([{"prompt": p.question, "chosen": p.target, "rejected": f"{p.answer + 1}"} for p in PROBLEMS],
                             tiny.tokenizer)
    if name == "sft":
        return tiny, sft(tiny, demonstrations(tiny, PROBLEMS), dataclasses.replace(CONFIG, steps=3, save_every=2), run=run)
    if name == "dpo":
        return tiny, dpo(tiny, fresh(tiny), pairs, DPOConfig(steps=3, batch_size=4, save_every=2), run=run)
    if name == "reward_model":
        model = RewardModel.from_policy(tiny)
        return model, reward_model(model, pairs, RewardConfig(steps=3, batch_size=4, save_every=2), run=run)
    config = GRPOConfig(steps=3, prompts_per_step=4, group_size=4, max_new_tokens=8, save_every=2)
    return tiny, grpo(tiny, None, PROBLEMS, config, reward=reward, watch={"again": reward}, run=run)


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model", "grpo"])
def test_nothing_heavy_runs_on_the_event_loop(tiny, tmp_path, name):
    """While the model is held by somebody else, as at the start of a loop beside a sampler; with rewards of 50 ms a call;
    and late in a run of 15,000 rows. On the loop each of these cost 0.6 s or more; the bound leaves room for a busy machine."""
    run = Run("x", root=tmp_path)
    policy, rows = method(name, tiny, run)

    def hold():
        with policy.lock:
            held.set()
            time.sleep(1.0)

    async def consume():
        async for row in rows:
            if row["step"] == 0:
                run.metrics[:0] = [dict(row, **{f"c{i}": 1 / 3 for i in range(10)})] * 15_000

    held = threading.Event()
    threading.Thread(target=hold).start()
    held.wait()
    assert asyncio.run(longest_stall(consume())) < 0.45
    assert len(run.metrics) > 15_000


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model", "grpo"])
def test_weights_change_in_one_thread_that_holds_the_policy(tiny, tmp_path, monkeypatch, name):
    """And each change counts in the version, by which whoever keeps a copy notices."""
    owners, versions = [], []

    class Watched(torch.optim.SGD):
        def step(self):
            owners.append((threading.current_thread().name, policy.lock.held()))
            versions.append(policy.version)
            super().step()

    monkeypatch.setitem(OPTIMISERS, "adamw", lambda parameters, **options: Watched(parameters, lr=options["lr"]))
    policy, rows = method(name, tiny, Run("x", root=tmp_path), reward=lambda *a: float(a[2].seed % 3))
    taken = len(rows_of(rows))
    assert set(owners) == {(f"{optimise.STEPS}_0", True)}
    assert versions == list(range(taken)) and policy.version == taken


def dropping(policy):
    """A small model with dropout of 0.1, in training mode; every one made is the same."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=policy.model.config.vocab_size, attention_dropout=0.1, **shape)
    model = LlamaForCausalLM(config).train()
    return Policy(model, policy.tokenizer, "dropping", policy.eos_ids)


@pytest.mark.parametrize("restart", [False, True])
def test_dropout_is_drawn_from_seed_and_step(tiny, tmp_path, restart):
    """So a run that goes on, or is run again, drops what it would have dropped, whatever else was drawn meanwhile."""
    whole, again = dropping(tiny), dropping(tiny)
    rows = train(whole, CONFIG)
    torch.manual_seed(99)
    if restart:
        train(again, CONFIG, Run("x", root=tmp_path), stop=3)
        again = dropping(tiny)
    torch.rand(5)
    before = torch.get_rng_state()
    resumed = train(again, CONFIG, Run("x", root=tmp_path))
    assert torch.equal(flat(whole), flat(again)) and rows[-1]["loss"] == resumed[-1]["loss"]
    assert torch.equal(torch.get_rng_state(), before) and again.model.training
    still = dropping(tiny)
    still.model.eval()
    assert train(still, CONFIG)[0]["loss"] != rows[0]["loss"]  # it does drop


def test_a_reference_in_training_mode_drops_nothing(tiny):
    """Its log-probs are the model's own, and its mode stays."""
    policy, reference = dropping(tiny), dropping(tiny)
    policy.model.eval()
    config = GRPOConfig(steps=1, prompts_per_step=2, group_size=4, max_new_tokens=6, kl_coef=0.5)
    rows = grpo(policy, reference, PROBLEMS, config, reward=lambda text, problem, rollout: float(len(set(rollout.tokens))))
    assert abs(rows_of(rows)[0]["kl"]) < 1e-6 and reference.model.training


def test_a_frozen_policy_is_refused_by_name(tiny):
    tiny.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'tiny' is frozen: .*requires_grad_\(True\)"):
        train(tiny, CONFIG)
    next(tiny.model.parameters()).requires_grad_(True)
    assert len(train(tiny, dataclasses.replace(CONFIG, steps=1))) == 1
