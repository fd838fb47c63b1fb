"""Exercises in a notebook: a task, a stub to fill in, a hidden check, a folded solution.

Each is three cells, which CONTRIBUTING.md describes and tests/exercise.ipynb shows. tests/test_exercises.py runs every exercise
with its stub, its solution, and each of its wrong answers.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from grpolab.lab.notebooks import find

UNSOLVED, WRONG, RIGHT = "not solved yet", "not right yet", "right"


@dataclass(frozen=True)
class Verdict:
    """What a check says of an answer; a cell that ends with it shows it."""

    exercise: str
    state: str
    message: str = ""

    def __repr__(self):
        mark = {UNSOLVED: "…", WRONG: "✗", RIGHT: "✓"}[self.state]
        return f"{mark} {self.exercise}: {self.state}" + (f": {self.message}" if self.message else "")

    def _repr_html_(self):
        color = {UNSOLVED: "#7F7F7F", WRONG: "#D55E00", RIGHT: "#009E73"}[self.state]
        return f"<div style='border-left:4px solid {color};padding:2px 8px;text-align:left'>{escape(repr(self))}</div>"


def exercise(name: str, *, wrong: Sequence[Any]) -> Callable:
    """Turn a function of asserts on an answer into one that returns a Verdict and never raises.

    An answer is unsolved while it is None or `...`, while a call of it gives one of these, or raises NotImplementedError.
    The `wrong` answers stay with the check (`check.wrong`) for the tests. An async check is awaited.
    Raises ValueError where `wrong` is empty: a check that refuses nothing would go unnoticed.
    """
    if not wrong:
        raise ValueError(f"exercise {name!r} needs at least one wrong answer that its check refuses")

    def verdict(error: Exception) -> Verdict:
        if isinstance(error, NotImplementedError):
            return Verdict(name, UNSOLVED, str(error))
        if isinstance(error, AssertionError):
            return Verdict(name, WRONG, str(error) or "an assert of the check failed")
        return Verdict(name, WRONG, f"it raised {type(error).__name__}: {error}")

    def decorate(asserts):
        async def later(asserting):
            try:
                await asserting
            except Exception as error:
                return verdict(error)
            return Verdict(name, RIGHT)

        @functools.wraps(asserts)
        def check(answer):
            try:
                asserting = asserts(_refusing_nothing(answer))
            except Exception as error:
                return verdict(error)
            return later(asserting) if inspect.iscoroutine(asserting) else Verdict(name, RIGHT)

        check.wrong = tuple(wrong)
        return check

    return decorate


def hidden_check(notebook: str, name: str) -> Callable:
    """The check `name` from the cells tagged `check` of a notebook's file, e.g. hidden_check("04_grpo", "check_clip"): for an
    exercise cell that is run in a new kernel, without the folded cell before it. ValueError where there is none."""
    (path,) = find([notebook])
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if "check" in cell["metadata"].get("tags", []) and f"def {name}(" in source:
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(source, f"<{notebook} {name}>", "exec"), names)  # noqa: S102  (a cell of our own notebook)
            return names[name]
    raise ValueError(f"{path} has no cell tagged check that defines {name}")


def _refusing_nothing(answer, why: str = ""):
    """The answer, or a function around it; NotImplementedError where it, or what a call of it gives, is what a stub gives."""
    if answer is None or answer is ...:
        raise NotImplementedError(why)
    if inspect.iscoroutine(answer):
        return _awaited(answer)
    if not inspect.isroutine(answer) or why:  # of what a call gives, only a coroutine is looked into
        return answer
    return functools.wraps(answer)(lambda *args, **kw: _refusing_nothing(answer(*args, **kw), "it returns nothing so far"))


async def _awaited(coroutine):
    return _refusing_nothing(await coroutine, "it returns nothing so far")
