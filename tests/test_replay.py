"""Any recorded rollout comes again from its weights and its seed; where it does not, the report says why."""

import asyncio
import base64
import gzip
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loop_helpers import digits, flat, fresh, rows_of

from grpolab.__main__ import main
from grpolab.arithmetic import Task, generate
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.pool import GrpoPool
from grpolab.env.server import serve
from grpolab.lab.counterfactual import fork
from grpolab.lab.replay import bundle, replay, replay_bundle
from grpolab.lab.rescore import rescore
from grpolab.lab.restore import restore
from grpolab.rollouts import Group, RecordedGroup, Rollout
from grpolab.runs.checkpoints import processor
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, grpo, grpo_from
from grpolab.train.multiturn import Limits, multi_turn_grpo
from grpolab.train.sources import StepGroups
from tests.test_multiturn import PROBLEMS as SUMS
from tests.test_multiturn import caller  # noqa: F401

PROBLEMS, _ = generate(24, 0, seed=3, task=Task("+-", max_operand=20))
CONFIG = GRPOConfig(steps=5, prompts_per_step=3, group_size=4, max_new_tokens=8, lr=1e-3, save_every=2, kl_coef=0.1,
                    inner_epochs=2, minibatches=2)


def train(policy, run, config=CONFIG, stop=None):
    rows_of(grpo(policy, fresh(policy), PROBLEMS, config, reward=digits, run=run), stop)


@pytest.fixture(scope="module")
def left(_tiny, tmp_path_factory):
    """The folder of a run, and the policy at its end."""
    run, policy = Run("x", root=tmp_path_factory.mktemp("runs"), replay_every=3), fresh(_tiny)
    train(policy, run)
    return run.folder, policy


@pytest.fixture
def run(left, tmp_path):
    """A run's folder as another process finds it: what it shows stands on the disk."""
    return Run(root=shutil.copytree(left[0], tmp_path / "x"))


@pytest.mark.parametrize("step", [2, 4, *(pytest.param(step, marks=pytest.mark.full) for step in (0, 1, 3))])
def test_every_bit_comes_again(run, step):
    """Also two updates behind the kept weights, with a KL penalty, two passes and two minibatches."""
    found = replay(run, step)
    assert found.equal and len(found.rollouts) == 12 and found.kept == (0 if step < 3 else 3) and not found.differs
    assert str(found) == f"step {step}: 12 of 12 rollouts agree in every bit"


def test_one_rollout_and_the_end_of_the_run(run, left):
    one = replay(run, 4, 2, 1)
    assert str(one).startswith("step 4, group 2, rollout 1: all ")
    assert one.rollouts[0].recorded == run.recorder.groups(4)[2].group[1]
    end = restore(run, 5)
    assert torch.equal(flat(end.policy), flat(left[1])) and end.policy.version == left[1].version
    for group, rollout, text in ((3, 0, "step 4 has groups 0 to 2, not 3"),
                                 (None, 99, "^step 4 has groups of rollouts 0 to 3, not 99$")):
        with pytest.raises(ValueError, match=text):
            replay(run, 4, group, rollout)


@pytest.mark.full
def test_an_interrupted_run_is_replayed_and_one_that_starts_over_keeps_nothing_of_the_one_before(tiny, tmp_path):
    run = Run("x", root=tmp_path, replay_every=2)
    train(fresh(tiny), run, stop=3)
    train(fresh(tiny), run)
    assert [s["from"] for s in run.recorder.sessions()] == [0, 3] and run.recorder.sessions()[0]["torch"]
    assert sorted(run.kept()) == [0, 2, 4] and all(replay(run, step).equal for step in (1, 3, 4))
    train(fresh(tiny), run, GRPOConfig(**{**vars(CONFIG), "steps": 2, "lr": 1e-4}))
    assert sorted(run.kept()) == [0, 2] and replay(run, 1).equal and run.recorder.steps() == [0, 1]


