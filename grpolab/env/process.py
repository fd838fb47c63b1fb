"""Environments in processes of their own: what `serve(..., isolate="process")` starts for each session.

Such an environment can be killed, takes its memory with it, sees none of our environment variables but those in
`child_processes.INHERITED`, and none of our descriptors but its socket to us, over which JSON passes. It is a guard against
faults and leaks, not against an attacker: it runs as the same user. What it has started ends with it (`child_processes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpolab.env import child_processes, protocol
from grpolab.env.worker import SHIPPED, load_factory

GRACE = 1.0  # s; what a process gets to exit by itself once its environment has closed


@dataclass(frozen=True)
class Isolation:
    """How a session's process runs: `env` are variables beside those of `child_processes.INHERITED`, `cwd` its folder,
    `memory_mib` the most private memory that it may allocate (None: no limit). That counts neither shared mappings (/dev/shm)
    nor files, and each process that the environment starts has as much again.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | Path | None = None
    memory_mib: int | None = None

    def __post_init__(self):
        if self.memory_mib is not None and self.memory_mib < 64:
            raise ValueError(f"memory_mib={self.memory_mib}: a Python process needs at least 64")
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise ValueError(f"cwd={str(self.cwd)!r} is no folder")


def importable(factory: Callable[..., Any] | str) -> str:
    """The name under which another process finds a factory; raises ValueError if there is none."""
    if isinstance(factory, str) and not factory.startswith("__main__:"):
        name = SHIPPED.get(factory, factory)
        if ":" not in name or find_spec(name.partition(":")[0].partition(".")[0]) is None:
            load_factory(factory)  # says what is wrong with it
        return name
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    name = factory if isinstance(factory, str) else f"{module}:{name}"
    if name.startswith("__main__:") or "<" in name or pkgutil.resolve_name(name) is not factory:
        raise ValueError(f"isolate='process' imports the environment anew, and {factory!r} is no class or function of an "
                         "importable module (a notebook's is none): put it into a file, or use isolate='thread'")
    return name


class Child:
    """One environment in its own process, called as an `EnvThread`: `await Child.start(...)`.

    Where the process has ended every call is answered with SESSION_ERROR.
    """

    def __init__(self, process: subprocess.Popen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str):
        self.pid = process.pid
        self._process, self._reader, self._writer, self._name = process, reader, writer, name
        self._owed = 0  # replies: more than one where a call was given up

    @classmethod
    async def start(cls, factory: str, isolation: Isolation, name: str, arguments: Mapping[str, Any]) -> Child:
        """Start a process for `factory(**arguments)`; raises TypeError where these are no JSON, OSError if it cannot."""
        description = protocol.dumps({
            "factory": factory, "arguments": dict(arguments), "name": name,
            "path": [os.path.abspath(folder) for folder in sys.path],
            "memory": isolation.memory_mib and isolation.memory_mib * 2**20})
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, str(Path(__file__).with_name("process_main.py")), str(theirs.fileno())]
            process = child_processes.start(command, isolation.env, pass_fds=[theirs.fileno()], stdout=2, cwd=isolation.cwd)
            # A reply of the largest size that clients take is a line of less than four times that.
            reader, writer = await asyncio.open_connection(sock=ours.dup(), limit=4 * protocol.MAX_REPLY_BYTES)
        child = cls(process, reader, writer, name)
        child._write(description)
        return child

    async def call(self, kind: str, data: Any = None) -> tuple[str, str]:
        """(reply, fault) of one call (`worker.Worker`); fault is "ProcessEnded" where there is nobody to make it."""
        self._owed += 1
        self._write(json.dumps([kind, data]))
        with contextlib.suppress(OSError, ValueError):  # it died, or something else wrote there
            while line := await self._reader.readline():
                self._owed -= 1
                if not self._owed:
                    return json.loads(line)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has hung up, so its status is there or about to be
            await asyncio.to_thread(self._process.wait, 1.0)
        code = self._process.poll()
        how = "was ended" if code is None else f"ended with status {code}" + (" (killed)" if code == 137 else "")
        return protocol.error(f"the process of {self._name} {how}; the session is over", "SESSION_ERROR"), "ProcessEnded"

    def cancel(self) -> None:
        self._write('["cancel",null]')

    def _write(self, line: str) -> None:
        if not self._writer.is_closing():
            self._writer.write(line.encode() + b"\n")

    async def end(self, kill: bool) -> None:
        """End the process and all of its group: at once under `kill`, else after GRACE. Complete when it returns."""
        if not kill:
            self._write('["stop",null]')
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(self._reader.read(), GRACE)
        self._writer.close()
        await asyncio.to_thread(child_processes.stop, self._process)
