"""Rates, pass@k, checks of any kind, and the fixed prompts."""

import itertools
import math

import numpy as np
import pytest

from grpolab.arithmetic import Problem
from grpolab.chat import prompt_ids
from grpolab.chat_rules import checks, intact, stops
from grpolab.checker import check_answer
from grpolab.evaluate import (
    Evaluation,
    Interval,
    calibrate,
    clustered_interval,
    crossed_interval,
    evaluate,
    evaluate_checks,
    evaluate_fixed,
    evaluate_plain,
    fixed_prompts,
    improvement,
    mean_interval,
    pass_at_k,
    share_interval,
    side_by_side,
    student_t,
    suite_table,
    wilson,
)
from grpolab.rollouts import Rollout
from grpolab.sync import run_sync

ENDED = Rollout((1,), (2,), (1,), (0.0,), (0.0,), "eos")
CUT = Rollout((1,), (2,), (1,), (0.0,), (0.0,), "length")


class Parrot:
    """A sampler that says what it is told to, whatever is asked; `asked` holds the prompts' texts."""

    def __init__(self, policy, texts, reason):
        self.policy, self.texts, self.reason, self.asked = policy, itertools.cycle(texts), reason, []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def stream(self, prompts, *, group_size, params):
        for question, prompt in enumerate(prompts):
            self.asked.append(self.policy.tokenizer.decode(prompt))
            for sample in range(group_size):
                yield question, sample, self._rollout(prompt)

    def _rollout(self, prompt):
        tokens = tuple(self.policy.tokenizer.encode(next(self.texts), add_special_tokens=False))
        n = len(tokens)
        return Rollout(tuple(prompt), tokens, (1,) * n, (0.0,) * n, (0.0,) * n, self.reason)


@pytest.fixture
def says(tiny, monkeypatch):
    """says(*texts): from now on every evaluation of `tiny` samples these; returns the Parrot."""

    def parrot(*texts, reason="eos"):
        bird = Parrot(tiny, texts, reason)
        monkeypatch.setattr("grpolab.evaluate.Sampler", lambda policy: bird)
        return bird

    return parrot


def answered(problems, texts, greedy=False):
    passed = tuple(tuple(check_answer(t, p.answer) for t in of) for p, of in zip(problems, texts))
    return Evaluation(problems, texts, passed, greedy)


# --- pass@k -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "correct"), [(5, 0), (5, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, correct):
    samples = [True] * correct + [False] * (n - correct)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_one_is_the_exact_rate_and_too_few_samples_are_refused():
    problems = (Problem(1, "+", 1), Problem(2, "+", 2))
    e = answered(problems, (("\\boxed{2}", "\\boxed{3}"), ("x", "\\boxed{4}")))
    assert e.pass_at(1).value == e.exact.value == 0.5 and e.pass_at(2).value == 1.0
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples"):
        e.pass_at(3)


def test_the_interval_of_a_share_ends_where_a_share_cannot_be():
    """One sample of eighty wrong: the normal interval alone would end at 103 %."""
    problems = tuple(Problem(k, "+", 0) for k in range(20))
    right = tuple(tuple(f"\\boxed{{{k}}}" for _ in range(4)) for k in range(20))
    nearly = answered(problems, (("x", *right[0][1:]), *right[1:]))
    hardly = answered(problems, ((*right[0][:1], "x", "x", "x"), *((("x",) * 4,) * 19)))
    assert nearly.exact.high == nearly.pass_at(1).high == 1.0 and 0.9 < nearly.exact.low < nearly.exact.value < 1
    assert hardly.exact.low == hardly.pass_at(1).low == 0.0 and 0 < hardly.exact.value < hardly.exact.high < 0.1


# --- rates ------------------------------------------------------------------------------------------------------------


