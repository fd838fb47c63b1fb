"""Nothing that only arranges a batch may change its gradient: micro-batches, order, padding, chunks, ranks, pad ids.

And nothing that is masked may be felt, while every token that the policy chose must be, the end token first of all.
"""


import pytest
import torch
from test_losses import token_logps

from grpolab import losses
from grpolab.rollouts import Rollout, collate

N, T, D, V = 8, 9, 6, 13
KINDS = ["token", "sequence", "constant", "gspo", "cispo", "dual", "sampler", "sft", "kl", "kl sequence", "dpo", "rm"]


def make_batch(seed=0):
    """Ragged rows with one empty and one single-token completion, in float64; all tensors have one row a rollout."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    ids = torch.randint(0, V, (N, T), generator=g)
    lengths, mask = [5, 8, 0, 3, 1, 7, 2, 6], torch.zeros(N, T)
    for row, length in zip(mask, lengths):
        row[1 : 1 + length] = 1
    mask[1, 4] = 0  # a token that an environment wrote
    logps = draw(N, T) * 0.4 - 2
    return {"ids": ids, "mask": mask, "old_logps": logps, "ref_logps": logps + 0.3 * draw(N, T),
            "sampler_logps": logps + 0.3 * draw(N, T), "advantages": draw(N)}


def make_parameters(seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(V, D, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2)]


def loss_of(kind, parameters, b, denominators, chunk=None):
    """The loss of one (micro-)batch `b`; row 2i of preference data is chosen, row 2i + 1 rejected."""
    embedding, head = parameters
    hidden = embedding[b["ids"]].cumsum(1).tanh()  # a causal network in one line
    logps, mask, old = token_logps(hidden, head, b["ids"], b["mask"], chunk=chunk), b["mask"], b["old_logps"]
    if kind in ("token", "sequence", "constant", "gspo", "cispo", "dual", "sampler"):
        options = {"gspo": {"ratio": "sequence", "aggregation": "sequence"}, "cispo": {"objective": "cispo"},
                   "dual": {"dual_clip": 1.1}, "sampler": {"sampler_logps": b["sampler_logps"]}}
        options = options.get(kind) or {"aggregation": kind}
        denominator = denominators[options.get("aggregation", "token")]
        return losses.policy_loss(logps, old, b["advantages"], mask, denominator=denominator, **options)
    if kind == "sft":
        return losses.sft_loss(logps, mask, denominator=denominators["token"])
    if kind.startswith("kl"):
        aggregation = "sequence" if kind == "kl sequence" else "token"
        return losses.kl_penalty(logps, b["ref_logps"], mask, old_logps=old, aggregation=aggregation,
                                 denominator=denominators[aggregation])
    (c, r), (rc, rr) = (losses.sequence_logps(x, mask).view(-1, 2).unbind(1) for x in (logps, b["ref_logps"]))
    if kind == "dpo":
        return losses.dpo_loss(c, r, rc, rr, beta=0.2, denominator=denominators["pair"])
    return losses.bradley_terry_loss(c, r, denominator=denominators["pair"], centering=0.01)


def denominators_of(b):
    counts = {a: losses.count(b["mask"], a, max_new_tokens=20) for a in losses.AGGREGATIONS}
    return counts | {"pair": torch.tensor(len(b["mask"]) // 2)}


def gradient(kind, micro_batches, chunk=None):
    """Gradient and metrics of the batch accumulated over its micro-batches, all with the one global denominator."""
    parameters = make_parameters()
    counts = [denominators_of(b) for b in micro_batches]
    total = {k: sum(c[k] for c in counts) for k in counts[0]}
    metrics = []
    for b in micro_batches:
        loss, m = loss_of(kind, parameters, b, total, chunk)
        loss.backward()
        metrics.append(m)
    return torch.stack([p.grad for p in parameters]), losses.combine(metrics)


def rows(b, index):
    return {k: v[index] for k, v in b.items()}


def assert_same(one, other, kind):
    (grad, metrics), (grad2, metrics2) = one, other
    assert grad.abs().max() > 1e-3, kind
    torch.testing.assert_close(grad2, grad, atol=1e-10, rtol=0, msg=lambda m: f"{kind}: {m}")
    assert metrics2 == pytest.approx(metrics, abs=1e-10)


def test_the_gradient_does_not_know_the_micro_batches():
    b = make_batch()
    for kind in KINDS:
        whole = gradient(kind, [b])
        for sizes in ([4, 4], [2, 6], [2, 2, 2, 2]):
            assert_same(whole, gradient(kind, [rows(b, i) for i in torch.arange(N).split(sizes)]), kind)


def padded(b, columns=7, extra_rows=2, fill=0.0):
    """The same batch with masked columns at the right and masked rows at the bottom."""
    fills = dict.fromkeys(b, fill) | {"ids": 3, "mask": 0}
    sides = {k: (0, columns, 0, extra_rows) if v.dim() == 2 else (0, extra_rows) for k, v in b.items()}
    return {k: torch.nn.functional.pad(v, sides[k], value=fills[k]) for k, v in b.items()}


def test_the_gradient_does_not_know_the_padding():
    b = make_batch()
    for kind in KINDS:
        extra_rows = 0 if kind in ("dpo", "rm") else 2  # an empty pair is still a pair
        for fill in (0.0, float("nan"), float("-inf")):
            assert_same(gradient(kind, [b]), gradient(kind, [padded(b, extra_rows=extra_rows, fill=fill)]), kind)


# --- masks ------------------------------------------------------------------------------------------------------------


def logps_gradient(kind, b, logps):
    """The loss straight on given logps, and its gradient."""
    logps = logps.clone().requires_grad_()
    if kind == "sft":
        loss, _ = losses.sft_loss(logps, b["mask"], denominator=3)
    elif kind == "kl":
        loss, _ = losses.kl_penalty(logps, b["ref_logps"], b["mask"], old_logps=b["old_logps"], denominator=3)
    elif kind == "sequence_logps":
        loss = (losses.sequence_logps(logps, b["mask"]) ** 2).sum()
    else:
        options = {"gspo": {"ratio": "sequence"}, "cispo": {"objective": "cispo"}, "dual": {"dual_clip": 1.1},
                   "sampler": {"sampler_logps": b.get("sampler_logps")}}.get(kind) or {"aggregation": kind}
        loss, _ = losses.policy_loss(logps, b["old_logps"], b["advantages"], b["mask"], denominator=3, **options)
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


def test_what_is_masked_moves_nothing_whatever_it_holds():
    b = make_batch()
    logps, masked = b["old_logps"] + 0.1, b["mask"] == 0
    for kind in ("token", "sequence", "constant", "gspo", "cispo", "dual", "sampler", "sft", "kl", "sequence_logps"):
        loss, grad = logps_gradient(kind, b, logps)
        assert grad[masked].eq(0).all() and grad.abs().max() > 1e-3
        for junk in (1e4, float("-inf"), float("inf"), float("nan")):
            dirty = {k: v.masked_fill(masked, junk) if k.endswith("logps") else v for k, v in b.items()}
            dirty["advantages"] = b["advantages"][:, None].expand(N, T).masked_fill(masked, junk)
            loss2, grad2 = logps_gradient(kind, dirty, logps.masked_fill(masked, junk))
            assert loss2 == loss and torch.equal(grad2, grad), (kind, junk)


def test_the_end_token_is_trained_for_every_eos_id_and_also_where_pad_is_eos():
    """Rollouts that stop on different eos ids, laid out with pad ids that are one of them."""
    eos, prompt = (1, 2), (5, 6, 7)
    rollouts = [Rollout(prompt, tokens, (1,) * len(tokens), (-1.0,) * len(tokens), (-1.0,) * len(tokens), "stop")
                for tokens in ((8, 9, 1), (9, 2), (8, 8, 9, 8, 1), (2,))]
    batch = collate(rollouts, torch.tensor([1.0, -1.0, 0.5, -0.5]))
    assert losses.count(batch.mask) == sum(len(r.tokens) for r in rollouts)
    for name in ("token", "sequence", "gspo", "sft"):
        b = {"mask": batch.mask, "old_logps": batch.old_logps, "advantages": batch.advantages}
        _, grad = logps_gradient(name, b, batch.old_logps)
        for r, g in zip(rollouts, grad):
            assert r.tokens[-1] in eos and g[len(r.tokens) - 1] != 0  # the end token carries gradient
            assert g[len(r.tokens) :].eq(0).all()  # padding carries none
    seen = []
    for pad in (0, *eos):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt + r.tokens) for r in rollouts], True, pad)
        mask = torch.nn.functional.pad(batch.mask, (len(prompt), 0))
        embedding, head = make_parameters()
        logps = token_logps(embedding[ids].cumsum(1).tanh(), head, ids, mask)
        for row, r in zip(logps, rollouts):
            assert row.nonzero().flatten().tolist() == list(range(3, 3 + len(r.tokens)))
        seen.append(torch.autograd.grad(logps.sum(), (embedding, head)))
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other))


# --- degenerate batches -----------------------------------------------------------------------------------------------


def test_a_batch_without_tokens_is_zero_with_zero_gradient():
    """All rollouts truncated and masked, or all completions empty."""
    b = make_batch() | {"mask": torch.zeros(N, T)}
    for kind in set(KINDS) - {"dpo", "rm"}:
        for chunk in (None, 1):
            parameters = make_parameters()
            loss, metrics = loss_of(kind, parameters, b, denominators_of(b), chunk)
            loss.backward()
            assert loss == 0 and all(p.grad.eq(0).all() for p in parameters)
            assert all(m.isfinite() for m in metrics.values())


def test_impossible_tokens_leave_every_other_gradient_finite():
    """Logits of -inf (a masked vocabulary) are probability 0: no NaN, in logps, entropy or gradient."""
    b, (embedding, head) = make_batch(), make_parameters()
    bias = torch.zeros(V, dtype=torch.float64)
    b["ids"][b["ids"] == 4] = 5
    bias[4] = float("-inf")
    outputs = []
    for chunk in (None, 3):
        hidden = embedding[b["ids"]].cumsum(1).tanh()
        logps = token_logps(hidden, head, b["ids"], b["mask"], bias=bias, chunk=chunk)
        states, targets = hidden.flatten(0, 1), b["ids"].flatten()
        _, entropy = losses.target_logps(states, head, targets, bias=bias, chunk=chunk, with_entropy=True)
        grads = torch.autograd.grad(losses.sft_loss(logps, b["mask"], denominator=1)[0], (embedding, head))
        assert all(x.isfinite().all() for x in (logps, entropy, *grads)) and grads[1][4].eq(0).all()
        without = [i for i in range(V) if i != 4]
        kept = torch.distributions.Categorical(logits=(states @ head.T)[:, without]).entropy().detach()
        torch.testing.assert_close(entropy, kept, atol=1e-12, rtol=0)
        outputs.append((logps.detach(), *grads))
    for one, other in zip(*outputs):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_a_chosen_token_of_probability_zero_is_infinite_not_nan():
    logps = torch.tensor([[0.0, float("-inf"), -1.0]], requires_grad=True)
    mask, old = torch.tensor([[0, 1, 1]]), torch.tensor([[0.0, -1.0, -1.0]])
    assert losses.sft_loss(logps, mask, denominator=2)[0] == float("inf")
    for a in (1.0, -1.0):
        loss, _ = losses.policy_loss(logps, old, torch.tensor([a]), mask, denominator=2)
        (grad,) = torch.autograd.grad(loss, logps)
        assert loss.isfinite() and grad.isfinite().all() and grad[0, 1] == 0 and grad[0, 2] != 0


def test_exploding_ratios_overflow_nothing_in_fp32():
    mask = torch.tensor([[0, 1]])
    for jump in (30.0, 200.0, 1e30):
        for a in (1.0, -1.0):
            logps = torch.tensor([[0.0, jump]], requires_grad=True)
            loss, m = losses.policy_loss(logps, torch.zeros(1, 2), torch.tensor([a]), mask, denominator=1)
            zeros = torch.zeros(1, 2)
            kl = losses.kl_penalty(-logps, zeros, mask, denominator=1)[0] + losses.kl_penalty(
                logps, zeros, mask, denominator=1, old_logps=zeros)[0]
            assert all(x.isfinite().all() for x in (loss, kl, *m.values(), *torch.autograd.grad(loss + kl, logps)))
