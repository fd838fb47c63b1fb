"""Which task next. The state is the log of results and nothing else: `record_result` is the only mutation, the next task
is a function of the log and the seed, and a curriculum is restored by reading its log again.

Fed with a group's *rate* of success, not with whether any of its rollouts made it: with G = 8, a policy that succeeds
three times in ten would pass nearly every any-of-8 test.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpolab.files import atomic_write


@dataclass(frozen=True)
class CurriculumConfig:
    """Rates are between 0 and 1; ages and intervals count recorded groups.

    A task's rate is the mean of its last `window` results; it is mastered at `mastery` or above with `min_tries` results.
    A tier is passed when a share `coverage` of its tasks was tried and the mean of their rates is at least `promote`; it
    is taken back when that mean falls below `demote`. A mastered task is due again after `interval`, twice as long each
    time it is still mastered, at most `longest_interval`; a miss starts over.
    """

    window: int = 5
    mastery: float = 0.85
    min_tries: int = 2
    coverage: float = 1.0
    promote: float = 0.7
    demote: float = 0.5
    interval: int = 8
    longest_interval: int = 256
    novelty: float = 2.0
    weakness: float = 1.0
    review: float = 1.5
    recency: float = 0.5

    def __post_init__(self):
        if not 0 <= self.demote < self.promote <= 1:
            raise ValueError(f"demote={self.demote}, promote={self.promote}: need 0 <= demote < promote <= 1")
        for name in ("mastery", "coverage"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share, more than 0 and at most 1")
        for name in ("window", "min_tries", "interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1")
        if self.min_tries > self.window:
            raise ValueError(f"min_tries={self.min_tries} results never fit into window={self.window}")


@dataclass
class _Progress:
    """What the log says of one task."""

    rates: deque
    tries: int = 0
    last: int = 0
    interval: int = 0

    @property
    def rate(self) -> float:
        return sum(self.rates) / len(self.rates) if self.rates else 0.0


class Curriculum:
    """`task = curriculum.next_task(); ...; curriculum.record_result(task, rate)`.

    `tiers`: lists of tasks, the easiest first; a task is any JSON value, unique among all. Tasks come from the tiers
    that are open (0 to `tier`), the most wanted first: new, due for review, weak, long not seen.
    """

    def __init__(self, tiers: Sequence[Sequence[Any]], *, seed: int = 0, config: CurriculumConfig | None = None):
        self.config, self.seed = config or CurriculumConfig(), seed
        if not tiers or not all(tiers):
            raise ValueError(f"tiers={tiers!r:.100}: at least one tier, and at least one task in each")
        self.tiers = [list(tier) for tier in tiers]
        self._tier_of = {_key(task): level for level, tier in enumerate(self.tiers) for task in tier}
        if len(self._tier_of) != sum(map(len, self.tiers)):
            raise ValueError("a task occurs twice; each belongs to one place of one tier")
        self.tier = 0
        self.log: list[tuple[Any, float]] = []
        self._progress = {key: _Progress(deque(maxlen=self.config.window)) for key in self._tier_of}

    def next_task(self) -> Any:
        """The task to train on now; the same one until a result is recorded."""
        return self.next_tasks(1)[0]

    def next_tasks(self, n: int) -> list[Any]:
        """The `n` most wanted tasks, all different; fewer if fewer are open."""
        rng = random.Random(f"{self.seed}:{len(self.log)}")
        wanted = [(self._score(task, level), rng.random(), level, i)
                  for level in range(self.tier + 1) for i, task in enumerate(self.tiers[level])]
        return [self.tiers[level][i] for *_, level, i in sorted(wanted, reverse=True)[:n]]

    def record_result(self, task: Any, rate: float) -> None:
        """Log a group's rate of success on a task, and let the tier follow."""
        if not 0 <= rate <= 1:
            raise ValueError(f"rate={rate}: a success rate is between 0 and 1 (is this a sum of rewards?)")
        key = _key(task)
        if key not in self._progress:
            raise ValueError(f"task {task!r:.100} is in no tier of this curriculum")
        config, progress = self.config, self._progress[key]
        self.log.append((task, rate))
        progress.rates.append(rate)
        progress.tries += 1
        progress.last = len(self.log)
        if self.mastered(task):
            progress.interval = min(2 * progress.interval, config.longest_interval) or config.interval
        if rate < config.mastery:
            progress.interval = config.interval if self.mastered(task) else 0
        if self.tier + 1 < len(self.tiers) and self.tier_rate(self.tier) >= config.promote and self._covered(self.tier):
            self.tier += 1
        elif self.tier > 0 and self.tier_rate(self.tier - 1) < config.demote:
            self.tier -= 1

    def rate(self, task: Any) -> float:
        """Mean of the task's last `window` results; 0.0 when it was never tried."""
        return self._progress[_key(task)].rate

    def mastered(self, task: Any) -> bool:
        """Whether its recent rate is at least `mastery`; undone by itself when it falls."""
        progress = self._progress[_key(task)]
        return len(progress.rates) >= self.config.min_tries and progress.rate >= self.config.mastery

    def due(self, task: Any) -> bool:
        """Whether a mastered task is to be reviewed now."""
        progress = self._progress[_key(task)]
        return self.mastered(task) and len(self.log) - progress.last >= progress.interval

    def tier_rate(self, level: int) -> float:
        """Mean rate of the tasks of a tier that were tried; 0.0 when none was."""
        rates = [p.rate for p in (self._progress[_key(task)] for task in self.tiers[level]) if p.tries]
        return sum(rates) / len(rates) if rates else 0.0

    def table(self) -> list[dict]:
        """One row a task: task, tier, open, tries, rate, mastered, due, interval."""
        return [{"task": task, "tier": level, "open": level <= self.tier, "tries": self._progress[_key(task)].tries,
                 "rate": self.rate(task), "mastered": self.mastered(task), "due": self.due(task),
                 "interval": self._progress[_key(task)].interval}
                for level, tier in enumerate(self.tiers) for task in tier]

    def save(self, path: str | Path) -> Path:
        """Write the log as JSON, atomically."""
        return atomic_write(path, json.dumps({"seed": self.seed, "log": self.log}))

    def restore(self, path: str | Path) -> None:
        """Read a log back into a fresh curriculum of the same tiers; the next task is then the one it would have been."""
        if self.log:
            raise RuntimeError("this curriculum has results already; restore into a fresh one")
        saved = json.loads(Path(path).read_text())
        self.seed = saved["seed"]
        for task, rate in saved["log"]:
            self.record_result(task, rate)

    def state(self) -> dict:
        """All that the next tasks depend on beside tiers and config, as plain JSON."""
        return {"seed": self.seed, "log": self.log}

    def load(self, state: dict) -> None:
        """Take the place of the curriculum whose `state()` this is."""
        self.__init__(self.tiers, seed=state["seed"], config=self.config)
        for task, rate in state["log"]:
            self.record_result(task, rate)

    def _covered(self, level: int) -> bool:
        tried = sum(self._progress[_key(task)].tries >= self.config.min_tries for task in self.tiers[level])
        return tried >= self.config.coverage * len(self.tiers[level])

    def _score(self, task: Any, level: int) -> float:
        """How much a task is wanted. Newer tiers first among equals, since older ones are reviewed anyway."""
        config, progress = self.config, self._progress[_key(task)]
        open_tasks = sum(map(len, self.tiers[: self.tier + 1]))
        age = len(self.log) - progress.last
        recency = min(age / (2 * open_tasks), 1.0) if age else -1.0  # long not seen; and none twice in a row
        score = config.recency * recency + 0.1 * level / len(self.tiers)
        if progress.tries < config.min_tries:
            return score + config.novelty * (1 - progress.tries / config.min_tries)
        if self.mastered(task):
            return score + (config.review if self.due(task) else -config.review)
        # Weak, but not hopeless: a group that never succeeds has no gradient, so it waits behind those that sometimes do.
        return score + config.weakness * (1 - progress.rate) * min(0.3 + 2 * progress.rate, 1.0)


def _key(task: Any) -> str:
    return json.dumps(task, sort_keys=True)
