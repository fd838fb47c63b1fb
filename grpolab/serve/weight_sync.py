"""How an update reaches a sampler in another process: the weight bridges, one of which `RemoteSampler(..., bridge=...)` gets.

    SharedFile("/dev/shm/policy.safetensors")   whole weights through memory that both processes map; the server runs on
    AdapterSwap("adapters")                     a LoRA adapter as peft's two files; the server puts it in and runs on
    Restart("weights")                          a folder, whole or an adapter; the server is started again with it

The names of files and paths are those of the server's machine too: trainer and server share a disk, or at least that folder.
Whatever goes wrong is a RemoteError or a ValueError in bounded time, and the server keeps or gets back the weights it had.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors import SafetensorError

from grpolab.env import child_processes
from grpolab.files import atomic_folder
from grpolab.models.load import Policy, lora
from grpolab.serve.http_client import Caller, RemoteError
from grpolab.serve.shared_weights import SharedWeights, mark_of

Check = Callable[[str | None], Awaitable[None]]  # raises where the server, under this name, does not compute as the policy does


class SharedFile:
    """Whole weights through a safetensors file that trainer and server map (`SharedWeights`); on /dev/shm it is memory. For a
    server that was started with `--weights` and this file."""

    def __init__(self, path: str | Path):
        self.path, self._shared, self._checked = Path(path), None, False
        self._lock = threading.Lock()  # a cancelled publish goes on writing for a while

    async def publish(self, caller: Caller, policy: Policy, check: Check) -> tuple[int, str]:
        """Bring the weights across: their version, and the mark by which a server of ours tells them from others of that
        version. That all of them arrived the file says itself, by their checksum; `check` is asked once, since a model of the
        same shapes may compute something else with them."""
        version, checksum = await _on_disk(self._write, policy)
        loaded = (await caller.ask("POST", "/weights", {"checksum": checksum})).get("policy_version")
        if loaded != version:
            raise RemoteError(f"{caller.url} reports weights of version {loaded!r} where {version} was published")
        if not self._checked:
            await check(None)
            self._checked = True
        return version, mark_of(checksum)

    def close(self) -> None:
        """Remove the file, unless another trainer's has taken its place."""
        with self._lock:
            shared, self._shared = self._shared, None
            if shared is not None and shared.replaced is False:
                self.path.unlink()

    def _write(self, policy: Policy) -> tuple[int, int]:
        """The version and checksum of what was written. A file that is gone is made again."""
        with self._lock, policy.lock:
            replaced = None if self._shared is None else self._shared.replaced
            if replaced:
                raise ValueError(f"{self.path} is another trainer's file now: give each trainer a file and a server of its own")
            if replaced is None:
                self._shared = SharedWeights.create(self.path, policy.model)
            return policy.version, self._shared.write(policy.model, policy.version)


class AdapterSwap:
    """A policy's LoRA adapter, saved into `folder` and put into a server that runs on: ours with `--adapters FOLDER`, or vLLM's
    with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. Each version is served under a name of its own, `name`-v3,
    so that a request gets the adapter that it names or an error."""

    def __init__(self, folder: str | Path, name: str = "policy"):
        self.folder, self.name = Path(folder).resolve(), name
        self._served: tuple[str, int, Path] | None = None  # name, version and folder

    async def publish(self, caller: Caller, policy: Policy, check: Check) -> tuple[int, str]:
        """As `SharedFile.publish`, checked each time. ValueError for a policy without an adapter."""
        version, path = await _on_disk(self._save, policy)
        name = f"{self.name}-v{version}"
        try:
            await self._load(caller, name, version, path)
            cards = {card.get("id"): card for card in (await caller.ask("GET", "/v1/models")).get("data") or []}
            root = cards[name].get("root", path) if name in cards else None  # a server that names no root is believed
            if Path(str(root)).name != path.name:
                raise RemoteError(f"{caller.url} took the adapter {name!r} and then serves {sorted(cards)}, of which that is "
                                  f"{root!r} and not {str(path)!r}: does another trainer put adapters in?")
            await check(name)  # vLLM 0.32 takes in adapters of other shapes without a word
        except BaseException:
            if self._served:  # also where no answer came: it may have been taken in
                with suppress(RemoteError):
                    await self._load(caller, *self._served)
            shutil.rmtree(path, ignore_errors=True)
            raise
        for old in (n for n in cards if n != name and str(n).startswith(f"{self.name}-v")):
            await caller.ask("POST", "/v1/unload_lora_adapter", {"lora_name": old}, text=True)
        self.close()
        self._served = name, version, path
        return version, path.name

    async def _load(self, caller: Caller, name: str, version: int, path: Path) -> None:
        # load_inplace: under vLLM the name may be there from an earlier training. It keys what it keeps of prompts by the path.
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True, "policy_version": version}
        await caller.ask("POST", "/v1/load_lora_adapter", body, text=True)

    def close(self) -> None:
        if self._served is not None:
            shutil.rmtree(self._served[2], ignore_errors=True)

    def _save(self, policy: Policy) -> tuple[int, Path]:
        with policy.lock:
            if not lora.layers(policy.model):
                raise ValueError(f"{policy.name!r} has no adapter to swap: load it with load_policy(..., adapter=LoRA()), or "
                                 "publish whole weights through SharedFile or Restart")
            path = self.folder / f"{self.name}-{_new_name(policy)}"
            with atomic_folder(path) as partial:
                lora.save(policy.model, partial)
            return policy.version, path


