"""Tasks in an AWS account: what is asked, how the account is prepared, and what must hold in the end.

They lie in `data/aws/TIER.jsonl`, one template a line, with `<slots>` in its texts; a template filled with values is a
`Task`. `load_tasks` fills each with the values that stand beside it, `generate.instances` with fresh ones.

A template has id, description, services, setup, criteria and solution (a reference), and `slots`: name -> [kind, value].
A line of a solution may take an id from the JSON that an earlier line printed: `<1:Keys|0|KeyId>` is the first line's
`Keys`, its item 0, that one's `KeyId`, and `Aliases|AliasName=alias/apple|TargetKeyId` asks for an item by an entry.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from grpolab.files import data_path

TIERS = ("warmup", "beginner", "intermediate", "advanced", "expert", "drift")
_SLOT = re.compile(r"<([a-z][a-z0-9_]*)>")
_TAKEN = re.compile(r"<([0-9]+):([^<>]+)>")  # an id from an earlier output
_NEEDS = {"id", "description", "services", "setup", "criteria", "solution", "slots"}


@dataclass(frozen=True)
class Task:
    """One task. `setup`, `solution` and `drifts` are `aws …` lines; `criteria` are the grader's (`grader.grade`).

    `hints` tell more and more: the services, the operations, the commands with names left out. A drift task is prepared
    by `setup`, which reaches what is asked for, and by some of `drifts` (`pick_drifts`), each of which spoils something;
    line i of its solution repairs drift i.
    """

    id: str
    tier: str
    description: str
    services: tuple[str, ...]
    setup: tuple[str, ...]
    hints: tuple[str, ...] = field(default=(), repr=False)
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
        row = _filled({k: self.row[k] for k in ("description", "setup", "criteria", "solution")}, values)
        return Task(id or f"{self.id}/{','.join(values.values())}", self.tier, row["description"], tuple(self.row["services"]),
                    tuple(row["setup"]), hints_of(self.row["services"], self.row["solution"]),
                    tuple(_filled(self.row.get("drifts", []), values)), tuple(row["criteria"]), tuple(row["solution"]))


def hints_of(services: Iterable[str], solution: Iterable[str]) -> tuple[str, ...]:
    """Three hints out of a template's solution: its services, its operations, its commands with the slots in place of names."""
    solution = [_TAKEN.sub(lambda taken: f"<{taken[2].split('|')[-1]}>", _inner(line)) for line in solution]
    operations = dict.fromkeys(" ".join(line.split()[:3]) for line in solution)
    return (f"Services: {', '.join(services)}.", f"Operations: {'; '.join(operations)}.", "\n".join(solution))


def _inner(line: str) -> str:
    """A line without the slots that stand inside a taken id, so that this one can be read."""
    return re.sub(r"<([0-9]+:[^<>]*)<[^<>]*>([^<>]*)>", r"<\1\2>", line)


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """A copy of plain JSON with every `<slot>` in its texts, keys of mappings too, replaced."""
    if isinstance(value, str):
        return _SLOT.sub(lambda slot: values[slot[1]], value)
    if isinstance(value, Mapping):
        return {_filled(k, values): _filled(v, values) for k, v in value.items()}
    return [_filled(v, values) for v in value] if isinstance(value, list) else value


@cache
def templates() -> tuple[Template, ...]:
    """All templates, tier by tier; ValueError that names the file and the line of one that is wrong."""
    found: dict[str, Template] = {}
    for tier in TIERS:
        path = data_path("aws", f"{tier}.jsonl")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
                wrong = _wrong(row) or (f"the id {row['id']!r} is there twice" if row["id"] in found else "")
            except (ValueError, TypeError) as error:
                wrong = str(error)
            if wrong:
                raise ValueError(f"{path}, line {number}: not a template ({wrong})")
            slots = {name: (kind, value) for name, (kind, value) in row["slots"].items()}
            found[row["id"]] = Template(row["id"], tier, slots, row)
    return tuple(found.values())


def _wrong(row: Any) -> str:
    """What is wrong with a row of data/aws; "" where nothing is."""
    if not isinstance(row, dict) or set(row) - {"drifts"} != _NEEDS:
        return f"it needs {sorted(_NEEDS)}, and may have drifts"
    texts = json.dumps([row["description"], row["setup"], row["criteria"], row["solution"], row.get("drifts", [])])
    if set(_SLOT.findall(texts)) != set(row["slots"]):
        return f"its texts use {sorted(set(_SLOT.findall(texts)))}, its slots are {sorted(row['slots'])}"
    if not row["criteria"] or not row["solution"]:
        return "it has no criteria or no solution"
    lines = [*row["setup"], *row["solution"], *row.get("drifts", [])]
    return next((f"{line!r} is no 'aws …' line" for line in lines if not line.startswith("aws ")), "")


def load_tasks(tier: str | None = None) -> tuple[Task, ...]:
    """The tasks as they stand in the data, of one tier or of all: each template with its own values, its id the template's."""
    if tier is not None and tier not in TIERS:
        raise ValueError(f"tier={tier!r}: the tiers are {', '.join(TIERS)}")
    return tuple(t.task({name: value for name, (_, value) in t.slots.items()}, t.id)
                 for t in templates() if tier in (None, t.tier))


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

    `run` takes a line and gives an output with `stdout`. Raises ValueError where an earlier output lacks what is taken.
    """
    printed: list[str] = []
    for line in lines:
        line = _TAKEN.sub(lambda taken: _taken(taken, printed), line)
        output = run(line)
        printed.append(output.stdout)
        yield line, output


def _taken(taken: re.Match, printed: list[str]) -> str:
    """What `<N:path>` stands for after these outputs."""
    try:
        value = json.loads(printed[int(taken[1]) - 1])
        for step in taken[2].split("|"):
            name, equals, wanted = step.partition("=")
            if equals:
                value = next(item for item in value if item.get(name) == wanted)
            else:
                value = value[int(step)] if isinstance(value, list) else value[step]
        return str(value)
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        raise ValueError(f"{taken[0]} is not in the output of line {taken[1]}: {printed[-1:]}") from error
