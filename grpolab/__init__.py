"""grpolab: a Jupyter-first laboratory for post-training language models."""

import os
from importlib import import_module

from grpolab.gate import gate

# By default an idle OpenMP thread spins for milliseconds, which on busy cores starves the one it waits for: steps took thirty
# times as long. So few turns cost nothing on idle cores. libgomp reads this when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Loaded when first asked for, so that an environment server does not import torch.
_HOME = {"Policy": "models", "load_policy": "models", "Sampler": "sampler", "SamplingParams": "sampling",
         "GrpoPool": "pool", "MultiTurnEnvPool": "pool"}  # fmt: skip

__all__ = ["GrpoPool", "MultiTurnEnvPool", "Policy", "Sampler", "SamplingParams", "gate", "load_policy"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'grpolab' has no attribute {name!r}")
    return getattr(import_module(f"grpolab.{_HOME[name]}"), name)
