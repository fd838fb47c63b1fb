"""The plan before a run: what it counts, what its probe leaves alone, and how it compares with what was measured."""

import dataclasses

import pandas as pd
import pytest
import torch

from grpolab.models.load import load_policy
from grpolab.train import DPOConfig, GRPOConfig, SFTConfig, losses
from grpolab.train.plan import STATE, Plan, plan

CONFIG = GRPOConfig(steps=10, prompts_per_step=2, group_size=4, max_new_tokens=8, kl_coef=0.1)


@pytest.fixture(scope="module")
def tiny():
    return load_policy("tiny")


def test_it_counts_what_it_can_count_and_leaves_the_policy_as_it_was(tiny):
    reference, size = load_policy("tiny"), sum(p.numel() * 4 for p in tiny.model.parameters())
    before = [p.detach().clone() for p in tiny.model.parameters()]
    found = plan(tiny, CONFIG, reference=reference, prompt_tokens=8)
    memory = found.memory
    assert memory["parameters"] == memory["gradients"] == memory["reference"] == size
    assert memory["optimiser (adamw)"] == 2 * size
    config = tiny.model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert memory["KV cache"] == 8 * 16 * token
    products = [m for m in tiny.model.modules() if isinstance(m, torch.nn.Linear)]
    assert memory["sampler's packed weights"] == sum(m.weight.numel() * 4 for m in products) > 0.9 * size
    assert memory["activations"] > 0 and found.hours > 0 and set(found.tokens_per_s) == {"sampled", "updated"}
    assert found.total == sum(memory.values())
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.model.parameters())) and tiny.version == 0
    assert all(p.grad is None for p in tiny.model.parameters())


def test_frozen_parameters_have_no_gradient_and_no_state():
    policy = load_policy("tiny")
    head = policy.model.get_input_embeddings().weight
    for p in policy.model.parameters():
        p.requires_grad_(p is head)
    memory = plan(policy, SFTConfig(steps=2, batch_size=2), prompt_tokens=4, completion_tokens=4).memory
    assert memory["gradients"] == head.numel() * 4 and memory["optimiser (adamw)"] == 2 * head.numel() * 4


def test_the_state_of_each_optimiser_is_what_it_really_keeps(tiny):
    policy = load_policy("tiny")
    for p in policy.model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser = torch.optim.AdamW(policy.model.parameters())
    optimiser.step()
    kept = sum(t.numel() * t.element_size() for s in optimiser.state.values() for t in s.values() if t.dim())
    assert kept == sum(p.numel() * STATE["adamw"](4) for p in policy.model.parameters())


@pytest.mark.parametrize("config", [SFTConfig(steps=1, batch_size=64, token_budget=2048),
                                    GRPOConfig(steps=1, prompts_per_step=8, max_new_tokens=16, token_budget=2048)])
def test_the_estimate_from_a_small_probe_equals_a_pass_in_full(tiny, config, monkeypatch):
    small = plan(tiny, config, prompt_tokens=16, completion_tokens=16).memory["activations"]
    monkeypatch.setattr("grpolab.train.plan.PROBE_TOKENS", 2048)  # the whole pass is run and nothing is scaled
    assert small == pytest.approx(plan(tiny, config, prompt_tokens=16, completion_tokens=16).memory["activations"], rel=0.1)


@pytest.mark.parametrize("config", [SFTConfig(steps=1, batch_size=64),
                                    GRPOConfig(steps=1, prompts_per_step=8, max_new_tokens=16)])
def test_a_smaller_pass_keeps_less_although_the_probe_is_larger(tiny, config):
    few, many = (plan(tiny, dataclasses.replace(config, token_budget=b), prompt_tokens=16, completion_tokens=16)
                 for b in (256, 2048))
    assert many.memory["activations"] == pytest.approx(8 * few.memory["activations"], rel=0.01)


def test_no_more_logits_are_counted_than_a_pass_keeps(tiny, monkeypatch):
    """The probe's fit a chunk that is kept; four times as many may not."""
    config, found = GRPOConfig(steps=1, prompts_per_step=8, max_new_tokens=16, token_budget=2048), {}
    probed = 512 // 32 * 16 * tiny.model.get_output_embeddings().weight.shape[0] * 4
    for bound in (0, probed, 2**40):
        monkeypatch.setattr(losses, "KEPT_BYTES", bound)
        found[bound] = plan(tiny, config, prompt_tokens=16, completion_tokens=16).memory["activations"]
    assert found[probed] - found[0] == pytest.approx(probed, rel=0.01)
    assert found[2**40] - found[0] == pytest.approx(2048 / 512 * probed, rel=0.01)


def test_pairs_are_two_rows(tiny):
    assert "64 a step" in plan(tiny, DPOConfig(steps=1, batch_size=32), prompt_tokens=4, completion_tokens=4).notes[0]


@pytest.mark.parametrize("lengths", [{"prompt_tokens": 0}, {"completion_tokens": 0}, {"prompt_tokens": 10_000}])
def test_lengths_that_no_row_has_are_refused(tiny, lengths):
    with pytest.raises(ValueError, match="does not fit the context of 512"):
        plan(tiny, CONFIG, **lengths)


def test_what_was_measured_stands_beside_the_plan():
    planned = Plan({"parameters": 3 * 2**20}, {"sampled": 100.0, "updated": 50.0}, 0.5, ("a note",))
    rows = pd.DataFrame({"sampling_s": [600.0], "update_s": [300.0], "sampled_tokens_per_s": [200.0],
                         "updated_tokens_per_s": [50.0]})
    table = planned.compare(rows, peak=6 * 2**20)
    assert table.loc["memory", "planned / measured"] == 0.5
    assert table.loc["time of the run", "planned / measured"] == 2.0
    assert table.loc["sampled tokens/s", "planned / measured"] == 0.5
    assert "3.0 MiB" in str(planned) and "30.0 min" in str(planned) and "a note" in str(planned)
