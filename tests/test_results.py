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
import seeds  # noqa: E402

RESULTS, README = ROOT / "benchmarks" / "results", (ROOT / "README.md").read_text()


def test_results_md_is_what_the_command_writes():
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == report.results_page(RESULTS), "run: make results"


SERIES = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def test_no_share_ends_outside_of_0_and_100_percent_and_gains_are_points():
    page = report.results_page(RESULTS)
    ends = [float(end) for interval in re.findall(r"\[(-?[\d.]+)%, (-?[\d.]+)%\]", page) for end in interval]
    assert ends and min(ends) >= 0 and max(ends) <= 100 and "-0.0%" not in page
    assert report.share("99.5% [98.5%, 100.5%]") == "99.5% [98.5%, 100.0%]"
    assert report.share("0.1% [-0.1%, 0.2%]") == "0.1% [0.0%, 0.2%]"


def test_the_readme_names_the_seeds_with_which_a_claim_fails(tmp_path):
    runs = {"1": {"passed": False}, "2": {"passed": True}}
    found = {"08_guess": {"1": {"passed": True}}, "09_longer_answers": runs}
    (tmp_path / "seeds.json").write_text(json.dumps({"notebooks": found}))
    assert report.without("09_longer_answers", tmp_path) == ", not with seed 1"
    assert report.without("08_guess", tmp_path) == report.without("07", tmp_path) == report.without("09", tmp_path / "x") == ""


@pytest.mark.parametrize("part", [report.BEGIN, report.LADDER, report.MINUTES, report.ROLLOUT])
def test_each_part_of_the_readme_is_what_the_command_writes(part):
    texts = (README, report.front(README, RESULTS, ROOT / "notebooks"))
    stands, made = (text.split(part)[1].split(report.END)[0] for text in texts)
    assert stands == made, "run: make results"


def test_the_ladder_has_a_rung_for_each_notebook_in_order():
    rungs = re.findall(r"^\| \[.*?\]\(notebooks/(.*?)\)", README.split(report.LADDER)[1].split(report.END)[0], flags=re.M)
    missing = [path.name for path in SERIES if path.name not in rungs]
    assert not missing, f"the README's ladder lacks {', '.join(missing)}: run make results"
    assert rungs == [path.name for path in SERIES]


def test_a_notebook_without_a_line_for_the_ladder_is_named(tmp_path):
    (tmp_path / "11_new.ipynb").write_text(json.dumps({"cells": [{"source": ["# 11 · New"]}]}))
    with pytest.raises(ValueError, match="11_new.ipynb: its first cell needs .* you will learn"):
        report.ladder(tmp_path, RESULTS)
    (tmp_path / "11_new.ipynb").write_text(json.dumps({"cells": [{"source": ["# 11 · New\n", "| you will learn | much |"]}]}))
    assert report.ladder(tmp_path, RESULTS).splitlines()[-1] == "| [11 · New](notebooks/11_new.ipynb) | much | not recorded |"


def test_the_rollout_is_the_first_that_tells_the_policies_apart(tmp_path):
    def question(text, *right):
        written = {name: {"text": f"{name}\nsays", "correct": r} for name, r in zip(("base", "SFT"), right)}
        return {"question": text, "written": written}

    record = {"questions": [question("both wrong?", False, False), question("one?", False, True)]}
    (tmp_path / "rollouts.json").write_text(json.dumps(record))
    assert report.rollout(tmp_path) == "```text\none?\nbase  ✗  base↵says\nSFT   ✓  SFT↵says\n```"


def test_the_map_names_every_room_and_files_that_exist():
    rows = [line.split("|") for line in (ROOT / "docs" / "map.md").read_text().splitlines() if line.startswith("| `")]
    rooms = {re.search(r"`(.*?)/`", cells[1])[1]: re.findall(r"`(\w+\.py)`", cells[3]) for cells in rows}
    home = ROOT / "grpolab"
    package = {f.parent.relative_to(home).as_posix() for f in home.glob("*/**/__init__.py")} - {"decode/engines"}
    assert set(rooms) == package | {"grpolab"}
    for room, files in rooms.items():
        assert files and all((home / room.removeprefix("grpolab") / name).is_file() for name in files), room


def test_every_section_follows_its_record(tmp_path):
    """A changed record changes the page, a missing one drops its section."""
    results = shutil.copytree(RESULTS, tmp_path / "results")
    whole = report.results_page(results)
    assert all(f"## {title}\n" in whole for title in report.SECTIONS)
    pool = json.loads((results / "pool.json").read_text())
    pool["ratios"]["1"]["median"] = 77.0
    (results / "pool.json").write_text(json.dumps(pool))
    assert "77.00×" in report.results_page(results) and "77.00×" in report.readme_table(results)
    for record in results.glob("*.json"):
        record.unlink()
    assert set(re.findall(r"^## (.*)$", report.results_page(results), flags=re.M)) == {"The series"}
    shutil.rmtree(results / "notebooks")
    assert "##" not in report.results_page(results) and report.readme_table(results).count("\n") == 1


def test_the_seeds_stand_beside_the_stored_run(tmp_path, monkeypatch):
    """The claims alone, under their bound, a cross at what missed it."""
    def found(gain):
        checks = [{"name": name, "measured": measured, "bound": "> 0", "passed": measured > 0, "judged": True, "claim": claim}
                  for name, measured, claim in (("identity", 1.0, False), ("gain", gain, True))]
        return {"passed": gain > 0, "checks": checks}

    monkeypatch.setattr(seeds, "RESULTS", tmp_path / "seeds.json")
    for seed, gain in (("2", -0.25), ("1", 0.125)):
        seeds.keep("01_sft", seed, found(gain))
    assert json.loads((tmp_path / "seeds.json").read_text())["notebooks"]["01_sft"]["2"]["passed"] is False
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_sft.json").write_text(json.dumps(found(0.5)))
    lines = report.seeds(tmp_path).splitlines()
    assert "| claim | bound | seed 0 | seed 1 | seed 2 |" in lines and "| gain | > 0 | 0.5 | 0.125 | -0.25 ✗ |" in lines
    assert not [line for line in lines if "| identity |" in line]


@pytest.mark.parametrize("notebook", sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb")))
def test_a_stored_notebook_has_its_record(notebook):
    """The values of the record are those that the stored gate shows."""
    record = json.loads((RESULTS / "notebooks" / f"{notebook}.json").read_text())
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    (gate,) = [c for c in cells if "gate" in c["metadata"].get("tags", [])]
    shown = "".join("".join(o["data"]["text/html"]) for o in gate["outputs"] if "text/html" in o.get("data", {}))
    measured = re.findall(r"<tr><td[^>]*>[✓✗]</td><td[^>]*>.*?</td><td[^>]*>(.*?)</td>", shown)
    assert len(measured) == len(record["checks"])
    for check, text in zip(record["checks"], measured):  # or as a gate showed it before `readable`
        assert text.replace("&#x27;", "'") in (readable(check["measured"]), f"{check['measured']:.4g}"
                                               if isinstance(check["measured"], float) else None)
