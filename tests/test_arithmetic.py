import time

import pytest

from grpolab.arithmetic import Problem, Task, generate, write_jsonl
from grpolab.checker import check_answer
from grpolab.tasks import read_rows


def test_question_and_target_are_the_ones_of_the_task():
    p = Problem(46, "*", 80)
    assert (p.question, p.target, p.answer) == ("What is 46 * 80?", "46 * 80 = \\boxed{3680}.", 3680)
    train, held_out = generate(2000, 100, seed=3)
    assert all(check_answer(p.target, p.answer) for p in train + held_out)


def test_train_is_unique_and_eval_disjoint():
    train, held_out = generate(9000, 900, seed=0, task=Task("+-", max_operand=99))
    assert (len(train), len(held_out)) == (9000, 900)
    assert len(set(train + held_out)) == 9900


def test_operators_come_in_equal_shares_and_in_range():
    train, _ = generate(3001, 0, seed=0)
    counts = {op: sum(p.op == op for p in train) for op in "+-*"}
    assert sorted(counts.values()) == [1000, 1000, 1001]
    assert max(max(p.a, p.b) for p in train if p.op == "*") <= 99
    assert 900 < max(max(p.a, p.b) for p in train if p.op != "*") <= 999
    assert any(p.answer < 0 for p in train)


def test_the_seed_decides():
    assert generate(50, 5, seed=7) == generate(50, 5, seed=7)
    assert generate(50, 5, seed=7) != generate(50, 5, seed=8)


def test_saturation_is_refused_quickly_and_just_below_it_works():
    digits = Task("*", max_factor=9)  # a key space of 100
    assert len(set(sum(generate(70, 10, task=digits), []))) == 80
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"81 problems with '\*' of the 100"):
        generate(71, 10, task=digits)
    with pytest.raises(ValueError, match="at most 4/5"):
        generate(10**9, 500)
    with pytest.raises(ValueError, match=r"'\*'"):  # of two million in all * has only 10 000
        generate(25_000, 500)
    with pytest.raises(ValueError, match="max_operand=5000000000"):
        generate(1, 1, task=Task("+", max_operand=5_000_000_000))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("bad", [{"ops": ""}, {"ops": "+/"}, {"ops": "++"}, {"max_operand": -1}])
def test_a_task_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError):
        Task(**bad)


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="-1"):
        generate(-1, 5)


def test_a_file_has_a_row_a_problem(tmp_path):
    train, _ = generate(30, 0)
    rows = read_rows(write_jsonl(tmp_path / "a" / "train.jsonl", train))
    assert [Problem(row["a"], row["op"], row["b"]) for row in rows] == train and rows[0]["answer"] == train[0].answer
    assert [f.name for f in (tmp_path / "a").iterdir()] == ["train.jsonl"]
