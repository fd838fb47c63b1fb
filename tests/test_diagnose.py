"""Each illness is found in a run made to have it, and in none of the healthy ones that were recorded."""

import asyncio
import copy
import importlib
import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from grpolab.arithmetic import Task, generate
from grpolab.lab.dashboard import Dashboard
from grpolab.lab.diagnose import RULES, diagnose
from grpolab.models.load import Policy
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, finished_and_correct, grpo
from grpolab.train.sft import SFTConfig, demonstrations, sft
from tests.test_rollout_log import digits, length

PROBLEMS, _ = generate(64, 0, seed=3, task=Task("+-", max_operand=20))
RECORDED = json.loads((Path(__file__).parent / "recorded_runs.json").read_text())  # by benchmarks/illnesses.py
ROWS = {name: pd.DataFrame(run["rows"]).astype(float).astype({"step": int}) for name, run in RECORDED.items()}
ILL = {name: set(run["ill"]) for name, run in RECORDED.items() if run["ill"]}
CONFIG = GRPOConfig(steps=4, prompts_per_step=4, group_size=8, max_new_tokens=24, lr=1e-3)


def illnesses(what, **options):
    return {f.illness: f for f in diagnose(what, **options)}


@pytest.fixture(scope="module")
def taught(_tiny):
    """A policy that ends its answers."""
    policy = Policy(copy.deepcopy(_tiny.model), _tiny.tokenizer, _tiny.name, _tiny.eos_ids)

    async def teach():
        async for _ in sft(policy, demonstrations(policy, PROBLEMS), SFTConfig(steps=40, lr=2e-3, batch_size=32)):
            pass

    asyncio.run(teach())
    return policy


def rows_of(policy, config, reward=finished_and_correct, reference=None):
    async def cell():
        return [row async for row in grpo(copied(policy), reference, PROBLEMS, config, reward=reward)]

    return asyncio.run(cell())


def copied(policy):
    return Policy(copy.deepcopy(policy.model), policy.tokenizer, "copy", policy.eos_ids)


# --- the recorded runs ------------------------------------------------------------------------------------------------


def watched_in(table):
    return "exact" if "exact" in table else None


@pytest.mark.parametrize("name", sorted(RECORDED.keys() - ILL.keys()))
def test_nothing_is_found_in_a_healthy_run(name):
    """Nor in any stretch of its beginning, as one looks while it goes on, nor in a row of it alone."""
    table = ROWS[name]
    for end in (*range(1, len(table), 3), len(table)):
        assert diagnose(table.head(end), watched=watched_in(table)) == (), str(diagnose(table.head(end)))
    assert repr(diagnose(table)) == "nothing found: none of the known illnesses shows"
    assert diagnose(table)._repr_html_().count("<div") == 1 and "nothing found" in diagnose(table)._repr_html_()
    assert [diagnose(row) for row in table.to_dict("records") if diagnose(row)] == []


@pytest.mark.parametrize("name", sorted(ILL))
def test_an_illness_is_found_in_the_run_made_to_have_it(name):
    found = illnesses(ROWS[name], watched=watched_in(ROWS[name]))
    assert ILL[name] <= found.keys() and all(f.evidence and f.remedy for f in found.values())
    begins = [f.step for f in found.values()]
    assert begins == sorted(begins)


def test_a_run_was_recorded_for_every_illness():
    told = {rule.illness for rule in RULES} | {"length runs away", "the reward has fallen", "reward up while the judge falls"}
    assert set().union(*ILL.values()) == told and len(RECORDED.keys() - ILL.keys()) >= 9


def test_a_reward_that_was_gamed_shows_in_its_judge_alone():
    table = ROWS["gamed"]
    name = "reward up while the judge falls"
    assert name in illnesses(table, watched="exact") and name not in illnesses(table)
    points = [(0, 0.31), (15, 0.3), (30, 0.12)]
    assert "the held-out rate fell from 0.31 (step 0) to 0.12 (step 30)" in illnesses(table, held_out=points)[name].evidence
    assert name not in illnesses(table, held_out=[(0, 0.31), (15, 0.3), (30, 0.28)])


