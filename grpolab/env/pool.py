"""GrpoPool: a group's environment sessions, all or none, stepped together, never reused when in doubt.

    async with GrpoPool(server.url, size=8) as pool:
        await pool.reset_group(task)
        rewards = await pool.run_group(rollout)             # rollout: async (slot) -> anything

A slot is one place of the group; behind it stands a session, which is replaced when it is lost, never repaired. What
fails is an error or a `Failure` record: no reward is ever made up, no rollout stands in for another.
"""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from grpolab.env.client import TRACE_SPANS, Deadlines, EnvSession, Span
from grpolab.env.curriculum import success_rate
from grpolab.env.protocol import CapacityError, ConnectError, DeadlineExceeded, EnvError, FactoryError, StepResult
from grpolab.env.slot import Failure, Slot, rollout_seed

ON_FAILURE = ("fail", "drop")
LAST_FAILURES = 100  # how many failures a pool remembers
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # s between two attempts at a server that does not say when to ask again

__all__ = ["Failure", "GroupFailed", "GrpoPool", "Results", "Slot", "rollout_seed"]


class GroupFailed(EnvError):
    """Too few rollouts of a group survived; `failures` says what became of the others."""

    def __init__(self, message: str, failures: tuple[Failure, ...]):
        causes = "; ".join(f"rollout {f.rollout} at turn {f.turn}: {f.cause!r}" for f in failures)
        super().__init__(f"{message}: {causes}")
        self.failures = failures


class Results(list):
    """The results of the rollouts that finished, in order: `rollouts` are their numbers, `failures` the others."""

    def __init__(self, results: Sequence, rollouts: Sequence[int], failures: Sequence[Failure]):
        super().__init__(results)
        self.rollouts, self.failures = tuple(rollouts), tuple(failures)


