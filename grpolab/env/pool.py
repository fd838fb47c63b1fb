"""GrpoPool: a group's environment sessions, all or none, stepped together, never reused when in doubt.

    async with GrpoPool(server.url, size=8) as pool:
        await pool.reset_group(task)
        rewards = await pool.run_group(rollout)             # rollout: async (session) -> anything

A seat is one place of the group; behind it stands a session, which is replaced when it is lost, never repaired. What
fails is an error or a `Failure` record: no reward is ever made up, no rollout stands in for another.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from grpolab.env.client import Deadlines, EnvSession, Span
from grpolab.env.protocol import (
    CapacityError,
    ConnectError,
    DeadlineExceeded,
    EnvError,
    FactoryError,
    SessionLost,
    StepResult,
)

POLICIES = ("fail", "drop", "retry")


class ReplayDiverged(EnvError):
    """A replayed episode did not go as the lost one: the environment is not deterministic, so nothing is resumed."""

class GroupFailed(EnvError):
    """Too few rollouts of a group survived; `failures` says what became of the others."""

    def __init__(self, message: str, failures: tuple[Failure, ...]):
        causes = "; ".join(f"rollout {f.rollout} at turn {f.turn}: {f.cause!r}" for f in failures)
        super().__init__(f"{message}: {causes}")
        self.failures = failures


@dataclass(frozen=True)
class Failure:
    """A rollout that gave no result: which, in which group and turn, of which episode, and why."""

    group: int
    rollout: int
    turn: int
    episode: str
    cause: BaseException


class Results(list):
    """The results of the rollouts that finished, in order: `rollouts` are their numbers, `failures` the others."""

    def __init__(self, results: Sequence, rollouts: Sequence[int], failures: Sequence[Failure]):
        super().__init__(results)
        self.rollouts, self.failures = tuple(rollouts), tuple(failures)


def rollout_seed(seed: int, group: int, rollout: int) -> int:
    """The seed of one rollout, from 0 to 2**63 - 1: the first bytes of SHA-256 of "seed:group:rollout"."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{group}:{rollout}".encode()).digest()[:8], "big") >> 1


class Seat:
    """What a rollout gets: `reset`, `step`, `state` of one environment, its own `seed`, and `span` for the timeline.

    `index` is the rollout's number in the group, `turn` the number of its steps in this episode.
    """

    def __init__(self, pool: GrpoPool, index: int, session: EnvSession):
        self.pool, self.index, self.session = pool, index, session
        self.group = 0
        self.result: StepResult | None = None
        self._options: dict | None = None
        self._log: list[tuple[dict, StepResult]] = []

    @property
    def seed(self) -> int:
        """The seed of this rollout's own randomness: differs between rollouts and groups, the same in every run."""
        return rollout_seed(self.pool.seed, self.group, self.index)

    @property
    def group_seed(self) -> int:
        """The seed that all rollouts of this group share, so that their environments pose the same question."""
        return rollout_seed(self.pool.seed, self.group, -1)

    @property
    def turn(self) -> int:
        return len(self._log)

    def span(self, phase: str):
        """`with seat.span("generate"): ...` records the enclosed time in the pool's trace."""
        return self.session.span(phase)

    async def reset(self, *, seed: int | None = None, task: Any = None, **options: Any) -> StepResult:
        """Start an episode, on a new session if this one was lost. It is named after its group and rollout."""
        named = {"seed": seed, "task": task, **options}
        given = {key: value for key, value in named.items() if value is not None}
        self._options = None
        self._log.clear()
        if self.session.lost is not None:
            await self.pool.replace(self)
        self.result = await self._persist(lambda: self.session.reset(episode_id=self._episode(), **given))
        self._options = given
        return self.result

    async def step(self, action: dict) -> StepResult:
        """Send one action; its reply is also kept as `result`."""
        result = await self._persist(lambda: self.session.step(action))
        self._log.append((action, result))
        self.result = result
        return result

    async def state(self) -> dict:
        """What the environment says of itself."""
        return await self.session.state()

    async def mcp(self, method: str, params: dict | None = None) -> dict:
        """One MCP request to the environment (`EnvSession.mcp`), which is no step of the episode."""
        return await self._persist(lambda: self.session.mcp(method, params))

    def _episode(self) -> str:
        return f"{self.pool.name}-g{self.group}-r{self.index}-{self.pool.next_episode()}"

    async def _persist(self, call: Callable[[], Awaitable[StepResult]]) -> StepResult:
        """The call's result; under `retry`, a lost session is replaced and its episode replayed up to here first."""
        for attempt in range(self.pool.retries, -1, -1):
            try:
                if self.session.lost is not None and self.pool.on_failure == "retry":
                    await self._replay()
                return await call()
            except (SessionLost, ConnectError) as fault:
                if self.pool.on_failure != "retry" or attempt == 0:
                    raise
                self.pool.retried.append(Failure(self.group, self.index, self.turn, self.session.episode_id, fault))
        raise AssertionError("unreachable")

    async def _replay(self) -> None:
        """A new session, brought to where the lost one stood; every observation on the way must be the same."""
        await self.pool.replace(self)
        if self._options is None:
            return
        with self.span("replay"):
            result = await self.session.reset(episode_id=self._episode(), **self._options)
            for turn, (action, expected) in enumerate(self._log):
                result = await self.session.step(action)
                if result != expected:
                    raise ReplayDiverged(f"rollout {self.index}, turn {turn + 1}: {action!r:.100} gave {result!r:.200} "
                                         f"where it had given {expected!r:.200}; use on_failure='drop' here")


