"""Which task next. `record_result` is the only mutation, the next tasks are a function of the seed and of the results so
far, and `state()` holds all of it as plain JSON, so that a resumed run goes on exactly as it would have.

Fed with a group's *rate* of success, not with whether any of its rollouts made it: with G = 8, a policy that succeeds
three times in ten would pass nearly every any-of-8 test.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpolab.env.protocol import check_counts

PATIENCE = 10  # times the results that passing a tier takes at least; then the next one opens all the same
LONGEST = 32  # times `interval`: the longest pause of a mastered or hopeless task
NOVELTY, REVIEW, RECENCY = 2.0, 1.5, 0.5  # what a new task, a due one and one long not seen weigh beside a weak one's 1


@dataclass(frozen=True)
class CurriculumConfig:
    """Rates are between 0 and 1; intervals count recorded groups.

    A task's rate is the mean of its last `window` results; it is mastered at `mastery` or above with `min_tries` results,
    and hopeless (for now) with `window` results and no success in any. A tier is passed when each of its tasks was tried
    `min_tries` times and the mean rate of those that are not hopeless is at least `promote`; it is taken back when the mean
    of the one below falls under `demote`. A tier that is not passed for long opens the next one all the same, for good. A
    mastered or hopeless task is due again after `interval`, and after twice as long each time that it is still so; a miss of
    a mastered one starts over.
    """

    window: int = 5
    min_tries: int = 2
    mastery: float = 0.85
    promote: float = 0.7
    demote: float = 0.5
    interval: int = 8

    def __post_init__(self):
        if not 0 <= self.demote < self.promote <= 1:
            raise ValueError(f"demote={self.demote}, promote={self.promote}: need 0 <= demote < promote <= 1")
        if not 0 < self.mastery <= 1:
            raise ValueError(f"mastery={self.mastery}: a share, more than 0 and at most 1")
        check_counts(window=self.window, min_tries=self.min_tries, interval=self.interval)
        if self.min_tries > self.window:
            raise ValueError(f"min_tries={self.min_tries} results never fit into window={self.window}")


def success_rate(rewards: Sequence[float | None], success: float = 1.0) -> float:
    """The share of a group's rewards that are at least `success`; a None abstains."""
    counted = [reward for reward in rewards if reward is not None]
    if not counted:
        raise ValueError("no rewards: a group of which nothing finished has no success rate")
    if not all(math.isfinite(reward) for reward in counted):
        raise ValueError(f"rewards={counted}: a reward is a finite number")
    return sum(reward >= success for reward in counted) / len(counted)


@dataclass
class _Progress:
    """What the results say of one task."""

    task: Any
    level: int
    config: CurriculumConfig
    rates: list[float] = field(default_factory=list)  # the last `window`
    tries: int = 0
    last: int = 0  # the result that was its last
    interval: int = 0
    best: float = 0.0

    @property
    def rate(self) -> float:
        return sum(self.rates) / len(self.rates) if self.rates else 0.0

    @property
    def mastered(self) -> bool:
        return len(self.rates) >= self.config.min_tries and self.rate >= self.config.mastery

    @property
    def hopeless(self) -> bool:
        return self.tries >= self.config.window and self.best == 0.0

    def add(self, rate: float, result: int) -> None:
        self.rates = [*self.rates, rate][-self.config.window:]
        self.tries, self.last, self.best = self.tries + 1, result, max(self.best, rate)
        if not (self.mastered or self.hopeless):
            self.interval = 0
        elif self.mastered and rate < self.config.mastery:
            self.interval = self.config.interval
        else:
            self.interval = min(2 * self.interval, LONGEST * self.config.interval) or self.config.interval


