"""Several turns of one exchange, whose keys and values stay between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpolab.decode.requests import Prefix, Request
from grpolab.decode.sampling import SamplingParams
from grpolab.rollouts import Rollout


class Conversation:
    """Turns of one exchange: what the policy wrote has mask 1, the ids between its turns have mask 0.

        conversation = sampler.conversation(seed=3)
        turn = await conversation.sample(prompt_ids)             # the first turn's ids are the prompt
        turn = await conversation.sample(observation_ids)        # only the new ids are prefilled
        rollout = conversation.rollout()                         # one token sequence, nothing tokenised twice

    A turn that is cancelled or fails leaves the conversation as it was before it. One that fills the context finishes as
    "context" and is the last: `room` is then 0.
    """

    def __init__(self, sampler, seed: int):
        self.sampler, self.seed, self.turns = sampler, seed, []
        self._prefix: Prefix | None = Prefix()
        self._waiting = False
        self._ids: tuple[int, ...] = ()
        self._rollout: Rollout | None = None

    @property
    def room(self) -> int:
        """How many ids the next turn may add at most, so that one token of an answer still fits the context."""
        return max(0, self.sampler.context - 1 - len(self._ids))

    async def sample(self, ids: Sequence[int], params: SamplingParams | None = None) -> Rollout:
        """Append ids and let the policy answer. Returns this turn's rollout; its prompt is everything before it.

        Raises ValueError where they leave no room for an answer (`room`), RuntimeError while another turn is sampled.
        """
        request = self._submit(ids, params)
        try:
            await request.wait()
        finally:
            self._waiting = False
        return self._append(request)

    def rollout(self) -> Rollout:
        """The whole exchange as one rollout: prompt, then policy turns (mask 1) and the ids between them (mask 0)."""
        if self._rollout is None:
            raise ValueError("the conversation has no turn yet; sample one first")
        return self._rollout

    def close(self) -> None:
        """Free its keys and values."""
        self._prefix = None

    def _submit(self, ids: Sequence[int], params: SamplingParams | None) -> Request:
        if self._prefix is None:
            raise RuntimeError("the conversation is closed; start another with sampler.conversation()")
        if self._waiting:
            raise RuntimeError("a turn of this conversation is still being sampled; await it first")
        if self.turns and (len(ids) > self.room or len(self._ids) >= self.sampler.context):
            raise ValueError(f"the conversation holds {len(self._ids)} of the context's {self.sampler.context} tokens, "
                             f"and {len(ids)} more leave no room for an answer; end it here, its rollout() is whole")
        request = self.sampler.submit([(*self._ids, *ids)], seeds=[[self.seed]], params=params, prefix=self._prefix)
        self._waiting = True
        return request

    def _append(self, request: Request) -> Rollout:
        turn = request.rollouts[0][0]
        self._rollout = turn if self._rollout is None else joined(self._rollout, turn)
        self.turns.append(turn)
        self._ids = turn.prompt + turn.tokens
        if self._prefix is not None:  # it may have been closed meanwhile
            self._prefix = request.prefix
        return turn


def joined(whole: Rollout, turn: Rollout) -> Rollout:
    """A rollout and the turn that goes on from it, as one: the ids between them have mask 0. ValueError where the turn's
    prompt does not begin with all of the rollout."""
    before = whole.prompt + whole.tokens
    if turn.prompt[: len(before)] != before:
        raise ValueError("the turn's prompt does not begin with the rollout that it goes on from; they are two rollouts")
    between = turn.prompt[len(before) :]
    zeros, mass, versions = (0.0,) * len(between), (), ()
    if whole.kept_mass or turn.kept_mass:
        earlier, later = (r.kept_mass or (1.0,) * len(r.tokens) for r in (whole, turn))
        mass = earlier + (1.0,) * len(between) + later
    if whole.versions or turn.versions or whole.policy_version != turn.policy_version:
        versions = whole.token_versions + (turn.policy_version,) * len(between) + turn.token_versions
    return replace(
        whole, tokens=whole.tokens + between + turn.tokens, mask=whole.mask + (0,) * len(between) + turn.mask,
        logps=whole.logps + zeros + turn.logps, raw_logps=whole.raw_logps + zeros + turn.raw_logps,
        finish_reason=turn.finish_reason, kept_mass=mass, versions=versions)
