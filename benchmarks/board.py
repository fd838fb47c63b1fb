"""The board's own entries, and the search that found their recipes.

    OMP_NUM_THREADS=1 python benchmarks/board.py     # some half an hour; fills results/board_search.json and results/board/

The search tries RECIPES with seed 9 and measures on 300 questions that are neither practised nor held out. Those that got at
least MARGIN of these right are entered, the fewest sampled tokens first, until three reach the board's target. What the record
holds is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import records

from grpolab.arithmetic import Task, generate
from grpolab.cli.recipe import written
from grpolab.lab.board import STANDARD, Speedrun, config_of, save, speedrun, summary, trained
from grpolab.runs.run import repository

SEARCH = Path(__file__).parent / "results" / "board_search.json"
ENTRIES = repository() / "benchmarks" / "results" / "board"
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/board.py"
SEED, MARGIN = 9, 0.91
COMMON = {"group_size": 8, "prompts_per_step": 64, "warmup": 3, "schedule": "cosine", "max_new_tokens": 24}
STD = {"advantage_kind": "standardised"}
RECIPES = {
    "four minibatches": {"steps": 40, "lr": 1e-3, "minibatches": 4},
    "four minibatches, std": {"steps": 30, "lr": 1e-3, "minibatches": 4, **STD},
    "two passes in quarters": {"steps": 30, "lr": 1e-3, "inner_epochs": 2, "minibatches": 4},
    "two passes in quarters, std": {"steps": 25, "lr": 1e-3, "inner_epochs": 2, "minibatches": 4, **STD},
    "eight minibatches, std": {"steps": 30, "lr": 1e-3, "minibatches": 8, **STD},
    "four minibatches, std, longer": {"steps": 50, "lr": 1e-3, "minibatches": 4, **STD},
    # A second round: the first reached 79 % at most, so gentler steps and more of them.
    "notebook 04's": {"steps": 100, "lr": 1e-3},
    "std": {"steps": 60, "lr": 1e-3, **STD},
    "std, longer": {"steps": 100, "lr": 1e-3, **STD},
    "two minibatches": {"steps": 60, "lr": 1e-3, "minibatches": 2},
    "two minibatches, std": {"steps": 50, "lr": 1e-3, "minibatches": 2, **STD},
    "two passes, half the step size": {"steps": 60, "lr": 5e-4, "inner_epochs": 2, "minibatches": 2},
    "four minibatches, half the step size": {"steps": 80, "lr": 5e-4, "minibatches": 4},
    "four minibatches, std, half the step size": {"steps": 60, "lr": 5e-4, "minibatches": 4, **STD},
    "two passes in quarters, longer": {"steps": 60, "lr": 1e-3, "inner_epochs": 2, "minibatches": 4},
    "std, refills": {"steps": 40, "lr": 1e-3, "refills": 2, **STD},
    # A third round about the best of the second, two passes with half the step size: 90.7 %.
    "two passes, half the step size, longer": {"steps": 72, "lr": 5e-4, "inner_epochs": 2, "minibatches": 2},
    "two passes, half the step size, std": {"steps": 60, "lr": 5e-4, "inner_epochs": 2, "minibatches": 2, **STD},
    "three passes, half the step size": {"steps": 50, "lr": 5e-4, "inner_epochs": 3, "minibatches": 2},
    # A fourth, since the best of the third missed the target by 0.3 points on the held-out questions.
    "two passes, half the step size, 90 steps": {"steps": 90, "lr": 5e-4, "inner_epochs": 2, "minibatches": 2},
}


class Choosing(Speedrun):
    """The task with other questions in the place of the held-out ones."""

    @cached_property
    def split(self):
        shown, practice, _ = super().split
        known, _ = generate(*self.questions, seed=1, task=Task(ops="+-", max_operand=99))
        return shown, practice, known[self.shown : 4 * self.shown]


def recipe_of(name: str) -> str:
    return written("grpo", COMMON | RECIPES[name])


async def search(names: list[str]) -> None:
    record = json.loads(SEARCH.read_text()) if SEARCH.exists() else {"command": COMMAND, "seed": SEED, "tried": {}}
    task, start = Choosing(), None
    for name in names:
        if name in record["tried"]:
            continue
        start = start or await task.start()
        found = await trained(task, start, replace(config_of(recipe_of(name)), seed=SEED))
        record["tried"][name] = {"recipe": recipe_of(name)} | {k: found[k] for k in ("accuracy", "tokens", "seconds")}
        records.write(SEARCH, record)
        print(name, record["tried"][name], flush=True)


def candidates(record: dict) -> list[str]:
    """Those that reached MARGIN, the fewest tokens first."""
    good = [(of["tokens"], name) for name, of in record["tried"].items() if of["accuracy"] >= MARGIN]
    return [name for _, name in sorted(good)]


def enter(threads: int) -> None:
    """Enter candidates until three stand on the board. What one that misses the target got is kept in the record."""
    record, entered = json.loads(SEARCH.read_text()), 0
    for name in candidates(record):
        path, of = ENTRIES / f"{name.replace(', ', '_').replace(' ', '_').replace(chr(39), '')}.json", record["tried"][name]
        if not path.exists() and "missed" not in of:
            ENTRIES.mkdir(exist_ok=True)
            entry = speedrun(of["recipe"], name, threads=threads, tries=len(record["tried"]))
            if (got := summary(entry)["accuracy"]) < STANDARD.target:
                of["missed"] = got
                records.write(SEARCH, record)
            else:
                save(entry, path)
            print(name, got, flush=True)
        entered += path.exists()
        if entered == 3:
            return


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    asyncio.run(search(list(RECIPES)))
    enter(threads=1)
