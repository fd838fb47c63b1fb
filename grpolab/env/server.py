"""The environment server: one environment object a WebSocket session, over OpenEnv's protocol.

    async with serve(CalculatorEnv, max_sessions=8) as server:    # in a notebook or a script: server.url, .status()
    python -m grpolab serve calculator --port 0 --max-sessions 8    # a process of its own, and one for each session

What a session costs stays with that session. It holds a slot from the handshake until its environment has closed and
its leased backend is back; over capacity the handshake is answered with HTTP 503. An environment that raises gets an
error reply; one that hangs past its deadline loses its session, its backend is killed, and so is its process under
`isolate="process"`. A thread cannot be killed: it is left behind and counted (`abandoned`), at most `max_sessions` of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.http11 import Request, Response

from grpolab.access import check_host, is_loopback
from grpolab.env import protocol
from grpolab.env.admission import Places
from grpolab.env.backends import BackendError, BackendPool
from grpolab.env.handshake import asked_group, asked_wait, is_told, json_response
from grpolab.env.process import Isolation, check, importable
from grpolab.env.session import Session
from grpolab.env.worker import load_factory

log = logging.getLogger("grpolab.env.server")
_wire_log = logging.getLogger("grpolab.env.wire")
_wire_log.setLevel(logging.CRITICAL)  # refused handshakes and dropped peers are no errors here

CLOSE_HANDSHAKE = 1.0  # s; how long a client may take to answer the close frame before its connection is cut
HANDSHAKE = 10.0  # s; how long a client may take to finish its HTTP request
LEAVING = 1.0  # s; how long a handshake waits for the slot of a session that is closing
TRACE_BYTES = 16 * 2**20  # of the trace that is kept in memory


class EnvServer:
    """What `serve` yields. `url` is what clients connect to; `status()` is the server's own count of everything."""

    def __init__(self, factory: Callable[..., Any] | str, name: str, *, max_sessions: int, isolation: Isolation | None,
                 backends: BackendPool | None, token: str | None, reset_timeout: float, step_timeout: float,
                 close_timeout: float, queue_timeout: float, patience: float | None, max_message_bytes: int, latency: float):
        self.factory, self.env_name, self.max_sessions, self.isolation = factory, name, max_sessions, isolation
        self.backends, self.token = backends, token
        self.reset_timeout, self.step_timeout, self.close_timeout = reset_timeout, step_timeout, close_timeout
        self.queue_timeout, self.patience = queue_timeout, patience
        self.max_message_bytes, self.latency = max_message_bytes, latency
        self.url = ""
        self.abandoned = 0
        self.stopping = False
        self._places = Places(max_sessions)
        self._sessions: dict[int, Session] = {}
        self._admitted: dict[ServerConnection, tuple[Session, asyncio.Task]] = {}  # their handlers have not begun
        self._numbers = itertools.count()
        self._counts: Counter = Counter()
        self._started = time.monotonic()
        self._trace: deque[str] = deque()
        self._trace_bytes = 0
        self._trace_file: TextIO | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def trace(self) -> list[dict]:
        """The last calls, oldest first, as many as TRACE_BYTES hold (some 60,000)."""
        return [json.loads(line) for line in self._trace]

    def status(self) -> dict:
        """Slots, sessions, leases and generations, as JSON-able numbers. `sessions` are the slots that are taken."""
        now = time.monotonic()
        return {
            "environment": self.env_name,
            "isolate": "thread" if self.isolation is None else "process",
            "sessions": len(self._sessions),
            "max_sessions": self.max_sessions,
            "waiting": self._places.waiting,
            "abandoned": self.abandoned,
            "opened": self._counts["opened"],
            "closed": self._counts["closed"],
            "refused": self._counts["refused"],
            "most_sessions": self._counts["most"],
            "stopping": self.stopping,
            "uptime_s": now - self._started,
            "session_list": [
                {"session": s.number, "episode_id": s.episode_id, "steps": s.steps, "busy": s.busy,
                 "age_s": now - s.opened, "backend": s.lease and s.lease.name,
                 "pid": getattr(s.worker, "pid", None)} for s in self._sessions.values()
            ],
            "backends": None if self.backends is None else self.backends.status(),
        }

    def record(self, phase: str, session: Session, start: float, error: str) -> None:
        """One line of the server's trace; (episode_id, turn) is the id that the client's trace carries too."""
        line = protocol.dumps({"time": start, "phase": phase, "seconds": time.time() - start, "session": session.number,
                           "episode_id": session.episode_id, "turn": session.steps, "error": error,
                           "backend": session.lease and session.lease.name})
        self._trace.append(line)
        self._trace_bytes += len(line)
        while self._trace_bytes > TRACE_BYTES:
            self._trace_bytes -= len(self._trace.popleft())
        if self._trace_file is not None:
            try:
                self._trace_file.write(line + "\n")
            except (OSError, ValueError):  # a full disk, a closed file: it costs the trace its line, not a client its reply
                log.exception("session %d: a %s could not be written to the trace", session.number, phase)

    def answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        """Plain HTTP paths and refusals; None lets the WebSocket handshake go on."""
        path = request.path.partition("?")[0]
        if path == "/health":
            return json_response(200, {"status": "healthy"})
        if self.token and not is_told(self.token, request.headers):
            return json_response(401, {"error": "this server needs its bearer token: pass token=..."},
                                  ("WWW-Authenticate", "Bearer"))
        if path == "/status":
            return json_response(200, self.status())
        if path != "/ws":
            return json_response(404, {"error": f"{path} is not served here; there are /ws, /health and /status"})
        return None

    async def admit(self, connection: ServerConnection, request: Request, response: Response) -> Response | None:
        """Take a slot for a valid handshake, or refuse it with 503.

        Who waits for one: a client that says so (`Prefer: wait=SECONDS`), and for a moment every client while a session is
        closing. After `queue_timeout` it is sent away, and under `X-Session-Group: NAME COUNT`, which asks for the slots of
        COUNT sessions at once, it finds its place in line again if it comes back when Retry-After says.
        """
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            return None
        try:
            key, size = asked_group(request.headers, connection)
        except ValueError as fault:
            return json_response(400, {"error": str(fault)})
        wanted = asked_wait(request.headers)
        seconds, returns = min(wanted, self.queue_timeout), wanted > self.queue_timeout and key is not connection
        if any(session.leaving for session in self._sessions.values()):
            seconds = max(seconds, LEAVING)
        closed = asyncio.ensure_future(connection.wait_closed())
        if self._usable() and await self._places.take(key, size, seconds, closed, returns):
            if self._usable() and not closed.done():
                self._take(connection, closed, key)
                return None
            self._places.give_back(key)
        closed.cancel()
        self._counts["refused"] += 1
        active = len(self._sessions)
        reason = ("the server is shutting down" if self.stopping else
                  f"{self.abandoned} environments hang; restart the server, or serve with isolate='process', which can end them"
                  if not self._usable() else
                  f"{size} sessions asked for, and the server has {self.max_sessions}" if size > self.max_sessions else
                  f"Server at capacity: {active}/{self.max_sessions} sessions active")
        body = {"error": reason, "active_sessions": active, "max_sessions": self.max_sessions}
        return json_response(503, body, ("Retry-After", "1"))

    def _usable(self) -> bool:
        return not self.stopping and self.abandoned < self.max_sessions

    def _take(self, connection: ServerConnection, closed: asyncio.Task, key: Any) -> None:
        session = Session(next(self._numbers), self, connection, key)
        self._sessions[session.number] = session
        self._idle.clear()
        self._counts["opened"] += 1
        self._counts["most"] = max(self._counts["most"], len(self._sessions))
        self._admitted[connection] = session, closed
        closed.add_done_callback(lambda _: self._handshake_died(connection))

    def _handshake_died(self, connection: ServerConnection) -> None:
        """The connection is closed: if that was before its handler began, nobody else gives its slot back."""
        if (admitted := self._admitted.pop(connection, None)) is not None:
            self._free(admitted[0])

    def _free(self, session: Session) -> None:
        """Give a session's slot back."""
        if self._sessions.pop(session.number, None) is not None:
            self._counts["closed"] += 1
            self._places.give_back(session.key)
        if not self._sessions:
            self._idle.set()

    async def host(self, connection: ServerConnection) -> None:
        """Serve one session until it ends; its slot is free before the close frame leaves."""
        admitted = self._admitted.pop(connection, None)
        if admitted is None:  # it was closed before we came to it
            return
        session, closed = admitted
        closed.cancel()
        try:
            await session.serve()
        finally:
            # In a task of its own, so that no cancellation can leave an environment or a backend behind.
            closing = asyncio.ensure_future(session.close())
            closing.add_done_callback(lambda _: self._free(session))
            await asyncio.shield(closing)

    async def stop(self, listener: Any, drain: float) -> None:
        """Refuse newcomers, give requests in flight `drain` s, then end every session and wait for it."""
        self.stopping = True
        self._places.close()
        finished = time.monotonic() + drain
        while any(s.busy for s in self._sessions.values()) and time.monotonic() < finished:
            await asyncio.sleep(0.01)
        for session in self._sessions.values():
            session.hurry()
        listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * self.close_timeout + CLOSE_HANDSHAKE):
                await self._idle.wait()
                await listener.wait_closed()


