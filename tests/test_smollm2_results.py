"""Results on SmolLM2: how a task is chosen, and that a stopped series keeps what is done."""

import asyncio
import importlib
import json
import re
import sys

import pytest

from grpolab.arithmetic import Problem
from grpolab.rollouts import Rollout
from grpolab.runs.run import repository

ROOT = repository()
sys.path.insert(0, str(ROOT / "benchmarks"))
import report  # noqa: E402
import smollm2_arithmetic as sums  # noqa: E402
import smollm2_gym as gym  # noqa: E402
import smollm2_reasoning as reasoning  # noqa: E402
import smollm2_runs as runs  # noqa: E402


def rollout(reason: str) -> Rollout:
    return Rollout((1,), (2,), mask=(1,), logps=(-1.0,), raw_logps=(-1.0,), finish_reason=reason)


def test_the_task_is_chosen_by_what_the_untrained_model_did():
    def of(greedy, four):
        return {"greedy": greedy, "one of four": four}

    looks = {"easy": of(0.7, 1.0), "hard": of(0.05, 0.9), "little": of(0.5, 0.6), "much": of(0.2, 0.5)}
    assert gym.choose(looks) == "much"
    with pytest.raises(ValueError, match="no candidate's greedy rate lies between 10% and 60%"):
        gym.choose({"easy": looks["easy"], "hard": looks["hard"]})


def test_held_out_tasks_are_not_among_those_to_practise_on():
    pytest.importorskip("reasoning_gym")
    practice, held_out = gym.apart("chain_sum")
    asked = [row.task.prompt for row in held_out]
    assert len(practice) == gym.PRACTICE and not {row.task.prompt for row in practice} & set(asked)
    assert len(asked) == len(set(asked)) == gym.HELD_OUT
    row = practice[0]
    *shots, last = row.prompt[1:]
    assert len(shots) == 2 * gym.SHOTS and last == {"role": "user", "content": row.task.prompt}
    check = gym.solved(row)
    assert check(row.task.answer, rollout("eos")) and not check(row.task.answer, rollout("length"))
    said = f"It is {row.task.answer}"
    assert not check(said, rollout("eos")) and gym.score(said, row, rollout("eos")) > 0


