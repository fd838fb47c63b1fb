"""The wire between a session and an environment server: OpenEnv's WebSocket protocol, and the errors it can end in.

One connection is one session with one environment. The client sends `reset`, `step`, `state` and `close`, the server
answers every message but `close`, in order. A message is a JSON object with the keys `type` and `data` and no other;
there is no request id, so a reply that was not waited for would be paired with the next request. Hence the rule that
the whole package keeps: after a timeout or a cancellation a connection is never used again.

Source: OpenEnv (openenv-core 0.3.0, openenv 0.10.0), `/ws` endpoint.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_MESSAGE_BYTES = 16 * 2**20  # the servers' inbound limit
MAX_REPLY_BYTES = 100 * 2**20  # the clients' inbound limit
MAX_REASON = 2000  # characters of an error of the other side that a message shows

# Codes after which the server closes the connection; every other error leaves the session usable.
ENDING_CODES = frozenset({"CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR", "RESET_TIMEOUT", "STEP_TIMEOUT",
                          "STATE_TIMEOUT"})


@dataclass(frozen=True)
class StepResult:
    """What `reset` and `step` return. `reward` is None where the environment gave none (never a made-up number)."""

    observation: dict
    reward: float | None = None
    done: bool = False
    metadata: dict = field(default_factory=dict)


class Environment(Protocol):
    """What a server hosts: one object a session. Methods may be plain (run in the session's own thread) or `async`.

    `reset` may declare any of the keyword arguments `seed`, `episode_id` and `task`, or others that clients send; what
    it does not declare is dropped. `step` gets the action as sent, and raises `InvalidAction` for one it cannot read.
    `state` is public: what it returns reaches the policy's side of the wire. `close` frees what the object holds.
    """

    def reset(self, **options: Any) -> StepResult: ...

    def step(self, action: dict) -> StepResult: ...

    def state(self) -> dict: ...

    def close(self) -> None: ...


def declared(reset: Callable, options: dict) -> dict:
    """The options that an environment's reset declares; the rest is dropped, as OpenEnv does."""
    parameters = inspect.signature(reset).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return options
    return {p.name: options[p.name] for p in parameters if p.name in options}


class EnvError(Exception):
    """Anything that went wrong between a session and its server. Failures are errors, never rewards."""

class ConnectError(EnvError):
    """No session came to be: nothing listens there, the handshake was refused, or the server hung up.

    `status` is the HTTP status of a refused handshake, else None.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

class CapacityError(ConnectError):
    """All the server's sessions are taken. `active` and `max_sessions` as the server reports them, or None."""

    def __init__(self, message: str, active: int | None = None, max_sessions: int | None = None,
                 retry_after: float | None = None):
        super().__init__(message, 503)
        self.active, self.max_sessions, self.retry_after = active, max_sessions, retry_after


class FactoryError(ConnectError):
    """The server admitted the session and could not make its environment."""

class SessionLost(EnvError):
    """The session is gone, and with it the episode: the connection dropped, or a request on it was abandoned."""

class DeadlineExceeded(SessionLost, TimeoutError):
    """A phase (connect, admit, reset, step, state, mcp, episode, group) took longer than `seconds`. `limit` is the field of
    `Deadlines` that bounds it, where that has another name."""

    def __init__(self, phase: str, seconds: float, who: str = "session", limit: str = ""):
        super().__init__(f"{phase} of {who} took longer than its deadline of {seconds:g} s; its connection is dropped. "
                         f"If that is a normal time, raise Deadlines({limit or phase}=...)")
        self.phase, self.seconds = phase, seconds


class ServerError(EnvError):
    """The server answered with an error and keeps the session: `code` is EXECUTION_ERROR, UNKNOWN_TYPE, ..."""

    def __init__(self, message: str, code: str, errors: tuple = ()):
        super().__init__(f"{message} ({code})")
        self.code, self.errors = code, errors


class InvalidAction(ServerError, ValueError):
    """An action that the environment cannot read (VALIDATION_ERROR): nothing has happened, session and episode go on.

    An environment raises `InvalidAction("why")` before it changes anything. On the client's side `step` raises it, with
    the server's reasons as its text and as `errors`; the session is not lost, so a rollout may catch it and show it to the
    policy, name a penalty of its own, or give the episode up.
    """

    def __init__(self, message: str, errors: tuple = ()):
        EnvError.__init__(self, message)
        self.code, self.errors = "VALIDATION_ERROR", errors

class InvalidRequest(Exception):
    """A message that the server cannot serve; `reply` is the error frame, `ends` says that the session ends with it."""

    def __init__(self, message: str, code: str, errors: list | None = None):
        super().__init__(message)
        self.reply = error(message, code, **({"errors": errors} if errors else {}))
        self.ends = code in ENDING_CODES


def dumps(message: dict) -> str:
    """JSON text of a message. NaN and infinities are refused (ValueError): no other JSON reader need accept them."""
    return _ENCODER.encode(message)


def loads(text: str) -> Any:
    """Parsed JSON; raises ValueError also for NaN and Infinity."""
    return _DECODER.decode(text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Made once: json.dumps and json.loads with options make a new one for each message.
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


# Requests. "data" of a reset is its options, of a step the action itself; state and close have none.
STATE = '{"type":"state"}'
CLOSE = '{"type":"close"}'


def reset(options: dict) -> str:
    """The text of a reset. `options`: seed, episode_id, task, and whatever else the environment reads."""
    return dumps({"type": "reset", "data": options})


def step(action: dict) -> str:
    """The text of a step; `action` is sent as it is."""
    return dumps({"type": "step", "data": action})


# Replies.
def observation(result: StepResult) -> str:
    """The reply to a reset or a step. Metadata stands inside the observation, where clients of either version of OpenEnv
    read it; beside it where the observation has a field of that name to itself."""
    body, beside = result.observation, {}
    if "metadata" in body:
        beside = {"metadata": result.metadata}
    elif result.metadata:
        body = {**body, "metadata": result.metadata}
    return dumps({"type": "observation", "data": {"observation": body, "reward": result.reward, "done": result.done, **beside}})


def state(fields: dict) -> str:
    """The reply to a state request."""
    return dumps({"type": "state", "data": fields})


def error(message: str, code: str, **more: Any) -> str:
    """An error frame; `more` are the extra keys of its data, such as active_sessions."""
    return dumps({"type": "error", "data": {"message": message, "code": code, **more}})


def no_mcp(request: dict) -> str:
    """The reply to an `mcp` message of a server whose environments have no MCP tools."""
    fault = {"code": -32603, "message": "Environment does not support MCP", "data": None}
    return dumps({"type": "mcp", "data": {"jsonrpc": "2.0", "id": request.get("id"), "error": fault}})


def parse_request(text: str | bytes) -> tuple[str, dict]:
    """(type, data) of a client's message; raises InvalidRequest with the reply that the protocol gives it."""
    if isinstance(text, bytes):
        raise InvalidRequest("a message must be a text frame, and this one is binary", "SESSION_ERROR")
    try:
        message = loads(text)
    except ValueError as fault:
        raise InvalidRequest(f"Invalid JSON: {fault}", "INVALID_JSON") from None
    except RecursionError:
        raise InvalidRequest("Invalid JSON: nested too deeply", "INVALID_JSON") from None
    if not isinstance(message, dict):
        raise InvalidRequest(f"a message must be a JSON object, not a {type(message).__name__}", "SESSION_ERROR")
    kind = message.get("type", "")
    if kind not in ("reset", "step", "state", "close", "mcp"):
        raise InvalidRequest(f"Unknown message type: {kind}", "UNKNOWN_TYPE")
    allowed = {"type"} if kind in ("state", "close") else {"type", "data"}
    extra = [{"type": "extra_forbidden", "loc": [key], "msg": "Extra inputs are not permitted"}
             for key in message if key not in allowed]
    if extra:
        raise InvalidRequest("Invalid message", "VALIDATION_ERROR", extra)
    data = message.get("data", {} if kind in ("reset", "state", "close") else None)
    if not isinstance(data, dict):
        fault = {"type": "dict_type", "loc": ["data"], "msg": "Input should be a valid dictionary"}
        raise InvalidRequest("Invalid message", "VALIDATION_ERROR", [fault])
    return kind, data


def parse_reply(text: str | bytes, who: str = "the server") -> tuple[str, dict]:
    """(type, data) of the reply of `who`. Error frames raise: CapacityError, FactoryError, SessionLost, InvalidAction or
    ServerError; what is no reply of the protocol raises SessionLost."""
    try:
        message = loads(text)
        kind, data = message["type"], message.get("data")
        data = {} if data is None else data
        if not (isinstance(kind, str) and isinstance(data, dict)):
            raise TypeError("its type is no text, or its data no object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise SessionLost(f"{who} sent a reply that is not of OpenEnv's protocol: {str(text[:200])!r} "
                          f"({str(fault)[:200]})") from None
    if kind != "error":
        return kind, data
    code, reasons = str(data.get("code", ""))[:100], data.get("errors")
    reason = f"{who}: {str(data.get('message', 'the server gave no reason'))[:MAX_REASON]}"
    if code == "CAPACITY_REACHED":
        raise CapacityError(reason, whole(data.get("active_sessions")), whole(data.get("max_sessions")))
    if code == "FACTORY_ERROR":
        raise FactoryError(reason)
    if code in ENDING_CODES:
        raise SessionLost(f"{reason} ({code})")
    reasons = tuple(reasons) if isinstance(reasons, list) else ()
    if code == "VALIDATION_ERROR":
        raise InvalidAction("; ".join(map(_reason, reasons))[:MAX_REASON] or reason, reasons)
    raise ServerError(reason, code, reasons)


def _reason(fault: Any) -> str:
    """One of the `errors` of a VALIDATION_ERROR as text: `place: message`."""
    if not isinstance(fault, dict):
        return str(fault)
    where = fault.get("loc")
    place = ".".join(map(str, where)) if isinstance(where, list) else ""
    reason = str(fault.get("msg", fault.get("type", "invalid")))
    return f"{place}: {reason}" if place else reason


def whole(value: Any) -> int | None:
    """A count that the other side names, or None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def step_result(data: dict, who: str = "the server") -> StepResult:
    """A StepResult from an observation reply of `who`. Its metadata stand beside `done`, or inside the observation, or (as
    openenv 0.10.0 sends them) in both places; what stands inside and is not the same stays a field of the observation.
    Raises SessionLost where the observation is no object, the reward no finite number, or `done` no truth value."""
    seen, done, beside = data.get("observation"), data.get("done"), data.get("metadata")
    if not isinstance(seen, dict):
        raise SessionLost(f"{who} sent an observation that is no object: {seen!r:.200}")
    if not (done is None or isinstance(done, bool)):
        raise SessionLost(f"{who} sent done={done!r:.200}, which is neither true nor false")
    if not (beside is None or isinstance(beside, dict)):
        raise SessionLost(f"{who} sent metadata that is no object: {beside!r:.200}")
    inside = seen.get("metadata")
    if isinstance(inside, dict) and (beside is None or beside == inside):
        seen, beside = {key: value for key, value in seen.items() if key != "metadata"}, inside
    return StepResult(seen, _number(data.get("reward"), who), bool(done), beside or {})


def _number(reward: Any, who: str) -> float | None:
    """The reward as a finite float, None if there is none; raises SessionLost."""
    if reward is None:
        return None
    try:
        value = float(reward) if isinstance(reward, int | float) else math.nan
    except OverflowError:  # a JSON integer may have hundreds of digits
        value = math.inf
    if not math.isfinite(value):
        raise SessionLost(f"{who} sent a reward that is no finite number: {str(reward)[:200]!r}")
    return value
