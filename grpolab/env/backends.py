"""Leased backends: the free list of external processes or resources, one for each session for its lifetime.

A backend is used by one tenant after another, so between two it is scrubbed, and where that cannot be done or cannot be
trusted it is killed and started anew, under a higher generation number. The least recently used one is leased first.
The idea: the server-side pool of aws-rl-env.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO

from grpolab.env import child_processes

log = logging.getLogger("grpolab.env.backends")


class BackendError(RuntimeError):
    """A backend could not be started, leased or given back."""


class ProcessBackend:
    """A child process as a backend. It prints its address as its first line, and dies with us however we die.

    `command` is a list, never a shell line. `health(address)` and `scrub(address)` return truth when all is well;
    without `scrub` each tenant gets a new process. `start_timeout` in seconds bounds the wait for the address. Of our
    environment variables it inherits only those in `child_processes.INHERITED`; `env` are more.
    """

    def __init__(self, command: Sequence[str], *, health: Callable[[str], bool] | None = None,
                 scrub: Callable[[str], bool] | None = None, start_timeout: float = 10.0, env: Mapping[str, str] | None = None):
        if isinstance(command, str) or not command:
            raise ValueError(f"command={command!r}: pass the program and its arguments as a list")
        self.command, self.start_timeout = list(command), start_timeout
        self.address = ""
        self._env, self._health, self._scrub = dict(env or {}), health, scrub
        self._process: subprocess.Popen | None = None
        self._listeners: list[threading.Thread] = []

    @property
    def pid(self) -> int | None:
        """The process id of the guard, whose child the command is; None when nothing runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> str:
        """Start the process and wait for its first line, the address; raises BackendError with what it output instead."""
        self.address = ""
        output: deque[str] = deque(maxlen=20)
        answered = threading.Event()
        self._process = process = child_processes.start(self.command, self._env, stdout=subprocess.PIPE,
                                                        stderr=subprocess.PIPE, text=True, errors="replace")

        def drain(stream: TextIO, address: bool) -> None:
            """Read one output, so that no full pipe blocks the process; the first line of stdout is its address."""
            with stream:
                for line in stream:
                    output.append(line.strip())
                    if address and not answered.is_set():
                        self.address = line.strip()
                        answered.set()
            if address:
                answered.set()

        self._listeners = [threading.Thread(target=drain, args=of, daemon=True)
                           for of in ((process.stdout, True), (process.stderr, False))]
        for listener in self._listeners:
            listener.start()
        in_time = answered.wait(self.start_timeout)
        if not self.address:
            self.stop()
            why = "ended without an address" if in_time else f"gave no address within {self.start_timeout:g} s"
            raise BackendError(f"{self.command[0]} {why}; it printed: " + (" | ".join(output) or "nothing"))
        return self.address

    def healthy(self) -> bool:
        """Whether the process runs and, where there is a health check, passes it."""
        running = self._process is not None and self._process.poll() is None
        return running and (self._health is None or bool(self._health(self.address)))

    def scrub(self) -> bool:
        """Whether the last tenant's state could be wiped in place."""
        return self._scrub is not None and bool(self._scrub(self.address))

    def stop(self) -> None:
        """Kill the process and everything in its group; returns when it is gone."""
        process, self._process = self._process, None
        if process is not None:
            child_processes.stop(process)
            for listener in self._listeners:
                listener.join(timeout=1.0)


@dataclass(frozen=True, eq=False)
class Lease:
    """One tenant's hold on a backend. `generation` counts the backend's starts."""

    index: int
    generation: int
    resource: Any

    @property
    def name(self) -> str:
        return f"backend-{self.index}.{self.generation}"


class BackendPool:
    """`BackendPool(lambda i: ProcessBackend([...]), size=8)`: thread-safe; `with` it, or give it to `serve`.

    `acquire` raises BackendError when all are leased, `release` ValueError for a lease that is not this pool's (any more).
    `poisoned=True` says that the tenant may have broken the backend.
    """

    def __init__(self, make: Callable[[int], ProcessBackend], size: int):
        if size < 1:
            raise ValueError(f"size={size}: a pool holds at least one backend")
        self.size = size
        self._backends = [make(i) for i in range(size)]
        self._resources: list[Any] = [None] * size
        self._generations = [0] * size
        self._free: deque[int] = deque(range(size))  # the left end was used longest ago
        self._leases: set[Lease] = set()
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
        self._resources[index] = self._backends[index].start()
        self._generations[index] += 1

    def _prepare(self, index: int, usable: Callable[[ProcessBackend], bool]) -> None:
        """Start a backend anew where it is not usable; a check that raises says so too."""
        backend = self._backends[index]
        try:
            if usable(backend):
                return
        except Exception as fault:
            log.info("check of backend %d failed: %r", index, fault)
        backend.stop()
        if self._running:
            self._start(index)

    def acquire(self) -> Lease:
        """Lease the backend that was used longest ago, restarted first if it does not answer its health check."""
        with self._lock:
            if not self._running:
                raise BackendError("the backends do not run: use `with pool`, or give the pool to serve(backends=...)")
            if not self._free:
                raise BackendError(f"all {self.size} backends are leased; release one first")
            index = self._free.popleft()
        try:
            self._prepare(index, lambda backend: backend.healthy())
        except BaseException:
            self._free.append(index)  # last in line: the next acquire tries another one first
            raise
        lease = Lease(index, self._generations[index], self._resources[index])
        self._leases.add(lease)
        if not self._running:  # closed meanwhile
            self.release(lease)
            raise BackendError("the backends were stopped")
        return lease

    def release(self, lease: Lease, *, poisoned: bool = False) -> None:
        """Take a backend back, clean for the next tenant: scrubbed in place, or else killed and started anew. Where it cannot
        be started it stays off, last in line, until an `acquire` can."""
        with self._lock:
            if lease not in self._leases:
                raise ValueError(f"{lease.name} is not leased so: released twice, or not ours")
            self._leases.remove(lease)
        try:
            self._prepare(lease.index, lambda backend: not poisoned and backend.healthy() and backend.scrub())
        except Exception:
            log.exception("backend %d could not be restarted", lease.index)
        self._free.append(lease.index)
        if not self._running:
            self._backends[lease.index].stop()

    def close(self) -> None:
        """Stop every backend, leased or not. Idempotent."""
        self._running = False
        for backend in self._backends:
            backend.stop()

    def status(self) -> dict:
        """Counts and generations, JSON-able."""
        return {"size": self.size, "free": len(self._free), "leased": len(self._leases), "generations": list(self._generations)}
