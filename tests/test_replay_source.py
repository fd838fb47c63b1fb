"""Training from a record: the recorded run's own step in every bit, the correction for distance, and what is refused."""

import asyncio
import base64
import dataclasses
import gzip
import json
import math
import shutil

import pytest
import torch
from loop_helpers import digits, rows_of
from loop_helpers import flat as weights

from grpolab.arithmetic import Problem
from grpolab.models.load import load_policy
from grpolab.rollouts import Rollout
from grpolab.runs.run import Run
from grpolab.train import GRPOConfig, Several, grpo, grpo_from, recorded_groups
from grpolab.train.replay_source import importance

PROBLEMS = [Problem(a, "+", 7) for a in range(12)]
CONFIG = GRPOConfig(steps=3, prompts_per_step=3, group_size=4, max_new_tokens=8, lr=1e-3, seed=4)
TIMES = ("_s", "seconds")
FAR = {"max_logp_diff": None, "sampler_cap": 2.0}


def train(policy, source, config=CONFIG, n=None, **more):
    return rows_of(grpo_from(policy, None, source, config, longest=source.longest, **more), n)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A run and the weights after each of its steps."""
    return recorded_training(Run("old", root=tmp_path_factory.mktemp("record")), CONFIG)


def recorded_training(run, config):
    policy, after = load_policy("tiny"), []

    async def go():
        async for row in grpo(policy, None, PROBLEMS, config, reward=digits, run=run):
            after.append((weights(policy).clone(), row))

    asyncio.run(go())
    return run, after


def same(a, b):
    return {k for k in a.keys() & b.keys() if not k.endswith(TIMES) and a[k] != b[k] and a[k] == a[k]}


@pytest.mark.parametrize("cap", [None, 2.0])
def test_from_the_same_weights_it_is_the_runs_own_training_in_every_bit(record, tmp_path, cap):
    config = dataclasses.replace(CONFIG, sampler_cap=cap)
    run, after = recorded_training(Run("capped", root=tmp_path), config) if cap else record
    again = load_policy("tiny")
    (row,) = train(again, recorded_groups(run.folder), config, n=1)
    assert torch.equal(weights(again), after[0][0]) and not same(row, after[0][1])
    assert row["ess"] == pytest.approx(1, abs=1e-6) and row["ratio_median"] == pytest.approx(1, abs=1e-4)
    whole = load_policy("tiny")
    rows = train(whole, recorded_groups(run), config)
    assert torch.equal(weights(whole), after[-1][0])
    assert [r["record_step"] for r in rows] == [0, 1, 2] and not any(same(a, b) for a, (_, b) in zip(rows, after))


def test_a_record_that_is_used_again_shows_its_distance(record):
    source = recorded_groups(record[0], steps=[0] * 6)
    rows = train(load_policy("tiny"), source, dataclasses.replace(CONFIG, steps=6, lr=5e-3, **FAR))
    assert rows[0]["diff_abs_mean"] < 1e-4 < rows[-1]["diff_abs_mean"] and rows[-1]["ess"] < 0.99 < rows[0]["ess"]
    assert rows[-1]["ratio_low"] < rows[-1]["ratio_median"] < rows[-1]["ratio_high"]
    assert {r["record_step"] for r in rows} == {0}


def test_the_weights_are_truncated_at_the_cap_and_counted():
    r = Rollout((1,), (2, 3, 4), (1, 1, 0), (-1.0, -1.0, 0.0), (-1.0, -1.0, 0.0), "eos")
    found = importance([[-1.0, -1.0 + 2.0, 5.0]], [r], None)  # what an environment wrote does not count
    assert found["ratio_low"] == 1.0 and found["ess"] == pytest.approx((1 + math.e**2) ** 2 / (2 * (1 + math.e**4)))
    assert importance([[-1.0, 1.0, 0.0]], [r], 2.0)["ess"] == pytest.approx(9 / 10)
    many = Rollout((1,), tuple(range(101)), (1,) * 101, (0.0,) * 101, (0.0,) * 101, "eos")
    spread = importance([[float(i) / 100 for i in range(101)]], [many], None)
    expected = [math.exp(x) for x in (0.05, 0.5, 0.95)]
    assert [spread[k] for k in ("ratio_low", "ratio_median", "ratio_high")] == pytest.approx(expected)
    assert all(map(math.isnan, importance([], [], None).values()))


def test_it_records_and_resumes_as_any_run(record, tmp_path):
    config = dataclasses.replace(CONFIG, steps=3, lr=5e-3, **FAR)
    whole, cut = load_policy("tiny"), load_policy("tiny")
    train(whole, recorded_groups(record[0], steps=[2, 0, 1]), config, run=Run("whole", root=tmp_path))
    train(cut, recorded_groups(record[0], steps=[2, 0, 1]), config, n=2, run=Run("cut", root=tmp_path))
    fresh, run = load_policy("tiny"), Run("cut", root=tmp_path)
    train(fresh, recorded_groups(record[0], steps=[2, 0, 1]), config, run=run)
    assert torch.equal(weights(whole), weights(fresh)) and [r["record_step"] for r in run.metrics] == [2, 0, 1]
    old, new = record[0].rollouts(2), run.rollouts(0)
    assert list(old["completion"]) == list(new["completion"]) and list(old["problem"]) == list(new["problem"])
    assert list(old["advantage"]) == list(new["advantage"])


# --- what is refused, before anything is trained ------------------------------------------------------------------------


def refuse(policy, source, says, config=CONFIG, **more):
    before = weights(policy)
    with pytest.raises(ValueError, match=says):
        train(policy, source, config, **more)
    assert torch.equal(before, weights(policy)) and policy.version == 0


def test_a_run_that_would_overwrite_what_it_reads(record):
    rollouts = record[0].rollouts()
    again = Run("old", root=record[0].folder.parent)
    refuse(load_policy("tiny"), recorded_groups(record[0]), "would overwrite the record", run=again)
    assert record[0].rollouts().equals(rollouts)


@pytest.mark.parametrize("change, says", [
    ({"steps": 4}, "steps=4, and the record .* gives 3"), ({"temperature": 0.7}, "temperature=0.7, .* are those at 1.0"),
    ({"refills": 1}, "no further questions"),
])
def test_a_configuration_that_the_record_cannot_serve(record, change, says):
    refuse(load_policy("tiny"), recorded_groups(record[0]), says, dataclasses.replace(CONFIG, **change))


def test_another_vocabulary(record):
    policy = load_policy("tiny")
    decode = policy.tokenizer.decode
    policy.tokenizer.decode = lambda ids, **k: "☃" if ids == [7] else decode(ids, **k)
    spelt = record[0].recorder.vocabulary()
    assert 7 in spelt
    refuse(policy, recorded_groups(record[0]), f"another vocabulary than 'tiny': its token 7 is {spelt[7]!r}, the policy's '☃'")
    fewer = load_policy("tiny")
    fewer.model.resize_token_embeddings(max(spelt))
    refuse(fewer, recorded_groups(record[0]), f"its token {max(spelt)} is .*, the policy's none")


@pytest.mark.parametrize("change, says", [
    (lambda line: {k: v for k, v in line.items() if k != "logps"}, "step 0, group 0: its rollouts lack log-probs"),
    (lambda line: line | {"logps": base64.b64encode(b"\0" * 8).decode()}, "one mask, logp and raw_logp for each token"),
], ids=["none", "too few"])
def test_rollouts_without_their_log_probs(record, tmp_path, change, says):
    folder = tmp_path / "copy"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "run.json").write_text((record[0].folder / "run.json").read_text())
    for path in record[0].recorder.files():
        steps = {}
        for line in map(json.loads, gzip.decompress(path.read_bytes()).splitlines()):
            steps.setdefault(line["step"], []).append(json.dumps(change(line)) + "\n")
        (folder / "rollouts" / path.name).write_bytes(b"".join(gzip.compress("".join(s).encode()) for s in steps.values()))
    with pytest.raises(ValueError, match=says):
        recorded_groups(folder)


@pytest.mark.parametrize("steps, says", [([0, 7], r"lacks steps \[7\]: it holds 0 to 2"), ([], r"lacks steps \[\]")])
def test_steps_that_it_does_not_hold(record, steps, says):
    with pytest.raises(ValueError, match=says):
        recorded_groups(record[0], steps)


def test_a_folder_without_a_record(tmp_path):
    with pytest.raises(ValueError, match="nowhere holds no run of GRPO"):
        recorded_groups(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    run, policy = Run("unkept", root=tmp_path, keep="none"), load_policy("tiny")
    rows_of(grpo(policy, None, PROBLEMS, CONFIG, reward=digits, run=run))
    with pytest.raises(ValueError, match=r"it holds none: record with Run\(..., keep='all'\)"):
        recorded_groups(run)


@pytest.mark.parametrize("combination", ["gated", "normalise_then_sum"])
def test_advantages_that_totals_do_not_make_are_those_of_the_record(tmp_path, combination):
    reward = Several({"one": (lambda text, *_: float("1" in text), 1.0), "digits": (digits, 0.1)}, combination)
    run, policy = Run("several", root=tmp_path), load_policy("tiny")
    rows = rows_of(grpo(policy, None, PROBLEMS, CONFIG, reward=reward, run=run))
    again = load_policy("tiny")
    assert [r["trained_groups"] for r in train(again, recorded_groups(run))] == [r["trained_groups"] for r in rows]
    assert torch.equal(weights(again), weights(policy))
    with pytest.raises(ValueError, match="has advantages that its rewards alone do not make"):
        train(load_policy("tiny"), recorded_groups(run), dataclasses.replace(CONFIG, advantage_kind="standardised"))


def test_a_step_that_cannot_be_read_is_named_before_it_trains(record, tmp_path):
    folder = shutil.copytree(record[0].folder, tmp_path / "damaged")
    (path,) = (folder / "rollouts").glob("step-*1.*")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"cannot be read at steps \[1\]"):
        recorded_groups(folder)
