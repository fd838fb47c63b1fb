"""Pairs: what the checker makes of completions, token ids on disk, and the shapes that preference files come in."""

import dataclasses
import json

import pytest

from grpolab.arithmetic import Problem
from grpolab.chat import Example, encode_chat, prompt_ids, user
from grpolab.rollouts import Group, Rollout
from grpolab.runs.checkpoints import data_hash
from grpolab.sync import run_sync
from grpolab.train.preferences import (
    Pair,
    PairRules,
    load_preferences,
    make_pairs,
    near_miss,
    pairs_by_reward,
    preference_row,
    read_pairs,
    sample_pairs,
    write_pairs,
)

ASK = {"role": "user", "content": "What is 1 + 2?"}


def said(content):
    return {"role": "assistant", "content": content}


def group(policy, problem, *texts, ended=True):
    """A group that wrote these texts; a text that ends with … was cut off."""
    prompt, rollouts = tuple(prompt_ids(policy.tokenizer, problem.question)), []
    for text in texts:
        cut = text.endswith("…")
        tokens = tuple(policy.tokenizer.encode(text.rstrip("…"), add_special_tokens=False))
        tokens += () if cut else policy.eos_ids[:1]
        n = len(tokens)
        rollouts.append(Rollout(prompt, tokens, (1,) * n, (-1.0,) * n, (-1.0,) * n, "length" if cut else "eos"))
    return Group(tuple(rollouts))


def texts(policy, pairs):
    return [(policy.decode(p.chosen.ids), policy.decode(p.rejected.ids)) for p in pairs]


# --- from the checker -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "answer", "near"),
    [("35", 75, True), ("75", 75, False), ("36", 75, False), ("-75", 75, False), ("-46", -36, True), ("5", 75, False),
     ("175", 75, False), ("0", 7, True)],
)
def test_a_near_miss_is_one_digit_away(given, answer, near):
    assert near_miss(f"\\boxed{{{given}}}", answer) == near and not near_miss(given, answer)


SUM, DIFFERENCE = Problem(28, "+", 47), Problem(61, "-", 35)
RIGHT, NEAR, FAR = "28 + 47 = \\boxed{75}.", "28 + 47 = \\boxed{35}.", "28 + 47 = \\boxed{9}."
FREE = PairRules(balance=False)


def test_a_right_completion_is_chosen_and_a_wrong_one_rejected(tiny):
    pairs, counts = make_pairs(tiny, [SUM], [group(tiny, SUM, FAR, RIGHT, FAR)], FREE)
    assert texts(tiny, pairs) == [(RIGHT, FAR)]
    (pair,) = pairs
    assert pair.prompt == tuple(prompt_ids(tiny.tokenizer, SUM.question))
    assert pair.chosen.ids[-1] == tiny.eos_ids[0] and set(pair.chosen.mask) == {1}
    assert counts == {"questions": 1, "dropped for balance": 0, "pairs": 1, "operator +": 1, "far misses": 1}


def test_an_answer_without_an_end_is_wrong(tiny):
    pairs, counts = make_pairs(tiny, [SUM], [group(tiny, SUM, RIGHT, RIGHT + "…")], FREE)
    assert texts(tiny, pairs) == [(RIGHT, RIGHT)] and pairs[0].rejected.ids == pairs[0].chosen.ids[:-1]
    assert make_pairs(tiny, [SUM], [group(tiny, SUM, RIGHT + "…", NEAR)], FREE)[1]["no pair: all wrong"] == 1


def test_questions_without_both_kinds_are_counted(tiny):
    groups = [group(tiny, SUM, RIGHT, RIGHT), group(tiny, SUM, NEAR, FAR), group(tiny, SUM, RIGHT, FAR)]
    near = dataclasses.replace(FREE, rejections="near")
    pairs, counts = make_pairs(tiny, [SUM] * 3, groups, near)
    assert not pairs and counts["questions"] == 3
    assert {k: v for k, v in counts.items() if k.startswith("no pair")} == {
        "no pair: all right": 1, "no pair: all wrong": 1, "no pair: no near rejection": 1,
    }


@pytest.mark.parametrize(("kind", "expected"), [("near", {NEAR}), ("far", {FAR}), ("any", {NEAR, FAR})])
def test_rejections_are_of_the_kind_asked_for_and_differ(tiny, kind, expected):
    rules = PairRules(per_question=9, balance=False, rejections=kind)
    pairs, _ = make_pairs(tiny, [SUM], [group(tiny, SUM, NEAR, RIGHT, FAR, NEAR)], rules)
    assert {bad for _, bad in texts(tiny, pairs)} == expected and len(pairs) == len(expected)
    assert len(make_pairs(tiny, [SUM], [group(tiny, SUM, NEAR, RIGHT, FAR, NEAR)], FREE)[0]) == 1


