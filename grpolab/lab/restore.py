"""The state of a run before any of its steps: from the weights kept for replay and the recorded rollouts, update by update.

An update is a function of weights, optimiser and rollouts, and the record holds the rollouts; so nothing is sampled and no
reward is asked. Each row that is computed again is compared with the run's own.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from operator import index
from typing import TypeVar

import torch

from grpolab.decode.engines.attention import share_attention
from grpolab.models.load import Policy, load_policy
from grpolab.rollouts import RecordedGroup
from grpolab.runs.checkpoints import load_state
from grpolab.runs.run import Run
from grpolab.sync import set_own_threads
from grpolab.train.async_grpo import AsyncGRPOConfig
from grpolab.train.grpo import GRPOConfig, check_reference, grpo_update, verify_both
from grpolab.train.loop import dropout_of
from grpolab.train.optimisers import make_optimiser

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """Policy and optimiser before `step`, from the kept step `kept` on. `notes` say where an update that was done again gave
    another row than the run's: the weights are then not those of the run."""

    step: int
    kept: int | None  # None for a bundle
    policy: Policy
    optimiser: torch.optim.Optimizer | None
    config: GRPOConfig
    notes: tuple[str, ...] = ()


def restore(run: Run, step: int, *, reference: Policy | None = None) -> State:
    """The state before `step` (with the number of the run's steps: at its end), computed with as many threads as the run.

    The `reference` of a run with a KL penalty is its start unless another is given. Raises ValueError where no weights were
    kept, where a step between is not wholly on the record, and for files that are damaged."""
    step, steps, states = index(step), config_of(run).steps, run.kept()
    start = max((s for s in states if s <= step), default=None)
    if start is None or step > steps:
        there = f"weights are kept before steps {', '.join(map(str, states))}" if states else (
            "no weights were kept: Run(..., replay_every=10) keeps them every 10 steps")
        raise ValueError(f"{run.shown(run.folder)} has no way to step {step} of {steps}: {there}")
    return with_threads(session_at(run, start).get("threads"), lambda: _updated(run, start, step, reference))


def _updated(run: Run, start: int, step: int, reference: Policy | None) -> State:
    """The weights kept before `start`, with the recorded updates from there to `step`, by the configuration kept beside them:
    that of the steps before a fork is another than the fork's own."""
    policy, folder = load_start(run), run.kept()[start]
    try:
        config = as_config(json.loads((folder / "state.json").read_text())["config"])
        optimiser = make_optimiser(policy, config)
        policy.version = load_state(folder, policy, optimiser)["version"]
    except Exception as error:  # safetensors, json and torch each raise types of their own for a damaged file
        raise ValueError(f"the weights kept in {folder} cannot be read ({error}), or are of another model than "
                         f"{policy.name!r}; without them, replay from another kept step") from error
    if config.exact:  # the trainer's forward of such a run, too
        share_attention(policy.model)
    if start == step:
        return State(step, start, policy, optimiser, config)
    recorded = {s: run.recorder.groups(s) for s in range(start, step)}
    reference = reference or (load_start(run) if config.needs_reference else None)
    policy.model.train(bool(session_at(run, start).get("training")))
    check_reference(policy, reference, config)
    verify_both(policy, reference, config, longest(g for groups in recorded.values() for g in groups))
    rows, notes = {row["step"]: row for row in rows_of(run)}, []
    for s, groups in recorded.items():
        again, row = update_again(policy, reference, groups, config, optimiser, s), rows.get(s, {})
        other = [name for name, value in again.items() if name in row and value == value and row[name] != value]
        if other and not notes:
            notes.append(f"the update of step {s} gives {other[0]} {again[other[0]]:.9g}, where the run had "
                         f"{row[other[0]]:.9g}: the weights are not the run's from there on (another machine or number of "
                         "threads, or another reference)")
    return State(step, start, policy, optimiser, config, tuple(notes))


