"""Another reward over a recorded run, before it is trained with: the rewards and advantages that it would have given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpolab.arithmetic import Problem
from grpolab.lab import plots
from grpolab.lab.restore import config_of
from grpolab.rollouts import RecordedGroup
from grpolab.runs.run import Run
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.rewards import Reward, report, score
from grpolab.train.several_rewards import check_sum


@dataclass(frozen=True)
class Rescored:
    """`rollouts`: a row each, with reward and advantage as recorded and `rescored_reward`, `rescored_advantage`. `groups`: a
    row each: `turned`, the number of its rollouts whose advantage got the opposite sign, `gained` and `lost`, whether it has
    a signal (rewards that differ) only under the new reward, or only under the old."""

    rollouts: pd.DataFrame
    groups: pd.DataFrame

    @property
    def changed(self) -> int:
        """How many groups would have changed sign: some rollout pushed the other way."""
        return int((self.groups["turned"] > 0).sum())

    def __str__(self):
        g, r = self.groups, self.rollouts
        return (
            f"{len(r)} rollouts in {len(g)} groups of {r['step'].nunique()} steps: mean reward {r['reward'].mean():.3f} → "
            f"{r['rescored_reward'].mean():.3f}. In {self.changed} groups ({self.changed / len(g):.0%}) some rollout would "
            f"have been pushed the other way; {int(g['gained'].sum())} groups would have gained a signal, "
            f"{int(g['lost'].sum())} lost theirs"
        )

    __repr__ = __str__

    def plot(self):
        """Both mean rewards over steps; returns the Axes."""
        means = self.rollouts.groupby("step", as_index=False)[["reward", "rescored_reward"]].mean()
        runs = {"recorded": means, "rescored": means.assign(reward=means["rescored_reward"])}
        title = f"{self.changed} of {len(self.groups)} groups would have changed sign"
        return plots.curves(runs, "reward", title=title, ylabel="mean reward")


def rescore(run: Run, reward: Reward, *, steps: Iterable[int] | None = None) -> Rescored:
    """Ask `reward(text, problem, rollout)` for every recorded rollout (of `steps`), as training would; an async one, and one
    with a method `batch(texts, problems, rollouts)`, is asked a step at a time. Where it raises, that rollout has no reward
    and a warning says so; where it does for all of a step, that is raised.

    The text is the whole completion; of an episode, with the text of the environment. Nothing is sampled: the result is the
    reward of these rollouts, not of those that training on it would have produced."""
    check_sum(reward)
    kind = config_of(run).advantage_kind
    table = run.rollouts(steps, ["step", "group", "rollout", "completion", "reward", "advantage"])
    if table.empty:
        raise ValueError(f"{run.shown(run.folder)} has no recorded rollouts of these steps: grpo and "
                         "multi_turn_grpo leave them, unless keep='none'")
    rewards, rescored, reported = [], [], []
    for step, rows in table.groupby("step"):
        groups, faults = run.recorder.groups(step), []
        texts = [of["completion"].tolist() for _, of in rows.groupby("group")]
        new = _scored(reward, texts, groups, faults)
        report(faults, sum(r.finish_reason != "lost" for g in groups for r in g.group), reported)
        rewards += [x for of in new for x in of]
        rescored += [a for of in _advantages(groups, new, kind) for a in of]
    table = table.astype({"reward": float}).assign(rescored_reward=pd.Series(rewards, dtype=float), rescored_advantage=rescored)
    signal = table.assign(turned=table["advantage"] * table["rescored_advantage"] < 0, old=table["advantage"] != 0,
                          new=table["rescored_advantage"] != 0)
    by_group = signal.groupby(["step", "group"]).agg(turned=("turned", "sum"), old=("old", "any"), new=("new", "any"))
    by_group = by_group.assign(gained=by_group["new"] & ~by_group["old"], lost=by_group["old"] & ~by_group["new"])
    return Rescored(table, by_group[["turned", "gained", "lost"]].reset_index())


def _scored(reward: Reward, texts: list[list[str]], groups: list[RecordedGroup], faults: list[Exception]) -> list[list]:
    """The reward of each rollout of these groups, whose completions are `texts`; None for a lost one."""
    there = [[i for i, r in enumerate(g.group) if r.finish_reason != "lost"] for g in groups]
    written = [of[i] for of, places in zip(texts, there) for i in places]
    rollouts = [[g.group[i] for i in places] for g, places in zip(groups, there)]
    scored = score(None, [as_problem(g.problem) for g in groups], rollouts, reward, faults, written)
    rewards = [dict(zip(places, g.rewards)) for places, g in zip(there, scored)]
    return [[of.get(i) for i in range(len(g.group))] for g, of in zip(groups, rewards)]


def _advantages(groups: list[RecordedGroup], rewards: list[list], kind: str) -> list[list[float]]:
    """Those of a step under these rewards; groups that the update did not get are by themselves."""
    new: list[list[float]] = [[]] * len(groups)
    for used in (True, False):
        places = [i for i, g in enumerate(groups) if g.used is used]
        sources = [rewarded_at(groups[i]) for i in places]
        rows = [[None if at is None else rewards[i][at] for at in dict.fromkeys(of)] for i, of in zip(places, sources)]
        width = max(map(len, rows), default=0)
        rows = [row + [None] * (width - len(row)) for row in rows]
        for i, of, row in zip(places, sources, advantages(reward_tensor(rows), kind).tolist() if rows else ()):
            by_place = dict(zip(dict.fromkeys(of), row)) | {None: 0.0}
            new[i] = [by_place[at] for at in of]
    return new


def rewarded_at(g: RecordedGroup) -> list[int | None]:
    """For each rollout, the place of the one whose reward it shares: itself, or the last of its agent's run; None where the
    update did not get it."""
    runs = g.parts.get("run") if not g.turns else None
    last = {run: i for i, run in enumerate(runs)} if runs else {}
    absent = g.absent or (False,) * len(g.group)
    return [None if absent[i] else last[runs[i]] if runs else i for i in range(len(g.group))]


def as_problem(problem: Any) -> Any:
    """A recorded question as the reward knew it: a Problem where it was one, else the JSON value of the task."""
    return Problem(**problem) if isinstance(problem, dict) and problem.keys() == {"a", "op", "b"} else problem
