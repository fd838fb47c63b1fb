"""A fork without a change is the run in every bit; with one, it differs from there on. The step that broke a run is found."""

import asyncio
import os
import shutil

import pytest
import torch
from loop_helpers import digits, flat, fresh, rows_of, untimed

from grpolab.arithmetic import Task, generate
from grpolab.lab.counterfactual import bisect, compare_forks, fork, with_advantage, without_group
from grpolab.lab.diagnose import diagnose
from grpolab.lab.replay import replay
from grpolab.lab.restore import restore
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, grpo
from tests.test_rollout_log import content, length

PROBLEMS, _ = generate(24, 0, seed=3, task=Task("+-", max_operand=20))
CONFIG = GRPOConfig(steps=5, prompts_per_step=3, group_size=4, max_new_tokens=8, lr=1e-3, save_every=2, inner_epochs=2)


@pytest.fixture(scope="module")
def left(_tiny, tmp_path_factory):
    run = Run("x", root=tmp_path_factory.mktemp("runs"), replay_every=3)

    rows_of(grpo(fresh(_tiny), None, PROBLEMS, CONFIG, reward=digits, watch={"length": length}, run=run))
    return run


@pytest.fixture
def run(left, tmp_path):
    copied = Run(root=shutil.copytree(left.folder, tmp_path / "x"), replay_every=3)
    copied.metrics = list(left.metrics)
    return copied


def forked(run, step, name="twin", **options):
    return asyncio.run(fork(run, step, name, PROBLEMS, **{"reward": digits, "watch": {"length": length}} | options))


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step, edit", [
    pytest.param(2, None, marks=pytest.mark.full), (3, None),
    pytest.param(1, lambda groups, state: groups, marks=pytest.mark.full)])
def test_without_a_change_it_is_the_run_in_every_bit(run, step, edit):
    twin = forked(run, step, edit=edit)
    assert content(twin.recorder.folder) == content(run.recorder.folder)
    whole = zip(untimed(twin.metrics), untimed(run.metrics))
    assert len(twin.metrics) == 5 and all(a == {k: b[k] for k in a} for a, b in whole)
    assert torch.equal(flat(restore(twin, 5).policy), flat(restore(run, 5).policy))
    drawn, end = compare_forks(run, {"twin": twin}), f"{run.metrics[-1]['reward']:.3g}"
    assert (drawn.get_title(loc="left") or drawn.get_title()) == f"reward at the end: the run {end}, twin {end}"


@pytest.mark.parametrize("change", [
    {"lr": 5e-3}, {"reward": length},
    *(pytest.param(change, marks=pytest.mark.full) for change in ({"kl_coef": 0.5}, {"clip_eps": (0.0, 0.0)}))])
def test_one_thing_changed_differs_from_there_on(run, change):
    twin = forked(run, 2, **change)
    same, other = run.recorder.groups(2), run.recorder.groups(4)
    assert [g.group[0].tokens for g in twin.recorder.groups(2)] == [g.group[0].tokens for g in same]  # before the update
    assert untimed(twin.metrics)[:2] == untimed(run.metrics)[:2]
    assert [r.logps for g in twin.recorder.groups(4) for r in g.group] != [r.logps for g in other for r in g.group]
    assert [r.seed for g in twin.recorder.groups(4) for r in g.group] == [r.seed for g in other for r in g.group]


def test_a_fork_of_an_earlier_process_is_moved_aside(run, monkeypatch):
    def in_another_process(name, **options):
        metrics = untimed(forked(run, 3, name, **options).metrics)
        monkeypatch.setattr("grpolab.runs.run._begun", set())
        for path in (run.folder / f"fork-{name}").rglob("*"):
            os.utime(path, (0, 0))
        return metrics

    for _ in range(2):
        in_another_process("edited", edit=without_group(0))
    assert not (run.folder / "fork-edited.1").exists()
    before = in_another_process("twin", lr=1e-2)
    assert untimed(forked(run, 3, lr=5e-4).metrics) != before
    assert untimed(Run("fork-twin.1", root=run.folder).table().to_dict("records"))[-1]["reward"] == before[-1]["reward"]
    assert len(list(run.folder.glob("fork-twin*"))) == 2


