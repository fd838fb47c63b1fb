"""The state of a run before any of its steps: from the weights kept for replay and the recorded rollouts, update by update.

An update is a function of weights, optimiser and rollouts, and the record holds the rollouts; so nothing is sampled and no
reward is asked. Each row that is computed again is compared with the run's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from operator import index
from typing import TypeVar

import pandas as pd
import torch

from grpolab.decode.engines.attention import share_attention
from grpolab.models.load import Policy, load_policy
from grpolab.rollouts import RecordedGroup
from grpolab.runs.checkpoints import data_hash, load_state
from grpolab.runs.run import FORKED, Run
from grpolab.sync import set_own_threads
from grpolab.train.grpo import GRPOConfig, check_reference, grpo_update, verify_both
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


def restore(run: Run, step: int, *, reference: Policy | None = None) -> State:
    """The state before `step` (with the number of the run's steps: at its end). It computes, so call it with the threads of
    the run (`with_threads`). The steps before a fork are those of the run that it left, in the folder above.

    The `reference` of a run with a KL penalty is its start unless another is given. Raises ValueError where no weights were
    kept, where a step between is not wholly on the record, and for files that are damaged."""
    step, config, kept = index(step), config_of(run), run.kept()
    parent, forked_at = parent_of(run)
    if parent is not None and step < forked_at:
        return restore(parent, step, reference=reference)
    before = [s for s in kept if s <= step]
    if not before or step > config.steps:
        there = f"weights are kept before steps {', '.join(map(str, kept))}" if kept else (
            "no weights were kept: Run(..., replay_every=10) keeps them every 10 steps")
        raise ValueError(f"{run.shown(run.folder)} has no way to step {step} of {config.steps}: {there}")
    policy, start, notes = load_start(run), max(before), []
    if config.exact:  # the trainer's forward of such a run, too
        share_attention(policy.model)
    optimiser = make_optimiser(policy, config)
    load_kept_state(run, start, policy, optimiser)
    if start < step:
        steps = {s: run.recorder.groups(s) for s in range(start, step)}
        reference = reference or (load_start(run) if config.kl_coef else None)
        policy.model.train(bool(session_at(run, start).get("training")))
        check_reference(policy, reference, config)
        verify_both(policy, reference, config, longest(g for groups in steps.values() for g in groups))
        rows = {row["step"]: row for row in rows_of(run)}
        for s, groups in steps.items():
            row = update_again(policy, reference, groups, config, optimiser, s)
            if not notes and (note := _difference(row, rows.get(s, {}), s)):
                notes.append(note)
    return State(step, start, policy, optimiser, config, tuple(notes))


def update_again(policy: Policy, reference: Policy | None, groups: list[RecordedGroup], config: GRPOConfig,
                 optimiser: torch.optim.Optimizer, step: int) -> dict:
    """The update of a step from its recorded groups; its row of metrics. ValueError where their log-probs are not those of
    the policy's weights."""
    used = [g for g in groups if g.used]
    try:
        with dropout_of(policy, config.seed, step):
            return grpo_update(policy, reference, [g.trained for g in used], config, optimiser, step,
                               torch.tensor([g.advantages for g in used]))
    except RuntimeError as error:
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


# --- what a run left --------------------------------------------------------------------------------------------------


def session_at(run: Run, step: int) -> dict:
    """Machine, versions and threads of the process that computed a step; empty where that is not known."""
    return next((s for s in reversed(run.recorder.sessions()) if s["from"] <= step), {})


def rows_of(run: Run) -> list[dict]:
    """The rows of a run, of this process or from metrics.csv; a value that is absent there has no key."""
    if run.metrics:
        return [dict(row) for row in run.metrics]
    try:
        table = pd.read_csv(run.folder / "metrics.csv", dtype=str).dropna(subset="step")
    except FileNotFoundError:
        return []
    return [{name: _value(text) for name, text in row.items() if text == text} for row in table.to_dict("records")]


def _value(text: str) -> int | float | str:
    """Every bit of a number, which pandas' own parser may round."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parent_of(run: Run) -> tuple[Run | None, int]:
    """The run that a fork left, and at which step; (None, 0) for a run that is no fork. ValueError where the folder above holds
    another run by now."""
    path = run.folder / FORKED
    if not path.exists():
        return None, 0
    note, parent = json.loads(path.read_text()), Run(root=run.folder.parent)
    if identity(parent) != note["run"]:
        raise ValueError(f"{run.shown(run.folder)} was forked from another run than {run.shown(parent.folder)} holds now, so "
                         "the steps before it are gone: fork again")
    return parent, note["step"]


def identity(run: Run) -> str:
    """A hash of where a run started and of its configuration."""
    note = json.loads((run.folder / "run.json").read_text())
    return data_hash([note["start"], note["config"]])


def config_of(run: Run) -> GRPOConfig:
    """The configuration of the run's last loop; ValueError where it is not known. A value that was changed since is noticed by
    the rows of the updates that are done again."""
    path = run.folder / "run.json"
    try:
        return as_config(json.loads(path.read_text())["config"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{run.shown(path)} is damaged, or not of a run of GRPO that can be replayed: {error}") from error


def as_config(plain: dict) -> GRPOConfig:
    """A configuration that was written as JSON."""
    if other := {f.name for f in fields(GRPOConfig)} ^ plain.keys():
        raise ValueError("it was left by another method or version than GRPO of this one: its configuration differs in "
                         + ", ".join(sorted(other)))
    return GRPOConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()})


def load_start(run: Run) -> Policy:
    """The policy that the run, or the one that it was forked from, started from; ValueError where its files are missing or
    damaged."""
    while (parent := parent_of(run)[0]) is not None:
        run = parent
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


def load_kept_state(run: Run, step: int, policy: Policy, optimiser) -> None:
    """The kept state before `step` into policy and optimiser; ValueError for one that is damaged or another model's."""
    folder = run.kept()[step]
    try:
        policy.version = load_state(folder, policy, optimiser)["version"]
    except Exception as error:  # safetensors, json and torch each raise types of their own for a damaged file
        raise ValueError(f"the weights kept in {folder} cannot be read ({error}), or are of another model than "
                         f"{policy.name!r}; without them, replay from another kept step") from error


def longest(groups: Iterable[RecordedGroup]) -> int:
    """Tokens of the longest sequence."""
    return max((len(r.prompt) + len(r.tokens) for g in groups for r in g.group), default=1)


def _difference(row: dict, recorded: dict, step: int) -> str | None:
    """The first number of an update that is not the run's."""
    for name, value in row.items():
        if name in recorded and value == value and recorded[name] != value:
            return (f"the update of step {step} gives {name} {value:.9g}, where the run had {recorded[name]:.9g}: the weights "
                    "are not the run's from there on (another machine or number of threads, or another reference)")
    return None