class Curriculum:
    """`task = curriculum.next_task(); ...; curriculum.record(task, rewards)`.

    `tiers`: lists of tasks, the easiest first; a task is any JSON value, unique among all. Tasks come from the tiers
    that are open (0 to `tier`), the most wanted first: new, due for review, weak, long not seen. Nothing of a policy's
    learning is known beforehand: a task that never succeeds is put aside and tried ever more rarely, and a tier that
    cannot be passed does not close the ones above it for ever.
    """

    def __init__(self, tiers: Sequence[Sequence[Any]], *, seed: int = 0, config: CurriculumConfig | None = None):
        self.config, self.seed = config or CurriculumConfig(), seed
        if not tiers or not all(tiers):
            raise ValueError(f"tiers={tiers!r:.100}: at least one tier, and at least one task in each")
        self._tiers = [[_Progress(task, level, self.config) for task in tier] for level, tier in enumerate(tiers)]
        self._all = [progress for tier in self._tiers for progress in tier]
        self._by_key = {_key(progress.task): progress for progress in self._all}
        if len(self._by_key) != len(self._all):
            raise ValueError("a task occurs twice; each belongs to one place of one tier")
        self.tier = 0
        self.results = 0
        self._since = 0  # the result with which the newest tier opened
        self._permanent = 0  # tiers up to this one stay open: patience ended below

    def next_task(self) -> Any:
        """The task to train on now; the same one until a result is recorded."""
        return self.next_tasks(1)[0]

    def next_tasks(self, n: int) -> list[Any]:
        """The `n` most wanted tasks; all different while as many are wanted, then over again. The same ones until a result
        is recorded."""
        rng = random.Random(f"{self.seed}:{self.results}")
        tasks = [progress for tier in self._tiers[: self.tier + 1] for progress in tier]
        scores = sorted(((self._score(p, len(tasks)), rng.random(), i) for i, p in enumerate(tasks)), reverse=True)
        wanted = [i for score, _, i in scores if score >= 0] or [i for *_, i in scores]
        return [tasks[wanted[k % len(wanted)]].task for k in range(n)]

    def record(self, task: Any, rewards: Sequence[float | None], *, success: float = 1.0) -> float:
        """Log a group's rewards on a task: the share that is at least `success` (None abstains); returns it."""
        rate = success_rate(rewards, success)
        self.record_result(task, rate)
        return rate

    def record_result(self, task: Any, rate: float) -> None:
        """Log a group's rate of success on a task, and open or take back a tier, at most one."""
        if not 0 <= rate <= 1:
            raise ValueError(f"rate={rate}: a success rate is between 0 and 1 (is this a sum of rewards?)")
        progress, config = self._find(task), self.config
        self.results += 1
        progress.add(rate, self.results)
        newest = self._tiers[self.tier]
        passed = all(p.tries >= config.min_tries for p in newest) and _hopeful_rate(newest) >= config.promote
        waited = self.results - self._since >= PATIENCE * config.min_tries * len(newest)
        if self.tier + 1 < len(self._tiers) and (waited or passed):
            self.tier, self._since = self.tier + 1, self.results
            if not passed:
                self._permanent = self.tier
        elif self.tier > self._permanent and _hopeful_rate(self._tiers[self.tier - 1]) < config.demote:
            self.tier, self._since = self.tier - 1, self.results

    def table(self) -> list[dict]:
        """One row a task: task, tier, open, tries, rate, mastered, hopeless, due, interval."""
        return [{"task": p.task, "tier": p.level, "open": p.level <= self.tier, "tries": p.tries, "rate": p.rate,
                 "mastered": p.mastered, "hopeless": p.hopeless, "due": (p.mastered or p.hopeless) and self._due(p),
                 "interval": p.interval} for p in self._all]

    def state(self) -> dict:
        """All that the next tasks depend on beside tiers and config, as plain JSON; its size does not grow with the run."""
        return {"seed": self.seed, "tiers": self._digest(), "results": self.results, "tier": self.tier,
                "since": self._since, "kept": self._permanent,
                "tasks": [[p.rates, p.tries, p.last, p.interval, p.best] for p in self._all]}

    def load(self, state: dict) -> None:
        """Take the place of the curriculum whose `state()` this is; raises ValueError where the tiers are others."""
        if state["tiers"] != self._digest():
            raise ValueError("this state belongs to other tiers: build the curriculum from the tasks that it was saved with")
        self.seed, self.results, self.tier = state["seed"], state["results"], state["tier"]
        self._since, self._permanent = state["since"], state["kept"]
        for p, values in zip(self._all, state["tasks"], strict=True):
            p.rates, p.tries, p.last, p.interval, p.best = values

    def _digest(self) -> str:
        tasks = [[progress.level, _key(progress.task)] for progress in self._all]
        return hashlib.sha256(json.dumps(tasks).encode()).hexdigest()

    def _find(self, task: Any) -> _Progress:
        progress = self._by_key.get(_key(task))
        if progress is None:
            raise ValueError(f"task {task!r:.100} is in no tier of this curriculum")
        return progress

    def _due(self, progress: _Progress) -> bool:
        return self.results - progress.last >= progress.interval

    def _score(self, progress: _Progress, open_tasks: int) -> float:
        """How much a task is wanted, below 0 if not at all now. Newer tiers first among equals, since older ones are
        reviewed anyway."""
        age = self.results - progress.last
        recency = min(age / (2 * open_tasks), 1.0) if age else -1.0  # long not seen; none twice in a row
        score = RECENCY * recency + 0.1 * progress.level / len(self._tiers)
        if progress.tries < self.config.min_tries:
            return score + NOVELTY * (1 - progress.tries / self.config.min_tries)
        if progress.mastered or progress.hopeless:  # all know it or none does: a group on it has no gradient
            return score + (REVIEW if self._due(progress) else -REVIEW)
        # Weak, but not hopeless: what hardly ever succeeds waits behind what sometimes does.
        return score + (1 - progress.rate) * min(0.3 + 2 * progress.rate, 1.0)


def _hopeful_rate(tier: Sequence[_Progress]) -> float:
    """The mean rate of a tier's tasks that were tried and are not hopeless; 1.0 where there is none."""
    rates = [progress.rate for progress in tier if progress.tries and not progress.hopeless]
    return sum(rates) / len(rates) if rates else 1.0


def _key(task: Any) -> str:
    return json.dumps(task, sort_keys=True)
