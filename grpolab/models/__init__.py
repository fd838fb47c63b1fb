"""Models: `load_policy` of a name, a folder or a hub id; LoRA; SmolLM2 out of its wheel."""

from grpolab.models.load import Policy, describe_machine, load_policy

__all__ = ["Policy", "describe_machine", "load_policy"]
