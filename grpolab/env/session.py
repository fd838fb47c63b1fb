"""One session of the server: recv -> parse -> call -> send, from the making of its environment to its closing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from grpolab.access import check_host
from grpolab.env import protocol
from grpolab.env.process import Child, Isolation
from grpolab.env.protocol import InvalidRequest
from grpolab.env.worker import EnvThread

log = logging.getLogger("grpolab.env.server")


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """Times in seconds."""

    reset_timeout: float = 60.0  # longest reset
    step_timeout: float = 60.0  # longest step
    close_timeout: float = 5.0  # longest closing of an environment
    ping_interval: float | None = 5.0  # between heartbeats; None, or 0 on the command line, turns them off
    ping_timeout: float | None = 10.0  # without an answer before a client counts as gone


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServeLimits):
    """How `serve` treats its sessions.

    isolate: "thread", one for each session (an `async` environment has an event loop in it); or "process", one that can be
    killed and inherits no secrets, for which the environment must be importable; an `Isolation` says more about that process.
    arguments: keyword arguments of the environment, JSON where it is in a process. token: every client must send it; required
    on an address that other machines reach.
    A client that answers no ping for ping_interval + ping_timeout is gone, however long its step takes, and so is one that
    has not taken a reply by then; None turns pings off.
    """

    max_sessions: int = 8
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    isolate: str | Isolation = "thread"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    token: str | None = None

    def __post_init__(self):
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port}: a port is 0 (any free one) to 65535")
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions={self.max_sessions}: a server holds at least one session")
        for name in ("reset_timeout", "step_timeout", "close_timeout", "ping_interval", "ping_timeout"):
            seconds = getattr(self, name)
            if not (seconds is None and name.startswith("ping")) and not 0 < (seconds or 0) < math.inf:
                raise ValueError(f"{name}={seconds}: seconds, more than 0 and finite")
        check_host(self.host, self.token)
        if self.isolate not in ("thread", "process") and not isinstance(self.isolate, Isolation):
            raise ValueError(f"isolate={self.isolate!r}: use 'thread', 'process' or an Isolation(...)")

    @property
    def isolation(self) -> Isolation | None:
        """How a session's process runs; None for a thread."""
        if self.isolate == "thread":
            return None
        return Isolation() if self.isolate == "process" else self.isolate


@dataclass
class Hosting:
    """What all sessions of a server share."""

    factory: Callable[..., Any] | str
    name: str
    options: ServeOptions
    stopping: bool = False
    hung: list[Thread] = field(default_factory=list)  # threads that were left behind

    @property
    def abandoned(self) -> int:
        """How many of them still hang."""
        self.hung = [thread for thread in self.hung if thread.is_alive()]
        return len(self.hung)


class Session:
    """One connection's environment. `serve` ends when the client leaves, the session is over or the server stops; then await
    `close`."""

    def __init__(self, number: int, hosting: Hosting, connection: ServerConnection):
        self.number, self.hosting, self.options, self.connection = number, hosting, hosting.options, connection
        self.busy: str | None = None
        self.episode_id: Any = None
        self.steps = 0
        self.env: EnvThread | Child | None = None
        self.serving: asyncio.Task | None = None  # since its handler has begun
        self._over = False  # no further request is served

    @property
    def leaving(self) -> bool:
        """Whether its place is about to be free."""
        return self._over or self.connection.state in (State.CLOSING, State.CLOSED)

    async def serve(self) -> None:
        """Answer every message but `close`, in order."""
        self.serving = asyncio.current_task()
        gone = asyncio.ensure_future(self.connection.wait_closed())
        gone.add_done_callback(lambda _: self.env and self.env.cancel())  # nobody waits for what it does
        try:
            await self._open()
            async for message in self.connection:
                if (reply := await self._answer(message)) is not None:
                    await self._send(reply)
                self._over |= self.hosting.stopping
                if self._over:
                    break
        except InvalidRequest as fault:
            with contextlib.suppress(ConnectionClosed):
                await self._send(fault.reply)
        except ConnectionClosed:
            pass
        finally:
            self._over = True
            gone.cancel()

    async def _send(self, text: str) -> None:
        """Send a reply. A client that does not take it for as long as it may leave a ping unanswered is cut off: pings would
        wait behind what it does not read, for ever."""
        interval, timeout = self.options.ping_interval, self.options.ping_timeout
        try:
            async with asyncio.timeout(interval + timeout if interval and timeout else None):
                await self.connection.send(text)
        except TimeoutError:
            self._over = True
            self.connection.transport.abort()

    async def _open(self) -> None:
        """Make the environment; raises InvalidRequest(FACTORY_ERROR)."""
        options, factory, name = self.options, self.hosting.factory, self.hosting.name
        try:
            if options.isolation is None:
                self.env = EnvThread(lambda: factory(**options.arguments), name)
            else:
                self.env = await Child.start(factory, options.isolation, name, options.arguments)
            reason, fault = await self._call("create", options.reset_timeout)
        except Exception as raised:
            log.exception("session %d: %s could not be made", self.number, name)
            reason, fault = str(raised), type(raised).__name__
        if fault == "ProcessEnded":
            reason = "its process ended; what it printed is in the server's log"
        if fault:
            raise InvalidRequest(f"Environment factory '{name}' failed to create instance: {reason}", "FACTORY_ERROR")

    async def _answer(self, message: str | bytes) -> str | None:
        """The reply to one message, or None after `close`."""
        try:
            kind, data = protocol.parse_request(message)
            if kind == "close":
                self._over = True
                return None
            if kind == "reset":
                self.episode_id, self.steps = data.get("episode_id"), 0
            if kind == "step":
                self.steps += 1
            if kind == "state":
                data = {"episode_id": self.episode_id, "step_count": self.steps}
            seconds = self.options.reset_timeout if kind == "reset" else self.options.step_timeout
            reply, fault = await self._call(kind, seconds, data)  # of mcp: within a step's time
            self._over = fault == "ProcessEnded"
            return reply
        except InvalidRequest as refused:
            self._over = refused.ends
            return refused.reply

    async def _call(self, phase: str, seconds: float, data: Any = None) -> tuple[str, str]:
        """(reply, name of the fault) of one environment call; raises InvalidRequest after its deadline."""
        self.busy = phase
        try:
            async with asyncio.timeout(seconds):
                return await self.env.call(phase, data)
        except TimeoutError as raised:
            raise InvalidRequest(f"{phase} of {self.hosting.name} took longer than {seconds:g} s; the session is over",
                                 f"{phase.upper()}_TIMEOUT") from raised
        finally:
            self.busy = None

    def abort(self) -> None:
        """End `serve` now: the server stops, and what is in flight had its time."""
        if self.serving is not None and not self._over:
            self.serving.cancel()

    async def close(self) -> None:
        """Close the environment and end its thread or process; bounded, and complete when it returns."""
        if self.env is None:
            return
        self.env.cancel()  # a hung `async` call
        try:
            reason, fault = await self._call("close", self.options.close_timeout)
        except InvalidRequest as hung:
            reason = fault = str(hung)
            if isinstance(self.env, EnvThread):  # it does not return: leave it behind, and count it until it does
                self.hosting.hung.append(self.env.thread)
        if fault:
            log.warning("session %d: closing %s failed: %s", self.number, self.hosting.name, reason)
        await self.env.end(kill=bool(fault))