class Restart:
    """A server that this process starts, on the port of the sampler's address, and starts again for every version. The policy
    is saved into `folder`, an adapter alone where it has one.

    command  the program and its arguments, in which {weights} stands for the saved folder, {name} for the policy's name,
             {version}, {host} and {port}. Default: `serve-policy` of this package. vLLM's server will do as well.
    seconds  that it may take until it answers /health

    Other clients' requests in progress end with an error of the server that goes. A version that does not start is an error
    with the end of what the server wrote (`folder`/server.log), and the server is started again with the version before. A
    publish that is cancelled leaves no server; the next one starts it.
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
        self._saved: list[Path] = []

    @property
    def pid(self) -> int | None:
        """The process id of the guard that ends the server with us; the server is its child."""
        return self._process and self._process.pid

    async def publish(self, caller: Caller, policy: Policy, check: Check) -> tuple[int, str]:
        """As `SharedFile.publish`, checked each time."""
        place = urlsplit(caller.url)
        path, version = await _on_disk(self._save, policy)
        values = {"weights": str(path), "name": policy.name, "version": str(version), "host": place.hostname,
                  "port": str(place.port or 80)}
        before = self._running
        try:
            await self._start(caller, values)
            await check(None)
        except RemoteError as error:
            if before is None:
                await asyncio.to_thread(self._end)
                raise
            try:
                await self._start(caller, before)
            except RemoteError as again:
                await asyncio.to_thread(self._end)
                raise RemoteError(f"{error}. And version {before['version']} does not start either: {again}") from error
            raise RemoteError(f"{error}. The server runs again with version {before['version']}") from error
        except BaseException:
            await asyncio.to_thread(self._end)
            raise
        finally:
            self._remove(but=self._running and self._running["weights"])
        return version, ""

    def close(self) -> None:
        """End the server and remove what was saved for it."""
        self._end()
        self._remove()

    def _remove(self, but: str | None = None) -> None:
        """What this object saved, and nothing else that lies in the folder."""
        for folder in [f for f in self._saved if str(f) != but]:
            shutil.rmtree(folder, ignore_errors=True)
            self._saved.remove(folder)

    def _save(self, policy: Policy) -> tuple[Path, int]:
        with policy.lock:
            path = self.folder / _new_name(policy)
            self._saved.append(path)
            return policy.save(path), policy.version

    async def _start(self, caller: Caller, values: dict[str, str]) -> None:
        """End the server that runs and start one; returns once it answers."""
        await asyncio.to_thread(self._end)
        if await asyncio.to_thread(_listens, values["host"], int(values["port"])):
            raise RemoteError(f"port {values['port']} of {values['host']} has another server already, and {caller.url} was "
                              "to be started there: stop that one, or take another port")
        command = list(self.command)
        for name, value in values.items():
            command = [part.replace(f"{{{name}}}", value) for part in command]
        log = self.folder / "server.log"
        with open(log, "wb") as file:  # guarded: the server and its children end with us, however we end
            self._process = subprocess.Popen([sys.executable, child_processes.__file__, *command],
                                             stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True)
        try:
            async with asyncio.timeout(self.seconds):
                while (status := self._process.poll()) is None:
                    with suppress(RemoteError):
                        await caller.ask("GET", "/health", text=True)
                        self._running = values
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise RemoteError(f"the server did not answer in {self.seconds:.0f} s: {_tail(log)}") from None
        raise RemoteError(f"the server ended with status {status} before it answered: {_tail(log)}")

    def _end(self) -> None:
        process, self._process, self._running = self._process, None, None
        if process is not None:
            process.stdin.close()  # the guard then kills the server's group
            process.wait()


Bridge = SharedFile | AdapterSwap | Restart


async def _on_disk(write: Callable[[Policy], Any], policy: Policy):
    """The result of what writes weights, in a thread; RemoteError where the disk does not take them."""
    try:
        return await asyncio.to_thread(write, policy)
    except (OSError, SafetensorError) as error:
        raise RemoteError(f"the weights could not be written: {error}") from error


def _new_name(policy: Policy) -> str:
    """A folder's name that was never given before: vLLM keys what it keeps of prompts by the path."""
    return f"v{policy.version}-{os.getpid()}-{time.time_ns()}"


def _listens(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), timeout=5).close()
        return True
    return False


def _tail(log: Path) -> str:
    """The end of what a server wrote."""
    lines = log.read_bytes()[-2000:].decode("utf-8", "replace").strip().splitlines()
    return " | ".join(lines[-4:]) or "it wrote nothing"