class GrpoPool:
    """`size` sessions of one server for the rollouts of a group.

    on_failure: `fail` (the first failure cancels the group and is raised) or `drop` (finish with the others, at least
    `min_group` of them). `seed` makes the run: environments of group g are reset with `rollout_seed(seed, g, -1)`, or each
    with its own under `distinct=True`; the rollouts of group g have `rollout_seed(seed, g, i)`. `queue` is how many seconds
    `connect` may ask a full server again, all or nothing each time (0: raise CapacityError at once). `trace` has a Span for
    each phase of each session, the last TRACE_SPANS; `failures` the last LAST_FAILURES.
    """

    def __init__(self, url: str, size: int = 8, *, deadlines: Deadlines | None = None, on_failure: str = "fail",
                 min_group: int = 2, seed: int = 0, queue: float = 0.0, curriculum: Any = None, token: str | None = None,
                 ping_interval: float | None = 20.0, ping_timeout: float | None = 20.0, name: str = ""):
        if size < 1:
            raise ValueError(f"size={size}: a pool has at least one session")
        if on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure={on_failure!r}: use one of {', '.join(ON_FAILURE)}")
        if on_failure == "drop" and not 1 <= min_group <= size:
            raise ValueError(f"min_group={min_group}: of size={size} rollouts, between 1 and all can be required")
        if not 0 <= queue < math.inf:
            raise ValueError(f"queue={queue}: the seconds that connect may ask a full server again, 0 or more and finite")
        self.url, self.size, self.deadlines = url, size, deadlines or Deadlines()
        self.on_failure, self.min_group, self.seed = on_failure, min_group, seed
        self.name = name or f"pool-{uuid.uuid4().hex[:6]}"
        self.queue, self.curriculum = queue, curriculum
        self.group = -1
        self.slots: list[Slot] = []
        self._options = {"token": token, "ping_interval": ping_interval, "ping_timeout": ping_timeout}
        self._trace: deque[Span] = deque(maxlen=TRACE_SPANS)
        self._failures: deque[Failure] = deque(maxlen=LAST_FAILURES)
        self._jitter = random.Random()  # of pauses only; nothing that a result depends on
        self._running = False
        self._was_reset = False
        self._session(0)  # which checks url and token, so that a mistake is reported where it was made

    async def __aenter__(self) -> GrpoPool:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self):
        raise TypeError("GrpoPool is asynchronous: write `async with`; MultiTurnEnvPool is its synchronous twin")

    def __exit__(self, *_: object) -> None: ...

    @property
    def trace(self) -> list[Span]:
        """The last spans of all sessions, oldest first: a copy. Those of a while are found by their `start`."""
        return list(self._trace)

    @property
    def failures(self) -> list[Failure]:
        """The last rollouts that gave no result."""
        return list(self._failures)

    def _session(self, index: int) -> EnvSession:
        return EnvSession(self.url, deadlines=self.deadlines, trace=self._trace, index=index, **self._options)

    async def connect(self) -> None:
        """Open every session, or none: on any failure the others are cancelled, awaited and closed before it is raised.

        `slots` is published only when each session has been admitted. Raises CapacityError, ConnectError, FactoryError
        or DeadlineExceeded. Does nothing on a connected pool.
        """
        if self.slots:
            return

        def may_end(refused: ConnectError) -> bool:
            return isinstance(refused, CapacityError) and (refused.max_sessions or self.size) >= self.size

        # All or nothing also while waiting: two pools that each held half a server would wait for ever.
        with _interruptible():
            sessions = await self._ask_again(self._open_all, self.queue, may_end)
        self.slots = [Slot(i, session, self._reopen, pool_seed=self.seed, pool_name=self.name)
                      for i, session in enumerate(sessions)]

    async def _open_all(self) -> list[EnvSession]:
        sessions = [self._session(i) for i in range(self.size)]
        try:
            async with asyncio.TaskGroup() as group:
                for session in sessions:
                    group.create_task(session.connect())
            return sessions
        except BaseExceptionGroup as faults:
            failed = _first(faults)
            await _close_all(sessions)
        except BaseException:
            await _close_all(sessions)
            raise
        raise failed  # out here, so that its traceback says what happened and not how it was handled

    async def _reopen(self, index: int) -> EnvSession:
        """A new session in place of a lost one; waits for a free place at most `deadlines.connect` s."""
        async def open_one() -> EnvSession:
            session = self._session(index)
            try:
                await session.connect()
            except BaseException:
                await session.close()
                raise
            return session

        def may_end(refused: ConnectError) -> bool:
            # The lost session's place or backend may be on its way back (FACTORY_ERROR: OpenEnv frees places too early).
            return isinstance(refused, CapacityError | FactoryError)

        return await self._ask_again(open_one, self.deadlines.connect, may_end, index)

    async def _ask_again(self, attempt: Callable[[], Awaitable], seconds: float, may_end: Callable[[ConnectError], bool],
                         index: int = -1) -> Any:
        """`await attempt()`, again after each refusal that `may_end` by itself, for up to `seconds`: when the server's
        Retry-After says, without one later each time. A pause is a `queue` span of the trace."""
        end, wait = perf_counter() + seconds, FIRST_PAUSE
        while True:
            try:
                return await attempt()
            except ConnectError as refused:
                # Those who were refused together come back apart.
                pause = (getattr(refused, "retry_after", None) or wait) * self._jitter.uniform(0.5, 1.5)
                start = perf_counter()
                if not may_end(refused) or start >= end:
                    raise
            await asyncio.sleep(min(pause, end - start))
            self._trace.append(Span("queue", start, perf_counter(), index))
            wait = min(2 * wait, LONGEST_PAUSE)

    async def close(self) -> None:
        """Close every session and wait until the server has freed it, at most `deadlines.close` s (one that was lost was
        cut then, and the server frees it by itself). Idempotent."""
        slots, self.slots = self.slots, []
        await _close_all([slot.session for slot in slots])

    async def reset_group(self, task: Any = None, *, seed: int | None = None,
                          distinct: bool = False) -> list[StepResult]:
        """Start the next group: one episode of the same task on every session, lost ones replaced first.

        All get the same seed (default: this group's) and so face the same question; under `distinct` each its own.
        Fails as a whole, whatever the policy; under `drop`, let the rollout itself `reset(seed=slot.group_seed)`.
        """
        with self._exclusive():
            self._next_group()
            self._was_reset = True

            def start(slot: Slot) -> Coroutine:
                shared = slot.group_seed if seed is None else seed
                return slot.reset(seed=slot.seed if distinct else shared, task=task)

            return await self._all(start)

    def _next_group(self) -> None:
        self.group += 1
        for slot in self.slots:
            slot.group = self.group

    async def run_group_step(self, actions: Sequence[dict]) -> list[StepResult]:
        """One step on every session at once: `actions[i]` on slot i. Fails as a whole, whatever the policy."""
        if len(actions) != self.size:
            raise ValueError(f"{len(actions)} actions for {self.size} sessions")
        with self._exclusive():
            self._was_reset = False  # these are the group's rollouts: the next ones are another group's
            return await self._all(lambda slot: slot.step(actions[slot.index]))

    async def run_group(self, rollout: Callable[[Slot], Awaitable[Any]], *, rounds: int = 1) -> Results:
        """`rollout(slot)` on every slot at once; the results in order, and under `drop` those that there are.

        A rollout has `deadlines.episode` s, all together `deadlines.group` s; `rounds` times that where it plays several
        episodes one after another. When this returns or raises, no rollout runs any more. Raises the first failure (`fail`),
        GroupFailed (`drop`), DeadlineExceeded (`group`).
        """
        failures: list[Failure] = []
        finished: dict[int, Any] = {}

        async def run(slot: Slot) -> None:
            try:
                finished[slot.index] = await within(
                    rollout(slot), rounds * self.deadlines.episode, f"rollout {slot.index}")
            except Exception as cause:
                failure = Failure(slot.group, slot.index, slot.turn, slot.session.episode_id, cause)
                if self.on_failure != "drop" or not isinstance(cause, EnvError):
                    failures.append(failure)
                    raise
                failures.append(failure.without_frames())

        with self._exclusive():
            if not self._was_reset:  # the rollouts reset by themselves
                self._next_group()
            self._was_reset = False
            try:
                await self._all(run, rounds)
            finally:
                self._failures += failures
        if failures and len(finished) < self.min_group:
            raise GroupFailed(f"{len(finished)} of {self.size} rollouts finished, {self.min_group} are needed",
                              tuple(failures))
        order = sorted(finished)
        return Results([finished[i] for i in order], order, sorted(failures, key=lambda f: f.rollout))

    def note_failures(self, failures: Sequence[Failure]) -> None:
        """Put on record what a rollout of several episodes lost and went on without."""
        self._failures += failures

    def record_group_result(self, task: Any, rewards: Sequence[float], *, success: float = 1.0) -> float:
        """Tell the curriculum the group's rate of success, the share of `rewards` >= `success` (None abstains); returns it."""
        rate = success_rate(rewards, success)
        if self.curriculum is not None:
            self.curriculum.record_result(task, rate)
        return rate

    @contextmanager
    def _exclusive(self):
        """One group at a time: two would interleave on the same sockets."""
        if not self.slots:
            raise RuntimeError("the pool is not connected: use `async with GrpoPool(url) as pool`, or pool.connect()")
        if self._running:
            raise RuntimeError("this pool runs a group already; await it first, or open a second pool")
        self._running = True
        try:
            with _interruptible():
                yield
        finally:
            self._running = False

    async def _all(self, work: Callable[[Slot], Coroutine], rounds: int = 1) -> list:
        """`work(slot)` for every slot, concurrently, under the group's deadline; the first failure cancels the rest."""
        try:
            async with asyncio.timeout(rounds * self.deadlines.group) as scope, asyncio.TaskGroup() as group:
                tasks = [group.create_task(work(slot)) for slot in self.slots]
            return [task.result() for task in tasks]
        except TimeoutError as fault:
            if not scope.expired():
                raise
            raise DeadlineExceeded("group", rounds * self.deadlines.group, f"group {self.group}") from fault
        except BaseExceptionGroup as faults:
            failed = _first(faults)
        raise failed


@contextmanager
def _interruptible():
    """Wake the loop ten times a second: ipykernel cancels an interrupted cell, which an idle loop does not notice."""
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal handle
        handle = loop.call_later(0.1, tick)

    handle = loop.call_later(0.1, tick)
    try:
        yield
    finally:
        handle.cancel()


async def within(work: Awaitable, seconds: float, what: str) -> Any:
    """The result of `what`, a rollout or an episode; raises DeadlineExceeded("episode") after `seconds`."""
    try:
        async with asyncio.timeout(seconds) as scope:
            return await work
    except TimeoutError as fault:
        if not scope.expired():
            raise
        raise DeadlineExceeded("episode", seconds, what) from fault


async def _close_all(sessions: Sequence[EnvSession]) -> None:
    """Close every session, whatever happens to one of them; a cancellation cuts the connections and is passed on."""
    await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)


def _first(faults: BaseExceptionGroup) -> BaseException:
    """The failure that a reader wants to see: the first that is no group."""
    fault = faults.exceptions[0]
    return _first(fault) if isinstance(fault, BaseExceptionGroup) else fault