def test_wilson_by_hand():
    """8 of 10: Newcombe 1998, Statistics in Medicine 17, gives such intervals; the closed form by hand."""
    z2 = 1.959964**2
    i = wilson(8, 10)
    centre, half = (8 + z2 / 2) / (10 + z2), math.sqrt(z2) * math.sqrt(0.16 * 10 + z2 / 4) / (10 + z2)
    assert (i.low, i.high) == pytest.approx((centre - half, centre + half), abs=1e-9)
    assert (wilson(0, 5).low, wilson(5, 5).high) == pytest.approx((0.0, 1.0), abs=1e-12)
    assert all(i.low <= i.value <= i.high for n in range(1, 600) for i in (wilson(0, n), wilson(1, n), wilson(n, n)))


def test_values_of_one_cluster_count_as_one_sample():
    """Copies of a value add no certainty; clusters of one value each are independent values."""
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    alone, mean = clustered_interval(values, range(5)), mean_interval(values)
    assert (alone.low, alone.high) == pytest.approx((mean.low, mean.high))
    copied = clustered_interval(values * 4, [*range(5)] * 4)
    assert (copied.low, copied.high) == pytest.approx((mean.low, mean.high))
    assert mean_interval(values * 4).low > copied.low + 0.1
    with pytest.raises(ValueError, match="at least two questions, or clusters of them, got 1"):
        clustered_interval(values, [0] * 5)
    shares = share_interval(values * 4, [*range(5)] * 4)  # cut where no share can be
    assert (shares.low, shares.high) == (pytest.approx(copied.low), 1.0) and copied.high > 1
    assert share_interval(values, range(5)) == share_interval(values) == wilson(3, 5)
    for all_alike in (0.0, 1.0):  # no width, so Wilson's, with as many samples as there are clusters
        assert share_interval([all_alike] * 20, [*range(5)] * 4) == wilson(5 * int(all_alike), 5)
    with pytest.raises(ValueError, match="at least one question"):
        share_interval([], [])


def test_improvement_is_paired(tiny, says):
    problems = [Problem(a, "+", 1) for a in range(6)]
    right, wrong = ([f"\\boxed{{{p.answer + d}}}" for p in problems] for d in (0, 1))
    says(*right[:3], *wrong[3:])
    before = run_sync(evaluate(tiny, problems))
    says(*right[:5], *wrong[5:])
    after = run_sync(evaluate(tiny, problems))
    gain = improvement(before, after)
    assert gain.value == pytest.approx(2 / 6) and gain.low < 0 < 0.3 < gain.high
    with pytest.raises(ValueError, match="same questions"):
        improvement(before, run_sync(evaluate(tiny, problems[:3])))


def test_calibration_bins_hold_equally_many_in_order_of_the_prediction():
    points = calibrate([0.9, 0.5, 0.8, 0.6, 0.7, 0.55], [True, False, True, False, True, True], bins=3)
    assert [p for p, _ in points] == pytest.approx([0.525, 0.65, 0.85])
    assert [(i.value, i.high) for _, i in points] == [(v, wilson(int(2 * v), 2).high) for v in (0.5, 0.5, 1.0)]
    with pytest.raises(ValueError, match="do not fill 4 bins"):
        calibrate([0.5], [True], bins=4)


# --- any checks -------------------------------------------------------------------------------------------------------


def test_any_prompts_with_checks_of_ones_own(tiny, says, monkeypatch):
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    cases = [("Say 7.", lambda text, rollout: text == "7"), (conversation, lambda text, rollout: len(rollout.prompt) > 12)]
    says("7")
    checked = run_sync(evaluate_checks(tiny, cases))
    assert checked.passed == ((True,), (True,)) and checked.texts == (("7",), ("7",)) and checked.rate.value == 1
    says("7", "8")
    sampled = run_sync(evaluate_checks(tiny, cases[:1] * 2, samples=4))
    assert sampled.rates == [0.5, 0.5] and sampled.pass_at(2).value == pytest.approx(5 / 6)
    monkeypatch.undo()
    through_template = lambda text, rollout: list(rollout.prompt) == prompt_ids(tiny.tokenizer, "Hi") and len(text) < 9  # noqa
    assert run_sync(evaluate_checks(tiny, [("Hi", through_template)], max_new_tokens=3)).rate.value == 1
    with pytest.raises(ValueError, match="no questions"):
        run_sync(evaluate_checks(tiny, []))
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        run_sync(evaluate_checks(tiny, [((), cases[0][1])]))
    assert run_sync(evaluate_checks(tiny, [("", lambda text, rollout: True)], max_new_tokens=2)).rate.value == 1


