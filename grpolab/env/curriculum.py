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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        for name in ("window", "min_tries", "interval"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1")
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

    rates: deque
    tries: int = 0
    last: int = 0
    interval: int = 0
    best: float = 0.0

    @property
    def rate(self) -> float:
        return sum(self.rates) / len(self.rates) if self.rates else 0.0


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
        self._tasks = [task for tier in tiers for task in tier]
        self._levels = [level for level, tier in enumerate(tiers) for _ in tier]
        ends = [sum(map(len, tiers[: level + 1])) for level in range(len(tiers))]
        self._members = [range(end - len(tier), end) for tier, end in zip(tiers, ends)]
        self._places = {_key(task): i for i, task in enumerate(self._tasks)}
        if len(self._places) != len(self._tasks):
            raise ValueError("a task occurs twice; each belongs to one place of one tier")
        self.tier = 0
        self.results = 0
        self._since = 0  # the result with which the newest tier opened
        self._permanent = 0  # tiers up to this one stay open: patience ended below
        self._progress = [self._blank() for _ in self._tasks]

    @property
    def tasks(self) -> tuple:
        """All tasks, tier by tier."""
        return tuple(self._tasks)

    def next_task(self) -> Any:
        """The task to train on now; the same one until a result is recorded."""
        return self.next_tasks(1)[0]

    def next_tasks(self, n: int) -> list[Any]:
        """The `n` most wanted tasks; all different while as many are wanted, then over again. The same ones until a result
        is recorded."""
        rng = random.Random(f"{self.seed}:{self.results}")
        scores = sorted(((self._score(i), rng.random(), i) for i in range(self._members[self.tier].stop)), reverse=True)
        wanted = [i for score, _, i in scores if score >= 0] or [i for *_, i in scores]
        return [self._tasks[wanted[k % len(wanted)]] for k in range(n)]

    def record(self, task: Any, rewards: Sequence[float | None], *, success: float = 1.0) -> float:
        """Log a group's rewards on a task: the share that is at least `success` (None abstains); returns it."""
        rate = success_rate(rewards, success)
        self.record_result(task, rate)
        return rate

    def record_result(self, task: Any, rate: float) -> None:
        """Log a group's rate of success on a task, and let the tier follow."""
        if not 0 <= rate <= 1:
            raise ValueError(f"rate={rate}: a success rate is between 0 and 1 (is this a sum of rewards?)")
        place, config = self._place(task), self.config
        progress = self._progress[place]
        self.results += 1
        progress.rates.append(rate)
        progress.tries += 1
        progress.last = self.results
        progress.best = max(progress.best, rate)
        if not self._settled(progress):
            progress.interval = 0
        elif self._mastered(progress) and rate < config.mastery:
            progress.interval = config.interval
        else:
            progress.interval = min(2 * progress.interval, LONGEST * config.interval) or config.interval
        self._follow()

    def _follow(self) -> None:
        """Open or take back a tier, at most one a result."""
        passed = self._passed(self.tier)
        waited = self.results - self._since >= PATIENCE * self.config.min_tries * len(self._members[self.tier])
        if self.tier + 1 < len(self._members) and (waited or passed):
            self.tier, self._since = self.tier + 1, self.results
            if not passed:
                self._permanent = self.tier
        elif self.tier > self._permanent and self._hopeful_rate(self.tier - 1) < self.config.demote:
            self.tier, self._since = self.tier - 1, self.results

    def _passed(self, level: int) -> bool:
        tried = all(self._progress[i].tries >= self.config.min_tries for i in self._members[level])
        return tried and self._hopeful_rate(level) >= self.config.promote

    def _hopeful_rate(self, level: int) -> float:
        """The mean rate of a tier's tasks that were tried and are not hopeless; 1.0 where there is none."""
        rates = [p.rate for p in (self._progress[i] for i in self._members[level]) if p.tries and not self._hopeless(p)]
        return sum(rates) / len(rates) if rates else 1.0

    def rate(self, task: Any) -> float:
        """Mean of the task's last `window` results; 0.0 when it was never tried."""
        return self._progress[self._place(task)].rate

    def mastered(self, task: Any) -> bool:
        """Whether its recent rate is at least `mastery`; undone by itself when it falls."""
        return self._mastered(self._progress[self._place(task)])

    def hopeless(self, task: Any) -> bool:
        """Whether it was tried `window` times and never succeeded; undone by its first success."""
        return self._hopeless(self._progress[self._place(task)])

    def table(self) -> list[dict]:
        """One row a task: task, tier, open, tries, rate, mastered, hopeless, due, interval."""
        return [{"task": task, "tier": level, "open": level <= self.tier, "tries": p.tries, "rate": p.rate,
                 "mastered": self._mastered(p), "hopeless": self._hopeless(p), "due": self._settled(p) and self._due(p),
                 "interval": p.interval} for task, level, p in zip(self._tasks, self._levels, self._progress)]

    def state(self) -> dict:
        """All that the next tasks depend on beside tiers and config, as plain JSON; its size does not grow with the run."""
        return {"seed": self.seed, "tiers": self._digest(), "results": self.results, "tier": self.tier,
                "since": self._since, "kept": self._permanent,
                "tasks": [[list(p.rates), p.tries, p.last, p.interval, p.best] for p in self._progress]}

    def load(self, state: dict) -> None:
        """Take the place of the curriculum whose `state()` this is; raises ValueError where the tiers are others."""
        if state["tiers"] != self._digest():
            raise ValueError("this state belongs to other tiers: build the curriculum from the tasks that it was saved with")
        self.seed, self.results, self.tier = state["seed"], state["results"], state["tier"]
        self._since, self._permanent = state["since"], state["kept"]
        self._progress = [_Progress(deque(rates, self.config.window), *rest) for rates, *rest in state["tasks"]]

    def _digest(self) -> str:
        tasks = [[level, _key(task)] for level, task in zip(self._levels, self._tasks)]
        return hashlib.sha256(json.dumps(tasks).encode()).hexdigest()

    def _blank(self) -> _Progress:
        return _Progress(deque(maxlen=self.config.window))

    def _place(self, task: Any) -> int:
        place = self._places.get(_key(task))
        if place is None:
            raise ValueError(f"task {task!r:.100} is in no tier of this curriculum")
        return place

    def _mastered(self, progress: _Progress) -> bool:
        return len(progress.rates) >= self.config.min_tries and progress.rate >= self.config.mastery

    def _hopeless(self, progress: _Progress) -> bool:
        return progress.tries >= self.config.window and progress.best == 0.0

    def _settled(self, progress: _Progress) -> bool:
        return self._mastered(progress) or self._hopeless(progress)

    def _due(self, progress: _Progress) -> bool:
        return self.results - progress.last >= progress.interval

    def _score(self, place: int) -> float:
        """How much a task is wanted, below 0 if not at all now. Newer tiers first among equals, since older ones are
        reviewed anyway."""
        config, progress = self.config, self._progress[place]
        age = self.results - progress.last
        recency = min(age / (2 * self._members[self.tier].stop), 1.0) if age else -1.0  # long not seen; none twice in a row
        score = RECENCY * recency + 0.1 * self._levels[place] / len(self._members)
        if progress.tries < config.min_tries:
            return score + NOVELTY * (1 - progress.tries / config.min_tries)
        if self._settled(progress):  # all know it or none does: a group on it has no gradient
            return score + (REVIEW if self._due(progress) else -REVIEW)
        # Weak, but not hopeless: what hardly ever succeeds waits behind what sometimes does.
        return score + (1 - progress.rate) * min(0.3 + 2 * progress.rate, 1.0)


def _key(task: Any) -> str:
    return json.dumps(task, sort_keys=True)
