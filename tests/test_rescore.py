"""Another reward over a record: asked as in training, async ones too, and its advantages are those of an update."""

import asyncio
from dataclasses import replace

import pytest

from grpolab.arithmetic import Problem
from grpolab.lab.rescore import rescore
from grpolab.rollouts import Group, Rollout
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
        return await waited(text, problem, rollout)

    same = rescore(run, judge)
    assert same.changed == 0 and (same.rollouts["reward"] == same.rollouts["rescored_reward"]).all()
    assert max(most) == 12 and len(most) == 60


def test_a_reward_that_raises_costs_its_own_rollout(run):  # noqa: F811
    async def some(text, problem, rollout):
        return digits(text, problem, rollout) if rollout.seed % 4 else 1 / 0

    with pytest.warns(UserWarning, match="a reward raised ZeroDivisionError"):
        scored = rescore(run, some).rollouts["rescored_reward"]
    seeds = run.rollouts(columns=["seed"])["seed"]
    assert scored.isna().tolist() == [not s % 4 for s in seeds] and any(not s % 4 for s in seeds)
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


def test_what_was_lost_is_not_asked_for_and_an_edited_advantage_is_shown_as_recorded(run):  # noqa: F811
    lost = Rollout((1,), (), (), (), (), "lost")
    g = run.recorder.groups(4)[0]
    members = Group((*g.group.rollouts[:3], lost))
    run.recorder.rewind(4)
    edited = replace(g, group=members, absent=(False, False, False, True), advantages=(-7.0, *g.advantages[1:]))
    run.recorder.add(4, [edited], lambda ids: "x" * len(ids), {})
    asked = []
    scored = rescore(run, lambda text, problem, r: asked.append(text) or len(text), steps=[4]).rollouts
    assert len(asked) == 3 and all(asked) and scored["rescored_reward"].isna().tolist() == [False] * 3 + [True]
    assert scored["advantage"].iloc[0] == -7.0 != scored["rescored_advantage"].iloc[0]
