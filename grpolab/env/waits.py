"""How a pool waits for a server that has no place for it, or none yet."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from grpolab.env.client import Span
from grpolab.env.protocol import CapacityError, ConnectError


class Waits:
    """How one pool waits; every wait is a `queue` span of its trace."""

    def __init__(self, trace: deque[Span]):
        self._trace = trace
        self._jitter = random.Random()  # waiting times only; nothing that a result depends on

    async def pause(self, index: int, seconds: float) -> None:
        start = perf_counter()
        await asyncio.sleep(seconds)
        self._trace.append(Span("queue", start, perf_counter(), index))

    async def again(self, attempt: Callable[[], Awaitable], end: float, passing: Callable[[ConnectError], bool],
                    index: int = -1) -> Any:
        """`await attempt()`, again after each refusal that is `passing`: when the server's Retry-After says, without one
        later each time; no later than `end` (perf_counter).

        A wait that also grew under Retry-After would favour the newcomer over who has waited longest.
        """
        wait = 0.05
        while True:
            try:
                return await attempt()
            except ConnectError as refused:
                asked = refused.retry_after if isinstance(refused, CapacityError) else None
                pause = (asked or wait) * self._jitter.uniform(1.0, 1.5)  # those who were refused together come back apart
                if not passing(refused) or perf_counter() + pause > end:
                    raise
            await self.pause(index, pause)
            wait = min(2 * wait, 2.0)
