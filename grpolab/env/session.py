"""One session of the server: recv -> parse -> worker -> send, from the factory to the backend's return."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from grpolab.env import protocol
from grpolab.env.backends import Lease
from grpolab.env.process import Child
from grpolab.env.protocol import InvalidRequest
from grpolab.env.worker import Worker, start_thread

if TYPE_CHECKING:
    from grpolab.env.server import EnvServer

log = logging.getLogger("grpolab.env.server")

MAX_EPISODE_ID = 255  # characters; OpenEnv's limit. It stands in every line of the trace
MESSAGE_COST = 256  # bytes; what a waiting message costs beside its text


class Hung(Exception):
    """An environment call outlasted its deadline: create, reset, step, state or close; `reply` is the error frame."""

    def __init__(self, phase: str, message: str):
        super().__init__(message)
        self.reply = protocol.error(message, f"{phase.upper()}_TIMEOUT")


class Session:
    """One connection's environment. `serve` ends when the client leaves, the session is over or the server stops; `close`
    has then to be awaited."""

    def __init__(self, number: int, server: EnvServer, connection: ServerConnection, key: Any):
        self.number, self.server, self.connection = number, server, connection
        self.key = key  # whose place it has
        self.opened = time.monotonic()
        self.busy: str | None = None
        self.episode_id: str | int | None = None
        self.steps = 0
        self.lease: Lease | None = None
        self.over = False  # no further request is served
        self.worker: Worker | Child | None = None
        self._left = False  # the client, or what it sends cannot be read any more
        self._inbox: deque[str | bytes | InvalidRequest] = deque()
        self._size = 0  # of what waits there, in bytes
        self._news = asyncio.Event()
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
        """Take messages as they come, so that pongs are always read and a client that leaves is noticed."""
        try:
            async for message in self.connection:
                self._size += len(message) + MESSAGE_COST
                if self._size > self.server.max_message_bytes + MESSAGE_COST:
                    self._inbox.append(InvalidRequest(
                        f"more than {self.server.max_message_bytes} bytes of messages wait for a reply: "
                        "send the next one when the last is answered", "SESSION_ERROR"))
                    self._news.set()
                    return
                self._inbox.append(message)
                self._news.set()
        except ConnectionClosed:
            pass
        self._left = True
        self._news.set()
        if self.worker is not None:
            self.worker.cancel()  # nobody waits for what it does

    async def _next(self) -> str | bytes | None:
        """The next message, or None if there is no more to be answered. Raises InvalidRequest where too much waited."""
        while not (self._inbox or self._left or self.server.stopping):
            self._news.clear()
            await self._news.wait()
        if self._left or self.server.stopping:
            return None
        message = self._inbox.popleft()
        if isinstance(message, InvalidRequest):
            raise message
        self._size -= len(message) + MESSAGE_COST
        return message

    async def _send(self, text: str) -> None:
        self._sent += 1
        await self.connection.send(text)

    async def _watch_reader(self) -> None:
        """Abort the connection once its client takes nothing for as long as it may leave a ping unanswered: pings would wait
        behind what it does not read, for ever."""
        patience = self.server.patience
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
        server = self.server
        try:
            if server.backends is not None:
                self.lease = await asyncio.to_thread(server.backends.acquire)
            self.worker = await self._start(() if self.lease is None else (self.lease.resource,))
            said, fault = await self._call("create", server.reset_timeout)
        except Exception as raised:
            log.exception("session %d: %s could not be made", self.number, server.env_name)
            said, fault = str(raised), type(raised).__name__
        if fault:
            self.over = True
            if fault == "ProcessEnded":
                said = "its process ended; what it printed is in the server's log"
            raise InvalidRequest(f"Environment factory '{server.env_name}' failed to create instance: {said}", "FACTORY_ERROR")

    async def _start(self, arguments: tuple) -> Worker | Child:
        server = self.server
        if server.isolation is not None:
            return await Child.start(server.factory, server.isolation, server.env_name, arguments=arguments,
                                     latency=server.latency)
        worker = Worker(lambda: server.factory(*arguments), server.env_name, server.latency)
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
        return await self._call_env("reset", self.server.reset_timeout, options)

    async def _step(self, action: dict) -> str:
        self.steps += 1
        return await self._call_env("step", self.server.step_timeout, action)

    async def _state(self, _: dict) -> str:
        known = {"episode_id": self.episode_id, "step_count": self.steps}
        return await self._call_env("state", self.server.step_timeout, known)

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
                self.worker.post(phase, data, partial(loop.call_soon_threadsafe, _settle, outcome))
                text, ended_by = await outcome
            return text, ended_by
        except TimeoutError as raised:
            ended_by = "timeout"
            self._hung = self.over = True
            raise Hung(phase, f"{phase} of {self.server.env_name} took longer than {seconds:g} s; the session is over"
                       ) from raised
        except BaseException as raised:
            ended_by = type(raised).__name__
            raise
        finally:
            self.busy = None
            self.server.record(phase, self, start, ended_by)

    def hurry(self) -> None:
        """End the request in flight now, as if its deadline had passed."""
        self._news.set()
        if self.busy in ("create", "reset", "step", "state"):
            with contextlib.suppress(RuntimeError):  # the call has just ended by itself
                self._scope.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Close the environment, then give the backend back; bounded, and complete when it returns."""
        server, poisoned = self.server, self._hung
        if self._hung and self.lease is not None:
            # Killing what the environment waits for is what makes most hung threads return.
            await asyncio.to_thread(server.backends.kill, self.lease)
        if self.worker is not None:
            poisoned |= not await self._close_env()
        if self.lease is not None:
            await asyncio.to_thread(server.backends.release, self.lease, poisoned=poisoned)

    async def _close_env(self) -> bool:
        """Close the environment and end its worker; whether all went as it should."""
        self.worker.cancel()  # a hung `async` call
        self._hung = False
        try:
            said, fault = await self._call("close", self.server.close_timeout)
            if fault:
                log.warning("session %d: closing %s failed: %s", self.number, self.server.env_name, said)
        except Hung as hung:
            fault = "timeout"
            log.warning("session %d: %s", self.number, hung)
        if isinstance(self.worker, Child):
            await self.worker.end(kill=bool(fault))
        else:
            self.worker.stop()
            if self._hung:  # the thread does not return: leave it behind, and count it until it does
                self.server.abandoned += 1
                self._abandoned = True
        return not fault

    def _thread_ended(self) -> None:
        if self._abandoned:
            self.server.abandoned -= 1


def _settle(future: asyncio.Future, text: str, fault: str) -> None:
    if not future.done():
        future.set_result((text, fault))
