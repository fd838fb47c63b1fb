"""`grpolab train run.toml`: the options of a training command in a file, a line each; and the names that they have elsewhere.

    method = "grpo"                                  # sft, grpo, dpo or reward
    model = "runs/cli_sft/tiny/policy"
    steps = 20
    clip-eps = [0.2, 0.28]

What stands on the command line beside the file wins over it. A training leaves such a file in its run's folder.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from grpolab.cli import UsageError

NAME = "recipe.toml"  # in a run's folder

# The options of TRL's and Atropos' trainers by our names, in RENAMED_OF those that mean another thing in one method
# (docs/trl.md lists them, and those without a counterpart).
RENAMED = {
    "learning-rate": "lr", "max-steps": "steps", "training-steps": "steps", "warmup-steps": "warmup",
    "lr-scheduler-type": "schedule", "optim": "optimiser", "optimizer": "optimiser", "save-steps": "save-every",
    "eval-steps": "select-every", "eval-every": "select-every", "gradient-checkpointing": "checkpoint-activations",
    "num-generations": "group-size", "max-completion-length": "max-new-tokens", "num-iterations": "inner-epochs",
    "steps-per-generation": "minibatches", "delta": "dual-clip", "reward-funcs": "reward", "lora-r": "lora-rank",
    "lora-target-modules": "lora-target", "run-name": "name", "output-dir": "out", "save-path": "out",
    "dataset-name": "data", "torch-dtype": "dtype", "hub-model-id": "push-to-hub", "importance-sampling-level": "ratio",
    "weight-bridge-mode": "weight-bridge", "vllm-restart-interval": "sync-every",
}
RENAMED_OF = {"grpo": {"beta": "kl-coef"}, "dpo": {"loss-type": "kind"}}


def flag(name: str, method: str) -> str:
    """An option as this project calls it."""
    name = name.replace("_", "-")
    return RENAMED_OF.get(method, {}).get(name) or RENAMED.get(name, name)


def renamed(arguments: Sequence[str], method: str) -> list[str]:
    """Arguments with the options in this project's names."""
    def ours(argument: str) -> str:
        name, equals, value = argument.partition("=")
        return f"--{flag(name[2:], method)}{equals}{value}"

    return [ours(argument) if argument.startswith("--") and argument != "--" else argument for argument in arguments]


def with_none(arguments: Sequence[str]) -> list[str]:
    """Arguments with None where a value is none: tyro reads only that spelling. One way of the weights is called none, too."""
    before = ["", *arguments]
    return ["None" if a == "none" and b != "--weight-bridge" else a for a, b in zip(arguments, before)]


def read(path: str | Path, overrides: Sequence[str], methods: Sequence[str],
         skip: Sequence[str] = ()) -> tuple[str, list[str]]:
    """(method, arguments) of a file, with `overrides` in the place of what they name, without its tables `skip`. UsageError
    that names the line's key where it is no option's value."""
    try:
        entries = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    entries = {key: value for key, value in entries.items() if key not in skip}
    method, model = entries.pop("method", None), entries.pop("model", None)
    if method not in methods or not isinstance(model, str):
        raise UsageError(f"{path}: a recipe says method = one of {', '.join(methods)}, and model = a name or folder; it has "
                         f"method {method!r} and model {model!r}")
    overrides = renamed(overrides, method)
    taken = {argument.partition("=")[0].removeprefix("--").removeprefix("no-") for argument in overrides}
    positional = bool(overrides) and not overrides[0].startswith("--")
    arguments = [] if positional else [model]
    for key, value in entries.items():
        name = flag(key, method)
        if name not in taken:
            arguments += spelled(name, value, f"{path}: {key}")
    return method, overrides[:1] * positional + arguments + overrides[positional:]


def spelled(name: str, value: Any, where: str) -> list[str]:
    """An entry as arguments."""
    if isinstance(value, dict) and name == "up":
        raise UsageError(f"{where} is a table for grpolab up, which starts the trainer with the rest")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values):
        raise UsageError(f"{where} is {value!r:.80}: an option is a text, a number, true, false, or a list of texts or numbers")
    return [f"--{name}", *map(str, values)]


def entries(command: Any) -> dict[str, Any]:
    """The options of a command that differ from their defaults, those of its configurations among them; the model first."""
    found = {}
    for f in fields(command):
        value = getattr(command, f.name)
        if is_dataclass(value):
            found |= entries(value)
        elif f.default is MISSING or value != f.default:
            found[f.name] = value
    return found


def written(method: str, options: dict[str, Any]) -> str:
    """A recipe as `read` reads it."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in {"method": method, **options}.items())


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps("none" if value is None else str(value) if isinstance(value, Path) else value)
