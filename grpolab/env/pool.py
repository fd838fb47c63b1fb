"""GrpoPool: a group's environment sessions, all or none, stepped together, never reused when in doubt.

    async with GrpoPool(server.url, size=8) as pool:
        await pool.reset_group(task)
        rewards = await pool.run_group(rollout)             # rollout: async (slot) -> anything

What fails is an error or a `Failure` record: no reward is ever made up, no rollout stands in for another.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from grpolab.env.client import TRACE_SPANS, Deadlines, EnvSession, Span
from grpolab.env.curriculum import success_rate
from grpolab.env.protocol import CapacityError, ConnectError, DeadlineExceeded, EnvError, FactoryError, StepResult, first_fault
from grpolab.env.server import serve

LAST_FAILURES = 100  # how many failures a pool remembers
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # s between two attempts at a full server


@dataclass(frozen=True)
class Failure:
    """A rollout that gave no result: which, in which group and turn, of which episode, and why."""

    group: int
    rollout: int
    turn: int
    episode: str
    cause: BaseException


class GroupFailed(EnvError):
    """Too few rollouts of a group survived; `failures` says what became of the others."""

    def __init__(self, message: str, failures: tuple[Failure, ...]):
        causes = [f"rollout {f.rollout} at turn {f.turn}: {f.cause!r}" for f in failures]
        super().__init__(f"{message}: {'; '.join(causes)}")
        self.failures = failures


class Results(list):
    """The results of the rollouts that finished, in order: `rollouts` are their numbers, `failures` the others."""

    def __init__(self, results: Sequence, rollouts: Sequence[int], failures: Sequence[Failure]):
        super().__init__(results)
        self.rollouts, self.failures = tuple(rollouts), tuple(failures)


def rollout_seed(seed: int, group: int, rollout: int) -> int:
    """The seed of one rollout, from 0 to 2**32 - 1, as numpy takes it: the first four bytes of SHA-256 of
    "seed:group:rollout"."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{group}:{rollout}".encode()).digest()[:4], "big")


class Slot:
    """What a rollout gets: `reset`, `step`, `state` of one environment, its own `seed`, and `span` for the timeline.

    `index` is the slot's number, `rollout` that of its rollout in the group, `turn` that of the steps in this episode, `result`
    the last reply. After an error of the environment (a ServerError other than InvalidAction), a failed reset or a lost
    connection the session is closed and replaced before the next episode.
    """

    def __init__(self, pool: GrpoPool, index: int, session: EnvSession):
        self.index, self.rollout, self.session = index, index, session
        self.turn = 0
        self.result: StepResult | None = None
        self._pool = pool

    @property
    def group(self) -> int:
        return self._pool.group

    @property
    def seed(self) -> int:
        """The seed of this rollout's own randomness: differs between rollouts and groups."""
        return rollout_seed(self._pool.seed, self.group, self.rollout)

    @property
    def group_seed(self) -> int:
        """The seed that all rollouts of this group share, so that their environments pose the same question."""
        return rollout_seed(self._pool.seed, self.group, -1)

    def span(self, phase: str):
        """`with slot.span("generate"): ...` records the enclosed time in the pool's trace."""
        return self.session.span(phase)

    async def reset(self, *, seed: int | None = None, task: Any = None, **options: Any) -> StepResult:
        """Start an episode, on a new session if this one was lost or in doubt."""
        self.turn = 0
        if self.session.doubtful or not self.session.open:
            await self.session.close()
            self.session, = await self._pool._open([self.index], self._pool.deadlines.connect)
        self.result = await self.session.reset(seed=seed, **options, **({} if task is None else {"task": task}))
        return self.result

    async def step(self, action: dict) -> StepResult:
        """Send one action; its reply is also kept as `result`."""
        self.result = await self.session.step(action)
        self.turn += 1
        return self.result

    async def state(self) -> dict:
        """What the environment says of itself."""
        return await self.session.state()

    async def mcp(self, method: str, params: dict | None = None) -> dict:
        """`EnvSession.mcp`."""
        return await self.session.mcp(method, params)


