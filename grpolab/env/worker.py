"""One environment and the thread that makes it and calls it: a session's own in the server, or a child process's main one.

Calls are posted, run in the order they came in, and end in a reply text whatever the environment does. An environment with
an `async` method gets an event loop of its own in that thread, on which also its background tasks live: what it blocks,
cancels or raises (SystemExit too) stays there.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from grpolab.env import protocol
from grpolab.env.protocol import InvalidAction, StepResult

if TYPE_CHECKING:
    import asyncio  # below where it is needed: it takes longer to import than all the rest of a plain environment's process

log = logging.getLogger("grpolab.env.worker")

SHIPPED = {"calculator": "grpolab.env.calculator:CalculatorEnv", "guess": "grpolab.env.guess:GuessEnv",
           "aws": "grpolab.env.aws.environment:AwsEnv"}
METHODS = ("reset", "step", "state", "close")
LEFTOVERS = 1.0  # s; what the background tasks of an `async` environment get to end when it has closed

Done = Callable[[str, str], Any]  # (text, fault): the reply, and the name of what was raised, '' if nothing was


def load_factory(name: str, what: str = "environment") -> Callable[..., Any]:
    """`calculator`, `guess`, `aws`, or `package.module:Class` of an environment of your own; raises ValueError if it is none or
    cannot be imported. `what` is what the error calls it."""
    module, _, attribute = SHIPPED.get(name, name).partition(":")
    if not module or not attribute:
        raise ValueError(f"no {what} {name!r}: there are {', '.join(SHIPPED)}, or write package.module:Class")
    try:
        factory: Any = importlib.import_module(module)
    except ModuleNotFoundError as fault:
        raise ValueError(f"{what} {name!r}: {fault}; is its folder the current one, or on PYTHONPATH?") from fault
    except (Exception, SystemExit) as fault:  # whatever a module does when it is imported
        raise ValueError(f"{what} {name!r} cannot be imported: {fault!r}") from fault
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise ValueError(f"{what} {name!r}: {module} has no {attribute!r}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise ValueError(f"{what} {name!r} is a {type(factory).__name__}: name a class or a function that makes one")
    return factory


class Worker:
    """`post` calls, `cancel` what an `async` environment is doing, `stop`; `run` is the thread's whole life.

    Kinds of calls: `create` (the factory, first), `reset` (data: its options), `step` (the action), `state` (the fields that
    the environment's own are added to), `close`. `latency` in seconds is added to every reset and step.
    """

    def __init__(self, make: Callable[[], Any], name: str, latency: float = 0.0):
        self._make, self._name, self._latency = make, name, latency
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._env: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of an `async` environment, while it runs
        self._wake: asyncio.Event | None = None
        self._call: tuple[str, asyncio.Task] | None = None
        self._pending: Done | None = None

    def post(self, kind: str, data: Any, done: Done) -> None:
        """Call later, from any thread; `done(text, fault)` is called in the worker's thread."""
        self._put((kind, data, done))

    def stop(self) -> None:
        """Let `run` return after the calls that were posted."""
        self._put(None)

    def _put(self, job: tuple[str, Any, Done] | None) -> None:
        self._jobs.put(job)
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: then the queue is read without it
                loop.call_soon_threadsafe(self._wake.set)

    def cancel(self) -> None:
        """Cancel the call that an `async` environment is busy with, unless it closes; a plain one cannot be ended."""
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._call is not None and self._call[0] != "close":
            self._call[1].cancel()

    def run(self) -> None:
        """Serve until `stop`. Raises nothing, whatever the environment raises."""
        while (job := self._jobs.get()) is not None:
            kind, data, done = job
            text, fault = self._answer(kind, data)
            if kind == "create" and self._is_async():
                if self._run_loop(done):
                    return
            else:
                _call_back(done, text, fault)

    def _is_async(self) -> bool:
        return any(inspect.iscoroutinefunction(getattr(self._env, method, None)) for method in METHODS)

    def _answer(self, kind: str, data: Any) -> tuple[str, str]:
        """A plain environment's call: (text, fault)."""
        try:
            if self._latency and kind in ("reset", "step"):
                time.sleep(self._latency)
            value = self._begin(kind, data)
            if inspect.isawaitable(value):
                with contextlib.suppress(AttributeError):
                    value.close()
                raise TypeError(f"{kind} of {self._name} returned an awaitable and is no `async def`; write it as one")
            return self._finish(kind, data, value), ""
        except BaseException as raised:  # noqa: BLE001  the thread must outlive whatever an environment raises
            return self._refusal(kind, raised)

    async def _answer_async(self, kind: str, data: Any) -> tuple[str, str]:
        """The same on the loop of an environment that has one."""
        import asyncio

        try:
            if self._latency and kind in ("reset", "step"):
                await asyncio.sleep(self._latency)
            value = self._begin(kind, data)
            return self._finish(kind, data, await value if inspect.isawaitable(value) else value), ""
        except BaseException as raised:  # noqa: BLE001  SystemExit would end the loop
            return self._refusal(kind, raised)

    def _begin(self, kind: str, data: Any) -> Any:
        env = self._env
        if kind == "create":
            env = self._make()
            missing = [m for m in METHODS if not callable(getattr(env, m, None))]
            if missing:
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

    def _finish(self, kind: str, data: Any, value: Any) -> str:
        if kind in ("create", "close"):
            return ""
        if kind == "state":
            if not isinstance(value, dict):
                raise TypeError(f"{self._name} returned a {type(value).__name__} as its state; it is a dict")
            return _encoded(self._name, "state", protocol.state, {**data, **value})
        return observation(self._name, kind, value)

    def _refusal(self, kind: str, raised: BaseException) -> tuple[str, str]:
        """The reply to a request that the environment did not fulfil; the session goes on."""
        fault = type(raised).__name__[:100]
        try:
            reason = str(raised) or repr(raised)
        except Exception as second:  # a reply is owed all the same
            reason = f"{fault}, whose text could not be made: {type(second).__name__}"
        if not isinstance(raised, Exception):
            reason = f"{self._name} raised {fault}: {reason}"
        elif not isinstance(raised, InvalidAction) and fault not in reason:
            reason = f"{fault}: {reason}"  # the text of a KeyError is but a key
        if kind in ("create", "close"):
            log.error("%s of %s failed", kind, self._name, exc_info=raised)
            return reason, fault
        if isinstance(raised, InvalidAction):
            return protocol.error("Invalid message", "VALIDATION_ERROR",
                                  errors=[{"type": "value_error", "loc": ["data"], "msg": reason}]), fault
        log.info("%s of %s raised %s: %s", kind, self._name, fault, reason)
        return protocol.error(reason, "EXECUTION_ERROR"), fault

    def _run_loop(self, created: Done) -> bool:
        """Serve an `async` environment on a loop of its own; False if something on it, SystemExit say, has ended the loop."""
        import asyncio

        loop = asyncio.new_event_loop()
        self._pending, stopped = created, False
        try:
            loop.run_until_complete(self._live())
            stopped = True
        except BaseException as raised:  # noqa: BLE001
            log.error("%s ended its event loop", self._name, exc_info=raised)
            self._env, self._call = None, None
            if self._pending is not None:
                _call_back(self._pending, *self._refusal("step", raised))
        finally:
            self._loop = None
            with contextlib.suppress(BaseException):  # one that ends the loop again
                if tasks := asyncio.all_tasks(loop):
                    for task in tasks:
                        task.cancel()
                    loop.run_until_complete(asyncio.wait(tasks, timeout=LEFTOVERS))
                loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        return stopped

    async def _live(self) -> None:
        import asyncio

        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._report("", "")
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                await self._wake.wait()
                self._wake.clear()
                continue
            if job is None:
                return
            kind, data, self._pending = job
            self._call = kind, asyncio.ensure_future(self._answer_async(kind, data))
            await asyncio.wait([self._call[1]])
            call, self._call = self._call[1], None
            self._report(*(("", "CancelledError") if call.cancelled() else call.result()))

    def _report(self, text: str, fault: str) -> None:
        done, self._pending = self._pending, None
        _call_back(done, text, fault)


def start_thread(worker: Worker, name: str, at_end: Callable[[], Any]) -> threading.Thread:
    """A thread for the worker; `at_end` is called in it when it ends. A daemon: a hung one must not keep us from exiting."""
    def life() -> None:
        worker.run()
        with contextlib.suppress(RuntimeError):  # the loop that waited for it is closed
            at_end()

    thread = threading.Thread(target=life, name=name, daemon=True)
    thread.start()
    return thread


def _call_back(done: Done, text: str, fault: str) -> None:
    with contextlib.suppress(RuntimeError, OSError):  # nobody waits any more: a closed loop, a server that is gone
        done(text, fault)


def settle(future: asyncio.Future, text: str, fault: str) -> None:
    """Give a waiting future its (text, fault), unless it was given up."""
    if not future.done():
        future.set_result((text, fault))


def observation(name: str, kind: str, result: Any) -> str:
    """The reply to a reset or a step. What `name` returned and cannot be sent as it is raises TypeError or ValueError."""
    if not isinstance(result, StepResult):
        raise TypeError(f"{name} returned a {type(result).__name__}; reset and step return a StepResult")
    if not isinstance(result.observation, dict):
        raise TypeError(f"{name} returned a {type(result.observation).__name__} as the observation of a {kind}; it is a dict")
    if not isinstance(result.metadata, dict):
        raise TypeError(f"{name} returned a {type(result.metadata).__name__} as the metadata of a {kind}; it is a dict")
    if type(result.done).__name__ not in ("bool", "bool_"):  # numpy's among them; the text "False" would count as true
        raise TypeError(f"{name} returned done={result.done!r:.50} from a {kind}; it is True or False")
    sent = StepResult(result.observation, _reward(name, kind, result.reward), bool(result.done), result.metadata)
    return _encoded(name, kind, protocol.observation, sent)


def _reward(name: str, kind: str, reward: Any) -> float | None:
    """The reward as a finite float, or None for none."""
    if reward is None:
        return None
    if not isinstance(reward, Real):
        raise TypeError(f"{name} returned the reward {reward!r:.50} ({type(reward).__name__}) from a {kind}; "
                        "it is a number, or None for none")
    try:
        number = float(reward)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} returned the reward {'NaN' if number != number else 'of infinite size'} from a {kind} "
                         "(nan and inf are no rewards); return a finite number, or None for none")
    return number


def _encoded(name: str, kind: str, frame: Callable[[Any], str], content: Any) -> str:
    try:
        text = frame(content)
    except (TypeError, ValueError, RecursionError) as fault:
        raise ValueError(f"{name} returned from a {kind} what JSON cannot hold: {fault}; "
                         "use dicts, lists, text, finite numbers, True, False and None") from fault
    if len(text) > protocol.MAX_REPLY_BYTES:
        raise ValueError(f"{name} returned {len(text)} bytes from a {kind}; clients take {protocol.MAX_REPLY_BYTES}")
    return text
