"""`grpolab speedrun` and `grpolab verify`: the board of `lab.board`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from grpolab.cli import UsageError
from grpolab.lab.board import STANDARD, read, save, speedrun, summary, verify


@dataclass(frozen=True)
class Speedrun:
    """Run the board's task with a recipe, three seeds, and write the entry. Exits with 1 where the target is missed."""

    recipe: Annotated[Positional[Path], arg(metavar="RECIPE")]  # TOML: method = "grpo" and options of GRPO
    out: Path | None = None  # the entry's file (default: the recipe's name with .json)
    title: str | None = None  # of the entry (default: the recipe's name)
    threads: Literal[1, 2] = 2  # of torch
    tries: int = 1  # recipes that were tried to find this one, for the board

    def run(self) -> int:
        if self.tries < 1:
            raise UsageError(f"--tries {self.tries}: at least 1, this one")
        out = self.out or self.recipe.with_suffix(".json")
        if out.is_dir() or out.resolve() == self.recipe.resolve():
            raise ValueError(f"the entry cannot be written to {out}: name another file with --out")
        if out.exists():
            read(out)  # ValueError for anything but an entry, which alone may be replaced
        entry = speedrun(self.recipe.read_text(encoding="utf-8"), self.title or self.recipe.stem, threads=self.threads,
                         tries=self.tries)
        means = summary(entry)
        print(f"{means['accuracy']:.1%} of the held-out questions, {means['tokens']:,.0f} sampled tokens, "
              f"{means['seconds']:.0f} s; the target is {STANDARD.target:.0%}")
        print(save(entry, out))
        return 0 if means["accuracy"] >= STANDARD.target else 1


@dataclass(frozen=True)
class Verify:
    """Replay an entry of the board. Exits with 0 where it stands, with 1 and a reason where it is refused."""

    entry: Annotated[Positional[Path], arg(metavar="ENTRY")]  # a file that grpolab speedrun wrote

    def run(self) -> int:
        verdict = verify(read(self.entry))
        print(verdict)
        return 1 if verdict.refused else 0
