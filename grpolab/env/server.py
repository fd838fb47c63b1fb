"""The environment server: one environment object a WebSocket session, over OpenEnv's protocol.

    async with serve(CalculatorEnv, max_sessions=8) as server:    # in a notebook or a script: server.url, .status()
    python -m grpolab serve calculator --port 0 --max-sessions 8    # a process of its own, and one for each session

A session holds a place from the handshake until its environment has closed; over capacity the handshake is answered with HTTP
503 and Retry-After. An environment that raises gets an error reply; one that hangs past its deadline loses its session and its
process. A thread cannot be killed: it is left behind and counted (`abandoned`), at most `max_sessions` of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from grpolab.access import names_loopback, shows
from grpolab.env.process import importable
from grpolab.env.protocol import MAX_MESSAGE_BYTES
from grpolab.env.session import Hosting, ServeOptions, Session
from grpolab.env.worker import load_factory
from grpolab.signals import at_signals

_wire_log = logging.getLogger("grpolab.env.wire")
_wire_log.setLevel(logging.CRITICAL)  # refused handshakes and dropped peers are no errors here

CLOSE_HANDSHAKE = 1.0  # s; how long a client may take to answer the close frame before its connection is cut
DRAIN = 2.0  # s; what a request in flight gets when the server stops
HANDSHAKE = 10.0  # s; how long a client may take to finish its HTTP request
LEAVING = 1.0  # s; how long a handshake waits for the place of a session that is closing
RETRY_AFTER = 1  # s; when a refused client is to ask again


def _json(status: int, body: dict, **headers: str) -> Response:
    """An answer in place of a WebSocket handshake, after which the connection is closed. Retry_After means Retry-After."""
    text = json.dumps(body).encode()
    fields = Headers([("Content-Type", "application/json"), ("Content-Length", str(len(text))), ("Connection", "close"),
                      *((name.replace("_", "-"), value) for name, value in headers.items())])
    return Response(status, HTTPStatus(status).phrase, fields, text)


class EnvServer:
    """What `serve` yields. `url` is what clients connect to; `status()` is the server's own count of everything."""

    def __init__(self, hosting: Hosting):
        self.hosting, self.options = hosting, hosting.options
        self.url = ""
        self._sessions: dict[ServerConnection, Session] = {}
        self._counts = {"opened": 0, "closed": 0, "refused": 0}

    def status(self) -> dict:
        """What the server holds, as JSON-able numbers. `sessions` are the places that are taken."""
        options = self.options
        return {
            "environment": self.hosting.name, "isolate": "thread" if options.isolation is None else "process",
            "sessions": len(self._sessions), "max_sessions": options.max_sessions, **self._counts,
            "abandoned": self.hosting.abandoned,
            "session_list": [
                {"session": s.number, "episode_id": s.episode_id, "steps": s.steps, "busy": s.busy,
                 "pid": s.env and s.env.pid} for s in self._sessions.values()],
        }

    def answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        """Plain HTTP paths and refusals; None lets the WebSocket handshake go on."""
        path, token = request.path.partition("?")[0], self.options.token
        if token is None and not names_loopback(request.headers.get_all("Host")):
            return _json(403, {"error": "the Host header names another server: without a token this one answers only to "
                                        "127.0.0.1, ::1 and localhost"})
        if path == "/health":
            return _json(200, {"status": "healthy"})
        if token and not shows(token, request.headers.get_all("Authorization")):
            return _json(401, {"error": "this server needs its bearer token: pass token=..."}, WWW_Authenticate="Bearer")
        if path == "/status":
            return _json(200, self.status())
        if path != "/ws":
            return _json(404, {"error": f"{path} is not served here; there are /ws, /health and /status"})
        return None

    async def admit(self, connection: ServerConnection, request: Request, response: Response) -> Response | None:
        """Take a place for a valid handshake, or refuse it with 503. It waits a moment for the place of a session that is
        closing, so that a client which closes and opens again is let in."""
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            return None

        await _until(lambda: not self._full() or not any(s.leaving for s in self._sessions.values()), LEAVING)
        if refusal := self._refusal():
            self._counts["refused"] += 1
            body = {"error": refusal, "active_sessions": len(self._sessions), "max_sessions": self.options.max_sessions}
            return _json(503, body, Retry_After=str(RETRY_AFTER))
        self._sessions[connection] = session = Session(self._counts["opened"], self.hosting, connection)
        self._counts["opened"] += 1

        def closed(_: asyncio.Future) -> None:
            if session.serving is None:  # before its handler began: nobody else gives its place back
                self._free(connection)

        asyncio.ensure_future(connection.wait_closed()).add_done_callback(closed)
        return None

    def _full(self) -> bool:
        return len(self._sessions) >= self.options.max_sessions

    def _refusal(self) -> str:
        """Why no session can be opened now; empty if one can."""
        if self.hosting.stopping:
            return "the server is shutting down"
        if self.hosting.abandoned >= self.options.max_sessions:
            return (f"{self.hosting.abandoned} environments hang; restart the server, or serve with isolate='process', which "
                    "can end them")
        if self._full():
            return f"Server at capacity: {len(self._sessions)}/{self.options.max_sessions} sessions active"
        return ""

    def _free(self, connection: ServerConnection) -> None:
        """Give a session's place back."""
        if self._sessions.pop(connection, None) is not None:
            self._counts["closed"] += 1

    async def host(self, connection: ServerConnection) -> None:
        """Serve one session until it ends; its place is free before the close frame leaves."""
        session = self._sessions.get(connection)
        if session is None:  # it was closed before we came to it
            return
        try:
            await session.serve()
        finally:
            # In a task of its own, so that no cancellation can leave an environment behind.
            closing = asyncio.ensure_future(session.close())
            closing.add_done_callback(lambda _: self._free(connection))
            await asyncio.shield(closing)

    async def stop(self, listener: Any) -> None:
        """Refuse newcomers, give requests in flight DRAIN s, then end every session and wait for it."""
        self.hosting.stopping = True
        await _until(lambda: not any(s.busy for s in self._sessions.values()), DRAIN)
        for session in self._sessions.values():
            session.abort()
        listener.close()
        await _until(lambda: not self._sessions, 2 * self.options.close_timeout + CLOSE_HANDSHAKE)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(listener.wait_closed(), 2 * CLOSE_HANDSHAKE)


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until it holds, at most `seconds`."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serve(env_factory: Callable[..., Any] | str, **options: Any) -> AsyncIterator[EnvServer]:
    """Serve `env_factory(**arguments)` to at most `max_sessions` sessions at once.

    `env_factory` may be the name of one: "package.module:Class". Options are the fields of `ServeOptions`. Browsers are refused
    (a page of any site could connect to a loopback address).
    """
    settings = ServeOptions(**options)
    if settings.isolation is not None:
        factory: Any = importable(env_factory)
        name = factory.partition(":")[2]
    else:
        factory = load_factory(env_factory) if isinstance(env_factory, str) else env_factory
        name = getattr(factory, "__name__", type(factory).__name__)
    server = EnvServer(Hosting(factory, name, settings))
    # max_queue: at most two messages are buffered while the session does not read; the rest stays with the client.
    listener = await serve_websockets(
        server.host, settings.host, settings.port, process_request=server.answer_http, process_response=server.admit,
        origins=[None], compression=None, open_timeout=HANDSHAKE, close_timeout=CLOSE_HANDSHAKE,
        ping_interval=settings.ping_interval, ping_timeout=settings.ping_timeout, max_size=MAX_MESSAGE_BYTES,
        max_queue=1, server_header=None, logger=_wire_log)
    try:
        bound = listener.sockets[0].getsockname()
        server.url = f"ws://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
        yield server
    finally:
        await server.stop(listener)


async def serve_forever(env_factory: Callable[..., Any] | str, **options: Any) -> None:
    """`serve` until SIGTERM or SIGINT, then shut down in order; a start that is under way is given up. Prints the URL once
    it listens."""
    with contextlib.suppress(asyncio.CancelledError), at_signals(asyncio.current_task().cancel, signal.SIGTERM, signal.SIGINT):
        async with serve(env_factory, **options) as server:
            most = server.options.max_sessions
            print(f"serving {server.hosting.name} at {server.url} to at most {most} sessions", flush=True)
            await asyncio.Event().wait()
