"""Every exercise of every notebook: its stub is unsolved, its solution right, its wrong answers refused. And the checks."""

import ast
import asyncio
import inspect
import re
from functools import cache
from pathlib import Path

import matplotlib
import nbformat
import pytest

from grpolab.lab.exercises import RIGHT, UNSOLVED, WRONG, exercise, hidden_check
from grpolab.runs.run import repository

matplotlib.use("Agg")
EXAMPLE = Path(__file__).parent / "exercise.ipynb"
NOTEBOOKS = [EXAMPLE, *sorted((repository() / "notebooks").glob("*.ipynb"))]


@cache
def exercises(path):
    """(task, check, stub) of each exercise as source texts, and the metadata of the check."""
    cells = nbformat.read(path, as_version=4).cells
    return [
        (cells[i - 2].source, cells[i - 1].source, cell.source, cells[i - 1].metadata)
        for i, cell in enumerate(cells)
        if "exercise" in cell.metadata.get("tags", [])
    ]


EACH = [pytest.param(path, i, id=f"{path.stem}-{i + 1}") for path in NOTEBOOKS for i in range(len(exercises(path)))]


def solution(task):
    (block,) = re.findall(r"<details><summary>Solution</summary>\n\n```python\n(.*?)\n```\n\n</details>", task, flags=re.S)
    return block


def run(source, names):
    """Execute a cell as a notebook does; the value of its last line, which must be an expression."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value)
    for part, mode in ((tree, "exec"), (last, "eval")):
        value = eval(compile(part, "<cell>", mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)  # noqa: S307  (our own)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
    return value


def prepared(check):
    """Names after the check's cell, and the check itself."""
    names = {"__name__": "__main__"}
    exec(compile(check, "<check>", "exec"), names)  # noqa: S102  (our own)
    return names, next(v for v in reversed(names.values()) if hasattr(v, "wrong"))


@pytest.mark.parametrize(("path", "i"), EACH)
def test_an_exercise_judges_its_stub_its_solution_and_its_wrong_answers(path, i):
    """The stub runs in a new kernel, without the folded cell of the check."""
    task, source, stub, metadata = exercises(path)[i]
    assert "check" in metadata["tags"] and metadata["jupyter"] == {"source_hidden": True} and metadata["cellView"] == "form"
    assert re.match(rf"### Exercise {i + 1} · \S", task)
    names, check = prepared(source)
    alone = names if path == EXAMPLE else {"__name__": "__main__"}  # the example is no notebook of the series
    assert run(stub, alone).state == UNSOLVED
    verdict = run(solution(task) + "\n" + stub.splitlines()[-1], alone)
    assert verdict.state == RIGHT, verdict
    for answer in check.wrong:
        verdict = check(answer)
        verdict = asyncio.run(verdict) if inspect.iscoroutine(verdict) else verdict
        assert verdict.state == WRONG and not verdict.message.startswith("it raised"), verdict


def test_a_check_that_no_cell_defines_is_named():
    with pytest.raises(ValueError, match="10_replay.ipynb has no cell tagged check that defines check_nothing"):
        hidden_check("10_replay", "check_nothing")


# --- the checks themselves --------------------------------------------------------------------------------------------


@exercise("E", wrong=[2])
def check_three(answer):
    assert answer == 3, f"not {answer}"


@exercise("E", wrong=[lambda: 2])
def check_call(answer):
    assert answer() == 3


@exercise("E", wrong=[1])
async def check_awaited(answer):
    assert await answer() == 3, "not three"


def test_unsolved_right_wrong_and_broken_answers():
    assert check_three(3).state == RIGHT
    assert repr(check_three(4)).startswith("✗ E: not right yet: not 4")
    assert repr(check_call(lambda: None)) == "… E: not solved yet: it returns nothing so far"
    assert check_three(None).state == check_three(...).state == check_call(lambda: ...).state == UNSOLVED
    assert "it raised ZeroDivisionError" in check_call(lambda: 1 / 0).message
    assert check_call(lambda: 4).message
    assert "&lt;script&gt;" in check_three("<script>")._repr_html_()

    def stub():
        raise NotImplementedError

    assert check_call(stub).state == UNSOLVED
    with pytest.raises(ValueError, match="needs at least one wrong answer"):
        exercise("E", wrong=[])


def test_an_async_check_is_awaited():
    def returning(value):
        async def answer():
            return value

        return answer

    states = [asyncio.run(check_awaited(returning(value))).state for value in (None, 2, 3)]
    assert states == [UNSOLVED, WRONG, RIGHT]