# --- runs made ill ----------------------------------------------------------------------------------------------------


def test_an_end_that_was_never_learnt(tiny):
    found = illnesses(rows_of(tiny, CONFIG))
    assert found["the end is lost"].step == 0 and "were cut before they ended" in found["the end is lost"].evidence
    assert "groups without a difference" in found  # all wrong


def test_a_trainer_that_computes_something_else(tiny, monkeypatch):
    module = importlib.import_module("grpolab.train.grpo")
    honest = module.rollout_logps

    def other(*args, **options):
        logps, entropy = honest(*args, **options)
        return logps * 1.5, entropy

    monkeypatch.setattr(module, "rollout_logps", other)
    config = GRPOConfig(**{**vars(CONFIG), "max_logp_diff": None})
    assert "nats a token on average" in illnesses(rows_of(tiny, config, digits))["sampler and trainer disagree"].evidence


def test_rollouts_of_older_weights_differ_without_being_ill():
    """Another process that is synced every second update: the difference is what the update changed."""
    apart = {"step": 7, "logp_diff": 0.03, "logp_diff_max": 0.3}
    assert "sampler and trainer disagree" in illnesses(apart | {"staleness": 0})
    assert "sampler and trainer disagree" in illnesses(apart)
    assert not illnesses(apart | {"staleness": 1})


@pytest.mark.full
def test_steps_that_are_too_large_and_far_from_the_reference(tiny):
    config = GRPOConfig(**{**vars(CONFIG), "steps": 8, "lr": 1e-2, "inner_epochs": 3, "kl_coef": 1e-6})
    found = illnesses(rows_of(tiny, config, digits, copied(tiny)))
    assert {"steps that are too large", "far from the reference"} <= found.keys()
    assert {"factor of", "are clipped"} & set(re.findall("factor of|are clipped", found["steps that are too large"].evidence))
    assert "the KL to the reference is" in found["far from the reference"].evidence


def test_an_entropy_that_is_gone(tiny):
    """The weakest KL penalty: without one, a step whose groups are all equal has no forward pass to tell the entropy."""
    config = GRPOConfig(**{**vars(CONFIG), "steps": 14, "lr": 3e-3, "max_new_tokens": 8, "kl_coef": 1e-6})
    found = illnesses(rows_of(tiny, config, lambda text, *_: float(text.startswith("1") + text.count("1")), copied(tiny)))
    assert "nats a token: the rollouts of a group are all but the same" in found["the entropy is gone"].evidence


@pytest.mark.full
def test_a_length_that_runs_away(taught):
    found = illnesses(rows_of(taught, GRPOConfig(**{**vars(CONFIG), "steps": 10, "lr": 3e-3}), length))
    assert found["length runs away"].step >= 4 and "(at first " in found["length runs away"].evidence


# --- rows, tables, runs -----------------------------------------------------------------------------------------------


def test_a_single_row_is_diagnosed():
    (found,) = diagnose({"step": 7, "uninformative": 0.9, "all_right": 0.1, "entropy": math.nan, "curriculum": "{}"})
    assert str(found).startswith("groups without a difference (from step 7): in 90% of the groups") and "Try: " in str(found)
    assert diagnose({"step": 7, "uninformative": 0.9, "all_right": 0.9}) == ()  # solved is not ill
    assert "25% of the tokens are clipped" in diagnose({"clip_low": 0.15, "clip_high": 0.1, "ratio_max": 1.5})[0].evidence


def test_one_bad_step_of_many_is_no_illness():
    rows = [{"step": s, "truncated": 0.9 if s == 5 else 0.0} for s in range(12)]
    assert diagnose(rows) == () and diagnose(rows[5]) != ()
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
