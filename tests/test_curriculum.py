import json
import math
import random

import pytest

from grpolab.env.curriculum import Curriculum, CurriculumConfig, success_rate

TIERS = [[f"{level}-{i}" for i in range(6)] for level in range(4)]
TASKS = [task for tier in TIERS for task in tier]


class Learner:
    """A synthetic policy. Skill (a logit) grows with the gradient that a GRPO group carries, p (1 - p), more slowly the
    less the tier below is known, and what is not trained is slowly forgotten. `ceiling`: what a task's chance is multiplied
    by, at 0 it is impossible."""

    def __init__(self, seed, ceiling=None):
        self.rng, self.ceiling = random.Random(seed), ceiling or {}
        self.skill = {task: 0.0 - 1.5 * int(task[0]) for task in TASKS}

    def chance(self, task):
        level = int(task[0])
        below = [self.skill[t] for t in TIERS[level - 1] if self.ceiling.get(t, 1)] if level else [3.0]
        help_from_below = 0.4 * min(sum(below) / len(below), 3.0) if below else 0.0
        return self.ceiling.get(task, 1) / (1 + math.exp(-self.skill[task] - help_from_below))

    def train(self, task, group_size=8):
        p = self.chance(task)
        rate = sum(self.rng.random() < p for _ in range(group_size)) / group_size
        for other in TASKS:
            self.skill[other] -= 0.002 * max(self.skill[other] + 3, 0)
        self.skill[task] += 4.0 * rate * (1 - rate) * 0.6
        return rate

    def mean(self):
        return sum(map(self.chance, TASKS)) / len(TASKS)


def with_curriculum(seed, groups, ceiling=None):
    learner, curriculum, log = Learner(seed, ceiling), Curriculum(TIERS, seed=seed), []
    for _ in range(groups):
        task = curriculum.next_task()
        log.append((task, learner.train(task)))
        curriculum.record_result(*log[-1])
    return learner, curriculum, log


def uniform(seed, groups, ceiling=None):
    learner, rng = Learner(seed, ceiling), random.Random(seed)
    for _ in range(groups):
        learner.train(rng.choice(TASKS))
    return learner


def means(groups, ceiling):
    """(with the curriculum, uniform): mean success over all 24 tasks after so many groups, averaged over 8 seeds."""
    return [sum(mean(seed) for seed in range(8)) / 8 for mean in (
        lambda seed: with_curriculum(seed, groups, ceiling)[0].mean(), lambda seed: uniform(seed, groups, ceiling).mean())]


def of(curriculum, task):
    """The task's row in the table."""
    return next(row for row in curriculum.table() if row["task"] == task)


def constant(curriculum, rate, groups):
    """Feed the same rate whatever the task; returns the tasks in order."""
    order = []
    for _ in range(groups):
        order.append(curriculum.next_task())
        curriculum.record_result(order[-1], rate)
    return order


def test_it_teaches_a_synthetic_learner_better_than_uniform_choice():
    gains = [with_curriculum(seed, 200)[0].mean() - uniform(seed, 200).mean() for seed in range(8)]
    assert min(gains) > 0.05 and sum(gains) / len(gains) > 0.1, gains


@pytest.mark.parametrize("ceiling, was, best", [
    (dict.fromkeys(TIERS[0][:2], 0), 0.17, 0.07),  # two of six tasks of the first tier are impossible
    ({t: 0 for t in TASKS if t[-1] in "01"}, 0.16, 0.06),  # two of six in each tier
    (dict.fromkeys(TIERS[0], 0), 0.03, 0.08),  # the whole first tier
    (dict.fromkeys(TIERS[0], 0.5), 0.19, -0.05),  # nothing of the first tier can be known better than half
], ids=["two", "each", "all", "half"])
def test_a_tier_that_cannot_be_passed_does_not_close_the_others_for_ever(ceiling, was, best):
    """`was` is what the curriculum reached when it waited for every task of a tier: it never left the first. Uniform choice
    is the bar, and but for the last case the curriculum is above it by more than `best`."""
    ours, theirs = means(400, ceiling)
    assert ours > theirs + best and ours > was + 0.2, (ours, theirs)


def test_three_successes_in_ten_promote_nobody_before_patience_ends():
    """The any-of-8 pathology: such a policy reached the last tier within 12 groups."""
    rng = random.Random(0)
    curriculum, opened = Curriculum(TIERS), []
    for group in range(500):
        curriculum.record_result(curriculum.next_task(), sum(rng.random() < 0.3 for _ in range(8)) / 8)
        opened += [group + 1] if curriculum.tier > len(opened) else []
    assert opened == [120, 240, 360] and not any(row["mastered"] for row in curriculum.table())  # 10 x 2 results x 6 tasks


def test_a_task_that_never_succeeds_is_tried_ever_more_rarely_and_one_success_brings_it_back():
    curriculum = Curriculum([["never", *(f"some{i}" for i in range(5))]])
    at = []
    for step in range(400):
        task = curriculum.next_task()
        at += [step] if task == "never" else []
        curriculum.record_result(task, 0.0 if task == "never" else 0.4)
    gaps = [b - a for a, b in zip(at, at[1:])]
    assert 6 <= len(at) < 20 and gaps[-1] > 50 and of(curriculum, "never")["hopeless"]
    curriculum.record_result("never", 0.125)
    assert not of(curriculum, "never")["hopeless"] and not of(curriculum, "never")["due"]


