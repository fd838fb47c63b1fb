"""Each illness is found in a run made to have it, and in none of the healthy ones that were recorded."""

import copy
import importlib
import json
import math
from pathlib import Path

import pandas as pd
import pytest
from loop_helpers import digits, rows_of

from grpolab.arithmetic import Task, generate
from grpolab.lab.dashboard import Dashboard
from grpolab.lab.diagnose import RULES, diagnose
from grpolab.lab.metrics import METRICS, readable
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, grpo

PROBLEMS, _ = generate(64, 0, seed=3, task=Task("+-", max_operand=20))
RECORDED = json.loads((Path(__file__).parent / "recorded_runs.json").read_text())  # by benchmarks/illnesses.py
ROWS = {name: pd.DataFrame(run["rows"]).astype(float).astype({"step": int}) for name, run in RECORDED.items()}
ILL = {name: set(run["ill"]) for name, run in RECORDED.items() if run["ill"]}


def illnesses(what, **options):
    return {f.illness: f for f in diagnose(what, **options)}


# --- the recorded runs ------------------------------------------------------------------------------------------------


def watched_in(table):
    return "exact" if "exact" in table else None


@pytest.mark.parametrize("name", sorted(RECORDED.keys() - ILL.keys()))
def test_nothing_is_found_in_a_healthy_run(name):
    """Nor in any stretch of its beginning, as one looks while it goes on, nor in a row of it alone: but for `kl`, whose
    estimator k3 has heavy tails (one token made it 14 in one step of `careful`)."""
    table = ROWS[name]
    for end in (*range(1, len(table), 3), len(table)):
        assert diagnose(table.head(end), watched=watched_in(table)) == (), str(diagnose(table.head(end)))
    alone = [f.illness for row in table.to_dict("records") for f in diagnose([row])]
    assert alone == ["far from the reference"] * (name == "careful")


@pytest.mark.parametrize("name", sorted(ILL))
def test_an_illness_is_found_in_the_run_made_to_have_it(name):
    found = illnesses(ROWS[name], watched=watched_in(ROWS[name]))
    assert ILL[name] <= found.keys() and all(f.evidence and f.remedy for f in found.values())
    begins = [f.step for f in found.values()]
    assert begins == sorted(begins)


def test_a_run_was_recorded_for_every_illness():
    known = {rule[0] for rule in RULES} | {"length runs away", "the reward has fallen", "reward up while the judge falls"}
    assert set().union(*ILL.values()) == known and len(RECORDED.keys() - ILL.keys()) >= 9


def test_a_reward_that_was_gamed_shows_in_its_judge_alone():
    name = "reward up while the judge falls"
    assert "exact fell from" in illnesses(ROWS["gamed"], watched="exact")[name].evidence
    assert name not in illnesses(ROWS["gamed"])


# --- rows, tables, runs -----------------------------------------------------------------------------------------------


def test_a_trainer_that_computes_something_else(tiny, monkeypatch):
    module = importlib.import_module("grpolab.train.grpo")
    honest = module.rollout_logps

    def other(*args, **options):
        logps, entropy = honest(*args, **options)
        return logps * 1.5, entropy

    monkeypatch.setattr(module, "rollout_logps", other)
    config = GRPOConfig(steps=3, prompts_per_step=4, group_size=8, max_new_tokens=24, lr=1e-3, max_logp_diff=None)
    rows = rows_of(grpo(copy.copy(tiny), None, PROBLEMS, config, reward=digits))
    assert "diff_abs_mean is " in illnesses(rows)["sampler and trainer disagree"].evidence


def test_rollouts_of_older_weights_differ_without_being_ill():
    """Another process that is synced every second update: the difference is what the update changed."""
    apart = {"step": 7, "diff_abs_mean": 0.03, "diff_max": 0.3}
    assert "sampler and trainer disagree" in illnesses([apart | {"staleness": 0}])
    assert not illnesses([apart | {"staleness": 1}])


RANGES = {  # column: (healthy, ill); the ranges that Atropos' example trainer names are among them
    "kl": ([0.0, 0.29], [0.31]), "sampler_kl": ([0.0, 0.05, 0.09], [0.11, 40.0]), "ratio": ([0.81, 1.0, 1.19], [0.79, 1.21]),
    "clip_low": ([0.0, 0.09], [0.11]), "clip_high": ([0.0, 0.09], [0.11]), "diff_mean": ([-0.019, 0.0, 0.019], [-0.021, 0.021]),
    "diff_abs_mean": ([0.0, 0.019], [0.021]), "diff_max": ([0.0, 1.9], [2.1]), "repetition": ([0.0, 0.29], [0.31, 1.0]),
    "low_logp": ([0.0, 0.0034], [0.0036]), "policy_loss": ([-9.9, 0.0, 5.0], [-10.1]),
}


@pytest.mark.parametrize("column", RANGES)
def test_a_number_outside_of_its_range_is_warned_of_and_one_inside_is_not(column):
    healthy, ill = RANGES[column]
    inside = {"ratio_max": 1.2} | {c: of[0][-1] for c, of in RANGES.items()}
    assert not any(diagnose([inside | {column: value}]) for value in healthy)
    for value in ill:
        (found,) = diagnose([inside | {column: value}])
        assert found.evidence.startswith(f"{column} is {readable(value, 3)}") and found.remedy
    page = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()
    cells = [line.split("|") for line in page.partition("## DPO")[0].splitlines() if line.startswith("| `")]
    assert [c[3].strip() for c in cells if f"`{column}`" in c[1]] == [METRICS[column].range]


def test_a_single_row_is_diagnosed():
    (found,) = diagnose([{"step": 7, "uninformative": 0.9, "all_right": 0.1, "entropy": math.nan, "curriculum": "{}"}])
    assert str(found).startswith("groups without a difference (from step 7): uninformative is 0.9, usually at most 0.79")
    assert diagnose([{"step": 7, "uninformative": 0.9, "all_right": 0.9}]) == ()  # solved is not ill
    assert "nothing found" in diagnose([])._repr_html_()


def test_one_bad_step_of_many_is_no_illness():
    rows = [{"step": s, "truncated": 0.9 if s == 5 else 0.0} for s in range(12)]
    assert diagnose(rows) == () and diagnose(rows[5:6]) != ()
    assert diagnose([r | {"truncated": 0.9 * (r["step"] in (4, 6, 8))} for r in rows])[0].step == 4


def test_a_run_without_rows_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no metrics: train into it first"):
        diagnose(Run("x", root=tmp_path))


def test_the_dashboard_shows_it():
    live = Dashboard(40, ["reward"], "GRPO")
    for row in ROWS["step_x10/no_leash"].to_dict("records"):
        live.update(row)
        if row["step"] == 1:
            assert "⚠ the reward" not in repr(live) and "⚠ the reward" not in live._repr_html_()
    assert "⚠ the reward has fallen" in repr(live)
    assert "⚠ the reward has fallen (from step 5): the mean of 5 steps was " in live._repr_html_()
