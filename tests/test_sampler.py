"""The sampler against full recompute, and its promises to concurrent callers."""

import asyncio
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpolab.models import Policy
from grpolab.sampler import Sampler
from grpolab.sampling import SamplingParams

VOCAB = 100


def tiny_policy(context=256, eos=(), seed=0, **config):
    torch.manual_seed(seed)
    shape = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=176,
                 vocab_size=VOCAB, max_position_embeddings=context, tie_word_embeddings=True, initializer_range=0.3)
    model = LlamaForCausalLM(LlamaConfig(**shape | config)).eval()
    return Policy(model, None, "tiny", tuple(eos))


def ragged_prompts(n, low=3, high=40, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(low, high))] for _ in range(n)]


@torch.no_grad()
def recompute(model, prompt, new_tokens):
    """Greedy tokens by full recompute: no cache, no padding, one row."""
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt):])


@torch.no_grad()
def forward_logps(model, rollout, temperature=1.0):
    ids = torch.tensor([rollout.prompt + rollout.tokens])
    table = (model(ids).logits.float()[0, :-1] / temperature).log_softmax(-1)
    return table.gather(1, ids[0, 1:, None]).squeeze(1)[len(rollout.prompt) - 1:]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture
def sampler(policy):
    with Sampler(policy, slots=6) as sampler:
        yield sampler


def test_greedy_equals_full_recompute(policy, sampler):
    prompts = ragged_prompts(10)
    groups = sampler.sample_sync(prompts, group_size=2, params=SamplingParams(greedy=True, max_new_tokens=40))
    for prompt, group in zip(prompts, groups):
        expected = recompute(policy.model, prompt, 40)
        assert [r.tokens for r in group] == [expected, expected]
        assert group[0].finish_reason == "length" and group[0].mask == (1,) * 40


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_equal_the_forward(policy, sampler, temperature):
    params = SamplingParams(temperature=temperature, max_new_tokens=30, seed=1)
    for group in sampler.sample_sync(ragged_prompts(5), group_size=3, params=params):
        for r in group:
            error = (torch.tensor(r.logps) - forward_logps(policy.model, r, temperature)).abs()
            raw_error = (torch.tensor(r.raw_logps) - forward_logps(policy.model, r)).abs()
            assert max(error.max(), raw_error.max()) <= 1e-4 and max(error.mean(), raw_error.mean()) <= 1e-5


def test_a_rollout_does_not_depend_on_its_batch(policy, sampler):
    prompts, params = ragged_prompts(7), SamplingParams(max_new_tokens=30, seed=3)
    together = sampler.sample_sync(prompts, group_size=4, params=params)
    with Sampler(policy, slots=64) as wide:
        assert wide.sample_sync(prompts, group_size=4, params=params) == together
    rollout = together[5][2]
    alone = sampler.submit([rollout.prompt], params=params, seeds=[[rollout.seed]]).result()[0][0]
    assert alone == rollout  # tokens, logps, raw_logps: bitwise
    assert len({r.tokens for r in together[5]}) == 4


def test_stop_ids_end_a_rollout_and_are_kept(policy, sampler):
    prompt = ragged_prompts(1)[0]
    free = sampler.sample_sync([prompt], params=SamplingParams(max_new_tokens=30, seed=2))[0][0]
    stop = free.tokens[10]
    first = free.tokens.index(stop)
    cut = sampler.sample_sync([prompt], params=SamplingParams(max_new_tokens=30, seed=2, stop_ids=(stop,)))[0][0]
    assert cut.finish_reason == "stop_id" and cut.tokens == free.tokens[: first + 1]
    assert cut.logps == free.logps[: first + 1] and cut.mask[-1] == 1


def test_eos_and_context(policy):
    policy = tiny_policy(context=64, eos=(7,))
    with Sampler(policy) as sampler:
        groups = sampler.sample_sync(ragged_prompts(4), group_size=8, params=SamplingParams(max_new_tokens=500, seed=0))
    rollouts = [r for g in groups for r in g]
    assert {r.finish_reason for r in rollouts} == {"eos", "context"}
    for r in rollouts:
        assert (r.tokens[-1] == 7) == (r.finish_reason == "eos") and 7 not in r.tokens[:-1]
        assert len(r.prompt) + len(r.tokens) <= 64 and (r.finish_reason == "eos" or len(r.prompt) + len(r.tokens) == 64)


def test_concurrent_callers_share_the_batch(policy):
    async def main():
        async with Sampler(policy, slots=64) as sampler:
            params = [SamplingParams(max_new_tokens=20, seed=i) for i in range(8)]
            prompts = ragged_prompts(8)
            many = await asyncio.gather(*(sampler.sample([p], group_size=2, params=q) for p, q in zip(prompts, params)))
            steps = sampler.stats.steps
            one_by_one = [await sampler.sample([p], group_size=2, params=q) for p, q in zip(prompts, params)]
            return many, one_by_one, steps

    many, one_by_one, steps = asyncio.run(main())
    assert many == one_by_one
    assert steps < 8 * 19


def test_weights_changed_in_place_are_seen(policy):
    policy = tiny_policy()
    prompt = ragged_prompts(1)[0]
    with Sampler(policy) as sampler:
        before = sampler.sample_sync([prompt], params=SamplingParams(greedy=True))[0][0]
        with torch.no_grad():
            for p in policy.model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        policy.version += 1
        after = sampler.sample_sync([prompt], params=SamplingParams(greedy=True))[0][0]
    assert after.policy_version == 1 and before.policy_version == 0
    assert after.tokens == recompute(policy.model, prompt, 64) != before.tokens
