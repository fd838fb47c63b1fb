"""What would have happened: a run forked at a step with one thing changed, and the step whose update broke a run.

A fork goes on from the run's own weights and optimiser at that step with the same seeds, so that what is not changed stays
the same in every bit; without a change it is the run itself.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpolab.arithmetic import Problem
from grpolab.env.action_format import TEXT, ActionFormat
from grpolab.env.pool import GrpoPool
from grpolab.files import atomic_write, remove_folder
from grpolab.lab import plots
from grpolab.lab.replay import check_seeded
from grpolab.lab.restore import (
    State,
    check_synchronous,
    load_start,
    longest,
    restore,
    rows_of,
    session_at,
    update_again,
    with_threads,
)
from grpolab.models.load import Policy
from grpolab.rollouts import RecordedGroup
from grpolab.runs.checkpoints import plain_config, weights_hash
from grpolab.runs.run import OTHER_START, Run
from grpolab.train.grpo import GRPOConfig, check_reference, describe, grpo, verify_both
from grpolab.train.multiturn import Limits, multi_turn_grpo
from grpolab.train.optimisers import make_optimiser
from grpolab.train.rewards import Reward, finished_and_correct

Edit = Callable[[list[RecordedGroup], State], list[RecordedGroup]]
SAMPLING = {"temperature", "max_new_tokens", "group_size", "prompts_per_step", "refills", "seed"}  # what decides on rollouts


async def fork(run: Run, step: int, name: str, problems: Sequence[Problem], *, reward: Reward = finished_and_correct,
               edit: Edit | None = None, watch=None, reference: Policy | None = None, pool: GrpoPool | None = None,
               limits: Limits | None = None, action_format: ActionFormat = TEXT, **changes: Any) -> Run:
    """The run once more from `step` on, into the folder fork-<name> below its own; returns that Run, whose metrics and record
    begin with what both have in common.

    `problems`, `reward` and `watch` are the run's, or what is changed; `changes` are fields of its configuration (`lr`,
    `clip_eps`, `kl_coef`, `steps` to end earlier, ...). `edit` changes the recorded rollouts of `step` itself before their
    update: `without_group`, `with_advantage`, or a function of your own. The `reference` is the run's start unless another is
    given.

    Episodes need their environment again: a `pool` of it, with the run's `limits` and `action_format`.

    A warning says where the rollouts of `step` are not the run's, which no change of its update can cause, and a printed line
    where their rewards are others. ValueError as in `restore`, and for what the run's kind has no use for."""
    threads = session_at(run, step).get("threads")
    if threads and threads != torch.get_num_threads():
        warnings.warn(f"the run computed with {threads} torch threads and this fork goes on with {torch.get_num_threads()}: "
                      f"last bits may differ without any change; torch.set_num_threads({threads}) takes the run's",
                      stacklevel=2)
    state = await asyncio.to_thread(restore, run, step, reference=reference)
    check_synchronous(state.config, "a fork")
    config = replace(state.config, **changes)
    if not step < config.steps:
        raise ValueError(f"a fork at step {step} has nothing to do up to steps={config.steps}")
    if config.optimiser != state.config.optimiser and step:
        raise ValueError(f"optimiser={config.optimiser!r} cannot go on with the moments of {state.config.optimiser!r}: fork "
                         "from step 0, before there are any")
    lines = list(run.recorder.lines([step]))
    if lines:
        check_seeded(run.recorder.groups(step), step, session_at(run, step))
    episodes = any("turns" in line for line in lines)
    if episodes and (pool is None or watch or reward is not finished_and_correct) or pool is not None and not episodes:
        raise ValueError("the rewards of episodes come from their environment: a run of them is forked with a pool of it, and "
                         "without a reward or watch; other runs have no use for a pool")
    reference = reference or (load_start(run) if config.needs_reference else None)
    forked = run.child(f"fork-{name}")
    with forked.held():
        done = await asyncio.to_thread(with_threads, threads, lambda: _prepare(run, forked, state, config, edit, reference))
    if done == config.steps:
        return forked
    if episodes:
        rows = multi_turn_grpo(state.policy, reference, problems, config, pool, limits=limits, action_format=action_format,
                               run=forked)
    else:
        rows = grpo(state.policy, reference, problems, config, reward=reward, watch=watch, run=forked)
    async for row in rows:
        if row["step"] == step and not SAMPLING & changes.keys():
            _report_differences(run, forked, step)
    return forked


def _report_differences(run: Run, forked: Run, step: int) -> None:
    """Report where the rollouts of the first step of the fork, which no change of its update can reach, are not the run's."""
    columns = ["group", "rollout", "tokens", "reward"]
    both = run.rollouts(step, columns).merge(forked.rollouts(step, columns), on=columns[:2])
    same = both["tokens_x"] == both["tokens_y"]
    if other := (~same).sum():
        warnings.warn(f"{other} of {len(both)} rollouts of step {step} are not the run's, which no change of its update makes: "
                      "were problems, limits, action_format, environment and torch threads the run's?", stacklevel=3)
    if paid := (same & (both["reward_x"] != both["reward_y"])).sum():
        print(f"{paid} of {len(both)} rollouts of step {step} have another reward than in the run")


