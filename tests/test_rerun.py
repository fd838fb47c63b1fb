"""Every training cell of every notebook, interrupted and run again: the run's rows are those of an undisturbed one."""

import asyncio
import os
import re
import shutil
import time
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from grpolab.runs.run import repository

TRAINS = re.compile(r"async for (row|_) in |for step in range\(steps\)|await imitate\(")
MEASURED = re.compile(r"(^|_)(s|seconds|time|bytes|memory)$|per_s$|peak|^sync")  # columns that no two runs have in common
# Whose batches or versions, and so the last bits, follow the clock: their first rows are compared.
SOCKETS = ("07", "08", "11", "12", "14", "16", "17")


def executed(notebook: Path, folder: Path, durations: dict[int, float] | None = None) -> dict[int, float]:
    """Execute a copy of the notebook in `folder`; returns the seconds of each training cell. With `durations`, each of these
    cells is first interrupted after a third of its seconds; one that has ended by then is run twice."""
    folder.mkdir()
    shutil.copytree(repository() / "benchmarks" / "results", folder / "benchmarks" / "results")
    (folder / "notebooks").mkdir()
    (folder / "pyproject.toml").touch()  # a project, so that what the kernel makes lies in its runs/
    shutil.copy(notebook, folder / "notebooks")  # the checks of exercises are read from it
    content, took = nbformat.read(notebook, as_version=4), {}
    client = NotebookClient(content, timeout=600, resources={"metadata": {"path": str(folder / "notebooks")}})

    async def interrupted(cell, index):
        running = asyncio.ensure_future(client.async_execute_cell(cell, index))
        await asyncio.sleep(durations[index] / 3)
        if not running.done():
            await client.km.interrupt_kernel()
            with pytest.raises(CellExecutionError, match="stopped at|KeyboardInterrupt"):
                await running

    async def main():
        async with client.async_setup_kernel(env=os.environ | {"GRPOLAB_QUICK": "1", "OMP_NUM_THREADS": "1"}):
            for index, cell in enumerate(content.cells):
                trains = cell.cell_type == "code" and TRAINS.search(cell.source)
                if trains and durations and durations[index] > 1:  # others only define what trains
                    await interrupted(cell, index)
                start = time.perf_counter()
                await client.async_execute_cell(cell, index)
                if trains:
                    took[index] = time.perf_counter() - start

    asyncio.run(main())
    return took


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The metrics of every run below the folder, without what a clock or the machine says."""
    found = {}
    for path in sorted((folder / "runs").rglob("metrics.csv")):
        table = pd.read_csv(path)
        found[str(path.relative_to(folder))] = table[[c for c in table if not MEASURED.search(c)]]
    return found


@pytest.mark.full
@pytest.mark.parametrize("number", [f"{n:02}" for n in range(18) if n not in (2, 6)])  # 18: if asked
def test_a_training_cell_that_was_interrupted_starts_where_it_started(number, tmp_path):
    (notebook,) = (repository() / "notebooks").glob(f"{number}_*.ipynb")
    durations = executed(notebook, tmp_path / "once")
    assert durations, "no cell trains"
    executed(notebook, tmp_path / "again", durations)
    once, again = tables(tmp_path / "once"), tables(tmp_path / "again")
    assert once and once.keys() == again.keys()
    for name, table in once.items():
        if number in SOCKETS:
            assert len(table) == len(again[name])
            pd.testing.assert_frame_equal(table[:1], again[name][:1], obj=name, rtol=1e-3)
        else:
            pd.testing.assert_frame_equal(table, again[name], obj=name, check_exact=True)
