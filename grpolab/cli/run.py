"""`grpolab run`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg


@dataclass(frozen=True)
class Run:
    """Execute notebooks. The executed copies lie under runs/."""

    notebooks: Annotated[Positional[tuple[str, ...]], arg(metavar="[NN ...]")] = ()
    """Numbers or names, such as 01 or 04_grpo; without any, the whole series."""
    parameters: Annotated[UseAppendAction[tuple[tuple[str, str], ...]],
                          arg(name="parameter", aliases=["-p"], metavar="NAME VALUE")] = ()
    """Set a notebook's parameter, e.g. -p model smollm2-135m."""
    store: bool = False  # put the executed notebooks in the place of their sources
    jobs: int = 1  # notebooks at once, each with its share of the processors

    def run(self) -> int:
        from grpolab.lab.notebooks import run_series  # torch is not needed for --help

        parameters = {name: literal(value) for name, value in self.parameters}
        return run_series(self.notebooks, parameters, jobs=self.jobs, store=self.store)


def literal(text: str) -> Any:
    """A Python literal where the text is one, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
