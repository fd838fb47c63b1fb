"""Another reward over a recorded run, before it is trained with: the rewards and advantages that it would have given."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpolab.arithmetic import Problem
from grpolab.lab import plots
from grpolab.lab.restore import config_of
from grpolab.rollouts import RecordedGroup
from grpolab.runs.rollout_log import recorded
from grpolab.runs.run import Run
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.rewards import Faults, Reward, ask_any, report


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

    def plot(self, ax=None):
        """Both mean rewards over steps; returns the Axes."""
        by_step = self.rollouts.groupby("step")[["reward", "rescored_reward"]].mean().reset_index()
        tables = {"recorded": by_step[["step", "reward"]],
                  "rescored": by_step[["step", "rescored_reward"]].set_axis(["step", "reward"], axis=1)}
        return plots.curves(tables, "reward", title=f"{self.changed} of {len(self.groups)} groups would have changed sign",
                            ylabel="mean reward", colors={"recorded": plots.REWARD, "rescored": plots.WARNING}, ax=ax)


def rescore(run: Run, reward: Reward, *, steps: Iterable[int] | None = None, kind: str | None = None) -> Rescored:
    """Ask `reward(text, problem, rollout)` for every recorded rollout (of `steps`), as training would; an async one, and one
    with a method `batch(texts, problems, rollouts)`, is asked a step at a time. Where it raises, that rollout has no reward
    and a warning says so; where it does for all of a step, that is raised. `kind` of advantage: the run's, or another.

    The text is the whole completion; of an episode, with the text of the environment. Nothing is sampled: the result is the
    reward of these rollouts, not of those that training on it would have produced."""
    config = config_of(run)
    kind = kind or config.advantage_kind
    lines: dict[int, list[dict]] = {}
    for line in run.recorder.lines(steps, tell=warnings.warn):
        lines.setdefault(line["step"], []).append(line)
    if not lines:
        raise ValueError(f"{run.shown(run.folder)} has no recorded rollouts of these steps: grpo and "
                         "multi_turn_grpo leave them, unless keep='none'")
    rollouts, groups, reported = [], [], []
    for step, members in lines.items():
        found, faults = [recorded(line) for line in members], Faults()
        new = score_recorded(reward, [line["completion"] for line in members], found, faults)
        report(faults, sum(r.finish_reason != "lost" for g in found for r in g.group), reported)
        for line, g, rewards, a, was in zip(members, found, new, *_advantages(found, new, kind)):
            head = {"step": step, "group": line["group"]}
            rollouts += [
                head | {"rollout": i, "completion": line["completion"][i], "reward": r.reward, "rescored_reward": rewards[i],
                        "advantage": was[i], "rescored_advantage": a[i]} for i, r in enumerate(g.group)
            ]
            groups.append(head | {"turned": sum(x * y < 0 for x, y in zip(was, a)), "gained": any(a) and not any(was),
                                  "lost": any(was) and not any(a)})
    table = pd.DataFrame(rollouts).astype({"reward": float, "rescored_reward": float})
    return Rescored(table, pd.DataFrame(groups))


def score_recorded(reward: Reward, texts: list[list[str]], groups: list[RecordedGroup],
                   faults: Faults | None = None) -> list[list]:
    """The reward of each rollout of these groups, whose completions are `texts`; None for a lost one."""
    there = [[i for i, r in enumerate(g.group) if r.finish_reason != "lost"] for g in groups]
    rows, written = [as_problem(g.problem) for g in groups], [[ts[i] for i in places] for ts, places in zip(texts, there)]
    found = ask_any(reward, written, rows, [[g.group[i] for i in places] for g, places in zip(groups, there)], faults)
    paid = [dict(zip(places, values)) for places, values in zip(there, found)]
    return [[by.get(i) for i in range(len(g.group))] for g, by in zip(groups, paid)]


def _advantages(groups: list[RecordedGroup], rewards: list[list], kind: str) -> tuple[list, list]:
    """Those of a step under the new rewards, and as recorded, which an edited fork may have of its own; a group that the
    update did not get is by itself."""
    new: list[list[float]] = [[]] * len(groups)
    for used in (True, False):
        places = [i for i, g in enumerate(groups) if g.used is used]
        units = [units_of(groups[i]) for i in places]
        rows = [[None if u is None else rewards[i][u] for u in dict.fromkeys(of)] for i, of in zip(places, units)]
        width = max(map(len, rows), default=0)
        rows = [row + [None] * (width - len(row)) for row in rows]
        for i, of, row in zip(places, units, advantages(reward_tensor(rows), kind).tolist() if rows else ()):
            by_unit = dict(zip(dict.fromkeys(of), row))
            new[i] = [0.0 if u is None else by_unit[u] for u in of]
    return new, [list(g.advantages) for g in groups]


def units_of(g: RecordedGroup) -> list[int | None]:
    """For each rollout, the place of the one whose reward it shares: itself, or the last of its agent's run; None where the
    update did not get it."""
    runs = g.parts.get("run") if not g.turns else None
    last = {run: i for i, run in enumerate(runs)} if runs else {}
    absent = g.absent or (False,) * len(g.group)
    return [None if absent[i] else last[runs[i]] if runs else i for i in range(len(g.group))]


def as_problem(problem: Any) -> Any:
    """A recorded question as the reward knew it: a Problem where it was one, else the JSON value of the task."""
    return Problem(**problem) if isinstance(problem, dict) and problem.keys() == {"a", "op", "b"} else problem
