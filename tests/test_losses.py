"""Values and gradients of the losses against plain PyTorch, hand numbers and finite differences."""

import pytest
import torch
import torch.nn.functional as F

from grpolab import losses
from grpolab.losses import count, policy_loss, sft_loss, token_logps, token_logps_and_entropy

N, T, D, V = 4, 7, 5, 11


def problem(dtype=torch.float64, n=N, t=T, d=D, v=V, seed=0):
    """Hidden states, head, ids and a ragged mask whose first column is 0."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, t, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(v, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.randint(0, v, (n, t), generator=g)
    mask = (torch.rand(n, t, generator=g) < 0.6).to(dtype)
    mask[:, 0], mask[:, 1] = 0, 1
    return hidden, head, ids, mask


def plain_logps(hidden, head, ids, mask, bias=None, temperature=1.0):
    """The textbook form: all logits, log-softmax, gather, shift by one."""
    logits = hidden @ head.T if bias is None else hidden @ head.T + bias
    logps = (logits / temperature).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return F.pad(logps, (1, 0)) * mask


@pytest.mark.parametrize("chunk", [None, 1, 4, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_token_logps_value_and_gradient_equal_the_plain_form(chunk, with_bias):
    hidden, head, ids, mask = problem()
    bias = torch.linspace(-1, 1, V, dtype=torch.float64).requires_grad_() if with_bias else None
    inputs = [hidden, head] + ([bias] if with_bias else [])
    weights = torch.randn(N, T, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = token_logps(hidden, head, ids, mask, bias=bias, temperature=0.7, chunk=chunk)
    theirs = plain_logps(hidden, head, ids, mask, bias, temperature=0.7)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    for a, b in zip(torch.autograd.grad((ours * weights).sum(), inputs),
                    torch.autograd.grad((theirs * weights).sum(), inputs)):
        assert b.abs().max() > 0.1
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_policy_loss_on_policy_is_minus_the_mean_advantage_and_its_gradient_minus_advantage():
    hidden, head, ids, mask = problem()
    logps = token_logps(hidden, head, ids, mask).detach().requires_grad_()
    a = torch.tensor([1.0, -0.5, 2.0, -1.0], dtype=torch.float64)
    loss, metrics = policy_loss(logps, logps.detach(), a, mask, denominator=count(mask))
    assert loss.item() == pytest.approx(-(a[:, None] * mask).sum().item() / mask.sum().item(), abs=1e-14)
    (grad,) = torch.autograd.grad(loss, logps)
    torch.testing.assert_close(grad, -a[:, None] * mask / mask.sum(), atol=1e-14, rtol=0)
    assert metrics["clip_low"] == metrics["clip_high"] == 0


def test_sft_loss_is_cross_entropy_of_the_kept_tokens():
    hidden, head, ids, mask = problem()
    loss, _ = sft_loss(token_logps(hidden, head, ids, mask), mask, denominator=mask.sum())
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    theirs = F.cross_entropy((hidden @ head.T)[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk", [None, 3])
def test_entropy_comes_with_the_logps_and_carries_no_gradient(chunk):
    hidden, head, ids, mask = problem()
    logps, entropy = token_logps_and_entropy(hidden, head, ids, mask, temperature=1.3, chunk=chunk)
    p = torch.distributions.Categorical(logits=hidden @ head.T / 1.3).entropy()
    torch.testing.assert_close(entropy, F.pad(p[:, :-1], (1, 0)).detach() * mask, atol=1e-12, rtol=0)
    assert logps.requires_grad and not entropy.requires_grad
    torch.testing.assert_close(losses.entropy(torch.zeros(2, V)), torch.full((2,), V).log())
