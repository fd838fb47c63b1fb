"""The decoder that training uses on Llama-shaped models is the model's own, value and gradient, and keeps less of it."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from grpolab.models.load import Policy
from grpolab.rollouts import Rollout, collate, given
from grpolab.train import forward, layout, logps
from grpolab.train.layout import distinct_parts, lay_out
from grpolab.train.logps import rollout_logps, rollout_states, way_of

SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "gelu and biases": LlamaConfig(**SHAPE, hidden_act="gelu", attention_bias=True, mlp_bias=True),
    "yarn": LlamaConfig(**SHAPE, rope_parameters=YARN), "qwen2": Qwen2Config(**SHAPE), "qwen3": Qwen3Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
}


def wide_norm(self, x):
    """RMSNorm without transformers' detour through fp32."""
    return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


def policy_of(config) -> Policy:
    """A model with weights of every size, its own norms in float64 as well, which they leave for fp32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.3)
    for m in model.modules():
        if hasattr(m, "variance_epsilon"):
            m.__class__ = type("Wide", (type(m),), {"forward": wide_norm, "__module__": type(m).__module__})
    return Policy(model, None, "made", (1,))


def gradients(policy) -> dict:
    found = {name: p.grad for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    return found


def assert_same(ours, theirs):
    (hidden, grads), (expected, expected_grads) = ours, theirs
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(hidden, expected, atol=1e-11, rtol=1e-11)
    for name, g in expected_grads.items():
        if g is not None:
            torch.testing.assert_close(grads[name], g, atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def plain_states(policy, line):
    """The states that predict the chosen tokens, of each rollout alone by the model's own decoder."""
    states = []
    for r in line.rollouts:
        hidden = policy.model.get_decoder()(torch.tensor([r.prompt + r.tokens]), use_cache=False).last_hidden_state[0]
        states += [hidden[len(r.prompt) + i - 1] for i, m in enumerate(r.mask) if m]
    return torch.stack(states)


def whole(*lengths, first=5):
    """A layout of sequences whose every state is asked for."""
    rollouts = [given((first + i,), tuple((7 * i + j) % 23 + 30 for j in range(n)), (1,) * n) for i, n in enumerate(lengths)]
    return lay_out(rollouts)


@pytest.mark.parametrize("name", CONFIGS)
def test_value_and_gradient_are_the_models_own(name):
    policy = policy_of(CONFIGS[name])
    assert forward.readable(policy.model)
    line, results = whole(14, 3, 9), []
    pull = torch.randn(26, 32, dtype=torch.float64)
    for way in ("unpadded", "rows", "plain"):
        hidden = plain_states(policy, line) if way == "plain" else rollout_states(policy, line, way=way)
        (hidden * pull).sum().backward()
        results.append((hidden.detach(), gradients(policy)))
    assert_same(results[0], results[2])
    assert_same(results[1], results[2])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("share", [False, True, "in small tables, filled up"])
def test_shared_prompts_without_padding_equal_the_models_own_rows(name, share, monkeypatch):
    """Groups of 3, 1, 3 and 6 with completions of all lengths, also none, and tokens of an environment: they begin alike, up to
    all of one; or some of them do, and two are the same; or none does."""
    if share not in (True, False):
        monkeypatch.setattr(logps, "row_step", lambda policy: 8)
        monkeypatch.setattr(layout, "SMALL", 0)
    policy, rollouts = policy_of(CONFIGS[name]), []
    for prompt, completions in (((5, 6, 7, 8), ((20, 21, 22), range(20, 29), (20,))), ((9,), ((23, 20, 24, 23),)),
                                ((10, 11), ((), (20, 21), range(20, 25))),
                                ((12,), ((20, 21, 22, 23), (24, 21), (20, 21, 25, 26, 27), (24, 21), (20, 28), (20, 21, 22)))):
        for tokens in completions:
            mask = tuple(int(i != 1) for i in range(len(tokens)))
            rollouts.append(given(prompt, tokens, mask))
    shape, results = collate(rollouts, torch.zeros(13)).mask.shape, []
    line = lay_out(rollouts, share=share)
    for way in ("unpadded", "rows", "plain"):
        if way == "plain":
            p = (policy.model.lm_head(plain_states(policy, line)) / 0.7).log_softmax(-1)
            chosen = p.gather(1, line.target[:, None]).squeeze(1)
            values = chosen.new_zeros(shape).index_put((line.row, line.column), chosen)
        else:
            values, _ = rollout_logps(policy, line, shape, 0.7, way=way)
        (values * torch.linspace(-1, 1, values.numel(), dtype=torch.float64).view(shape)).sum().backward()
        results.append((values.detach(), gradients(policy)))
    for found in results[:-1]:
        assert_same(found, results[-1])


