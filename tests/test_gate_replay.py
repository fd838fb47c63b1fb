"""Every check of the gate of notebook 10 can fail: good values pass, each bad one fails its own; a short run passes."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_gates import failures_under, judge, taught  # noqa: F401  (a fixture)

from grpolab import gate
from grpolab.evaluate import Interval
from grpolab.lab.gate import shortened
from grpolab.lab.run import Run

SAME = SimpleNamespace(equal=True)
FALLEN = SimpleNamespace(illness="the reward has fallen")


def values(tmp_path):
    return {
        "gate": gate, "shortened": shortened, "run": Run("10_replay", root=tmp_path), "whole": 14, "planted": 6,
        "config": SimpleNamespace(steps=14), "held_out": [None] * 300, "bundle": Path(__file__),
        "again": SimpleNamespace(rollouts=[SAME] * 4, differs=()), "carried": SAME, "twice": (0, True), "cured": (0, True),
        "before": 0, "after": 4, "seeds": [[1, 2], [1, 2]], "culprit": SimpleNamespace(step=6), "other": "rescored",
        "findings": {"healthy": (), "collapsed": (FALLEN,)}, "rate": {"collapsed": 0.0, "mended": 0.45}, "at_start": 0.47,
        "ends": {"mended": SimpleNamespace(exact=Interval(0.45, 0.4, 0.5))},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"again": SimpleNamespace(rollouts=[SAME, SimpleNamespace(equal=False)], differs=())},
         "rollouts replayed in every bit"),
        ({"again": SimpleNamespace(rollouts=[SAME], differs=("threads",))}, "what is not as it was recorded"),
        ({"carried": SimpleNamespace(equal=False)}, "the step that was carried away agrees in every bit"),
        ({"twice": (1, True)}, "fork without a change"),
        ({"twice": (0, False)}, "fork without a change"),
        ({"cured": (1, True)}, "fork without the fault"),
        ({"cured": (0, False)}, "fork without the fault"),
        ({"before": 1}, "rollouts before the fault's update that differ"),
        ({"seeds": [[1, 2], [1, 3]]}, "seeds after it are the same"),
        ({"after": 0}, "rollouts after it that differ"),
        ({"culprit": SimpleNamespace(step=7)}, "step that the bisection finds − planted step"),
        ({"findings": {"healthy": (FALLEN,), "collapsed": (FALLEN,)}}, "illnesses of the healthy run"),
        ({"findings": {"healthy": (), "collapsed": ()}}, "the diagnosis says that the reward has fallen"),
        ({"rate": {"collapsed": 0.3, "mended": 0.45}}, "held-out after the collapse, of what it was"),
        ({"rate": {"collapsed": 0.0, "mended": 0.3}}, "held-out without the fault, of what it was"),
    ],
)  # fmt: skip
def test_every_check_of_the_replay_gate_can_fail(bad, name, tmp_path):
    good = values(tmp_path)
    assert judge("10_replay", dict(good)) == []
    assert judge("10_replay", good | bad) == [name]


def test_the_cells_of_a_short_run_pass_its_identities(taught, tmp_path, monkeypatch):  # noqa: F811
    """Four steps with the fault in step 1; the claims, and with them the bisection, are not judged."""
    shutil.copytree(taught, tmp_path / "runs" / "01_sft" / "tiny" / "policy")  # where the notebook looks first
    learned = {k: values(tmp_path)[k] for k in ("rate", "ends", "other")}
    found = SimpleNamespace(step=1, before=0.4, after=0.1, measured={0: 0.4, 1: 0.4, 2: 0.1})
    filled = {"async def accuracy": {"at_start": 0.4, "culprit": found}, "groups = collapsed.recorder": {"number": 0}}
    failed = failures_under(None, "10_replay", "ends = {}", learned, tmp_path, monkeypatch, filled,
                            steps=4, planted=1, n_eval=20)  # fmt: skip
    assert failed == set()
