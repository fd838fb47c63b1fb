"""grpolab: a Jupyter-first laboratory for post-training language models."""

from grpolab.gate import gate
from grpolab.models import Policy, load_policy
from grpolab.sampler import Sampler
from grpolab.sampling import SamplingParams

__all__ = ["Policy", "Sampler", "SamplingParams", "gate", "load_policy"]
