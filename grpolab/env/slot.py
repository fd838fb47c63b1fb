"""Seat: a rollout's place in a group. Behind it stands a session, which is replaced when it is lost or in doubt, never
repaired; under `retry` its episode is then replayed to where it was.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpolab.env.client import EnvSession
from grpolab.env.protocol import ConnectError, EnvError, InvalidAction, ServerError, SessionLost, StepResult

if TYPE_CHECKING:
    from grpolab.env.pool import GrpoPool

REPLAY_CHARACTERS = 16 * 2**20  # of actions and replies that a seat keeps of one episode, to replay it
SHOWN_BEFORE, SHOWN_AFTER = 40, 80  # characters around the first difference of two replies


class ReplayDiverged(EnvError):
    """A replayed episode did not go as the lost one: the environment is not deterministic, so nothing is resumed."""


@dataclass(frozen=True)
class Failure:
    """A rollout that gave no result: which, in which group and turn, of which episode, and why."""

    group: int
    rollout: int
    turn: int
    episode: str
    cause: BaseException

    def lightened(self) -> Failure:
        """The same, without what the frames of the cause's traceback still hold: observations, for one."""
        links, fault = set(), self.cause
        while fault is not None and id(fault) not in links:
            links.add(id(fault))
            traceback.clear_frames(fault.__traceback__)
            fault = fault.__cause__ or fault.__context__
        return self


def rollout_seed(seed: int, group: int, rollout: int) -> int:
    """The seed of one rollout, from 0 to 2**32 - 1, as numpy takes it: the first four bytes of SHA-256 of
    "seed:group:rollout"."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{group}:{rollout}".encode()).digest()[:4], "big")


def first_difference(before: str, now: str) -> str:
    """Where two texts part, with what stands around it in each."""
    at = next((i for i, (a, b) in enumerate(zip(before, now)) if a != b), min(len(before), len(now)))
    start, end = max(at - SHOWN_BEFORE, 0), at + SHOWN_AFTER
    cut = ["…" * (start > 0) + text[start:end] + "…" * (len(text) > end) for text in (before, now)]
    return f"they part at character {at}: before {cut[0]!r}, now {cut[1]!r}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


class Seat:
    """What a rollout gets: `reset`, `step`, `state` of one environment, its own `seed`, and `span` for the timeline.

    `index` is the rollout's number in the group, `turn` the number of its steps in this episode, `result` the last reply.

    After an error reply (a ServerError: the environment raised, its backend may be dead), a failed reset or a lost
    connection the session is closed and replaced before the next episode, under `retry` before the episode is replayed.
    An InvalidAction is no such error: the environment could not read the action, and goes on.
    """

    def __init__(self, pool: GrpoPool, index: int, session: EnvSession):
        self.pool, self.index, self.session = pool, index, session
        self.group = self.turn = 0
        self.result: StepResult | None = None
        self._failed = False
        # What was asked and answered in this episode, as JSON, for `retry` alone; None when it outgrew REPLAY_CHARACTERS.
        self._log: list[tuple[str, str, str]] | None = []
        self._logged = 0

    @property
    def seed(self) -> int:
        """The seed of this rollout's own randomness: differs between rollouts and groups, the same in every run."""
        return rollout_seed(self.pool.seed, self.group, self.index)

    @property
    def group_seed(self) -> int:
        """The seed that all rollouts of this group share, so that their environments pose the same question."""
        return rollout_seed(self.pool.seed, self.group, -1)

    def span(self, phase: str):
        """`with seat.span("generate"): ...` records the enclosed time in the pool's trace."""
        return self.session.span(phase)

    async def reset(self, *, seed: int | None = None, task: Any = None, **options: Any) -> StepResult:
        """Start an episode, on a new session if this one was lost or in doubt. It is named after its group and rollout."""
        named = {"episode_id": self._episode(), "seed": seed, "task": task, **options}
        given = {key: value for key, value in named.items() if value is not None}
        self.turn, self._log, self._logged = 0, [], 0
        try:
            self.result = await self._persist(lambda: self._begin(given))
        except BaseException:
            self._failed = True
            raise
        self._remember("reset", given, self.result)
        return self.result

    async def step(self, action: dict) -> StepResult:
        """Send one action; its reply is also kept as `result`."""
        self.result = await self._persist(lambda: self._act(action))
        self.turn += 1
        self._remember("step", action, self.result)
        return self.result

    async def state(self) -> dict:
        """What the environment says of itself."""
        try:
            return await self.session.state()
        except ServerError:
            self._failed = True
            raise

    async def mcp(self, method: str, params: dict | None = None) -> dict:
        """One MCP request to the environment (`EnvSession.mcp`), which is no step of the episode."""
        return await self._persist(lambda: self._ask(method, params))

    def _episode(self) -> str:
        return f"{self.pool.name}-g{self.group}-r{self.index}-{self.pool.next_episode()}"

    @property
    def _doubtful(self) -> bool:
        return self._failed or not self.session.open

    async def _begin(self, options: dict) -> StepResult:
        if self._doubtful:
            await self._replace()
        return await self.session.reset(**options)

    async def _act(self, action: dict) -> StepResult:
        await self._recover()
        return await self.session.step(action)

    async def _ask(self, method: str, params: dict | None) -> dict:
        await self._recover()
        return await self.session.mcp(method, params)

    async def _recover(self) -> None:
        """Under `retry`, a doubtful session is replaced and its episode replayed."""
        if self._doubtful and self.pool.on_failure == "retry":
            if not self._failed:
                self._note(SessionLost("the connection was closed between two requests"))
            await self._replay()

    async def _replace(self) -> None:
        await self.pool.replace(self)
        self._failed = False

    async def _persist(self, call: Callable[[], Awaitable[StepResult]]) -> StepResult:
        """The call's result; under `retry`, a failed one is tried again, on a new session brought to where this one was."""
        for attempt in range(self.pool.retries + 1):
            if attempt > 1:  # the first time a replacement waits for its server by itself
                await self.pool.waits.pause(self.index, 0.1 * 2**attempt)
            try:
                return await call()
            except InvalidAction:
                raise
            except (SessionLost, ConnectError, ServerError) as fault:
                self._failed = True
                if attempt == self.pool.retries:
                    raise
                if self._log is None:
                    raise SessionLost(f"{fault}; its episode has more than {REPLAY_CHARACTERS} characters of actions and "
                                      "replies, so it was not kept and cannot be replayed") from fault
                self._note(fault)
        raise AssertionError("unreachable")

    def _note(self, cause: BaseException) -> None:
        self.pool.note_retry(Failure(self.group, self.index, self.turn, self.session.episode_id, cause))

    def _remember(self, kind: str, asked: dict, result: StepResult) -> None:
        if self.pool.on_failure == "retry" and self._log is not None:
            entry = kind, _text(asked), _text(vars(result))
            self._logged += len(entry[1]) + len(entry[2])
            self._log.append(entry)
            if self._logged > REPLAY_CHARACTERS:
                self._log = None

    async def _replay(self) -> None:
        """A new session, brought to where the lost one stood; every reply on the way must be the same."""
        await self._replace()
        with self.span("replay"):
            for turn, (kind, asked, before) in enumerate(self._log):
                said = json.loads(asked)
                now = _text(vars(await (self.session.reset(**said) if kind == "reset" else self.session.step(said))))
                if now != before:
                    self._failed = True
                    where = "its reset" if kind == "reset" else f"turn {turn}, {asked:.100}"
                    raise ReplayDiverged(f"rollout {self.index} was replayed, and at {where} the environment answered "
                                         f"otherwise: {first_difference(before, now)}; use on_failure='drop' here")
