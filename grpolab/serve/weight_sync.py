"""How an update reaches a sampler in another process: the bridges of `RemoteSampler(..., bridge=...)`.

`publish` of each returns (policy version, mark, model): the mark by which a server of ours tells these weights from others of
that version, and the name that requests must give (None: the server's own). It raises RemoteError or ValueError in bounded
time where they do not arrive. `close` removes what was published and ends what was started.
Files are named alike on both machines: trainer and server share a disk, or at least that folder.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file

from grpolab.env import child_processes
from grpolab.files import atomic_folder
from grpolab.models.load import Policy, lora
from grpolab.serve.http_client import Caller, RemoteError

STATE = "grpolab.state"  # int64: policy version, mark
MAPPED_HEADER = 4096  # bytes before the weights in the file of serve/mapped.py, of which the first 32 are its state
Published = tuple[int, str, str | None]


def write_weights(path: Path, model: torch.nn.Module, version: int) -> str:
    """Put the model's parameters, tied ones once, in the place of the file at `path`; returns their mark."""
    mark = secrets.randbits(32)
    partial = path.with_name(f".{path.name}.{mark}.partial")
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    try:
        save_file(tensors | {STATE: torch.tensor([version, mark])}, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return f"{mark:08x}"


@torch.no_grad()
def read_weights(path: Path, model: torch.nn.Module, expected: str | None = None,
                 before: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Put the file's parameters into the model, once they are known to fit and after a call of `before`; returns their version
    and mark. ValueError, and the model is as it was, for weights of another model or with another mark than `expected`."""
    try:
        tensors = load(path.read_bytes())  # a reader by name could find the next file half-way
        version, number = tensors.pop(STATE).tolist()
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} holds no published weights ({type(error).__name__}: {error})") from error
    mark = f"{number:08x}"
    if expected not in (None, mark):
        raise ValueError(f"{path} holds other weights (of version {version}) than those that were published: is there another "
                         "trainer? Give each a file and a server of its own")
    parameters = dict(model.named_parameters())
    wrong = sorted(name for name in tensors.keys() | parameters.keys()
                   if _form(tensors.get(name)) != _form(parameters.get(name)))
    if wrong:
        raise ValueError(f"{path} holds another model: {len(wrong)} tensors differ, the first {wrong[0]!r}: "
                         f"{_form(tensors.get(wrong[0]))} there, {_form(parameters.get(wrong[0]))} in the model")
    before()
    for name, p in parameters.items():
        p.copy_(tensors[name])
    return version, mark


def _state(path: Path) -> tuple[int, str]:
    """Version and mark of the weights in a file, which is not read for it."""
    with safe_open(path, "pt") as file:
        version, number = file.get_tensor(STATE).tolist()
    return version, f"{number:08x}"


def _is_mapped(head: bytes) -> bool:
    """Whether a file that begins so is one of serve/mapped.py: its state, and nothing more before the weights."""
    if len(head) < MAPPED_HEADER or any(head[32:]):
        return False
    _, under_way, mark, form = struct.unpack("<4q", head[:32])
    return under_way in (0, 1) and 0 <= mark < 2**32 and 0 < form < 2**56


def refuse_others(path: Path) -> None:
    """ValueError where a file is there that holds no published weights, nor mapped ones, whose header is hardly used."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        head = file.read(MAPPED_HEADER)
        with suppress(SafetensorError):
            if not head or _is_mapped(head) or _state(path):
                return
        raise ValueError(f"{path} holds something else, which publishing would write over: name another file, or remove it")


def _form(tensor: torch.Tensor | None) -> Any:
    return "missing" if tensor is None else (tuple(tensor.shape), tensor.dtype)


class SharedFile:
    """Whole weights through a safetensors file (on /dev/shm it is memory), for a server of ours that was started with
    `--weights` and this file."""

    def __init__(self, path: str | Path):
        self.path, self._mark = Path(path), ""
        self._lock = threading.Lock()  # a cancelled publish goes on writing for a while

    async def publish(self, caller: Caller, policy: Policy) -> Published:
        version, mark = await on_disk(self._write, policy)
        await caller.ask("POST", "/weights", {"mark": mark})
        return version, mark, None

    def close(self) -> None:
        with self._lock, suppress(FileNotFoundError, SafetensorError):
            if self._mark and _state(self.path)[1] == self._mark:  # not another trainer's
                self.path.unlink()

    def _write(self, policy: Policy) -> tuple[int, str]:
        with self._lock, policy.lock:
            if not self._mark:
                refuse_others(self.path)
            self._mark = write_weights(self.path, policy.model, policy.version)
            return policy.version, self._mark


class _Folder:
    """A folder into which versions of a policy are saved, each in one of its own with a name that is never used twice (vLLM
    keys what it keeps of prompts by the path)."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        self._saved: list[Path] = []

    def _save(self, policy: Policy) -> tuple[int, Path]:
        with policy.lock:
            path = self.folder / f"v{policy.version}-{os.getpid()}-{time.time_ns()}"
            self._saved.append(path)
            self._write(policy, path)
            return policy.version, path

    def _remove(self, but: Path | None = None) -> None:
        for folder in [f for f in self._saved if f != but]:
            shutil.rmtree(folder, ignore_errors=True)
            self._saved.remove(folder)


class AdapterSwap(_Folder):
    """A policy's LoRA adapter, saved into `folder` and put into a server that runs on: ours with `--adapters FOLDER`, or vLLM's
    with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. Each version is served under a name of its own, `name`-v3,
    so that a request gets the adapter that it names or an error. ValueError for a policy without an adapter."""

    def __init__(self, folder: str | Path, name: str = "policy"):
        super().__init__(folder)
        self.name = name

    async def publish(self, caller: Caller, policy: Policy) -> Published:
        if not lora.layers(policy.model):
            raise ValueError(f"{policy.name!r} has no adapter to swap: load it with load_policy(..., adapter=LoRA()), or "
                             "publish whole weights through SharedFile or Restart")
        version, path = await on_disk(self._save, policy)
        name = f"{self.name}-v{version}"
        # load_inplace: under vLLM the name may be there from an earlier training.
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True, "policy_version": version}
        await caller.ask("POST", "/v1/load_lora_adapter", body)
        cards = (await caller.ask("GET", "/v1/models")).get("data") or []
        names = [str(card.get("id")) for card in cards if card.get("parent", True)]  # that of the model itself is None
        own = re.compile(re.escape(self.name) + r"-v\d+")
        for old in (n for n in names if n != name and own.fullmatch(n)):  # vLLM keeps them, ours does not
            await caller.ask("POST", "/v1/unload_lora_adapter", {"lora_name": old})
        self._remove(but=path)
        return version, path.name, name

    def close(self) -> None:
        self._remove()

    def _write(self, policy: Policy, path: Path) -> None:
        with atomic_folder(path) as partial:
            lora.save(policy.model, partial)


class Restart(_Folder):
    """A server that this process starts, on the port of the sampler's address, and starts again for every version. The policy
    is saved into `folder`, an adapter alone where it has one.

    command  the program and its arguments, in which {weights} stands for the saved folder, {name} for the policy's name,
             {version}, {host} and {port}. Default: `serve-policy` of this package. vLLM's server will do as well.
    seconds  that it may take until it answers /health

    Other clients' requests in progress end with an error of the server that goes. Where a version does not start the error
    holds the end of what the server wrote (`folder`/server.log), and no server is left; the next publish starts one.
    """

    own = (sys.executable, "-m", "grpolab", "serve-policy", "{weights}", "--name", "{name}", "--policy-version", "{version}",
           "--host", "{host}", "--port", "{port}")

    def __init__(self, folder: str | Path, command: tuple[str, ...] = own, seconds: float = 300.0):
        if not command or isinstance(command, str) or not any("{weights}" in part for part in command):
            raise ValueError("command is a tuple of a program and its arguments, with {weights} among them, got "
                             f"{command!r:.200}")
        super().__init__(folder)
        self.command, self.seconds = tuple(command), seconds
        self.process: subprocess.Popen | None = None  # the guard that ends the server with us; the server is its child

    async def publish(self, caller: Caller, policy: Policy) -> Published:
        version, path = await on_disk(self._save, policy)
        place = urlsplit(caller.url)
        host, port = place.hostname, place.port or 80
        values = {"weights": path, "name": policy.name, "version": version, "host": host, "port": port}
        command = list(self.command)
        for name, value in values.items():
            command = [part.replace(f"{{{name}}}", str(value)) for part in command]
        try:
            await asyncio.to_thread(self._end)
            await self._start(caller, command, host, port)
        except BaseException:
            await asyncio.to_thread(self.close)
            raise
        self._remove(but=path)
        return version, "", None

    def close(self) -> None:
        self._end()
        self._remove()

    def _write(self, policy: Policy, path: Path) -> None:
        policy.save(path)

    async def _start(self, caller: Caller, command: list[str], host: str, port: int) -> None:
        """Start a server; returns once it answers."""
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            raise RemoteError(f"no server can be started at {caller.url}: {error}. Stop the one that is there, or take another "
                              "port") from error
        log = self.folder / "server.log"
        with open(log, "wb") as file:  # guarded: the server and its children end with us, however we end
            self.process = child_processes.start(command, os.environ, stdout=file, stderr=file)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
                while (status := self.process.poll()) is None:
                    with suppress(RemoteError):
                        await caller.ask("GET", "/health")
                        return
                    await asyncio.sleep(0.1)
        lines = log.read_bytes()[-2000:].decode("utf-8", "replace").strip().splitlines()
        what = f"did not answer in {self.seconds:.0f} s" if status is None else f"ended with status {status} before it answered"
        raise RemoteError(f"the server {what}: {' | '.join(lines[-4:]) or 'it wrote nothing'}")

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            child_processes.stop(process)


async def on_disk(write: Callable[[Policy], Any], policy: Policy):
    """The result of what writes weights, in a thread; RemoteError where the disk does not take them."""
    try:
        return await asyncio.to_thread(write, policy)
    except (OSError, SafetensorError) as error:
        raise RemoteError(f"the weights could not be written: {error}") from error
