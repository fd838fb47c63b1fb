"""The wire between a session and an environment server: OpenEnv's WebSocket protocol, and the errors it can end in.

One connection is one session with one environment. The client sends `reset`, `step`, `state` and `close`, the server
answers every message but `close`, in order. There is no request id, so a reply that was not waited for would be paired with
the next request: after a timeout or a cancellation a connection is never used again.

Source: OpenEnv (openenv-core 0.3.0, openenv 0.10.0), `/ws` endpoint.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

MAX_MESSAGE_BYTES = 16 * 2**20  # the servers' inbound limit
MAX_REPLY_BYTES = 100 * 2**20  # the clients' inbound limit
MAX_REASON = 2000  # characters of an error of the other side that a message shows


@dataclass(frozen=True)
class StepResult:
    """What `reset` and `step` return. `reward` is None where the environment gave none (never a made-up number).

    Raises TypeError or ValueError for what is no result: the reward is a finite number, the observation a dict.
    """

    observation: dict
    reward: float | None = None
    done: bool = False
    metadata: dict = field(default_factory=dict)

    def __post_init__(self):
        for name in ("observation", "metadata"):
            if not isinstance(getattr(self, name), dict):
                raise TypeError(f"{name}={getattr(self, name)!r:.100}: it is a dict")
        if type(self.done).__name__ not in ("bool", "bool_"):  # numpy's among them; the text "False" would count as true
            raise TypeError(f"done={self.done!r:.100}: it is True or False")
        object.__setattr__(self, "done", bool(self.done))
        if self.reward is not None:
            object.__setattr__(self, "reward", _finite(self.reward))


def _finite(reward: Any) -> float:
    if not isinstance(reward, Real):
        raise TypeError(f"reward={reward!r:.100}: it is a number, or None for none")
    try:
        number = float(reward)
    except OverflowError:  # an integer may have hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"reward={number}: nan and inf are no rewards; it is a finite number, or None for none")
    return number


class Environment(Protocol):
    """What a server hosts: one object a session. Methods may be plain (run in the session's own thread) or `async`.

    `reset` may declare any of the keyword arguments `seed`, `episode_id` and `task`, or others that clients send; the rest is
    dropped. `step` raises `InvalidAction` for an action that it cannot read. `state` is public. `close` frees what it holds.
    One with tools may have `list_tools()` and `call_tool(name, arguments)` beside these, whose results are MCP's `tools/list`
    and `tools/call`.
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


def whole(value: Any) -> int | None:
    """`value` where it is an integer (True is none), else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def check_counts(**counts: int) -> None:
    """Raise ValueError for the first that is no whole number of at least 1."""
    for name, count in counts.items():
        if whole(count) is None or count < 1:
            raise ValueError(f"{name}={count!r}: a whole number of at least 1")


class EnvError(Exception):
    """Anything that went wrong between a session and its server. Failures are errors, never rewards."""


class ConnectError(EnvError):
    """No session came to be: nothing listens there, the handshake was refused, or the server hung up."""


class CapacityError(ConnectError):
    """All the server's sessions are taken. `active` and `max_sessions` as the server reports them, or None."""

    def __init__(self, message: str, active: Any = None, max_sessions: Any = None):
        super().__init__(message)
        self.active, self.max_sessions = whole(active), whole(max_sessions)


class FactoryError(ConnectError):
    """The server admitted the session and could not make its environment."""


class SessionLost(EnvError):
    """The session is gone, and with it the episode: the connection dropped, or a request on it was abandoned."""


class DeadlineExceeded(SessionLost, TimeoutError):
    """A phase (connect, admit, reset, step, state, mcp, episode, group) took longer than `seconds`, the field of `Deadlines`
    of that name."""

    def __init__(self, phase: str, seconds: float, who: str = "session"):
        limit = "step" if phase in ("state", "mcp") else phase
        super().__init__(f"{phase} of {who} took longer than its deadline of {seconds:g} s; its connection is dropped. "
                         f"If that is a normal time, raise Deadlines({limit}=...)")
        self.phase = phase


class ServerError(EnvError):
    """The server answered with an error and keeps the session: `code` is EXECUTION_ERROR, UNKNOWN_TYPE, ..."""

    def __init__(self, message: str, code: str):
        super().__init__(f"{message} ({code})")
        self.code = code


class InvalidAction(ServerError, ValueError):
    """An action that the environment cannot read (VALIDATION_ERROR): nothing has happened, session and episode go on.

    An environment raises `InvalidAction("why")` before it changes anything. On the client's side `step` raises it with the
    server's reasons; a rollout may catch it and show it to the policy, name a penalty, or give the episode up.
    """

    code = "VALIDATION_ERROR"

    def __init__(self, message: str):
        EnvError.__init__(self, message)


def first_fault(fault: BaseException) -> BaseException:
    """The error itself, or where it is a task group's, the first in it: what happened, and not how it was waited for."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault


# What a client raises for an error frame whose code ends the session; every other code leaves it usable: a ServerError.
ENDING = {"CAPACITY_REACHED": CapacityError, "FACTORY_ERROR": FactoryError, "SESSION_ERROR": SessionLost,
          "RESET_TIMEOUT": SessionLost, "STEP_TIMEOUT": SessionLost, "STATE_TIMEOUT": SessionLost, "MCP_TIMEOUT": SessionLost}


class InvalidRequest(Exception):
    """A message that the server cannot serve; `reply` is the error frame, `ends` says that the session ends with it."""

    def __init__(self, message: str, code: str, errors: list | None = None):
        super().__init__(message)
        self.reply = error(message, code, **({"errors": errors} if errors else {}))
        self.ends = code in ENDING


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# NaN and infinities are refused both ways (ValueError). Made once: json.dumps with options makes an encoder for each message.
dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
loads = json.JSONDecoder(parse_constant=_no_constant).decode


def message(kind: str, data: dict) -> str:
    """The text of a message: its data are a reset's options, a step's action, an mcp's request or a state's fields."""
    return dumps({"type": kind, "data": data})


STATE = '{"type":"state"}'
CLOSE = '{"type":"close"}'
KEYS = {"reset": {"type", "data"}, "step": {"type", "data"}, "mcp": {"type", "data"}, "state": {"type"}, "close": {"type"}}


def observation(result: StepResult) -> str:
    """The reply to a reset or a step. Metadata stands inside the observation, where clients of either OpenEnv read it, or
    beside it where the observation has a field of that name."""
    body, beside = result.observation, {}
    if "metadata" in body:
        beside = {"metadata": result.metadata}
    elif result.metadata:
        body = {**body, "metadata": result.metadata}
    return message("observation", {"observation": body, "reward": result.reward, "done": result.done, **beside})


def error(text: str, code: str, **more: Any) -> str:
    """An error frame; `more` are the extra keys of its data, such as active_sessions."""
    return message("error", {"message": text, "code": code, **more})


def invalid(kind: str, loc: list, reason: str) -> InvalidRequest:
    """The refusal of a message whose field `loc` is wrong, in the words of OpenEnv's server."""
    return InvalidRequest("Invalid message", "VALIDATION_ERROR", [{"type": kind, "loc": loc, "msg": reason}])


def parse_request(text: str | bytes) -> tuple[str, dict]:
    """(type, data) of a client's message; raises InvalidRequest with the reply that the protocol gives it."""
    if isinstance(text, bytes):
        raise InvalidRequest("a message must be a text frame, and this one is binary", "SESSION_ERROR")
    try:
        request = loads(text)
    except (ValueError, RecursionError) as fault:
        raise InvalidRequest(f"Invalid JSON: {fault}", "INVALID_JSON") from None
    if not isinstance(request, dict):
        raise InvalidRequest(f"a message must be a JSON object, not a {type(request).__name__}", "SESSION_ERROR")
    kind = request.get("type", "")
    if not isinstance(kind, str) or kind not in KEYS:
        raise InvalidRequest(f"Unknown message type: {kind}", "UNKNOWN_TYPE")
    for key in request.keys() - KEYS[kind]:
        raise invalid("extra_forbidden", [key], "Extra inputs are not permitted")
    data = request.get("data", None if kind in ("step", "mcp") else {})
    if not isinstance(data, dict):
        raise invalid("dict_type", ["data"], "Input should be a valid dictionary")
    return kind, data


def parse_reply(text: str | bytes, who: str = "the server") -> tuple[str, dict]:
    """(type, data) of the reply of `who`. Error frames raise: CapacityError, FactoryError, SessionLost, InvalidAction or
    ServerError; what is no reply of the protocol raises SessionLost."""
    try:
        reply = loads(text)
        kind, data = reply["type"], {} if reply.get("data") is None else reply["data"]
        if not (isinstance(kind, str) and isinstance(data, dict)):
            raise TypeError("its type is no text, or its data no object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise SessionLost(f"{who} sent a reply that is not of OpenEnv's protocol: {str(text[:200])!r} "
                          f"({str(fault)[:200]})") from None
    if kind != "error":
        return kind, data
    code = str(data.get("code", ""))[:100]
    reason = f"{who}: {str(data.get('message', 'the server gave no reason'))[:MAX_REASON]}"
    if code == "CAPACITY_REACHED":
        raise CapacityError(reason, data.get("active_sessions"), data.get("max_sessions"))
    if code in ENDING:
        raise ENDING[code](f"{reason} ({code})")
    if code == "VALIDATION_ERROR":
        with suppress(KeyError, TypeError):  # else it holds no list of pydantic's errors
            reason = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in data["errors"]) or reason
        raise InvalidAction(reason[:MAX_REASON])
    raise ServerError(reason, code)


def step_result(data: dict, who: str = "the server") -> StepResult:
    """A StepResult from an observation reply of `who`; raises SessionLost where it is none. Its metadata stand beside `done`,
    inside the observation, or (openenv 0.10.0) in both places; what differs inside stays a field of the observation."""
    seen, beside = data.get("observation"), data.get("metadata")
    inside = seen.get("metadata") if isinstance(seen, dict) else None
    if isinstance(inside, dict) and beside in (None, inside):
        seen, beside = {key: value for key, value in seen.items() if key != "metadata"}, inside
    try:
        done = data.get("done")
        return StepResult(seen, data.get("reward"), False if done is None else done, {} if beside is None else beside)
    except (TypeError, ValueError) as fault:
        raise SessionLost(f"{who} sent an observation that is none: {fault}") from None