def test_no_padding_is_computed_nor_what_nothing_depends_on():
    """A rollout's last chosen token, and an environment's after it, predict nothing that is asked for; and what rollouts of a
    prompt begin with alike is computed once."""
    rollouts = [given((5, 6), (n,) * n, (1,) * n) for n in (30, 1, 2)]
    rollouts += [dataclasses.replace(r, prompt=(9,)) for r in rollouts[1:]]
    rollouts.append(given((9,), (7,) * 8, (1, 0, 1, 1, 0, 0, 0, 0)))
    rollouts.append(given((8, 8), (7,) * 5, (0,) * 5))
    found = lay_out(rollouts)
    assert len(found.tokens.ids) == (2 + 29 + 1) + (1 + 1 + 3) + 2
    causal, masked = found.tokens.tables  # 29 tokens and 1 of a prompt of 2 share a row; what is long beside it needs no mask
    assert causal.mask is None and causal.keys.shape == (5, 4) and causal.read.sum() == len(found.tokens.ids) - 30
    assert masked.read.shape == (1, 30) and masked.read.all() and masked.mask.shape == (1, 1, 30, 32)
    assert found.rows.ids.shape == (7, 31) and len(found.target) == 30 + 1 + 2 + 1 + 2 + 3
    rests = (7, 8), (7, 9, 9), (6,), (7, 8), (7, 8, 4)
    episodes = [given((5,), (1, 2, 3, *rest, 0), (1,) * (4 + len(rest))) for rest in rests]
    tokens = lay_out(episodes).tokens
    assert tokens.ids.tolist() == [5, 1, 2, 3, 6, 7, 8, 4, 9, 9]  # in the order of their tokens, 6 before 7
    looks = {}
    for t in tokens.tables:
        below = torch.ones(t.keys.shape[1], t.keys.shape[1]).tril().log() if t.mask is None else t.mask[:, 0]
        for queries, keys, read, mask in zip(t.queries, t.keys, t.read, below.expand(len(t.keys), -1, -1)):
            looks |= {int(queries[i]): keys[mask[i] == 0].tolist() for i in read.nonzero().flatten()}
    assert looks == {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2, 3], 4: [0, 1, 2, 3, 4], 5: [0, 1, 2, 3, 5],
                     6: [0, 1, 2, 3, 5, 6], 7: [0, 1, 2, 3, 5, 6, 7], 8: [0, 1, 2, 3, 5, 8], 9: [0, 1, 2, 3, 5, 8, 9]}
    assert tokens.tables[0].keys.tolist() == [[0, 1, 2, 3]] and len(lay_out(episodes, share=False).tokens.ids) == 31


@pytest.mark.parametrize("completions", [
    [(i, *[7] * 49) for i in range(32)], [(7,) * i + (8,) for i in range(100)], [(i,) * 5 for i in range(20)]])
def test_keys_of_what_is_shared_are_copied_for_few_rows(completions):
    """For 32 of 50 tokens on a prompt of 300, where each of a hundred goes on from the one before, and for very short ones."""
    tokens = lay_out([given((5,) * 300, (*c, 0), (1,) * (len(c) + 1)) for c in completions]).tokens
    assert sum(t.keys.numel() for t in tokens.tables) < 4 * len(tokens.ids)
    assert all(t.mask is None or (t.mask == 0).any(-1).all() for t in tokens.tables)  # padding, too, looks at something


def test_what_is_long_beside_what_it_sees_needs_no_mask():
    """Which would have the square of its tokens."""
    tokens = lay_out([given((5,) * 100, (i, *[7] * 2000), (1,) * 2001) for i in range(2)]).tokens
    assert len(tokens.ids) == 100 + 2 * 2000 and all(t.mask is None for t in tokens.tables)


