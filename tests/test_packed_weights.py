"""The products of the llama engine where torch lacks the private operations that make them fast, and without copies."""

import pytest
import torch
from decode_helpers import flat, ragged_prompts, tiny_policy
from torch import nn

from grpolab.decode.audit import audit
from grpolab.decode.engines import llama
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import load_policy
from grpolab.train.plan import packed_bytes


class Without:
    """`torch.ops.mkldnn` of another release: an operation missing, or one that takes other arguments."""

    def __init__(self, *names, change=None):
        self.names, self.change = names, change

    def __getattr__(self, name):
        if name in self.names:
            if self.change is None:
                raise AttributeError(name)
            return self.change
        return getattr(torch.ops.mkldnn, name)


def other_arguments(*_):
    raise TypeError("missing 1 required positional argument")


@pytest.fixture(params=["no repacking", "no product", "another signature"])
def another_torch(request, monkeypatch):
    lacks = {"no repacking": Without("_reorder_linear_weight"), "no product": Without("_linear_pointwise"),
             "another signature": Without("_linear_pointwise", change=other_arguments)}[request.param]
    monkeypatch.setattr(llama, "private_operations", lambda: lacks)


def test_the_engine_without_private_operations_gives_the_same_rollouts(another_torch):
    policy = tiny_policy(attention_bias=True, mlp_bias=True)
    with Sampler(policy, slots=4, engine="llama") as sampler:
        assert sampler.engine.products()[0].packed is None
        shared = [m for layer in policy.model.model.layers for m in (layer.self_attn.o_proj, layer.mlp.down_proj)]
        products = [m for m in policy.model.modules() if isinstance(m, nn.Linear)]
        assert packed_bytes(sampler.engine) == sum(m.weight.nbytes for m in products) - sum(m.weight.nbytes for m in shared)
        rollouts = flat(sampler.sample_sync(ragged_prompts(4), params=SamplingParams(greedy=True, max_new_tokens=30)))
    found = audit(policy, rollouts)
    assert found.disagreements == 0 and found.max_error < 1e-4


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_without_copies_reads_the_weights_themselves(slots, dtype):
    """Also after an edit that nobody tells it of."""
    policy, params = load_policy("tiny", dtype=dtype), SamplingParams(greedy=True, max_new_tokens=12)
    with Sampler(policy, slots=slots, engine="unpacked") as sampler:
        assert sampler.engine.name == "llama"
        found = audit(policy, flat(sampler.sample_sync(ragged_prompts(4), params=params)))
        assert found.max_error < (1e-4 if dtype == "float32" else 0.2)
        x = torch.randn(2, policy.model.config.hidden_size).to(policy.dtype)
        out = sampler.engine.layer_products[0][1]
        before = out(x)
        with torch.no_grad():
            policy.model.model.layers[0].self_attn.o_proj.weight.mul_(2)
        assert torch.equal(out(x), 2 * before)
