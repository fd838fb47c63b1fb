"""Another reward over a record: asked as in training, async ones too, and its advantages are those of an update."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from grpolab.arithmetic import Problem
from grpolab.lab.counterfactual import with_token
from grpolab.lab.rescore import rescore
from grpolab.lab.restore import restore
from grpolab.rollouts import Group, RecordedGroup, Rollout
from grpolab.runs.run import Run
from tests.test_counterfactual import left, run  # noqa: F401
from tests.test_rollout_log import CONFIG, digits, train


def test_the_same_reward_changes_nothing_and_its_negative_everything(run):  # noqa: F811
    same = rescore(run, digits)
    assert len(same.rollouts) == 60 and len(same.groups) == 15 and same.changed == 0
    assert (same.rollouts["reward"] == same.rollouts["rescored_reward"]).all()
    other = rescore(run, lambda *a: -digits(*a))
    signal = run.rollouts().groupby(["step", "group"])["reward"].nunique() > 1
    assert other.changed == signal.sum() > 5 and not other.groups["lost"].any()
    assert (other.rollouts["advantage"] == -other.rollouts["rescored_advantage"]).all()
    twice = rescore(run, lambda *a: 2 * digits(*a))  # larger, and of the same sign
    assert twice.changed == 0 and twice.rollouts["rescored_advantage"].abs().sum() > same.rollouts["advantage"].abs().sum()


def test_a_reward_is_asked_as_in_training(run):  # noqa: F811
    """With the Problem, the recorded text and rollout; one that abstains or gives all at once, too."""
    rollouts, seen = run.recorder.groups(3), []

    class Whole:
        def batch(self, texts, problems, asked):
            seen.append((texts, problems, asked))
            return [None if r.seed % 2 else 1.0 for r in asked]

    flat_reward = rescore(run, Whole(), steps=[3])
    texts, problems, asked = seen[0]
    assert asked == [r for g in rollouts for r in g.group] and isinstance(problems[0], Problem) and len(seen) == 1
    assert texts == run.rollouts(3)["completion"].tolist()
    assert flat_reward.rollouts["rescored_reward"].isna().tolist() == [bool(r.seed % 2) for r in asked]
    assert flat_reward.groups["lost"].sum() == (run.rollouts(3).groupby("group")["reward"].nunique() > 1).sum()
    assert "would have been pushed the other way" in str(flat_reward)
    assert flat_reward.plot().get_ylabel() == "mean reward"
    with pytest.raises(ValueError, match="no recorded rollouts of these steps"):
        rescore(run, digits, steps=[99])


async def waited(text, problem, rollout):
    """`digits`, after others were asked."""
    await asyncio.sleep(0.001 * (rollout.seed % 3))
    return digits(text, problem, rollout)


def test_an_async_reward_is_asked_for_a_step_at_once(run):  # noqa: F811
    running, most = [], []

    async def judge(text, problem, rollout):
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.001)
        running.pop()
        return digits(text, problem, rollout)

    same = rescore(run, judge)
    assert same.changed == 0 and (same.rollouts["reward"] == same.rollouts["rescored_reward"]).all()
    assert max(most) == 12 and len(most) == 60
    assert (rescore(run, waited).rollouts["rescored_reward"] == same.rollouts["reward"]).all()  # each its own


IN_A_NOTEBOOK = """
import asyncio, sys
from grpolab.lab.rescore import rescore
from grpolab.runs.run import Run
from tests.test_rescore import waited

async def cell():
    return rescore(Run(root=sys.argv[1]), waited)

found = asyncio.run(cell())
print(len(found.rollouts), found.changed)
"""


@pytest.mark.full
def test_an_async_reward_inside_a_running_loop(run):  # noqa: F811
    """In a process of its own, since nest_asyncio patches asyncio."""
    done = subprocess.run([sys.executable, "-c", IN_A_NOTEBOOK, str(run.folder)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["60", "0"], done.stderr


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_reward_that_raises_costs_its_own_rollout(run, kind):  # noqa: F811
    def some(text, problem, rollout):
        return digits(text, problem, rollout) if rollout.seed % 4 else 1 / 0

    async def late(text, problem, rollout):
        return some(text, problem, rollout)

    with pytest.warns(UserWarning, match="a reward raised ZeroDivisionError"):
        found = rescore(run, some if kind == "plain" else late)
    seeds = run.rollouts(columns=["seed"])["seed"]
    assert found.rollouts["rescored_reward"].isna().tolist() == [not s % 4 for s in seeds] and any(not s % 4 for s in seeds)
    with pytest.raises(ZeroDivisionError):
        rescore(run, lambda *a: 1 / 0)


def test_an_advantage_over_the_whole_batch_is_taken_over_it(tiny, tmp_path):
    """Of the groups that the update got; the same reward gives the recorded advantages in every bit."""
    whole = Run("whole", root=tmp_path)
    config = replace(CONFIG, steps=2, advantage_kind="batch_standardised", refills=1)

    def reward(text, problem, rollout):
        return float(problem.a % 2 and rollout.seed % 2)

    train(tiny, whole, config, reward=reward)
    same = rescore(whole, reward).rollouts
    assert (same["advantage"] == same["rescored_advantage"]).all() and same["advantage"].any()
    assert same["advantage"].tolist() == whole.rollouts()["advantage"].tolist()
    assert not (rescore(whole, reward, kind="centred").rollouts["rescored_advantage"] == same["advantage"]).all()


def test_what_was_lost_is_not_asked_for(run):  # noqa: F811
    lost = Rollout((1,), (), (), (), (), "lost")
    g = run.recorder.groups(4)[0]
    members = Group((*g.group.rollouts[:3], lost))
    run.recorder.rewind(4)
    run.recorder.add(4, [replace(g, group=members, absent=(False, False, False, True))], lambda ids: "x" * len(ids), {})
    asked = []
    found = rescore(run, lambda text, problem, r: asked.append(text) or len(text), steps=[4])
    assert len(asked) == 3 and all(asked) and found.rollouts["rescored_reward"].isna().tolist() == [False] * 3 + [True]


def test_the_advantage_of_an_edited_fork_is_its_recorded_one(run):  # noqa: F811
    """with_advantage leaves one that no reward gives."""
    groups = run.recorder.groups(4)
    run.recorder.rewind(4)
    run.recorder.add(4, [replace(groups[0], advantages=(-7.0, *groups[0].advantages[1:])), *groups[1:]], str, {})
    found = rescore(run, digits, steps=[4])
    assert found.rollouts["advantage"].iloc[0] == -7.0 != found.rollouts["rescored_advantage"].iloc[0]


def test_a_forced_token_with_an_async_reward_and_a_batch_advantage(run):  # noqa: F811
    state, groups = restore(run, 3), run.recorder.groups(3)
    nine = state.policy.tokenizer.convert_tokens_to_ids("9")
    plain, late = (with_token(1, 2, 3, nine, reward)(groups, state) for reward in (digits, waited))
    assert plain == late and isinstance(plain[1], RecordedGroup)
    together = replace(state, config=replace(state.config, advantage_kind="batch_standardised", temperature=0.7))
    other = with_token(1, 2, 3, nine, lambda *a: 50.0)(groups, together)
    assert other[0].advantages != groups[0].advantages  # the deviation of the whole batch has changed
    r = other[1].group[2]
    assert r.raw_logps[:3] == groups[1].group[2].raw_logps[:3] and r.raw_logps[3] != r.logps[3]
    assert r.raw_logps[3] == pytest.approx(plain[1].group[2].logps[3], abs=1e-5)
