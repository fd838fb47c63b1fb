"""Selection: what a policy does decides which of a run's policies is kept, not the loss that it was trained on. docs/running.md
shows how."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd

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
        if not self.every >= 1:
            raise ValueError(f"a selection measures every so many steps, at least 1, got every={self.every!r}")

    async def numbers(self, policy) -> dict[str, float]:
        """The numbers by name. ValueError where `measure` gives something else, or nothing named `by`."""
        measured = self.measure(policy)
        if inspect.isawaitable(measured):
            measured = await measured
        numbers = dict(measured) if isinstance(measured, Mapping) else {SCORE: measured}
        if not all(isinstance(value, Real) for value in numbers.values()) or self.by not in (None, *numbers):
            raise ValueError("a selection's measure gives a number, or numbers by name with the one to select by, "
                             f"{self.by!r}, among them; it gave {measured!r:.120}")
        return {str(name): float(value) for name, value in numbers.items()}


class Selected:
    """What a selection has measured and kept in a run's folder: `measured.csv`, a row each time, and `best-<steps>/`, a saved
    policy with best.json beside its weights. Each takes its place whole, so that a kill leaves the old or the new."""

    def __init__(self, folder: Path, selection: Selection | None = None):
        self.folder, self.selection = folder, selection
        self.path = folder / "measured.csv"
        self.rows: dict[int, dict[str, float]] = {}  # steps -> numbers

    def begin(self, steps: int) -> None:
        """As a loop begins after so many steps: a run that starts anew forgets what was measured and kept, one that goes on
        keeps it. ValueError where it was chosen by another number."""
        if not steps:
            for folder in self._folders():
                remove_folder(folder)
            self.path.unlink(missing_ok=True)
        self.rows = {int(row["steps"]): row for row in self.table().to_dict("records")}
        best = self.best()
        if best and self.selection and self.selection.by not in (None, best["by"]):
            raise ValueError(f"{best['folder']} was chosen by {best['by']!r}, and the run would go on choosing by "
                             f"{self.selection.by!r}: select by the former again, or delete that folder")

    def due(self, steps: int, last: int) -> bool:
        """Whether the policy is to be measured after so many of the run's `last` steps."""
        return self.selection is not None and (steps % self.selection.every == 0 or steps == last)

    def add(self, steps: int, numbers: Mapping[str, float], policy) -> None:
        """Note what was measured after so many steps, and keep the policy where it is the best so far."""
        self.rows[steps] = {"steps": steps, **numbers}
        best, by = self.best(), self.selection.by
        if by is not None and numbers[by] != numbers[by]:
            warnings.warn(f"the measure gave nan for {by!r} after {steps} steps: this policy is not selected", stacklevel=2)
        if by is not None and numbers[by] > (best["value"] if best else -math.inf):
            target = self.folder / f"best-{steps:08d}"
            with atomic_folder(target) as folder:
                policy.save(folder)
                (folder / "best.json").write_text(json.dumps({"steps": steps, "by": by, "value": numbers[by]}) + "\n")
            for other in self._folders():
                if other != target:
                    remove_folder(other)
        # after the policy: a kill between the two has it measured again
        atomic_write(self.path, pd.DataFrame([row for _, row in sorted(self.rows.items())]).to_csv(index=False))

    def best(self) -> dict | None:
        """`steps`, `by`, `value` and `folder` of the best policy so far; None without one."""
        candidates = [json.loads((d / "best.json").read_text()) | {"folder": d} for d in self._folders()]
        return max(candidates, key=lambda b: (b["value"], -b["steps"]), default=None)

    def table(self) -> pd.DataFrame:
        """`steps`, and a column for each number."""
        return pd.read_csv(self.path) if self.path.is_file() else pd.DataFrame()

    def _folders(self) -> list[Path]:
        return [d for d in self.folder.glob("best-*") if (d / "best.json").is_file()]