def test_promotion_needs_every_task_of_the_tier():
    curriculum = Curriculum(TIERS)
    for task in TIERS[0][:-1]:
        for _ in range(5):
            curriculum.record_result(task, 1.0)
    assert curriculum.tier == 0
    curriculum.record_result(TIERS[0][-1], 1.0)
    assert curriculum.tier == 0  # once is no evidence
    curriculum.record_result(TIERS[0][-1], 1.0)
    assert curriculum.tier == 1
    assert curriculum.next_task() in TIERS[1]


def test_promotion_is_undone_when_the_tier_below_is_lost():
    curriculum = Curriculum(TIERS)
    constant(curriculum, 1.0, 12)
    assert curriculum.tier == 1
    for _ in range(5):
        for task in TIERS[0]:
            curriculum.record_result(task, 0.0)
    assert curriculum.tier == 0 and curriculum.next_task() in TIERS[0]


def test_the_review_interval_advances_and_a_miss_starts_over():
    curriculum = Curriculum([["a", "b"]], config=CurriculumConfig(interval=4))
    seen = []
    for _ in range(8):
        curriculum.record_result("a", 1.0)
        seen.append(of(curriculum, "a")["interval"])
    assert seen == [0, 4, 8, 16, 32, 64, 128, 128]
    curriculum.record_result("a", 0.5)
    assert of(curriculum, "a")["mastered"] and of(curriculum, "a")["interval"] == 4
    for due in (False, False, False, True):
        curriculum.record_result("b", 0.5)
        assert of(curriculum, "a")["due"] is due
    curriculum.record_result("a", 0.0)
    assert not of(curriculum, "a")["mastered"] and of(curriculum, "a")["rate"] == pytest.approx(0.7)


def test_the_untried_come_first_and_none_twice_in_a_row():
    curriculum = Curriculum(TIERS)
    order = constant(curriculum, 0.4, 60)
    assert sorted(order[:6]) == sorted(TIERS[0])
    assert all(a != b for a, b in zip(order, order[1:]))


def test_several_tasks_at_once_are_different_while_there_are_enough():
    curriculum = Curriculum(TIERS)
    assert len(set(curriculum.next_tasks(4))) == 4
    twice = curriculum.next_tasks(12)
    assert set(twice[:6]) == set(TIERS[0]) and twice[6:] == twice[:6]
    assert curriculum.next_tasks(3)[0] == curriculum.next_task()
    for task in TIERS[0][:4]:
        for _ in range(2):
            curriculum.record_result(task, 1.0)
    assert set(curriculum.next_tasks(6)) == set(TIERS[0][4:])  # those that are known are left out, not filled up with


def test_the_order_is_a_function_of_the_seed_and_the_log_alone():
    random.seed(1)
    first = constant(Curriculum(TIERS, seed=3), 0.5, 50)
    random.seed(2)
    assert constant(Curriculum(TIERS, seed=3), 0.5, 50) == first
    assert constant(Curriculum(TIERS, seed=4), 0.5, 50) != first
    curriculum = Curriculum(TIERS)
    assert curriculum.next_task() == curriculum.next_task()


@pytest.mark.parametrize("at", [0, 1, 17, 60, 119])
def test_a_restored_curriculum_goes_on_as_if_nothing_had_happened(at):
    _, whole, log = with_curriculum(5, 120, dict.fromkeys(TIERS[0][:2], 0))
    part = Curriculum(TIERS, seed=5)
    for task, rate in log[:at]:
        part.record_result(task, rate)
    again = Curriculum(TIERS, seed=99)
    again.load(json.loads(json.dumps(part.state())))
    assert again.state() == part.state()
    for task, rate in log[at:]:
        assert again.next_tasks(3) == part.next_tasks(3) and again.next_task() == task
        again.record_result(task, rate)
        part.record_result(task, rate)
    assert again.table() == whole.table() and again.state() == whole.state()


def test_the_state_does_not_grow_with_the_run_and_belongs_to_its_tiers():
    curriculum = Curriculum(TIERS)
    constant(curriculum, 0.5, 1000)
    before = len(json.dumps(curriculum.state()))
    constant(curriculum, 0.5, 3000)
    assert len(json.dumps(curriculum.state())) < before + 200
    with pytest.raises(ValueError, match="other tiers"):
        Curriculum(TIERS[:3]).load(curriculum.state())
    with pytest.raises(ValueError, match="other tiers"):
        Curriculum(TIERS[::-1]).load(curriculum.state())


def test_a_group_of_rewards_becomes_a_rate():
    assert success_rate([1.0, 0.0, None, 1.0], 1.0) == pytest.approx(2 / 3)
    assert Curriculum(TIERS).record("0-0", [0.5, 0.9], success=0.8) == 0.5
    for bad in ([], [None], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(ValueError, match="reward"):
            success_rate(bad)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="no tier"):
        Curriculum(TIERS).record_result("9-9", 1.0)
    for rate in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="rate="):
            Curriculum(TIERS).record_result("0-0", rate)
    with pytest.raises(ValueError, match="twice"):
        Curriculum([["a"], ["a"]])
    with pytest.raises(ValueError, match="at least one"):
        Curriculum([["a"], []])
    for bad in ({"promote": 0.4}, {"mastery": 0.0}, {"window": 0}, {"min_tries": 9}, {"interval": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            CurriculumConfig(**bad)
