"""The record of a run: every bit comes back, a resume adds neither gaps nor doubles."""

import gzip
import importlib
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from loop_helpers import digits, fresh, rows_of

from grpolab.arithmetic import Problem, Task, generate
from grpolab.rollouts import Group, RecordedGroup, Rollout
from grpolab.runs import rollout_log
from grpolab.runs.rollout_log import Recorder
from grpolab.runs.run import Run
from grpolab.train.episodes import Episode, as_groups
from grpolab.train.grpo import GRPOConfig, grpo

PROBLEMS, _ = generate(24, 0, seed=3, task=Task("+-", max_operand=20))
CONFIG = GRPOConfig(steps=4, prompts_per_step=3, group_size=4, max_new_tokens=8, lr=1e-3, save_every=2)


def length(text, problem, rollout):
    return float(len(rollout.tokens))


def content(folder):
    """The lines of the files."""
    return [line for path in sorted(folder.glob("step-*.gz")) for line in gzip.decompress(path.read_bytes()).splitlines()]


def a_group(g=0, size=4, tokens=3, seed=0):
    draw = random.Random(f"{g}/{seed}")
    rollouts = tuple(
        Rollout((1, 2 + g), tuple(draw.randrange(90) for _ in range(tokens)), (1,) * tokens,
                tuple(-draw.randrange(2**20) / 2**22 for _ in range(tokens)), tuple(-float(i) for i in range(tokens)), "eos",
                seed=i, policy_version=7, reward=float(i))
        for i in range(size)
    )
    return RecordedGroup(Group(rollouts), (0.5,) * size, {"a": g})


def write(folder, steps, groups=2, keep="all", **options):
    recorder = Recorder(folder, keep)
    for step in steps:
        recorder.add(step, [a_group(g, seed=step, **options) for g in range(groups)], str, {})
    return recorder


def train(policy, run, config=CONFIG, stop=None, reward=digits, **options):
    rows_of(grpo(policy, None, PROBLEMS, config, reward=reward, run=run, **options), stop)


# --- what comes back --------------------------------------------------------------------------------------------------


def test_what_the_update_got_comes_back_in_every_bit(tiny, tmp_path, monkeypatch):
    """At another temperature the raw log-probs differ and are kept too; groups that refills discard are kept, not used."""
    grpo_module = importlib.import_module("grpolab.train.grpo")  # the package's `grpo` is the method
    got, honest = [], grpo_module.grpo_update
    monkeypatch.setattr(grpo_module, "grpo_update", lambda p, r, groups, *a: got.append(groups) or honest(p, r, groups, *a))
    run = Run("x", root=tmp_path)
    config = replace(CONFIG, temperature=0.8, refills=2)

    def reward(text, problem, rollout):
        return None if rollout.seed % 5 == 0 else float(problem.a % 2 and rollout.seed % 2)

    train(tiny, run, config, reward=reward, watch={"length": length})
    assert len(got) == 4 and run.recorder.steps() == [0, 1, 2, 3]
    unused = 0
    for step, groups in enumerate(got):
        back = run.recorder.groups(step)
        assert [g.trained for g in back if g.used] == groups
        assert all(r.raw_logps != r.logps for g in back for r in g.group if r.tokens)
        unused += sum(not g.used for g in back)
        assert [g.parts["length"] for g in back if "length" in g.parts][0][0] == len(back[0].group[0].tokens)
        assert Problem(**back[0].problem) in PROBLEMS
    assert unused > 3


def test_the_table_has_a_row_a_rollout(tiny, tmp_path):
    run = Run("x", root=tmp_path)
    train(tiny, run, watch={"length": length})
    table = run.rollouts()
    first = ["step", "group", "rollout", "prompt", "completion", "reward", "advantage"]
    assert len(table) == 4 * 3 * 4 and list(table)[:7] == first
    row = table.iloc[17]
    assert row["completion"] == tiny.decode(row["tokens"]) and row["reward"] == digits(row["completion"], None, None)
    assert row["length"] == len(row["tokens"]) == len(row["logps"]) == len(row["mask"])
    mean = table.groupby(["step", "group"])["reward"].transform("mean")
    assert (table["advantage"] - (table["reward"] - mean)).abs().max() < 1e-5
    metrics = run.table()
    assert table.groupby("step")["reward"].mean().tolist() == pytest.approx(metrics["reward"].tolist())
    some = run.rollouts(2, ["completion", "length"])
    assert list(some) == ["completion", "length"] and len(some) == 12
    assert run.rollouts(range(1, 3))["step"].unique().tolist() == [1, 2]
    with pytest.raises(ValueError, match="no column lenght; it has step, .*length"):
        run.rollouts(columns=["lenght"])
    with pytest.raises(ValueError, match="step 9 is not in the record .*it holds 0 to 3"):
        run.recorder.groups(9)


