"""Latency and faults around any environment, for tests and for the notebook that measures waiting."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Mapping

from grpolab.env.protocol import Environment, StepResult, declared

KINDS = ("raise", "hang", "die", "big", "nan", "wrong")


class Faulty:
    """An environment that answers `latency` s late, and at the steps in `faults` (step number from 1 -> kind) fails.

    Kinds: `raise` an exception, `hang` until closed from outside (never), `die` taking the server process along,
    `big` adds 1 MiB to the observation, `nan` as reward, `wrong` returns no StepResult. For environments with plain methods.
    """

    def __init__(self, env: Environment, *, latency: float = 0.0, faults: Mapping[int, str] | None = None,
                 close_latency: float = 0.0):
        unknown = set((faults or {}).values()) - set(KINDS)
        if unknown:
            raise ValueError(f"faults={dict(faults or {})}: no kind {sorted(unknown)}, there are {', '.join(KINDS)}")
        if any(inspect.iscoroutinefunction(getattr(env, name)) for name in ("reset", "step", "close")):
            raise ValueError(f"{type(env).__name__} has async methods, which Faulty cannot delay: give it plain ones")
        self.env, self.latency, self.faults, self.close_latency = env, latency, dict(faults or {}), close_latency
        self.steps = 0

    def reset(self, **options) -> StepResult:
        self.steps = 0
        time.sleep(self.latency)
        return self.env.reset(**declared(self.env.reset, options))

    def step(self, action: dict) -> StepResult:
        self.steps += 1
        time.sleep(self.latency)
        kind = self.faults.get(self.steps)
        if kind == "raise":
            raise RuntimeError(f"injected fault at step {self.steps}")
        if kind == "hang":
            threading.Event().wait()
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        result = self.env.step(action)
        if kind == "big":
            return StepResult({**result.observation, "big": "x" * 2**20}, result.reward, result.done)
        if kind == "nan":
            return StepResult(result.observation, float("nan"), result.done)
        return result.observation if kind == "wrong" else result

    def state(self) -> dict:
        return self.env.state()

    def close(self) -> None:
        time.sleep(self.close_latency)
        self.env.close()
