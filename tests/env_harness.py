"""Shared by the environment tests: an echo environment with faults, server processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

from grpolab.env.protocol import InvalidAction, StepResult

ROOT = Path(__file__).resolve().parent.parent
SOON = 8.0  # s; what takes milliseconds, on a starved machine; what these tests make hang, hangs for longer


class EchoEnv:
    """Echoes {"text"} with its turn and its own identity; other keys of the action are faults.

    {"sleep": s}, {"raise": text}, {"hang": true}, {"die": true}, {"big": bytes}; `live` counts open environments.
    """

    live = 0
    most = 0
    close_seconds = 0.0
    lock = threading.Lock()

    def __init__(self, resource=None):
        self.resource, self.turn, self.episode_id, self.seed, self.closed = resource, 0, None, None, False
        with self.lock:
            EchoEnv.live += 1
            EchoEnv.most = max(EchoEnv.most, EchoEnv.live)

    def reset(self, seed=None, episode_id=None, task=None):
        self.turn, self.episode_id, self.seed = 0, episode_id, seed
        return self._result({"echo": "", "task": task})

    def step(self, action):
        unknown = set(action) - {"text", "sleep", "raise", "hang", "die", "big", "nan", "wrong"}
        if unknown:
            raise InvalidAction(f"unknown keys {sorted(unknown)}")
        self.turn += 1
        time.sleep(action.get("sleep", 0))
        if "raise" in action:
            raise RuntimeError(action["raise"])
        if action.get("hang"):
            threading.Event().wait()
        if action.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if action.get("wrong"):
            return {"not": "a StepResult"}
        return self._result({"echo": action.get("text", ""), "big": "x" * action.get("big", 0)},
                            float("nan") if action.get("nan") else float(self.turn))

    def _result(self, more, reward=None):
        seen = {"turn": self.turn, "env": id(self), "seed": self.seed, "resource": self.resource, **more}
        return StepResult(seen, reward)

    def state(self):
        return {"env": id(self)}

    def close(self):
        assert not self.closed, "closed twice"
        time.sleep(self.close_seconds)
        self.closed = True
        with self.lock:
            EchoEnv.live -= 1


class AsyncEchoEnv(EchoEnv):
    """The same on the event loop; `cancelled` counts steps that were cut short."""

    cancelled = 0

    async def reset(self, seed=None, episode_id=None, task=None):
        return EchoEnv.reset(self, seed, episode_id, task)

    async def step(self, action):
        try:
            await asyncio.sleep(1e6 if action.get("hang") else action.get("sleep", 0))
        except asyncio.CancelledError:
            AsyncEchoEnv.cancelled += 1
            raise
        return EchoEnv.step(self, {k: v for k, v in action.items() if k not in ("sleep", "hang")})

    async def state(self):
        return EchoEnv.state(self)

    async def close(self):
        EchoEnv.close(self)


def get(url: str, headers: dict | None = None) -> tuple[int, dict, dict]:
    """(status, headers, JSON body) of a plain HTTP GET on a server's ws:// address."""
    request = urllib.request.Request(url.replace("ws://", "http://"), headers=headers or {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as reply:
            return reply.status, dict(reply.headers), json.loads(reply.read())
    except urllib.error.HTTPError as reply:
        return reply.code, dict(reply.headers), json.loads(reply.read())


def status(url: str) -> dict:
    return get(url + "/status")[2]


def wait_for(condition, seconds: float, what: str = "the condition") -> float:
    """Poll until true; returns the seconds that it took, fails after `seconds`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"{what} did not hold within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - start


async def eventually(condition, seconds: float, what: str = "the condition") -> None:
    """`wait_for` without blocking the loop."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"{what} did not hold within {seconds} s"
        await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_process(*command: str, **options) -> tuple[subprocess.Popen, str]:
    """Start a process that prints a ws:// address on one of its first lines; returns it and the address."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
                               **options)
    said = []
    for line in process.stdout:
        said.append(line)
        found = re.search(r"ws://\S+", line)
        if found:
            threading.Thread(target=lambda: [None for _ in process.stdout], daemon=True).start()
            return process, found[0]
    raise AssertionError(f"{command} gave no address: {''.join(said)}")


@contextmanager
def server_process(environment: str = "env_harness:EchoEnv", *options: str):
    """A server in a process of its own; yields (process, url) and kills it at the end."""
    process, url = start_process(sys.executable, "-m", "grpolab", "serve", environment, "--port", "0", *options)
    try:
        yield process, url
    finally:
        process.kill()
        process.wait()
        with suppress(ValueError):
            process.stdout.close()
