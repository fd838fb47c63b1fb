"""EnvSession: one connection, one environment, on any OpenEnv server. It never reconnects and never reuses a socket
after a timeout or a cancellation; who wants another session opens one.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.http11 import Response
from websockets.protocol import State

from grpolab.access import check_token
from grpolab.env import protocol
from grpolab.env.protocol import (
    CapacityError,
    ConnectError,
    DeadlineExceeded,
    InvalidAction,
    ServerError,
    SessionLost,
    StepResult,
)

TRACE_SPANS = 100_000  # how many spans a trace keeps, the last ones: some 20 MB


@dataclass(frozen=True)
class Deadlines:
    """Seconds that each phase may take, all finite. connect: TCP and handshake; for a pool also the wait for a free place when
    it replaces a lost session. admit: from the handshake to the proof that an environment stands behind it. step: also a
    state or an MCP request. close: the goodbye. episode and group belong to the pool: one rollout, and all of a group's.
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
    """One phase of one session: times are perf_counter seconds. `error` names what ended it, '' if nothing did."""

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


def _refused(response: Response, url: str) -> ConnectError:
    """The typed error for a handshake that the server answered with something else than 101."""
    body: Any = None
    with suppress(ValueError, RecursionError):  # a body of whatever kind: then the reason phrase has to do
        body = json.loads(response.body or b"{}")
    body = body if isinstance(body, dict) else {}
    reason = str(body.get("error", response.reason_phrase))[: protocol.MAX_REASON]
    message = f"{url} refused the session with HTTP {response.status_code}: {reason}"
    if response.status_code != 503:
        return ConnectError(message)
    return CapacityError(message, body.get("active_sessions"), body.get("max_sessions"))


