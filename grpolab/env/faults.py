"""Latency and faults around any environment, for tests and for the notebook that measures waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from grpolab.env.protocol import Environment, StepResult, declared


class Faulty:
    """An environment with plain methods that answers `latency` s late, and at the steps in `faults` (step number from 1 ->
    kind) raises ("raise") or never returns ("hang")."""

    def __init__(self, env: Environment, *, latency: float = 0.0, faults: Mapping[int, str] | None = None):
        self.env, self.latency, self.faults, self.steps = env, latency, dict(faults or {}), 0
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
