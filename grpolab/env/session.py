"""One session of the server: recv -> parse -> worker -> send, from the factory to the backend's return."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from grpolab.env import protocol
from grpolab.env.backends import Lease
from grpolab.env.options import ServeOptions
from grpolab.env.process import Child
from grpolab.env.protocol import InvalidRequest
from grpolab.env.worker import Worker, settle, start_thread

log = logging.getLogger("grpolab.env.server")

MAX_EPISODE_ID = 255  # characters; OpenEnv's limit. It stands in every line of the trace
MAX_WAITING = 2**20  # bytes of messages that may wait for a reply before the session stops reading
MESSAGE_COST = 256  # bytes; what a waiting message costs beside its text
TRACE_CALLS = 50_000  # how many calls the server's trace holds, the last ones


@dataclass
class Hosting:
    """What all sessions of a server share."""

    factory: Callable[..., Any] | str
    name: str
    options: ServeOptions
    stopping: bool = False
    abandoned: int = 0  # threads that hang and were left behind
    trace: deque[dict] = field(default_factory=lambda: deque(maxlen=TRACE_CALLS))
    file: TextIO | None = None  # where every call of the trace is appended to

    def record(self, call: dict) -> None:
        """Add a call to the trace."""
        self.trace.append(call)
        if self.file is None:
            return
        try:
            self.file.write(protocol.dumps(call) + "\n")
        except (OSError, ValueError):  # a full disk, a closed file: it costs the trace its line, not a client its reply
            log.exception("session %d: a %s could not be written to the trace", call["session"], call["phase"])


class Hung(Exception):
    """An environment call outlasted its deadline: create, reset, step, state or close; `reply` is the error frame."""

    def __init__(self, phase: str, message: str):
        super().__init__(message)
        self.reply = protocol.error(message, f"{phase.upper()}_TIMEOUT")


class Session:
    """One connection's environment. `serve` ends when the client leaves, the session is over or the server stops; `close`
    has then to be awaited."""

    def __init__(self, number: int, hosting: Hosting, connection: ServerConnection):
        self.number, self.hosting, self.options, self.connection = number, hosting, hosting.options, connection
        self.opened = time.monotonic()
        self.busy: str | None = None
        self.episode_id: str | int | None = None
        self.steps = 0
        self.lease: Lease | None = None
        self.over = False  # no further request is served
        self.worker: Worker | Child | None = None
        self._left = False  # the client
        self._inbox: asyncio.Queue[str | bytes | None] = asyncio.Queue()
        self._waiting = 0  # bytes of the messages in the inbox
        self._room = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self._hung = False
        self._abandoned = False  # its thread was left behind
        self._sent = 0

    @property
    def leaving(self) -> bool:
        """Whether its place is about to be free."""
        return self.over or self._left or self.connection.state in (State.CLOSING, State.CLOSED)

    async def serve(self) -> None:
        """Answer every message but `close`, in order."""
        reading = asyncio.ensure_future(self._read())
        watching = asyncio.ensure_future(self._watch_reader())
        try:
            await self._open()
            while not self.over and (message := await self._next()) is not None:
                reply = await self._answer(message)
                if reply is not None:
                    await self._send(reply)
        except (InvalidRequest, Hung) as fault:
            self.over = True
            with contextlib.suppress(ConnectionClosed):
                await self._send(fault.reply)
        except ConnectionClosed:
            pass
        finally:
            self.over = True
            reading.cancel()
            watching.cancel()

    async def _read(self) -> None:
        """Take messages as they come, so that pongs are always read and a client that leaves is noticed; but none while more
        than MAX_WAITING bytes wait: a client is to send its next request when the last one is answered."""
        with contextlib.suppress(ConnectionClosed):
            async for message in self.connection:
                self._waiting += len(message) + MESSAGE_COST
                self._inbox.put_nowait(message)
                while self._waiting > MAX_WAITING:
                    self._room.clear()
                    await self._room.wait()
        self._left = True
        self._inbox.put_nowait(None)
        if self.worker is not None:
            self.worker.cancel()  # nobody waits for what it does

    async def _next(self) -> str | bytes | None:
        """The next message, or None if there is no more to be answered."""
        message = None if self.hosting.stopping else await self._inbox.get()
        if message is None or self._left or self.hosting.stopping:
            return None
        self._waiting -= len(message) + MESSAGE_COST
        self._room.set()
        return message

    async def _send(self, text: str) -> None:
        self._sent += 1
        await self.connection.send(text)

    async def _watch_reader(self) -> None:
        """Abort the connection once its client takes nothing for as long as it may leave a ping unanswered: pings would wait
        behind what it does not read, for ever."""
        patience = self.options.patience
        if patience is None:
            return
        before, moved = (0, 0), time.monotonic()
        while True:
            await asyncio.sleep(patience / 4)
            unread = self.connection.transport.get_write_buffer_size()
            if not unread or unread < before[0] or self._sent != before[1]:
                moved = time.monotonic()
            elif time.monotonic() - moved >= patience:
                self.connection.transport.abort()
                return
            before = unread, self._sent

    async def _open(self) -> None:
        """Lease a backend if there are any, and make the environment; raises InvalidRequest(FACTORY_ERROR)."""
        options, name = self.options, self.hosting.name
        try:
            if options.backends is not None:
                self.lease = await asyncio.to_thread(options.backends.acquire)
            self.worker = await self._start(() if self.lease is None else (self.lease.resource,))
            reason, fault = await self._call("create", options.reset_timeout)
        except Exception as raised:
            log.exception("session %d: %s could not be made", self.number, name)
            reason, fault = str(raised), type(raised).__name__
        if fault:
            self.over = True
            if fault == "ProcessEnded":
                reason = "its process ended; what it printed is in the server's log"
            raise InvalidRequest(f"Environment factory '{name}' failed to create instance: {reason}", "FACTORY_ERROR")

    async def _start(self, arguments: tuple) -> Worker | Child:
        factory, name, options = self.hosting.factory, self.hosting.name, self.options
        if options.isolation is not None:
            return await Child.start(factory, options.isolation, name, arguments=arguments, latency=options.latency)
        worker = Worker(lambda: factory(*arguments), name, options.latency)
        loop = asyncio.get_running_loop()
        start_thread(worker, f"env-session-{self.number}", partial(loop.call_soon_threadsafe, self._thread_ended))
        return worker

    async def _answer(self, text: str | bytes) -> str | None:
        """The reply to one message, or None after `close`; raises Hung."""
        try:
            kind, data = protocol.parse_request(text)
            if kind == "close":
                self.over = True
                return None
            return await getattr(self, f"_{kind}")(data)
        except InvalidRequest as fault:
            self.over = fault.ends
            return fault.reply

    async def _reset(self, options: dict) -> str:
        name = options.get("episode_id")
        if isinstance(name, bool) or not isinstance(name, str | int | None) or len(str(name)) > MAX_EPISODE_ID:
            fault = {"type": "string_too_long", "loc": ["data", "episode_id"],
                     "msg": f"an episode_id is text of at most {MAX_EPISODE_ID} characters, got {str(name)[:40]!r}..."}
            raise InvalidRequest("Invalid message", "VALIDATION_ERROR", [fault])
        self.episode_id, self.steps = name, 0
        return await self._call_env("reset", self.options.reset_timeout, options)

    async def _step(self, action: dict) -> str:
        self.steps += 1
        return await self._call_env("step", self.options.step_timeout, action)

    async def _state(self, _: dict) -> str:
        known = {"episode_id": self.episode_id, "step_count": self.steps}
        return await self._call_env("state", self.options.step_timeout, known)

    async def _mcp(self, request: dict) -> str:
        return protocol.no_mcp(request)

    async def _call_env(self, phase: str, seconds: float, data: dict) -> str:
        text, fault = await self._call(phase, seconds, data)
        if fault == "ProcessEnded":
            self.over = True
        return text

    async def _call(self, phase: str, seconds: float, data: Any = None) -> tuple[str, str]:
        """(reply text, name of the fault) of one environment call; raises Hung after its deadline."""
        self.busy, start, ended_by = phase, time.time(), ""
        loop = asyncio.get_running_loop()
        outcome = loop.create_future()
        try:
            async with asyncio.timeout(seconds) as self._scope:
                self.worker.post(phase, data, partial(loop.call_soon_threadsafe, settle, outcome))
                text, ended_by = await outcome
            return text, ended_by
        except TimeoutError as raised:
            ended_by = "timeout"
            self._hung = self.over = True
            raise Hung(phase, f"{phase} of {self.hosting.name} took longer than {seconds:g} s; the session is over"
                       ) from raised
        except BaseException as raised:
            ended_by = type(raised).__name__
            raise
        finally:
            self.busy = None
            self.hosting.record({
                "time": start, "phase": phase, "seconds": time.time() - start, "session": self.number,
                "episode_id": self.episode_id, "turn": self.steps, "error": ended_by,
                "backend": self.lease and self.lease.name})

    def hurry(self) -> None:
        """End the request in flight now, as if its deadline had passed."""
        self._inbox.put_nowait(None)
        if self.busy in ("create", "reset", "step", "state"):
            with contextlib.suppress(RuntimeError):  # the call has just ended by itself
                self._scope.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Close the environment, then give the backend back; bounded, and complete when it returns."""
        backends, poisoned = self.options.backends, self._hung
        if self._hung and self.lease is not None:
            # Killing what the environment waits for is what makes most hung threads return.
            await asyncio.to_thread(backends.kill, self.lease)
        if self.worker is not None:
            poisoned |= not await self._close_env()
        if self.lease is not None:
            await asyncio.to_thread(backends.release, self.lease, poisoned=poisoned)

    async def _close_env(self) -> bool:
        """Close the environment and end its worker; whether all went as it should."""
        self.worker.cancel()  # a hung `async` call
        self._hung = False
        try:
            reason, fault = await self._call("close", self.options.close_timeout)
            if fault:
                log.warning("session %d: closing %s failed: %s", self.number, self.hosting.name, reason)
        except Hung as hung:
            fault = "timeout"
            log.warning("session %d: %s", self.number, hung)
        if isinstance(self.worker, Child):
            await self.worker.end(kill=bool(fault))
        else:
            self.worker.stop()
            if self._hung:  # the thread does not return: leave it behind, and count it until it does
                self.hosting.abandoned += 1
                self._abandoned = True
        return not fault

    def _thread_ended(self) -> None:
        if self._abandoned:
            self.hosting.abandoned -= 1
