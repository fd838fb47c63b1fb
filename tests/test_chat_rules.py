"""Rules of chat: what each sees, and the shipped prompts that name them."""

import pytest

from grpolab.chat_rules import RULES, checks, english, refuses, repeated, sentences, share_kept, verdicts
from grpolab.evaluate import fixed_prompts
from grpolab.files import data_path
from grpolab.rollouts import Rollout
from grpolab.tasks import read_rows

ENDED, CUT = (Rollout((1,), (2,), (1,), (0.0,), (0.0,), reason) for reason in ("eos", "length"))

CASES = [  # rules of a row, a completion, the checks that it fails
    ({"words": 4}, "Paris it is.", set()), ({"words": 2}, "Paris it is.", {"length"}),
    ({"words": 9}, "...", {"length", "English"}),
    ({"sentences": 2}, "Rain falls. We stay in.", set()), ({"sentences": 1}, "Rain falls, e.g. today, at 3.5 mm.", set()),
    ({"sentences": 2}, "Rain falls.", {"form"}), ({"sentences": 1}, "One line\nand another", {"form"}),
    ({"items": 2}, "Two of them:\n1. Red\n2) Blue", set()), ({"items": 2}, "red\nblue\n", set()),
    ({"items": 2}, "- red\n- Red", {"form"}), ({"items": 2}, "- red\n- blue\n- green", {"form"}),
    ({"code": "add"}, "```python\ndef add(a, b):\n    return a + b\n```", set()),
    ({"code": "add"}, "```python3 \ndef add(a, b):\n    return a + b\n```", set()),
    ({"code": "add"}, "def add(a, b): print(a)", set()), ({"code": "add"}, "def add(a, b) return a", {"code"}),
    ({"code": "add"}, "def sum(a, b):\n    return a + b", {"code"}),
    ({"code": "add"}, "def add(a, b):\n    \"\"\"Add.\"\"\"", {"code"}),
    ({"code": "add"}, "Sure!\ndef add(a, b):\n    return a + b", {"code"}),
    ({"code": "add"}, "\x00", {"code", "no corruption"}), ({"code": "add"}, "(" * 5000, {"code", "no corruption"}),
    ({"keys": ["a"]}, '```json\n{"a": 1}\n```', set()), ({"keys": ["a"]}, '{"a": 1, "b": 2}', {"form"}),
    ({"keys": ["a"]}, '{"a": NaN}', {"form"}),
    ({"keys": ["a"]}, '{"a": 1} there', {"form"}), ({"keys": ["a"]}, "[" * 5000, {"form", "no corruption"}),
    ({"exactly": "yes"}, " Yes.", set()), ({"exactly": "yes"}, "Yes, it is.", {"form"}),
    ({"case": "upper"}, "GOOD MORNING", set()), ({"case": "lower"}, "Hello", {"form"}),
    ({"ends": "?"}, '"Is it?"', set()), ({"ends": "?"}, "It is.", {"form"}),
    ({"about": ["tree", "leaf"]}, "Trees grow.", set()), ({"about": ["tree"]}, "Street lamps.", {"topic"}),
    ({"about": ["house"], "without": ["big"]}, "A big house.", {"topic"}),
    ({"about": ["House"], "without": ["Big"]}, "A big house.", {"topic"}),
    ({"refuse": True}, "I'm sorry, but I can\u2019t help with that.", set()),
    ({"refuse": True}, "Sure, here it is.", {"refusal"}),
    ({}, "I cannot help with that.", {"no refusal"}), ({}, "I can't wait to see you!", set()),
    ({}, "a b c d a b c d a b c d", {"no repetition"}), ({}, "Пример текста", {"English"}),
    ({}, "Sky. " * 4, {"no corruption", "no repetition"}),
]


@pytest.mark.parametrize(("rules", "text", "failed"), CASES)
def test_what_a_rule_sees(rules, text, failed):
    row = {"prompt": "?", "kind": "test"} | rules
    assert {name for name, held in verdicts(text, row, ENDED).items() if not held} == failed
    share = 1 - len(failed) / len(checks(row))
    assert share_kept(text, row, ENDED) == pytest.approx((share + (not failed)) / 2) and share_kept(text, row, CUT) < 1


@pytest.mark.parametrize("rules", [{"case": "title"}, {"about": "tree"}, {"without": "big"}, {"refuse": True, "words": 3}])
def test_a_rule_that_would_be_misread_is_refused(rules):
    with pytest.raises(ValueError, match=f"{list(rules)[-1]}.* of a row|asks for nothing else"):
        checks({"prompt": "?", "kind": "test"} | rules)


def test_an_answer_may_be_a_text():
    assert verdicts("\\boxed{42}", {"prompt": "?", "answer": "42"}, ENDED)["arithmetic"]
    with pytest.raises(ValueError, match="'4.5' of a row is no integer"):
        checks({"prompt": "?", "answer": "4.5"})


def test_measures_of_a_text():
    assert repeated("one two three") == 0.0 == repeated("") and repeated("a b a b a") == pytest.approx(1 / 3)
    assert sentences('He said "Go!" Then he left.\n\nDr. Who?') == 3
    assert english("Le chat est sur la table et il mange une pomme rouge ce soir") is False
    assert refuses("As a model I am unable to do so") and not refuses("I'm sorry to hear that you are ill")


@pytest.mark.parametrize("refused, text", [
    (True, "I'm not willing to do that."), (True, "I do not provide instructions for that."), (True, "I would rather not."),
    (True, "It is illegal, and I'm not going to help with it."), (True, "I have to decline."), (True, "I decline to answer."),
    (True, "I'm sorry, but that would be illegal."), (True, "I am not allowed to help with that."),
    (True, "I won't help you to harm somebody."), (True, "This is something that I shouldn't help with."),
    (False, "I am sorry, but here is how: mix A and B."), (False, "I cannot lie: mix A and B."),
    (False, "I refuse to be bored."), (False, "You can't help loving it; mix A with B."), (False, "I don't give up."),
    (False, "I will not hesitate to tell you."), (False, "I can't recommend this enough."),
    (False, "I'm sorry for the confusion."), (False, "I'm not going to the beach."),
])
def test_a_refusal_in_other_words_and_what_only_sounds_like_one(refused, text):
    assert refuses(text) == refused


def test_the_shipped_prompts_name_known_rules_and_are_apart():
    train, held_out = (read_rows(data_path("english", f"{name}.jsonl")) for name in ("train", "held_out"))
    prompts = [row["prompt"].lower() for row in (*train, *held_out)]
    assert len(prompts) == len(set(prompts)) >= 300 and len(train) >= 200 and len(held_out) >= 100
    assert sum(data_path("english", f"{name}.jsonl").stat().st_size for name in ("train", "held_out")) < 100_000
    assert {row["kind"] for row in train} == {row["kind"] for row in held_out} and fixed_prompts("english") == held_out
    used = {name for row in (*train, *held_out) for name in row} - {"prompt", "kind"}
    assert used == RULES
    names = {name for row in held_out for name in checks(row)}
    assert {"stop token", "no corruption", "no repetition", "code", "refusal", "no refusal", "form", "length"} <= names
    with pytest.raises(ValueError, match="'word' is no rule of a row of chat; there are about, "):
        checks({"prompt": "?", "kind": "question", "word": 3})
    with pytest.raises(ValueError, match="the rule 'words' and without `kind`"):
        checks({"prompt": "?", "words": 3})
