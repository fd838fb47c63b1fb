"""Leased backends: the free list of external processes or resources, one for each session for its lifetime.

A backend is used by one tenant after another, so between two it is scrubbed, and where that cannot be done or cannot be
trusted it is killed and started anew, under a higher generation number. The least recently used one is leased first.

Source of the idea: the server-side pool of aws-rl-env (acquire, release); what it lacks (membership, health, scrubbing,
generations) is what this module adds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from grpolab.env import child_processes
from grpolab.env.worker import load_factory

log = logging.getLogger("grpolab.env.backends")


class Backend(Protocol):
    """One resource. `start` returns what the environment gets; a `start` after a `stop` gives a fresh one."""

    def start(self) -> Any: ...

    def healthy(self) -> bool: ...

    def scrub(self) -> bool:
        """Wipe what the last tenant left; False where only a restart does."""
        ...

    def stop(self) -> None: ...


class BackendError(RuntimeError):
    """A backend could not be started, leased or given back."""

class ProcessBackend:
    """A child process as a backend. It prints its address as its first line, and dies with us however we die.

    `command` is a list, never a shell line. `health(address)` and `scrub(address)` return truth when all is well;
    without `scrub` each tenant gets a new process. `start_timeout` in seconds bounds the wait for the address. Of our
    environment variables it inherits only those in `child_processes.INHERITED`; `env` are more. `cwd` is its folder.
    """

    def __init__(self, command: Sequence[str], *, health: Callable[[str], bool] | None = None,
                 scrub: Callable[[str], bool] | None = None, start_timeout: float = 10.0,
                 env: Mapping[str, str] | None = None, cwd: str | Path | None = None):
        if isinstance(command, str) or not command:
            raise ValueError(f"command={command!r}: pass the program and its arguments as a list")
        self.command, self.start_timeout = list(command), start_timeout
        self.address = ""
        self._env, self._cwd = dict(env or {}), cwd
        self._health, self._scrub = health, scrub
        self._process: subprocess.Popen | None = None
        self._listeners: list[threading.Thread] = []

    @property
    def pid(self) -> int | None:
        """The process id of the guard, whose child the command is; None when nothing runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> str:
        """Start the process and wait for its first line, the address; raises BackendError with what it output instead."""
        guarded = [sys.executable, "-I", "-S", child_processes.__file__, *self.command]
        self.address = ""
        output: deque[str] = deque(maxlen=20)
        process = subprocess.Popen(guarded, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
                                   env=child_processes.environment(self._env), cwd=self._cwd)
        self._process = process
        answered = threading.Event()
        self._listeners = [threading.Thread(target=self._listen, args=(process.stdout, output, answered), daemon=True),
                           threading.Thread(target=self._listen, args=(process.stderr, output, None), daemon=True)]
        for listener in self._listeners:
            listener.start()
        answered.wait(self.start_timeout)
        if not self.address:
            why = f"gave no address within {self.start_timeout:g} s" if not answered.is_set() else "ended without an address"
            self.stop()
            raise BackendError(f"{self.command[0]} {why}; it printed: " + (" | ".join(output) or "nothing"))
        return self.address

    def _listen(self, stream: TextIO, output: deque[str], answered: threading.Event | None) -> None:
        """Drain one output, so that no full pipe blocks the process; the first line of stdout is its address."""
        with stream:
            for line in stream:
                output.append(line.strip())
                if answered is not None and not answered.is_set():
                    self.address = line.strip()
                    answered.set()
        if answered is not None:
            answered.set()

    def healthy(self) -> bool:
        """Whether the process runs and, where there is a health check, passes it."""
        if self._process is None or self._process.poll() is not None:
            return False
        return self._health is None or _true(self._health, self.address)

    def scrub(self) -> bool:
        """Whether the last tenant's state could be wiped in place."""
        return self._scrub is not None and _true(self._scrub, self.address)

    def stop(self) -> None:
        """Kill the process and everything in its group; returns when it is gone."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                process.kill()  # the kernel then kills the command
                process.wait()
            for listener in self._listeners:
                listener.join(timeout=1.0)


def read_backend(text: str, *, env: Mapping[str, str] | None = None) -> Callable[[int], Backend]:
    """What makes the backends of a BackendPool, from one argument of a command line: `package.module:function`, which gets a
    backend's number, or the command of a ProcessBackend (split as a shell splits it, with nothing expanded). Raises
    ValueError for what is neither."""
    if re.fullmatch(r"[\w.]+:[\w.]+", text):
        return load_factory(text, "backend")
    try:
        command = shlex.split(text)
    except ValueError as fault:  # a quotation that does not end
        raise ValueError(f"backend {text!r}: {fault}") from None
    if not command:
        raise ValueError(f"backend {text!r}: write a command, or package.module:function")
    return lambda _: ProcessBackend(command, env=env)


def _true(check: Callable[[str], bool], address: str) -> bool:
    """The check's answer; one that raises counts as no."""
    try:
        return bool(check(address))
    except Exception as fault:
        log.info("check of backend %s failed: %r", address, fault)
        return False


