"""The state of a run before any of its steps: from the weights kept for replay and the recorded rollouts, update by update.

An update is a function of weights, optimiser and rollouts, and the record holds the rollouts; so nothing is sampled and no
reward is asked. Each row that is computed again is compared with the run's own.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from operator import index
from typing import TypeVar

import torch

from grpolab.decode.engines.attention import share_attention
from grpolab.models.load import Policy, load_policy
from grpolab.rollouts import RecordedGroup
from grpolab.runs.checkpoints import check_seal, data_hash, load_state, weights_hash
from grpolab.runs.run import FORKED, Run
from grpolab.sync import set_own_threads
from grpolab.train.grpo import GRPOConfig, check_reference, grpo_update, prove_both
from grpolab.train.loop import dropout_of
from grpolab.train.optimisers import make_optimiser

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """Policy and optimiser before `step`, from the kept step `kept` on. `notes` say where an update that was done again gave
    another row than the run's: the weights are then not those of the run."""

    step: int
    kept: int
    policy: Policy
    optimiser: torch.optim.Optimizer
    config: GRPOConfig
    notes: tuple[str, ...] = ()


def restore(run: Run, step: int, *, policy: Policy | None = None, reference: Policy | None = None) -> State:
    """The state before `step` (with the number of the run's steps: at its end). It computes, so call it with the threads of
    the run (`with_threads`). The policy is loaded, or `policy`, whose weights are replaced.

    The `reference` of a run with a KL penalty is its start unless another is given. Raises ValueError where no weights were
    kept, where a step between is not wholly on the record, and for files that are damaged."""
    step, config, kept = index(step), config_of(run), run.kept()
    configs = configs_of(run)
    before = [s for s in kept if s <= step]
    if not before or step > config.steps:
        there = f"weights are kept before steps {', '.join(map(str, kept))}" if kept else (
            "no weights were kept: Run(..., replay_every=10) keeps them every 10 steps")
        raise ValueError(f"{run.shown(run.folder)} has no way to step {step} of {config.steps}: {there}")
    policy = policy or load_start(run)
    if config_at(configs, step).exact:  # the trainer's forward of such a run, too
        share_attention(policy.model)
    optimiser = make_optimiser(policy, config_at(configs, step))
    start = max(before)
    load_kept_state(run, start, policy, optimiser)
    notes: list[str] = []
    if start < step:
        of_steps = [config_at(configs, s) for s in range(start, step)]
        needs_reference = any(c.kl_coef for c in of_steps)
        reference = reference or (_start_of(run) if needs_reference else None)
        rows = metrics_of(run)
        steps = [run.recorder.groups(s) for s in range(start, step)]
        policy.model.train(bool(session_at(run, start).get("training")))
        for config in dict.fromkeys(of_steps):
            check_reference(policy, reference, config)
            prove_both(policy, reference, config, longest(steps))
        for s, groups, config in zip(range(start, step), steps, of_steps):
            set_weight_decay(optimiser, config)
            used = [g for g in groups if g.used]
            a = torch.tensor([g.advantages for g in used])
            try:
                with dropout_of(policy, config.seed, s):
                    row = grpo_update(policy, reference, [g.trained for g in used], config, optimiser, s, a)
            except RuntimeError as error:  # the sampler's log-probs on the record are not those of these weights
                raise ValueError(f"the recorded rollouts of step {s} are not those of the weights kept in {kept[start]}, so "
                                 f"the record or the weights are another run's ({error})") from error
            if not notes and (note := _differing(row, rows.get(s, {}), s)):
                notes.append(note)
    set_weight_decay(optimiser, config_at(configs, step))
    return State(step, start, policy, optimiser, config_at(configs, step), tuple(notes))


def set_weight_decay(optimiser: torch.optim.Optimizer, config: GRPOConfig) -> None:
    """Set the weight decay of this configuration; that of another one may have come with the optimiser's state."""
    for group in optimiser.param_groups:
        group["weight_decay"] = config.weight_decay


def session_at(run: Run, step: int) -> dict:
    """Machine, versions and threads of the process that computed a step; empty where that is not known."""
    return next((s for s in reversed(run.recorder.sessions()) if s["from"] <= step), {})


def with_threads(threads: int | None, work: Callable[[], T]) -> T:
    """`work()` in a thread of its own with so many torch threads (None: as the caller has)."""
    threads = threads or torch.get_num_threads()

    def threaded():
        set_own_threads(threads)
        return work()

    with ThreadPoolExecutor(1, "grpolab-replay") as pool:
        return pool.submit(threaded).result()


def config_of(run: Run) -> GRPOConfig:
    """The configuration of the run's last loop."""
    try:
        note = json.loads((run.folder / "run.json").read_text())
        plain, noted = dict(note["config"]), note.get("config_hash")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run.shown(run.folder)} holds no run that can be replayed: its run.json cannot be read "
                         f"({error!r})") from error
    config = as_config(plain, run.shown(run.folder))
    if noted is not None and noted != data_hash([plain]):
        raise ValueError(f"{run.shown(run.folder / 'run.json')} is damaged: its configuration is not the one that was written")
    return config


