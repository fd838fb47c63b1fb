"""Exercises in a notebook: a task, a stub to fill in, a hidden check, a folded solution.

How to write one, as three cells in this order (the example is tests/exercise.ipynb):
1. Markdown: `### Exercise 1 · Leave one out`, the task in two or three sentences, and the solution as one ```python block
   inside `<details><summary>Solution</summary>` (a blank line before and after the block, else it is not read as code).
2. A code cell tagged `check`, folded by the metadata {"jupyter": {"source_hidden": true}, "cellView": "form"}: a function
   of asserts under `@exercise(name, wrong=[...])`. Each assert's message tells the learner what is wrong in his answer;
   `wrong` holds at least one answer that must be refused. An `async def` is awaited: `await check_it(it)` in cell 3.
3. A code cell tagged `exercise`: its own imports, a stub (a function that returns None, a class or function that raises
   NotImplementedError, or `answer = ...`), and as its last line the check: `check_leave_one_out(leave_one_out)`. It takes
   the check from the notebook's file (`hidden_check`), so that it runs alone.
All three run by themselves in a second: they use no variable of another cell and no trained policy. The last line never
raises; it shows "not solved yet", what is wrong, or that it is right. tests/test_exercises.py runs every exercise of every
notebook with its stub, with its solution in the stub's place, and with each of its wrong answers.
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


class Unsolved(Exception):
    """An answer that is still the stub."""


def exercise(name: str, *, wrong: Sequence[Any]) -> Callable:
    """Turn a function of asserts on an answer into one that returns a Verdict and never raises.

    An answer is unsolved while it is None or `...`, while a call of it gives one of these, or raises NotImplementedError.
    The `wrong` answers stay with the check (`check.wrong`) for the tests. An async check is awaited.
    Raises ValueError where `wrong` is empty: a check that refuses nothing would go unnoticed.
    """
    if not wrong:
        raise ValueError(f"exercise {name!r} needs at least one wrong answer that its check refuses")

    def decorate(asserts):
        async def judged(answer):
            try:
                outcome = asserts(_watched(answer))
                if inspect.isawaitable(outcome):
                    await outcome
            except (Unsolved, NotImplementedError) as error:
                return Verdict(name, UNSOLVED, str(error))
            except AssertionError as error:
                return Verdict(name, WRONG, str(error) or "an assert of the check failed")
            except Exception as error:
                return Verdict(name, WRONG, f"it raised {type(error).__name__}: {error}")
            return Verdict(name, RIGHT)

        @functools.wraps(asserts)
        def check(answer):
            if inspect.iscoroutinefunction(asserts):
                return judged(answer)
            try:
                judged(answer).send(None)  # it waits for nothing, so it ends at once
            except StopIteration as end:
                return end.value

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


def _watched(answer):
    """The answer, or a function around it that notices when a call gives what a stub gives."""
    if not inspect.isroutine(answer):
        return _solved(answer, "")
    if inspect.iscoroutinefunction(answer):

        @functools.wraps(answer)
        async def awaited(*args, **kwargs):
            return _solved(await answer(*args, **kwargs))

        return awaited

    @functools.wraps(answer)
    def called(*args, **kwargs):
        return _solved(answer(*args, **kwargs))

    return called


def _solved(value, why: str = "it returns nothing so far"):
    if value is None or value is ...:
        raise Unsolved(why)
    return value
