"""The README's recipes, run as they stand there."""

import asyncio
import re

import nbformat
import pytest
from nbclient import NotebookClient

from grpolab.lab.run import repository

BLOCKS = re.findall(r"```python\n(.*?)```", (repository() / "README.md").read_text(), flags=re.DOTALL)
SETUP = """
from grpolab import load_policy
from grpolab.arithmetic import generate
policy, problems = load_policy("tiny", device="cpu"), generate(20, 0)[0]
"""


@pytest.fixture
def recipe():
    (found,) = [block for block in BLOCKS if "run_sync" in block]
    return found


def test_synchronous_code_calls_a_coroutine_in_a_running_notebook(recipe):
    """In a real kernel, whose loop is running: twice, and top-level await goes on working after it."""
    after = "import asyncio\nawait asyncio.sleep(0.01)\nprint('awaited', exact_match(policy, problems[:2]))"
    cells = [SETUP, recipe, recipe, after]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    said = ["".join(o.text for o in cell.outputs if o.get("name") == "stdout") for cell in notebook.cells]
    assert [float(s) for s in said[1:3]] == [0.0, 0.0] and said[3] == "awaited 0.0\n"


def test_the_same_code_runs_without_a_loop(recipe, capsys):
    namespace = {}
    exec(SETUP + recipe, namespace)  # noqa: S102  (the repository's own README)
    assert capsys.readouterr().out.splitlines()[-1] == "0.0"


def test_without_the_patch_a_running_loop_refuses(recipe):
    """What the recipe is for: the plain way fails where a loop runs."""
    from grpolab.evaluate import evaluate

    async def cell():
        asyncio.run(coroutine)

    coroutine = evaluate(None, [])
    with pytest.raises(RuntimeError, match="cannot be called from a running event loop"):
        asyncio.run(cell())
    coroutine.close()