def _prepare(run: Run, forked: Run, state: State, config: GRPOConfig, edit: Edit | None, reference: Policy | None) -> int:
    """Leave in the fork's folder what an interrupted run would have left, so that a loop goes on there: the steps done."""
    other = forked.differs(config, state.policy)
    if other and not forked.begun_here and (edit is None or other != OTHER_START):  # an edited update is done before it begins
        forked.set_aside(other)
    for earlier in (*forked.folder.glob("checkpoint-*"), forked.folder / "replay", forked.recorder.folder):
        shutil.rmtree(earlier, ignore_errors=True)
    if run.recorder.folder.exists():
        shutil.copytree(run.recorder.folder, forked.recorder.folder)
    forked.recorder.rewind(state.step)
    shutil.copytree(run.replay_states.folder, forked.replay_states.folder)
    for s, folder in forked.kept().items():
        if s > state.step:
            remove_folder(folder)
    rows = {row["step"]: row for row in rows_of(run)}
    forked.metrics = [row for s, row in rows.items() if s < state.step]
    done, policy = state.step, state.policy
    optimiser = state.optimiser if config.optimiser == state.config.optimiser else make_optimiser(policy, config)
    for group in optimiser.param_groups:  # that of the run came with the optimiser's state
        group["weight_decay"] = config.weight_decay
    forked.replay_states.save(done, config, policy, optimiser)
    if edit is not None:
        whole = run.recorder.groups(done)
        used, unused = [g for g in whole if g.used], [g for g in whole if not g.used]
        groups = edit(used, state)
        if not groups:
            raise ValueError(f"the edit leaves nothing of step {done} to learn from")
        check_reference(policy, reference, config)
        verify_both(policy, reference, config, longest(used))
        forked.record(done, policy, [*groups, *unused], session_at(run, done).get("engine", ""))
        row = update_again(policy, reference, groups, config, optimiser, done)
        curriculum = {name: rows[done][name] for name in ("tier", "curriculum") if name in rows.get(done, {})}
        forked.metrics.append({"step": done} | describe([g.trained for g in groups]) | row | curriculum)
        done += 1
    forked.save_checkpoint(done, config, policy, optimiser)
    forked.keep_for_replay(done, config, policy, optimiser)
    note = {"start": weights_hash(policy), "base": policy.name, "config": plain_config(config)}
    atomic_write(forked.folder / "run.json", json.dumps(note, indent=1) + "\n")
    forked.write_table()
    return done


def compare_forks(run: Run, forks: dict[str, Run], column: str = "reward"):
    """One metric of the run and of its forks over steps; returns the Axes."""
    tables = {name: r.table() for name, r in ({"the run": run} | forks).items()}
    title = f"{column} at the end: " + ", ".join(f"{name} {t[column].iloc[-1]:.3g}" for name, t in tables.items())
    return plots.curves(tables, column, title=title, ylabel=column)


# --- one thing changed in a step --------------------------------------------------------------------------------------


def without_group(group: int) -> Edit:
    """Leave a group out of the update."""
    return lambda groups, state: [g for g in groups if g is not _at(groups, group)]


def with_advantage(group: int, rollout: int, value: float) -> Edit:
    """Give one rollout another advantage; those of its group stay as they are."""

    def edit(groups, state):
        changed, others = _at(groups, group), list(_at(groups, group).advantages)
        _at(others, rollout)
        others[rollout] = float(value)
        return [replace(g, advantages=tuple(others)) if g is changed else g for g in groups]

    return edit


def _at(items: Sequence, place: int):
    if not 0 <= place < len(items):
        raise ValueError(f"there is no number {place} among {len(items)}: give one from 0 to {len(items) - 1}")
    return items[place]


# --- the step that broke it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Culprit:
    """The update of `step` took the measure from `before` to `after`. `measured`: state (the steps done) -> value."""

    step: int
    before: float
    after: float
    measured: dict[int, float]

    def __repr__(self):
        return (f"the update of step {self.step} took it from {self.before:.3g} to {self.after:.3g} "
                f"(measured after {', '.join(f'{s}: {v:.3g}' for s, v in sorted(self.measured.items()))} steps)")


async def bisect(run: Run, measure: Callable[[Policy], Any], at_least: float, *, reference: Policy | None = None) -> Culprit:
    """The step whose update took `measure(policy)` (a number, or an await of one) below `at_least`, by halving the run. Where
    it crosses more than once, one of the crossings.

    ValueError where it is below at the start already, or not yet at the end; it names the value."""
    low, high = 0, max(run.recorder.steps(), default=-1) + 1
    measured: dict[int, float] = {}

    async def good(done: int) -> bool:
        state = await asyncio.to_thread(restore, run, done, reference=reference)
        for note in state.notes:
            warnings.warn(note, stacklevel=2)
        value = measure(state.policy)
        measured[done] = float(await value if inspect.isawaitable(value) else value)
        return measured[done] >= at_least

    if not await good(low):
        raise ValueError(f"it is {measured[low]:.3g} after {low} steps, below {at_least} already: ask for less")
    if await good(high):
        raise ValueError(f"it is {measured[high]:.3g} after {high} steps, not below {at_least}: nothing was lost")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await good(middle) else (low, middle)
    return Culprit(high - 1, measured[low], measured[high], measured)
