"""A rollout's place in a group. Behind it stands a session, which is replaced when it is lost or in doubt, never repaired."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from grpolab.env.client import EnvSession
from grpolab.env.protocol import InvalidAction, ServerError, StepResult


@dataclass(frozen=True)
class Failure:
    """A rollout that gave no result: which, in which group and turn, of which episode, and why."""

    group: int
    rollout: int
    turn: int
    episode: str
    cause: BaseException

    def without_frames(self) -> Failure:
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


class Slot:
    """What a rollout gets: `reset`, `step`, `state` of one environment, its own `seed`, and `span` for the timeline.

    `index` is the rollout's number in the group, `turn` the number of its steps in this episode, `result` the last reply.

    After an error reply (a ServerError: the environment raised, its backend may be dead), a failed reset or a lost
    connection the session is closed and replaced before the next episode. An InvalidAction is no such error: the
    environment could not read the action, and goes on.
    """

    def __init__(self, index: int, session: EnvSession, open_session: Callable[[int], Awaitable[EnvSession]], *,
                 pool_seed: int, pool_name: str):
        self.index, self.session = index, session
        self.group = self.turn = 0
        self.result: StepResult | None = None
        self._open_session, self._pool_seed, self._pool_name = open_session, pool_seed, pool_name
        self._episodes = 0
        self._failed = False

    @property
    def seed(self) -> int:
        """The seed of this rollout's own randomness: differs between rollouts and groups, the same in every run."""
        return rollout_seed(self._pool_seed, self.group, self.index)

    @property
    def group_seed(self) -> int:
        """The seed that all rollouts of this group share, so that their environments pose the same question."""
        return rollout_seed(self._pool_seed, self.group, -1)

    def span(self, phase: str):
        """`with slot.span("generate"): ...` records the enclosed time in the pool's trace."""
        return self.session.span(phase)

    async def reset(self, *, seed: int | None = None, task: Any = None, **options: Any) -> StepResult:
        """Start an episode, on a new session if this one was lost or in doubt. It is named after its group and rollout."""
        self._episodes += 1
        episode = f"{self._pool_name}-g{self.group}-r{self.index}-{self._episodes}"
        named = {"episode_id": episode, "seed": seed, "task": task, **options}
        self.turn = 0
        try:
            if self._failed or not self.session.open:
                await self._replace()
            self.result = await self.session.reset(**{name: value for name, value in named.items() if value is not None})
        except BaseException:
            self._failed = True
            raise
        return self.result

    async def step(self, action: dict) -> StepResult:
        """Send one action; its reply is also kept as `result`."""
        self.result = await self._request(self.session.step(action))
        self.turn += 1
        return self.result

    async def state(self) -> dict:
        """What the environment says of itself."""
        return await self._request(self.session.state())

    async def mcp(self, method: str, params: dict | None = None) -> dict:
        """One MCP request to the environment (`EnvSession.mcp`), which is no step of the episode."""
        return await self._request(self.session.mcp(method, params))

    async def _request(self, request: Awaitable) -> Any:
        """Its reply; after an error of the environment this session serves no further episode."""
        try:
            return await request
        except InvalidAction:
            raise
        except ServerError:
            self._failed = True
            raise

    async def _replace(self) -> None:
        await self.session.close()
        self.session = await self._open_session(self.index)
        self._failed = False
