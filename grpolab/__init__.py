"""grpolab: a Jupyter-first laboratory for post-training language models."""

import os
from importlib import import_module

# By default an idle OpenMP thread spins for milliseconds, which on busy cores starves the one it waits for: steps took thirty
# times as long. So few turns cost nothing on idle cores. libgomp reads this when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Loaded when first asked for, so that an environment server does not import torch.
_HOME = {
    "Policy": "models", "load_policy": "models",
    "Sampler": "decode.sampler", "SamplingParams": "decode.sampling",
    "GrpoPool": "env.pool", "MultiTurnEnvPool": "env.sync_pool",
    "gate": "lab.gate",
}
_MODULES = {"losses": "train.losses", "advantages": "train.advantages", "plots": "lab.plots"}

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"grpolab.{_HOME[name]}"), name)
    if name in _MODULES:
        return import_module(f"grpolab.{_MODULES[name]}")
    raise AttributeError(f"module 'grpolab' has no attribute {name!r}")
