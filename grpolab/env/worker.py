"""One environment and the thread that makes it and calls it: a session's own in the server, or a child process's main one.

Calls are answered in the order in which they came, with the text of a reply whatever the environment raises. An environment
with an `async` method gets an event loop in that thread, on which its background tasks run between the calls too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import pkgutil
import queue
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from grpolab.env import protocol
from grpolab.env.protocol import InvalidAction, StepResult

log = logging.getLogger("grpolab.env.worker")

SHIPPED = {"calculator": "grpolab.env.calculator:CalculatorEnv", "guess": "grpolab.env.guess:GuessEnv",
           "aws": "grpolab.env.aws.environment:AwsEnv"}
METHODS = ("reset", "step", "state", "close")
TOOLS = ("list_tools", "call_tool")  # of an environment that serves MCP


def load_factory(name: str) -> Callable[..., Any]:
    """`calculator`, `guess`, `aws`, or `package.module:Class` of an environment of your own; raises ValueError if it is none or
    cannot be imported."""
    try:
        factory = pkgutil.resolve_name(SHIPPED.get(name, name))
    except (Exception, SystemExit) as fault:  # whatever a module does when it is imported
        raise ValueError(f"environment {name!r} cannot be imported: {fault!r}. There are {', '.join(SHIPPED)}; or write "
                         "package.module:Class, whose folder is the current one or on PYTHONPATH") from fault
    if not callable(factory):
        raise ValueError(f"environment {name!r} is a {type(factory).__name__}: write package.module:Class")
    return factory


class Worker:
    """`submit` calls from any thread; `run` is the whole life of the environment's own.

    Calls: `create` (the factory, first), `reset` (data: its options), `step` (the action), `state` (the fields that the
    environment's own are added to), `mcp` (a JSON-RPC request), `close`, and `stop`, which ends `run`.
    """

    def __init__(self, make: Callable[[], Any], name: str):
        self._make, self._name = make, name
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._env: Any = None
        self._runner = asyncio.Runner()
        self._loop: asyncio.AbstractEventLoop | None = None  # of an `async` environment
        self._wake: asyncio.Event | None = None
        self._task: asyncio.Task | None = None  # the call that `cancel` ends

    def submit(self, kind: str, data: Any, done: Callable[[str, str], Any]) -> None:
        """Call later; in the worker's thread `done` gets the reply and the name of what was raised, '' if nothing was."""
        self._jobs.put((kind, data, done))
        self._on_loop(lambda: self._wake.set())

    def cancel(self) -> None:
        """Cancel the call that an `async` environment is busy with, unless it closes; a plain one cannot be ended."""
        self._on_loop(lambda: self._task is not None and self._task.cancel())

    def _on_loop(self, work: Callable[[], Any]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(work)

    def run(self) -> None:
        """Serve until `stop`, whatever the environment raises."""
        kind = ""
        while kind != "stop":
            if self._loop is not None:
                self._runner.run(self._wait_for_job())
            kind, data, done = self._jobs.get()
            outcome = self._answer(kind, data)
            with contextlib.suppress(RuntimeError, OSError):  # nobody waits any more: a closed loop, a server that is gone
                done(*outcome)
        self._runner.close()

    async def _wait_for_job(self) -> None:
        while self._jobs.empty():
            await self._wake.wait()
            self._wake.clear()

    def _answer(self, kind: str, data: Any) -> tuple[str, str]:
        """(reply, name of what was raised). The session goes on, whatever the environment does with a request."""
        try:
            return self._reply(kind, data), ""
        except BaseException as raised:  # noqa: BLE001  the thread must outlive whatever an environment raises
            reason, fault = _reason(raised), type(raised).__name__[:100]
            if kind in ("create", "close"):
                log.error("%s of %s failed", kind, self._name, exc_info=raised)
                return reason, fault
            if isinstance(raised, InvalidAction):
                return protocol.invalid("value_error", ["data"], str(raised)).reply, fault
            log.info("%s of %s raised %s", kind, self._name, reason)
            return protocol.error(reason, "EXECUTION_ERROR"), fault

    def _reply(self, kind: str, data: Any) -> str:
        """Make the call; the reply's text. TypeError or ValueError where the environment returned what cannot be sent."""
        env = self._env
        if kind == "create":
            self._create()
        if kind == "close" and env is not None:
            self._env = None
            self._result(env.close(), cancellable=False)
        if kind in ("create", "close", "stop"):
            return ""
        if env is None:
            raise RuntimeError(f"{self._name} is not there: it was closed, or never made")
        if kind == "mcp":
            return self._mcp(data)
        value = self._result(env.reset(**protocol.declared(env.reset, data)) if kind == "reset" else
                             env.step(data) if kind == "step" else env.state())
        right = dict if kind == "state" else StepResult
        if not isinstance(value, right):
            raise TypeError(f"{self._name} returned a {type(value).__name__} from a {kind}; it is a {right.__name__}")
        try:
            return protocol.message("state", {**data, **value}) if kind == "state" else protocol.observation(value)
        except (TypeError, ValueError, RecursionError) as fault:
            raise ValueError(f"{self._name} returned from a {kind} what JSON cannot hold: {fault}") from fault

    def _result(self, value: Any, cancellable: bool = True) -> Any:
        """What a call returned, or what it comes to where that has to be awaited."""
        async def awaited() -> Any:
            self._task = asyncio.current_task() if cancellable else None
            try:
                return await value
            finally:
                self._task = None

        return self._runner.run(awaited()) if inspect.isawaitable(value) else value

    def _mcp(self, request: dict) -> str:
        """The tools of an environment that has them, or what one of them returns, as MCP has it (JSON-RPC)."""
        method, params = request.get("method"), request.get("params") or {}
        name, arguments = (params.get("name"), params.get("arguments") or {}) if isinstance(params, dict) else (None, None)
        try:
            if not all(hasattr(self._env, tools) for tools in TOOLS):
                outcome = _error(-32603, "Environment does not support MCP")
            elif method == "tools/list":
                outcome = {"result": {"tools": self._result(self._env.list_tools())}}
            elif method != "tools/call":
                outcome = _error(-32601, f"Method not found: {method!r:.80}")
            elif not isinstance(name, str) or not isinstance(arguments, dict):
                outcome = _error(-32602, "tools/call takes a name and arguments, an object")
            else:
                outcome = {"result": self._result(self._env.call_tool(name, arguments))}
        except BaseException as raised:  # noqa: BLE001
            outcome = _error(-32603, _reason(raised))
        id = request.get("id")  # 1e999 is infinite, which no reply can hold
        return protocol.message("mcp", {"jsonrpc": "2.0", "id": id if isinstance(id, str | int) else None, **outcome})

    def _create(self) -> None:
        env = self._make()
        if missing := [m for m in METHODS if not callable(getattr(env, m, None))]:
            raise TypeError(f"{self._name} made a {type(env).__name__} without {', '.join(missing)}: "
                            f"an environment has {', '.join(METHODS)}")
        self._env = env
        if any(inspect.iscoroutinefunction(getattr(env, method, None)) for method in METHODS + TOOLS):
            self._wake = asyncio.Event()
            self._loop = self._runner.get_loop()


def _error(code: int, message: str) -> dict:
    return {"error": {"code": code, "message": message, "data": None}}


def _reason(raised: BaseException) -> str:
    """`KeyError: 'a key'`, where str says but 'a key'."""
    return "".join(traceback.format_exception_only(raised)).strip()


class EnvThread(Worker):
    """A worker in a thread of its own, called from an event loop. A daemon: a hung one must not keep us from exiting."""

    pid = None

    def __init__(self, make: Callable[[], Any], name: str):
        super().__init__(make, name)
        self.thread = threading.Thread(target=self.run, name=f"env-{name}", daemon=True)
        self.thread.start()

    async def call(self, kind: str, data: Any = None) -> tuple[str, str]:
        """(reply, fault) of one call. It is made though nobody waits any more: a late environment still closes."""
        loop = asyncio.get_running_loop()
        outcome = loop.create_future()

        def settle(*reply: str) -> None:
            if not outcome.done():
                outcome.set_result(reply)

        self.submit(kind, data, partial(loop.call_soon_threadsafe, settle))
        return await outcome

    async def end(self, kill: bool) -> None:
        """Let the thread end. One that hangs cannot be killed."""
        self.submit("stop", None, lambda *_: None)