def test_balance_gives_each_operator_as_many_pairs(tiny):
    wrong = "61 - 35 = \\boxed{16}."
    problems = [SUM] * 5 + [DIFFERENCE] * 2
    groups = [group(tiny, SUM, RIGHT, NEAR)] * 5 + [group(tiny, DIFFERENCE, DIFFERENCE.target, wrong)] * 2
    pairs, counts = make_pairs(tiny, problems, groups)
    assert [p.meta["op"] for p in pairs] == ["+", "+", "-", "-"] and counts["dropped for balance"] == 3
    _, counts = make_pairs(tiny, problems, groups, FREE)
    assert (counts["operator +"], counts["operator -"]) == (5, 2)


def test_sampled_pairs_repeat_with_their_seed(tiny):
    problems = [Problem(a, "+", 1) for a in range(12)]

    with pytest.MonkeyPatch.context() as patch:  # an untaught policy is never right
        patch.setattr("grpolab.train.preferences._kind", lambda text, p, r: "right" if sum(r.tokens) % 2 else "far")
        first, second, other = (
            run_sync(sample_pairs(tiny, problems, samples=6, max_new_tokens=12, seed=s))[0] for s in (0, 0, 1)
        )
    assert first and first == second != other
    with pytest.raises(ValueError, match="at least two samples"):
        run_sync(sample_pairs(tiny, problems, samples=1))