class GrpoPool:
    """`size` sessions of one server for the rollouts of a group. In place of a server's URL it takes an environment's class or
    another function that makes one, and serves that itself while it is connected, on this loop, without token and pings.

    on_failure: `fail` (the first failure cancels the group and is raised) or `drop` (finish with the others, at least
    `min_group` of them). `seed` makes the run: environments of group g are reset with `rollout_seed(seed, g, -1)`, the
    rollouts of group g have `rollout_seed(seed, g, i)`. `queue` is how many seconds `connect` may ask a full server again,
    all or nothing each time (0: raise CapacityError at once). `session` are EnvSession's: token, ping_interval, ping_timeout.
    `trace` has a Span for each phase of each session, the last TRACE_SPANS; `failures` the last LAST_FAILURES.
    """

    def __init__(self, url: str | Callable[[], Any], size: int = 8, *, deadlines: Deadlines | None = None,
                 on_failure: str = "fail", min_group: int = 2, seed: int = 0, queue: float = 0.0, curriculum: Any = None,
                 **session: Any):
        if not isinstance(url, str) and not callable(url):
            raise ValueError(f"{url!r:.100} is neither the address of a server nor what makes an environment: give the class, "
                             "as in GrpoPool(MyEnv, size=8)")
        if size < 1 or size != int(size):
            raise ValueError(f"size={size}: a pool has at least one session, a whole number of them")
        if on_failure not in ("fail", "drop"):
            raise ValueError(f"on_failure={on_failure!r}: use one of fail, drop")
        if on_failure == "drop" and not 1 <= min_group <= size:
            raise ValueError(f"min_group={min_group}: of size={size} rollouts, between 1 and all can be required")
        if not 0 <= queue < math.inf:
            raise ValueError(f"queue={queue}: the seconds that connect may ask a full server again, 0 or more and finite")
        self._make, self.url = (None, url) if isinstance(url, str) else (url, "ws://127.0.0.1")
        self.size, self.deadlines = size, deadlines or Deadlines()
        self.on_failure, self.min_group, self.seed = on_failure, min_group, seed
        self.queue, self.curriculum = queue, curriculum
        self.group = -1
        self.slots: list[Slot] = []
        self._options = session if self._make is None else {**session, "ping_interval": None}
        self._server: AbstractAsyncContextManager | None = None  # of `make`
        self._trace: deque[Span] = deque(maxlen=TRACE_SPANS)
        self.failures: list[Failure] = []
        self._running = False
        self._was_reset = False
        self._session(0)  # which checks url and token, so that a mistake is reported where it was made

    async def __aenter__(self) -> GrpoPool:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def trace(self) -> list[Span]:
        """The last spans of all sessions, oldest first: a copy."""
        return list(self._trace)

    def _session(self, index: int) -> EnvSession:
        return EnvSession(self.url, deadlines=self.deadlines, trace=self._trace, index=index, **self._options)

    async def connect(self) -> None:
        """Open every session, or none: on any failure the others are cancelled, awaited and closed before it is raised, also
        between two attempts (two pools that each held half a server would wait for ever). Raises CapacityError, ConnectError,
        FactoryError or DeadlineExceeded. Does nothing on a connected pool."""
        if self.slots:
            return
        if self._running:
            raise RuntimeError("this pool is being connected already: await that first")
        self._running = True
        try:
            with _interruptible():
                if self._make is not None:  # a hung session ends a second after our deadlines; another has its place before
                    limits = self.deadlines
                    self._server = serve(self._make, max_sessions=2 * self.size, step_timeout=limits.step + 1,
                                         reset_timeout=max(limits.reset, limits.admit) + 1, close_timeout=limits.close,
                                         ping_interval=None)
                    self.url = (await self._server.__aenter__()).url
                sessions = await self._open(range(self.size), self.queue)
        except BaseException:
            await self.close()
            raise
        finally:
            self._running = False
        self.slots = [Slot(self, i, session) for i, session in enumerate(sessions)]

    async def _open(self, indices: Sequence[int], seconds: float) -> list[EnvSession]:
        """A session for each, or none; a full server is asked again for up to `seconds`, later each time. A pause is a `queue`
        span of the trace."""
        end, pause = perf_counter() + seconds, FIRST_PAUSE
        while True:
            sessions = [self._session(i) for i in indices]
            try:
                await _all(session.connect() for session in sessions)
                return sessions
            except BaseException as fault:
                await _close_all(sessions)
                retry = isinstance(fault, CapacityError | FactoryError)  # the latter: OpenEnv frees places too early
                start = perf_counter()
                if not retry or start >= end or (getattr(fault, "max_sessions", None) or self.size) < len(indices):
                    raise
            # Those who were refused together come back apart.
            await asyncio.sleep(min(pause * random.Random().uniform(0.5, 1.5), end - start))
            self._trace.append(Span("queue", start, perf_counter(), indices[0]))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def close(self) -> None:
        """Close every session and wait until the server has freed it, at most `deadlines.close` s (one that was lost was
        cut then, and the server frees it by itself). Idempotent."""
        slots, self.slots = self.slots, []
        server, self._server = self._server, None
        try:
            await _close_all([slot.session for slot in slots])
        finally:
            if server is not None:
                await server.__aexit__(None, None, None)

    async def reset_group(self, task: Any = None, *, seed: int | None = None) -> list[StepResult]:
        """Start the next group: one episode of the same task on every session, lost ones replaced first.

        All get the same seed (default: this group's) and so face the same question. Fails as a whole, whatever `on_failure`;
        under `drop`, let the rollout itself `reset(seed=slot.group_seed)`.
        """
        return await self._on_all(lambda slot: slot.reset(seed=slot.group_seed if seed is None else seed, task=task),
                                  begins=True, resets=True)

    async def run_group_step(self, actions: Sequence[dict]) -> list[StepResult]:
        """One step on every session at once: `actions[i]` on slot i. Fails as a whole."""
        if len(actions) != self.size:
            raise ValueError(f"{len(actions)} actions for {self.size} sessions")
        return await self._on_all(lambda slot: slot.step(actions[slot.index]), begins=False, resets=False)

    async def run_group(self, rollout: Callable[..., Awaitable[Any]], *, jobs: int | None = None) -> Results:
        """`rollout(slot)` on every slot at once; the results in order, and under `drop` those that there are. With `jobs`,
        `rollout(slot, i)` for each i below it: every slot takes the next one as it gets free.

        A rollout has `deadlines.episode` s, all together `deadlines.group` s times the rollouts of a slot: one, or of `jobs` an
        even share and one more. Afterwards no rollout runs any more. Raises the first failure (`fail`), GroupFailed (`drop`:
        fewer than `min_group` finished, or no slot has a session any more) or DeadlineExceeded.
        """
        count, rounds = (self.size, 1) if jobs is None else (jobs, jobs // self.size + 1)
        todo = iter(range(count))
        failures: list[Failure] = []
        finished: dict[int, Any] = {}

        async def run(slot: Slot) -> None:
            for i in [slot.index] if jobs is None else todo:
                slot.rollout = i
                try:
                    work = rollout(slot) if jobs is None else rollout(slot, i)
                    finished[i] = await _within(work, self.deadlines.episode, f"rollout {i}")
                except Exception as cause:
                    failures.append(Failure(slot.group, i, slot.turn, slot.session.episode_id, cause))
                    if self.on_failure != "drop" or not isinstance(cause, EnvError):
                        raise
                    _forget_frames(cause)
                    if isinstance(cause, ConnectError):  # no session is to be had: the other slots take what is left
                        return

        try:
            await self._on_all(run, rounds, begins=not self._was_reset, resets=False)  # else the rollouts reset by themselves
        finally:
            self.failures = [*self.failures, *failures][-LAST_FAILURES:]
        if failures and (len(finished) < self.min_group or len(finished) + len(failures) < count):
            raise GroupFailed(f"{len(finished)} of {count} rollouts finished, {self.min_group} are needed", tuple(failures))
        rollouts = sorted(finished)
        return Results([finished[i] for i in rollouts], rollouts, sorted(failures, key=lambda f: f.rollout))

    def record_group_result(self, task: Any, rewards: Sequence[float], *, success: float = 1.0) -> float:
        """Tell the curriculum the group's rate of success, the share of `rewards` >= `success` (None abstains); returns it."""
        rate = success_rate(rewards, success)
        if self.curriculum is not None:
            self.curriculum.record_result(task, rate)
        return rate

    async def _on_all(self, work: Callable[[Slot], Coroutine], rounds: int = 1, *, resets: bool, begins: bool) -> list:
        """`work(slot)` for every slot, concurrently, under the group's deadline; one at a time, for two would interleave on the
        same sockets. `begins`: of a new group; `resets`: the rollouts that follow belong to it."""
        if not self.slots:
            raise RuntimeError("the pool is not connected: use `async with GrpoPool(url) as pool`, or pool.connect()")
        if self._running:
            raise RuntimeError("this pool runs a group already; await it first, or open a second pool")
        self.group += begins
        self._running, self._was_reset = True, resets
        try:
            with _interruptible():
                return await _within(_all(map(work, self.slots)), rounds * self.deadlines.group, f"group {self.group}", "group")
        finally:
            self._running = False


async def _all(work: Iterable[Coroutine]) -> list:
    """The results of all, concurrently; the first failure cancels the rest and is raised as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
        return [task.result() for task in tasks]
    except BaseExceptionGroup as faults:
        fault = first_fault(faults)
    raise fault  # out here, so that its traceback says what happened and not how it was handled


async def _within(work: Awaitable, seconds: float, what: str, phase: str = "episode") -> Any:
    """The result of `what`, a rollout or a group; raises DeadlineExceeded(phase) after `seconds`."""
    try:
        async with asyncio.timeout(seconds) as scope:
            return await work
    except TimeoutError as fault:
        if not scope.expired():
            raise
        raise DeadlineExceeded(phase, seconds, what) from fault


async def _close_all(sessions: Sequence[EnvSession]) -> None:
    """Close every session, whatever happens to one of them; a cancellation cuts the connections and is passed on."""
    await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)


def _forget_frames(fault: BaseException | None) -> None:
    """Drop what the frames of an error's traceback hold, observations and caches, and of those that led to it."""
    while fault is not None:
        traceback.clear_frames(fault.__traceback__)
        fault = fault.__cause__ or fault.__context__


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