class EnvSession:
    """`async with EnvSession(url) as session: await session.reset(seed=1); await session.step({"text": "..."})`.

    `connect` returns when the server has answered on this session (OpenEnv's accepts the handshake and refuses afterwards).
    After `lost` is set, every call raises SessionLost. `trace` has a Span a phase, the last TRACE_SPANS; a pool passes its
    own for all sessions. `ping_interval`/`ping_timeout` in seconds find a dead server; None turns pings off.
    """

    def __init__(self, url: str, *, token: str | None = None, deadlines: Deadlines | None = None,
                 ping_interval: float | None = 20.0, ping_timeout: float | None = 20.0,
                 trace: deque[Span] | None = None, index: int = 0):
        self.url = socket_url(url)
        self.deadlines = deadlines or Deadlines()
        self.index = index
        self.episode_id = ""
        self.turn = 0
        self.lost: BaseException | None = None
        self.doubtful = False  # its environment failed: a pool opens another session for the next episode
        self._headers = {} if token is None else {"Authorization": f"Bearer {check_token(token)}"}
        self._pings = {"ping_interval": ping_interval, "ping_timeout": ping_timeout}
        self.trace: deque[Span] = deque(maxlen=TRACE_SPANS) if trace is None else trace
        self._socket: ClientConnection | None = None
        self._in_flight = False  # a request

    async def __aenter__(self) -> EnvSession:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def open(self) -> bool:
        """Whether requests can be sent: connected, not lost, and not closed by the server meanwhile."""
        return self._socket is not None and self.lost is None and self._socket.state is State.OPEN

    async def connect(self) -> None:
        """Open the connection and prove the session with a `state` request. Raises CapacityError, FactoryError or ConnectError
        when there is none, DeadlineExceeded when it takes too long."""
        if self._socket is not None:
            raise RuntimeError("this session was connected before; a session is used once, make a new EnvSession")
        try:
            with self.span("connect"):
                self._socket = await self._handshake()
            await self._request("admit", protocol.STATE, "state")
        except ServerError:
            self.doubtful = False  # an environment that cannot tell its state before reset is one all the same
        except DeadlineExceeded:
            raise
        except SessionLost as fault:
            raise ConnectError(f"{self.url} accepted the connection and gave no session: {fault}") from fault
        except asyncio.CancelledError:
            await self.close()  # a goodbye, so that the server has freed the place when the caller goes on
            raise

    async def _handshake(self) -> ClientConnection:
        local = urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        try:
            async with asyncio.timeout(self.deadlines.connect):
                return await connect(self.url, additional_headers=self._headers, compression=None, open_timeout=None,
                                     close_timeout=self.deadlines.close, max_size=protocol.MAX_REPLY_BYTES,
                                     proxy=None if local else True, **self._pings)
        except TimeoutError as fault:
            raise DeadlineExceeded("connect", self.deadlines.connect, self.url) from fault
        except InvalidStatus as fault:
            raise _refused(fault.response, self.url) from fault
        except InvalidURI as fault:
            raise ConnectError(f"{self.url} redirects to {fault.uri!r:.200}, which is no WebSocket address: pass the address "
                               "that it leads to, as ws:// or wss://") from fault
        except (OSError, InvalidHandshake, EOFError) as fault:
            raise ConnectError(f"no environment server answers at {self.url}: {fault}") from fault

    async def reset(self, *, seed: int | None = None, episode_id: str | None = None, **options: Any) -> StepResult:
        """Start an episode. `options` (`task`, ...) reach the environment's reset; `episode_id` is new by default."""
        self.episode_id, self.turn = episode_id or uuid.uuid4().hex, 0
        sent = {"episode_id": self.episode_id, **({} if seed is None else {"seed": seed}), **options}
        return await self._request("reset", protocol.message("reset", sent), "observation")

    async def step(self, action: dict) -> StepResult:
        """Send one action. InvalidAction (it could not be read) and ServerError leave the session usable; SessionLost and
        DeadlineExceeded end it."""
        self.turn += 1
        return await self._request("step", protocol.message("step", action), "observation")

    async def state(self) -> dict:
        """What the environment says of itself: at least `episode_id` and `step_count`."""
        return await self._request("state", protocol.STATE, "state")

    async def mcp(self, method: str, params: dict | None = None) -> dict:
        """The result of one JSON-RPC request ("tools/list", "tools/call") to an environment with MCP tools. It is no step:
        no turn, no reward. Raises ServerError with the JSON-RPC code where it is refused."""
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        data = await self._request("mcp", protocol.message("mcp", request), "mcp")
        if fault := data.get("error"):
            reason = fault if isinstance(fault, dict) else {"message": fault}
            raise ServerError(f"{method}: {reason.get('message', 'refused')}", str(reason.get("code", "")))
        if not isinstance(data.get("result", {}), dict):
            raise ServerError(f"{method} was answered with {data!r:.200}", "")
        return data.get("result", {})

    async def close(self) -> None:
        """Say `close`, wait for the server to have closed the environment, at most `deadlines.close` s. Idempotent."""
        if self._socket is None:
            return
        was_open = self.open
        self.lost = self.lost or SessionLost("this session was closed")
        try:
            if was_open:
                with self.span("close"), suppress(TimeoutError, ConnectionClosed):
                    async with asyncio.timeout(self.deadlines.close):
                        await self._socket.send(protocol.CLOSE)
                        await self._socket.wait_closed()
        finally:
            self._cut()
        await self._socket.wait_closed()

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

    def _cut(self) -> None:
        """End the connection at once, with no word to the other side: `close` of websockets takes a handshake's time."""
        if self._socket.state is not State.CLOSED:
            self._socket.transport.abort()

    async def _request(self, phase: str, text: str, expected: str) -> Any:
        """Send one message and wait for its reply, of the kind `expected`: its data, or its StepResult. All but a ServerError,
        which the server answered in order, ends the session."""
        if self._socket is None:
            raise RuntimeError("this session is not connected: use `async with EnvSession(url) as session`")
        if self.lost is not None:
            raise SessionLost(f"this session is over ({self.lost}); open a new one") from self.lost
        if self._in_flight:
            raise RuntimeError("a request is in flight on this session; one at a time, or open a session for each task")
        self._in_flight = True
        try:
            with self.span(phase):
                kind, data = protocol.parse_reply(await self._exchange(phase, text), self.url)
                if kind != expected:
                    raise SessionLost(f"{self.url} answered a {phase} with {kind!r:.100}: it is out of step")
                return protocol.step_result(data, self.url) if kind == "observation" else data
        except ServerError as fault:
            self.doubtful |= phase == "reset" or not isinstance(fault, InvalidAction)
            raise
        except BaseException as fault:
            if not (isinstance(fault, asyncio.CancelledError) and phase == "admit"):  # then connect says goodbye instead
                self.lost = self.lost or fault
                self._cut()
            raise
        finally:
            self._in_flight = False

    async def _exchange(self, phase: str, text: str) -> str | bytes:
        """The next message after `text` was sent, within the deadline; SessionLost where one is here already."""
        seconds = getattr(self.deadlines, phase, self.deadlines.step)
        try:
            async with asyncio.timeout(seconds):
                await self._expect_silence(phase)
                # A server that refuses may have hung up already; what it said is then still there to be read.
                with suppress(ConnectionClosed):
                    await self._socket.send(text)
                return await self._socket.recv()
        except TimeoutError as fault:
            raise DeadlineExceeded(phase, seconds, f"session {self.index} at {self.url}") from fault
        except ConnectionClosed as fault:
            raise SessionLost(f"{self.url} closed the connection during {phase}: {fault}") from fault

    async def _expect_silence(self, phase: str) -> None:
        """Raise where a message is there before the request: it would be paired with it."""
        for _ in range(2):  # the first look lets the loop read the socket, the second finds what it has read
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    unasked = await self._socket.recv()
                with suppress(ServerError):  # a refusal or an ending that the server announced says why by itself
                    protocol.parse_reply(unasked, self.url)
                raise SessionLost(f"{self.url} sent a message that nobody had asked for, before a {phase}: "
                                  f"{str(unasked[:200])!r}")
