import json

import pytest

from grpolab.lab.gate import GateError, gate


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
    assert found["checks"][2] == {"name": "format", "measured": 0.99, "bound": "≥ 0.99", "passed": True}


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


def test_a_gate_without_checks_fails(tmp_path):
    with pytest.raises(GateError, match="no checks"):
        with gate("00 test", tmp_path):
            pass


def test_an_error_inside_goes_up_and_is_recorded(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with gate("00 test", tmp_path) as g:
            g.equal("fine", 1, 1)
            1 / 0  # noqa: B018
    assert results(tmp_path)["passed"] is False


def test_it_shows_measured_beside_bound(tmp_path):
    with gate("00 test", tmp_path) as g:
        g.close("kl <0>", 0.0, 0.0, atol=1e-6)
    assert "✓ kl <0>  0  = 0 ± 1e-06" in str(g) and "kl &lt;0&gt;" in g._repr_html_()
