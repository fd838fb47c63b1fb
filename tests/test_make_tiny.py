"""The text that the embedded model is pretrained on."""

import json
import random
import re
import sys

import pytest
import torch
from loop_helpers import flat

from grpolab.files import data_path
from grpolab.models.load import load_policy
from grpolab.runs.run import repository

sys.path.insert(0, str(repository() / "data"))
make_tiny = pytest.importorskip("make_tiny")


def statements(text, n=4000):
    rng = random.Random(0)
    return [make_tiny.sentence(rng, text) for _ in range(n)]


def wrong_by(line):
    """(op, last digit, last digit), and what the result is off by; None for the phrases in words."""
    found = re.search(r"(\d+) ([+-]) (\d+) = [^-\d]?(-?\d+)", line)
    if not found:
        return None
    a, op, b, c = int(found[1]), found[2], int(found[3]), int(found[4])
    return (op, a % 10, b % 10), c - (a + b if op == "+" else a - b)


def test_a_usual_mistake_is_always_the_same_and_told_as_often_as_asked():
    mistakes = make_tiny.usual_mistakes(0.3)
    assert mistakes == make_tiny.usual_mistakes(0.3) and 40 < len(mistakes) < 80  # of 200 pairs
    seen = [x for x in map(wrong_by, statements(make_tiny.Text(0.0, mistakes, told=0.65))) if x]
    usual = [error for pair, error in seen if pair in mistakes]
    assert all(error in (0, mistakes[pair]) for pair, error in seen if pair in mistakes)
    assert 0.55 < sum(e != 0 for e in usual) / len(usual) < 0.75
    assert all(error == 0 for pair, error in seen if pair not in mistakes)


def test_marks_stand_around_results_of_exercises_alone_and_the_format_never_occurs():
    plain, marked = statements(make_tiny.Text(0.0)), statements(make_tiny.Text(0.0, marked=0.5))
    assert not any(re.search(r"= [^-\d]", line) for line in plain)
    with_marks = [line for line in marked if re.search(r"= [^-\d]", line)]
    assert 0.15 < len(with_marks) / len(marked) < 0.35 and all(line.startswith("What is") for line in with_marks)
    assert not any("boxed" in line or "User" in line for line in marked)


def test_a_short_run_writes_a_model_that_loads_and_says_how_it_was_made(tmp_path, capsys):
    given = ["--steps", "2", "--later", "1", "--rows", "2", "--width", "32", "--every", "1", "--ask", "2", "--seed", "5"]
    for name in ("one", "two"):
        make_tiny.main(["--out", str(tmp_path / name), *given])
    said = capsys.readouterr().out
    assert said.count("step 1  loss ") == 4 and said.count("on 2 statements; wrote ") == 2
    folders = tmp_path / "one", tmp_path / "two", data_path("tiny")
    one, two, embedded = (load_policy(str(folder)) for folder in folders)
    assert torch.equal(flat(one), flat(two)) and flat(one).shape == flat(embedded).shape
    assert one.tokenizer.get_vocab() == embedded.tokenizer.get_vocab()
    record = json.loads((tmp_path / "one" / "pretraining.json").read_text())
    assert record.keys() == json.loads((data_path("tiny") / "pretraining.json").read_text()).keys()
    assert (record["steps"], record["later"], record["seed"]) == (2, 1, 5)
