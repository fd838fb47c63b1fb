"""Whatever changes a policy's model, the sampler's next rollouts are the changed model's."""

import pytest
import torch
from decode_helpers import flat, ragged_prompts, tiny_policy
from torch import nn

from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.decode.snapshot import checksum

GREEDY = SamplingParams(greedy=True, max_new_tokens=12, seed=0)
PROMPTS = ragged_prompts(3)


class Adapted(nn.Module):
    """A linear layer with a low-rank update beside it, as adapter libraries put in its place."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def inject(policy):
    for layer in policy.model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)


def new_head(policy):
    policy.model.lm_head = nn.Linear(64, 100, bias=False)


def new_parameter(policy):
    policy.model.model.norm.weight = nn.Parameter(torch.rand(64) + 0.5)


def hook(policy):
    policy.model.model.layers[1].register_forward_hook(lambda module, args, out: -out)


def own_forward(policy):
    mlp = policy.model.model.layers[0].mlp
    mlp.forward = lambda x: -x


def other_model(policy):
    policy.model = tiny_policy(seed=5).model


def edit_data(policy):
    policy.model.model.layers[2].mlp.up_proj.weight.data[3] *= -3


def swap_rows(policy):
    weight = policy.model.model.embed_tokens.weight
    weight.data[[5, 6, 7, 8]] = weight.data[[8, 7, 6, 5]]


def move_data(policy):
    weight = policy.model.lm_head.weight
    weight.data = weight.data.flip(0).contiguous()


def count(policy):
    with torch.no_grad():
        policy.model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    policy.version += 1


def double(policy):
    edit_data(policy)
    policy.model.double()


def rotary(policy):
    policy.model.model.rotary_emb.inv_freq *= 2


def scale(policy):
    """A number that the engine read as it was chosen."""
    for layer in policy.model.model.layers:
        layer.self_attn.scaling *= 3


def other_signs(policy):
    """As many sign bits of every row change as do not."""
    policy.model.lm_head.weight.data[:, 1::2] *= -1


CHANGES = {"signs of .data": (other_signs, "llama"), "adapters": (inject, "hf"),
           "a new head": (new_head, "llama"), "a new parameter": (new_parameter, "llama"),
           "a hook": (hook, "hf"), "a forward": (own_forward, "hf"), "another model": (other_model, "llama"),
           ".data in place": (edit_data, "llama"), "rows of .data": (swap_rows, "llama"), "another .data": (move_data, "llama"),
           "a step": (count, "llama"), "another dtype": (double, "llama"), "rotary frequencies": (rotary, "llama"),
           "a number on a module": (scale, "llama")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_every_sign(dtype):
    model = torch.nn.Linear(64, 64, dtype=dtype)
    before = checksum(model)
    for part in ((0, 0), (5, 3), (5, 2), (slice(None), 3), (6, slice(None)), (slice(None), slice(1, None, 2))):
        model.weight.data[part] *= -1
        assert checksum(model) != before, part
        model.weight.data[part] *= -1
    assert checksum(model) == before


def sampled(sampler):
    return flat(sampler.sample_sync(PROMPTS, params=GREEDY))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("engine", ["auto", "hf"])
def test_the_next_rollouts_are_the_changed_models(name, engine):
    change, then = CHANGES[name]
    policy = tiny_policy(tie_word_embeddings=False)
    with Sampler(policy, slots=4, engine=engine) as sampler:
        before = sampled(sampler)
        assert sampled(sampler) == before and sampler.stats.refreshes == 0
        change(policy)
        after = sampled(sampler)
        assert sampler.engine.name == (then if engine == "auto" else "hf") and sampler.stats.refreshes == 1
    assert [r.tokens for r in after] != [r.tokens for r in before]
    found = audit(policy, after)
    assert found.disagreements == 0 and found.raw_max_error < 1e-4


def test_rows_in_progress_end_with_the_engine_they_began_with():
    """A hook is added while a rollout runs: it ends, nobody enters before, and what enters is the hooked model's."""
    policy = tiny_policy()
    with Sampler(policy, slots=4) as sampler:
        expected = flat(sampler.sample_sync([[1, 2, 3]], params=SamplingParams(greedy=True, max_new_tokens=40)))
        long = sampler.submit([[1, 2, 3]], params=SamplingParams(greedy=True, max_new_tokens=40),
                              on_rollout=lambda *_: ended.append(sampler.engine.name))
        ended = []
        while sampler.stats.steps < 45:
            pass
        sampler.run_sync(hook, policy)
        later = sampled(sampler)
        assert ended == ["llama"] and sampler.engine.name == "hf"
    assert flat(long.future.result())[0].tokens == expected[0].tokens
    assert audit(policy, later).disagreements == 0


def test_a_policy_of_nan_is_compared_once_it_is_repaired():
    policy = tiny_policy()
    weight = policy.model.model.norm.weight
    whole = weight.detach().clone()
    weight.data.fill_(torch.nan)
    with Sampler(policy, slots=4) as sampler:
        assert not sampler.engine.verified
        with pytest.raises(FloatingPointError, match="not finite"):
            sampled(sampler)
        weight.data.copy_(whole)
        assert audit(policy, sampled(sampler)).disagreements == 0
        assert sampler.engine.verified


class Wrapped(nn.Module):
    """What PEFT's models look like from outside: a forward of anything, the model one call away."""

    def __init__(self, base):
        super().__init__()
        self.base_model = base

    def get_base_model(self):
        return self.base_model

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


def test_a_wrapped_model_is_sampled_unless_the_wrapper_computes_something_else():
    """As prompt tuning does, whose virtual tokens the model inside does not see."""
    for adapted in (True, False):
        policy = tiny_policy()
        if adapted:
            inject(policy)
        policy.model = Wrapped(policy.model)
        with Sampler(policy, slots=4) as sampler:
            assert sampler.engine.name == ("hf" if adapted else "llama")
            found = audit(policy, sampled(sampler))
        assert found.disagreements == 0 and found.raw_max_error < 1e-4
    wrapped = policy.model
    wrapped.forward = lambda ids, **kwargs: wrapped.base_model((ids + 1) % 100, **kwargs)
    with pytest.raises(ValueError, match="not its own forward"):
        Sampler(policy).engine  # noqa: B018


@pytest.mark.parametrize("inside", [False, True])
def test_models_of_peft_are_sampled(inside):
    import peft
    policy = tiny_policy()
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    with Sampler(policy, slots=4) as sampler:
        before = sampled(sampler)
        if inside:
            policy.model = peft.inject_adapter_in_model(config, policy.model)
        else:
            policy.model = peft.get_peft_model(policy.model, config)
        after = sampled(sampler)
        assert sampler.engine.name == "llama" and [r.tokens for r in after] != [r.tokens for r in before]
        assert audit(policy, after).raw_max_error < 1e-4
        if not inside:
            policy.model = policy.model.merge_and_unload()
            merged = sampled(sampler)
            assert sampler.engine.name == "llama" and audit(policy, merged).raw_max_error < 1e-4