def update_again(policy: Policy, reference: Policy | None, groups: list[RecordedGroup], config: GRPOConfig,
                 optimiser: torch.optim.Optimizer, step: int) -> dict:
    """The update of a step from its recorded groups; its row of metrics. ValueError where their log-probs are not those of
    the policy's weights."""
    most = max(len(g.group) for g in groups)
    trained = [g.filled(most) for g in groups if g.used]
    try:
        with dropout_of(policy, config.seed, step):
            return grpo_update(policy, reference, [group for group, _ in trained], config, optimiser, step,
                               torch.tensor([a for _, a in trained]))
    except RuntimeError as error:
        if "sampler and trainer disagree" not in str(error):  # such as memory that does not suffice
            raise
        raise ValueError(f"the recorded rollouts of step {step} are not those of its weights: one of the two is another run's, "
                         f"or an edit gave the rollouts log-probs of its own ({error})") from error


def with_threads(threads: int | None, work: Callable[[], T]) -> T:
    """`work()` in a thread of its own with so many torch threads (None: as the caller has)."""
    threads = threads or torch.get_num_threads()

    def threaded():
        set_own_threads(threads)
        return work()

    with ThreadPoolExecutor(1, "grpolab-replay") as pool:
        return pool.submit(threaded).result()


# --- the files of a run -----------------------------------------------------------------------------------------------


def session_at(run: Run, step: int) -> dict:
    """Machine, versions and threads of the process that computed a step; empty where that is not known."""
    return next((s for s in reversed(run.recorder.sessions()) if s["from"] <= step), {})


def rows_of(run: Run) -> list[dict]:
    """The rows of a run with every bit, which pandas may round; a value that is absent from metrics.csv has no key."""
    path = run.folder / "metrics.csv"
    if run.metrics or not path.exists():
        return [dict(row) for row in run.metrics]
    with open(path, newline="") as file:
        return [{name: _value(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def config_of(run: Run) -> GRPOConfig:
    """The configuration of the run's last loop; ValueError where it is not known."""
    path = run.folder / "run.json"
    try:
        return as_config(json.loads(path.read_text())["config"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run.shown(path)} is damaged, or not of a run of GRPO that can be replayed: {error}") from error


def as_config(plain: dict) -> GRPOConfig:
    """A configuration that was written as JSON."""
    kind = AsyncGRPOConfig if "max_staleness" in plain else GRPOConfig
    if other := {f.name for f in fields(kind)} ^ plain.keys():
        raise ValueError("it was left by another method or version than GRPO of this one: its configuration differs in "
                         + ", ".join(sorted(other)))
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()})


def check_synchronous(config: GRPOConfig, what: str) -> None:
    """ValueError for a run that sampled ahead, where `what` takes a step's rollouts for those of the weights before it."""
    if getattr(config, "max_staleness", 0):
        raise ValueError(f"{what} needs rollouts of the weights before their step, and those of this run are up to "
                         f"max_staleness={config.max_staleness} steps older: replay draws them again, from their own weights")


def load_start(run: Run) -> Policy:
    """The policy that the run started from; ValueError where its files are missing or damaged."""
    folder = run.folder / "replay" / "policy"
    try:
        return load_policy(str(folder), **device_and_dtype((run.recorder.sessions() or [{}])[-1]))
    except Exception as error:  # transformers, tokenizers and safetensors each raise types of their own for a damaged file
        raise ValueError(f"the policy that {run.shown(run.folder)} started from cannot be loaded from {run.shown(folder)} "
                         f"({error}): copy that folder from a whole one, or train again") from error


def device_and_dtype(session: dict) -> dict[str, str | None]:
    """The kind of device that a process computed on, where this machine has it, and the dtype of its parameters."""
    device = session["device"] if session.get("device") in ("cpu", "mps") else None
    return {"device": device, "dtype": session.get("dtype", "torch.float32").removeprefix("torch.")}


def longest(groups: Iterable[RecordedGroup]) -> int:
    """Tokens of the longest sequence."""
    return max((len(r.prompt) + len(r.tokens) for g in groups for r in g.group), default=1)
