import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from grpolab.lab.gate import GateError, gate, quick_run, shortened
from grpolab.lab.metrics import readable
from grpolab.runs.run import Run


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_a_gate_that_holds_writes_its_measurements(tmp_path):
    with gate("00 test", tmp_path) as g:
        g.close("kl", 1e-9, 0.0, atol=1e-6)
        g.equal("rows", 3, 3)
        g.at_least("format", 0.99, 0.99)
        g.at_most("loss", 0.5, 0.6)
        g.above("gain", 0.01, 0.0)
        g.record(seconds=3.5)
    found = results(tmp_path)
    assert found["passed"] is True and found["values"] == {"seconds": 3.5}
    assert found["checks"][2] == {"name": "format", "measured": 0.99, "bound": "≥ 0.99", "passed": True, "judged": True,
                                  "claim": False}


@pytest.mark.parametrize(
    "check",
    [
        lambda g: g.close("x", 1.1e-6, 0.0, atol=1e-6),
        lambda g: g.equal("x", 3, 4),
        lambda g: g.at_least("x", 0.98, 0.99),
        lambda g: g.at_most("x", 0.7, 0.6),
        lambda g: g.above("x", 0.0, 0.0),
        lambda g: g.close("x", float("nan"), 0.0, atol=1e-6),
        lambda g: g.at_least("x", float("nan"), 0.0),
        lambda g: g.at_most("x", float("nan"), 1.0),
        lambda g: g.above("x", float("nan"), 0.0),
    ],
)
def test_each_kind_of_check_can_fail(tmp_path, check):
    with pytest.raises(GateError, match="x: "):
        with gate("00 test", tmp_path) as g:
            check(g)
    assert results(tmp_path)["passed"] is False


def test_one_error_names_every_failure(tmp_path):
    with pytest.raises(GateError) as caught:
        with gate("00 test", tmp_path) as g:
            g.equal("first", 1, 2)
            g.equal("fine", 1, 1)
            g.at_least("second", 1, 2)
    assert "first: 1, must be = 2" in str(caught.value) and "second: 1, must be ≥ 2" in str(caught.value)
    assert "fine" not in str(caught.value)


def test_an_error_inside_goes_up_and_is_recorded(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with gate("00 test", tmp_path) as g:
            g.equal("fine", 1, 1)
            1 / 0  # noqa: B018
    assert results(tmp_path)["passed"] is False


def test_the_failed_come_first_with_what_to_change(tmp_path):
    with pytest.raises(GateError):
        with gate("00 test", tmp_path) as g:
            g.at_most("fine <0>", 11657.0, 20000.0)
            g.equal("identity", 1, 2)
            g.claims()
            g.at_least("claim", 0.5, 0.6)
    lines = repr(g).splitlines()
    assert [line.split()[1] for line in lines[1::2]] == ["identity", "claim", "fine"] and "✗ identity" in lines[1]
    assert "look at the code" in lines[2] and "more steps" in lines[4] and lines[5] == "✓ fine <0>  11,660  ≤ 20,000"
    assert "fine &lt;0&gt;" in g._repr_html_() and g._repr_html_().startswith("<details open ")


def test_a_shortened_run_is_judged_by_its_identities_alone(tmp_path):
    with gate("00 test", tmp_path, shortened="20 of 150 steps") as g:
        g.equal("identity", 1, 1)
        g.claims()
        g.at_least("gain", float("nan"), 0.6)
    assert "identities passed; claims not judged: 20 of 150 steps" in repr(g) and "– gain" in repr(g)
    assert "✗" not in g._repr_html_() and not g._repr_html_().startswith("<details open")
    found = results(tmp_path)
    assert found["passed"] is True and found["shortened"] == "20 of 150 steps"
    assert [c["judged"] for c in found["checks"]] == [True, False] and found["checks"][1]["passed"] is False
    with pytest.raises(GateError, match="identity: 1, must be = 2"):
        with gate("00 test", tmp_path, shortened="20 of 150 steps") as g:
            g.equal("identity", 1, 2)
            g.claims()
            g.at_least("gain", 0.5, 0.6)


def test_what_a_run_leaves_out_is_named():
    assert shortened(steps=(20, 150), questions=(100, 1000)) == "20 of 150 steps, 100 of 1000 questions"
    assert shortened(steps=(150, 150), questions=(2000, 1000)) == ""


@pytest.mark.parametrize("shorter", ["", "1 of 2 steps"])
def test_a_gate_that_judges_nothing_fails(tmp_path, shorter):
    with pytest.raises(GateError, match="no checks that are judged"):
        with gate("00 test", tmp_path, shortened=shorter) as g:
            g.claims()
            if shorter:
                g.at_least("gain", 0.7, 0.6)


def test_a_near_miss_shows_all_its_digits(tmp_path):
    with pytest.raises(GateError, match="format: 0.98999999, must be ≥ 0.99"):
        with gate("00 test", tmp_path) as g:
            g.at_least("format", 0.98999999, 0.99)


def test_a_run_has_its_files_listed_below(tmp_path):
    (tmp_path / "04" / "figures").mkdir(parents=True)
    for old in ("old.csv", "figures/old.png"):
        (tmp_path / "04" / old).write_text("")
        os.utime(tmp_path / "04" / old, (1, 1))
    run = Run("04", root=tmp_path)
    run.log({"step": 0})
    (run.folder / "policy").mkdir()
    for new in ("policy/model.safetensors", "figures/reward.png", ".start", ".process"):
        (run.folder / new).write_text("")
    with pytest.raises(GateError):
        with gate("04 grpo", run) as g:
            g.equal("x", 1, 2)
    assert run.made() == f"{run.folder}: metrics.csv, policy/, results.json; figures: reward"
    assert repr(g).splitlines()[-1] == run.made() and run.made() in g._repr_html_()
    assert Run("05", root=tmp_path).made().endswith("05: nothing")


NUMBERS = [(0.0, "0"), (0.98765, "0.9877"), (11657.3, "11,660"), (5.629e-7, "5.629·10⁻⁷"), (1e-6, "10⁻⁶"), (12000, "12,000"),
           (2026, "2026"), (9999.7, "10,000"), (-0.00025, "-0.00025"), (True, "True"), (float("nan"), "nan"), ("a", "a"),
           (3.2e12, "3.2·10¹²")]


@pytest.mark.parametrize(("value", "text"), NUMBERS)
def test_numbers_are_for_people(value, text):
    assert readable(value) == text


def test_tensors_arrays_and_other_objects_are_recorded(tmp_path):
    with gate("00 test", tmp_path) as g:
        g.equal("identity", 1, 1)
        g.record(loss=torch.tensor(0.5), rates=np.array([0.25, float("nan")]), many={1: torch.ones(2)}, folder=Path("a"))
    assert results(tmp_path)["values"] == {"loss": 0.5, "rates": [0.25, "nan"], "many": {"1": [1.0, 1.0]}, "folder": "a"}


@pytest.mark.parametrize("setting, expected", [(None, False), ("0", False), ("", False), ("1", True)])
def test_the_environment_asks_for_quick_notebooks(setting, expected, monkeypatch):
    monkeypatch.delenv("GRPOLAB_QUICK", raising=False)
    if setting is not None:
        monkeypatch.setenv("GRPOLAB_QUICK", setting)
    assert quick_run(False) is expected and quick_run(True)
