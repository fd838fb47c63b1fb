"""Latency and faults around any environment, for tests and for the notebook that measures waiting."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Mapping

from grpolab.env.protocol import Environment, StepResult, declared

KINDS = ("raise", "hang")


class Faulty:
    """An environment that answers `latency` s late, and at the steps in `faults` (step number from 1 -> kind) fails: it
    raises (`raise`) or never returns (`hang`). For environments with plain methods."""

    def __init__(self, env: Environment, *, latency: float = 0.0, faults: Mapping[int, str] | None = None):
        if unknown := set((faults or {}).values()) - set(KINDS):
            raise ValueError(f"faults={dict(faults)}: no kind {sorted(unknown)}, there are {', '.join(KINDS)}")
        if any(inspect.iscoroutinefunction(getattr(env, name)) for name in ("reset", "step", "close")):
            raise ValueError(f"{type(env).__name__} has async methods, which Faulty cannot delay: give it plain ones")
        self.env, self.latency, self.faults = env, latency, dict(faults or {})
        self.steps = 0
        self.state, self.close = env.state, env.close

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
        return self.env.step(action)
