"""Sabotage: break what a notebook teaches, run its own cells, and its own gate must fail by the right name.

The cells before the training are executed as they stand, with one thing of the package broken. Then the gate's statements are
executed one by one: a check whose number comes from a cell that was not run is passed over.
"""

import ast
import asyncio
import inspect
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest

from grpolab import gate

matplotlib.use("Agg")
REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Fault:
    """What is broken underneath a notebook, and what of its gate must fail, that and nothing else."""

    notebook: str
    breaks: Callable  # of monkeypatch
    fails: set[str] | None  # None: an assertion of the notebook stops it before its gate
    until: str  # how the first cell begins that is not run
    without: tuple[str, ...] = ()  # how cells before it begin that are not run either
    parameters: dict = field(default_factory=dict)
    # (request, tmp_path, monkeypatch) -> {how a cell begins that is not run: the names that it leaves}
    prepare: Callable = lambda *_: {}
    by_the_clock: frozenset[str] = frozenset()  # what may fail as well, depending on how busy the machine is
    full: bool = False  # for `make test-full` alone


def each(faults):
    """As cases of a test."""
    return pytest.mark.parametrize("fault", [
        pytest.param(f, id=f"{f.notebook[:2]} {f.breaks.__name__}", marks=[pytest.mark.full] * f.full) for f in faults])


def cells(name):
    notebook = nbformat.read(REPOSITORY / "notebooks" / f"{name}.ipynb", as_version=4)
    return [c for c in notebook.cells if c.cell_type == "code"]


def execute(source, namespace, runner):
    code = compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, namespace)  # noqa: S307  (the repository's own notebook)
    if inspect.iscoroutine(result):
        runner.run(result)


def run_until(name, stop, tmp_path, monkeypatch, runner, parameters, filled):
    """Execute a notebook's code cells (but the Colab one) up to the first that begins with `stop`; a cell that begins with a
    key of `filled` is not executed and leaves those values."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    namespace, unused = {"sys": sys}, set(filled)
    for cell in cells(name)[1:]:
        if cell.source.startswith(stop):
            if unused:
                raise LookupError(f"no cell of {name} begins with {unused}")
            return namespace
        if "gate" in cell.metadata.get("tags", []):
            break
        skipped = next((start for start in filled if cell.source.startswith(start)), None)
        if skipped is not None:
            unused.discard(skipped)
            namespace |= filled[skipped]
            continue
        execute(cell.source, namespace, runner)
        if "parameters" in cell.metadata.get("tags", []) or cell.source.startswith("tiny = model"):
            namespace |= parameters
    raise LookupError(f"no cell of {name} begins with {stop!r} before its gate")


def checks(name, namespace, runner):
    """The checks of a notebook's gate that what was run has measured; its `with` is not entered, so nothing is raised."""
    (cell,) = [c for c in cells(name) if "gate" in c.metadata.get("tags", [])]
    g = namespace["g"] = gate(name)
    for node in ast.parse(cell.source).body:
        for statement in node.body if isinstance(node, ast.With) else [node]:
            with suppress(Exception):  # it asks for what a cell that was not run would have left
                execute(ast.Module([statement], []), namespace, runner)
    return g.checks


def failures_under(fault, request, tmp_path, monkeypatch):
    """The names of the identities that fail, and of the fault's own claims; None where an assertion stops the notebook."""
    filled = dict.fromkeys(fault.without, {}) | fault.prepare(request, tmp_path, monkeypatch)
    fault.breaks(monkeypatch)
    with asyncio.Runner() as runner:  # one loop for all cells, as in a kernel: some leave a server open
        try:
            namespace = run_until(fault.notebook, fault.until, tmp_path, monkeypatch, runner, fault.parameters, filled)
        except AssertionError:
            return None
        finally:
            plt.close("all")
        found = checks(fault.notebook, namespace, runner)
    return {c.name for c in found if not c.passed and (not c.claim or c.name in fault.fails)} - fault.by_the_clock


def start_of(taught, tmp_path):
    """A policy where the notebooks after 01 look for it first."""
    shutil.copytree(taught, tmp_path / "runs" / "01_sft" / "tiny" / "policy")
