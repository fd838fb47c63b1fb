"""EnvSession: one connection, one environment, on any OpenEnv server. It never reconnects and never reuses a socket
after a timeout or a cancellation; who wants another session opens one.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidState, InvalidStatus
from websockets.frames import Frame, Opcode

from grpolab.env import protocol
from grpolab.env.protocol import (
    CapacityError,
    ConnectError,
    DeadlineExceeded,
    EnvError,
    ServerError,
    SessionLost,
    StepResult,
)


@dataclass(frozen=True)
class Deadlines:
    """Seconds that each phase may take. All are finite, so everything that fails, fails in bounded time.

    connect: TCP and handshake; for a pool also the wait for a free slot when it replaces a lost session.
    admit: from the handshake to the proof that an environment stands behind it. close: the goodbye.
    episode and group belong to the pool: one rollout, and all of a group's.
    """

    connect: float = 10.0
    admit: float = 30.0
    reset: float = 60.0
    step: float = 60.0
    close: float = 5.0
    episode: float = 600.0
    group: float = 900.0

    def __post_init__(self):
        for name, seconds in vars(self).items():
            if not 0 < seconds < float("inf"):
                raise ValueError(f"deadline {name}={seconds}: every wait needs a positive, finite bound in seconds")


class Span(NamedTuple):
    """One phase of one session: times are perf_counter seconds. `error` names what ended it, '' if nothing did.

    `episode` and `turn` identify a step on both sides of the wire: the server's trace carries the same two.
    """

    phase: str
    start: float
    end: float
    session: int
    episode: str = ""
    turn: int = 0
    error: str = ""


def socket_url(url: str) -> str:
    """`http(s)://host:port[/path]` or `ws(s)://...` -> the address of the server's `/ws` endpoint."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise ValueError(f"url={url!r} is no server address; write it like 'ws://127.0.0.1:8000' or 'https://host'")
    path = parts.path.rstrip("/")
    return urlunsplit((scheme, parts.netloc, path if path.endswith("/ws") else path + "/ws", parts.query, ""))


def _refused(status: InvalidStatus, url: str) -> ConnectError:
    """The typed error for a handshake that the server answered with something else than 101."""
    response = status.response
    body: dict = {}
    with suppress(ValueError):
        body = json.loads(response.body or b"{}")
    body = body if isinstance(body, dict) else {}
    message = f"{url} refused the session with HTTP {response.status_code}: {body.get('error', response.reason_phrase)}"
    if response.status_code != 503:
        return ConnectError(message)
    wait = response.headers.get("Retry-After", "")
    return CapacityError(message, body.get("active_sessions"), body.get("max_sessions"),
                         float(wait) if wait.isdigit() else None)


class _Connection(ClientConnection):
    """A connection that hands a reply of one frame straight to who asked: websockets' ways of sending and receiving, made
    for many tasks and for streams, take as long as a short step."""

    _asked: asyncio.Future | None = None

    async def ask(self, text: str) -> str | bytes:
        """Send `text` and wait for the next message; raises ConnectionClosed. One at a time."""
        # A server that refuses may have hung up already; what it said is then still there to be read.
        with suppress(InvalidState):
            self.protocol.send_text(text.encode())
            self.send_data()
            if not self.recv_messages.frames:
                self._asked = self.loop.create_future()
                if (reply := await self._asked) is not None:
                    return reply
        return await self.recv()

    def _answer(self, reply: str | None) -> bool:
        """Wake who waits, with the reply or to `recv` it; False if nobody does."""
        waits = self._asked is not None and not self._asked.done()
        if waits:
            self._asked.set_result(reply)
        return waits

    def process_event(self, event: Any) -> None:
        if isinstance(event, Frame) and event.opcode is Opcode.TEXT and event.fin and not self.recv_messages.frames:
            with suppress(UnicodeDecodeError):  # `recv` knows what to do about it
                if self._answer(str(event.data, "utf-8")):
                    return
        super().process_event(event)
        if self.recv_messages.frames:
            self._answer(None)

    def connection_lost(self, fault: Exception | None) -> None:
        super().connection_lost(fault)
        self._answer(None)