def test_a_pair_that_prefers_nothing_is_refused():
    one, other = Example((1, 2), (1, 1)), Example((1, 3), (1, 1))
    assert Pair((5,), one, other).longest == 3
    for rules in [{"rejections": "close"}, {"per_question": 0}]:
        with pytest.raises(ValueError, match="per_question at least 1"):
            PairRules(**rules)
    for bad in [((), one, other), ((5,), one, one), ((5,), Example((1,), (0,)), one), ((5,), Example((1, 2), (1,)), one)]:
        with pytest.raises(ValueError):
            Pair(*bad)


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_pairs_survive_the_disk_unchanged(tiny, tmp_path):
    pairs, _ = make_pairs(tiny, [SUM], [group(tiny, SUM, RIGHT, NEAR, FAR)], PairRules(per_question=2, balance=False))
    read = read_pairs(write_pairs(tmp_path / "pairs.jsonl", pairs))
    assert read == pairs and [p.meta for p in read] == [p.meta for p in pairs] and data_hash(read) == data_hash(pairs)
    assert [p.name for p in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_the_hash_of_pairs_knows_ids_masks_and_order(tiny):
    pair = load_preferences([{"prompt": "a", "chosen": "b", "rejected": "c"}], tiny.tokenizer)[0]
    swapped = dataclasses.replace(pair, chosen=pair.rejected, rejected=pair.chosen)
    masked = dataclasses.replace(pair, chosen=Example(pair.chosen.ids, (0, *pair.chosen.mask[1:])))
    keys = {data_hash(p) for p in ([pair], [swapped], [masked], [pair, swapped], [swapped, pair], [pair, pair])}
    assert len(keys) == 6


def test_a_broken_line_is_named(tiny, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt_ids": [1]}')
    with pytest.raises(ValueError, match="line 1.*chosen_ids' is missing"):
        read_pairs(path)


# --- ordinary files ---------------------------------------------------------------------------------------------------

FORMS = {
    "text": {"prompt": ASK["content"], "chosen": "3", "rejected": "4"},
    "messages": {"prompt": [ASK], "chosen": [said("3")], "rejected": [said("4")]},
    "implicit prompt": {"chosen": [ASK, said("3")], "rejected": [ASK, said("4")]},
    "prompt beside it": {"prompt": ASK["content"], "chosen": [ASK, said("3")], "rejected": [ASK, said("4")]},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pair(tiny, tmp_path, form):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(FORMS[form] | {"score_chosen": 7.5, "messages": [ASK]}) + "\n")
    (pair,) = load_preferences(path, tiny.tokenizer)
    expected = encode_chat(tiny.tokenizer, user(ASK["content"]) + [said("3")])
    assert pair.prompt == tuple(prompt_ids(tiny.tokenizer, ASK["content"]))
    assert pair.prompt + pair.chosen.ids == expected.ids and set(pair.chosen.mask) == {1}
    assert tiny.decode(pair.rejected.ids) == "4" and pair.rejected.ids[-1] == tiny.eos_ids[0]
    assert pair.meta == {"score_chosen": 7.5}


def test_earlier_answers_belong_to_the_prompt_and_later_ones_are_trained(tiny):
    shared = [ASK, said("3"), {"role": "user", "content": "And 2 + 2?"}]
    chosen = [*shared, said("4"), {"role": "user", "content": "Sure?"}, said("Yes")]
    (pair,) = load_preferences([{"chosen": chosen, "rejected": [*shared, said("5")]}], tiny.tokenizer)
    whole = encode_chat(tiny.tokenizer, chosen)
    assert pair.prompt + pair.chosen.ids == whole.ids
    assert tiny.tokenizer.decode(pair.prompt).count("Assistant") == 2 and tiny.decode(pair.rejected.ids) == "5"
    trained = [i for i, m in zip(pair.chosen.ids, pair.chosen.mask) if m]
    assert tiny.decode(trained) == "4<|endoftext|>Yes" and trained.count(tiny.eos_ids[0]) == 2


@pytest.mark.parametrize(("row", "reason"), [
    ({"prompt": "a", "chosen": "b"}, "'rejected' is missing"),
    ({"chosen": "b", "rejected": "c"}, "'prompt' is missing"),
    ({"prompt": "a", "chosen": "b", "rejected": 3}, "rejected must be text or a list of messages"),
    ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected is empty"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same tokens"),
    ({"prompt": "a", "chosen": [{"content": "b"}], "rejected": "c"}, "messages with role and content"),
    ({"prompt": "a", "chosen": [ASK, said("b")], "rejected": "c"}, "both be whole conversations"),
    ({"prompt": "another", "chosen": [ASK, said("b")], "rejected": [ASK, said("c")]}, "do not go on from the prompt"),
    ({"chosen": [ASK, said("b")], "rejected": [ASK, said("b")]}, "in which they differ"),
    ({"chosen": [ASK, said("b")], "rejected": [{"role": "user", "content": "x"}, said("b")]}, "the same up to an assistant"),
    ({"prompt": [ASK, said("b")], "chosen": "b", "rejected": "c"}, "ends with an assistant turn"),
    (["a"], "a row is an object"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_row_that_does_not_fit_is_named(tiny, tmp_path, row, reason):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(FORMS["text"]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"line 2: not a preference.*{reason}"):
        load_preferences(path, tiny.tokenizer)
    with pytest.raises(ValueError, match="holds no rows"):
        load_preferences([], tiny.tokenizer)


# --- by any reward ----------------------------------------------------------------------------------------------------


def rewarded(policy, *of):
    """A group of (text, reward, ended)."""
    made = group(policy, Problem(1, "+", 2), *(text for text, _, _ in of))
    return Group(tuple(dataclasses.replace(r, reward=reward, finish_reason="eos" if ended else "length")
                       for r, (_, reward, ended) in zip(made, of)))


def test_the_best_that_ended_is_chosen_and_a_worse_one_rejected(tiny):
    row = {"prompt": "What is 1 + 2?", "kind": "sum", "about": [3]}
    some = rewarded(tiny, ("3", 1.0, True), ("4", 2.0, False), ("5", 0.0, True), ("6", 0.9, False), ("7", None, True))
    pairs, counts = pairs_by_reward(tiny, [row] * 4, [
        some, rewarded(tiny, ("3", 1.0, True), ("4", 1.0, False)), rewarded(tiny, ("3", 1.0, False), ("4", 0.0, False)),
        rewarded(tiny, ("3", None, True))], per_row=3)
    assert counts == {"rows": 4, "no pair: no difference": 1, "no pair: none ended": 1, "no pair: no reward": 1, "pairs": 2}
    found = {(p.meta["chosen"], p.meta["rejected"], p.meta["rejected_reward"]) for p in pairs}
    assert found == {("3", "5", 0.0), ("3", "6", 0.9)}
    assert pairs[0].meta["kind"] == "sum" and "about" not in pairs[0].meta
    (one,), _ = pairs_by_reward(tiny, [row], [some], per_row=3, margin=0.5)
    assert one.meta["rejected"] == "5" and len(pairs_by_reward(tiny, [row], [some])[0]) == 1
    with pytest.raises(ValueError, match="per_row is at least 1"):
        pairs_by_reward(tiny, [row], [some], per_row=0)


def test_a_completion_that_was_cut_is_read_without_an_end(tiny, tmp_path):
    """By its ids; in the words of another tokenizer, which has other ids, the text is all there is."""
    cut = rewarded(tiny, ("3", 1.0, True), ("4", 0.0, False))
    cut = Group((cut[0], dataclasses.replace(cut[1], **{name: getattr(cut[1], name)[:-1] for name in
                                                        ("tokens", "mask", "logps", "raw_logps")})))
    (pair,), _ = pairs_by_reward(tiny, [{"prompt": "What is 1 + 2?"}], [cut])
    row = json.loads(json.dumps(preference_row(pair)))
    (read,) = load_preferences([row], tiny.tokenizer)
    assert read == pair and read.chosen.ids[-1] in tiny.eos_ids and read.rejected.ids[-1] not in tiny.eos_ids
    (other,) = load_preferences([row | {"prompt_ids": row["prompt_ids"][1:]}], tiny.tokenizer)
    assert other.chosen == pair.chosen and other.rejected.ids[-1] in tiny.eos_ids