def _made(make: Callable[[int], Backend], index: int) -> Backend:
    """Backend `index`; raises BackendError where it is none."""
    try:
        backend = make(index)
    except Exception as fault:
        raise BackendError(f"backend {index} could not be made: {fault!r}") from fault
    missing = [name for name in ("start", "healthy", "scrub", "stop") if not callable(getattr(backend, name, None))]
    if missing:
        raise BackendError(f"backend {index} is a {type(backend).__name__} without {', '.join(missing)}")
    return backend


@dataclass(frozen=True)
class Lease:
    """One tenant's hold on a backend. `number` is unique, `generation` counts the backend's starts."""

    number: int
    index: int
    generation: int
    resource: Any

    @property
    def name(self) -> str:
        return f"backend-{self.index}.{self.generation}"


class BackendPool:
    """`BackendPool(lambda i: ProcessBackend([...]), size=8)`: thread-safe; `with` it, or give it to `serve`.

    `acquire` raises BackendError when all are leased. `release` takes each lease once, from whom it was given to: a
    second or foreign release raises ValueError. `poisoned=True` says that the tenant may have broken the backend.
    """

    def __init__(self, make: Callable[[int], Backend], size: int):
        if size < 1:
            raise ValueError(f"size={size}: a pool holds at least one backend")
        self.size = size
        self._backends = [_made(make, i) for i in range(size)]
        self._resources: list[Any] = [None] * size
        self._generations = [0] * size
        self._free: deque[int] = deque(range(size))  # the left end was used longest ago
        self._leases: dict[int, Lease] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._running = False

    def __enter__(self) -> BackendPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start every backend, in parallel; on any failure stop them all and raise. Does nothing when started."""
        if self._running:
            return
        try:
            with ThreadPoolExecutor(self.size) as workers:
                list(workers.map(self._start, range(self.size)))
        except BaseException:
            self.close()
            raise
        self._running = True

    def _start(self, index: int) -> None:
        try:
            self._resources[index] = self._backends[index].start()
        except BackendError:
            raise
        except Exception as fault:
            raise BackendError(f"backend {index} did not start: {fault!r}") from fault
        self._generations[index] += 1

    def acquire(self) -> Lease:
        """Lease the backend that was used longest ago, restarted first if it does not answer its health check."""
        with self._lock:
            if not self._running:
                raise BackendError("the backends do not run: use `with pool`, or give the pool to serve(backends=...)")
            if not self._free:
                raise BackendError(f"all {self.size} backends are leased; release one first")
            index = self._free.popleft()
        try:
            if not self._backends[index].healthy():
                log.warning("backend %d does not answer; restarting it", index)
                self._backends[index].stop()
                self._start(index)
        except BaseException:
            with self._lock:
                self._free.append(index)  # last in line: the next acquire tries another one first
            raise
        with self._lock:
            lease = Lease(next(self._numbers), index, self._generations[index], self._resources[index])
            self._leases[lease.number] = lease
        if not self._running:  # closed meanwhile
            self.release(lease)
            raise BackendError("the backends were stopped")
        return lease

    def kill(self, lease: Lease) -> None:
        """Stop a leased backend under its tenant, so that whatever waits for it fails; then release it as poisoned."""
        with self._lock:
            if self._leases.get(lease.number) is not lease:
                raise ValueError(f"{lease.name} is not leased under number {lease.number}")
        self._backends[lease.index].stop()

    def release(self, lease: Lease, *, poisoned: bool = False) -> None:
        """Take a backend back, clean for the next tenant: scrubbed in place, or else killed and started anew.

        Where it cannot be started it stays off, last in line, until an `acquire` can.
        """
        with self._lock:
            if self._leases.get(lease.number) is not lease:
                raise ValueError(f"{lease.name} is not leased under number {lease.number}: released twice, or not ours")
            del self._leases[lease.number]
        backend = self._backends[lease.index]
        try:
            if poisoned or not backend.healthy() or not backend.scrub():
                backend.stop()
                if self._running:
                    self._start(lease.index)
        except Exception:
            log.exception("backend %d could not be restarted", lease.index)
        with self._lock:
            self._free.append(lease.index)
        if not self._running:
            backend.stop()

    def close(self) -> None:
        """Stop every backend, leased or not. Idempotent."""
        self._running = False
        for backend in self._backends:
            backend.stop()

    def status(self) -> dict:
        """Counts and generations, JSON-able."""
        with self._lock:
            return {"size": self.size, "free": len(self._free), "leased": len(self._leases),
                    "generations": list(self._generations)}
