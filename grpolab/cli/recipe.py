"""`grpolab train run.toml` (or run.yaml): the options of a training command in a file, a line each; and the names that they
have elsewhere.

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

import yaml

from grpolab.cli import UsageError

NAME = "recipe.toml"  # in a run's folder
YAML = (".yaml", ".yml")

# The options of TRL's and Atropos' trainers by our names, in RENAMED_OF those that mean another thing in one method
# (docs/trl.md lists them, and those without a counterpart).
RENAMED = {
    "learning-rate": "lr", "epsilon": "clip-eps", "max-steps": "steps", "training-steps": "steps", "warmup-steps": "warmup",
    "lr-scheduler-type": "schedule", "optim": "optimiser", "optimizer": "optimiser", "save-steps": "save-every",
    "eval-steps": "select-every", "eval-every": "select-every", "gradient-checkpointing": "checkpoint-activations",
    "num-generations": "group-size", "max-completion-length": "max-new-tokens", "num-iterations": "inner-epochs",
    "center-rewards-coefficient": "centering", "delta": "dual-clip", "reward-funcs": "reward", "lora-r": "lora-rank",
    "lora-target-modules": "lora-target", "run-name": "name", "output-dir": "out", "save-path": "out",
    "wandb-run-name": "name", "dataset-name": "data", "torch-dtype": "dtype", "hub-model-id": "push-to-hub",
    "importance-sampling-level": "ratio", "resume-from-checkpoint": "resume", "weight-bridge-mode": "weight-bridge",
    "vllm-restart-interval": "sync-every",
}
RENAMED_OF = {
    "grpo": {"beta": "kl-coef", "seq-len": "max-total-tokens"},
    "dpo": {"per-device-train-batch-size": "batch-size"},
    "sft": {"per-device-train-batch-size": "batch-size"},
    "reward": {"per-device-train-batch-size": "batch-size"},
}
MODEL = ("model", "model-name", "model-name-or-path")  # here the first argument
TRACKERS = {"wandb": "wandb", "use-wandb": "wandb", "trackio": "trackio", "tensorboard": "tensorboard"}  # as switches

# Options without a counterpart, and what to say in their place.
NO_OPTION = {
    "bf16": "say --dtype bfloat16 (parameters), or --autocast bfloat16 (products of the update)",
    "fp16": "say --dtype float16 (parameters; their losses are scaled)",
    "epsilon-high": "say both sides: --clip-eps 0.2 0.28",
    "scale-rewards": "say --advantage-kind standardised (group), batch_standardised or centred (none)",
    "loss-type": "say --aggregation token (dapo), sequence (grpo) or constant (dr_grpo), or --objective cispo",
    "use-bias-correction-kl": "say --kl-kind unbiased, which is the default, or k3",
    "num-train-epochs": "say --steps: rows / --batch-size is an epoch",
    "generation-batch-size": "say --prompts-per-step questions of --group-size completions",
    "max-length": "nothing is cut: a row longer than the model's context is refused",
    "logging-steps": "every step is shown, and a row of metrics.csv",
    "log-completions": "every rollout is recorded; --show-every N prints one",
    "save-total-limit": "the last checkpoint is kept; of the policies that --export-every saves, the last --keep-last",
    "top-p": "training samples from the whole distribution, of which the log-probs are",
    "top-k": "training samples from the whole distribution, of which the log-probs are",
    "min-p": "training samples from the whole distribution, of which the log-probs are",
    "repetition-penalty": "training samples from the whole distribution, of which the log-probs are",
    "use-vllm": "the sampler is in the same process; RemoteSampler (docs/serving.md) takes a vLLM server",
    "vllm-port": "say --server-url http://host:port/v1, where the sampler is not in the same process",
    "vllm-importance-sampling-cap": "say --sampler-cap",
    "vllm-importance-sampling-clip-max": "say --sampler-cap",
    "wandb-project": "say --report-to wandb; the project is grpolab, or WANDB_PROJECT",
    "assistant-only-loss": "the loss is always of the assistant's tokens alone",
    "completion-only-loss": "the loss is always of the assistant's tokens alone",
    "packing": "examples are computed without padding anyway",
    "pack-width": "examples are computed without padding anyway: leave it out",
    "precompute-ref-log-probs": "the reference's log-probs are computed once anyway; in Python cache_logps keeps them on disk",
    "disable-dropout": "the models are trained without dropout, but for that of --lora-dropout",
    "load-in-4bit": "no model is computed with in 4 bits; --lora-rank with --dtype bfloat16 takes least memory",
    "use-peft": "say --lora-rank",
    "steps-per-generation": "say --minibatches: steps_per_generation / gradient_accumulation_steps of TRL",
    "max-tool-calling-iterations": "say --max-turns with one more: it counts the answer behind the last call, too",
}
WHOLE = "say the step's whole batch as --prompts-per-step questions of --group-size completions; --token-budget bounds one pass"
DPO_LOSS = ("say --kind sigmoid or hinge; TRL's ipo is --kind ipo --length-normalised, its sigmoid_norm --kind sigmoid "
            "--length-normalised")
NO_OPTION_OF = {"grpo": {"batch-size": WHOLE, "per-device-train-batch-size": WHOLE}, "dpo": {"loss-type": DPO_LOSS}}


def flag(name: str, method: str) -> str:
    """An option as this project calls it."""
    name = name.replace("_", "-")
    return RENAMED_OF.get(method, {}).get(name) or RENAMED.get(name, name)


def renamed(arguments: Sequence[str], method: str) -> list[str]:
    """Arguments with the options in this project's names, and values as tyro spells them."""
    own: list[str] = []
    trackers: list[str] = []
    models: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        option = name[2:].replace("_", "-") if name.startswith("--") else ""
        known = flag(option, method)
        if option in MODEL:
            models.append(value if equals else next(waiting, ""))
        elif option in TRACKERS:
            if equals:
                raise UsageError(f"--{option}={value}: it is a switch without a value; leave it out where you do not want it")
            trackers.append(TRACKERS[option])
        elif why := NO_OPTION_OF.get(method, {}).get(known) or NO_OPTION.get(known):
            raise UsageError(f"--{option} is no option here: {why}")
        else:
            own.append(f"--{known}{equals}{value}" if option else argument)
    return _with_none(models + _both_sides(own) + (["--report-to", *dict.fromkeys(trackers)] if trackers else []))