class GrpoPool:
    """`size` sessions of one server for the rollouts of a group.

    on_failure: `fail` (the first failure cancels the group and is raised), `drop` (finish with the others, at least
    `min_group` of them), `retry` (replace a lost session and replay its episode, up to `retries` times a call; for
    deterministic environments). Deadlines are finite; see Deadlines. `seed` makes the run: environments of group g are
    reset with `rollout_seed(seed, g, -1)`, or each with its own under `distinct=True`; the rollouts of group g have
    `rollout_seed(seed, g, i)`. `queue` is how many seconds `connect` may wait in line at a full server (0: raise
    CapacityError at once). `trace` collects a Span for each phase of each session.
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
        self.trace: list[Span] = []
        self.failures: list[Failure] = []
        self.retried: list[Failure] = []
        self.group = -1
        self.seats: list[Seat] = []
        self._options = {"token": token, "ping_interval": ping_interval, "ping_timeout": ping_timeout}
        self._jitter = random.Random()  # waiting times only; nothing that a result depends on
        self._episodes = 0
        self._running = False
        self._was_reset = False

    async def __aenter__(self) -> GrpoPool:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self):
        raise TypeError("GrpoPool is asynchronous: write `async with`; MultiTurnEnvPool is its synchronous twin")

    def __exit__(self, *_: object) -> None: ...

    def _session(self, index: int) -> EnvSession:
        return EnvSession(self.url, deadlines=self.deadlines, trace=self.trace, index=index, **self._options)

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
        # All or nothing also while waiting: two pools that each held half a server would wait for ever.
        with _interruptible():
            sessions = await self._in_line(self._open_all, self.queue, CapacityError, -1)
        self.seats = [Seat(self, i, session) for i, session in enumerate(sessions)]

    async def _in_line(self, attempt: Callable[[], Awaitable], seconds: float, refusals: type | tuple,
                       index: int) -> Any:
        """`await attempt()`, again after each refusal: when the server's Retry-After says, without one later each time.

        A wait that also grew under Retry-After would favour the newcomer over who has waited longest.
        """
        start, wait = perf_counter(), 0.05
        while True:
            try:
                return await attempt()
            except refusals as refused:
                asked = refused.retry_after if isinstance(refused, CapacityError) else None
                pause = (asked or wait) * self._jitter.uniform(1.0, 1.5)
                if perf_counter() + pause > start + seconds:
                    raise
            before = perf_counter()
            await asyncio.sleep(pause)
            self.trace.append(Span("queue", before, perf_counter(), index))
            wait = min(2 * wait, 2.0)

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

    async def close(self) -> None:
        """Close every session and wait until the server has freed it, at most `deadlines.close` s (one that was lost was
        cut then, and the server frees it by itself). Idempotent."""
        seats, self.seats = self.seats, []
        await _close_all([seat.session for seat in seats])

    async def replace(self, seat: Seat) -> None:
        """A new session for a seat whose session was lost; waits for a slot at most `deadlines.connect` s."""
        await seat.session.close()

        async def open_one() -> EnvSession:
            session = self._session(seat.index)
            try:
                await session.connect()
            except BaseException:
                await session.close()
                raise
            return session

        # The lost session's slot or backend may be on its way back; FACTORY_ERROR, since OpenEnv frees slots too early.
        seat.session = await self._in_line(open_one, self.deadlines.connect, (CapacityError, FactoryError), seat.index)

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
                finished[seat.index] = await _within(rollout(seat), rounds * self.deadlines.episode, seat.index)
            except Exception as cause:
                failures.append(Failure(seat.group, seat.index, seat.turn, seat.session.episode_id, cause))
                if self.on_failure != "drop" or not isinstance(cause, EnvError):
                    raise

        with self._exclusive():
            if not self._was_reset:  # the rollouts reset by themselves
                self._next_group()
            self._was_reset = False
            try:
                await self._all(run, rounds)
            finally:
                self.failures += failures
        if failures and len(finished) < self.min_group:
            raise GroupFailed(f"{len(finished)} of {self.size} rollouts finished, {self.min_group} are needed",
                              tuple(failures))
        order = sorted(finished)
        return Results([finished[i] for i in order], order, sorted(failures, key=lambda f: f.rollout))

    def note_failures(self, failures: Sequence[Failure]) -> None:
        """Put on record what a rollout of several episodes lost and went on without."""
        self.failures += failures

    def record_group_result(self, task: Any, rewards: Sequence[float], *, success: float = 1.0) -> float:
        """Tell the curriculum the group's rate of success, the share of `rewards` >= `success`; returns it."""
        if not rewards:
            raise ValueError("no rewards: a group of which nothing finished has no success rate")
        rate = sum(reward >= success for reward in rewards) / len(rewards)
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


