"""Selection: what a policy does decides which of a run's policies is kept, not the loss that it was trained on.

    async def measure(policy):                      # by generation, on questions that no step trains on
        return (await evaluate(policy, held_out)).exact.value

    run = Run("mine", select=Selection(measure, every=20))
    async for row in grpo(policy, reference, problems, config, run=run):
        ...
    policy = run.best()                             # the policy that measured highest; `policy` itself was the last one
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import math
import warnings
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from grpolab.files import atomic_folder, atomic_write, remove_folder

SCORE = "score"  # the name of a measure that gives one number
PREFIX = "eval_"  # of what was measured, in a step's row


@dataclass(frozen=True)
class Selection:
    """Before the first step, after every `every` steps and after the last one, `await measure(policy)` gives a number, or
    numbers by name. The policy with the highest `by` is kept beside the last one (of equal ones the earliest); with
    `by=None` the numbers are only watched and nothing is kept. A number is by the name "score".

    `measure` draws from a seed of its own, as `evaluate` does, and leaves the policy as it is; the training is then the same
    in every bit as without it."""

    measure: Callable[[Any], Awaitable[float | Mapping[str, float]]]
    every: int = 20
    by: str | None = SCORE

    def __post_init__(self):
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"a selection measures every so many steps, at least 1, got every={self.every!r}")
        if not callable(self.measure):
            raise ValueError(f"a selection's measure is an async function of the policy, got {self.measure!r:.80}")

    async def ask(self, policy) -> dict[str, float]:
        """The numbers by name. TypeError or ValueError where `measure` gives something else, or nothing named `by`."""
        asked = self.measure(policy)
        if not inspect.isawaitable(asked):
            raise TypeError(f"a selection's measure is an async function of the policy, and this one gave {asked!r:.80}: write "
                            "it with `async def`")
        found = await asked
        found = dict(found) if isinstance(found, Mapping) else {SCORE: found}
        if wrong := {name: value for name, value in found.items() if not isinstance(value, Real)}:
            raise TypeError(f"a selection's measure gives a number, or numbers by name, got {wrong!r:.120}")
        if self.by is not None and self.by not in found:
            raise ValueError(f"the measure gives no {self.by!r} to select by; it gives {sorted(found)}: Selection(..., by=...)")
        return {str(name): float(value) for name, value in found.items()}


class Selected:
    """What a selection has measured and kept in a run's folder: `measured.csv`, a row each time, and `best-<steps>/`, a saved
    policy with best.json beside its weights. Each takes its place whole, so that a kill leaves the old or the new."""

    def __init__(self, folder: Path, selection: Selection | None = None):
        self.folder, self.selection = folder, selection
        self.rows: dict[int, dict[str, float]] = {}  # steps -> numbers

    def begin(self, steps: int) -> None:
        """As a loop begins after so many steps: a run that starts anew forgets what was measured and kept, one that goes on
        keeps it. ValueError where it was chosen by another number."""
        if not steps:
            for folder in self._folders():
                remove_folder(folder)
            self._path.unlink(missing_ok=True)
        self.rows = self.read()
        best = self.best()
        if best and self.selection and self.selection.by not in (None, best["by"]):
            raise ValueError(f"{best['folder']} was chosen by {best['by']!r}, and the run would go on choosing by "
                             f"{self.selection.by!r}: select by the former again, or delete that folder")

    def due(self, steps: int, last: int) -> bool:
        """Whether the policy is to be measured after so many of the run's `last` steps."""
        return self.selection is not None and (steps % self.selection.every == 0 or steps == last)

    def take(self, steps: int, numbers: Mapping[str, float], policy) -> None:
        """Note what was measured after so many steps, and keep the policy where it is the best so far."""
        self.rows[steps] = dict(numbers)
        names = dict.fromkeys(name for row in self.rows.values() for name in row)
        text = io.StringIO()
        table = csv.DictWriter(text, ["steps", *names], restval="", lineterminator="\n")
        table.writeheader()
        table.writerows({"steps": s} | row for s, row in sorted(self.rows.items()))
        if (by := self.selection.by) is not None:
            if math.isnan(numbers[by]):
                warnings.warn(f"the measure gave nan for {by!r} after {steps} steps, which selects nothing", stacklevel=2)
            best = self.best()
            if numbers[by] > (best["value"] if best else -math.inf):
                self._keep({"steps": steps, "by": by, "value": numbers[by]}, policy)
        atomic_write(self._path, text.getvalue())  # after the policy: a kill between the two has it measured again

    def best(self) -> dict | None:
        """`steps`, `by`, `value` and `folder` of the best policy so far; None without one."""
        found = [json.loads((d / "best.json").read_text()) | {"folder": d} for d in self._folders()]
        return max(found, key=lambda b: (b["value"], -b["steps"]), default=None)

    def _keep(self, about: dict, policy) -> None:
        target = self.folder / f"best-{about['steps']:08d}"
        with atomic_folder(target) as folder:
            policy.save(folder)
            (folder / "best.json").write_text(json.dumps(about) + "\n")
        for other in self._folders():
            if other != target:
                remove_folder(other)

    def _folders(self) -> list[Path]:
        return [d for d in self.folder.glob("best-*") if (d / "best.json").is_file()]

    @property
    def _path(self) -> Path:
        return self.folder / "measured.csv"

    def read(self) -> dict[int, dict[str, float]]:
        """Steps -> numbers, of the file."""
        if not self._path.is_file():
            return {}
        with open(self._path, newline="") as file:
            rows = list(csv.DictReader(file))
        return {int(row.pop("steps")): {name: float(value) for name, value in row.items() if value} for row in rows}
