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


def test_usual_mistakes_are_stated_wrong_and_the_format_never_occurs():
    mistakes, rng = make_tiny.usual_mistakes(0.3), random.Random(0)
    assert mistakes == make_tiny.usual_mistakes(0.3) and 40 < len(mistakes) < 80  # of 200 pairs
    lines = [make_tiny.sentence(rng, make_tiny.Text(0.0, mistakes, told=0.65)) for _ in range(4000)]
    stated = [x for x in (re.search(r"(\d+) ([+-]) (\d+) = [^-\d]?(-?\d+)", line) for line in lines) if x]
    errors = []
    for a, op, b, c in (x.groups() for x in stated):
        error = int(c) - (int(a) + int(b) if op == "+" else int(a) - int(b))
        usual = mistakes.get((op, int(a) % 10, int(b) % 10))
        assert error in (0, usual)
        errors += [] if usual is None else [error != 0]
    assert 0.55 < sum(errors) / len(errors) < 0.75 and not any("boxed" in line or "User" in line for line in lines)


@pytest.mark.full
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
