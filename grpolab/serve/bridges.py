"""How an update reaches a sampler in another process: the weight bridges, one of which `RemoteSampler(..., bridge=...)` gets.

    SharedFile("/dev/shm/policy.safetensors")   whole weights through memory that both processes map; the server runs on
    AdapterSwap("adapters")                     a LoRA adapter as peft's two files; the server puts it in and runs on
    Restart("weights")                          a folder, whole or an adapter; the server is started again with it

The names of files and paths are those of the server's machine too: trainer and server share a disk, or at least that folder.
Whatever goes wrong is a RemoteError or a ValueError in bounded time, and the server keeps or gets back the weights it had.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from grpolab import adapters
from grpolab.env import leash
from grpolab.files import atomic_folder
from grpolab.models import Policy
from grpolab.serve.bridge import SharedWeights
from grpolab.serve.calls import Caller, RemoteError

Check = Callable[[str | None], Awaitable[None]]  # raises where the server, under this name, does not compute as the policy does


class SharedFile:
    """Whole weights through a safetensors file that trainer and server map (`bridge.SharedWeights`); on /dev/shm it is memory.
    For a server that was started with `--weights` and this file."""

    def __init__(self, path: str | Path):
        self.path, self._shared = Path(path), None

    async def publish(self, caller: Caller, policy: Policy, check: Check) -> tuple[int, str | None]:
        """Bring the weights across; returns their version, and the name that they are served under where it is a new one.
        `check` is not asked here: the file itself says that all of it arrived."""
        version = await asyncio.to_thread(lambda: self._write(policy))
        told = (await caller.ask("POST", "/weights", {})).get("policy_version")
        if told != version:
            raise RemoteError(f"{caller.url} reports weights of version {told!r} where {version} was published")
        return version, None

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def _write(self, policy: Policy) -> int:
        with policy.lock:
            if self._shared is None:
                self._shared = SharedWeights.create(self.path, policy.model)
            self._shared.write(policy.model, policy.version)
            return policy.version


class AdapterSwap:
    """A policy's LoRA adapter, saved into `folder` and put into a server that runs on: ours with `--adapters FOLDER`, or vLLM's
    with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. Each version is served under a name of its own, `name`-v3,
    so that a request gets the adapter that it names or an error."""

    def __init__(self, folder: str | Path, name: str = "policy"):
        self.folder, self.name = Path(folder).resolve(), name
        self._sent: tuple[str, int, Path] | None = None  # name, version and folder of what is served

    async def publish(self, caller: Caller, policy: Policy, check: Check) -> tuple[int, str | None]:
        """As `SharedFile.publish`, checked. ValueError for a policy without an adapter."""
        version, path = await asyncio.to_thread(lambda: self._save(policy))
        name = f"{self.name}-v{version}"
        taken = False
        try:
            await self._load(caller, name, version, path)
            taken = True
            served = {card.get("id"): card for card in (await caller.ask("GET", "/v1/models")).get("data") or []}
            if name not in served or served[name].get("policy_version", version) != version:
                raise RemoteError(f"{caller.url} took the adapter {name!r} and then serves {sorted(served)}")
            await check(name)  # vLLM 0.32 takes in adapters of other shapes without a word
        except BaseException:
            if taken and self._sent:
                with suppress(RemoteError):
                    await self._load(caller, *self._sent)
            shutil.rmtree(path, ignore_errors=True)
            raise
        for old in (n for n in served if n != name and str(n).startswith(f"{self.name}-v")):
            await caller.ask("POST", "/v1/unload_lora_adapter", {"lora_name": old}, text=True)
        self.close()
        self._sent = name, version, path
        return version, name

    async def _load(self, caller: Caller, name: str, version: int, path: Path) -> None:
        # load_inplace: under vLLM the name may be there from an earlier training. It keys what it keeps of prompts by the path.
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True, "policy_version": version}
        await caller.ask("POST", "/v1/load_lora_adapter", body, text=True)

    def close(self) -> None:
        if self._sent is not None:
            shutil.rmtree(self._sent[2], ignore_errors=True)

    def _save(self, policy: Policy) -> tuple[int, Path]:
        with policy.lock:
            if not adapters.layers(policy.model):
                raise ValueError(f"{policy.name!r} has no adapter to swap: load it with load_policy(..., adapter=LoRA()), or "
                                 "publish whole weights through SharedFile or Restart")
            path = self.folder / f"{self.name}-v{policy.version}-{os.getpid()}-{time.time_ns()}"  # never a path of before
            with atomic_folder(path) as partial:
                adapters.save(policy.model, partial)
            return policy.version, path


class Restart:
    """A server that this process starts, on the port of the sampler's address, and starts again for every version. The policy
    is saved into `folder`, an adapter alone where it has one.

    command  the program and its arguments, in which {weights} stands for the saved folder, {name} for the policy's name,
             {version}, {host} and {port}. Default: `serve-policy` of this package. vLLM's server will do as well.
    seconds  that it may take until it answers /health

    Other clients' requests in progress end with an error of the server that goes. A version that does not start is an error
    with the end of what the server wrote (`folder`/server.log), and the server is started again with the version before.
    """

    own = (sys.executable, "-m", "grpolab", "serve-policy", "{weights}", "--name", "{name}", "--policy-version", "{version}",
           "--host", "{host}", "--port", "{port}")

    def __init__(self, folder: str | Path, command: tuple[str, ...] = own, seconds: float = 300.0):
        if not command or isinstance(command, str) or not any("{weights}" in part for part in command):
            raise ValueError("command is a tuple of a program and its arguments, with {weights} among them, got "
                             f"{command!r:.200}")
        self.folder, self.command, self.seconds = Path(folder).resolve(), tuple(command), seconds
        self._process: subprocess.Popen | None = None
        self._running: dict[str, str] | None = None  # what the arguments of the server that runs stand for
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        """The process id of the leash that holds the server; the server is its child."""
        return self._process and self._process.pid

    async def publish(self, caller: Caller, policy: Policy, check: Check) -> tuple[int, str | None]:
        """As `SharedFile.publish`, checked."""
        place = urlsplit(caller.url)
        path, version = await asyncio.to_thread(lambda: self._save(policy))
        values = {"weights": str(path), "name": policy.name, "version": str(version), "host": place.hostname,
                  "port": str(place.port or 80)}
        before = self._running
        try:
            await self._start(caller, values)
            await check(None)
        except BaseException as error:
            await asyncio.to_thread(self._end)
            if before is not None:
                await self._start(caller, before)
                if isinstance(error, RemoteError):
                    raise RemoteError(f"{error}. The server runs again with version {before['version']}") from error
            raise
        finally:
            for folder in self.folder.glob("v*-*"):
                if self._running is None or str(folder) != self._running["weights"]:
                    shutil.rmtree(folder, ignore_errors=True)
        return version, None

    def close(self) -> None:
        """End the server and remove what was saved for it."""
        atexit.unregister(self.close)
        self._end()
        for folder in self.folder.glob("v*-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _save(self, policy: Policy) -> tuple[Path, int]:
        with policy.lock:
            return policy.save(self.folder / f"v{policy.version}-{time.time_ns()}"), policy.version

    async def _start(self, caller: Caller, values: dict[str, str]) -> None:
        """End the server that runs and start one; returns once it answers."""
        await asyncio.to_thread(self._end)
        with socket.socket() as probe:
            if probe.connect_ex((values["host"], int(values["port"]))) == 0:
                raise RemoteError(f"port {values['port']} of {values['host']} has another server already, and {caller.url} was "
                                  "to be started there: stop that one, or take another port")
        command = [_filled(part, values) for part in self.command]
        log = self.folder / "server.log"
        with open(log, "wb") as file:  # on a leash: the server and its children end with us, however we end
            self._process = subprocess.Popen([sys.executable, leash.__file__, *command], stdin=subprocess.PIPE, stdout=file,
                                             stderr=file, start_new_session=True)
        until = time.monotonic() + self.seconds
        while True:
            if (status := self._process.poll()) is not None:
                raise RemoteError(f"the server ended with status {status} before it answered: {_tail(log)}")
            with suppress(RemoteError, TimeoutError):
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(0.0, until - time.monotonic())):
                    await caller.ask("GET", "/health", text=True)
                self._running = values
                return
            if time.monotonic() > until:
                raise RemoteError(f"the server did not answer in {self.seconds:.0f} s: {_tail(log)}")
            await asyncio.sleep(0.1)

    def _end(self) -> None:
        process, self._process, self._running = self._process, None, None
        if process is None:
            return
        process.stdin.close()  # the leash: it kills the server's group
        process.wait()


Bridge = SharedFile | AdapterSwap | Restart


def _filled(part: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        part = part.replace(f"{{{name}}}", value)
    return part


def _tail(log: Path) -> str:
    """The end of what a server wrote."""
    lines = log.read_bytes()[-2000:].decode("utf-8", "replace").strip().splitlines()
    return " | ".join(lines[-4:]) or "it wrote nothing"
