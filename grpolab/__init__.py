"""grpolab: a Jupyter-first laboratory for post-training language models."""

from importlib import import_module

from grpolab.gate import gate

# Loaded when first asked for, so that an environment server does not import torch.
_HOME = {"Policy": "models", "load_policy": "models", "Sampler": "sampler", "SamplingParams": "sampling",
         "GrpoPool": "pool", "MultiTurnEnvPool": "pool"}  # fmt: skip

__all__ = ["GrpoPool", "MultiTurnEnvPool", "Policy", "Sampler", "SamplingParams", "gate", "load_policy"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'grpolab' has no attribute {name!r}")
    return getattr(import_module(f"grpolab.{_HOME[name]}"), name)
