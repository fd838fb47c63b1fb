"""Tasks in an AWS account: what is asked, how the account is prepared, and what must hold in the end.

They lie in `data/aws/TIER.jsonl`, one template a line, with `<slots>` in its texts; a template filled with values is a
`Task`. `load_tasks` fills each with the values that stand beside it, `generate.instances` with fresh ones, drawn from
`data/aws/words.json`. `criteria` describes what a criterion is.

A template has id, description, services, setup, criteria and solution (a reference), and `slots`: name -> [kind, value].
A line of a solution may take an id from the JSON that an earlier line printed, by JMESPath: `<1:Keys[0].KeyId>` is found in the
output of the first line.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jmespath

from grpolab.env.aws.criteria import check_criterion
from grpolab.env.aws.options import TIERS
from grpolab.files import data_path
from grpolab.tool_calls import mapped

_SLOT = re.compile(r"<([a-z][a-z0-9_]*)>")
_REFERENCE = re.compile(r"<([0-9]+):([^<>]+)>")  # to an id in an earlier output
_NEEDS = {"id", "description", "services", "setup", "criteria", "solution", "slots"}


@dataclass(frozen=True)
class Task:
    """One task. `setup`, `solution` and `drifts` are `aws …` lines; `criteria` are the grader's (`grader.grade`).

    A drift task is prepared by `setup`, which reaches what is asked for, and by some of `drifts` (`pick_drifts`), each of
    which spoils something; line i of its solution repairs drift i.
    """

    id: str
    tier: str
    description: str
    services: tuple[str, ...]
    setup: tuple[str, ...]
    drifts: tuple[str, ...] = ()
    criteria: tuple[dict, ...] = field(default=(), repr=False, hash=False)
    solution: tuple[str, ...] = field(default=(), repr=False)

    @property
    def template(self) -> str:
        """The id of the template that this is an instance of: a curriculum's key, since an instance hardly comes twice."""
        return self.id.partition("/")[0]

    def shown(self) -> dict[str, Any]:
        """What the one who solves it may see, as plain JSON: neither criteria nor solution, nor what was spoilt. And no id,
        since an instance's holds the values of all its slots, those too that are to be found out."""
        return {"template": self.template, "tier": self.tier, "description": self.description}


@dataclass(frozen=True)
class Template:
    """A line of `data/aws`: a task with slots. `slots` are name -> (kind, own value), and kinds stand in words.json."""

    id: str
    tier: str
    slots: Mapping[str, tuple[str, str]] = field(hash=False)
    row: Mapping[str, Any] = field(repr=False, hash=False)

    def task(self, values: Mapping[str, str], id: str | None = None) -> Task:
        """The task with these values in the slots, named after them unless `id` says otherwise."""
        if set(values) != set(self.slots):
            raise ValueError(f"template {self.id!r} has the slots {sorted(self.slots)}, got values for {sorted(values)}")
        fill = partial(mapped, change=lambda text: _SLOT.sub(lambda slot: values[slot[1]], text))
        row = fill({k: self.row[k] for k in ("description", "setup", "criteria", "solution")})
        return Task(id or f"{self.id}/{','.join(values.values())}", self.tier, row["description"], tuple(self.row["services"]),
                    tuple(row["setup"]), tuple(fill(self.row.get("drifts", []))), tuple(row["criteria"]),
                    tuple(row["solution"]))

    def own_task(self) -> Task:
        """The task with the values that stand in the data, under the template's id."""
        return self.task({name: value for name, (_, value) in self.slots.items()}, self.id)


@cache
def words() -> Mapping[str, Any]:
    """Kind of slot -> split -> values, and under `patterns` kind -> texts that are put together, such as "<noun>.txt"."""
    return json.loads(data_path("aws", "words.json").read_text(encoding="utf-8"))


