"""Among them the three masking gates: only assistant tokens contribute; packing leaks nothing; one turn stays as it was."""

import copy
import dataclasses

import pytest
import torch
from test_losses import token_logps

from grpolab import losses
from grpolab.arithmetic import Problem, generate
from grpolab.chat import CHAT_TEMPLATE, Example, encode_chat, observation_ids, pack, pad, prompt_ids, user
from grpolab.train.logps import decoder_states, head_of
from grpolab.train.sft import demonstrations

TURNS = user("What is 1 + 2?") + [
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 4 + 4?"},
    {"role": "assistant", "content": "8"},
]


def gradient(policy, packed, scale=1.0):
    """(loss, flat gradient) of the mean token loss, in float64."""
    hidden = decoder_states(policy, packed.ids, packed.positions, packed.attention, way="unpadded")
    logps = token_logps(hidden, ids=packed.ids, mask=packed.mask, **head_of(policy))
    loss, _ = losses.sft_loss(logps, packed.mask, denominator=packed.mask.sum())
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
    batch = pad(examples[:3])
    loss, grad = gradient(exact, batch)
    assert grad.abs().max() > 0
    by_hand = []
    for example in examples[:3]:
        logits = exact.model(torch.tensor([example.ids])).logits[0].log_softmax(-1)
        by_hand += [-logits[t - 1, example.ids[t]] for t in range(1, len(example.ids)) if example.mask[t]]
    assert loss == pytest.approx((sum(by_hand) / len(by_hand)).item(), abs=1e-12)
    longer = pad([Example((*e.ids, 40, 41), (*e.mask, 0, 0)) for e in examples[:3]])
    assert gradient(exact, longer)[0] == pytest.approx(loss, abs=1e-12)


def test_packing_leaks_nothing(exact, examples):
    """Gate: loss and gradient of packed rows equal those of one example a row."""
    loss, grad = gradient(exact, pad(examples))
    packed = pack(examples, width=100)
    assert packed.attention is not None and len(packed.ids) < len(examples)
    packed_loss, packed_grad = gradient(exact, packed)
    assert packed_loss == pytest.approx(loss, abs=1e-12)
    assert (packed_grad - grad).abs().max() < 1e-12
    length = packed.ids.shape[1]
    everything_before = torch.ones(length, length, dtype=torch.bool).tril().expand(len(packed.ids), 1, -1, -1)
    leaking = dataclasses.replace(packed, attention=everything_before)
    assert (gradient(exact, leaking)[1] - grad).abs().max() > 1e-6  # the comparison can fail


def test_single_turn_numerics_are_unchanged(tiny, examples):
    """Gate: for one turn, ids and mask are prompt + answer + end, bit for bit, and packing rows of one is padding."""
    p = Problem(12, "+", 34)
    example = encode_chat(tiny.tokenizer, user(p.question) + [{"role": "assistant", "content": p.target}])
    prompt = tiny.tokenizer.encode(f"User: {p.question}\nAssistant: ")
    answer = tiny.tokenizer.encode(p.target) + [tiny.tokenizer.eos_token_id]
    assert example == Example(tuple(prompt + answer), (0,) * len(prompt) + (1,) * len(answer))
    one, two = pad(examples), pack(examples, width=1)
    assert one.attention is None and torch.equal(one.ids, two.ids) and torch.equal(one.mask, two.mask)
    assert gradient(tiny, one)[0] == gradient(tiny, two)[0]
    assert two.mask.sum() == sum(sum(e.mask) for e in examples)  # each is longer than the width: a row of its own


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
    with pytest.raises(ValueError, match="empty"):
        pad([])


def test_half_a_surrogate_pair_is_named(tiny):
    """As JSON's "\\ud83d" gives it: no tokenizer takes it."""
    said = [{"role": "user", "content": "fine"}, {"role": "assistant", "content": "1 + \ud83d2"}]
    for encode in (lambda: encode_chat(tiny.tokenizer, said), lambda: prompt_ids(tiny.tokenizer, "1 + \ud83d2"),
                   lambda: observation_ids(tiny.tokenizer, "1 + \ud83d2")):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            encode()
    assert prompt_ids(tiny.tokenizer, "1 + \U0001f600") != prompt_ids(tiny.tokenizer, "1 + ")