def _both_sides(arguments: list[str]) -> list[str]:
    """Arguments with a single value of --clip-eps said twice."""
    parts = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--clip-eps=") else [a])]
    if "--clip-eps" in parts:
        at = parts.index("--clip-eps") + 1
        if at < len(parts) and all(second.startswith("--") for second in parts[at + 1 : at + 2]):
            parts.insert(at, parts[at])
    return parts


def _with_none(arguments: Sequence[str]) -> list[str]:
    """Arguments with None where a value is none: tyro reads only that spelling. One way of the weights is called none, too."""
    before = ["", *arguments]
    return ["None" if a == "none" and b != "--weight-bridge" else a for a, b in zip(arguments, before)]


class _Once(yaml.SafeLoader):
    """YAML in which a key stands once, as in TOML: PyYAML takes the last one without a word."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(problem=f"{key} stands there twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def loaded(path: str | Path) -> dict[str, Any]:
    """The entries of a TOML or YAML file. UsageError for one that is neither."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        entries = yaml.load(text, _Once) if Path(path).suffix in YAML else tomllib.loads(text)
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:  # PyYAML's, of tags, too
        raise UsageError(f"{path} is no {'YAML' if Path(path).suffix in YAML else 'TOML'}: {error}") from error
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        raise UsageError(f"{path} holds {entries!r:.60}, no options: a line each, as in `steps: 30`")
    return entries


def read(path: str | Path, overrides: Sequence[str], methods: Sequence[str],
         skip: Sequence[str] = ()) -> tuple[str, list[str]]:
    """(method, arguments) of a file, with `overrides` in the place of what they name, without its tables `skip`. UsageError
    that names the line's key where it is no option's value."""
    entries = {key: value for key, value in loaded(path).items() if key not in skip}
    method = entries.pop("method", None)
    models = {key: entries.pop(key) for key in list(entries) if key.replace("_", "-") in MODEL}
    model = next(iter(models.values()), None)
    if method not in methods or not isinstance(model, str):
        raise UsageError(f"{path}: a recipe says method = one of {', '.join(methods)}, and model = a name or folder; it has "
                         f"method {method!r} and model {model!r}")
    overrides = renamed(overrides, method)
    overridden = {_name(argument) for argument in overrides if argument.startswith("--")}
    positional = bool(overrides) and not overrides[0].startswith("--")
    arguments, keys = [] if positional else [model], {"model": list(models)}
    switches = {key: entries.pop(key) for key in list(entries)
                if key.replace("_", "-") in TRACKERS and isinstance(entries[key], bool)}
    options = {key: renamed(spelled(flag(key, method), value, f"{path}: {key}"), method) for key, value in entries.items()}
    if on := [f"--{key}" for key, value in switches.items() if value]:
        options[", ".join(switches)] = renamed(on, method)
    for key, words in options.items():
        keys.setdefault(_name(words[0]), []).append(key)
        arguments += [] if _name(words[0]) in overridden else words
    if twice := next((names for names in keys.values() if len(names) > 1), None):
        raise UsageError(f"{path}: {' and '.join(twice)} are one option: say it once")
    return method, overrides[:1] * positional + arguments + overrides[positional:]


def _name(argument: str) -> str:
    """The option of an argument."""
    return argument.partition("=")[0].removeprefix("--").removeprefix("no-")


def spelled(name: str, value: Any, where: str) -> list[str]:
    """An entry as arguments."""
    if isinstance(value, dict) and name == "up":
        raise UsageError(f"{where} is a table for grpolab up, which starts the trainer with the rest")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else ["none" if value is None else value]
    if "" in values or not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values):
        raise UsageError(f"{where} is {value!r:.80}: an option is a text that is not empty, a number, true, false, or a list "
                         "of texts or numbers")
    return [f"--{name}", *map(str, values)]


def entries(command: Any) -> dict[str, Any]:
    """The options of a command that differ from their defaults, those of its configurations among them; the model first."""
    changed = {}
    for f in fields(command):
        value = getattr(command, f.name)
        if is_dataclass(value):
            changed |= entries(value)
        elif f.default is MISSING or value != f.default:
            changed[f.name] = value
    return changed


def refuse_unread(command: Any, rules: Sequence[tuple[str, Any, str]]) -> None:
    """UsageError for an option that would do nothing, on the command line or in a recipe. A rule is (options, whether they are
    read, the words behind one that is not)."""
    changed = entries(command)
    for options, read, why in rules:
        if name := next((name for name in options.split() if name in changed and not read), None):
            values = changed[name] if isinstance(changed[name], tuple) else [changed[name]]
            raise UsageError(" ".join([f"--{name.replace('_', '-')}", *(str(v) for v in values if v is not True), why,
                                       "(a line of a recipe counts, too)"]))


def written(method: str, options: dict[str, Any]) -> str:
    """A recipe as `read` reads it."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in {"method": method, **options}.items())


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps("none" if value is None else str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    text = text.encode(errors="backslashreplace").decode()  # a path that is no UTF-8 can be written, and is not read again
    return text.replace("\x7f", "\\u007f")  # JSON spells 😀 as two halves and lets a DEL stand, and TOML reads neither