@pytest.mark.full
def test_edits_change_the_update_and_the_fork_is_forked_and_replayed_like_a_run(run):
    """Its own edited step included: the record holds the advantages that the update had."""
    value = run.recorder.groups(2)[0].advantages[1]
    edits = (None, without_group(0), with_advantage(0, 1, value), with_advantage(0, 1, 9.0))
    twins = [forked(run, 2, str(i), edit=edit) for i, edit in enumerate(edits)]
    ends = [flat(restore(twin, 3).policy) for twin in twins]
    assert torch.equal(ends[0], ends[2]) and not torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[3])
    assert len(twins[1].recorder.groups(2)) == 2 and len(twins[1].recorder.groups(3)) == 3
    assert twins[1].recorder.groups(2)[0].group == run.recorder.groups(2)[1].group
    assert twins[3].recorder.groups(2)[0].advantages[1] == 9.0
    assert all(replay(twins[3], step).equal and not replay(twins[3], step).differs for step in (2, 4))
    again = forked(twins[3], 4, "again")
    assert content(again.recorder.folder) == content(twins[3].recorder.folder)


@pytest.mark.full
def test_the_steps_before_a_fork_keep_their_configuration(run):
    """They were computed with the run's: done again with the fork's, they would lead to other weights."""
    twin = forked(run, 2, lr=5e-3)
    again = forked(twin, 4, "again", lr=1e-4)
    for fork_of, steps in ((twin, (1, 2)), (again, (1, 2))):
        for step in steps:
            state = restore(fork_of, step)
            assert not state.notes and torch.equal(flat(state.policy), flat(restore(run, step).policy))
        assert replay(fork_of, 1).equal and restore(fork_of, 1).config.lr == 1e-3
    assert torch.equal(flat(restore(again, 4).policy), flat(restore(twin, 4).policy))
    assert [restore(again, step).config.lr for step in (3, 4)] == [5e-3, 1e-4]
    mended = forked(twin, 2, "mended", lr=1e-3)
    assert content(mended.recorder.folder) == content(run.recorder.folder)
    assert restore(twin, 2).config.lr == 5e-3  # its own from where it was forked
    shutil.rmtree(run.folder / "replay")
    assert replay(twin, 1).equal  # a fork holds all that it needs


def test_what_cannot_be_forked_is_named(run):
    with pytest.raises(ValueError, match="nothing to do up to steps=5"):
        forked(run, 5)
    for edit, text in ((without_group(7), "no number 7 among 3"), (with_advantage(0, 9, 1.0), "no number 9 among 4")):
        with pytest.raises(ValueError, match=text):
            forked(run, 2, edit=edit)
    shutil.rmtree(run.folder / "replay" / "step-00000000")
    with pytest.raises(ValueError, match="no way to step 2"):
        forked(run, 2)


# --- the step that broke it -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_step_that_crossed_the_bound_is_found(run, capsys):
    start = flat(restore(run, 0).policy)
    away = [-(flat(restore(run, k).policy) - start).norm().item() for k in range(6)]
    assert away == sorted(away, reverse=True)

    async def measure(policy):
        return -(flat(policy) - start).norm().item()

    assert not capsys.readouterr().out  # each state is loaded from the run itself: nothing to tell
    for step in range(5):
        found = asyncio.run(bisect(run, measure, (away[step] + away[step + 1]) / 2))
        assert found.step == step and (found.before, found.after) == (away[step], away[step + 1]) and len(found.measured) <= 5
    assert str(found).startswith(f"the update of step 4 took it from {away[4]:.3g} to {away[5]:.3g}")
    with pytest.raises(ValueError, match="below 1.0 already: ask for less"):
        asyncio.run(bisect(run, measure, 1.0))
    with pytest.raises(ValueError, match="not below -1000.0: nothing was lost"):
        asyncio.run(bisect(run, measure, -1000.0))


# --- neighbours -------------------------------------------------------------------------------------------------------


def test_a_run_is_diagnosed_from_its_folder(run):
    """The base never ends its answers here."""
    assert any(f.illness == "the end is lost" and f.step == 0 for f in diagnose(Run(root=run.folder)))


def test_a_changed_number_of_threads_is_warned_of(run):
    (path,) = run.recorder.folder.glob("*.json")
    path.write_text(path.read_text().replace('"threads": 1', '"threads": 2'))
    with pytest.warns(UserWarning, match="the run computed with 2 torch threads and this fork goes on with 1"):
        forked(run, 4)
