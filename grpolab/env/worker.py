"""One environment and the thread that makes it and calls it: a session's own in the server, or a child process's main one.

Calls are posted, run in the order they came in, and end in a reply text whatever the environment raises. An environment with
an `async` method gets an event loop of its own in that thread, on which also its background tasks live.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import pkgutil
import queue
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from grpolab.env import protocol
from grpolab.env.protocol import InvalidAction, StepResult

if TYPE_CHECKING:
    import asyncio  # below where it is needed: it takes longer to import than all the rest of a plain environment's process

log = logging.getLogger("grpolab.env.worker")

SHIPPED = {"calculator": "grpolab.env.calculator:CalculatorEnv", "guess": "grpolab.env.guess:GuessEnv",
           "aws": "grpolab.env.aws.environment:AwsEnv"}
METHODS = ("reset", "step", "state", "close")

Done = Callable[[str, str], Any]  # (text, fault): the reply, and the name of what was raised, '' if nothing was


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
    """`post` calls, `cancel` what an `async` environment is doing, `stop`; `run` is the thread's whole life.

    Kinds of calls: `create` (the factory, first), `reset` (data: its options), `step` (the action), `state` (the fields that
    the environment's own are added to), `close`.
    """

    def __init__(self, make: Callable[[], Any], name: str):
        self._make, self._name = make, name
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._env: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of an `async` environment
        self._wake: asyncio.Event | None = None
        self._call: tuple[str, asyncio.Task] | None = None

    def post(self, kind: str, data: Any, done: Done) -> None:
        """Call later, from any thread; `done(text, fault)` is called in the worker's thread."""
        self._jobs.put((kind, data, done))
        self._on_loop(lambda: self._wake.set())

    def stop(self) -> None:
        """Let `run` return after the calls that were posted."""
        self._jobs.put(None)
        self._on_loop(lambda: self._wake.set())

    def cancel(self) -> None:
        """Cancel the call that an `async` environment is busy with, unless it closes; a plain one cannot be ended."""
        def cancel() -> None:
            if self._call is not None and self._call[0] != "close":
                self._call[1].cancel()

        self._on_loop(cancel)

    def _on_loop(self, work: Callable[[], Any]) -> None:
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(work)

    def run(self) -> None:
        """Serve until `stop`, whatever the environment raises."""
        while (job := self._jobs.get()) is not None:
            kind, data, done = job
            try:
                outcome = self._reply(kind, data, self._begin(kind, data))
            except BaseException as raised:  # noqa: BLE001  the thread must outlive whatever an environment raises
                outcome = self._refusal(kind, raised)
            _report(done, *outcome)
            if kind == "create" and any(inspect.iscoroutinefunction(getattr(self._env, method, None)) for method in METHODS):
                import asyncio

                return asyncio.run(self._run_on_loop())

    async def _run_on_loop(self) -> None:
        """The same on the loop of an `async` environment, whose background tasks run between the calls."""
        import asyncio

        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                await self._wake.wait()
                self._wake.clear()
                continue
            if job is None:
                return
            kind, data, done = job
            self._call = kind, asyncio.ensure_future(self._answer_on_loop(kind, data))
            await asyncio.wait([self._call[1]])
            call, self._call = self._call[1], None
            _report(done, *(("", "CancelledError") if call.cancelled() else call.result()))

    async def _answer_on_loop(self, kind: str, data: Any) -> tuple[str, str]:
        try:
            value = self._begin(kind, data)
            return self._reply(kind, data, await value if inspect.isawaitable(value) else value)
        except BaseException as raised:  # noqa: BLE001  SystemExit would end the loop
            return self._refusal(kind, raised)

    def _begin(self, kind: str, data: Any) -> Any:
        env = self._env
        if kind == "create":
            env = self._make()
            if missing := [m for m in METHODS if not callable(getattr(env, m, None))]:
                raise TypeError(f"{self._name} made a {type(env).__name__} without {', '.join(missing)}: "
                                f"an environment has {', '.join(METHODS)}")
            self._env = env
            return None
        if kind == "close":
            self._env = None
            return None if env is None else env.close()
        if env is None:
            raise RuntimeError(f"{self._name} is not there: it was closed, or never made")
        if kind == "reset":
            return env.reset(**protocol.declared(env.reset, data))
        return env.step(data) if kind == "step" else env.state()

    def _reply(self, kind: str, data: Any, value: Any) -> tuple[str, str]:
        """(text of the reply, no fault); raises TypeError or ValueError where the environment returned what cannot be sent."""
        if kind in ("create", "close"):
            return "", ""
        right = dict if kind == "state" else StepResult
        if not isinstance(value, right):
            raise TypeError(f"{self._name} returned a {type(value).__name__} from a {kind}; it is a {right.__name__}")
        try:
            return protocol.message("state", {**data, **value}) if kind == "state" else protocol.observation(value), ""
        except (TypeError, ValueError, RecursionError) as fault:
            raise ValueError(f"{self._name} returned from a {kind} what JSON cannot hold: {fault}") from fault

    def _refusal(self, kind: str, raised: BaseException) -> tuple[str, str]:
        """(reply, fault) of a request that the environment did not fulfil; the session goes on."""
        fault = type(raised).__name__[:100]
        reason = "".join(traceback.format_exception_only(raised)).strip()  # `KeyError: 'a key'`
        if kind in ("create", "close"):
            log.error("%s of %s failed", kind, self._name, exc_info=raised)
            return reason, fault
        if isinstance(raised, InvalidAction):
            return protocol.invalid("value_error", ["data"], str(raised)).reply, fault
        log.info("%s of %s raised %s", kind, self._name, reason)
        return protocol.error(reason, "EXECUTION_ERROR"), fault


def _report(done: Done, text: str, fault: str) -> None:
    with contextlib.suppress(RuntimeError, OSError):  # nobody waits any more: a closed loop, a server that is gone
        done(text, fault)


class EnvThread(Worker):
    """A worker in a thread of its own, called from an event loop. A daemon: a hung one must not keep us from exiting."""

    pid = None

    def __init__(self, make: Callable[[], Any], name: str):
        super().__init__(make, name)
        self.thread = threading.Thread(target=self.run, name=f"env-{name}", daemon=True)
        self.thread.start()

    async def call(self, kind: str, data: Any) -> tuple[str, str]:
        """(reply, fault) of one call."""
        import asyncio

        loop = asyncio.get_running_loop()
        outcome = loop.create_future()
        self.post(kind, data, partial(loop.call_soon_threadsafe, settle, outcome))
        return await outcome

    async def end(self, kill: bool) -> None:
        """Let the thread end. One that hangs cannot be killed."""
        self.stop()


def settle(future: asyncio.Future, *outcome: str) -> None:
    """Give a waiting future its (text, fault), unless it was given up."""
    if not future.done():
        future.set_result(outcome)
