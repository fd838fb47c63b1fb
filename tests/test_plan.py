"""The plan before a run: what it counts, what its probe leaves alone, and how it compares with what was measured."""

import dataclasses

import pandas as pd
import pytest
import torch

from grpolab.models.load import load_policy
from grpolab.train import AsyncGRPOConfig, DistilConfig, GRPOConfig, SFTConfig
from grpolab.train.plan import STATE, Plan, plan

CONFIG = GRPOConfig(steps=10, prompts_per_step=2, group_size=4, max_new_tokens=8, kl_coef=0.1)


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


def test_the_state_of_adamw_is_what_it_really_stores_of_trained_parameters(tiny):
    head = tiny.model.get_input_embeddings().weight
    tiny.model.requires_grad_(False)
    head.requires_grad_(True)
    memory = plan(tiny, SFTConfig(steps=2, batch_size=2), prompt_tokens=4, completion_tokens=4).memory
    head.grad = torch.zeros_like(head)
    optimiser = torch.optim.AdamW([head])
    optimiser.step()
    stored = sum(t.numel() * t.element_size() for s in optimiser.state.values() for t in s.values() if t.dim())
    assert memory["optimiser (adamw)"] == stored == head.numel() * STATE["adamw"] and memory["gradients"] == head.numel() * 4


@pytest.mark.parametrize("config", [SFTConfig(steps=1, batch_size=64, token_budget=2048),
                                    GRPOConfig(steps=1, prompts_per_step=8, max_new_tokens=16, token_budget=2048)])
def test_activations_scale_with_the_pass_as_the_whole_pass_has_them(tiny, config, monkeypatch):
    def activations(budget):
        changed = dataclasses.replace(config, token_budget=budget)
        return plan(tiny, changed, prompt_tokens=16, completion_tokens=16).memory["activations"]

    probed = activations(2048)
    assert probed == pytest.approx(8 * activations(256), rel=0.01)
    monkeypatch.setattr("grpolab.train.plan.PROBE_TOKENS", 2048)  # the whole pass is run and nothing is scaled
    assert probed == pytest.approx(activations(2048), rel=0.1)


def test_the_copy_of_an_asynchronous_sampler_counts_and_what_has_no_plan_is_refused(tiny):
    config = AsyncGRPOConfig(steps=2, prompts_per_step=2, group_size=4, max_new_tokens=8)
    memory = plan(tiny, config, prompt_tokens=8).memory
    assert memory["sampler's copy"] == memory["parameters"]
    with pytest.raises(ValueError, match="no plan of a DistilConfig"):
        plan(tiny, DistilConfig(steps=2), prompt_tokens=8)


@pytest.mark.parametrize("lengths", [{"prompt_tokens": 0}, {"completion_tokens": 0}, {"prompt_tokens": 10_000}])
def test_lengths_that_no_row_has_are_refused(tiny, lengths):
    with pytest.raises(ValueError, match="does not fit the context of 512"):
        plan(tiny, CONFIG, **lengths)


def test_what_was_measured_stands_beside_the_plan():
    planned = Plan({"parameters": 3 * 2**20}, {"sampled": 100.0, "updated": 50.0}, 0.5, "a note")
    rows = pd.DataFrame({"sampling_s": [600.0], "update_s": [300.0], "sampled_tokens_per_s": [200.0],
                         "updated_tokens_per_s": [50.0]})
    table = planned.compare(rows, peak=6 * 2**20)
    assert table["planned / measured"].to_dict() == {
        "memory": 0.5, "time of the run": 2.0, "sampled tokens/s": 0.5, "updated tokens/s": 1.0}
    assert "3.0 MiB" in str(planned) and "30.0 min" in str(planned) and "a note" in str(planned)
