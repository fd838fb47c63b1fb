"""Another reward over a recorded run, before a training run is spent on it: what it would have paid, and whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpolab.arithmetic import Problem
from grpolab.lab import plots
from grpolab.lab.rebuild import config_of
from grpolab.lab.record import recorded
from grpolab.lab.run import Run
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.rewards import Reward, ask_all


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
                  "rescored": by_step[["step", "rescored_reward"]].set_axis(["step", "reward"], axis=1)}  # fmt: skip
        return plots.curves(tables, "reward", title=f"{self.changed} of {len(self.groups)} groups would have changed sign",
                            ylabel="mean reward", colors={"recorded": plots.REWARD, "rescored": plots.WARNING}, ax=ax)


def rescore(run: Run, reward: Reward, *, steps: Iterable[int] | None = None, kind: str | None = None) -> Rescored:
    """Ask `reward(text, problem, rollout)` for every recorded rollout (of `steps`), as training would; one with a method
    `batch(texts, problems, rollouts)` is asked a step at a time. `kind` of advantage: the run's, or another.

    The text is the whole completion; of an episode, with what the environment said. Nothing is sampled: it tells what the
    reward would have made of these rollouts, not of those that training on it would have led to."""
    kind = kind or config_of(run).advantage_kind
    lines: dict[int, list[dict]] = {}
    for line in run.recorder.lines(steps):
        lines.setdefault(line["step"], []).append(line)
    if not lines:
        raise ValueError(f"{run.shown(run.folder)} has no recorded rollouts of these steps: it needs keep='all' or a number")
    rollouts, groups = [], []
    for step, members in lines.items():
        found = [recorded(line) for line in members]
        new = ask_all(reward, [line["completion"] for line in members], [as_problem(g.problem) for g in found],
                      [g.group.rollouts for g in found])  # fmt: skip
        for line, g, rewards in zip(members, found, new):
            a = advantages(reward_tensor([rewards]), kind)[0].tolist()
            was = advantages(reward_tensor([g.group.rewards]), kind)[0].tolist()
            head = {"step": step, "group": line["group"]}
            rollouts += [
                head | {"rollout": i, "completion": line["completion"][i], "reward": r.reward, "rescored_reward": rewards[i],
                        "advantage": was[i], "rescored_advantage": a[i]} for i, r in enumerate(g.group)
            ]  # fmt: skip
            groups.append(head | {"turned": sum(x * y < 0 for x, y in zip(was, a)), "gained": any(a) and not any(was),
                                  "lost": any(was) and not any(a)})  # fmt: skip
    table = pd.DataFrame(rollouts).astype({"reward": float, "rescored_reward": float})
    return Rescored(table, pd.DataFrame(groups))


def as_problem(problem: Any) -> Any:
    """A recorded question as the reward knew it: a Problem where it was one, else the JSON value of the task."""
    return Problem(**problem) if isinstance(problem, dict) and problem.keys() == {"a", "op", "b"} else problem
