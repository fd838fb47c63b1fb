"""Tasks as plain rows, their loaders, and what they refuse."""

import ast
import importlib.util
import json
import os
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest

from grpolab import tasks
from grpolab.arithmetic import Problem
from grpolab.rollouts import Rollout

HAS_GYM = importlib.util.find_spec("reasoning_gym") is not None or bool(os.environ.get("REQUIRE_GYM"))
gym = pytest.mark.skipif(not HAS_GYM, reason="reasoning-gym is not installed")


def ended(reason="eos"):
    return Rollout((1,), (2,), (1,), (0.0,), (0.0,), reason)


@dataclass(frozen=True)
class Row:
    prompt: str


def test_a_prompt_is_found_in_dicts_dataclasses_and_messages():
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    assert tasks.prompt_of({"prompt": "a", "question": "b"}) == "a"
    assert tasks.prompt_of({"question": "b"}) == "b"
    assert tasks.prompt_of({"messages": messages}) == tasks.prompt_of({"prompt": messages}) == messages
    assert tasks.prompt_of(Row("c")) == "c"
    assert tasks.prompt_of(Problem(1, "+", 2)) == "What is 1 + 2?"


@pytest.mark.parametrize("row", [{"text": "a"}, Row(""), {"prompt": []}, {"prompt": ["a"]}, {"prompt": 3}, 7, "plain text"])
def test_a_row_without_a_prompt_is_refused(row):
    with pytest.raises(ValueError, match="a row needs one of|is a text or a list of messages"):
        tasks.prompt_of(row)


def test_rows_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "ü", "answer": 2}\n', encoding="utf-8")
    assert tasks.read_rows(path, needs=["answer"]) == [{"prompt": "a", "answer": 1}, {"prompt": "ü", "answer": 2}]


@pytest.mark.parametrize("line, says", [("{", "not a row"), ("[1]", "list, not an object"), ('{"a": 1}', "needs one of"),
                                        ('{"prompt": "a"}', "has no 'answer'"), ('{"prompt": 1, "answer": 2}', "is a text")])
def test_a_damaged_row_names_its_line(tmp_path, line, says):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n' + line)
    with pytest.raises(ValueError, match="line 2.*" + says):
        tasks.read_rows(path, needs=["answer"])
    path.write_text('\ufeff{"prompt": "a\u2028b", "answer": 1}\r\n')
    assert tasks.read_rows(path) == [{"prompt": "a\u2028b", "answer": 1}]  # no line of its own
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no rows"):
        tasks.read_rows(path)
    path.write_bytes('{"prompt": "\u00e9"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="rows.jsonl is no UTF-8"):
        tasks.read_rows(path)


@pytest.mark.parametrize("target", [4, None, ["x"]])
def test_a_completion_is_a_text_or_messages(target):
    row = {"prompt": "a", "target": target}
    with pytest.raises(ValueError, match="'target' of a row is a text or a list of messages"):
        tasks.demonstration_of(row)
    assert not tasks.shows_completion(row)


@pytest.mark.parametrize("text, number", [
    ("so 3 + 4 = 7.", "7"), ("#### 1,234", "1234"), ("first 5\n#### -2 apples, of 9", "-2"), ("it costs $18.50", "18.50"),
    ("12,34", "34"), pytest.param("9" * 2_000_000 + " 5", "5", id="long"),
    ("#### $-5", "-5"), ("\u22125", "-5"), ("####", None), ("none", None), ("#### x 5", None), ("1 2 #### 3 #### 4", "4"),
    ("it takes 3-5", "5"), ("(-5)", "-5"), (str(1e-05), "0.00001"), ("some 2E3", "2000"), ("3e", "3"),
    ("it costs .5", "0.5"), ("about $.50", "0.50"), ("-.25", "-0.25"), ("#### .5", "0.5"), ("it ends...5", "5"),
])
def test_the_final_number(text, number):
    assert tasks.final_number(text) == (None if number is None else Decimal(number))


def test_gsm8k_rows_and_their_reward(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}))
    (row,) = tasks.gsm8k(path)
    assert row["prompt"] == "How many?" and row["answer"] == "1200"
    assert tasks.right_number("That makes $1,200.00", row, ended()) == 1.0
    assert tasks.right_number("That makes 1,201", row, ended()) == 0.0
    assert tasks.right_number("That makes 1200", row, ended("length")) == 0.0
    with pytest.raises(ValueError, match="has no 'answer'; it has .'prompt'"):
        tasks.right_number("1", {"prompt": "a"}, ended())
    path.write_text(json.dumps({"question": "How many?", "answer": "1200"}))
    with pytest.raises(ValueError, match="row 1.*does not end in '#### number'"):
        tasks.gsm8k(path)


@pytest.mark.parametrize(
    "text, answer", [("7", "7"), ("I think\n\n 12 \n", "12"), ("<answer> 3 </answer> so 4", "3"), ("", "")]
)
def test_what_a_completion_answers(text, answer):
    assert tasks.gym_answer(text) == answer


@gym
def test_reasoning_gym_gives_the_same_tasks_for_a_seed_and_its_own_scores():
    first, again = (tasks.reasoning_gym("leg_counting", size=4, seed=3, ask="{question}Number:") for _ in range(2))
    other = tasks.reasoning_gym("leg_counting", size=4, seed=4, ask="{question}Number:")
    assert first == again and first != other and first[0].prompt.endswith("Number:")
    assert [tasks.gym_score(t.answer, t, ended()) for t in first] == [1.0] * 4
    assert tasks.gym_score(first[0].answer, first[0], ended("length")) == 0.0
    assert tasks.gym_score("no idea", first[0], ended()) < 1.0


@gym
def test_an_unknown_setting_is_named():
    with pytest.raises(ValueError, match="no data set 'leg_counting' with .*wings"):
        tasks.reasoning_gym("leg_counting", size=1, seed=0, wings=2)


def test_scorers_that_would_evaluate_an_answer_are_refused():
    with pytest.raises(ValueError, match="evaluates answers as Python code"):
        tasks.reasoning_gym("countdown", size=1, seed=0)


def evaluating(path: Path) -> bool:
    """Whether a module's `score_answer`, or a method that it may call, evaluates text."""
    calls = (n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
    names = {f.id if isinstance(f, ast.Name) else f.attr for f in calls if isinstance(f, (ast.Name, ast.Attribute))}
    return bool(names & {"eval", "exec", "parse_expr", "sympify", "compile_restricted"})


@gym
def test_the_refused_are_all_that_evaluate():
    """Modules that evaluate only what reasoning-gym itself wrote are listed here, by hand, after reading them."""
    own = {"bitwise_arithmetic", "basic_arithmetic", "number_sorting", "generators_00_49", "generators_50_99",
           "propositional_logic"}
    folder = Path(importlib.util.find_spec("reasoning_gym").origin).parent
    found = {path.stem for path in folder.rglob("*.py") if evaluating(path)}
    assert found - own == tasks.EVALUATING


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"grpolab\[gym\]"):
        tasks.reasoning_gym("leg_counting", size=1, seed=0)
