import json
import math
import random

import pytest

from grpolab.env.curriculum import Curriculum, CurriculumConfig

TIERS = [[f"{level}-{i}" for i in range(6)] for level in range(4)]
TASKS = [task for tier in TIERS for task in tier]


class Learner:
    """A synthetic policy. Skill (a logit) grows with the gradient that a GRPO group carries, p (1 - p), more slowly the
    less the tier below is known, and what is not trained is slowly forgotten."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.skill = {task: 0.0 - 1.5 * int(task[0]) for task in TASKS}

    def chance(self, task):
        level = int(task[0])
        below = [self.skill[t] for t in TIERS[level - 1]] if level else [3.0]
        return 1 / (1 + math.exp(-self.skill[task] - 0.4 * min(sum(below) / len(below), 3.0)))

    def train(self, task, group_size=8):
        p = self.chance(task)
        rate = sum(self.rng.random() < p for _ in range(group_size)) / group_size
        for other in TASKS:
            self.skill[other] -= 0.002 * max(self.skill[other] + 3, 0)
        self.skill[task] += 4.0 * rate * (1 - rate) * 0.6
        return rate

    def mean(self):
        return sum(map(self.chance, TASKS)) / len(TASKS)


def with_curriculum(seed, groups):
    learner, curriculum = Learner(seed), Curriculum(TIERS, seed=seed)
    for _ in range(groups):
        task = curriculum.next_task()
        curriculum.record_result(task, learner.train(task))
    return learner, curriculum


def uniform(seed, groups):
    learner, rng = Learner(seed), random.Random(seed)
    for _ in range(groups):
        learner.train(rng.choice(TASKS))
    return learner


def constant(curriculum, rate, groups):
    """Feed the same rate whatever the task; returns the tasks in order."""
    order = []
    for _ in range(groups):
        order.append(curriculum.next_task())
        curriculum.record_result(order[-1], rate)
    return order


def test_it_teaches_a_synthetic_learner_better_than_uniform_choice():
    gains = []
    for seed in range(8):
        learner, _ = with_curriculum(seed, 200)
        gains.append(learner.mean() - uniform(seed, 200).mean())
    assert min(gains) > 0.05 and sum(gains) / len(gains) > 0.1, gains


def test_three_successes_in_ten_promote_nobody():
    """The any-of-8 pathology: such a policy reached the last tier within 12 groups."""
    rng = random.Random(0)
    curriculum = Curriculum(TIERS)
    for _ in range(500):
        curriculum.record_result(curriculum.next_task(), sum(rng.random() < 0.3 for _ in range(8)) / 8)
    assert curriculum.tier == 0 and not any(row["mastered"] for row in curriculum.table())


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


def test_success_everywhere_reaches_the_last_tier_having_seen_everything_below():
    curriculum = Curriculum(TIERS)
    order = constant(curriculum, 1.0, 100)
    assert curriculum.tier == 3
    for level in range(3):
        first_above = next(i for i, task in enumerate(order) if int(task[0]) > level)
        assert set(TIERS[level]) <= set(order[:first_above])


def test_promotion_is_undone_when_the_tier_below_is_lost():
    curriculum = Curriculum(TIERS)
    constant(curriculum, 1.0, 12)
    assert curriculum.tier == 1
    for _ in range(5):
        for task in TIERS[0]:
            curriculum.record_result(task, 0.0)
    assert curriculum.tier == 0 and curriculum.next_task() in TIERS[0]


def test_failure_lowers_mastery():
    curriculum = Curriculum([["a", "b"]])
    for _ in range(5):
        curriculum.record_result("a", 1.0)
    assert curriculum.mastered("a")
    for _ in range(2):
        curriculum.record_result("a", 0.0)
    assert not curriculum.mastered("a") and curriculum.rate("a") == pytest.approx(0.6)


def test_the_review_interval_advances_and_a_miss_starts_over():
    curriculum = Curriculum([["a", "b"]], config=CurriculumConfig(interval=4, longest_interval=64))

    def interval():
        return curriculum.table()[0]["interval"]

    seen = []
    for _ in range(7):
        curriculum.record_result("a", 1.0)
        seen.append(interval())
    assert seen == [0, 4, 8, 16, 32, 64, 64]
    curriculum.record_result("a", 0.5)
    assert curriculum.mastered("a") and interval() == 4
    for _ in range(3):
        curriculum.record_result("b", 0.5)
    assert not curriculum.due("a")
    curriculum.record_result("b", 0.5)
    assert curriculum.due("a")


def test_reviews_of_what_is_known_grow_rare_but_never_end():
    curriculum = Curriculum([["known", *(f"hard{i}" for i in range(5))]])
    at = []
    for step in range(400):
        task = curriculum.next_task()
        at += [step] if task == "known" else []
        curriculum.record_result(task, 1.0 if task == "known" else 0.4)
    gaps = [b - a for a, b in zip(at, at[1:])]
    assert 5 <= len(at) < 20 and gaps[-1] > 50 and gaps[1:] == sorted(gaps[1:])


def test_a_hopeless_task_does_not_take_over():
    curriculum = Curriculum([["hopeless", "half", "most", "third"]])
    order = []
    for _ in range(100):
        task = curriculum.next_task()
        order.append(task)
        curriculum.record_result(task, {"hopeless": 0.0, "third": 0.3, "half": 0.5, "most": 0.7}[task])
    assert 0 < order.count("hopeless") < order.count("half") < order.count("third") < 50


def test_the_untried_come_first_and_none_twice_in_a_row():
    curriculum = Curriculum(TIERS)
    order = constant(curriculum, 0.4, 60)
    assert sorted(order[:6]) == sorted(TIERS[0])
    assert all(a != b for a, b in zip(order, order[1:]))


def test_several_tasks_at_once_are_different():
    curriculum = Curriculum(TIERS)
    assert len(set(curriculum.next_tasks(4))) == 4 and len(curriculum.next_tasks(99)) == 6
    assert curriculum.next_tasks(3)[0] == curriculum.next_task()


def test_the_order_is_a_function_of_the_seed_and_the_log_alone():
    random.seed(1)
    first = constant(Curriculum(TIERS, seed=3), 0.5, 50)
    random.seed(2)
    assert constant(Curriculum(TIERS, seed=3), 0.5, 50) == first
    assert constant(Curriculum(TIERS, seed=4), 0.5, 50) != first
    curriculum = Curriculum(TIERS)
    assert curriculum.next_task() == curriculum.next_task()


def test_a_saved_curriculum_goes_on_as_if_nothing_had_happened(tmp_path):
    _, whole = with_curriculum(5, 120)
    part = Curriculum(TIERS, seed=5)
    for task, rate in whole.log[:60]:
        part.record_result(task, rate)
    part.save(tmp_path / "curriculum.json")
    again = Curriculum(TIERS)
    again.restore(tmp_path / "curriculum.json")
    for task, rate in whole.log[60:]:
        assert again.next_task() == task
        again.record_result(task, rate)
    assert again.table() == whole.table() and again.tier == whole.tier
    with pytest.raises(RuntimeError, match="fresh"):
        again.restore(tmp_path / "curriculum.json")


def test_tasks_may_be_dictionaries():
    curriculum = Curriculum([[{"a": 1, "op": "+", "b": 2}]])
    curriculum.record_result({"b": 2, "op": "+", "a": 1}, 1.0)
    assert curriculum.table()[0]["tries"] == 1 and json.dumps(curriculum.table())


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_rate_is_a_rate(rate):
    with pytest.raises(ValueError, match="rate="):
        Curriculum(TIERS).record_result("0-0", rate)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="no tier"):
        Curriculum(TIERS).record_result("9-9", 1.0)
    with pytest.raises(ValueError, match="twice"):
        Curriculum([["a"], ["a"]])
    with pytest.raises(ValueError, match="at least one"):
        Curriculum([["a"], []])
    for bad in ({"promote": 0.4}, {"mastery": 0.0}, {"window": 0}, {"min_tries": 9}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            CurriculumConfig(**bad)
