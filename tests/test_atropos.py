"""Atropos' trajectory API: against the real `run-api` of atroposlib 0.4.0, and shapes that it would let through."""

import asyncio
import contextlib
import os
import subprocess
import time
import urllib.request
from dataclasses import replace

import pytest
import torch
from env_harness import free_port

from grpolab.arithmetic import generate
from grpolab.chat import prompt_ids
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.rollouts import Group, Rollout
from grpolab.runs.run import repository
from grpolab.serve.atropos import MASKED, AtroposTrainer, advantages_of, as_group, atropos_source
from grpolab.serve.http_client import Caller, NoAnswer, RemoteError
from grpolab.train.grpo import GRPOConfig, grpo_from, grpo_gradient, trainer_logps

ROOT = repository()
HOME = os.environ.get("ATROPOS_ENVIRONMENT") or str(ROOT / ".venv" / "atropos")  # that `make atropos` makes


def started_api(port):
    """The real server as a process that answers."""
    program = os.path.join(HOME, "bin", "run-api")
    if not os.path.exists(program):
        missing = "atroposlib 0.4.0 is not installed: make atropos"
        pytest.fail(missing) if os.environ.get("REQUIRE_ATROPOS") else pytest.skip(missing)
    process = subprocess.Popen([program, "--host", "127.0.0.1", "--port", str(port)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(300):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5):
            break
        assert process.poll() is None
        time.sleep(0.1)
    return process


@pytest.fixture
def api():
    """Its url."""
    port = free_port()
    process = started_api(port)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(10)


def rollout(prompt, tokens, mask, reward):
    logps = tuple(-0.5 * m for m in mask)
    return Rollout(prompt, tokens, mask, logps, logps, "eos", reward=reward)


PAIR = Group((rollout((5, 6), (7, 8, 9, 1), (1, 0, 1, 1), 1.0), rollout((5, 6), (7, 1), (1, 1), 0.0)))
# The same as ScoredData: -100 and 1.0 where the policy chose nothing.
ITEM = {"tokens": [[5, 6, 7, 8, 9, 1], [5, 6, 7, 1]], "masks": [[-100, -100, 7, -100, 9, 1], [-100, -100, 7, 1]],
        "scores": [1.0, 0.0], "inference_logprobs": [[1.0, 1.0, -0.5, 1.0, -0.5, -0.5], [1.0, 1.0, -0.5, -0.5]]}


def scored(group):
    """A group of the sampler's as an environment posts it."""
    return {"tokens": [[*r.prompt, *r.tokens] for r in group],
            "masks": [[*[MASKED] * len(r.prompt), *r.tokens] for r in group], "scores": group.rewards,
            "inference_logprobs": [[*[1.0] * len(r.prompt), *r.logps] for r in group],
            "generation_params": {"temperature": 1.0, "policy_version": min(r.policy_version for r in group)}}


async def environment(api, size):
    """A function that posts ScoredData as a registered environment does."""
    caller, answer = Caller(api), {}
    while answer.get("status") != "success":
        answer = await caller.ask("POST", "/register-env", {
            "max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": size, "min_batch_allocation": None})
        await asyncio.sleep(0.02)
    return lambda item: caller.ask("POST", "/scored_data", item | {"env_id": answer["env_id"]})


def test_an_item_is_a_group():
    """Its ends are the policy's only where the last token is an end token."""
    assert as_group(ITEM | {"overrides": [{}, {}]}, vocab=100, temperature=1.0, context=6, eos_ids=(1,)) == PAIR
    assert [r.finish_reason for r in as_group(ITEM, 100, 1.0, eos_ids=(2,))] == ["length", "length"]


WRONG = [
    (dict(inference_logprobs=None), "--openai.server_type vllm"),
    (dict(scores=[1.0]), "half a group"),
    (dict(tokens=[]), "half a group"),
    (dict(masks=[[-100, 7], [-100, -100, 7, 1]]), "6 tokens, 2 masks"),
    (dict(tokens=[[5, 6, 7, 8, 9, 500], [5, 6, 7, 1]]), "outside the vocabulary 0..99"),
    (dict(scores=[float("nan"), 0.0]), "score nan"),
    (dict(masks=[[-100] * 6, [-100, -100, 7, 1]]), "no token to train on"),
    (dict(masks=[[5, 6, 7, 8, 9, 1], [-100, -100, 7, 1]]), "no prompt"),
    (dict(masks=[[-100, -100, 3, -100, 9, 1], [-100, -100, 7, 1]]), "a mask that is neither its token nor -100"),
    (dict(inference_logprobs=[[1.0] * 6, [1.0, 1.0, -0.5, -0.5]]), "log-probs above 0"),
    (dict(generation_params={"temperature": 0}), "temperature 0: nothing can be learned from the argmax"),
    (dict(overrides=[{"set_advantage_to_zero": True}]), "half a group.*1 overrides"),
    (dict(overrides=[{"set_advantage_to_zer": True}, {}], group_overrides={"weight": 2}), "'set_advantage_to_zer', 'weight'"),
    (dict(images=["x"]), "'images'"),
    (dict(tokens=[[5, 6, 7, 8, 9, 1, 1], [5, 6, 7, 1]], masks=[[-100, -100, 7, -100, 9, 1, 1], [-100, -100, 7, 1]],
          inference_logprobs=[[1.0, 1.0, *[-0.5] * 5], [1.0, 1.0, -0.5, -0.5]]), "7 tokens came.*at most 6"),
]


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_what_the_api_lets_through_is_refused_here(change, why):
    with pytest.raises(ValueError, match=why):
        as_group(ITEM | change, vocab=100, temperature=1.0, context=6)


def test_temperatures_of_a_sequence_in_the_order_of_atropos():
    """Its override, else the group's parameter, else the group's override, else 1."""
    def at(loss=1.0, **sent):
        return [r.temperature for r in as_group(ITEM | sent, 100, loss)]

    params, of_group = {"temperature": 0.7}, {"temperature": 0.5, "group_size": 2}
    assert at(overrides=[{"temperature": 0.9}, None], generation_params=params, group_overrides=of_group) == [0.9, 0.7]
    assert at(group_overrides=of_group) == [0.5, 0.5] and at() == [None, None] == at(0.5, group_overrides=of_group)
    assert at(0.5) == [1.0, 1.0]


def test_a_temperature_of_its_own_is_that_of_the_log_probs_and_of_the_gradient(tiny):
    """As if the loss had it: values, and the gradient of every parameter."""
    def of(config, temperature):
        rollouts = [replace(r, temperature=temperature) for r in PAIR]
        rollouts = [replace(r, logps=tuple(x)) for r, x in zip(rollouts, trainer_logps(tiny, rollouts, config))]
        tiny.model.zero_grad()
        grpo_gradient(tiny, None, rollouts, torch.tensor([1.0, -1.0]), config)
        return trainer_logps(tiny, rollouts, config), torch.cat([p.grad.flatten() for p in tiny.model.parameters()])

    (own, own_gradient), (all_at, gradient) = of(GRPOConfig(), 0.7), of(GRPOConfig(temperature=0.7), None)
    for a, b in zip(own, all_at):
        assert a == pytest.approx(b, abs=1e-5)
    assert torch.allclose(own_gradient, gradient, atol=1e-5) and gradient.abs().max() > 1e-3
    assert own[0] != pytest.approx(trainer_logps(tiny, list(PAIR), GRPOConfig())[0], abs=1e-2)


def test_advantages_of_an_environment_take_the_place_of_those_of_the_rewards():
    config, groups = GRPOConfig(), [PAIR, PAIR]
    assert advantages_of([ITEM, ITEM], groups, config) is None
    zero = advantages_of([ITEM, ITEM | {"overrides": [{"set_advantage_to_zero": True}, {}]}], groups, config)
    assert zero.tolist() == [[0.5, -0.5], [0.0, -0.5]]
    sent = {"advantages": [[9, 9, 1, 2, 3, 4], [9, 9, 5, 6]], "overrides": [{}, {"set_advantage_to_zero": True}]}
    tokens = advantages_of([ITEM, ITEM | sent], groups, config)
    assert tokens[0].tolist() == [[0.5] * 4, [-0.5] * 4] and tokens[1].tolist() == [[1, 2, 3, 4], [0] * 4]
    for wrong, said in (([[1.0], [1.0]], "advantages for 6 tokens"), ([[float("nan")] * 6, [0] * 4], "advantages for 6 tokens"),
                        ([[0] * 6], "advantages of 1 seq"), ([[0] * 6, [0] * 4, [0]], "advantages of 3 seq")):
        with pytest.raises(ValueError, match=said):
            advantages_of([ITEM | {"advantages": wrong}], [PAIR], config)


async def test_a_group_that_does_not_fit_costs_itself(tiny):
    class Trainer:
        max_token_len = 6

        async def batch(self):
            return batches.pop()

        async def queued(self):
            return 0

    wrong = ITEM | {"scores": [float("nan"), 0.0]}
    typed = ITEM | {"generation_params": {"policy_version": None}}
    told = {"advantages": [[9, 9, 2, 2, 2, 2], [9, 9, 1, 1]]}
    batches = [[ITEM | told], [wrong], [typed, ITEM], [wrong, ITEM]]
    source = atropos_source(Trainer(), tiny, GRPOConfig())
    with pytest.warns(UserWarning, match="1 of 2 groups were left out: a sequence came with the score nan"):
        drawn = await source(0)
    assert len(drawn.groups) == 1 and drawn.row["refused_groups"] == 1
    with pytest.warns(UserWarning, match="1 of 2 groups were left out: .*NoneType"):
        assert len((await source(1)).groups) == 1
    with pytest.raises(ValueError, match="no group of the batch can be trained on"):
        await source(2)
    assert (await source(3)).record()[0].advantages == (2.0, 1.0)  # means over each one's own tokens


async def test_training_from_an_environment(tiny, api):
    """An environment posts groups of the policy; it is trained on them as they come."""
    rows, _ = generate(8, 0, seed=1)
    config = GRPOConfig(steps=3, lr=1e-3, max_new_tokens=8, group_size=4, prompts_per_step=2)

    async def posts(sampler):
        post = await environment(api, 4)
        for i in range(12):
            params = SamplingParams(max_new_tokens=8, seed=i)
            (group,) = await sampler.sample([prompt_ids(tiny.tokenizer, rows[i % 8].question)], group_size=4, params=params)
            await post(scored(group.with_rewards([tiny.decode(r.tokens).count("1") / 8 for r in group])))
            while (await Caller(api).ask("GET", "/status"))["queue_size"] > 2:
                await asyncio.sleep(0.05)

    trainer = AtroposTrainer(api, batch_size=8, max_token_len=64, timeout=60)
    async with Sampler(tiny) as sampler:
        posting = asyncio.ensure_future(posts(sampler))
        steps = grpo_from(tiny, None, atropos_source(trainer, tiny, config), config, longest=64)
        trained = [row async for row in steps]
        posting.cancel()
        await asyncio.wait([posting])
    assert len(trained) == 3 and tiny.version > 0
    assert trained[0]["staleness"] == 0 and trained[0]["diff_max"] < 1e-3  # the first is on-policy, exactly
    assert all(row["staleness"] <= 3 for row in trained)


async def test_one_trainer_at_a_time_gets_whole_batches(api):
    trainer = AtroposTrainer(api, batch_size=4, max_token_len=64, timeout=0.5)
    for same in (trainer, AtroposTrainer(api, batch_size=4, max_token_len=64, timeout=0.5, name=trainer.name)):
        with pytest.raises(RemoteError, match="gave no batch in 0.5 s, with 0 groups"):
            await same.batch()  # registers; the other one is a later start of the same
    for batch_size in (8, 4):  # equal numbers too: both would share the groups
        with pytest.raises(RemoteError, match=f"another trainer, .'batch_size': 4, .*where this one is .*{batch_size}"):
            await AtroposTrainer(api, batch_size=batch_size, max_token_len=64).batch()
    post = await environment(api, 2)
    await post(ITEM)
    with pytest.raises(RemoteError, match="gave no batch in 0.5 s, with 1 groups"):
        await trainer.batch()
    await post(ITEM | {"scores": [2.0, 2.0]})
    batch = await trainer.batch()
    assert sorted(item["scores"] for item in batch) == [[1.0, 0.0], [2.0, 2.0]]
    assert [as_group(item, 100, 1.0)[0].tokens for item in batch] == [(7, 8, 9, 1)] * 2


async def test_an_api_that_is_away_or_started_again(monkeypatch):
    """By what it answers: away before a trainer registered and while one does again, without a trainer, set up by a group that
    came first, with another trainer."""
    ours = {"batch_size": 4, "max_token_len": 64, "group": "me"}
    held, away, asked = {}, [], []

    async def ask(self, method, path, body=None):
        asked.append(path)
        if away and away.pop():
            raise NoAnswer(f"{path} gave no answer")
        if path == "/register" and not held:
            held.update(ours)
        if path == "/reset_data":
            held.clear()
        batch = {"status": "error"} if not held else {"batch": [ITEM] if asked.count("/batch") > 3 else None}
        return {"/batch": batch, "/info": dict(held), "/status": {"queue_size": 3}}.get(path, {})

    monkeypatch.setattr(Caller, "ask", ask)
    monkeypatch.setattr("grpolab.serve.atropos.POLL", 0.01)
    trainer, later = (AtroposTrainer("http://h", batch_size=4, max_token_len=64, timeout=0.2, name="me") for _ in range(2))
    away[:] = [True]
    with pytest.raises(NoAnswer, match="/register gave no answer"):  # nothing to wait for: it was never there
        await trainer.batch()
    assert await trainer.batch() == [ITEM] and asked.count("/register") == 2 and held == ours
    held.clear()
    away[:] = [True, False, True, True]  # the last one first
    with pytest.warns(UserWarning, match="was started again, so this trainer registers anew") as warned:
        assert await trainer.batch() == [ITEM]
    assert len(warned) == 1 and held == ours and asked.count("/register") == 4
    away[:] = [True] * 10**6
    with pytest.raises(RemoteError, match="was away for 0.2 s"):
        await trainer.batch()
    assert await trainer.queued() == 0
    away.clear()
    held.clear()
    held["batch_size"] = -1  # of a group that came before the trainer did
    assert await later.batch() == [ITEM]
    assert held == ours and "/reset_data" in asked
    held["group"] = "other"
    with pytest.raises(RemoteError, match="goes on with another trainer"):
        await AtroposTrainer("http://h", batch_size=4, max_token_len=64).batch()


@pytest.mark.full
async def test_training_goes_on_where_the_real_api_is_killed_and_started_again(tiny):
    """Also where a group reaches the new one before the trainer does."""
    port, config = free_port(), GRPOConfig(steps=3, lr=1e-3, max_new_tokens=8, group_size=2, prompts_per_step=1)
    url, process = f"http://127.0.0.1:{port}", started_api(port)
    group = tiny_group(tiny)

    async def posts():
        post = await environment(url, 2)
        while True:
            with contextlib.suppress(RemoteError):
                await post(scored(group))
            await asyncio.sleep(0.1)

    try:
        trainer = AtroposTrainer(url, batch_size=2, max_token_len=64, timeout=60)
        posting = asyncio.ensure_future(posts())
        rows = []
        with pytest.warns(UserWarning, match="was started again"):
            wide = replace(config, max_logp_diff=None)
            async for row in grpo_from(tiny, None, atropos_source(trainer, tiny, wide), wide, longest=64):
                rows.append(row)
                if len(rows) == 1:
                    process.kill()
                    process.wait()
                    process = await asyncio.to_thread(started_api, port)
        posting.cancel()
        await asyncio.wait([posting])
    finally:
        process.kill()
        process.wait()
    assert [row["step"] for row in rows] == [0, 1, 2]


def tiny_group(policy):
    """Two rollouts of made-up tokens with their log-probs."""
    rollouts = [Rollout((5, 6), tokens, (1,) * 4, (0.0,) * 4, (0.0,) * 4, "length") for tokens in ((7, 8, 9, 10), (8, 7, 9, 9))]
    logps = [tuple(min(0.0, x) for x in line) for line in trainer_logps(policy, rollouts, GRPOConfig())]
    rollouts = [replace(r, logps=x, raw_logps=x) for r, x in zip(rollouts, logps)]
    return Group(tuple(rollouts)).with_rewards([1.0, 0.0])
