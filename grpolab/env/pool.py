"""GrpoPool: a group's environment sessions, all or none, stepped together, never reused when in doubt.

    async with GrpoPool(server.url, size=8) as pool:
        await pool.reset_group(task)
        rewards = await pool.run_group(rollout)             # rollout: async (session) -> anything

A seat is one place of the group; behind it stands a session, which is replaced when it is lost, never repaired. What
fails is an error or a `Failure` record: no reward is ever made up, no rollout stands in for another.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from grpolab.env.client import TRACE_SPANS, Deadlines, EnvSession, Span
from grpolab.env.curriculum import success_rate
from grpolab.env.protocol import CapacityError, ConnectError, DeadlineExceeded, EnvError, FactoryError, StepResult
from grpolab.env.slot import Failure, Seat, rollout_seed
from grpolab.env.waits import Waits

POLICIES = ("fail", "drop", "retry")
KEPT_FAILURES = 100  # how many of the last failures, and of the last retries, a pool keeps

__all__ = ["Failure", "GroupFailed", "GrpoPool", "Results", "Seat", "rollout_seed"]


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

    on_failure: `fail` (the first failure cancels the group and is raised), `drop` (finish with the others, at least
    `min_group` of them), `retry` (replace a lost or failed session, waiting up to `deadlines.connect` for a server that
    restarts, and replay its episode, up to `retries` times a call; for deterministic environments). Deadlines are finite;
    see Deadlines. `seed` makes the run: environments of group g are reset with `rollout_seed(seed, g, -1)`, or each with
    its own under `distinct=True`; the rollouts of group g have `rollout_seed(seed, g, i)`. `queue` is how many seconds
    `connect` may wait at a full server (0: raise CapacityError at once): our server keeps a line, in which whole pools are
    served in order, and a lost session's replacement first; at one that keeps none the pool asks again and again. `trace`
    has a Span for each phase of each session, the last TRACE_SPANS; `failures` and `retried` the last KEPT_FAILURES.
    """

    def __init__(self, url: str, size: int = 8, *, deadlines: Deadlines | None = None, on_failure: str = "fail",
                 min_group: int = 2, retries: int = 2, seed: int = 0, queue: float = 0.0, curriculum: Any = None,
                 token: str | None = None, ping_interval: float | None = 20.0, ping_timeout: float | None = 20.0,
                 name: str = ""):
        if size < 1:
            raise ValueError(f"size={size}: a pool has at least one session")
        if on_failure not in POLICIES:
            raise ValueError(f"on_failure={on_failure!r}: use one of {', '.join(POLICIES)}")
        if on_failure == "drop" and not 1 <= min_group <= size:
            raise ValueError(f"min_group={min_group}: of size={size} rollouts, between 1 and all can be required")
        self.url, self.size, self.deadlines = url, size, deadlines or Deadlines()
        self.on_failure, self.min_group, self.seed = on_failure, min_group, seed
        self.name = name or f"pool-{uuid.uuid4().hex[:6]}"
        self.retries = retries if on_failure == "retry" else 0
        self.queue, self.curriculum = queue, curriculum
        self.group = -1
        self.seats: list[Seat] = []
        self._options = {"token": token, "ping_interval": ping_interval, "ping_timeout": ping_timeout}
        self._trace: deque[Span] = deque(maxlen=TRACE_SPANS)
        self.waits = Waits(self._trace)
        self._failures: deque[Failure] = deque(maxlen=KEPT_FAILURES)
        self._retried: deque[Failure] = deque(maxlen=KEPT_FAILURES)
        self._party = ""  # our name in the server's line
        self._episodes = 0
        self._running = False
        self._was_reset = False
        self._session(0)  # which checks url and token, so that a mistake is told where it was made

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

    @property
    def retried(self) -> list[Failure]:
        """The last failures that `retry` got over, or tried to."""
        return list(self._retried)

    def note_retry(self, failure: Failure) -> None:
        """Put a failure that is about to be retried on record."""
        self._retried.append(failure.lightened())

    def _session(self, index: int, wait: int = 0, together: int = 1) -> EnvSession:
        return EnvSession(self.url, deadlines=self.deadlines, trace=self._trace, index=index, wait=wait,
                          party=self._party and f"{self._party} {together}", **self._options)

    def next_episode(self) -> int:
        """A number that no other episode of this pool has."""
        self._episodes += 1
        return self._episodes

    async def connect(self) -> None:
        """Open every session, or none: on any failure the others are cancelled, awaited and closed before it is raised.

        `seats` is published only when each session has been admitted. Raises CapacityError, ConnectError, FactoryError
        or DeadlineExceeded. Does nothing on a connected pool.
        """
        if self.seats:
            return
        self._party, end = uuid.uuid4().hex, perf_counter() + self.queue

        def may_end(refused: ConnectError) -> bool:
            return isinstance(refused, CapacityError) and (refused.max_sessions or self.size) >= self.size

        # All or nothing also while waiting: two pools that each held half a server would wait for ever.
        with _interruptible():
            sessions = await self.waits.again(lambda: self._open_all(int(max(end - perf_counter(), 0))), end, may_end)
        self.seats = [Seat(self, i, session) for i, session in enumerate(sessions)]

    async def _open_all(self, wait: int) -> list[EnvSession]:
        sessions = [self._session(i, wait, self.size if wait else 1) for i in range(self.size)]
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

    async def close(self) -> None:
        """Close every session and wait until the server has freed it, at most `deadlines.close` s (one that was lost was
        cut then, and the server frees it by itself). Idempotent."""
        seats, self.seats = self.seats, []
        await _close_all([seat.session for seat in seats])

    async def replace(self, seat: Seat) -> None:
        """A new session for a seat whose session was lost or in doubt; waits for a slot at most `deadlines.connect` s, and
        under `retry` also for a server that does not answer."""
        await seat.session.close()
        end = perf_counter() + self.deadlines.connect

        async def open_one() -> EnvSession:
            session = self._session(seat.index, int(max(end - perf_counter(), 0)))
            try:
                await session.connect()
            except BaseException:
                await session.close()
                raise
            return session

        seat.session = await self.waits.again(open_one, end, self._passing, seat.index)

    def _passing(self, refused: ConnectError) -> bool:
        """Whether a refusal of a replacement may end by itself. The lost session's slot or backend may be on its way back
        (FACTORY_ERROR, since OpenEnv frees slots too early); a restarting server does not answer, its proxy says 50x."""
        return isinstance(refused, CapacityError | FactoryError) or (
            self.on_failure == "retry" and (refused.status is None or refused.status >= 500))

    async def reset_group(self, task: Any = None, *, seed: int | None = None,
                          distinct: bool = False) -> list[StepResult]:
        """Start the next group: one episode of the same task on every session, lost ones replaced first.

        All get the same seed (default: this group's) and so face the same question; under `distinct` each its own.
        Fails as a whole, whatever the policy; under `drop`, let the rollout itself `reset(seed=seat.group_seed)`.
        """
        with self._exclusive():
            self._next_group()
            self._was_reset = True

            def start(seat: Seat) -> Coroutine:
                shared = seat.group_seed if seed is None else seed
                return seat.reset(seed=seat.seed if distinct else shared, task=task)

            return await self._all(start)

    def _next_group(self) -> None:
        self.group += 1
        for seat in self.seats:
            seat.group = self.group

    async def run_group_step(self, actions: Sequence[dict]) -> list[StepResult]:
        """One step on every session at once: `actions[i]` on seat i. Fails as a whole, whatever the policy."""
        if len(actions) != self.size:
            raise ValueError(f"{len(actions)} actions for {self.size} sessions")
        with self._exclusive():
            self._was_reset = False  # these are the group's rollouts: the next ones are another group's
            return await self._all(lambda seat: seat.step(actions[seat.index]))

    async def run_group(self, rollout: Callable[[Seat], Awaitable[Any]], *, rounds: int = 1) -> Results:
        """`rollout(seat)` on every seat at once; the results in order, and under `drop` those that there are.

        A rollout has `deadlines.episode` s, all together `deadlines.group` s; `rounds` times that where it plays several
        episodes one after another. When this returns or raises, no rollout
        runs any more. Raises the first failure (`fail`, `retry`), GroupFailed (`drop`), DeadlineExceeded (`group`).
        """
        failures: list[Failure] = []
        finished: dict[int, Any] = {}

        async def run(seat: Seat) -> None:
            try:
                finished[seat.index] = await within(
                    rollout(seat), rounds * self.deadlines.episode, f"rollout {seat.index}")
            except Exception as cause:
                failure = Failure(seat.group, seat.index, seat.turn, seat.session.episode_id, cause)
                if self.on_failure != "drop" or not isinstance(cause, EnvError):
                    failures.append(failure)
                    raise
                failures.append(failure.lightened())

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
        if not self.seats:
            raise RuntimeError("the pool is not connected: use `async with GrpoPool(url) as pool`, or pool.connect()")
        if self._running:
            raise RuntimeError("this pool runs a group already; await it first, or open a second pool")
        self._running = True
        try:
            with _interruptible():
                yield
        finally:
            self._running = False

    async def _all(self, work: Callable[[Seat], Coroutine], rounds: int = 1) -> list:
        """`work(seat)` for every seat, concurrently, under the group's deadline; the first failure cancels the rest."""
        try:
            async with asyncio.timeout(rounds * self.deadlines.group) as scope, asyncio.TaskGroup() as group:
                tasks = [group.create_task(work(seat)) for seat in self.seats]
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