@cache
def templates() -> tuple[Template, ...]:
    """All templates, tier by tier; ValueError that names the file and the line of one that is wrong."""
    by_id: dict[str, Template] = {}
    for tier in TIERS:
        path = data_path("aws", f"{tier}.jsonl")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
                check_template(row)
                if row["id"] in by_id:
                    raise ValueError(f"the id {row['id']!r} is there twice")
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: not a template ({error})") from error
            slots = {name: (kind, value) for name, (kind, value) in row["slots"].items()}
            by_id[row["id"]] = Template(row["id"], tier, slots, row)
    return tuple(by_id.values())


def check_template(row: Any) -> None:
    """Raise ValueError for what is wrong with a row of data/aws."""
    if not isinstance(row, dict) or set(row) - {"drifts"} != _NEEDS:
        raise ValueError(f"it needs {sorted(_NEEDS)}, and may have drifts")
    texts = json.dumps([row["description"], row["setup"], row["criteria"], row["solution"], row.get("drifts", [])])
    if set(_SLOT.findall(texts)) != set(row["slots"]):
        raise ValueError(f"its texts use {sorted(set(_SLOT.findall(texts)))}, its slots are {sorted(row['slots'])}")
    kinds = {*words(), *words()["patterns"]} - {"patterns"}
    for name, (kind, _) in row["slots"].items():
        if kind not in kinds:
            raise ValueError(f"the slot {name!r} is of the unknown kind {kind!r}; words.json has {', '.join(sorted(kinds))}")
    for criterion in row["criteria"]:
        check_criterion(criterion)
    if all(criterion.get("keep") for criterion in row["criteria"]):
        raise ValueError("it has no criterion to reach: each has keep, or there is none")
    if not row["solution"]:
        raise ValueError("it has no solution")
    for line in [*row["setup"], *row["solution"], *row.get("drifts", [])]:
        if not line.startswith("aws "):
            raise ValueError(f"{line!r} is no 'aws …' line")


def load_tasks(tier: str | None = None) -> tuple[Task, ...]:
    """The tasks as they stand in the data, of one tier or of all: each template with its own values, its id the template's."""
    if tier is not None and tier not in TIERS:
        raise ValueError(f"tier={tier!r}: the tiers are {', '.join(TIERS)}")
    return tuple(t.own_task() for t in templates() if tier in (None, t.tier))


def template_ids(*tiers: str) -> list[list[str]]:
    """The ids of the templates of these tiers, or of all: the tiers of a `Curriculum`, whose tasks are then templates."""
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown:
        raise ValueError(f"tiers {unknown}: the tiers are {', '.join(TIERS)}")
    return [[t.id for t in templates() if t.tier == tier] for tier in tiers or TIERS]


def pick_drifts(task: Task, seed: int) -> tuple[int, ...]:
    """Two or three of a task's drifts, by position and in order, the same for the same task and seed; () where it has none."""
    if not task.drifts:
        return ()
    rng = random.Random(f"{task.id}:{seed}")
    return tuple(sorted(rng.sample(range(len(task.drifts)), min(rng.choice((2, 3)), len(task.drifts)))))


def play(lines: Iterable[str], run: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """Run lines one after another, ids of earlier outputs filled in; yields each line as it was run, with its output.

    `run` takes a line and gives an output with `stdout`. Raises ValueError where an earlier output lacks what a line refers to.
    """
    printed: list[str] = []
    for line in lines:
        line = _REFERENCE.sub(lambda reference: _resolve(reference, printed), line)
        output = run(line)
        printed.append(output.stdout)
        yield line, output


def _resolve(reference: re.Match, printed: list[str]) -> str:
    """What `<N:expression>` stands for after these outputs."""
    try:
        value = jmespath.search(reference[2], json.loads(printed[int(reference[1]) - 1]))
    except (ValueError, IndexError):
        value = None
    if value is None:
        raise ValueError(f"{reference[0]} is not in the output of line {reference[1]}: {printed[-1:]}")
    return str(value)
