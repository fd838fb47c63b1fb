"""Environments that misbehave, importable by name for processes of their own."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time

from grpolab.env.protocol import StepResult


class Base:
    def reset(self, **options):
        return StepResult({"options": options, "pid": os.getpid()})

    def step(self, action):
        return StepResult({"pid": os.getpid(), **action})

    def state(self):
        return {}

    def close(self):
        pass


class Inspects(Base):
    """{"do": expression}: what Python says, as text; {"spawn": true}: a child of its own; {"escape": true}: one that leads a
    session of its own and whose parent has ended; {"say": text}: on both outputs."""

    def step(self, action):
        if "do" in action:
            return StepResult({"said": str(eval(action["do"], {"os": os, "sys": sys, "time": time}))})  # noqa: S307
        if "spawn" in action:
            return StepResult({"pid": os.getpid(), "child": subprocess.Popen(["sleep", "60"]).pid})
        if "escape" in action:
            code = ("import subprocess as s; "
                    "print(s.Popen(['sleep', '60'], start_new_session=True, stdout=s.DEVNULL, stderr=s.DEVNULL).pid)")
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, start_new_session=True, check=True)
            return StepResult({"pid": os.getpid(), "child": int(done.stdout)})
        print(action["say"])
        os.write(1, action["say"].encode())
        print(action["say"], file=sys.stderr)
        return StepResult({"said": action["say"]})


class Multiprocessing(Base):
    """{"method": "spawn"}: what a pool of one process, started so, computes."""

    def step(self, action):
        with multiprocessing.get_context(action["method"]).Pool(1) as pool:
            return StepResult({"said": pool.map_async(double, [21]).get(20)})


def double(number):
    return 2 * number


class AsyncOdd(Base):
    """{"exit": 3}: sys.exit; {"block": s}: time.sleep on its loop; {"wait": s};
    {"deaf": s}: swallows cancellation for that long; {"cancelled": true}: raises CancelledError by itself."""

    deaf_in_close = 0.0

    async def reset(self, **options):
        self.ticks = 0
        self._ticker = asyncio.create_task(self._tick())
        return StepResult({"options": options})

    async def _tick(self):
        while True:
            await asyncio.sleep(0.01)
            self.ticks += 1

    async def step(self, action):
        if "exit" in action:
            sys.exit(action["exit"])
        if "block" in action:
            time.sleep(action["block"])
        if "cancelled" in action:
            raise asyncio.CancelledError
        await asyncio.sleep(action.get("wait", 0))
        await deaf(action.get("deaf", 0))
        return StepResult({"ticks": self.ticks})

    def state(self):  # a plain method beside `async` ones
        return {"ticks": self.ticks}

    async def close(self):
        await deaf(self.deaf_in_close)


class DeafInClose(AsyncOdd):
    deaf_in_close = 3600.0


class Marks(Base):
    """Its step waits to be cancelled, and `close` leaves a file at `path`."""

    def __init__(self, path):
        self.path = path

    async def step(self, action):
        await asyncio.sleep(3600)

    def close(self):
        time.sleep(0.5)
        open(self.path, "w").close()


async def deaf(seconds):
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            pass


class Returns(Base):
    """Returns what its action names, from a list of things that are no results."""

    THINGS = {
        "huge": lambda: StepResult({}, 10**400), "inf": lambda: StepResult({}, float("inf")),
        "nan": lambda: StepResult({}, float("nan")), "text reward": lambda: StepResult({}, "1.0"),
        "list reward": lambda: StepResult({}, [1.0]), "text done": lambda: StepResult({}, 0.0, "False"),
        "text observation": lambda: StepResult("seen"), "set": lambda: StepResult({"a": {1, 2}}),
        "nan inside": lambda: StepResult({"a": [float("nan")]}), "bytes": lambda: StepResult({"a": b"x"}),
        "metadata": lambda: StepResult({}, metadata=[1]), "none": lambda: None,
        "awaitable": lambda: asyncio.sleep(0), "dict": lambda: {"observation": {}},
    }

    def step(self, action):
        return self.THINGS[action["thing"]]()

    def state(self):
        return {"a": object()}


def not_an_environment():
    return object()