class EnvSession:
    """`async with EnvSession(url) as session: await session.reset(seed=1); await session.step({"text": "..."})`.

    `connect` returns only when the server has answered on this session, so an admitted session is a real one (an
    OpenEnv server accepts the handshake and refuses afterwards). After `lost` is set, every call raises SessionLost.
    `trace` collects a Span a phase. `ping_interval`/`ping_timeout` in seconds find a dead server; None turns pings off.
    """

    def __init__(self, url: str, *, token: str | None = None, deadlines: Deadlines | None = None,
                 ping_interval: float | None = 20.0, ping_timeout: float | None = 20.0, trace: list | None = None,
                 index: int = 0):
        self.url = socket_url(url)
        self.deadlines = deadlines or Deadlines()
        self.trace = [] if trace is None else trace
        self.index = index
        self.episode_id = ""
        self.turn = 0
        self.lost: BaseException | None = None
        self._token = token
        self._pings = {"ping_interval": ping_interval, "ping_timeout": ping_timeout}
        self._socket = None
        self._wait: tuple[float, str, float] | None = None  # of the request in flight: when it is due, phase and seconds
        self._watch: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> EnvSession:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self):
        raise TypeError("EnvSession is asynchronous: write `async with`; in a script, MultiTurnEnvPool is synchronous")

    def __exit__(self, *_: object) -> None: ...

    @property
    def open(self) -> bool:
        """Whether requests can be sent."""
        return self._socket is not None and self.lost is None

    async def connect(self) -> None:
        """Open the connection and prove the session with a `state` request.

        Raises CapacityError, FactoryError or ConnectError when there is none, DeadlineExceeded when it takes too long.
        """
        if self._socket is not None:
            raise RuntimeError("this session was connected before; a session is used once, make a new EnvSession")
        try:
            with self.span("connect"):
                await self._open_socket()
            await self._request("admit", protocol.STATE, self.deadlines.admit)
        except ServerError:
            pass  # an environment that cannot tell its state before reset is an environment all the same
        except SessionLost as fault:
            if isinstance(fault, DeadlineExceeded):
                raise
            raise ConnectError(f"{self.url} accepted the connection and gave no session: {fault}") from fault
        except asyncio.CancelledError:
            await self.close()  # a goodbye, so that the server has freed the slot when the caller goes on
            raise

    async def _open_socket(self) -> None:
        """The handshake. One that is cancelled is finished first if that takes no longer than a second: the server may
        have taken a slot for it already, and only over the connection can that be undone in order."""
        handshake = asyncio.ensure_future(self._handshake())
        try:
            await asyncio.wait([handshake])
        except asyncio.CancelledError:
            try:
                await asyncio.wait([handshake], timeout=min(self.deadlines.close, 1.0))
            finally:
                handshake.cancel()  # which does nothing to one that is done
                if handshake.done() and not handshake.cancelled() and handshake.exception() is None:
                    self._socket = handshake.result()
            raise
        self._socket = handshake.result()

    async def _handshake(self):
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else None
        local = urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        try:
            async with asyncio.timeout(self.deadlines.connect):
                return await connect(self.url, create_connection=_Connection, additional_headers=headers, compression=None,
                                     open_timeout=None, close_timeout=self.deadlines.close, max_size=protocol.MAX_REPLY_BYTES,
                                     proxy=None if local else True, **self._pings)
        except TimeoutError as fault:
            raise DeadlineExceeded("connect", self.deadlines.connect, self.url) from fault
        except InvalidStatus as fault:
            raise _refused(fault, self.url) from fault
        except (OSError, InvalidHandshake, EOFError) as fault:
            raise ConnectError(f"no environment server answers at {self.url}: {fault}") from fault

    async def reset(self, *, seed: int | None = None, episode_id: str | None = None, **options: Any) -> StepResult:
        """Start an episode. `options` (`task`, ...) reach the environment's reset; `episode_id` is new by default."""
        self.episode_id, self.turn = episode_id or uuid.uuid4().hex, 0
        sent = {"episode_id": self.episode_id, **({} if seed is None else {"seed": seed}), **options}
        reply = await self._request("reset", protocol.reset(sent), self.deadlines.reset)
        return self._result(*reply)

    async def step(self, action: dict) -> StepResult:
        """Send one action. ServerError leaves the session usable; SessionLost and DeadlineExceeded end it."""
        self.turn += 1
        reply = await self._request("step", protocol.step(action), self.deadlines.step)
        return self._result(*reply)

    async def state(self) -> dict:
        """What the environment says of itself: at least `episode_id` and `step_count`."""
        kind, data = await self._request("state", protocol.STATE, self.deadlines.step)
        if kind != "state":
            raise self._drop(SessionLost(f"a state request was answered with {kind!r}: the connection is out of step"))
        return data

    async def mcp(self, method: str, params: dict | None = None) -> dict:
        """The result of one JSON-RPC request ("tools/list", "tools/call") to an environment with MCP tools. It is no step:
        no turn, no reward. Raises ServerError with the JSON-RPC code where it is refused."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        kind, data = await self._request("mcp", protocol.dumps({"type": "mcp", "data": request}), self.deadlines.step)
        if kind != "mcp" or not isinstance(data.get("result", {}), dict):
            raise self._drop(SessionLost(f"{method} was answered with {kind!r} {data!r:.200}: the connection is out of step"))
        if fault := data.get("error"):
            said = fault if isinstance(fault, dict) else {"message": fault}
            raise ServerError(f"{method}: {said.get('message', 'refused')}", str(said.get("code", "")))
        return data.get("result", {})

    async def close(self) -> None:
        """Say `close`, wait for the server to have closed the environment, at most `deadlines.close` s. Idempotent."""
        socket, was_open = self._socket, self.open
        if socket is None:
            return
        self.lost = self.lost or SessionLost("this session was closed")
        if self._watch is not None:
            self._watch.cancel()
        try:
            if was_open:
                with self.span("close"), suppress(TimeoutError, ConnectionClosed):
                    async with asyncio.timeout(self.deadlines.close):
                        await socket.send(protocol.CLOSE)
                        await socket.wait_closed()
        finally:
            socket.transport.abort()
        await socket.wait_closed()

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Record the enclosed time in the trace under `phase`; a rollout may mark its own, as `generate`."""
        start, fault = perf_counter(), ""
        try:
            yield
        except BaseException as error:
            fault = type(error).__name__
            raise
        finally:
            self.trace.append(Span(phase, start, perf_counter(), self.index, self.episode_id, self.turn, fault))

    def _drop(self, cause: BaseException) -> BaseException:
        """Give the connection up, at once and for ever; returns `cause`."""
        self.lost = self.lost or cause
        if self._watch is not None:
            self._watch.cancel()
        if self._socket is not None:
            self._socket.transport.abort()
        return cause

    def _look_by(self, due: float) -> None:
        self._watch = protocol.watch_until(due, self._look, self._watch, self._socket.loop)

    def _look(self) -> None:
        """Whether the request that waits is overdue: without its connection, it wakes up at once. If it is not yet, look
        again when it would be."""
        self._watch = None
        if self._wait is not None:
            due, phase, seconds = self._wait
            if due <= self._socket.loop.time():
                self._drop(DeadlineExceeded(phase, seconds, f"session {self.index}"))
            else:
                self._look_by(due)

    def _result(self, kind: str, data: dict) -> StepResult:
        if kind != "observation":
            raise self._drop(SessionLost(f"a request was answered with {kind!r}: the connection is out of step"))
        try:
            return protocol.step_result(data)
        except SessionLost as fault:
            raise self._drop(fault) from None

    async def _request(self, phase: str, text: str, seconds: float) -> tuple[str, dict]:
        """Send one message and wait for its reply: the only place where a socket is written and read."""
        if self._socket is None:
            raise RuntimeError("this session is not connected: use `async with EnvSession(url) as session`")
        if self.lost is not None:
            raise SessionLost(f"this session is over ({self.lost}); open a new one") from self.lost
        if self._wait is not None:
            raise RuntimeError("a request is in flight on this session; one at a time, or open a session for each task")
        due = self._socket.loop.time() + seconds
        self._wait = due, phase, seconds
        self._look_by(due)
        start, ended_by = perf_counter(), ""
        try:
            try:
                reply = await self._socket.ask(text)
            except ConnectionClosed as fault:
                raise self.lost or SessionLost(f"the server closed the connection during {phase}: {fault}") from fault
            if self.lost is not None:  # the reply was there, and its deadline too: the connection is dropped already
                raise self.lost
            return protocol.parse_reply(reply)
        except BaseException as fault:
            ended_by = type(fault).__name__
            # A ServerError leaves the session as it is; when `admit` is cancelled, connect says goodbye instead.
            if isinstance(fault, EnvError) and not isinstance(fault, ServerError) \
                    or isinstance(fault, asyncio.CancelledError) and phase != "admit":
                self._drop(fault)
            raise
        finally:
            self._wait = None
            self.trace.append(Span(phase, start, perf_counter(), self.index, self.episode_id, self.turn, ended_by))