def test_episodes_keep_their_turns_and_what_the_update_did_not_get():
    def episode(i, reward, reason="done"):
        r = Rollout((1, 2), (3, 4, 5), (1, 0, 1), (-1.0, 0.0, -2.0), (-1.0, 0.0, -2.0), reason, seed=i, reward=reward)
        return Episode(r, "What?", ((f"calc {i}", "7"), (f"= {i}", "right")), measures={"calls": float(i)})

    mute = episode(0, None, "invalid"), episode(5, None, "invalid")
    episodes = [mute[0], None, None, None, episode(4, 1.0), mute[1], episode(6, 0.0), None]
    groups = as_groups([{"a": i} for i in range(4)], episodes, "centred")
    back = [rollout_log.recorded(json.loads(json.dumps(rollout_log.line_of(3, i, g, str)))) for i, g in enumerate(groups)]
    assert [g.trained for g in back] == [g.trained for g in groups] and [g.problem["a"] for g in back] == [2, 3, 0]
    assert [g.used for g in back] == [True, True, False]
    abstained = back[0].group[1]  # the update got an empty rollout in its place
    assert abstained.tokens == (3, 4, 5) and abstained.mask == (1, 0, 1) and abstained.finish_reason == "invalid"
    assert back[0].turns[1] == (("calc 5", "7"), ("= 5", "right")) and back[0].parts == {"calls": [4.0, 5.0]}
    assert back[1].turns[1] == () and back[1].parts == {"calls": [6.0, None]}


def test_a_temperature_of_its_own_is_kept():
    rollouts = [Rollout((1,), (2,), (1,), (-1.0,), (-1.0,), "eos", reward=1.0, temperature=t) for t in (0.7, None)]
    line = rollout_log.line_of(0, 0, RecordedGroup(Group(tuple(rollouts)), (0.5, -0.5)), str)
    assert [r.temperature for r in rollout_log.recorded(json.loads(json.dumps(line))).group] == [0.7, None]


def test_numbers_and_prompts_stand_there_as_they_were():
    rollouts = [Rollout((1, n), (2,), (1,), (-1.0,), (-1.0,), "eos", reward=1.0) for n in (2, 9)]
    group = RecordedGroup(Group(tuple(rollouts)), (0.5, -0.5), {"answer": np.int64(12), "x": np.float32(2)})
    line = json.loads(json.dumps(rollout_log.line_of(0, 0, group, str), default=rollout_log._plain))
    assert rollout_log.recorded(line).problem == {"answer": 12, "x": 2.0}
    table = rollout_log.table([line])
    assert list(table["prompt_ids"]) == [[1, 2], [1, 9]] and list(table["prompt"]) == ["(1, 2)", "(1, 9)"]


def test_a_question_may_be_anything(tmp_path):
    """What JSON cannot hold stands there as its fields or its text, and stops no training."""
    recorder = Recorder(tmp_path)
    odd = type("Row", (), {})()
    odd.question, odd.set = "What?", {1}
    asked = [Problem(1, "+", 2), {"prompt": "x", "answer": 1.5}, odd, None, {1}]
    recorder.add(0, [replace(a_group(), problem=p) for p in asked], str, {})
    assert [g.problem for g in recorder.groups(0)] == [
        {"a": 1, "op": "+", "b": 2}, asked[1], {"question": "What?", "set": "{1}"}, None, "{1}"]


def test_a_step_that_fails_is_on_the_record(tiny, tmp_path):
    """What it sampled is what one wants to see; the run that goes on takes its place."""
    run = Run("x", root=tmp_path)
    tiny.model.get_output_embeddings().weight.register_hook(lambda g: g * (float("nan") if tiny.version == 2 else 1.0))
    with pytest.raises(FloatingPointError, match="step 2"):
        train(tiny, run)
    assert run.recorder.steps() == [0, 1, 2] and len(run.metrics) == 2
    train(fresh(tiny), run)
    assert run.recorder.steps() == [0, 1, 2, 3]


# --- how much, and what is left of it ---------------------------------------------------------------------------------


def test_keep_is_all_or_none(tmp_path):
    write(tmp_path, [0, 1], keep="none")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="keep must be 'all' or 'none', got 64"):
        Run("x", root=tmp_path, keep=64)


def test_a_damaged_file_costs_itself_and_is_named(tmp_path):
    run = Run("x", root=tmp_path)
    write(run.recorder.folder, range(4))
    path = run.recorder.path(1)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="step-00000001.jsonl.gz is damaged and left out"):
        table = run.rollouts()
    assert table["step"].unique().tolist() == [0, 2, 3]


def test_a_rewind_removes_what_is_to_come(tmp_path):
    recorder = write(tmp_path, range(5))
    recorder.rewind(3)
    assert recorder.steps() == [0, 1, 2] and recorder.sessions() == [{"from": 0}]
    recorder.rewind(0)
    assert recorder.steps() == [] and recorder.sessions() == []


@pytest.mark.full
def test_a_run_that_goes_on_has_the_record_of_one_that_never_stopped(tiny, tmp_path):
    """And its sessions name both processes."""
    one, two = Run("one", root=tmp_path), Run("two", root=tmp_path)
    train(fresh(tiny), one)
    train(fresh(tiny), two, stop=3)
    train(fresh(tiny), two)
    assert content(one.recorder.folder) == content(two.recorder.folder)
    assert [s["from"] for s in two.recorder.sessions()] == [0, 3] and two.recorder.sessions()[0]["torch"]
    again = Run("one", root=tmp_path)  # the cell once more: the record of a run that starts over begins anew
    train(fresh(tiny), again, replace(CONFIG, steps=2))
    assert again.recorder.steps() == [0, 1]
