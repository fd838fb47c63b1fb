"""The optimisers by name, activation checkpointing, and what both leave as it was."""

import asyncio
import copy
import dataclasses
import importlib
import importlib.util

import pytest
import torch

from grpolab.arithmetic import Task, generate
from grpolab.lab.run import Run
from grpolab.models import Policy
from grpolab.train.loop import OPTIMISERS, Optimisation, forward_passes, make_optimiser
from grpolab.train.sft import SFTConfig, demonstrations, sft, sft_gradient

PROBLEMS, _ = generate(24, 0, seed=3, task=Task("+-", max_operand=20))
CONFIG = SFTConfig(steps=5, batch_size=6, lr=1e-3, save_every=1, weight_decay=0.1)
NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(name == "adamw_8bit" and not importlib.util.find_spec("bitsandbytes"),
                                                reason="needs bitsandbytes"))
    for name in OPTIMISERS
]  # fmt: skip


def fresh(tiny):
    return Policy(copy.deepcopy(tiny.model), tiny.tokenizer, "copy", tiny.eos_ids)


def flat(policy):
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def train(policy, config, run=None, stop=None):
    async def walk():
        rows, loop = [], sft(policy, demonstrations(policy, PROBLEMS), config, run=run)
        async for row in loop:
            rows.append(row)
            if len(rows) == stop:
                break
        await loop.aclose()
        return rows

    return asyncio.run(walk())


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(tiny, name):
    config = dataclasses.replace(CONFIG, steps=30, optimiser=name, lr=1e-2 if name == "adafactor" else 2e-3)
    rows = train(tiny, config)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_run_goes_on_bit_for_bit(tiny, tmp_path, name):
    config = dataclasses.replace(CONFIG, optimiser=name)
    whole, cut, again = fresh(tiny), fresh(tiny), fresh(tiny)
    rows = train(whole, config)
    train(cut, config, Run(name, root=tmp_path), stop=3)
    assert len(list((tmp_path / name).glob("checkpoint-*"))) == 1
    resumed = train(again, config, Run(name, root=tmp_path))
    assert [r["step"] for r in resumed] == [3, 4]
    assert torch.equal(flat(whole), flat(again)) and rows[-1]["loss"] == resumed[-1]["loss"]


def test_adamw_is_the_formula(tiny):
    """Decoupled weight decay (arXiv 1711.05101), by hand over three steps."""
    p = next(tiny.model.parameters())
    value, m, v = p.detach().double().clone(), 0.0, 0.0
    config = Optimisation(lr=1e-2, weight_decay=0.1)
    optimiser = make_optimiser(tiny, config)
    for t in range(1, 4):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        p.grad = g
        optimiser.step()
        m, v = 0.9 * m + 0.1 * g.double(), 0.99 * v + 0.01 * g.double() ** 2
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        value = value * (1 - 1e-2 * 0.1) - 1e-2 * step
    assert (p.double() - value).abs().max() < 1e-6


def test_the_missing_extra_is_named(tiny, monkeypatch):
    def gone(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", gone)
    with pytest.raises(ImportError, match=r"adamw_8bit.*grpolab\[8bit\]"):
        make_optimiser(tiny, Optimisation(optimiser="adamw_8bit"))


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(ValueError, match="optimiser must be one of .*adafactor.*'sgd'"):
        Optimisation(optimiser="sgd")


def test_checkpointed_activations_change_no_gradient_and_keep_less(tiny):
    examples, found = demonstrations(tiny, PROBLEMS), []
    for on in (False, True):
        kept = 0

        def keep(x):
            nonlocal kept
            kept += x.numel() * x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            sft_gradient(tiny, examples, dataclasses.replace(CONFIG, checkpoint_activations=on))
        found.append((kept, torch.cat([p.grad.flatten() for p in tiny.model.parameters()])))
        tiny.model.zero_grad()
    (plain, expected), (less, gradient) = found
    assert expected.abs().max() > 1e-3 and torch.equal(expected, gradient)
    assert less < plain  # the recomputation saves again, but a layer at a time; the peak is what the next test measures


def test_only_the_inputs_of_the_layers_live_until_the_backward(tiny):
    """Bytes alive between forward and backward."""
    ids = torch.randint(5, 30, (8, 64))
    alive = {}
    for on in (False, True):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            with forward_passes(tiny, dataclasses.replace(CONFIG, checkpoint_activations=on)):
                out = tiny.model.get_decoder()(ids, use_cache=False).last_hidden_state
        parameters = {p.data_ptr() for p in tiny.model.parameters()}
        storages = [x.untyped_storage() for x in kept if x.data_ptr() not in parameters]
        alive[on] = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        assert out.requires_grad
    assert alive[True] < alive[False] / 4
    assert all("forward" not in vars(m) for m in tiny.model.modules())  # the model is left as it was


def test_a_model_without_such_layers_is_refused(tiny):
    tiny.model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="checkpoint_activations=False"):
        with forward_passes(tiny, Optimisation(checkpoint_activations=True)):
            pass
