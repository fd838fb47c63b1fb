"""The environment server: one environment object a WebSocket session, over OpenEnv's protocol.

    async with serve(CalculatorEnv, max_sessions=8) as server:    # in a notebook or a script: server.url, .status()
    python -m grpolab serve calculator --port 0 --max-sessions 8    # a process of its own

What a session costs stays with that session. It holds a slot from the handshake until its environment has closed and
its leased backend is back; over capacity the handshake is answered with HTTP 503. An environment that raises gets an
error reply; one that hangs past its deadline loses its session, its backend is killed, and where its thread still does
not return, the thread is left behind and counted (`abandoned`), at most `max_sessions` of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import importlib
import inspect
import ipaddress
import itertools
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TextIO

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, PayloadTooBig, ProtocolError
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.streams import StreamReader

from grpolab.env import protocol
from grpolab.env.backends import BackendPool, Lease
from grpolab.env.protocol import InvalidAction, InvalidRequest, StepResult

log = logging.getLogger("grpolab.env.server")
_wire_log = logging.getLogger("grpolab.env.wire")
_wire_log.setLevel(logging.CRITICAL)  # refused handshakes and dropped peers are no errors here


CLOSE_HANDSHAKE = 1.0  # s; how long a client may take to answer the close frame before its connection is cut
HANDSHAKE = 10.0  # s; how long a client may take to finish its HTTP request
AT_HEEL = 0.02  # s; how long a session's thread listens for the next step, or keeps the loop from listening by one


class Hung(Exception):
    """An environment call outlasted its deadline: create, reset, step, state or close; `reply` is the error frame."""

    def __init__(self, phase: str, message: str):
        super().__init__(message)
        self.reply = protocol.error(message, f"{phase.upper()}_TIMEOUT")


class Worker:
    """The thread in which one session's plain (not `async`) environment lives, so that it may block and keep state."""

    def __init__(self, name: str):
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        # A daemon: a hung environment must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def post(self, done: Callable[[Any, Exception | None], Any], function: Callable, *args: Any, **kwargs: Any) -> None:
        """Call `function`, then, still in the thread, `done(value, error)`. Calls run in the order they came in."""
        self._jobs.put((done, function, args, kwargs))

    async def call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        future = self._loop.create_future()
        self.post(partial(self._loop.call_soon_threadsafe, _settle, future), function, *args, **kwargs)
        return await future

    def stop(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Let the thread end after the jobs that it has; `at_end` runs on the loop when it has."""
        self._jobs.put(at_end)

    def _work(self) -> None:
        while not callable(job := self._jobs.get()):
            done, function, args, kwargs = job
            value = error = None
            try:
                value = function(*args, **kwargs)
            except BaseException as raised:  # noqa: BLE001  the thread must outlive whatever an environment raises
                error = raised if isinstance(raised, Exception) else RuntimeError(f"the environment raised {raised!r}")
            try:
                done(value, error)
            except Exception:
                if not self._loop.is_closed():  # then nobody waits any more
                    log.exception("%s: no reply could be sent", self._thread.name)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(job)


def _settle(future: asyncio.Future, value: Any, error: Exception | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


class _Session:
    """One connection's environment, from the factory to the backend's return."""

    def __init__(self, number: int, server: EnvServer, connection: _Connection):
        self.number, self.server, self.connection = number, server, connection
        self.started = False
        self.opened = time.monotonic()
        self.busy: str | None = None
        self.episode_id: str | None = None
        self.steps = 0
        self.env: Any = None
        self.lease: Lease | None = None
        self.over = False
        self._worker: Worker | None = None
        self._scope: asyncio.Timeout | None = None
        self._listening = False
        # A step on the short way: the loop begins it, or the thread if it follows at heel (busy, _since, _due). The thread
        # ends it (`_stepped`: _due first, busy last) under `connection.writing`, unless the loop did so before (`hurry`).
        # Only the loop writes _watch.
        self._since = 0.0
        self._due: float | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._hung = False

    async def open(self) -> None:
        """Lease a backend if there are any, and make the environment; raises InvalidRequest(FACTORY_ERROR)."""
        server = self.server
        try:
            if server.backends is not None:
                self.lease = await asyncio.to_thread(server.backends.acquire)
            arguments = () if self.lease is None else (self.lease.resource,)
            self._worker = Worker(f"env-session-{self.number}")
            await self._call("create", server.reset_timeout, self._create, *arguments)
        except Exception as fault:
            log.exception("session %d: the environment factory %s failed", self.number, server.env_name)
            self.over = True
            raise InvalidRequest(f"Environment factory '{server.env_name}' failed to create instance: {fault}",
                                 "FACTORY_ERROR") from None
        if inspect.iscoroutinefunction(self.env.step):
            self._worker.stop()
            self._worker = None

    def _create(self, *arguments: Any) -> None:
        self.env = self.server.env_factory(*arguments)

    def take(self, event: Frame) -> bool:
        """The short way of a step: from the socket to the thread, and from the thread to the socket (`_stepped`), while
        the loop only watches its deadline. False if the message is none, or not alone: then `answer` gets it."""
        connection = self.connection
        if self.busy is not None or connection.recv_messages.frames or (action := self._short(event)) is None:
            return False
        now = self._begin()
        self._look_by(min(self._due, now + AT_HEEL) if connection.lend() else self._due)
        self._worker.post(self._stepped, self._observed_step, action)
        return True

    def _short(self, frame: Frame | None) -> dict | None:
        """The action of a frame that holds a step which may take the short way."""
        if not (frame is not None and frame.opcode is Opcode.TEXT and frame.fin
                and self._listening and self.connection.direct and not self.over and not self.server.stopping):
            return None
        try:
            kind, action = protocol.parse_request(str(frame.data, "utf-8"))
        except (InvalidRequest, UnicodeDecodeError):
            return None
        return action if kind == "step" else None

    def _begin(self) -> float:
        now = self.connection.loop.time()
        self.busy, self._since, self._due = "step", time.time(), now + self.server.step_timeout
        return now

    def _observed_step(self, action: dict) -> str:
        self.steps += 1
        return self._observation(self.env.step(action))

    def _stepped(self, reply: str | None, fault: Exception | None) -> None:
        """In the session's thread: the end of a step that took the short way, unless it is too late: then `_look` ends it."""
        text = reply if fault is None else self._refusal(fault)
        with self.connection.writing:
            if self.over or self.connection.loop.time() >= self._due:
                return
            self._due = None
            self.server.record("step", self, self._since, "" if fault is None else type(fault).__name__)
            self.connection.reply(text)
            heeds = self.connection.lent is not None
            self.busy = None  # from here on the loop may begin the next step, and lend the socket for it
        if heeds:
            self._heed()

    def _heed(self) -> None:
        """In the session's thread: take the next step from the socket if it comes soon; all else is the loop's to read."""
        data, action = b"", None
        try:
            data = self.connection.heed()
            frame = sole_frame(data, self.server.max_message_bytes)
            with self.connection.writing:
                if (action := self._short(frame)) is not None:
                    self._begin()
                    self._worker.post(self._stepped, self._observed_step, action)
        finally:
            if action is None:
                self.connection.loop.call_soon_threadsafe(self.connection.take_back, data)

    def _look_by(self, due: float) -> None:
        self._watch = protocol.watch_until(due, self._look, self._watch, self.connection.loop)

    def _look(self) -> None:
        """Whether a step on the short way is overdue; if it is not yet, look again when it would be. While the thread
        has the socket, look often: nobody reads it during a step, so a step that takes long gives it back to the loop."""
        connection, self._watch, now = self.connection, None, self.connection.loop.time()
        with connection.writing:
            due = self._due
            if due is not None:
                connection.take_back()
        if due is None:
            if connection.lent is not None:
                self._look_by(now + AT_HEEL)
        elif due <= now:
            self.hurry()
        else:
            self._look_by(due)

    async def listen(self) -> str | bytes | None:
        """The next message that does not take the short way, once all before it are answered; None if there is no more:
        the client has left, or the server stops."""
        text = None
        try:
            async with asyncio.timeout(None) as self._scope:
                self._listening = self._worker is not None
                with contextlib.suppress(ConnectionClosed):
                    text = await self.connection.recv()
                self._listening = False  # the next step waits for the reply to this message
                if self._worker is not None:
                    await self._worker.call(lambda: None)
                return None if self.over or self.server.stopping else text
        except TimeoutError as raised:
            hung = self._hang("step", self.server.step_timeout)
            self.server.record("step", self, self._since, "timeout")
            raise hung from raised
        finally:
            self._listening = False

    async def answer(self, text: str | bytes) -> str | None:
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
        except Hung:
            raise
        except Exception as fault:
            return self._refusal(fault)

    def _refusal(self, fault: Exception) -> str:
        """The reply to a request that the environment did not fulfil; the session goes on."""
        try:
            said = str(fault) or repr(fault)
        except Exception as second:  # a reply is owed all the same
            said = f"{type(fault).__name__}, whose text could not be made: {type(second).__name__}"
        if isinstance(fault, InvalidAction):
            return protocol.error("Invalid message", "VALIDATION_ERROR",
                                  errors=[{"type": "value_error", "loc": ["data"], "msg": said}])
        log.info("session %d: %s raised %s: %s", self.number, self.server.env_name, type(fault).__name__, said)
        return protocol.error(said, "EXECUTION_ERROR")

    async def _reset(self, options: dict) -> str:
        self.episode_id, self.steps = options.get("episode_id"), 0
        known = protocol.declared(self.env.reset, options)
        return self._observation(await self._call("reset", self.server.reset_timeout, self.env.reset, **known))

    async def _step(self, action: dict) -> str:
        self.steps += 1
        return self._observation(await self._call("step", self.server.step_timeout, self.env.step, action))

    async def _state(self, _: dict) -> str:
        said = await self._call("state", self.server.step_timeout, self.env.state)
        return protocol.state({"episode_id": self.episode_id, "step_count": self.steps, **said})

    async def _mcp(self, request: dict) -> str:
        return protocol.no_mcp(request)

    def _observation(self, result: Any) -> str:
        if not isinstance(result, StepResult):
            name = type(result).__name__
            raise TypeError(f"{self.server.env_name} returned a {name}; reset and step return a StepResult")
        return protocol.observation(result)

    async def _call(self, phase: str, seconds: float, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """One environment call under its deadline: on the loop if it is `async`, else in the session's thread."""
        self.busy, start, fault = phase, time.time(), ""
        try:
            async with asyncio.timeout(seconds) as self._scope:
                if self._worker is None:
                    result = function(*args, **kwargs)
                    return await result if inspect.isawaitable(result) else result
                return await self._worker.call(function, *args, **kwargs)
        except TimeoutError as raised:
            if not self._scope.expired():
                raise  # the environment's own
            fault = "timeout"
            raise self._hang(phase, seconds) from raised
        except BaseException as raised:
            fault = type(raised).__name__
            raise
        finally:
            self.busy = None
            self.server.record(phase, self, start, fault)

    def _hang(self, phase: str, seconds: float) -> Hung:
        self._hung, self.over = self._worker is not None, True
        return Hung(phase, f"{phase} of {self.server.env_name} took longer than {seconds:g} s; the session is over")

    def hurry(self) -> None:
        """End the request in flight now, as if its deadline had passed."""
        with self.connection.writing:
            if self._due is not None:
                self.over = True  # its thread says nothing any more
                self.connection.take_back()
        if self.busy in ("create", "reset", "step", "state"):
            with contextlib.suppress(RuntimeError):  # the call has just ended by itself
                self._scope.reschedule(asyncio.get_running_loop().time())

    def peer_gone(self) -> None:
        """The connection dropped: nobody waits for what an `async` environment is doing, so it stops now."""
        if self._worker is None:
            self.hurry()

    async def close(self) -> None:
        """Close the environment, then give the backend back; bounded, and complete when it returns."""
        server, poisoned = self.server, self._hung
        if self._watch is not None:
            self._watch.cancel()
        if self._hung and self.lease is not None:
            # Killing what the environment waits for is what makes most hung threads return.
            await asyncio.to_thread(server.backends.kill, self.lease)
        self._hung = False
        try:
            await self._call("close", server.close_timeout, self._close_env)
        except Hung as fault:
            poisoned = True
            log.warning("session %d: %s", self.number, fault)
        except Exception:
            poisoned = True
            log.exception("session %d: closing %s failed", self.number, server.env_name)
        if self._hung:
            # The thread does not return: leave it behind, and count it until it does (and then closes by itself).
            server.abandoned += 1
            self._worker.stop(at_end=server.thread_returned)
        elif self._worker is not None:
            self._worker.stop()
        if self.lease is not None:
            await asyncio.to_thread(server.backends.release, self.lease, poisoned=poisoned)

    def _close_env(self) -> Any:
        return None if self.env is None else self.env.close()


class _Connection(ServerConnection):
    """A connection that knows its session: a handshake that dies half-way still gives its slot back.

    The session's thread replies past the transport (`reply`), so the client has its answer one wake-up earlier. `direct`
    says that this may be done: the connection is open, and neither it nor its transport holds anything back. And where
    steps follow each other closely, the thread reads the next one itself (`heed`): while the socket is `lent`, the loop
    reads nothing. It lends it between two frames, and has it back from the thread, or when a step takes long. (A client that
    writes lengths in more bytes than they need is not counted right, and read by the loop alone.)
    A client that reads nothing is cut off: websockets' pings would wait behind what it does not read, for ever.
    """

    session: _Session | None = None
    direct = False
    lent: socket.socket | None = None
    _rest = b""  # what the socket did not take
    _head = b""  # what came before the HTTP request was whole
    _unparsed = 0  # bytes received of which no request and no frame has come
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.writing = threading.Lock()
        plain = os.name == "posix" and transport.get_extra_info("sslcontext") is None
        self._descriptor = transport.get_extra_info("socket").fileno() if plain else None

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        if self.request is None:
            self._head += data
        super().data_received(data)

    def process_event(self, event: Any) -> None:
        self._unparsed -= _wire_bytes(event) if isinstance(event, Frame) else self._head.index(b"\r\n\r\n") + 4
        if self.session is None or not self.session.take(event):
            super().process_event(event)

    def lend(self) -> bool:
        """Leave the socket to the session's thread, if all that came from it has been understood."""
        if self._unparsed == 0:
            with contextlib.suppress(OSError):  # no descriptor to be had
                # One of its own: the loop may close the other, whose number is then another connection's.
                self.lent = socket.socket(fileno=os.dup(self._descriptor))
                self.lent.settimeout(AT_HEEL)
                self.transport.pause_reading()
        return self.lent is not None

    def take_back(self, data: bytes = b"") -> None:
        """Read the socket again, after `data`, which the thread has read. On the loop, while the thread does not read."""
        if self.lent is not None:
            self.lent.close()
            self.lent = None
            if not self.transport.is_closing():
                self.transport.resume_reading()
                if data:
                    self.data_received(data)

    def heed(self) -> bytes:
        """In the session's thread, to which the socket is lent: what comes from it soon, or nothing."""
        with contextlib.suppress(OSError):  # nothing came, or the connection is lost, which the loop will find out
            return self.lent.recv(2**16)
        return b""

    def reply(self, text: str) -> None:
        """Send `text` if the client still listens. From any thread that holds `writing`."""
        if self.protocol.state is not State.OPEN:
            return
        frame = Frame(Opcode.TEXT, text.encode()).serialize(mask=False)
        if self.direct:
            with contextlib.suppress(OSError):  # full, or lost, which the loop will find out
                frame = frame[os.write(self._descriptor, frame):]
        if frame:
            self._rest += frame
            self.direct = False
            self.loop.call_soon_threadsafe(self.send_data)

    def send_data(self) -> None:
        with self.writing:
            if self._rest:
                self.transport.write(self._rest)
                self._rest = b""
            super().send_data()
            self.direct = (self._descriptor is not None and self.protocol.state is State.OPEN
                           and not self.transport.get_write_buffer_size())

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.ping_interval is not None and self.ping_timeout is not None:
            self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _watch_reader(self, before: float = float("inf")) -> None:
        """Abort once the client takes nothing for as long as it may leave a ping unanswered."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._unread = self.loop.call_later(self.ping_interval + self.ping_timeout, self._watch_reader, left)
        else:
            self.transport.abort()

    def connection_lost(self, fault: Exception | None) -> None:
        with self.writing:  # the descriptor is closed next
            self.direct = False
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(fault)
        if self.session is not None:
            if self.session.started:
                self.session.peer_gone()
            else:
                self.session.server.free(self.session)


def _wire_bytes(frame: Frame) -> int:
    """The least length of a client's frame on the wire: header, length, mask and data (RFC 6455, section 5.2)."""
    size = len(frame.data)
    return 6 + (0 if size < 126 else 2 if size < 2**16 else 8) + size


def sole_frame(data: bytes, max_bytes: int) -> Frame | None:
    """The frame that a client sent, if `data` is that frame, well-formed and within `max_bytes`, and nothing else."""
    reader = StreamReader()
    reader.feed_data(data)
    try:
        next(Frame.parse(reader.read_exact, mask=True, max_size=max_bytes))
    except StopIteration as parsed:
        return None if reader.buffer else parsed.value
    except (ProtocolError, PayloadTooBig):  # which is the loop's to answer
        pass
    return None


class EnvServer:
    """What `serve` yields. `url` is what clients connect to; `status()` is the server's own count of everything."""

    def __init__(self, env_factory: Callable[..., Any], *, max_sessions: int, backends: BackendPool | None,
                 token: str | None, reset_timeout: float, step_timeout: float, close_timeout: float,
                 max_message_bytes: int):
        if max_sessions < 1:
            raise ValueError(f"max_sessions={max_sessions}: a server holds at least one session")
        if backends is not None and backends.size < max_sessions:
            raise ValueError(f"{backends.size} backends for max_sessions={max_sessions}: each session leases one")
        self.env_factory = env_factory
        self.env_name = getattr(env_factory, "__name__", type(env_factory).__name__)
        self.max_sessions, self.backends, self.token = max_sessions, backends, token
        self.reset_timeout, self.step_timeout, self.close_timeout = reset_timeout, step_timeout, close_timeout
        self.max_message_bytes = max_message_bytes
        self.url = ""
        self.abandoned = 0
        self._trace: deque[dict] = deque(maxlen=100_000)
        self._trace_file: TextIO | None = None
        self._sessions: dict[int, _Session] = {}
        self._numbers = itertools.count()
        self._counts: Counter = Counter()
        self._started = time.monotonic()
        self.stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def trace(self) -> list[dict]:
        """The last 100,000 calls, oldest first: a copy, since the sessions' threads go on writing theirs."""
        return list(self._trace)

    def status(self) -> dict:
        """Slots, sessions, leases and generations, as JSON-able numbers. `sessions` are the slots that are taken."""
        now = time.monotonic()
        return {
            "environment": self.env_name,
            "sessions": len(self._sessions),
            "max_sessions": self.max_sessions,
            "abandoned": self.abandoned,
            "opened": self._counts["opened"],
            "closed": self._counts["closed"],
            "refused": self._counts["refused"],
            "most_sessions": self._counts["most"],
            "stopping": self.stopping,
            "uptime_s": now - self._started,
            "session_list": [
                {"session": s.number, "episode_id": s.episode_id, "steps": s.steps, "busy": s.busy,
                 "age_s": now - s.opened, "backend": s.lease and s.lease.name} for s in self._sessions.values()
            ],
            "backends": None if self.backends is None else self.backends.status(),
        }

    def record(self, phase: str, session: _Session, start: float, error: str) -> None:
        """One line of the server's trace; (episode_id, turn) is the id that the client's trace carries too."""
        event = {"time": start, "phase": phase, "seconds": time.time() - start, "session": session.number,
                 "episode_id": session.episode_id, "turn": session.steps, "error": error,
                 "backend": session.lease and session.lease.name}
        self._trace.append(event)
        if self._trace_file is not None:
            try:
                self._trace_file.write(json.dumps(event) + "\n")
            except (OSError, ValueError):  # a full disk, a closed file: it costs the trace its line, not a client its reply
                log.exception("session %d: a %s could not be written to the trace", session.number, phase)

    def thread_returned(self) -> None:
        """A thread that was left behind has come back."""
        self.abandoned -= 1

    def free(self, session: _Session) -> None:
        """Give a session's slot back."""
        if self._sessions.pop(session.number, None) is not None:
            self._counts["closed"] += 1
        if not self._sessions:
            self._idle.set()

    def answer_http(self, connection: _Connection, request: Request) -> Response | None:
        """Plain HTTP paths and refusals; None lets the WebSocket handshake go on."""
        path = request.path.partition("?")[0]
        if path == "/health":
            return _json_response(200, {"status": "healthy"})
        if self.token and not hmac.compare_digest(
                request.headers.get("Authorization", "").encode(), f"Bearer {self.token}".encode()):
            return _json_response(401, {"error": "this server needs its bearer token: pass token=..."},
                                  ("WWW-Authenticate", "Bearer"))
        if path == "/status":
            return _json_response(200, self.status())
        if path != "/ws":
            return _json_response(404, {"error": f"{path} is not served here; there are /ws, /health and /status"})
        return None

    def admit(self, connection: _Connection, _: Request, response: Response) -> Response | None:
        """Take a slot for a valid handshake, or refuse it with 503; nothing awaits between the check and the taking."""
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            return None
        active, hung = len(self._sessions), self.abandoned >= self.max_sessions
        if active >= self.max_sessions or hung or self.stopping:
            self._counts["refused"] += 1
            reason = ("the server is shutting down" if self.stopping else
                      f"{self.abandoned} environments hang, restart the server" if hung else
                      f"Server at capacity: {active}/{self.max_sessions} sessions active")
            body = {"error": reason, "active_sessions": active, "max_sessions": self.max_sessions}
            return _json_response(503, body, ("Retry-After", "1"))
        connection.session = session = _Session(next(self._numbers), self, connection)
        self._sessions[session.number] = session
        self._idle.clear()
        self._counts["opened"] += 1
        self._counts["most"] = max(self._counts["most"], len(self._sessions))
        return None

    async def host(self, connection: _Connection) -> None:
        """Serve one session until it ends; its slot is free before the close frame leaves."""
        session = connection.session
        session.started = True
        try:
            try:
                await session.open()
                while not (session.over or self.stopping) and (text := await session.listen()) is not None:
                    reply = await session.answer(text)
                    if reply is not None:
                        await connection.send(reply)
            except (InvalidRequest, Hung) as fault:
                await connection.send(fault.reply)
        except ConnectionClosed:
            pass
        finally:
            # In a task of its own, so that no cancellation can leave an environment or a backend behind.
            closing = asyncio.ensure_future(session.close())
            closing.add_done_callback(lambda _: self.free(session))
            await asyncio.shield(closing)

    async def stop(self, listener: Any, drain: float) -> None:
        """Refuse newcomers, give requests in flight `drain` s, then end every session and wait for it."""
        self.stopping = True
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


def _json_response(status: int, body: dict, *headers: tuple[str, str]) -> Response:
    text = json.dumps(body).encode()
    fields = Headers([("Content-Type", "application/json"), ("Content-Length", str(len(text))), ("Connection", "close"),
                      *headers])
    return Response(status, HTTPStatus(status).phrase, fields, text)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.asynccontextmanager
async def serve(env_factory: Callable[..., Any], *, max_sessions: int = 8, host: str = "127.0.0.1", port: int = 0,
                backends: BackendPool | None = None, token: str | None = None, reset_timeout: float = 60.0,
                step_timeout: float = 60.0, close_timeout: float = 5.0, ping_interval: float | None = 5.0,
                ping_timeout: float | None = 10.0, max_message_bytes: int = protocol.MAX_MESSAGE_BYTES,
                drain: float = 2.0, trace: str | Path | None = None) -> AsyncIterator[EnvServer]:
    """Serve `env_factory()` (or `env_factory(resource)` with `backends`) to at most `max_sessions` sessions at once.

    Times in seconds. `port=0` takes a free one. A client that answers no ping for `ping_interval + ping_timeout` is
    gone, however long its step takes, and so is one that reads nothing of a reply for that long; None turns both off.
    `token` asks every client for it, and is required on an address that other machines reach. `drain` is what a request
    in flight gets at shutdown. `trace` is a JSONL file. Browsers are refused (a page of any site could connect to a
    loopback address): clients must send no Origin.
    """
    if not token and not _is_loopback(host):
        raise ValueError(f"host={host!r} is reachable from other machines: pass token=..., or stay on 127.0.0.1")
    server = EnvServer(env_factory, max_sessions=max_sessions, backends=backends, token=token,
                       reset_timeout=reset_timeout, step_timeout=step_timeout, close_timeout=close_timeout,
                       max_message_bytes=max_message_bytes)
    async with contextlib.AsyncExitStack() as stack:
        if trace is not None:
            server._trace_file = stack.enter_context(open(trace, "a", buffering=1))
        if backends is not None:
            await asyncio.to_thread(backends.start)
            stack.push_async_callback(asyncio.to_thread, backends.close)
        listener = await serve_websockets(
            server.host, host, port, process_request=server.answer_http, process_response=server.admit,
            create_connection=_Connection, origins=[None], compression=None, open_timeout=HANDSHAKE,
            close_timeout=CLOSE_HANDSHAKE, ping_interval=ping_interval, ping_timeout=ping_timeout,
            max_size=max_message_bytes, server_header=None, logger=_wire_log)
        stack.push_async_callback(server.stop, listener, drain)
        bound = listener.sockets[0].getsockname()
        server.url = f"ws://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
        yield server


SHIPPED = {"calculator": "grpolab.env.calculator:CalculatorEnv", "guess": "grpolab.env.guess:GuessEnv"}


def load_factory(name: str) -> Callable[..., Any]:
    """`calculator`, `guess`, or `package.module:Class` of an environment of your own."""
    module, _, attribute = SHIPPED.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"no environment {name!r}: there are {', '.join(SHIPPED)}, or write package.module:Class")
    return getattr(importlib.import_module(module), attribute)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m grpolab serve`."""
    parser.add_argument("environment", help="calculator, guess, or package.module:Class of your own")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs --token-file")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one and prints it")
    parser.add_argument("--max-sessions", type=int, default=8)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds added to every reset and step")
    parser.add_argument("--reset-timeout", type=float, default=60.0, help="seconds that a reset may take")
    parser.add_argument("--step-timeout", type=float, default=60.0, help="seconds that a step may take")
    parser.add_argument("--close-timeout", type=float, default=5.0, help="seconds that closing an environment may take")
    parser.add_argument("--ping-interval", type=float, default=5.0, help="seconds between heartbeats; 0 turns them off")
    parser.add_argument("--ping-timeout", type=float, default=10.0, help="seconds without answer before it is gone")
    parser.add_argument("--token-file", type=Path, help="file that holds the bearer token which clients must send")
    parser.add_argument("--trace", type=Path, help="JSONL file to append every call to")


async def serve_forever(env_factory: Callable[..., Any], **options: Any) -> None:
    """`serve` until SIGTERM or SIGINT, then shut down in order. Prints the URL once it listens."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(env_factory, **options) as server:
        print(f"serving {server.env_name} at {server.url} to at most {server.max_sessions} sessions", flush=True)
        await stop.wait()


def main(args: argparse.Namespace) -> int:
    """`python -m grpolab serve`: run a server process from parsed arguments."""
    factory = load_factory(args.environment)
    if args.latency:
        from grpolab.env.faults import Faulty

        inner = factory
        factory = lambda: Faulty(inner(), latency=args.latency)  # noqa: E731
    asyncio.run(serve_forever(
        factory, max_sessions=args.max_sessions, host=args.host, port=args.port,
        token=args.token_file and args.token_file.read_text().strip(), reset_timeout=args.reset_timeout,
        step_timeout=args.step_timeout, close_timeout=args.close_timeout, ping_interval=args.ping_interval or None,
        ping_timeout=args.ping_timeout, trace=args.trace))
    return 0
