"""The parity task: answers, both kinds of demonstrations, the generator and the mixture."""

import pytest

from grpolab.checker import check_answer
from grpolab.parity import Parity, generate_parity, mixture


@pytest.mark.parametrize(("bits", "answer", "steps"), [("0", 0, "e"), ("1", 1, "o"), ("1011", 1, "ooeo"), ("0110", 0, "eoee")])
def test_answers_and_demonstrations(bits, answer, steps):
    problem = Parity(bits)
    assert problem.answer == answer and problem.question == f"{bits}?"
    assert problem.long == f"{steps} {problem.short}"
    assert check_answer(problem.short, answer) and check_answer(problem.long, answer)
    assert not check_answer(problem.short, 1 - answer)


@pytest.mark.parametrize("bits", ["", "012", "1 0", "one"])
def test_bits_are_zeros_and_ones(bits):
    with pytest.raises(ValueError, match="write at least one 0 or 1"):
        Parity(bits)


def test_the_questions_are_distinct_balanced_and_made_again_from_the_seed():
    train, held_out = generate_parity(600, 200, bits=12, seed=3)
    assert len(set(train) | set(held_out)) == 800 and {len(p.bits) for p in train} == {12}
    assert 0.4 < sum(p.answer for p in train) / 600 < 0.6
    assert (train, held_out) == generate_parity(600, 200, bits=12, seed=3)
    assert train != generate_parity(600, 200, bits=12, seed=4)[0]


@pytest.mark.parametrize("sizes", [(9, 0), (8, 1), (-1, 2)])
def test_no_more_than_half_of_all_there_are(sizes):
    assert len(generate_parity(6, 2, bits=4, seed=0)[0]) == 6
    with pytest.raises(ValueError, match="bits=4"):
        generate_parity(*sizes, bits=4, seed=0)
    with pytest.raises(ValueError, match="bits=64"):
        generate_parity(4, 4, bits=64, seed=0)


def test_the_mixture_holds_the_share_that_was_asked_for():
    problems = generate_parity(40, 0, bits=8, seed=0)[0]
    for share, n in ((0, 0), (0.1, 4), (1, 40)):
        made = mixture(problems, share)
        assert [said for _, said in made] == [p.long for p in problems[:n]] + [p.short for p in problems[n:]]
    with pytest.raises(ValueError, match="share=1.5"):
        mixture(problems, 1.5)
