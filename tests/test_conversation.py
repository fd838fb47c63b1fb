"""Turns that are cancelled, fail or fill the context leave the conversation whole."""

import asyncio

import pytest
import torch
from decode_helpers import ragged_prompts, tiny_policy

from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams

TURN = SamplingParams(max_new_tokens=12)


def exchange(conversation, turns):
    for ids in turns:
        conversation.sample_sync(ids, TURN)
    return conversation.rollout()


@pytest.mark.parametrize("first", [True, False])
def test_a_cancelled_turn_leaves_the_conversation_as_it_was(first):
    policy = tiny_policy(context=1024)
    one, two, three = ragged_prompts(3, 5, 20, seed=2)
    before = [] if first else [one]

    async def main():
        async with Sampler(policy, slots=4) as sampler:
            conversation = sampler.conversation(seed=4)
            for ids in before:
                await conversation.sample(ids, TURN)
            drawn = sampler.stats.new_tokens
            lost = asyncio.create_task(conversation.sample(two, SamplingParams(max_new_tokens=500)))
            while sampler.stats.new_tokens < drawn + 8:
                await asyncio.sleep(0.001)
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
            turn = await conversation.sample(three, TURN)
            plain = sampler.conversation(seed=4)
            for ids in (*before, three):
                await plain.sample(ids, TURN)
            return conversation, plain, turn

    conversation, plain, turn = asyncio.run(main())
    assert audit(policy, [conversation.rollout()]).max_error <= 1e-4
    assert len(conversation.turns) == len(before) + 1 and turn.prompt[-len(three):] == tuple(three)
    assert conversation.rollout() == plain.rollout()


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(monkeypatch):
    policy = tiny_policy()
    one, two, three = ragged_prompts(3, 5, 20, seed=2)
    with Sampler(policy) as sampler:
        conversation = sampler.conversation(seed=4)
        conversation.sample_sync(one, TURN)
        with monkeypatch.context() as patch:
            patch.setattr(policy.tokenizer, "decode", lambda ids: 1 / 0, raising=False)
            with pytest.raises(ZeroDivisionError):
                conversation.sample_sync(two, SamplingParams(max_new_tokens=12, stop_strings=("x",)))
        conversation.sample_sync(three, TURN)
        assert conversation.rollout() == exchange(sampler.conversation(seed=4), [one, three])


@pytest.mark.parametrize("most", [500, 54])
def test_a_turn_that_fills_the_context_says_so_and_the_next_is_refused(most):
    """54 = what is left: the turn ends for both reasons, and the one that rules out another turn is told."""
    policy = tiny_policy(context=64)
    with Sampler(policy) as sampler:
        conversation = sampler.conversation(seed=0)
        assert conversation.room == 63
        turn = conversation.sample_sync([1] * 10, SamplingParams(max_new_tokens=most))
        assert len(turn.tokens) == 54 and turn.finish_reason == "context" and conversation.room == 0
        whole = conversation.rollout()
        for ids in ([], [5], [5] * 100):
            with pytest.raises(ValueError, match="holds 64 of the context's 64 tokens"):
                conversation.sample_sync(ids)
        assert conversation.rollout() is whole
        short = sampler.conversation(seed=0)
        short.sample_sync([1] * 10, SamplingParams(max_new_tokens=20))
        assert short.room == 33
        with pytest.raises(ValueError, match="34 more"):
            short.sample_sync([1] * 34)
        assert short.sample_sync([1] * 33).finish_reason == "context"


def test_a_turn_that_saw_two_versions_of_the_weights_keeps_nothing():
    """Its first keys are of the old ones: the next turn reads the whole conversation anew."""
    policy = tiny_policy(context=1024)

    def update():
        with torch.no_grad():
            policy.model.model.layers[0].self_attn.k_proj.weight.neg_()
        policy.version += 1

    async def main():
        async with Sampler(policy) as sampler:
            conversation = sampler.conversation(seed=0)
            turn = asyncio.create_task(conversation.sample([1, 2, 3], SamplingParams(max_new_tokens=300)))
            while sampler.stats.new_tokens < 20:
                await asyncio.sleep(0.001)
            await sampler.run(update)
            assert len((await turn).tokens) == 300 and sampler.stats.refreshes == 1
            fed = sampler.stats.prefill_tokens
            second = await conversation.sample([4], SamplingParams(max_new_tokens=20, greedy=True))
            assert sampler.stats.prefill_tokens - fed == 304
            return second

    second = asyncio.run(main())
    assert audit(policy, [second]).disagreements == 0


def test_a_conversation_closed_during_a_turn_stays_closed():
    policy = tiny_policy()

    async def main():
        async with Sampler(policy) as sampler:
            conversation = sampler.conversation(seed=0)
            turn = asyncio.create_task(conversation.sample([1, 2], TURN))
            await asyncio.sleep(0)
            conversation.close()
            await turn
            with pytest.raises(RuntimeError, match="closed"):
                await conversation.sample([3])
            return conversation.rollout()

    assert len(asyncio.run(main()).tokens) == 12