def test_parts_count_what_is_computed():
    """A prompt once among neighbours; a long rollout goes alone."""
    of = lambda prompt, n, begins=(): [given(prompt, (*begins, *[n] * n), (1,) * (len(begins) + n))]  # noqa: E731
    a, b = (1,) * 10, (2,) * 10
    rollouts = [of(a, 5), of(a, 6), of(b, 5), of(b, 30), of(a, 1)]
    assert list(distinct_parts(rollouts, 36)) == [slice(0, 3), slice(3, 4), slice(4, 5)]
    assert list(distinct_parts(rollouts, 36, share=False)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert list(distinct_parts(rollouts, 1000)) == [slice(0, 5)] and not list(distinct_parts([], 5))
    pairs = [[*x, *y] for x, y in zip(rollouts[:-1:2], rollouts[1::2])]
    assert list(distinct_parts(pairs, 21)) == [slice(0, 1), slice(1, 2)]
    assert list(distinct_parts(pairs, 66)) == [slice(0, 2)] and list(distinct_parts(pairs, 65)) == [slice(0, 1), slice(1, 2)]
    many = [of(a, n, (3,) * 90) for n in range(10, 20)]  # 10 + 90 + 145 tokens
    assert list(distinct_parts(many, 245)) == [slice(0, 10)]
    assert [part.stop - part.start for part in distinct_parts(many, 135)] == [3, 2, 2, 2, 1]


def test_a_token_that_nothing_comes_before_has_no_logp():
    """It would be taken from the token before it in memory, which is another rollout's."""
    policy, other = policy_of(CONFIGS["llama"]), Rollout((5, 6), (7,), (1,), (-1.0,), (-1.0,), "eos")
    first = Rollout((), (7, 8), (1, 1), (-1.0,) * 2, (-1.0,) * 2, "eos")
    with pytest.raises(ValueError, match="empty prompt"):
        lay_out([other, first])
    for mask, kept in (((0, 1), 1), ((0, 0), 0)):
        for way in ("unpadded", "rows"):
            line = lay_out([dataclasses.replace(first, mask=mask)])
            assert rollout_logps(policy, line, (1, 2), 1.0, way=way)[0].count_nonzero() == kept


@pytest.mark.parametrize("way", ["unpadded", "rows"])
def test_checkpointed_layers_give_the_same_bits_and_keep_their_inputs_alone(tiny, way):
    line, found = whole(*[63] * 8), []
    for on in (False, True):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            hidden = rollout_states(tiny, line, way=way, checkpointed=on)
        parameters = {p.data_ptr() for p in tiny.model.parameters()}
        alive = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept if x.data_ptr() not in parameters}
        hidden.square().sum().backward()
        found.append((sum(alive.values()), torch.cat([g.flatten() for g in gradients(tiny).values()])))
    (all_of_it, plain), (inputs, again) = found
    assert torch.equal(plain, again) and plain.abs().max() > 0
    assert inputs < all_of_it / 4


@pytest.mark.parametrize("how", ["autocast", "bf16 parameters"])
def test_in_bf16_it_is_as_close_to_fp32_as_the_models_own_forward(tiny, how):
    line, errors = whole(*[63] * 32), []
    with torch.no_grad():
        exact = rollout_states(tiny, line, way="unpadded")
        tiny.model.to(torch.float32 if how == "autocast" else torch.bfloat16)
        for way in ("unpadded", "rows"):
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                error = rollout_states(tiny, line, way=way).float() - exact
            errors.append(error.square().mean().sqrt().item())
    assert 0 < errors[0] < 1.1 * errors[1]


def test_products_in_bf16_have_few_numbers_of_rows(tiny, monkeypatch):
    """oneDNN compiles each number anew."""
    own, rows = torch.nn.functional.linear, set()
    tiny.model.to(torch.bfloat16)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: rows.add(len(x)) or own(x, *rest))
    for n in (3, 50, 61, 62, 90, 127):
        assert len(rollout_states(tiny, whole(n))) == n
    assert rows == {64, 128}


@pytest.mark.parametrize("change", [
    lambda m: m.set_attn_implementation("eager"), lambda m: m.train(),
    lambda m: m.model.layers[1].mlp.register_forward_hook(lambda *_: None),
    lambda m: m.model.layers[1].mlp.register_full_backward_hook(lambda *_: None),
    lambda m: setattr(m.model.layers[1], "forward", lambda *a, **k: None)])
def test_other_attention_dropout_and_altered_models_keep_their_own_forward(tiny, change):
    assert forward.readable(tiny.model) and way_of(tiny, "rollouts") == "unpadded"
    change(tiny.model)
    assert not forward.readable(tiny.model) and way_of(tiny, "rollouts") == "rows"