@pytest.mark.full
def test_every_way_to_teach_a_task_of_reasoning_gym_is_recorded(monkeypatch, tmp_path):
    """The whole series on the embedded model in SmolLM2's place, in this process; by the score every second answer is right."""
    pytest.importorskip("reasoning_gym")
    paid, short = iter(range(10**6)), {"steps": 2, "warmup": 0, "batch_size": 4}
    small = {"CANDIDATES": {"chain_sum": gym.CANDIDATES["chain_sum"]}, "PRACTICE": 12, "HELD_OUT": 4, "LOOKED_AT": 4,
             "SHOTS": 1, "RATES": (0.0, 1.0), "NEW_TOKENS": 4, "SFT": gym.SFT | short, "RESULTS": tmp_path / "smollm2_gym.json",
             "REJECTION": {"rounds": 2, "tasks": 4, "samples": 4, "sft": gym.SFT | short},
             "GRPO": gym.GRPO | {"steps": 2, "warmup": 0, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
             "score": lambda text, row, rollout: float(next(paid) % 2)}
    for name, value in small.items():
        monkeypatch.setattr(gym, name, value)
    for name, value in {"MODEL": "tiny", "DTYPE": "float32", "words": lambda doc: ["0", "1"]}.items():
        monkeypatch.setattr(runs, name, value)
    works = {"looks": gym.looks, "base": gym.base}
    monkeypatch.setattr(runs, "in_process", lambda script, name, *words: json.loads(json.dumps(asyncio.run(
        works[name](*words) if name in works else gym.one(name, *words)))))
    gym.main()
    record = json.loads((tmp_path / "smollm2_gym.json").read_text())
    assert {f"{way} {seed}" for way in gym.WAYS for seed in (0, 1)} <= set(record)
    first, both = record["rejection 0"]["kept"]
    assert record["rejection 0"]["rollouts"] == 32 and 0 < first < both <= 16 < record["rejection 0"]["tokens"]
    _, _, rows, gaps = report.gym(record, tmp_path)
    assert [row["policy"] for row in rows] == ["before", *(name for name in report.GYM.values() for _ in range(2))]
    assert [gap["seed"] for gap in gaps] == ["0", "1", "over the seeds"] * 2


def test_the_worked_solutions_are_right_and_their_equations_true():
    """Each template's; and a false number, a false equation, an answer that was cut or goes on is seen."""
    assert len({p.question for p in reasoning.ALL}) == len(reasoning.ALL)
    assert len({re.sub(r"\d+|" + "|".join(reasoning.NAMES + reasoning.THINGS), "", p.question) for p in reasoning.ALL}) == 6
    for row in reasoning.ALL:
        assert reasoning.right(row.target, row, rollout("eos")) == 1.0
        assert set(reasoning.equations(row.target)) == {True} and len(reasoning.equations(row.target)) in (2, 3)
    one, same, other = (reasoning.WordProblem(f"{what} apples. How many are left?", "", 0)
                        for what in ("Ivy has 7", "Ben has 7", "Ben has 8"))
    assert reasoning.numbers(one) == reasoning.numbers(same) != reasoning.numbers(other)
    assert len(reasoning.unseen()) == reasoning.HELD_OUT and 0 < reasoning.unseen().count("0") < reasoning.HELD_OUT / 2
    row = reasoning.ALL[0]
    other = f"The answer is {row.answer + 1}."
    assert not any((reasoning.right(row.target, row, rollout("length")), reasoning.right(other, row, rollout("eos")),
                    reasoning.right(f"{row.target} Or is it?", row, rollout("eos"))))
    assert reasoning.equations("16 + 7 = 23, 23 - 4 = 21, 2 * 3 = 6 and 1 + 2 + 3 = 6") == [True, False, True]


@pytest.mark.full
def test_a_chain_of_thought_is_recorded_by_every_method(monkeypatch, tmp_path):
    """The whole series on the embedded model in SmolLM2's place, in this process; every second answer counts as right."""
    paid, short = iter(range(10**6)), {"steps": 2, "warmup": 0, "batch_size": 4}
    settings = reasoning.SETTINGS | {
        "new_tokens": 4, "sft": reasoning.SETTINGS["sft"] | short,
        "grpo": reasoning.SETTINGS["grpo"] | {"steps": 3, "warmup": 0},
        "rejection": reasoning.SETTINGS["rejection"] | {"sft": reasoning.SETTINGS["rejection"]["sft"] | short}}
    small = {"SETTINGS": settings, "ASKED": reasoning.ASKED[:4], "DEMONSTRATIONS": 8, "SHOTS": 1, "LONG": 8, "LONGER": 3,
             "RESULTS": tmp_path / "smollm2_reasoning.json", "FOLDER": tmp_path,
             "right": lambda text, row, rollout: float(next(paid) % 2)}
    for name, value in small.items():
        monkeypatch.setattr(reasoning, name, value)
    for name, value in {"MODEL": "tiny", "DTYPE": "float32", "words": lambda doc: ["0", "1"]}.items():
        monkeypatch.setattr(runs, name, value)
    monkeypatch.setattr(runs, "in_process", lambda script, *words: json.loads(json.dumps(asyncio.run(reasoning.one(*words)))))
    reasoning.main()
    record = json.loads((tmp_path / "smollm2_reasoning.json").read_text())
    assert record["rejection 0"]["tokens"] >= record["grpo 0"]["tokens"] > 0
    assert all(of["shown"] > 0 for of in record["rejection 0"]["rounds"])
    _, rows, lines = report.reasoning(record, tmp_path)
    assert [row["policy"] for row in rows[3:]] == [name for name in report.REASONED.values() for _ in range(2)]
    assert len(lines) == 25 and all("seed 1" in line and "over seeds and problems" in line for line in lines)


def test_no_demonstration_is_practised_on_or_held_out():
    def asked(rows):
        return {row["prompt"][-1]["content"] for row in rows}

    sets = [asked(map(sums.row_of, sums.KNOWN[: sums.MOST])), asked(sums.PRACTICE), asked(sums.CHOSEN_ON), asked(sums.ASKED)]
    assert sum(map(len, sets)) == len(set.union(*sets)) and [len(s) for s in sets[2:]] == [sums.CHOOSING, sums.HELD_OUT]
    assert all(recipe.demonstrations <= sums.MOST for recipe in sums.RECIPES.values())


def test_right_is_the_number_alone_in_an_answer_that_ended():
    row = sums.row_of(Problem(28, "-", 47))
    assert row["prompt"][-1]["content"] == "28 - 47" and row["completion"] == "-19"
    assert sums.right("-19", row, rollout("eos")) == 1.0 == sums.right(" -19\n", row, rollout("eos"))
    assert not any((sums.right("-19", row, rollout("length")), sums.right("28 - 47 = -19", row, rollout("eos")),
                    sums.right("19", row, rollout("eos"))))
    (one, _), (two, check) = sums.cases([row, sums.row_of(Problem(1, "+", 1))])
    assert two[-1]["content"] == "1 + 1" and check("2", rollout("eos")) and not check("-19", rollout("eos"))


def test_a_record_keeps_each_entry_at_once_and_refuses_other_settings(tmp_path, monkeypatch):
    path = tmp_path / "smollm2_r.json"
    runs.Record(path, {"steps": 2, "rates": (0.1, 0.2)}).keep("full 0", {"gain": 1})
    again = runs.Record(path, {"steps": 2, "rates": (0.1, 0.2)})
    assert "full 0" in again and again["full 0"] == {"gain": 1} and "full 1" not in again
    monkeypatch.setattr(runs.records, "provenance", lambda rooms: {"commit": "later", "code": {}})
    again.keep("full 1", {"gain": 2})
    kept = json.loads(path.read_text())
    assert kept["full 0"] == {"gain": 1}
    commits = [kept["made"][name]["provenance"]["commit"] for name in ("full 0", "full 1")]
    assert commits[0] != "later" == commits[1] and len(runs.records.parts(kept)) == 2
    for other in ({"steps": 3, "rates": (0.1, 0.2)}, {"rates": (0.1, 0.2)}):
        with pytest.raises(ValueError, match=r"smollm2_r.json was measured with other settings \(steps\)"):
            runs.Record(path, other)
    assert json.loads(path.read_text()) == kept


class Asked(Exception):
    """A script has opened its record."""


@pytest.mark.parametrize("script, recipe", [("aws", []), ("aws_seeds", []), ("english", []), ("gym", []),
                                            ("reasoning", []), ("tools", [])]
                         + [("arithmetic", [name]) for name in sums.RECIPES])
def test_a_script_would_go_on_with_its_record(script, recipe, monkeypatch):
    """Nor does a recorded recipe name an option that has gone: notebook 18 trains by one."""
    def record(path, settings):
        assert json.loads(path.read_text())["settings"] == json.loads(json.dumps(settings))
        raise Asked

    module = importlib.import_module(f"smollm2_{script}")
    monkeypatch.setattr(runs, "Record", record)
    monkeypatch.setattr(sys, "argv", [script, *recipe])
    with pytest.raises(Asked):
        module.main()