def _check_numbers(port: int, max_sessions: int, max_message_bytes: int, **seconds: float | None) -> None:
    """Raise ValueError with the first number that makes no sense."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port}: a port is 0 (any free one) to 65535")
    if max_sessions < 1:
        raise ValueError(f"max_sessions={max_sessions}: a server holds at least one session")
    if max_message_bytes < 1:
        raise ValueError(f"max_message_bytes={max_message_bytes}: a message has at least one")
    for name, value in seconds.items():
        if value is None and name.startswith("ping"):
            continue
        at_least_zero = name in ("drain", "latency", "queue_timeout")
        if not (value is not None and (0 <= value if at_least_zero else 0 < value) and math.isfinite(value)):
            raise ValueError(f"{name}={value}: seconds, {'0 or more' if at_least_zero else 'more than 0'} and finite"
                             + ("; None turns it off" if name.startswith("ping") else ""))


@contextlib.asynccontextmanager
async def serve(env_factory: Callable[..., Any] | str, *, max_sessions: int = 8, host: str = "127.0.0.1", port: int = 0,
                isolate: str | Isolation = "thread", backends: BackendPool | None = None, token: str | None = None,
                reset_timeout: float = 60.0, step_timeout: float = 60.0, close_timeout: float = 5.0,
                queue_timeout: float = 10.0, ping_interval: float | None = 5.0, ping_timeout: float | None = 10.0,
                max_message_bytes: int = protocol.MAX_MESSAGE_BYTES, latency: float = 0.0, drain: float = 2.0,
                trace: str | Path | None = None) -> AsyncIterator[EnvServer]:
    """Serve `env_factory()` (or `env_factory(resource)` with `backends`) to at most `max_sessions` sessions at once.

    `env_factory` may be the name of one: "package.module:Class". `isolate` says where a session's environment lives:
    "thread", in one of its own here (an `async` one with an event loop of its own); or "process", one that can be killed and
    inherits no secrets (`Isolation(env=, cwd=, memory_mib=)` for more), for which it must be importable.
    Times in seconds. `port=0` takes a free one. A client that answers no ping for `ping_interval + ping_timeout` is
    gone, however long its step takes, and so is one that reads nothing of a reply for that long; None turns both off.
    `token` asks every client for it, and is required on an address that other machines reach. `queue_timeout` is how long a
    client that asks for it may wait in line for a slot; `drain` is what a request in flight gets at shutdown. `latency` is
    added to every reset and step. `trace` is a JSONL file. Browsers are refused (a page of any site could connect to a
    loopback address): clients must send no Origin.
    """
    _check_numbers(port, max_sessions, max_message_bytes, reset_timeout=reset_timeout, step_timeout=step_timeout,
                   close_timeout=close_timeout, queue_timeout=queue_timeout, ping_interval=ping_interval,
                   ping_timeout=ping_timeout, latency=latency, drain=drain)
    check_host(host, token)
    if backends is not None and backends.size < max_sessions:
        raise ValueError(f"{backends.size} backends for max_sessions={max_sessions}: each session leases one")
    if isinstance(isolate, str) and isolate not in ("thread", "process"):
        raise ValueError(f"isolate={isolate!r}: use 'thread', 'process' or an Isolation(...)")
    isolation = None if isolate == "thread" else isolate if isinstance(isolate, Isolation) else Isolation()
    if isolation is not None:
        factory: Any = importable(env_factory)
        name = factory.partition(":")[2]
        await check(factory, isolation, reset_timeout)
    else:
        factory = load_factory(env_factory) if isinstance(env_factory, str) else env_factory
        name = getattr(factory, "__name__", type(factory).__name__)
    server = EnvServer(factory, name, max_sessions=max_sessions, isolation=isolation, backends=backends, token=token,
                       reset_timeout=reset_timeout, step_timeout=step_timeout, close_timeout=close_timeout,
                       queue_timeout=queue_timeout, max_message_bytes=max_message_bytes, latency=latency,
                       patience=None if ping_interval is None or ping_timeout is None else ping_interval + ping_timeout)
    async with contextlib.AsyncExitStack() as stack:
        if trace is not None:
            server._trace_file = stack.enter_context(open(trace, "a", buffering=1))
        if backends is not None:
            stack.push_async_callback(asyncio.to_thread, backends.close)  # also of those that are about to start
            await asyncio.to_thread(backends.start)
        listener = await serve_websockets(
            server.host, host, port, process_request=server.answer_http, process_response=server.admit,
            origins=[None], compression=None, open_timeout=HANDSHAKE + queue_timeout,
            close_timeout=CLOSE_HANDSHAKE, ping_interval=ping_interval, ping_timeout=ping_timeout,
            max_size=max_message_bytes, server_header=None, logger=_wire_log)
        stack.push_async_callback(server.stop, listener, drain)
        bound = listener.sockets[0].getsockname()
        server.url = f"ws://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
        _loops[bound[1]] = asyncio.get_running_loop()
        stack.callback(_loops.pop, bound[1])
        yield server


_loops: dict[int, asyncio.AbstractEventLoop] = {}  # of this process's servers, by port


def serving_loop(url: str) -> asyncio.AbstractEventLoop | None:
    """The event loop of this process that serves `url`, an address of this machine; None if none does."""
    parts = urlsplit(url)
    return _loops.get(parts.port) if parts.hostname and is_loopback(parts.hostname) else None


async def serve_forever(env_factory: Callable[..., Any] | str, *,
                        beside: Callable[[EnvServer], contextlib.AbstractAsyncContextManager] | None = None,
                        **options: Any) -> None:
    """`serve` until SIGTERM or SIGINT, then shut down in order; a start that is under way is given up. Prints the URL once
    it listens; `beside` is entered then, and left first."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopped = asyncio.ensure_future(stop.wait())
    async with contextlib.AsyncExitStack() as stack:
        starting = asyncio.ensure_future(stack.enter_async_context(serve(env_factory, **options)))
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            if starting.cancelled() or isinstance(starting.exception(), BackendError):  # which were stopped as they started
                return
        server = starting.result()
        print(f"serving {server.env_name} at {server.url} to at most {server.max_sessions} sessions", flush=True)
        if beside is not None:
            await stack.enter_async_context(beside(server))
        await stopped
