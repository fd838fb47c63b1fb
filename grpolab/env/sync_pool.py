"""MultiTurnEnvPool: the synchronous pool, for scripts and for other code that cannot await."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partialmethod
from typing import Any

from grpolab.env.client import Span
from grpolab.env.pool import GrpoPool


class MultiTurnEnvPool:
    """The synchronous pool: a GrpoPool, with the same arguments and methods, without `await`; rollouts are `async` still.

    The sessions live on an event loop in a thread of their own, so this works in a script and in a notebook alike, and
    pings are answered while the caller computes. A server on the caller's own loop cannot answer while the caller waits: give
    the environment's class in place of its URL. Interrupting a call (Ctrl-C) cancels it there before it returns.
    """

    def __init__(self, url: str, size: int = 8, **options: Any):
        self.pool = GrpoPool(url, size, **options)
        self.record_group_result = self.pool.record_group_result
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> MultiTurnEnvPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the loop's thread and connect, all or nothing; a failure leaves nothing, and it may be tried again."""
        if self._loop is not None:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._call(GrpoPool.connect)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Close every session and end the thread; bounded by `deadlines.close`. Idempotent."""
        if self._loop is not None:
            self._call(GrpoPool.close)
            self._end()

    @property
    def trace(self) -> list[Span]:
        return self.pool.trace

    def _call(self, method: Callable[..., Coroutine], *arguments: Any, **options: Any) -> Any:
        """The result of a method of GrpoPool on the loop's thread. Its deadlines bound the wait; an interrupt cancels it
        first."""
        if self._loop is None:
            raise RuntimeError("the pool is not started: use `with MultiTurnEnvPool(url) as pool`, or pool.start()")
        ended = threading.Event()

        async def run() -> Any:
            try:
                return await method(self.pool, *arguments, **options)
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except BaseException:  # the call's own error; or an interrupt, which has to end the call
            future.cancel()
            ended.wait(self.pool.deadlines.close + 1.0)
            raise

    reset_group = partialmethod(_call, GrpoPool.reset_group)
    run_group_step = partialmethod(_call, GrpoPool.run_group_step)
    run_group = partialmethod(_call, GrpoPool.run_group)

    def _end(self) -> None:
        loop, self._loop = self._loop, None
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()