def test_episodes_come_again_with_what_the_environment_said(caller, tmp_path):  # noqa: F811
    run = Run("x", root=tmp_path, replay_every=2)
    config = GRPOConfig(steps=3, prompts_per_step=2, group_size=4, max_new_tokens=24, lr=1e-3)

    async def cell():
        async with serve(CalculatorEnv, max_sessions=8) as server, GrpoPool(server.url, size=8) as pool:
            rows = multi_turn_grpo(fresh(caller), None, SUMS, config, pool, limits=Limits(3, 96), run=run)
            return [row async for row in rows]

    asyncio.run(cell())
    episodes = run.rollouts()
    assert episodes["mask"].map(lambda m: 0 in m).any() and episodes["turns"].map(len).max() >= 2 and "calls" in episodes
    for step in range(3):
        assert (found := replay(run, step)).equal, str(found)


# --- where it parts ---------------------------------------------------------------------------------------------------


def rewrite(run, change):
    """Change the recorded lines of step 0."""
    path = run.recorder.path(0)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    change(lines)
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def changed_logps(line, change):
    """The log-probs of a group as the record holds them, changed as an array."""
    return base64.b64encode(change(np.frombuffer(base64.b64decode(line["logps"]), "<f4").copy()).tobytes()).decode()


def test_what_differs_is_named_with_its_place_and_its_size(run):
    def change(lines):
        tokens = lines[0]["tokens"]
        tokens[1][3] += 1
        tokens[2].pop()
        lines[0]["finish_reason"][3] = "eos"
        lines[0]["logps"] = changed_logps(lines[0], lambda flat: np.delete(flat, 23))  # the last of the third rollout
        lines[1]["logps"] = changed_logps(lines[1], lambda flat: flat + np.eye(1, 32, 10, dtype="f4")[0] / 4)

    rewrite(run, change)
    report = str(replay(run, 0))
    for text in ("step 0: 8 of 12 rollouts agree in every bit", "group 0, rollout 1: parts at token 3",
                 "rollout 2: 7 tokens recorded, 8 now", "rollout 3: finished as 'eos' in the record, as 'length' now",
                 "group 1, rollout 1: the tokens agree; log-probs differ from token 2 on, by at most 0.25 nats"):
        assert text in report
    assert "not as recorded" not in report


def test_what_is_not_as_recorded_is_named(run):
    (path,) = run.recorder.folder.glob("*.json")
    session = json.loads(path.read_text())
    session[0] |= {"torch": "1.0", "processor": "another"}
    path.write_text(json.dumps(session))
    assert replay(run, 0, 0, 0).differs == (
        f"torch {torch.__version__!r}, recorded '1.0'", f"processor {processor()!r}, recorded 'another'")
    path.unlink()
    assert "the machine and versions of the step are not known" in replay(run, 0, 0, 0).differs[0]


def test_another_reference_is_noticed_by_the_rows(run, tiny):
    with torch.no_grad():
        next(tiny.model.parameters()).add_(0.1)
    found = replay(run, 2, reference=tiny)
    assert "the update of step 0 gives " in found.differs[0] and "where the run had" in found.differs[0]


# --- what is missing --------------------------------------------------------------------------------------------------


def test_without_kept_weights_there_is_no_way(run):
    shutil.rmtree(run.folder / "replay" / "step-00000000")
    with pytest.raises(ValueError, match="no way to step 2 of 5: weights are kept before steps 3"):
        replay(run, 2)
    shutil.rmtree(run.folder / "replay")
    with pytest.raises(ValueError, match=r"no weights were kept: Run\(..., replay_every=10\)"):
        replay(run, 2)


def test_a_run_of_something_else_is_named(run):
    path = run.folder / "run.json"
    note = json.loads(path.read_text())
    path.write_text(json.dumps(note | {"config": {"lr": 1}}))
    with pytest.raises(ValueError, match="another method or version than GRPO.*group_size"):
        replay(run, 0)
    path.write_text("{")
    with pytest.raises(ValueError, match="run.json is damaged"):
        replay(run, 0)


def test_kept_weights_that_do_not_fit_the_disk_are_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(ValueError, match="replay_every=1 keeps .* MB, and the disk of .* has 1 MB left"):
        train(tiny, Run("x", root=tmp_path, replay_every=1))