async def _within(work: Awaitable, seconds: float, rollout: int) -> Any:
    """The result of a rollout; raises DeadlineExceeded("episode") after `seconds`."""
    try:
        async with asyncio.timeout(seconds) as scope:
            return await work
    except TimeoutError as fault:
        if not scope.expired():
            raise
        raise DeadlineExceeded("episode", seconds, f"rollout {rollout}") from fault


async def _close_all(sessions: Sequence[EnvSession]) -> None:
    """Close every session, whatever happens to one of them; a cancellation cuts the connections and is passed on."""
    await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)


def _first(faults: BaseExceptionGroup) -> BaseException:
    """The failure that a reader wants to see: the first that is no group."""
    fault = faults.exceptions[0]
    return _first(fault) if isinstance(fault, BaseExceptionGroup) else fault


class MultiTurnEnvPool:
    """GrpoPool for synchronous code: the same arguments and methods, without `await`; rollouts are still `async`.

    The sessions live on an event loop in a thread of their own, so this works in a script and in a notebook alike, and
    pings are answered while the caller computes. Interrupting a call (Ctrl-C) cancels it over there before it returns.
    """

    def __init__(self, url: str, size: int = 8, **options: Any):
        self.pool = GrpoPool(url, size, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._over: asyncio.Event | None = None

    def __enter__(self) -> MultiTurnEnvPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the loop's thread and connect, all or nothing; a failure leaves nothing, and it may be tried again."""
        if self._loop is not None:
            return
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._live(ready),), daemon=True)
        self._thread.start()
        ready.wait()
        try:
            self._call(self.pool.connect())
        except BaseException:
            self._end()
            raise

    async def _live(self, ready: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._over.wait()

    def close(self) -> None:
        """Close every session and end the thread; bounded by `deadlines.close`. Idempotent."""
        if self._loop is not None:
            try:
                self._call(self.pool.close())
            finally:
                self._end()

    def reset_group(self, task: Any = None, *, seed: int | None = None, distinct: bool = False) -> list[StepResult]:
        return self._call(self.pool.reset_group(task, seed=seed, distinct=distinct))

    def run_group_step(self, actions: Sequence[dict]) -> list[StepResult]:
        return self._call(self.pool.run_group_step(actions))

    def run_group(self, rollout: Callable[[Seat], Awaitable[Any]]) -> Results:
        return self._call(self.pool.run_group(rollout))

    def record_group_result(self, task: Any, rewards: Sequence[float], *, success: float = 1.0) -> float:
        return self.pool.record_group_result(task, rewards, success=success)

    @property
    def trace(self) -> list[Span]:
        return self.pool.trace

    def _call(self, work: Coroutine) -> Any:
        """Run a coroutine over there and wait. Its deadlines bound the wait; an interrupt cancels it first."""
        if self._loop is None:
            work.close()
            raise RuntimeError("the pool is not started: use `with MultiTurnEnvPool(url) as pool`, or pool.start()")
        loop, done = self._loop, threading.Event()
        task: list[asyncio.Task] = []

        def begin() -> None:
            task.append(loop.create_task(work))
            task[0].add_done_callback(lambda _: done.set())

        try:
            loop.call_soon_threadsafe(begin)
            while not done.wait(0.1):  # in short waits, so that an interrupt gets in on every platform
                pass
        except BaseException:
            loop.call_soon_threadsafe(lambda: task[0].cancel())
            done.wait(self.pool.deadlines.close + 1.0)
            raise
        return task[0].result()

    def _end(self) -> None:
        thread, loop = self._thread, self._loop
        self._thread = self._loop = None
        loop.call_soon_threadsafe(self._over.set)
        thread.join()
