"""Among them the masking gates: only assistant tokens contribute; examples in a line leak nothing; one turn stays as it was."""

import copy

import pytest
import torch

from grpolab import losses
from grpolab.arithmetic import Problem, generate
from grpolab.chat import CHAT_TEMPLATE, Example, encode_chat, observation_ids, prompt_ids, user
from grpolab.train import forward
from grpolab.train.logps import as_rollouts, example_logps
from grpolab.train.sft import demonstrations

TURNS = user("What is 1 + 2?") + [
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 4 + 4?"},
    {"role": "assistant", "content": "8"},
]


def gradient(policy, examples, **how):
    """(loss, flat gradient) of the mean token loss."""
    logps, mask = example_logps(policy, as_rollouts(examples), **how)
    loss, _ = losses.sft_loss(logps, mask, denominator=mask.sum())
    policy.model.zero_grad()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in policy.model.parameters()])


def wide_norm(self, x):
    """RMSNorm without transformers' detour through fp32."""
    return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


@pytest.fixture
def exact(tiny):
    """In float64 throughout: the model's own norms would compute in fp32 whatever they are given."""
    tiny.model.double()
    for m in tiny.model.modules():
        if hasattr(m, "variance_epsilon"):
            m.__class__ = type("Wide", (type(m),), {"forward": wide_norm})
    return tiny


@pytest.fixture
def examples(tiny):
    return demonstrations(tiny, generate(6, 0, seed=5)[0])


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


def test_only_assistant_tokens_contribute(exact, examples):
    """Gate: a mask of zeros has no gradient, and a change of what is masked after the last turn changes nothing."""
    loss, grad = gradient(exact, examples[:3])
    assert grad.abs().max() > 0
    by_hand = []
    for example in examples[:3]:
        logits = exact.model(torch.tensor([example.ids])).logits[0].log_softmax(-1)
        by_hand += [-logits[t - 1, example.ids[t]] for t in range(1, len(example.ids)) if example.mask[t]]
    assert loss == pytest.approx((sum(by_hand) / len(by_hand)).item(), abs=1e-12)
    longer = [Example((*e.ids, 40, 41), (*e.mask, 0, 0)) for e in examples[:3]]
    assert gradient(exact, longer)[0] == pytest.approx(loss, abs=1e-12)


def test_examples_in_one_line_leak_nothing(exact, examples, monkeypatch):
    """Gate: loss and gradient equal those of one example a row, padded."""
    loss, grad = gradient(exact, examples, way="rows")
    line_loss, line_grad = gradient(exact, examples, way="unpadded")
    assert line_loss == pytest.approx(loss, abs=1e-12)
    assert (line_grad - grad).abs().max() < 1e-12
    own = forward.attention  # the comparison can fail: here the second example sees the first
    monkeypatch.setattr(forward, "attention", lambda q, k, *rest: own(q, k[[0, *range(len(k) - 1)]], *rest))
    assert (gradient(exact, examples, way="unpadded")[1] - grad).abs().max() > 1e-6


def test_single_turn_numerics_are_unchanged(tiny):
    """Gate: for one turn, ids and mask are prompt + answer + end, bit for bit."""
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


def test_what_precedes_an_answer_is_read_anew_from_a_template_that_was_changed(tiny):
    tokenizer, other = copy.deepcopy(tiny.tokenizer), copy.deepcopy(tiny.tokenizer)
    assert observation_ids(tokenizer, "3") == observation_ids(tiny.tokenizer, "3")
    tokenizer.chat_template = other.chat_template = "= " + CHAT_TEMPLATE.replace("Assistant: ", "> ")
    assert observation_ids(tokenizer, "3") == observation_ids(other, "3") != observation_ids(tiny.tokenizer, "3")


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
