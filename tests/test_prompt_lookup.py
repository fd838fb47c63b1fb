"""Prompt lookup: drafts from earlier text change how many steps are taken, never what is sampled."""

import pytest
import torch
from decode_helpers import COMPILER, flat, ragged_prompts, tiny_policy

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.sync import run_sync


def repetitive_policy(dtype=torch.float32):
    """Token t < 16 mostly comes before (t + 1) % 8, so that text repeats with some surprises."""
    policy = tiny_policy(dtype=dtype, tie_word_embeddings=False)
    embedding, head = policy.model.get_input_embeddings().weight.data, policy.model.lm_head.weight.data
    embedding *= 40
    head *= 0.2
    for t in range(16):
        head[(t + 1) % 8] += embedding[t] / embedding[t].norm() * 2
    return policy


needs_compiler = pytest.mark.skipif(not COMPILER, reason="no g++ here")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_sampled_is_what_is_sampled_without_it(dtype):
    """Also where rows end within a draft by an end token, a stop id, the limit or the context, enter and leave, and prompts
    are shared; in every bit."""
    policy = repetitive_policy(dtype)
    repeated = [p * 6 for p in ragged_prompts(7, 3, 12)]
    params = [SamplingParams(max_new_tokens=60, seed=1, stop_ids=(15,)),
              SamplingParams(greedy=True, max_new_tokens=33),
              SamplingParams(temperature=0.5, top_k=5, max_new_tokens=200, seed=2, ignore_eos=True)]
    found = []
    for lookup in (0, 4, 16):
        with Sampler(policy, slots=5, engine="compiled", lookup=lookup) as sampler:
            requests = [sampler.submit(repeated, group_size=2, params=p) for p in params]
            found.append([flat(r.result()) for r in requests])
            stats = sampler.stats
            assert bool(stats.drafted) == bool(lookup) and stats.accepted <= stats.drafted
    assert found[0] == found[1] == found[2]
    assert stats.accepted > 100  # else the test has seen nothing


@needs_compiler
def test_text_that_repeats_takes_fewer_steps_and_is_streamed_whole():
    policy, prompt, steps, streamed = repetitive_policy(), [[4, 5, 6, 7] * 8], [], []
    for lookup in (0, 8):
        with Sampler(policy, slots=2, lookup=lookup) as sampler:
            request = sampler.submit(prompt, params=SamplingParams(greedy=True, max_new_tokens=80, ignore_eos=True),
                                     on_tokens=lambda i, g, tokens, logps: streamed.extend(tokens))
            rollout = request.result()[0][0]
            assert tuple(streamed) == rollout.tokens
            streamed.clear()
            steps.append(sampler.stats.steps)
    assert steps[1] < 0.6 * steps[0]


@needs_compiler
def test_a_conversation_goes_on_from_what_drafts_left_in_the_cache():
    policy, rollouts = repetitive_policy(), []
    for lookup in (0, 8):
        with Sampler(policy, slots=2, lookup=lookup) as sampler:
            conversation = sampler.conversation(seed=3)
            for turn in ([4, 5, 6] * 9, [7, 4, 5, 6], [8, 4, 5, 6]):
                run_sync(conversation.sample(turn, SamplingParams(max_new_tokens=30)))
            rollouts.append(conversation.rollout())
    assert rollouts[0] == rollouts[1]


def test_where_it_cannot_work_it_is_refused():
    policy = tiny_policy()
    with pytest.raises(ValueError, match="lookup must be from 0"):
        Sampler(policy, lookup=17)
    with pytest.raises(ValueError, match="leave one of them out"):
        Sampler(policy, lookup=2, exact=True)
    with Sampler(policy, lookup=2, engine="llama") as sampler:
        with pytest.raises(ValueError, match="needs the compiled engine.*LlamaEngine"):
            sampler.sample_sync([[1, 2]])
