"""Requests for rollouts and how far they are: passive data that the scheduler fills in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from operator import index

import numpy as np
import torch

from grpolab.decode.cache import SlotCache
from grpolab.decode.prompt_lookup import PromptLookup
from grpolab.decode.sampling import SamplingParams
from grpolab.rollouts import Group, Rollout


@dataclass
class Stats:
    """What a sampler did since it was made; seconds are of its worker thread."""

    prefill_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    sample_seconds: float = 0.0
    refreshes: int = 0
    drafted: int = 0  # tokens by prompt lookup, and how many of them were what was drawn
    accepted: int = 0


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a conversation between two turns: its first `length` positions, under the weights of `epoch`."""

    cache: SlotCache | None = None
    length: int = 0
    epoch: int = -1


@dataclass(eq=False)
class Request:
    """The handle of a submitted request: `result(timeout)` waits for the groups, `cancel()` ends its rollouts early.

    prompts, seeds  B prompts, (B, G) seeds; `rollouts` (B, G) are filled in as they finish, `unfinished` counts those to come
    eos         ids that end a rollout as "eos"; params.stop_ids end it as "stop_id"
    on_rollout, on_tokens  as in `Sampler.submit`
    prefix      of a conversation: the state after the turn before this one, and from the end of this one that after it
    """

    prompts: list[tuple[int, ...]]
    seeds: list[list[int]]
    params: SamplingParams
    eos: frozenset[int]
    on_rollout: Callable[[int, int, Rollout], None] | None = None
    on_tokens: Callable[[int, int, list[int], list[float]], None] | None = None
    prefix: Prefix | None = None
    future: Future = field(default_factory=Future)
    cancelled: bool = False

    def __post_init__(self):
        self.rollouts: list[list[Rollout | None]] = [[None] * len(s) for s in self.seeds]
        self.unfinished = sum(map(len, self.seeds))

    def result(self, timeout: float | None = None) -> list[Group]:
        """The groups, in the order of the prompts; TimeoutError after `timeout` seconds."""
        return self.future.result(timeout)

    async def wait(self) -> list[Group]:
        """As `result`; cancelling the await cancels the request."""
        try:
            return await asyncio.wrap_future(self.future)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the unfinished rollouts at the next step, with the tokens drawn so far and finish_reason "cancelled"."""
        self.cancelled = True

    def begin(self, scheduler) -> None:
        scheduler.add(self)

    def deliver(self, index: int, sample: int, rollout: Rollout) -> None:
        """Hand over a finished rollout, and with the last one the groups. An error of the callback fails this request alone."""
        if self.future.done():
            return
        self.rollouts[index][sample] = rollout
        self.unfinished -= 1
        if self.on_rollout is not None:
            try:
                self.on_rollout(index, sample, rollout)
            except BaseException as error:
                return settle(self.future, error=error)
        if self.unfinished == 0:
            settle(self.future, [Group(tuple(row)) for row in self.rollouts])


@dataclass(eq=False)
class Pending:
    """A prompt of a request in the queue. `samples`: the indices that wait; `cache`, `row`, `logits`: its prefill."""

    request: Request
    index: int
    ids: tuple[int, ...]
    samples: deque[int]
    cache: SlotCache | None = None
    row: int = 0
    logits: torch.Tensor | None = None

    def limit(self, context: int) -> int:
        """How many tokens a sample may take."""
        return min(self.request.params.max_new_tokens, context - len(self.ids))

    def cached(self, epoch: int) -> int:
        """How many of its positions are in the cache of its conversation."""
        prefix = self.request.prefix
        return prefix.length if prefix is not None and prefix.epoch == epoch else 0


@dataclass(frozen=True, eq=False)
class Owner:
    """The rollout that a row belongs to, and the weights under which it entered."""

    request: Request
    index: int
    sample: int
    version: int
    epoch: int
    allowed: Callable[[int | None], np.ndarray] | None = None  # of its constraint
    lookup: PromptLookup | None = None


def checked_prompt(prompt: Sequence[int], i: int, vocab: int, context: int) -> tuple[int, ...]:
    """The ids of prompt i; ValueError for an empty one, one without room for an answer, an id outside the vocabulary."""
    if not len(prompt):
        raise ValueError(f"prompt {i} is empty; give it at least one token, e.g. the bos id")
    if len(prompt) >= context:
        raise no_room(i, len(prompt), context)
    ids = tuple(index(t) for t in prompt)
    wrong = next((t for t in ids if not 0 <= t < vocab), None)
    if wrong is not None:
        raise ValueError(f"prompt {i} holds token id {wrong}, outside the vocabulary 0..{vocab - 1}"
                         "; encode it with the policy's tokenizer")
    return ids


def checked_seed(seed: int) -> int:
    if not 0 <= index(seed) < 2**64:
        raise ValueError(f"a rollout's seed must be from 0 to 2**64 - 1, got {seed}; params.seed may be any integer")
    return index(seed)


def no_room(i: int, tokens: int, context: int) -> ValueError:
    return ValueError(f"prompt {i} has {tokens} tokens and leaves no room in the context of {context}; shorten it")


def settle(future: Future, result=None, error: BaseException | None = None) -> None:
    """Resolve a future that its waiter may have cancelled meanwhile."""
    if isinstance(error, StopIteration):  # asyncio cannot put it into a future: its waiter would never wake
        error = RuntimeError("a callable given to the sampler raised StopIteration: give `next` a default")
    try:
        future.set_result(result) if error is None else future.set_exception(error)
    except InvalidStateError:
        pass
