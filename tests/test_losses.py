"""Values and gradients of the losses against plain PyTorch, hand numbers and finite differences, in float64."""

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from grpolab import losses

N, T, D, V = 4, 7, 5, 11
INF, NAN = float("inf"), float("nan")
ROOT = Path(__file__).parent.parent


def exactly(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(n=N, t=T, d=D, v=V, seed=0):
    """Hidden states, head, ids and a ragged mask whose first column is 0 and whose second is 1."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, v, (n, t), generator=g)
    mask = (torch.rand(n, t, generator=g) < 0.6).double()
    mask[:, 0], mask[:, 1] = 0, 1
    return randn(n, t, d, seed=seed + 1).requires_grad_(), randn(v, d, seed=seed + 2).requires_grad_(), ids, mask


def plain_logps(hidden, head, ids, mask, bias=None, temperature=1.0):
    """The textbook form: all logits, log-softmax, gather, shift by one."""
    logits = hidden @ head.T if bias is None else hidden @ head.T + bias
    logps = (logits / temperature).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return F.pad(logps, (1, 0)) * mask


def token_logps(hidden, head, ids, mask, **options):
    """`losses.target_logps` of the tokens that the mask asks for, as the trainer calls it: (N, T), 0 elsewhere."""
    chosen = mask.flatten().nonzero().squeeze(1)
    rows = hidden.flatten(0, 1).index_select(0, chosen - 1)
    logps, _ = losses.target_logps(rows, head, ids.flatten()[chosen], **options)
    return logps.new_zeros(ids.numel()).index_copy(0, chosen, logps).view(ids.shape)


def gradients(scalar, *inputs):
    return torch.autograd.grad(scalar, inputs)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_token_logps_value_and_gradient_equal_the_plain_form():
    hidden, head, ids, mask = problem()
    weights, bias = randn(N, T, seed=3), torch.linspace(-1, 1, V, dtype=torch.float64).requires_grad_()
    temperatures = itertools.cycle((0.7, 1.0, 2.0))
    for (chunk, b), temperature in zip(itertools.product((None, 1, 4, 1000), (None, bias)), temperatures):
        inputs = (hidden, head) if b is None else (hidden, head, b)
        ours = token_logps(hidden, head, ids, mask, bias=b, temperature=temperature, chunk=chunk)
        theirs = plain_logps(hidden, head, ids, mask, b, temperature)
        exactly(ours, theirs)
        for x, y in zip(gradients((ours * weights).sum(), *inputs), gradients((theirs * weights).sum(), *inputs)):
            assert y.abs().max() > 0.1
            exactly(x, y)


def test_frozen_inputs_of_the_chunked_form_get_no_gradient_and_spoil_no_other():
    hidden, head, ids, mask = problem()
    bias = torch.zeros(V, dtype=torch.float64)
    for frozen in range(3):
        inputs = [x.detach().requires_grad_(i != frozen) for i, x in enumerate((hidden, head, bias))]
        token_logps(*inputs[:2], ids, mask, bias=inputs[2], chunk=3).sum().backward()
        plain = [x.detach().requires_grad_() for x in (hidden, head, bias)]
        plain_logps(*plain[:2], ids, mask, plain[2]).sum().backward()
        for i, (x, y) in enumerate(zip(inputs, plain)):
            assert x.grad is None if i == frozen else (x.grad - y.grad).abs().max() < 1e-12


def test_the_chunked_form_refuses_second_derivatives_instead_of_returning_wrong_ones():
    hidden, head, ids, mask = problem()
    logps = token_logps(hidden, head, ids, mask, chunk=3)
    (first,) = torch.autograd.grad((logps**2).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_entropy_comes_with_the_logps_and_carries_no_gradient():
    hidden, head, ids, _ = problem()
    hidden, ids = hidden.flatten(0, 1), ids.flatten()
    theirs = torch.distributions.Categorical(logits=hidden @ head.T / 1.3)
    for chunk in (None, 3):
        logps, entropy = losses.target_logps(hidden, head, ids, temperature=1.3, chunk=chunk, with_entropy=True)
        exactly(entropy, theirs.entropy().detach())
        exactly(logps, theirs.log_prob(ids))
        assert logps.requires_grad and not entropy.requires_grad
        assert losses.target_logps(hidden, head, ids, temperature=1.3, chunk=chunk)[1] is None
    zeros, bias = torch.zeros(V, 2, dtype=torch.float64), torch.tensor([0.0, 0.0] + [-INF] * (V - 2), dtype=torch.float64)
    for chunk in (None, 2):  # tokens of probability 0 count nothing
        entropy = losses.target_logps(zeros[:3], zeros, ids[:3] * 0, bias=bias, chunk=chunk, with_entropy=True)[1]
        exactly(entropy, torch.full((3,), math.log(2), dtype=torch.float64))


def test_half_precision_products_are_normalised_in_fp32():
    """The logits may be rounded to bf16; the log-softmax must not be: its error stays that of the rounded logits."""
    hidden, head, ids, mask = problem(d=64, v=500)
    with torch.no_grad():
        low = [x.detach().bfloat16() for x in (hidden, head)]
        rounded = (low[0] @ low[1].T).float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        for chunk in (None, 2):
            ours = token_logps(*low, ids, mask, chunk=chunk)
            assert ours.dtype == torch.float32
            exactly(ours, F.pad(rounded, (1, 0)) * mask.float(), atol=1e-5)
            wide = token_logps(low[0], low[1].float(), ids, mask, chunk=chunk)  # an fp32 head rounds nothing
            exactly(wide, plain_logps(low[0].double(), low[1].double(), ids, mask).float(), atol=1e-5)


def test_autocast_gives_the_same_gradients_chunked_or_not_even_around_the_backward():
    hidden, head, ids, mask = problem(d=32)
    bias, results = randn(V), []
    for chunk in (None, 3):
        inputs = [x.detach().float().requires_grad_() for x in (hidden, head, bias)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logps = token_logps(*inputs[:2], ids, mask, bias=inputs[2], chunk=chunk)
            logps.sum().backward()
        results.append((logps.detach(), *(x.grad for x in inputs)))
    full = [x.detach().requires_grad_() for x in (hidden, head, bias)]
    plain_logps(*full[:2], ids, mask, full[2]).sum().backward()
    for plain, chunked in zip(*results):
        assert plain.dtype == chunked.dtype == torch.float32
        exactly(plain, chunked, atol=0.05)
    assert 1e-4 < (results[1][2] - full[1].grad).abs().max() < 0.1  # it did run in bf16
    inputs = [x.detach().float().requires_grad_() for x in (hidden, head)]  # a forward outside keeps its precision inside
    logps = token_logps(*inputs, ids, mask, chunk=3).sum()
    outside = torch.autograd.grad(logps, inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(outside, torch.autograd.grad(logps, inputs)))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns, in the forward and in the backward."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_no_tensor_of_all_logits_exists_in_the_forward_or_the_backward():
    hidden, head, ids, mask = problem(n=4, t=32, d=4, v=1000)
    chosen, sizes = int(mask.sum()), {}
    for chunk in (16, 10**6):
        with Largest() as largest:
            token_logps(hidden, head, ids, mask, chunk=chunk).sum().backward()
            losses.target_logps(hidden[:, 0], head, ids[:, 0], chunk=1, with_entropy=True)[0].sum().backward()
        sizes[chunk] = largest.numel
    assert sizes[16] == 16 * 1000  # the head is 4,000 and the hidden states 512
    assert sizes[10**6] == chosen * 1000 < 4 * 32 * 1000  # one chunk: still only where the mask asks


def test_the_default_chunk_bounds_the_logits_at_once(monkeypatch):
    """One chunk only where its logits fit and a backward will read them."""
    hidden, head, ids, mask = problem(n=4, t=32, d=4, v=1000)
    all_logits = int(mask.sum()) * 1000
    monkeypatch.setattr(losses, "CHUNK_BYTES", 80_000)  # of float64
    for fits, expected in ((all_logits, all_logits), (all_logits - 1, 10_000)):
        monkeypatch.setattr(losses, "KEPT_BYTES", 8 * fits)
        with Largest() as largest:
            token_logps(hidden, head, ids, mask).sum().backward()
        assert largest.numel == expected
        with Largest() as largest, torch.no_grad():
            token_logps(hidden, head, ids, mask)
        assert largest.numel == 10_000


# --- gradients: finite differences through the logits -----------------------------------------------------------------


def objectives(ids, mask):
    """name -> loss of the logps, for every loss without a stop-gradient. Ratios are spread over all clip regions."""
    old = plain_logps(*problem()[:2], ids, mask).detach() + randn(N, T, seed=5) * 0.5
    ref, a, sampler = old + randn(N, T, seed=6), randn(N, seed=7), old + randn(N, T, seed=8)
    policies = {
        f"{aggregation} {ratio} {options}": dict(aggregation=aggregation, ratio=ratio, **options)
        for aggregation, ratio, options in itertools.product(
            losses.AGGREGATIONS, ("token", "sequence"),
            ({}, {"clip_eps": (0.1, 0.4), "dual_clip": 1.3}, {"clip_eps": (INF, INF)}, {"sampler_logps": sampler}))
    }
    pairs = lambda logps: losses.sequence_logps(logps, mask).view(2, -1)  # noqa: E731
    c, r = pairs(ref)
    dpos = {f"dpo {o}": o for o in ({}, {"label_smoothing": 0.1}, {"kind": "ipo"}, {"kind": "hinge", "beta": 0.01},
                                    {"kind": "ipo", "lengths": torch.tensor([[2, 3], [4, 5]])})}
    kls = {f"kl {kind} {agg}": dict(kind=kind, aggregation=agg, old_logps=old)
           for kind, agg in itertools.product(("k1", "k2", "k3", "unbiased"), losses.AGGREGATIONS)}
    return (
        {name: lambda lp, o=o: losses.policy_loss(lp, old, a, mask, denominator=3, **o) for name, o in policies.items()}
        | {name: lambda lp, o=o: losses.dpo_loss(*pairs(lp), c, r, **{"beta": 0.3, "denominator": 2} | o)
           for name, o in dpos.items()}
        | {name: lambda lp, o=o: losses.kl_penalty(lp, ref, mask, denominator=5, **o) for name, o in kls.items()}
        | {"sft": lambda lp: losses.sft_loss(lp, mask, denominator=5),
           "bradley-terry": lambda lp: losses.bradley_terry_loss(
               *pairs(lp), denominator=2, margin=torch.tensor([0.5, 1.0]), centering=0.01)}
    )


def test_every_loss_passes_gradcheck_through_the_logits():
    hidden, head, ids, mask = problem()
    for name, loss in objectives(ids, mask).items():
        def through_logits(hidden, head, loss=loss):
            return loss(token_logps(hidden, head, ids, mask, temperature=0.9, chunk=5))[0]

        assert max(g.abs().max() for g in gradients(through_logits(hidden, head), hidden, head)) > 1e-3, name
        assert torch.autograd.gradcheck(through_logits, (hidden, head), fast_mode=True), name


# --- the policy gradient ----------------------------------------------------------------------------------------------


def independent_policy_loss(logps, old, a, mask, denominator, aggregation, clip_eps, dual_clip, ratio, objective,
                            sampler_logps, sampler_cap):
    """The papers' sums written as loops over rows and tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for n in range(len(logps)):
        at = [t for t in range(logps.shape[1]) if mask[n, t] == 1]
        for t in at:
            if ratio == "sequence":
                r = torch.exp(sum(logps[n, u] - old[n, u] for u in at) / len(at))
            else:
                r = torch.exp(logps[n, t]) / torch.exp(old[n, t])
            lo, hi = 1 - clip_eps[0], 1 + clip_eps[1]
            bounded = min(max(r.item(), lo), hi)
            if objective == "cispo":
                term = -bounded * a[n] * logps[n, t]
            elif a[n] >= 0:
                term = -a[n] * (r if r < hi else bounded)
            else:
                term = -a[n] * (r if r > lo else bounded)
                if dual_clip is not None and r > dual_clip:
                    term = -a[n] * dual_clip
            if sampler_logps is not None:
                term = term * min(math.exp(old[n, t] - sampler_logps[n, t]), sampler_cap)
            total = total + term / (len(at) if aggregation == "sequence" else 1)
    return total / denominator


def test_policy_loss_equals_an_independent_formula_in_every_option():
    _, _, _, mask = problem()
    old, a = -torch.rand(N, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64), randn(N, seed=2)
    sampler = old + randn(N, T, seed=3) * 0.7
    logps = (old + randn(N, T, seed=4) * 0.5).requires_grad_()
    seen = set()
    for options in itertools.product(losses.AGGREGATIONS, ((0.2, 0.2), (0.1, 0.5), (INF, INF)), (None, 1.4),
                                     ("token", "sequence"), ("ppo", "cispo"), (None, sampler), (2.0, 1.1)):
        names = "aggregation", "clip_eps", "dual_clip", "ratio", "objective", "sampler_logps", "sampler_cap"
        kwargs = dict(zip(names, options)) | {"denominator": 7.0}
        if kwargs["objective"] == "cispo" and kwargs["dual_clip"]:  # refused: it would change nothing
            with pytest.raises(ValueError, match="dual_clip .* for objective 'ppo'"):
                losses.policy_loss(logps, old, a, mask, **kwargs)
            continue
        ours, theirs = losses.policy_loss(logps, old, a, mask, **kwargs)[0], None
        theirs = independent_policy_loss(logps, old, a, mask, **kwargs)
        exactly(ours, theirs)
        exactly(*gradients(ours, logps), *gradients(theirs, logps))
        seen.add(round(ours.item(), 9))
    assert len(seen) > 80  # the options do differ


def test_metrics_of_the_policy_loss_by_hand():
    old = torch.tensor([[0.0, -1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    logps = old + torch.tensor([[9.0, math.log(0.5), math.log(0.7), 0.0, math.log(1.5)]])
    _, m = losses.policy_loss(logps, old, torch.tensor([-1.0]), mask, denominator=4, dual_clip=1.4,
                              sampler_logps=logps - 1.0, sampler_cap=2.0)
    assert m["clip_low"] == 0.5 and m["clip_high"] == 0 and m["clip_dual"] == 0.25
    assert m["ratio"].item() == pytest.approx((0.5 + 0.7 + 1 + 1.5) / 4) and m["ratio_max"].item() == pytest.approx(1.5)
    weights = [min(math.e / r, 2.0) for r in (0.5, 0.7, 1.0, 1.5)]
    assert m["sampler_weight"].item() == pytest.approx(sum(weights) / 4) and m["sampler_capped"] == 0.75
    assert m["diff_mean"].item() == m["diff_abs_mean"].item() == m["diff_max"].item() == pytest.approx(1.0)
    assert m["sampler_kl"].item() == pytest.approx(math.e - 2) and m["low_logp"] == 0
    apart = torch.tensor([[0.0, -10.0, -11.0, -0.25, -0.25]], dtype=torch.float64)
    drawn = apart + torch.tensor([[5.0, 1.0, -3.0, 0.0, 0.0]])
    _, m = losses.policy_loss(apart, drawn, torch.tensor([1.0]), mask, denominator=4)
    assert (m["diff_mean"], m["diff_abs_mean"], m["diff_max"], m["low_logp"]) == (0.5, 1.0, 3.0, 0.25)
    for jump in (-5.0, 5.0):  # tokens without advantage are not clipped: they had no gradient to lose
        _, m = losses.policy_loss(old + jump, old, torch.tensor([0.0]), mask, denominator=4, dual_clip=1.4)
        assert m["clip_low"] == m["clip_high"] == m["clip_dual"] == 0


def test_the_defaults_are_ppo_at_a_fifth_over_the_tokens():
    logps, mask = torch.tensor([[math.log(2), math.log(2)], [math.log(0.5), 0.0]]), torch.tensor([[1, 1], [1, 0]])
    loss, _ = losses.policy_loss(logps, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), mask, denominator=3)
    assert loss.item() == pytest.approx((-1.2 - 1.2 + 0.8) / 3)
    loss, _ = losses.policy_loss(logps, logps, torch.tensor([1.0, -1.0]), mask, denominator=3, sampler_logps=logps - 9)
    assert loss.item() == pytest.approx((-2 - 2 + 2) / 3)  # sampler_cap


def test_old_and_reference_logps_are_constants_even_when_they_come_with_a_graph():
    """exp(logps - logps) has no gradient: without a detach, forgetting one would silently train nothing."""
    _, _, _, mask = problem()
    logps, a = randn(N, T).requires_grad_(), randn(N, seed=1)
    frozen = logps.detach()
    c, r = losses.sequence_logps(logps, mask).view(2, -1)
    for loss in (
        lambda ref: losses.policy_loss(logps, ref, a, mask, denominator=1)[0],
        lambda ref: losses.policy_loss(logps, frozen, a, mask, denominator=1, sampler_logps=ref - 0.1)[0],
        lambda ref: losses.kl_penalty(logps, ref - 0.1, mask, denominator=1, old_logps=ref)[0],
        lambda ref: losses.dpo_loss(c, r, *losses.sequence_logps(ref, mask).view(2, -1), beta=0.1, denominator=1)[0],
    ):
        (with_graph,), (without,) = (torch.autograd.grad(loss(x), logps, retain_graph=True) for x in (logps, frozen))
        assert without.abs().max() > 0.01
        exactly(with_graph, without)
    on_policy = [losses.kl_penalty(logps, frozen - 0.1, mask, denominator=1, **o)[0] for o in ({}, {"old_logps": frozen})]
    exactly(*(gradients(x, logps)[0] for x in on_policy))


def test_per_token_advantages_generalise_per_row_ones():
    _, _, _, mask = problem()
    logps, old, a = randn(N, T).requires_grad_(), randn(N, T, seed=1), randn(N, seed=2)
    rows = losses.policy_loss(logps, old, a, mask, denominator=1)[0]
    assert rows == losses.policy_loss(logps, old, a[:, None].expand(N, T), mask, denominator=1)[0]
    only = torch.zeros(N, T, dtype=torch.float64)
    only[1, 1] = 1.0
    grad = gradients(losses.policy_loss(logps, logps.detach(), only, mask, denominator=1)[0], logps)[0]
    assert grad.nonzero().tolist() == [[1, 1]]


def test_counts_by_aggregation():
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    assert losses.count(mask) == 4 and losses.count(mask, "sequence") == 2
    assert losses.count(mask, "constant", max_new_tokens=10) == 20
    logps, a = torch.zeros(3, 4), torch.tensor([1.0, 5.0, 2.0])
    value = {agg: -losses.policy_loss(logps, logps, a, mask, aggregation=agg, denominator=losses.count(
        mask, agg, max_new_tokens=10))[0].item() for agg in losses.AGGREGATIONS}
    assert value == pytest.approx({"token": (3 * 1 + 2) / 4, "sequence": (1 + 2) / 2, "constant": (3 * 1 + 2) / 20})


# --- SFT, preferences, reward model -----------------------------------------------------------------------------------


def test_sft_loss_is_cross_entropy_of_the_kept_tokens():
    hidden, head, ids, mask = problem()
    loss, _ = losses.sft_loss(token_logps(hidden, head, ids, mask), mask, denominator=mask.sum())
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    exactly(loss, F.cross_entropy((hidden @ head.T)[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100))


def dpo(c, r, ref_c=0.0, ref_r=0.0, **kwargs):
    to = lambda x: torch.as_tensor([x], dtype=torch.float64)  # noqa: E731
    return losses.dpo_loss(to(c), to(r), to(ref_c), to(ref_r), **{"beta": 0.5, "denominator": 1} | kwargs)


def test_dpo_loss_by_hand():
    # delta = (-1 + 2) - (-4 + 3) = 2, beta delta = 1
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    value = lambda **k: dpo(-1.0, -4.0, -2.0, -3.0, **k)[0].item()  # noqa: E731
    assert value() == pytest.approx(-math.log(sigmoid(1)), abs=1e-12)
    assert value(label_smoothing=0.1) == pytest.approx(-0.9 * math.log(sigmoid(1)) - 0.1 * math.log(sigmoid(-1)))
    assert value(kind="ipo") == pytest.approx((2 - 1) ** 2)
    assert value(kind="ipo", beta=0.1) == pytest.approx((2 - 5) ** 2)
    assert value(kind="hinge", beta=2.0) == 0.0 and value(kind="hinge", beta=0.2) == pytest.approx(0.6)
    # by lengths: (-1 + 3) / 2 - (-4 + 3) / 8 = 1.125
    by_length = lambda **k: dpo(-1.0, -4.0, -3.0, -3.0, lengths=torch.tensor([[2], [8]]), **k)[0].item()  # noqa: E731
    assert by_length() == pytest.approx(-math.log(sigmoid(0.5625)))
    assert by_length(kind="ipo") == pytest.approx((1.125 - 1) ** 2)
    m = dpo(-1.0, -4.0, -3.0, -3.0, lengths=torch.tensor([[2], [8]]))[1]
    assert m["reward_chosen"] == 0.5 and m["reward_rejected"] == -0.0625 and m["margin"] == 0.5625
    m = dpo(-1.0, -4.0, -2.0, -3.0)[1]
    assert m.pop("dpo_loss").item() == pytest.approx(value())
    assert {k: v.item() for k, v in m.items()} == {"accuracy": 1, "margin": 1, "reward_chosen": 0.5,
                                                   "reward_rejected": -0.5, "logps_chosen": -1, "logps_rejected": -4}


def test_dpo_at_initialisation_is_log_two_with_gradient_half_beta():
    logps = randn(2, 3).requires_grad_()
    loss, m = losses.dpo_loss(*logps, *logps.detach(), beta=0.1, denominator=3)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-14) and m["margin"] == m["accuracy"] == 0  # a tie is no win
    exactly(*gradients(loss, logps), torch.tensor([[-1.0], [1.0]], dtype=torch.float64).expand(2, 3) * 0.1 / 2 / 3)


def test_bradley_terry_by_hand():
    c, r = torch.tensor([2.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64)
    minus_log_sigmoid = lambda x: math.log(1 + math.exp(-x))  # noqa: E731
    value = lambda **k: losses.bradley_terry_loss(c, r, denominator=2, **k)[0].item()  # noqa: E731
    assert value() == pytest.approx((minus_log_sigmoid(1) + minus_log_sigmoid(-3)) / 2)
    assert value(margin=0.5) == pytest.approx((minus_log_sigmoid(0.5) + minus_log_sigmoid(-3.5)) / 2)
    assert value(margin=torch.tensor([0.5, 0.0])) == pytest.approx((minus_log_sigmoid(0.5) + minus_log_sigmoid(-3)) / 2)
    assert value(centering=0.01) == pytest.approx(value() + 0.01 * (9 + 9) / 2)
    m = losses.bradley_terry_loss(c, r, denominator=2)[1]
    assert m["accuracy"] == 0.5 and m["margin"] == -1 and m["reward_chosen"] == 1 and m["reward_rejected"] == 2
    wins = lambda c, r: losses.bradley_terry_loss(c, r, denominator=2)[1]["accuracy"].item()  # noqa: E731
    assert (wins(c, c), wins(c + 1, c), wins(c - 1, c)) == (0, 1, 0)


# --- KL ---------------------------------------------------------------------------------------------------------------


def test_kl_estimates_by_hand():
    logps, ref = torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, -3.0]])  # d = -2
    mask = torch.tensor([[0, 1]])
    by_hand = {"k1": 2.0, "k2": 2.0, "k3": math.exp(-2) - 1 + 2, "unbiased": 2 * (math.exp(-2) + 1)}
    for kind, value in by_hand.items():
        loss, m = losses.kl_penalty(logps, ref, mask, denominator=1, kind=kind, old_logps=logps - math.log(2))
        assert loss.item() == pytest.approx(value, rel=1e-6)
        assert m["kl"].item() == pytest.approx(by_hand["k3"] if kind == "unbiased" else value, rel=1e-6)


def test_kl_penalty_is_aggregated_like_the_policy_loss():
    _, _, _, mask = problem()
    logps, ref = randn(N, T), randn(N, T, seed=1)
    x = ((ref - logps).exp() - 1 - (ref - logps)) * mask
    value = lambda agg: losses.kl_penalty(logps, ref, mask, denominator=3, kind="k3", aggregation=agg)[0]  # noqa: E731
    exactly(value("token"), x.sum() / 3)
    exactly(value("constant"), x.sum() / 3)
    exactly(value("sequence"), (x.sum(1) / mask.sum(1)).sum() / 3)
    exactly(losses.aggregate(x, mask, denominator=3, aggregation="sequence"), value("sequence"))
    for aggregation in ("token", "constant", "sequence"):  # the metric is of the tokens
        found = losses.kl_penalty(logps, ref, mask, denominator=300, aggregation=aggregation, tokens=mask.sum())[1]["kl"]
        exactly(found, x.sum() / mask.sum())


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_by_name():
    hidden, head, ids, mask = problem()
    lp, a, p = randn(N, T), randn(N), torch.zeros(3)
    policy = lambda *args, **k: losses.policy_loss(*(args or (lp, lp, a, mask)), **{"denominator": 1} | k)  # noqa: E731
    dpo3 = lambda **k: losses.dpo_loss(p, p, p, p, **{"beta": 0.1, "denominator": 3} | k)  # noqa: E731
    cases = [
        (lambda: token_logps(hidden, head, ids, mask, temperature=0.0), "temperature must be positive, got 0.0"),
        (lambda: token_logps(hidden, head, ids, mask, chunk=0), "at least 1, got 0"),
        (lambda: policy(lp, lp, a, mask[:, 1:]), "same shape"),
        (lambda: policy(lp, lp, a[:2], mask), r"advantages must be \(N,\) or \(N, T\)"),
        (lambda: policy(lp, lp, a * NAN, mask), "finite"),
        (lambda: policy(lp, lp, a, mask * 0.5), "0 and 1"),
        (lambda: policy(clip_eps=(-0.1, 0.2)), r"\(-0.1, 0.2\)"),
        (lambda: policy(clip_eps=0.2), "must be .low, high."),
        (lambda: policy(dual_clip=1.0), "must be above 1"),
        (lambda: policy(sampler_cap=0.2), "at least 1"),
        (lambda: policy(ratio="row"), "'row'"),
        (lambda: policy(objective="reinforce"), "'reinforce'"),
        (lambda: policy(aggregation="mean"), "'mean'"),
        (lambda: policy(denominator=0), "denominator must be the positive count"),
        (lambda: policy(denominator=-2), "got -2.0"),
        (lambda: policy(denominator=NAN), "got nan"),
        (lambda: losses.count(mask, "mean"), "'mean'"),
        (lambda: losses.count(mask, "constant"), "max_new_tokens"),
        (lambda: dpo3(beta=0.0), "beta must be positive"),
        (lambda: dpo3(label_smoothing=0.5), "0.5"),
        (lambda: dpo3(label_smoothing=0.1, kind="ipo"), "'ipo'"),
        (lambda: dpo3(kind="kto"), "'kto'"),
        (lambda: dpo3(lengths=(torch.tensor([1, 0, 2]), torch.tensor([1, 1, 1]))), "at least 1"),
        (lambda: losses.dpo_loss(p, p[:, None], p, p, beta=0.1, denominator=3), r"\(3, 1\)"),
        (lambda: losses.bradley_terry_loss(p[:, None], p[:, None], denominator=3), r"\(P,\)"),
        (lambda: losses.bradley_terry_loss(p, p, margin=torch.zeros(1), denominator=3), r"\(1,\)"),
        (lambda: losses.kl_estimate(lp, lp, "k4"), "'k4'"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="bfloat16"):
        policy(lp.bfloat16(), lp, a, mask)
