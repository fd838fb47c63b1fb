"""Environments in this process: sessions of a pool without a server or a socket.

    async with GrpoPool(MyEnv, size=8) as pool: ...

Each session makes an environment of its own and calls it in a thread of its own, with the deadlines and errors of a session
over a socket, and what passes between them is the same JSON. A thread that hangs cannot be killed: it is left behind.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from grpolab.env import protocol
from grpolab.env.client import Deadlines, EnvSession, Span
from grpolab.env.protocol import DeadlineExceeded, FactoryError, SessionLost
from grpolab.env.worker import EnvThread


def name_of(make: Callable[[], Any]) -> str:
    return getattr(make, "__name__", type(make).__name__)


class LocalSession(EnvSession):
    """`EnvSession` of the environment that `make()` makes here."""

    address = staticmethod(name_of)  # stands where the URL does in messages

    def __init__(self, make: Callable[[], Any], *, deadlines: Deadlines | None = None, trace: deque[Span] | None = None,
                 index: int = 0):
        super().__init__(make, deadlines=deadlines, trace=trace, index=index)
        self._make = make
        self._thread: EnvThread | None = None

    @property
    def open(self) -> bool:
        return self._thread is not None and self.lost is None

    async def _open_socket(self) -> None:
        thread, seconds = EnvThread(self._make, self.url), self.deadlines.admit
        try:
            async with asyncio.timeout(seconds):
                reason, fault = await thread.call("create", None)
            if fault:
                raise FactoryError(f"{self.url} could not be made: {reason}")
        except BaseException as error:
            _end(thread)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("admit", seconds, self.url) from error
            raise
        self._socket = self._thread = thread

    async def _exchange(self, phase: str, text: str) -> str:
        request = json.loads(text)
        kind, data = request["type"], request.get("data", {})
        if kind == "mcp":
            return protocol.no_mcp(data)
        data = {"episode_id": self.episode_id, "step_count": self.turn} if kind == "state" else data
        reply, fault = await self._thread.call(kind, data)
        if not reply:  # an `async` environment cancelled itself
            raise SessionLost(f"{self.url} ended a {kind} with {fault}")
        return reply

    async def close(self) -> None:
        """Let the environment close, for at most `deadlines.close` s. Idempotent."""
        was_open = self.open
        self.lost = self.lost or SessionLost("this session was closed")
        if was_open:
            with self.span("close"), suppress(TimeoutError):
                async with asyncio.timeout(self.deadlines.close):
                    await self._thread.call("close", None)
            self._thread.stop()

    def _cut(self) -> None:
        if self._thread is not None:
            _end(self._thread)


def _end(thread: EnvThread) -> None:
    """Cancel what an `async` environment is doing, let it close and the thread end, and wait for neither."""
    thread.cancel()
    thread.post("close", None, lambda *_: None)
    thread.stop()
