"""Fresh instances of the templates: other names, counts and regions, drawn from `data/aws/words.json`.

Each kind of slot has a vocabulary for training and one for what is held out, and no value is in both: what a policy does
on held-out instances, it does with names it was never trained on.
"""

from __future__ import annotations

import random
import re

from grpolab.env.aws.tasks import TIERS, Task, Template, templates, words
from grpolab.env.curriculum import Curriculum

SPLITS = ("train", "held_out")


def draw(kind: str, split: str, rng: random.Random) -> str:
    """One value of a kind; KeyError for a kind that words.json lacks."""
    patterns = words()["patterns"]
    if kind in patterns:
        return re.sub("<([a-z]+)>", lambda part: draw(part[1], split, rng), rng.choice(patterns[kind]))
    return rng.choice(words()[kind][split])


def instance(template: str | Template, seed: int | str, split: str = "train") -> Task:
    """One instance of a template, the same for the same seed; the values in its slots are all different."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: the splits are {', '.join(SPLITS)}")
    if isinstance(template, str):
        known = {t.id: t for t in templates()}
        if template not in known:
            raise ValueError(f"there is no template {template!r}; `tasks.template_ids()` lists them")
        template = known[template]
    rng = random.Random(f"{template.id}:{split}:{seed}")
    values: dict[str, str] = {}
    for name, (kind, _) in template.slots.items():
        value = draw(kind, split, rng)
        while value in values.values():
            value = draw(kind, split, rng)
        values[name] = value
    return template.task(values)


def instances(tier: str, n: int, seed: int, split: str = "train") -> list[Task]:
    """`n` different instances of a tier, its templates in turn in an order drawn by `seed`."""
    if tier not in TIERS or n < 0:
        raise ValueError(f"tier={tier!r}, n={n}: the tiers are {', '.join(TIERS)}, and n is at least 0")
    rng = random.Random(f"{tier}:{split}:{seed}")
    of_tier = [t for t in templates() if t.tier == tier]
    tasks: dict[str, Task] = {}
    while len(tasks) < n:
        before = len(tasks)
        for template in rng.sample(of_tier, len(of_tier))[: n - len(tasks)]:
            tries = (instance(template, f"{seed}:{rng.random()}", split) for _ in range(50))
            fresh = next((task for task in tries if task.id not in tasks), None)
            if fresh:
                tasks[fresh.id] = fresh
        if len(tasks) == before:
            raise ValueError(f"n={n}: the tier {tier!r} gave only {before} different instances; ask for fewer, or add words")
    return list(tasks.values())


class FreshTasks(Curriculum):
    """A curriculum of templates as the tasks of `multi_turn_grpo`: what is played is a fresh instance of each template that it
    wants, by its id, and its result is recorded under the template's name.

    What is drawn depends on the seed and the results so far, so that a run that was interrupted asks for the same again."""

    def next_tasks(self, n: int) -> list[str]:
        return [instance(template, f"{self.seed}:{self.results}:{i}").id for i, template in enumerate(super().next_tasks(n))]

    def record_result(self, task: str, rate: float) -> None:
        super().record_result(task.partition("/")[0], rate)
