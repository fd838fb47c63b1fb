"""What callers ask for and how far it is: passive data that the scheduler fills in."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, fields, replace
from operator import index

import torch

from grpolab.decode.cache import SlotCache
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

    def snapshot(self) -> Stats:
        return replace(self)

    def __sub__(self, earlier: Stats) -> Stats:
        """What was done since an earlier snapshot."""
        return Stats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Kept:
    """The keys and values of a conversation between two turns: its first `length` positions, under the weights of `epoch`."""

    cache: SlotCache | None = None
    length: int = 0
    epoch: int = -1


@dataclass(eq=False)
class Request:
    """The handle of a submitted request: `result(timeout)` waits for the groups, `cancel()` ends its rollouts early.

    prompts, seeds  B prompts, (B, G) seeds; `rollouts` (B, G) are filled in as they finish, `left` counts those to come
    eos         ids that end a rollout as "eos"; params.stop_ids end it as "stop_id"
    on_rollout  called with (prompt index, sample index, rollout) as each one finishes
    on_tokens   called with (prompt index, sample index, token ids, logps) of the tokens since the last call
    kept        of a conversation: what its turns before this one left, and from the end of this one what it leaves
    may_wait    raises where waiting for the result would last for ever
    stopped     the finish reason that its unfinished rollouts get
    """

    prompts: list[tuple[int, ...]]
    seeds: list[list[int]]
    params: SamplingParams
    eos: frozenset[int]
    on_rollout: Callable[[int, int, Rollout], None] | None = None
    kept: Kept | None = None
    on_tokens: Callable[[int, int, list[int], list[float]], None] | None = None
    may_wait: Callable[[], None] = lambda: None
    future: Future = field(default_factory=Future)
    submitted: float = field(default_factory=time.perf_counter)
    stopped: str | None = None

    def __post_init__(self):
        self.rollouts: list[list[Rollout | None]] = [[None] * len(s) for s in self.seeds]
        self.left = sum(map(len, self.seeds))

    def result(self, timeout: float | None = None) -> list[Group]:
        """The groups, in the order of the prompts; TimeoutError after `timeout` seconds."""
        if not self.future.done():
            self.may_wait()
        return self.future.result(timeout)

    async def wait(self) -> list[Group]:
        """As `result`; cancelling the await cancels the request."""
        try:
            self.may_wait()
            return await asyncio.wrap_future(self.future)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the unfinished rollouts at the next step, with what they have and finish_reason "cancelled"."""
        self.stopped = self.stopped or "cancelled"


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
    prefill_seconds: float = 0.0

    def limit(self, context: int) -> int:
        """How many tokens a sample may take."""
        return min(self.request.params.max_new_tokens, context - len(self.ids))

    def kept(self, epoch: int) -> int:
        """How many of its positions the conversation still holds."""
        kept = self.request.kept
        return kept.length if kept is not None and kept.epoch == epoch else 0


@dataclass(frozen=True, eq=False)
class Owner:
    """Whose row it is, and when it entered; `stats` is a snapshot of the sampler's at that time."""

    request: Request
    index: int
    sample: int
    version: int
    epoch: int
    prefill_seconds: float
    entered: float
    stats: Stats


def checked_prompt(prompt: Sequence[int], i: int, vocab: int, context: int) -> tuple[int, ...]:
    """The ids of prompt i, or a ValueError that names what is wrong with it."""
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


def pending(request: Request) -> list[Pending]:
    return [Pending(request, i, ids, deque(range(len(s)))) for i, (ids, s) in enumerate(zip(request.prompts, request.seeds))]


def ending(request: Request) -> str | None:
    """The finish reason that its unfinished rollouts get at once, if any: it was stopped, has failed, or nobody waits."""
    return request.stopped or ("cancelled" if request.future.done() else None)


def deliver(request: Request, index: int, sample: int, rollout: Rollout) -> None:
    """Hand over a finished rollout, and with the last one the groups. Whatever the callback raises is its caller's alone."""
    if request.future.done():
        return
    request.rollouts[index][sample] = rollout
    request.left -= 1
    if request.on_rollout is not None:
        try:
            request.on_rollout(index, sample, rollout)
        except BaseException as error:
            return settle(request.future, error=error)
    if request.left == 0:
        settle(request.future, [Group(tuple(row)) for row in request.rollouts])


def tell(request: Request, index: int, sample: int, tokens: list[int], logps: list[float]) -> None:
    """Hand over the newest tokens of a rollout in progress to who asked for them; what that raises is its caller's alone."""
    try:
        request.on_tokens(index, sample, tokens, logps)
    except BaseException as error:
        settle(request.future, error=error)


def settle(future: Future, result=None, error: BaseException | None = None) -> None:
    """Resolve a future that its waiter may have cancelled meanwhile."""
    if isinstance(error, StopIteration):  # asyncio cannot put it into a future: its waiter would never wake
        error = RuntimeError("a callable given to the sampler raised StopIteration: give `next` a default")
    try:
        future.set_result(result) if error is None else future.set_exception(error)
    except InvalidStateError:
        pass
