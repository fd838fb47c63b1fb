"""Exact expectations on a problem small enough to enumerate: every completion over three tokens, of at most three.

Token 0 ends a completion, so there are 15 of them with lengths 1, 2 and 3. The policy is a table of logits for each of the
7 prefixes. Nothing is sampled: expectations are sums over all completions (or over all groups of them), and the true
gradients come from differentiating those sums. Each completion's share p enters as the denominator 1 / p.
"""

import itertools

import pytest
import torch

from grpolab import losses
from grpolab.train import advantages as adv

V, T = 3, 3


def completions(prefix=()):
    if len(prefix) == T or (prefix and prefix[-1] == 0):
        return [prefix]
    return [c for token in range(V) for c in completions((*prefix, token))]


ROWS = completions()
PREFIXES = sorted({row[:t] for row in ROWS for t in range(len(row))})
AT = torch.tensor([[PREFIXES.index(r[:t]) if t < len(r) else 0 for t in range(T)] for r in ROWS])
IDS = torch.tensor([[r[t] if t < len(r) else 0 for t in range(T)] for r in ROWS])
MASK = torch.tensor([[float(t < len(r)) for t in range(T)] for r in ROWS], dtype=torch.float64)
REWARDS = torch.rand(len(ROWS), generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def table(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(len(PREFIXES), V, generator=g, dtype=torch.float64).requires_grad_()


def logps_of(theta):
    """(15, 3) logps of the tokens of every completion."""
    return theta.log_softmax(-1)[AT, IDS] * MASK


def probabilities(theta):
    return logps_of(theta).sum(1).exp()


def grad(scalar, theta):
    return torch.autograd.grad(scalar, theta, retain_graph=True)[0]


def expected(loss, weights, theta):
    """Sum over completions of weight * the gradient of loss(row), the weight entering as a denominator."""
    terms = [loss(slice(n, n + 1), denominator=1 / w)[0] for n, w in enumerate(weights.tolist())]
    return sum(t.item() for t in terms), grad(sum(terms), theta)


def policy_gradient(theta, coefficients, **options):
    """-gradient of policy_loss, on-policy, where completion n stands for a total advantage of coefficients[n]."""
    logps = logps_of(theta)
    loss, _ = losses.policy_loss(logps, logps.detach(), coefficients, MASK, denominator=1, **options)
    return -grad(loss, theta)


def same(a, b):
    assert b.abs().max() > 1e-3
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def test_token_sums_have_the_true_policy_gradient_and_row_means_do_not():
    theta = table(0)
    p = probabilities(theta)
    true = grad((p * REWARDS).sum(), theta)
    for options in ({}, {"aggregation": "constant"}, {"clip_eps": (0.0, 0.0)}, {"objective": "cispo"}, {"dual_clip": 2.0}):
        same(policy_gradient(theta, p.detach() * REWARDS, **options), true)
    # a constant added to every reward changes no true gradient; dividing each row by its length is felt by it
    same(policy_gradient(theta, p.detach() * (REWARDS + 5)), true)
    for options in ({"aggregation": "sequence"}, {"aggregation": "sequence", "ratio": "sequence"}):
        one, other = (policy_gradient(theta, p.detach() * (REWARDS + c), **options) for c in (0, 5))
        assert cosine(one, true) < 0.99 and cosine(other, true) < 0.9


def group_coefficients(p, kind, size):
    """The expected advantage of each completion under groups of `size` drawn from p: every group is enumerated."""
    groups = torch.tensor(list(itertools.product(range(len(ROWS)), repeat=size)))
    a = adv.advantages(REWARDS[groups], kind) / size
    weighted = p[groups].prod(1, keepdim=True) * a
    return torch.zeros(len(ROWS), dtype=p.dtype).index_add(0, groups.flatten(), weighted.flatten())


def test_group_baselines_scale_the_true_gradient_and_leave_one_out_does_not():
    """r - mean of the group has (G - 1) / G of the true gradient: the mean contains the rollout itself."""
    theta = table(0)
    p = probabilities(theta).detach()
    true = grad((probabilities(theta) * REWARDS).sum(), theta)
    for size in (2, 3):
        same(policy_gradient(theta, group_coefficients(p, "centred", size)), true * (size - 1) / size)
        same(policy_gradient(theta, group_coefficients(p, "leave_one_out", size)), true)
        standardised = policy_gradient(theta, group_coefficients(p, "standardised", size))
        assert 0.5 < cosine(standardised, true) < 1 - 1e-6  # dividing by the group's std changes the direction


def test_importance_weights_correct_a_sampler_that_is_not_the_policy():
    """Over single tokens the ratio is exact: whoever samples, an open clip finds the gradient of the policy itself."""
    theta, sampler = table(0), table(1).detach()
    now, then = theta.log_softmax(-1)[0][:, None], sampler.log_softmax(-1)[0][:, None]  # (3, 1): one row a token
    rewards, mask, free = REWARDS[:V], torch.ones(V, 1), float("inf")
    true = grad((now[:, 0].exp() * rewards).sum(), theta)

    def gradient(old, weigh=False, **options):
        return -expected(lambda n, denominator: losses.policy_loss(
            now[n], old[n], rewards[n], mask[n], denominator=denominator,
            sampler_logps=then[n] if weigh else None, **options), then[:, 0].exp(), theta)[1]

    same(gradient(then, clip_eps=(free, free)), true)  # the sampler's logps as old_logps
    same(gradient(now.detach(), weigh=True, sampler_cap=free), true)  # the trainer's, and the sampler's as weights
    assert cosine(gradient(now.detach()), true) < 0.99  # without weights: the gradient of another expectation


def kl_at_prefixes(theta, reference, visits):
    """Sum over prefixes of visits * KL(policy || reference) there."""
    logq, logp = reference.log_softmax(-1), theta.log_softmax(-1)
    return (visits * (logp.exp() * (logp - logq)).sum(1)).sum()


def visits_of(theta):
    """The probability that a completion passes each prefix."""
    p, passed = probabilities(theta).detach(), torch.zeros(len(PREFIXES), dtype=torch.float64)
    for n, row in enumerate(ROWS):
        for t in range(len(row)):
            passed[PREFIXES.index(row[:t])] += p[n]
    return passed


def kl_gradient(kind, theta, reference, sampler):
    logps, ref, old = logps_of(theta), logps_of(reference).detach(), logps_of(sampler).detach()
    return expected(lambda n, denominator: losses.kl_penalty(
        logps[n], ref[n], MASK[n], old_logps=old[n], denominator=denominator, kind=kind),
        probabilities(sampler).detach(), theta)


def test_kl_penalties_on_policy():
    """The KL at the visited prefixes: k2 and the unbiased form have its gradient, k3 does not, k1 has none at all."""
    theta, reference = table(0), table(1).detach()
    kl = kl_at_prefixes(theta, reference, visits_of(theta))
    true = grad(kl, theta)
    values, gradients = zip(*(kl_gradient(k, theta, reference, theta) for k in ("k1", "k2", "k3", "unbiased")))
    for i in (0, 2, 3):
        assert values[i] == pytest.approx(kl.item(), abs=1e-12)
    assert abs(values[1] - kl.item()) > 0.01
    assert gradients[0].abs().max() < 1e-12
    same(gradients[1], true)
    same(gradients[3], true)
    assert cosine(gradients[2], true) < 0.95


def test_the_unbiased_kl_penalty_stays_so_off_policy_and_k2_does_not():
    theta, reference, sampler = table(0), table(1).detach(), table(2).detach()
    true = grad(kl_at_prefixes(theta, reference, visits_of(sampler)), theta)
    same(kl_gradient("unbiased", theta, reference, sampler)[1], true)
    for kind in ("k1", "k2", "k3"):
        assert cosine(kl_gradient(kind, theta, reference, sampler)[1], true) < 0.95


def test_the_unbiased_kl_penalty_to_the_sampler_is_the_kl_to_it_on_its_own_tokens():
    theta, sampler = table(0), table(2).detach()
    kl = kl_at_prefixes(theta, sampler, visits_of(sampler))
    value, gradient = kl_gradient("unbiased", theta, sampler, sampler)
    assert value == pytest.approx(kl.item(), abs=1e-12)
    same(gradient, grad(kl, theta))
    assert cosine(kl_gradient("k3", theta, sampler, sampler)[1], grad(kl, theta)) < 0.99  # KL(sampler || policy)'s


def test_sft_on_the_data_distribution_is_minus_the_gradient_of_its_cross_entropy():
    theta, data = table(0), probabilities(table(3)).detach()
    value, gradient = expected(lambda n, denominator: losses.sft_loss(logps_of(theta)[n], MASK[n], denominator=denominator),
                               data, theta)
    cross_entropy = -(data * probabilities(theta).log()).sum()
    assert value == pytest.approx(cross_entropy.item(), abs=1e-12)
    same(gradient, grad(cross_entropy, theta))


def test_dpo_on_all_pairs_has_the_rlhf_optimum_as_its_fixed_point():
    """At policy = reference * exp(reward / beta) / Z, preferences drawn from Bradley-Terry rewards leave no gradient."""
    reference, beta = table(1).detach(), 0.5
    ref = logps_of(reference).sum(1)
    optimum = ref + REWARDS / beta
    optimum = (optimum - optimum.logsumexp(0)).requires_grad_()
    first, second = torch.tensor(list(itertools.permutations(range(len(ROWS)), 2))).T
    preferred = torch.sigmoid(REWARDS[first] - REWARDS[second])

    def gradient(logps):
        terms = [losses.dpo_loss(logps[c : c + 1], logps[r : r + 1], ref[c : c + 1], ref[r : r + 1], beta=beta,
                                 denominator=1 / w)[0] for c, r, w in zip(first, second, preferred)]
        return torch.autograd.grad(sum(terms), logps)[0]

    assert gradient(optimum).abs().max() < 1e-12
    assert gradient((optimum.detach() + REWARDS).requires_grad_()).abs().max() > 1e-2
