"""The README and RESULTS.md say what the records say: both are what `make results` writes. And the map names every room."""

import json
import re
import shutil
import sys

import pytest

from grpolab.lab.metrics import readable
from grpolab.runs.run import repository

ROOT = repository()
sys.path.insert(0, str(ROOT / "benchmarks"))
import report  # noqa: E402

RESULTS, README = ROOT / "benchmarks" / "results", (ROOT / "README.md").read_text()


SERIES = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def test_the_pages_are_what_the_command_writes():
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == report.results_page(RESULTS), "run: make results"
    assert report.front(README, RESULTS, ROOT / "notebooks") == README, "run: make results"
    page = (ROOT / "docs" / "board.md").read_text()
    assert report.board_page(page, RESULTS) == page, "run: make results"


def test_the_readme_has_at_most_650_words_beside_what_is_generated():
    text = re.sub(r"<!-- .*?made by.*?<!-- end -->|```.*?```", "", README, flags=re.S)
    assert len(re.sub(r"\]\([^)]*\)", "]", text).split()) <= 650


def test_no_share_ends_outside_of_0_and_100_percent_and_gains_are_points():
    page = report.results_page(RESULTS)
    ends = [float(end) for interval in re.findall(r"\[(-?[\d.]+)%, (-?[\d.]+)%\]", page) for end in interval]
    assert ends and min(ends) >= 0 and max(ends) <= 100 and "-0.0%" not in page
    assert report.share("99.5% [98.5%, 100.5%]") == "99.5% [98.5%, 100.0%]"
    assert report.share("0.1% [-0.1%, 0.2%]") == "0.1% [0.0%, 0.2%]"


def test_the_ladder_has_a_line_for_each_notebook_and_names_one_without(tmp_path):
    names = re.findall(r"^\| \[.*?\]\(notebooks/(.*?)\)", README.split(report.LADDER)[1].split(report.END)[0], flags=re.M)
    assert names == [path.name for path in SERIES]
    (tmp_path / "11_new.ipynb").write_text(json.dumps({"cells": [{"source": ["# 11 · New"]}]}))
    with pytest.raises(ValueError, match="11_new.ipynb: its first cell needs .* you will learn"):
        report.ladder(tmp_path, RESULTS)


def test_the_map_names_every_room_and_files_that_exist():
    rows = [line.split("|") for line in (ROOT / "docs" / "map.md").read_text().splitlines() if line.startswith("| `")]
    rooms = {re.search(r"`(.*?)/`", cells[1])[1]: re.findall(r"`(\w+\.py)`", cells[3]) for cells in rows}
    home = ROOT / "grpolab"
    package = {f.parent.relative_to(home).as_posix() for f in home.glob("*/**/__init__.py")} - {"decode/engines"}
    assert set(rooms) == package | {"grpolab"}
    for room, files in rooms.items():
        assert files and all((home / room.removeprefix("grpolab") / name).is_file() for name in files), room


def test_every_section_follows_its_record(tmp_path):
    """A changed record changes the page, a missing one drops its section; a cross marks what missed its bound."""
    results = shutil.copytree(RESULTS, tmp_path / "results")
    whole = report.results_page(results)
    assert all(f"### {title}\n" in whole for sections in report.QUESTIONS.values() for title, *_ in sections)
    pool, runs = (json.loads((results / f"{name}.json").read_text()) for name in ("pool", "seeds"))
    pool["ratios"]["1"]["median"] = 77.0
    (results / "pool.json").write_text(json.dumps(pool))
    assert "77.00×" in report.results_page(results) and "77.00×" in report.readme_table(results)
    runs["notebooks"]["08_guess"]["1"]["passed"] = runs["notebooks"]["08_guess"]["1"]["claims"][0]["passed"] = False
    (results / "seeds.json").write_text(json.dumps(runs))
    assert " ✗ |" in report.results_page(results) and ", not with seed 1 |" in report.readme_table(results)
    for record in results.glob("*.json"):
        record.unlink()
    shutil.rmtree(results / "notebooks")
    assert "##" not in report.results_page(results) and report.readme_table(results).count("\n") == 1


@pytest.mark.parametrize("notebook", sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb")))
def test_a_stored_notebook_has_its_record(notebook):
    """The values of the record are those that the stored gate shows."""
    record = json.loads((RESULTS / "notebooks" / f"{notebook}.json").read_text())
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    (gate,) = [c for c in cells if "gate" in c["metadata"].get("tags", [])]
    shown = "".join("".join(o["data"]["text/html"]) for o in gate["outputs"] if "text/html" in o.get("data", {}))
    measured = re.findall(r"^[✓✗] .*?  +(\S.*?)  ", shown, flags=re.M)
    assert [text.replace("&#x27;", "'") for text in measured] == [readable(check["measured"]) for check in record["checks"]]