# --- carried away -----------------------------------------------------------------------------------------------------


def test_a_bundle_replays_without_its_run(run, tmp_path):
    path = bundle(run, 4, tmp_path / "step.zip")
    shutil.rmtree(run.folder)
    found = replay_bundle(path)
    assert found.equal and len(found.rollouts) == 12 and not found.differs and path.stat().st_size < 3.5e6
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="step.zip is not a whole bundle of a step"):
        replay_bundle(path)


def test_the_command_line(run, tmp_path, capsys):
    archive = str(tmp_path / "b.zip")
    assert main(["replay", str(run.folder), "0", "4"]) == 0
    out = capsys.readouterr().out
    assert "step 0: 12 of 12 rollouts agree" in out and "step 4: 12 of 12" in out
    assert main(["replay", str(run.folder), "3", "--bundle", archive]) == 0
    assert main(["replay", archive, "--group", "1", "--rollout", "2"]) == 0
    assert "step 3, group 1, rollout 2: all" in capsys.readouterr().out
    rewrite(run, lambda lines: lines[0]["tokens"][0].__setitem__(0, 1))
    assert main(["replay", str(run.folder), "0"]) == 1 and "parts at token 0" in capsys.readouterr().out
    for arguments, status, text in (
        ([archive, "0"], 2, "leave them out"), ([archive, "--bundle", "x.zip"], 2, "leave them out"),  # a bundle holds one step
        ([str(run.folder), "3", "--bundle", __file__], 2, "holds something else"),
        ([str(run.folder), "0", "--rollout", "99"], 1, "step 0 has groups of rollouts 0 to"),
        ([str(tmp_path / "nowhere"), "0"], 1, "neither a run's folder"), ([str(run.folder)], 2, "name the steps"),
    ):
        assert main(["replay", *arguments]) == status and text in capsys.readouterr().err


# --- runs whose rollouts are not drawn from seeds ---------------------------------------------------------------------


def recorded_run(policy, folder, parts, engine):
    """A run of one step whose rollouts come from elsewhere, with weights kept for replay."""
    run = Run("x", root=folder, replay_every=1)
    rollouts = tuple(Rollout((5, 6), (7, 8 + s), (1, 1), (-1.0,) * 2, (-1.0,) * 2, "eos", seed=s) for s in (1, 2, 3))
    groups = [Group(rollouts).with_rewards([0.0, 1.0, 2.0])]

    async def source(step):
        record = [RecordedGroup(groups[0], (-1.0, 0.0, 1.0), {"task": 1}, parts=parts)]
        return StepGroups(groups, record=lambda: record, engine=engine)

    config = GRPOConfig(steps=1, group_size=8, max_new_tokens=4, max_logp_diff=None)
    rows_of(grpo_from(policy, None, source, config, longest=16, run=run))
    return run


@pytest.mark.parametrize("parts, engine, source", [
    ({"run": [0.0, 1.0, 1.0]}, "llama", "an agent's calls of the served policy"),
    ({}, "", "a source of their own"), ({}, "remote", "a source of their own")])
def test_rollouts_of_another_source_are_rescored_and_not_sampled_again(tiny, tmp_path, parts, engine, source):
    run = recorded_run(tiny, tmp_path, parts, engine)
    with pytest.raises(ValueError, match=f"step 0 came from {source}.*cannot be sampled again"):
        replay(run, 0)
    with pytest.raises(ValueError, match="cannot be sampled again"):
        asyncio.run(fork(run, 0, "f", PROBLEMS))
    scored = rescore(run, lambda text, problem, rollout: {1: 2.0, 2: 100.0, 3: 0.0}[rollout.seed]).rollouts
    if parts:  # two rollouts of one run of an agent have the reward of its last
        assert scored["rescored_advantage"].tolist() == [1.0, -1.0, -1.0]
    else:
        assert scored["rescored_advantage"].tolist() == [-32.0, 66.0, -34.0]  # groups of 3 where the configuration says 8