# --- the fixed prompts ------------------------------------------------------------------------------------------------


def test_plain_questions_are_text_to_be_continued_and_their_first_line_is_the_answer(tiny, says):
    parrot = says(" 75\nWhat is 1", " 75.", " 76", "75")
    found = run_sync(evaluate_plain(tiny, [Problem(28, "+", 47)] * 4))
    assert parrot.asked == ["28 + 47 ="] * 4 and found.passed == ((True,), (False,), (False,), (True,))


def test_the_embedded_model_knows_more_than_half_in_its_own_form_and_repeats_what_its_text_gets_wrong(tiny):
    known = run_sync(evaluate_plain(tiny, [Problem(a, "+", b) for a in range(20, 60, 4) for b in range(13, 93, 8)]))
    assert 0.5 < known.rate.value < 0.95


@pytest.mark.parametrize(("low", "high", "verdict"), [(0.01, 0.2, "ahead"), (-0.2, -0.01, "behind"),
                                                      (-0.01, 0.2, "no difference seen"), (0.0, 0.2, "no difference seen")])
def test_a_difference_has_a_verdict_only_where_its_interval_lies_on_one_side(low, high, verdict):
    assert Interval((low + high) / 2, low, high).verdict == verdict
    assert Interval(0.075, 0.05, 0.1).points == "+7.5 points [+5.0, +10.0]"


boxed = checks({"prompt": "What is 1 + 1?", "answer": 2})["format"]
CHECKS = [
    (stops, "3", True), (stops, " \n", False),
    *((intact, text, False) for text in ("What\ufffd", "a\x00b", "7 - 7? " * 4, "abc" * 4, "-" * 12)),
    *((intact, text, True) for text in ("1 + 1 = \\boxed{2}.", "ha ha ha", "one\ntwo\n\nthree", "1111111", "", "é ü 日本")),
    (boxed, "= \\boxed{2}.", True), *((boxed, text, False) for text in ("2", "\\boxed{a}", "\\boxed{1} \\boxed{2}"))]


@pytest.mark.parametrize(("check", "text", "passes"), CHECKS)
def test_stop_token_corruption_and_format(check, text, passes):
    assert check(text, ENDED) == passes and not stops(text, CUT)


def test_the_shipped_prompts_are_sound():
    prompts = fixed_prompts()
    assert len(prompts) == len({row["prompt"] for row in prompts}) >= 30
    assert {len(checks(row)) for row in prompts} == {2, 4}
    for row in prompts:  # the plain ones: the answer is that of the problem
        words = row["prompt"].removeprefix("What is ").removesuffix("?").split()
        if row.get("answer") is not None and len(words) == 3 and words[0].isdigit() and words[2].isdigit():
            assert Problem(int(words[0]), words[1], int(words[2])).answer == row["answer"]
    with pytest.raises(ValueError, match="no suite of fixed prompts 'chat': take one of arithmetic, english"):
        fixed_prompts("chat")


