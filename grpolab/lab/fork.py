"""What would have happened: a run forked at a step with one thing changed, and the step whose update broke a run.

A fork goes on from the run's own weights and optimiser at that step with the same seeds, so that what is not changed stays
the same in every bit; without a change it is the run itself.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import torch

from grpolab.arithmetic import Problem
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import atomic_write
from grpolab.lab import plots
from grpolab.lab.rebuild import FORKED, State, eras_of, load_kept, longest, metrics_of, rebuild, with_threads
from grpolab.lab.replay import sitting_of
from grpolab.lab.rescore import as_problem
from grpolab.lab.run import Run
from grpolab.lab.states import weights_hash
from grpolab.models import Policy
from grpolab.rollouts import Group, RecordedGroup
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.grpo import GRPOConfig, check_reference, describe, grpo, grpo_update, prove_both, trainer_logps
from grpolab.train.rewards import Reward, finished_and_correct

Edit = Callable[[list[RecordedGroup], State], list[RecordedGroup]]


async def fork(run: Run, step: int, name: str, problems: Sequence[Problem], *, reward: Reward = finished_and_correct,
               edit: Edit | None = None, watch=None, reference: Policy | None = None, **changes: Any) -> Run:
    """The run once more from `step` on, into the folder fork-<name> below its own; returns that Run, whose metrics and record
    begin with what both have in common.

    `problems`, `reward` and `watch` are the run's, or what is changed; `changes` are fields of its configuration (`lr`,
    `clip_eps`, `kl_coef`, `steps` to end earlier, ...). `edit` changes the recorded rollouts of `step` itself before their
    update: `without_group`, `with_advantage`, `with_token`, or a function of your own. The `reference` is the run's start
    unless another is given. ValueError as in `rebuild`, and for a run of episodes, whose environment is not on the record."""
    threads = _threads_of(run, step)
    state = await asyncio.to_thread(with_threads, threads, lambda: rebuild(run, step, reference=reference))
    config = replace(state.config, **changes)
    if not step < config.steps:
        raise ValueError(f"a fork at step {step} has nothing to do up to steps={config.steps}")
    if any("turns" in line for line in run.recorder.lines([step])):
        raise ValueError("this run is one of episodes, and their environment is not on the record: fork a run of grpo")
    reference = reference or (load_kept(run) if config.kl_coef else None)
    twin = Run(f"fork-{name}", root=run.folder, keep=run.recorder.keep, replay_every=run.weights.every)
    with twin.held():
        done = await asyncio.to_thread(with_threads, threads, lambda: _prepare(run, twin, state, config, edit, reference))
    if done < config.steps:
        async for _ in grpo(state.policy, reference, problems, config, reward=reward, watch=watch, run=twin):
            pass
    return twin


def _prepare(run: Run, twin: Run, state: State, config: GRPOConfig, edit: Edit | None, reference: Policy | None) -> int:
    """Leave in the twin's folder what an interrupted run would have left, so that a loop goes on there: the steps done."""
    for left in (*twin.folder.glob("checkpoint-*"), twin.folder / "replay", twin.recorder.folder):
        shutil.rmtree(left, ignore_errors=True)
    if run.recorder.folder.exists():
        shutil.copytree(run.recorder.folder, twin.recorder.folder)
    twin.recorder.rewind(state.step)
    for part in {run.kept()[state.kept], run.folder / "replay" / "policy", *(d for s, d in run.kept().items() if s == 0)}:
        shutil.copytree(part, twin.folder / "replay" / part.name, copy_function=_link)
    eras = [(end, asdict(c)) for end, c in eras_of(run)]
    before = [(min(end, state.step), c) for i, (end, c) in enumerate(eras) if not i or eras[i - 1][0] < state.step]
    atomic_write(twin.folder / FORKED, json.dumps(before) + "\n")
    rows = run.metrics or [{"step": s} | row for s, row in metrics_of(run).items()]
    twin.metrics = [dict(row) for row in rows if row["step"] < state.step]
    done, policy = state.step, state.policy
    if edit is not None:
        recorded = [g for g in run.recorder.whole(state.step) if g.used]
        groups = edit(recorded, state)
        check_reference(policy, reference, config)
        prove_both(policy, reference, config, longest([recorded]))
        twin.record(done, policy, groups, sitting_of(run.recorder.sittings(), done).get("engine", ""))
        a = torch.tensor([g.advantages for g in groups])
        trained = [g.trained for g in groups]
        twin.metrics.append({"step": done} | describe(trained)
                            | grpo_update(policy, reference, trained, config, state.optimiser, done, a))  # fmt: skip
        done += 1
    twin.save_checkpoint(done, config, policy, state.optimiser)
    note = {"start": weights_hash(policy), "base": policy.name}
    atomic_write(twin.folder / "run.json", json.dumps(note, indent=1) + "\n")
    twin._write_table()
    return done


