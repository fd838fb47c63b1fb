import random
from functools import cache

import pytest

from grpolab.arithmetic import Task
from grpolab.env.calculator import CalculatorEnv, ExpressionError, calculate
from grpolab.env.guess import GuessEnv, best_first_guesses, fewest_guesses
from grpolab.env.protocol import InvalidAction


@pytest.mark.parametrize("text, value", [
    ("2+3*4", 14), ("(2+3)*4", 20), ("-3", -3), ("--3", 3), ("2 - -3", 5), ("10-2-3", 5), (" 7 \u00d7 8 ", 56),
    ("5 \u2212 9", -4), ("((((1))))", 1), ("0", 0), ("007", 7), ("+4", 4), ("-(2+3)*2", -10),
])
def test_calculate(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize("text", [
    "", " ", "(", ")", "1+", "*2", "2**3", "1 2", "(1", "1)", "a", "1/2", "__import__('os')", "9" * 13,
    "1+" * 60 + "1", "*".join(["9" * 12] * 4), "1\n2", "1e5", "0x10", "2,3", "\u0663", "1;2",
])
def test_calculate_refuses(text):
    with pytest.raises(ExpressionError):
        calculate(text)


def test_calculate_agrees_with_python_on_random_expressions():
    rng = random.Random(0)

    def grow(depth):
        if depth == 0 or rng.random() < 0.3:
            n = rng.randrange(100)
            return str(n), n
        (a, x), (b, y), op = grow(depth - 1), grow(depth - 1), rng.choice("+-*")
        return f"({a}{op}{b})", {"+": x + y, "-": x - y, "*": x * y}[op]

    checked = 0
    for _ in range(300):
        text, value = grow(3)
        if len(text) <= 100:
            assert calculate(text) == value
            checked += 1
    assert checked > 200


def test_an_episode_with_the_tool():
    env = CalculatorEnv()
    assert env.reset(task={"a": 12, "op": "*", "b": 7}).observation == {"text": "What is 12 * 7?"}
    used = env.step({"text": "I use it. calc: 12*7\nthen"})
    assert used.observation["text"] == "84" and used.reward is None and not used.done
    answered = env.step({"text": "12 * 7 = \\boxed{84}."})
    assert answered.reward == 1.0 and answered.done and answered.metadata["calls"] == 1
    with pytest.raises(RuntimeError, match="over"):
        env.step({"text": "calc: 1"})


def test_a_wrong_answer_a_bad_expression_and_the_turn_limit():
    env = CalculatorEnv(max_turns=3)
    env.reset(task={"a": 1, "op": "+", "b": 1})
    assert env.step({"text": "\\boxed{3}"}).reward == 0.0
    env.reset(task={"a": 1, "op": "+", "b": 1})
    first, second, last = (env.step({"text": text}) for text in ("calc: 1/0", "hmm", "calc: 1+1"))
    assert first.observation["text"].startswith("error") and "calc:" in second.observation["text"]
    assert (first.reward, second.reward, last.reward, last.done) == (None, None, 0.0, True)


def test_the_question_is_a_function_of_the_seed_and_not_of_the_global_generator():
    def questions(seeds):
        return [CalculatorEnv(problems=Task(max_operand=9999)).reset(seed=s).observation["text"] for s in seeds]

    random.seed(1)
    first = questions(range(20))
    random.seed(2)
    assert questions(range(20)) == first and len(set(first)) > 15


def test_the_state_does_not_tell_the_answer():
    env = CalculatorEnv()
    env.reset(task={"a": 12, "op": "*", "b": 7})
    assert set(env.state()) == {"turn", "calls", "max_turns", "done"}


@pytest.mark.parametrize("action", [{}, {"text": 3}, {"text": "a", "more": 1}, {"guess": 3}])
def test_an_action_must_be_a_text(action):
    env = CalculatorEnv()
    env.reset(seed=0)
    with pytest.raises(InvalidAction):
        env.step(action)


@pytest.mark.parametrize("task", [
    {}, {"a": 1, "op": "/", "b": 2}, {"a": "x", "op": "+", "b": 2}, 3, [1, "+", 2], {"a": 2.9, "op": "+", "b": 2},
    {"a": 2, "op": "+", "b": True}, {"a": "3", "op": "+", "b": 2}, {"a": 10**12, "op": "*", "b": 2},
    {"a": 1, "op": [], "b": 2}])
def test_a_task_must_be_a_problem(task):
    with pytest.raises(InvalidAction):
        CalculatorEnv().reset(task=task)


def test_the_guessing_game():
    env = GuessEnv(max_turns=3)
    env.reset(task={"secret": 50})
    seen = [env.step({"text": text}) for text in ("none", "I say 51", "50")]
    assert [result.observation["text"] for result in seen] == ["write a number", "lower", "correct"]
    assert [(result.reward, result.done) for result in seen] == [(None, False), (None, False), (1.0, True)]
    with pytest.raises(RuntimeError, match="over"):
        env.step({"text": "50"})
    assert env.reset(seed=3).observation == env.reset(seed=3).observation


def test_an_early_find_is_worth_more():
    env = GuessEnv()
    env.reset(task={"secret": 42})
    assert env.step({"text": "100000000042"}).observation["text"] == "lower"  # and is not 42
    env = GuessEnv(highest=9, max_turns=4, price=0.1)
    for guesses, reward in (("5", 1.0), ("345", 0.8), ("1235", 0.7), ("1234", 0.0)):
        env.reset(task={"secret": 5})
        paid = [env.step({"text": guess}).reward for guess in guesses]
        assert paid[:-1] == [None] * (len(guesses) - 1) and paid[-1] == pytest.approx(reward)
    for price in (-0.1, 0.34, float("nan")):
        with pytest.raises(ValueError, match=f"price={price}"):
            GuessEnv(max_turns=4, price=price)


def test_the_notes_say_what_is_still_possible():
    env = GuessEnv(highest=100, max_turns=9, notes=True)
    for _ in range(2):  # a second game starts afresh
        env.reset(task={"secret": 30})
        said = [env.step({"text": guess}).observation["text"] for guess in ("50", "20", "10", "60", "?", "29", "30")]
        assert said == ["lower: 1 to 49", "higher: 21 to 49", "higher: 21 to 49", "lower: 21 to 49",
                        "write a number: 21 to 49", "higher: 30 to 49", "correct"]


def test_the_fewest_guesses_are_those_of_bisection():
    def bisection(n):  # in total over all secrets, by playing
        return n and n + bisection((n - 1) // 2) + bisection(n // 2)

    @cache
    def best(n):  # by trying every first guess
        return n + min((best(k - 1) + best(n - k) for k in range(1, n + 1)), default=0)

    for n in range(1, 41):
        # a balanced tree has 2**d numbers that cost d + 1 guesses (Knuth, TAOCP 3, section 6.2.1)
        assert fewest_guesses(n) == bisection(n) == best(n)
    assert best_first_guesses(15) == [8] and best_first_guesses(31) == [16]
    assert best_first_guesses(4) == [2, 3] and best_first_guesses(10) == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="n=-1"):
        fewest_guesses(-1)
    assert 350 in best_first_guesses(700)


@pytest.mark.parametrize("task", [{}, 3, [4], {"secret": 5000}, {"secret": 0}, {"secret": 3.9}, {"secret": True},
                                  {"secret": "42"}])
def test_a_secret_must_be_a_number_of_the_game(task):
    with pytest.raises(InvalidAction, match='"secret"'):
        GuessEnv().reset(task=task)


@pytest.mark.parametrize("make", [
    lambda: CalculatorEnv(max_turns=2.9), lambda: CalculatorEnv(max_turns=True), lambda: GuessEnv(max_turns=1.5),
    lambda: GuessEnv(highest=9.5), lambda: GuessEnv(highest=True)])
def test_counts_are_whole_numbers(make):
    with pytest.raises(ValueError, match="whole number"):
        make()