def test_the_suite_judges_each_prompt_by_its_checks(tiny, says):
    prompts = [{"prompt": "What is 1 + 1?", "answer": 2}, {"prompt": "What is 1 + 2?", "answer": 3}, {"prompt": "Hello!"}]
    says("\\boxed{2}", "3", "Hi")
    good = run_sync(evaluate_fixed(tiny, prompts))
    assert {name: checked.rates for name, checked in good.items()} == {
        "stop token": [1, 1, 1], "no corruption": [1, 1, 1], "format": [1, 0], "arithmetic": [1, 0]}
    says("\\boxed{2}", reason="length")
    cut = run_sync(evaluate_fixed(tiny, prompts))
    table = suite_table(before=cut, after=good)
    assert table.loc["stop token", "before"].startswith("0.0%") and table.loc["stop token", "after"].startswith("100.0%")
    assert list(table["prompts"]) == [3, 3, 2, 2]
    with pytest.raises(ValueError, match="different prompts"):
        suite_table(before=run_sync(evaluate_fixed(tiny, prompts[:1])), after=good)


def test_answers_stand_side_by_side_with_the_verdict_in_a_column_apart():
    problems = (Problem(1, "+", 2), Problem(3, "+", 4))
    before = answered(problems, (("3",), (" \\boxed{7}",)), greedy=True)
    after = answered(problems, (("\\boxed{3}",), ("\\boxed{8}",)), greedy=True)
    table = side_by_side(before, after)
    assert list(table.index) == ["What is 1 + 2?", "What is 3 + 4?"]
    assert table["before: right"].tolist() == ["✗", "✓"] and table["before"].tolist() == ["3", "\\boxed{7}"]
    assert table["after: right"].tolist() == ["✓", "✗"] and len(side_by_side(before, after, n=1)) == 1
    with pytest.raises(ValueError, match="different questions"):
        side_by_side(before, answered(problems[::-1], (("3",), ("7",)), greedy=True))


@pytest.mark.parametrize("seen", [True, False])
def test_a_long_evaluation_shows_its_progress_to_who_watches(tiny, monkeypatch, capsys, seen):
    monkeypatch.setattr("grpolab.evaluate.WAIT", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: seen, raising=False)
    run_sync(evaluate(tiny, [Problem(1, "+", 2), Problem(3, "+", 4)], samples=3, max_new_tokens=4))
    assert ("evaluating" in capsys.readouterr().err) is seen


def test_students_quantiles_are_those_of_the_closed_forms_and_of_small_samples_alone():
    assert student_t(1) == pytest.approx(math.tan(math.pi * 0.475), abs=1e-3)
    assert student_t(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), abs=1e-3)
    assert all(student_t(k) > student_t(k + 1) > 1.96 for k in range(1, 30))
    with pytest.raises(ValueError, match="1 to 30 degrees of freedom, got 0"):
        student_t(0)


def test_an_interval_over_two_crossed_factors_holds_the_luck_of_both():
    """Where the rows alone differ it is that of their means; else by the mean squares, here 12, 3 and 1; and it covers the mean
    of three by three levels at least 95 times of 100."""
    rows = np.array([[0.1] * 3, [0.2] * 3, [0.3] * 3])
    plain = mean_interval([0.1, 0.2, 0.3], student_t(2))
    for table in (rows, rows.T):
        found = crossed_interval(table)
        assert (found.value, found.low, found.high) == pytest.approx((plain.value, plain.low, plain.high))
    found = crossed_interval(np.array([[0, 1, 2]]) + [[0], [2], [4]] + [[1, -1, 0], [-1, 1, 0], [0, 0, 0]])
    assert found.high - found.value == pytest.approx(student_t(2) * ((12 + 3 - 1) / 9) ** 0.5)
    rng, covered = np.random.default_rng(0), []
    for between in ((2.0, 2.0), (2.0, 0.0), (0.0, 0.0)):
        tables = [between[0] * rng.normal(size=(3, 1)) + between[1] * rng.normal(size=3) + rng.normal(size=(3, 3))
                  for _ in range(1000)]
        covered.append(np.mean([found.low < 0 < found.high for found in map(crossed_interval, tables)]))
    assert min(covered) > 0.93 and covered[1] < 0.98
