"""Waiting for a server: how a pool asks again, and the line at a full one, in which the pools of one event loop are admitted
in the order in which they were refused.

A server answers 503 and forgets who asked. Without a line, a pool that closes and reopens each round is back long before the
one that waits asks again. Pools of other processes stand in no line of ours: between them, the server decides.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

from grpolab.env.client import Span
from grpolab.env.protocol import CapacityError, ConnectError


class Line:
    """`turn` is held by who is first, and asyncio hands it on in the order of asking; `freed` tells them that sessions of
    this server were closed here; `waiting` counts all who stand in line."""

    def __init__(self):
        self.turn, self.freed, self.waiting = asyncio.Lock(), asyncio.Event(), 0


_LINES: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], Line] = WeakValueDictionary()


def line_at(url: str) -> Line:
    """The line at a server, for pools of the running loop. It lives as long as somebody holds it."""
    return _LINES.setdefault((asyncio.get_running_loop(), url), Line())


def _is_full(refused: ConnectError) -> bool:
    return isinstance(refused, CapacityError)


class Waits:
    """How one pool waits; every wait is a `queue` span of its trace."""

    def __init__(self, trace: deque[Span]):
        self._trace = trace
        self._jitter = random.Random()  # waiting times only; nothing that a result depends on

    async def pause(self, index: int, seconds: float, until: asyncio.Event | None = None) -> None:
        """Wait for `seconds`, or until the event is set."""
        start = perf_counter()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (until or asyncio.Event()).wait()
        self._trace.append(Span("queue", start, perf_counter(), index))

    async def again(self, attempt: Callable[[], Awaitable], end: float, passing: Callable[[ConnectError], bool],
                    index: int = -1, refused: ConnectError | None = None, freed: asyncio.Event | None = None) -> Any:
        """`await attempt()`, again after each refusal that is `passing`: when the server's Retry-After says, without one
        later each time, or when `freed` is set; no later than `end` (perf_counter). `refused` is what came of a first one.

        A wait that also grew under Retry-After would favour the newcomer over who has waited longest.
        """
        wait = 0.05
        while True:
            if refused is None:
                if freed is not None:
                    freed.clear()
                try:
                    return await attempt()
                except ConnectError as fault:
                    refused = fault
            asked = refused.retry_after if isinstance(refused, CapacityError) else None
            pause = (asked or wait) * self._jitter.uniform(1.0, 1.5)  # those who were refused together come back apart
            if not passing(refused) or perf_counter() + pause > end:
                raise refused
            await self.pause(index, pause, freed)
            refused, wait = None, min(2 * wait, 2.0)

    async def admitted(self, line: Line, attempt: Callable[[], Awaitable], seconds: float) -> Any:
        """`await attempt()`: at once if nobody waits for the server and it has room, else in line, within `seconds`.
        Raises CapacityError."""
        refused = CapacityError(f"the server is full, and {line.waiting} pools of this process stand in line; pass "
                                "queue=seconds to stand behind them")
        if not line.waiting:
            try:
                return await attempt()
            except CapacityError as full:
                refused = full
        if not seconds:
            raise refused
        start, first = perf_counter(), not line.waiting
        line.waiting += 1
        try:
            try:
                async with asyncio.timeout(seconds):
                    await line.turn.acquire()
            except TimeoutError:
                raise refused from None
            try:
                if not first:
                    self._trace.append(Span("queue", start, perf_counter(), -1))
                return await self.again(attempt, start + seconds, _is_full, -1, refused if first else None, line.freed)
            finally:
                line.turn.release()
        finally:
            line.waiting -= 1