Configs = list[tuple[float, GRPOConfig]]


def configs_of(run: Run) -> Configs:
    """(up to which step, the configuration of the steps before it), in order; the last one is the run's own, without an end.
    A run that is no fork has that one alone. ValueError for a file that is damaged."""
    path = run.folder / FORKED
    try:
        noted = json.loads(path.read_text())
        if noted["hash"] != data_hash([noted["eras"]]):
            raise ValueError("it is not as it was written")
        earlier = [(int(step), as_config(plain, run.shown(path))) for step, plain in noted["eras"]]
    except FileNotFoundError:
        earlier = []
    except (OSError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"{run.shown(path)} cannot be read, so the configuration of the steps before the fork "
                         f"is not known ({error}): fork again") from error
    return [*earlier, (math.inf, config_of(run))]


def config_at(configs: Configs, step: int) -> GRPOConfig:
    """The configuration with which a step was computed; after the last step, the run's own."""
    return next(config for end, config in configs if step < end)


def as_config(plain: dict, where) -> GRPOConfig:
    """A configuration that was written as JSON."""
    known = {f.name for f in fields(GRPOConfig)}
    if missing := known ^ plain.keys():
        raise ValueError(f"{where} was left by another method or version than GRPO of this one: its configuration differs in "
                         f"{', '.join(sorted(missing))}")
    return GRPOConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()})


def load_start(run: Run) -> Policy:
    """The policy that the run started from; ValueError where its files are missing or damaged."""
    folder = run.folder / "replay" / "policy"
    try:
        check_seal(folder)
        return load_policy(str(folder), **device_and_dtype(run.recorder.sessions()), tell=False)
    except Exception as error:  # transformers, tokenizers and safetensors each raise types of their own for a damaged file
        raise ValueError(f"the policy that {run.shown(run.folder)} started from cannot be loaded from {run.shown(folder)} "
                         f"({error}): copy that folder from a whole one, or train again") from error


def device_and_dtype(sessions: list[dict]) -> dict[str, str | None]:
    """The kind of device that the run computed on, where this machine has it, and the dtype of its parameters."""
    last = sessions[-1] if sessions else {}
    device = last["device"] if last.get("device") in ("cpu", "mps") else None
    return {"device": device, "dtype": last.get("dtype", "torch.float32").removeprefix("torch.")}


def load_kept_state(run: Run, step: int, policy: Policy, optimiser) -> None:
    """The kept state before `step` into policy and optimiser; ValueError for one that is damaged or another model's."""
    folder = run.kept()[step]
    try:
        check_seal(folder)
        state = load_state(folder, policy, optimiser)
    except Exception as error:  # safetensors, json and torch each raise types of their own for a damaged file
        raise ValueError(f"the weights kept in {folder} cannot be read ({error}), or are of another model than "
                         f"{policy.name!r}; without them, replay from another kept step") from error
    policy.version = state["version"]
    if weights_hash(policy) != state["weights"]:
        raise ValueError(f"the weights kept in {folder} are not those that were written: their hash is another")


def rows_of(run: Run) -> list[dict]:
    """The rows of a run, of this process or as metrics.csv has them: numbers as numbers, anything else as text."""
    return [dict(row) for row in run.metrics] or [{k: _value(v) for k, v in row.items() if v} for row in _table(run)]


def metrics_of(run: Run) -> dict[int, dict[str, float]]:
    """Step -> the numbers of its row, as metrics.csv has them."""
    return {int(row["step"]): {k: v for k, v in row.items() if isinstance(v, int | float) and v == v} for row in rows_of(run)}


def _table(run: Run) -> list[dict[str, str]]:
    """The lines of metrics.csv that name a step; none without the file, ValueError where it is no table."""
    limit = csv.field_size_limit(2**31 - 1)  # the state of a curriculum may be long
    try:
        with open(run.folder / "metrics.csv", newline="", errors="replace") as file:
            return [row for row in csv.DictReader(file) if _number(row.get("step"))]
    except FileNotFoundError:
        return []
    except (OSError, csv.Error) as error:
        raise ValueError(f"{run.shown(run.folder / 'metrics.csv')} cannot be read: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _number(text: str | None) -> bool:
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False


def longest(steps: list[list[RecordedGroup]]) -> int:
    """Tokens of the longest sequence."""
    return max((len(r.prompt) + len(r.tokens) for groups in steps for g in groups for r in g.group), default=1)


def _start_of(run: Run) -> Policy:
    kept = run.kept()
    if 0 not in kept:
        raise ValueError("the run has a KL penalty (kl_coef), and the weights of its start, its reference unless another is "
                         "given, were not kept: pass reference=...")
    return load_start(run)


def _differing(row: dict, recorded: dict, step: int) -> str | None:
    """The first number of an update that is not the run's."""
    for name, value in row.items():
        if name in recorded and value == value and recorded[name] != value:
            return (f"the update of step {step} gives {name} {value:.9g}, where the run had {recorded[name]:.9g}: the weights "
                    "are not the run's from there on (another machine or number of threads, or another reference)")
    return None
