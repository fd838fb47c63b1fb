"""What a chat is as tokens: which of them are trained on, and what is no chat that can be."""

import copy

import pytest

from grpolab.arithmetic import Problem
from grpolab.chat import CHAT_TEMPLATE, Example, encode_chat, observation_ids, prompt_ids, user

TURNS = user("What is 1 + 2?") + [
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 4 + 4?"},
    {"role": "assistant", "content": "8"},
]


def test_the_mask_marks_every_assistant_turn_and_its_end_token(tiny):
    example = encode_chat(tiny.tokenizer, TURNS)
    spoken = "".join(tiny.tokenizer.decode([i]) for i, m in zip(example.ids, example.mask) if m)
    assert spoken == "3<|endoftext|>8<|endoftext|>"
    whole = tiny.tokenizer.decode(example.ids)
    assert whole == "User: What is 1 + 2?\nAssistant: 3<|endoftext|>\nUser: And 4 + 4?\nAssistant: 8<|endoftext|>"


def test_what_is_trained_is_what_is_sampled(tiny):
    """The ids before the first supervised token are the prompt that rollouts start from."""
    for turns in (TURNS[:2], TURNS):
        example = encode_chat(tiny.tokenizer, turns)
        last = len(example.mask) - 1
        while example.mask[last - 1]:
            last -= 1
        assert list(example.ids[:last]) == prompt_ids(tiny.tokenizer, turns[:-1])


def test_single_turn_numerics_are_unchanged(tiny):
    """For one turn, ids and mask are prompt + answer + end, bit for bit."""
    p = Problem(12, "+", 34)
    example = encode_chat(tiny.tokenizer, user(p.question) + [{"role": "assistant", "content": p.target}])
    prompt = tiny.tokenizer.encode(f"User: {p.question}\nAssistant: ")
    answer = tiny.tokenizer.encode(p.target) + [tiny.tokenizer.eos_token_id]
    assert example == Example(tuple(prompt + answer), (0,) * len(prompt) + (1,) * len(answer))


def test_a_template_that_rewrites_history_is_refused(tiny):
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = "{{ messages | length }}" + CHAT_TEMPLATE
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        encode_chat(tokenizer, TURNS)
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        observation_ids(tokenizer, "3")


def test_what_cannot_be_trained_on_is_refused(tiny):
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("eos_token + ", "")
    with pytest.raises(ValueError, match="does not close"):
        encode_chat(tokenizer, TURNS)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end token"):
        encode_chat(tokenizer, TURNS)
    with pytest.raises(ValueError, match="no assistant turn"):
        encode_chat(tiny.tokenizer, TURNS[:1])


def test_half_a_surrogate_pair_is_named(tiny):
    """As JSON's "\\ud83d" gives it: no tokenizer takes it."""
    said = [{"role": "user", "content": "fine"}, {"role": "assistant", "content": "1 + \ud83d2"}]
    for encode in (lambda: encode_chat(tiny.tokenizer, said), lambda: prompt_ids(tiny.tokenizer, "1 + \ud83d2"),
                   lambda: observation_ids(tiny.tokenizer, "1 + \ud83d2")):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            encode()
    assert prompt_ids(tiny.tokenizer, "1 + \U0001f600") != prompt_ids(tiny.tokenizer, "1 + ")