def _link(source: str, target: str) -> None:
    """The same file under a second name: kept weights are never changed in place. A copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _threads_of(run: Run, step: int) -> int | None:
    threads = sitting_of(run.recorder.sittings(), step).get("threads")
    if threads and threads != torch.get_num_threads():
        warnings.warn(f"the run computed with {threads} torch threads and this fork goes on with {torch.get_num_threads()}: "
                      f"last bits may differ without any change; torch.set_num_threads({threads}) takes the run's",
                      stacklevel=3)
    return threads


def futures(run: Run, twins: dict[str, Run], column: str = "reward", *, window: int = 1, ax=None):
    """One metric of the run and of its forks over steps; returns the Axes."""
    known = {"the run": run.metrics or [{"step": s} | row for s, row in metrics_of(run).items()]}
    tables = {name: pd.DataFrame(rows) for name, rows in (known | {n: t.metrics for n, t in twins.items()}).items()}
    palette = (plots.POLICY, plots.WARNING, plots.REWARD, plots.PURPLE, plots.SKY)
    colors = dict(zip(tables, palette * (len(tables) // len(palette) + 1)))
    title = f"{column} at the end: " + ", ".join(f"{name} {t[column].iloc[-1]:.3g}" for name, t in tables.items())
    return plots.curves(tables, column, title=title, ylabel=column, colors=colors, window=window, ax=ax)


# --- one thing changed in a step --------------------------------------------------------------------------------------


def without_group(group: int) -> Edit:
    """Leave a group out of the update."""
    return lambda groups, state: [g for i, g in enumerate(groups) if i != _checked(group, groups)]


def with_advantage(group: int, rollout: int, value: float) -> Edit:
    """Give one rollout another advantage; those of its group stay as they are."""

    def edit(groups, state):
        g = groups[_checked(group, groups)]
        a = tuple(float(value) if i == _checked(rollout, g.advantages) else x for i, x in enumerate(g.advantages))
        return [replace(g, advantages=a) if i == group else other for i, other in enumerate(groups)]

    return edit


def with_token(group: int, rollout: int, position: int, token: int, reward: Reward = finished_and_correct) -> Edit:
    """Force one token of a rollout's completion and let the policy go on from there with the same random numbers; reward and
    advantages of the group follow. The update treats the token as sampled, with the probability that it had."""

    def edit(groups, state):
        g = groups[_checked(group, groups)]
        r = g.group[_checked(rollout, g.group.rollouts)]
        head = r.tokens[: _checked(position, r.tokens)] + (token,)
        left = state.config.max_new_tokens - len(head)
        policy, params = state.policy, SamplingParams(temperature=state.config.temperature, max_new_tokens=max(1, left))
        if token in policy.eos_ids or not left:
            tail, reason = None, "eos" if token in policy.eos_ids else "length"
        else:
            with Sampler(policy, exact=state.config.exact) as sampler:
                tail = sampler.submit([r.prompt + head], params=params, seeds=[[r.seed]]).result()[0][0]
            reason = tail.finish_reason
        more = tail.tokens if tail else ()
        zeros = (0.0,) * len(head + more)
        new = replace(r, tokens=head + more, mask=(1,) * len(zeros), logps=zeros, raw_logps=zeros, kept_mass=(),
                      finish_reason=reason)  # fmt: skip
        forced = trainer_logps(policy, [new], state.config)[0][position]
        logps = (*r.logps[:position], forced, *(tail.logps if tail else ()))
        new = replace(new, logps=logps, raw_logps=logps)
        new = replace(new, reward=reward(policy.decode(new.tokens), as_problem(g.problem), new))
        members = Group(tuple(new if i == rollout else other for i, other in enumerate(g.group)))
        a = advantages(reward_tensor([members.rewards]), state.config.advantage_kind)[0].tolist()
        return [replace(g, group=members, advantages=tuple(a), parts={}) if i == group else x for i, x in enumerate(groups)]

    return edit


def _checked(place: int, among: Sequence) -> int:
    if not 0 <= place < len(among):
        raise ValueError(f"there is no number {place} among {len(among)}: give one from 0 to {len(among) - 1}")
    return place


# --- the step that broke it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Culprit:
    """The update of `step` took the measure from `before` to `after`. `measured`: state (the steps done) -> value."""

    step: int
    before: float
    after: float
    measured: dict[int, float]

    def __str__(self):
        return (f"the update of step {self.step} took it from {self.before:.3g} to {self.after:.3g} "
                f"(measured after {', '.join(f'{s}: {v:.3g}' for s, v in sorted(self.measured.items()))} steps)")

    __repr__ = __str__


async def bisect(run: Run, measure: Callable[[Policy], Any], at_least: float, *, low: int = 0, high: int | None = None,
                 reference: Policy | None = None) -> Culprit:
    """The step whose update took `measure(policy)` (a number, or an await of one) below `at_least`, by halving between `low`
    and `high` steps done (None: all that the record has). Where it crosses more than once, one of the crossings.

    ValueError where it is below at `low` already, or not yet at `high`; it names the value."""
    steps = run.recorder.steps()
    high = high if high is not None else (steps[-1] + 1 if steps else 0)
    measured: dict[int, float] = {}

    async def good(done: int) -> bool:
        threads = sitting_of(run.recorder.sittings(), done).get("threads")
        state = await asyncio.to_thread(with_threads, threads, lambda: rebuild(run, done, reference=reference))
        for note in state.notes:
            warnings.warn(note, stacklevel=2)
        value = measure(state.policy)
        measured[done] = float(await value if inspect.isawaitable(value) else value)
        return measured[done] >= at_least

    if not await good(low):
        raise ValueError(f"it is {measured[low]:.3g} after {low} steps, below {at_least} already: begin earlier, ask for less")
    if await good(high):
        raise ValueError(f"it is {measured[high]:.3g} after {high} steps, not below {at_least}: nothing was lost")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await good(middle) else (low, middle)
    return Culprit(high - 1, measured[low], measured[high], measured)
