"""Turns that are cancelled, fail or fill the context leave the conversation whole."""

import asyncio
from contextlib import nullcontext

import pytest
import torch
from decode_helpers import ragged_prompts, tiny_policy

from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.sync import run_sync

TURN = SamplingParams(max_new_tokens=12)


async def test_a_turn_feeds_only_what_is_new_and_joins_the_batch():
    """Six exchanges together give what each gives alone; of a later turn the ids and one drawn token are fed."""
    policy, given = tiny_policy(), ragged_prompts(3, 5, 40, seed=9)

    async def exchange(sampler, seed):
        conversation = sampler.conversation(seed=seed)
        for ids in given:
            await conversation.sample(ids, TURN)
        return conversation

    async with Sampler(policy, slots=8) as sampler:
        together = [c.rollout() for c in await asyncio.gather(*(exchange(sampler, i) for i in range(6)))]
        steps, fed = sampler.stats.steps, sampler.stats.prefill_tokens
        alone = [await exchange(sampler, i) for i in range(6)]
        assert fed == 6 * (sum(map(len, given)) + 2) and steps < sampler.stats.steps - steps
    assert together == [c.rollout() for c in alone] and audit(policy, together).max_error <= 1e-4
    one, (_, second, third) = alone[0], given
    first, *later = one.turns
    assert one.rollout().prompt == tuple(given[0]) == first.prompt
    assert one.rollout().tokens == first.tokens + tuple(second) + later[0].tokens + tuple(third) + later[1].tokens
    assert one.rollout().mask == (1,) * 12 + (0,) * len(second) + (1,) * 12 + (0,) * len(third) + (1,) * 12
    assert len({t.tokens for t in one.turns}) == 3


@pytest.mark.parametrize("fault", ["cancelled", "failed"])
@pytest.mark.parametrize("first", [True, False])
async def test_a_turn_that_does_not_end_leaves_the_conversation_as_it_was(first, fault, monkeypatch):
    policy = tiny_policy(context=1024)
    one, two, three = ragged_prompts(3, 5, 20, seed=2)
    before = [] if first else [one]

    async with Sampler(policy, slots=4) as sampler:
        conversation, plain = sampler.conversation(seed=4), sampler.conversation(seed=4)
        for ids in before:
            await conversation.sample(ids, TURN)
        drawn = sampler.stats.new_tokens
        with monkeypatch.context() as patch:
            patch.setattr(policy.tokenizer, "decode", lambda ids: 1 / 0, raising=False)
            strings = ("x",) if fault == "failed" else ()
            lost = asyncio.create_task(conversation.sample(two, SamplingParams(max_new_tokens=500, stop_strings=strings)))
            while sampler.stats.new_tokens < drawn + 8 and not lost.done():
                await asyncio.sleep(0.001)
            with pytest.raises(RuntimeError, match="still being sampled") if fault == "cancelled" else nullcontext():
                await conversation.sample([3], TURN) if fault == "cancelled" else None
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
        for ids in (*before, three):
            await plain.sample(ids, TURN)
        await conversation.sample(three, TURN)
        turn = asyncio.create_task(plain.sample([1], TURN))
        await asyncio.sleep(0)
        plain.close()
        await turn
        with pytest.raises(RuntimeError, match="closed"):
            await plain.sample([3])
    assert audit(policy, [conversation.rollout()]).max_error <= 1e-4
    assert [t.tokens for t in conversation.turns] == [t.tokens for t in plain.turns[:-1]]


@pytest.mark.parametrize("most", [500, 54])
def test_a_turn_that_fills_the_context_says_so_and_the_next_is_refused(most):
    """54 = what is left: the turn ends for both reasons, and the one that rules out another turn is told."""
    policy = tiny_policy(context=64)
    with Sampler(policy) as sampler:
        conversation = sampler.conversation(seed=0)
        assert conversation.room == 63
        turn = run_sync(conversation.sample([1] * 10, SamplingParams(max_new_tokens=most)))
        assert len(turn.tokens) == 54 and turn.finish_reason == "context" and conversation.room == 0
        whole = conversation.rollout()
        for ids in ([], [5], [5] * 100):
            with pytest.raises(ValueError, match="holds 64 of the context's 64 tokens"):
                run_sync(conversation.sample(ids))
        assert conversation.rollout() is whole
        short = sampler.conversation(seed=0)
        run_sync(short.sample([1] * 10, SamplingParams(max_new_tokens=20)))
        assert short.room == 33
        with pytest.raises(ValueError, match="34 more"):
            run_sync(short.sample([1] * 34))
        assert run_sync(short.sample([1] * 33)).finish_reason == "context"


async def test_a_turn_that_saw_two_versions_of_the_weights_keeps_nothing():
    """Its first keys are of the old ones: the next turn reads the whole conversation anew."""
    policy = tiny_policy(context=1024)

    def update():
        with torch.no_grad():
            policy.model.model.layers[0].self_attn.k_proj.weight.neg_()
        policy.version += 1

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
    assert audit(policy, [second]).disagreements == 0
