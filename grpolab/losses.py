"""The losses of post-training, to be read beside the papers: pure functions on log-probabilities; imports torch only.

Shapes: N rows, T tokens, D hidden size, V vocabulary, P preference pairs. Column t of every (N, T) tensor speaks of the
token `ids[:, t]`, so `logps[n, t]` is log p(ids[n, t] | ids[n, :t]) in nats and column 0, which nothing precedes, is
never used. `mask` is 1 where the policy chose the token; what is masked can hold anything, also NaN, and moves nothing.

Every loss is a sum divided by a `denominator` that the caller gives: `count` over the whole batch (all micro-batches,
all ranks), so that no way of splitting, padding or ordering the batch can change the gradient. Every loss returns
`(loss, metrics)`. Metrics are detached scalars, aggregated with the weights and the denominator of the loss: they ADD
over micro-batches and ranks, except the names that end in `_max`, which are maxima (`combine` does both).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 2**24  # the default chunk holds this many logits, 64 MiB in fp32
MAX_LOG_RATIO = 20.0  # ratios are capped at e^20 so that fp32 cannot overflow; beyond it the gradient is zero


# --- log-probabilities ------------------------------------------------------------------------------------------------


def token_logps(hidden, head, ids, mask, *, bias=None, temperature=1.0, chunk=None) -> Tensor:
    """log p(ids[n, t] | ids[n, :t]) where `mask` asks, 0 elsewhere: (N, T), fp32 (float64 for float64 inputs).

    hidden: (N, T, D) final hidden states; head: (V, D); bias: (V,) or None; ids, mask: (N, T). The head is applied only
    to the positions that the mask asks for, `chunk` of them at a time (default: 2^24 logits), each chunk recomputed in
    the backward, so that neither (N*T, V) nor (mask.sum(), V) exists. See `target_logps` for the precision.
    """
    return _token_logps(hidden, head, ids, mask, bias, temperature, chunk, with_entropy=False)[0]


def token_logps_and_entropy(hidden, head, ids, mask, *, bias=None, temperature=1.0, chunk=None):
    """`token_logps` and, from the same pass, the detached entropy in nats of each distribution: two (N, T)."""
    return _token_logps(hidden, head, ids, mask, bias, temperature, chunk, with_entropy=True)


def _token_logps(hidden, head, ids, mask, bias, temperature, chunk, with_entropy):
    if hidden.shape[:2] != ids.shape or mask.shape != ids.shape:
        shapes = f"hidden {tuple(hidden.shape)}, ids {tuple(ids.shape)}, mask {tuple(mask.shape)}"
        raise ValueError(f"hidden (N, T, D), ids (N, T) and mask (N, T) must agree in N and T, got {shapes}")
    if bool(mask[:, 0].any()):
        raise ValueError("mask asks for column 0, which has no logp because nothing precedes it: set mask[:, 0] to 0")
    chosen = mask.flatten().nonzero().squeeze(1)  # flat index of each token; its logits are those of the column before
    rows = hidden.flatten(0, 1).index_select(0, chosen - 1)
    values = target_logps(rows, head, ids.flatten()[chosen], bias=bias, temperature=temperature, chunk=chunk,
                          with_entropy=with_entropy)
    return tuple(v if v is None else v.new_zeros(ids.numel()).index_copy(0, chosen, v).view(ids.shape) for v in values)


def target_logps(hidden, head, targets, *, bias=None, temperature=1.0, chunk=None, with_entropy=False):
    """`token_logps` for M loose positions: hidden (M, D), targets (M,) -> logps (M,), entropy (M,) or None.

    The product is taken in the autocast dtype inside autocast, else in the wider dtype of hidden and head; its logits
    become fp32 (float64 stays) before they are divided by the temperature and normalised.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}: score greedy decoding at temperature 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk counts positions and must be at least 1, got {chunk}")
    chunk = chunk or max(1, LOGITS_AT_ONCE // head.shape[0])
    product = torch.promote_types(hidden.dtype, head.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and product != torch.float64:
        product = torch.get_autocast_dtype(hidden.device.type)
    if len(targets) > chunk:
        return _ChunkedLogps.apply(hidden, head, bias, targets, temperature, chunk, product, with_entropy)
    logits = _logits(hidden, head, bias, temperature, product)
    logps = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)
    return logps, entropy(logits.detach()) if with_entropy else None


def _logits(hidden, head, bias, temperature, product):
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.to(product), head.to(product), None if bias is None else bias.to(product))
    logits = logits.to(torch.promote_types(product, torch.float32))
    return logits if temperature == 1.0 else logits / temperature


class _ChunkedLogps(torch.autograd.Function):
    """`target_logps` over chunks of positions; the backward makes each chunk's logits again instead of keeping them."""

    @staticmethod
    def forward(ctx, hidden, head, bias, targets, temperature, chunk, product, with_entropy):
        logps, norms, entropies = [], [], []
        for h, y in zip(hidden.split(chunk), targets.split(chunk)):
            logits = _logits(h, head, bias, temperature, product)
            norms.append(logits.logsumexp(1))
            logps.append(logits.gather(1, y[:, None]).squeeze(1) - norms[-1])
            if with_entropy:
                entropies.append(entropy(logits))
        ctx.save_for_backward(hidden, head, bias, targets, torch.cat(norms))
        ctx.temperature, ctx.chunk, ctx.product = temperature, chunk, product
        entropies = torch.cat(entropies) if with_entropy else None
        if with_entropy:
            ctx.mark_non_differentiable(entropies)
        return torch.cat(logps), entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        hidden, head, bias, targets, norms = ctx.saved_tensors
        wants_hidden, wants_head, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_head = torch.zeros_like(head, dtype=norms.dtype) if wants_head else None
        grad_bias = torch.zeros_like(bias, dtype=norms.dtype) if wants_bias else None
        for start in range(0, len(targets), ctx.chunk):
            at = slice(start, start + ctx.chunk)
            d = _logits(hidden[at], head, bias, ctx.temperature, ctx.product).sub_(norms[at, None]).exp_()
            g = grad[at, None] / ctx.temperature  # d logp(y) / d logits = (1[y] - softmax) / temperature
            d.mul_(-g).scatter_add_(1, targets[at, None], g)
            if wants_bias:
                grad_bias += d.sum(0)
            d = d.to(ctx.product)
            if wants_hidden:
                grad_hidden[at] = (d @ head.to(ctx.product)).to(hidden.dtype)
            if wants_head:
                grad_head += d.T @ hidden[at].to(ctx.product)
        grad_head = grad_head.to(head.dtype) if wants_head else None
        grad_bias = grad_bias.to(bias.dtype) if wants_bias else None
        return grad_hidden, grad_head, grad_bias, None, None, None, None, None


def entropy(logits) -> Tensor:
    """Entropy in nats of softmax(logits): (..., V) -> (...). Logits of -inf count as probability 0."""
    logps = logits - logits.logsumexp(-1, keepdim=True)
    return -(logps.exp() * logps.clamp(min=torch.finfo(logps.dtype).min)).sum(-1)


def sequence_logps(logps, mask, *, length_normalised=False) -> Tensor:
    """Sum (or mean) of the kept tokens' logps in each row: (N, T) -> (N,); 0 for a row that keeps none."""
    keep = _keep(mask, logps)
    total = _fill(logps, keep).sum(1)
    return total / keep.sum(1).clamp(min=1) if length_normalised else total


# --- aggregation ------------------------------------------------------------------------------------------------------


def count(mask, aggregation="token", *, max_new_tokens=None) -> Tensor:
    """This batch's share of the denominator, a 0-d tensor; add it over micro-batches and ranks before the first loss.

    "token": kept tokens. "sequence": rows that keep at least one token. "constant": those rows times `max_new_tokens`
    (Dr. GRPO, arXiv 2503.20783). Preference losses have one term a pair: their denominator is the number of pairs.
    """
    keep = _keep(mask)
    if aggregation == "token":
        return keep.sum()
    rows = keep.any(1).sum()
    if aggregation == "sequence":
        return rows
    if aggregation != "constant":
        raise ValueError(f"aggregation must be 'token', 'sequence' or 'constant', got {aggregation!r}")
    if not max_new_tokens:
        raise ValueError("aggregation 'constant' divides by the token budget of a row: give max_new_tokens")
    return rows * max_new_tokens


def combine(metrics: list[dict]) -> dict:
    """Metrics of all micro-batches -> those of the batch: maxima for names that end in `_max`, sums for the rest."""
    return {k: torch.stack([m[k] for m in metrics]).amax(0) if k.endswith("_max") else sum(m[k] for m in metrics)
            for k in metrics[0]}


def _aggregate(x, keep, denominator, aggregation="token"):
    """(N, T) -> scalar: "token" and "constant" sum the kept tokens, "sequence" sums the rows' means; / denominator."""
    x = _fill(x, keep)
    if aggregation == "sequence":
        x = x / keep.sum(1, keepdim=True).clamp(min=1)
    elif aggregation not in ("token", "constant"):
        raise ValueError(f"aggregation must be 'token', 'sequence' or 'constant', got {aggregation!r}")
    return _divide(x.sum(), denominator, bool(keep.any()))


def _divide(total, denominator, has_terms):
    denominator = float(denominator)
    if denominator > 0:
        return total / denominator
    if denominator == 0 and not has_terms:
        return total  # an empty batch: zero, and still connected to the graph
    raise ValueError(f"denominator must be the positive count of the whole batch (see `count`), got {denominator}")


def _keep(mask, *tensors):
    """The mask as booleans, after checking it and that every tensor is (N, T) like it and holds at least fp32."""
    if mask.dim() != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"mask must be (N, T) of 0 and 1, got shape {tuple(mask.shape)}: put weights into advantages")
    for x in tensors:
        if x.shape != mask.shape:
            raise ValueError(f"logps {tuple(x.shape)} and mask {tuple(mask.shape)} must have the same shape (N, T)")
        if x.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"logps must be float32 or float64, got {x.dtype}: half precision is too coarse for ratios")
    return mask.bool()


def _fill(x, keep):
    return x.masked_fill(~keep, 0)  # not x * mask: 0 * inf and 0 * nan are nan, in the value and in the gradient


# --- supervised and preference losses ---------------------------------------------------------------------------------


def sft_loss(logps, mask, *, denominator):
    """Negative log-likelihood of the kept tokens: -sum logps / denominator. logps, mask: (N, T)."""
    loss = -_aggregate(logps, _keep(mask, logps), denominator)
    return loss, {"sft_loss": loss.detach()}


def dpo_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, *, beta, denominator, kind="sigmoid",
             label_smoothing=0.0, lengths=None):
    """Direct preference optimisation; all logps are `sequence_logps`, (P,). With
    delta = (chosen - ref_chosen) - (rejected - ref_rejected):

    "sigmoid": -log sigmoid(beta delta) (DPO, arXiv 2305.18290, eq. 7); `label_smoothing` e in [0, 0.5) weighs it 1 - e
    and the swapped pair e (cDPO). "ipo": (delta - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17). "hinge":
    max(0, 1 - beta delta) (SLiC, arXiv 2305.10425). `lengths` = (chosen, rejected) token counts, two (P,), divides each
    sequence's logps: the length-normalised form of any kind. Denominator: the number of pairs.
    """
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and kind != "sigmoid"):
        raise ValueError(f"label_smoothing is in [0, 0.5) and for kind 'sigmoid', got {label_smoothing} with {kind!r}")
    chosen, rejected = chosen_logps - ref_chosen_logps, rejected_logps - ref_rejected_logps
    if lengths is not None:
        if any(bool((n < 1).any()) for n in lengths):
            raise ValueError("lengths must be at least 1: drop the pairs with an empty completion")
        chosen, rejected = chosen / lengths[0], rejected / lengths[1]
    delta = chosen - rejected
    if kind == "sigmoid":
        x = -(1 - label_smoothing) * F.logsigmoid(beta * delta)
        if label_smoothing:
            x = x - label_smoothing * F.logsigmoid(-beta * delta)
    elif kind == "ipo":
        x = (delta - 1 / (2 * beta)) ** 2
    elif kind == "hinge":
        x = (1 - beta * delta).clamp(min=0)
    else:
        raise ValueError(f"kind must be 'sigmoid', 'ipo' or 'hinge', got {kind!r}")
    return _pair_loss("dpo_loss", x, denominator, accuracy=(delta > 0).to(x), margin=beta * delta,
                      reward_chosen=beta * chosen, reward_rejected=beta * rejected,
                      logps_chosen=chosen_logps, logps_rejected=rejected_logps)


def bradley_terry_loss(chosen_rewards, rejected_rewards, *, denominator, margin=0.0, centering=0.0):
    """Reward-model loss -log sigmoid(chosen - rejected - margin) (InstructGPT, arXiv 2203.02155, eq. 1; with the margin:
    Llama 2, arXiv 2307.09288, eq. 2) + centering (chosen + rejected)^2, which pins the free constant of the rewards.

    Rewards: (P,); margin: a number or (P,). Denominator: the number of pairs.
    """
    gap = chosen_rewards - rejected_rewards
    x = -F.logsigmoid(gap - margin) + centering * (chosen_rewards + rejected_rewards) ** 2
    return _pair_loss("bradley_terry_loss", x, denominator, accuracy=(gap > 0).to(x), margin=gap,
                      reward_chosen=chosen_rewards, reward_rejected=rejected_rewards)


def _pair_loss(name, x, denominator, **metrics):
    loss, *values = (_divide(v.sum(), denominator, x.numel() > 0) for v in (x, *metrics.values()))
    return loss, {name: loss.detach()} | {k: v.detach() for k, v in zip(metrics, values)}


# --- policy gradient --------------------------------------------------------------------------------------------------


def policy_loss(logps, old_logps, advantages, mask, *, denominator, aggregation="token", clip_eps=(0.2, 0.2),
                dual_clip=None, ratio="token", objective="ppo", sampler_logps=None, sampler_cap=2.0):
    """The clipped policy gradient. logps, old_logps, mask: (N, T); advantages: (N,) or (N, T).

    With r = exp(logps - old_logps) and r' = r clipped to [1 - clip_eps[0], 1 + clip_eps[1]], a token's loss is
      objective "ppo":   -min(r A, r' A) (PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476, eq. 10),
                         and at most -dual_clip A where A < 0 (dual clip, arXiv 1912.09729, eq. 5);
      objective "cispo": -sg(r') A logps: clipped tokens keep their gradient (MiniMax-M1, arXiv 2506.13585, eq. 4;
                         its authors leave the lower side open: clip_eps=(1, high)).
    ratio "sequence" replaces r by the row's geometric mean (GSPO, arXiv 2507.18071, eq. 7).
    aggregation "token" (DAPO), "sequence" (GRPO, arXiv 2402.03300, eq. 3), "constant" (Dr. GRPO): see `count`.
    sampler_logps (N, T), when the sampler is not the trainer and old_logps are the trainer's: every token is weighed by
    min(exp(old_logps - sampler_logps), sampler_cap). Token by token: weights of whole sequences die with their length.
    clip_eps of inf switches a side off.
    """
    keep = _keep(mask, logps, old_logps)
    low, high = clip_eps
    if low < 0 or high < 0:
        raise ValueError(f"clip_eps (low, high) are distances from a ratio of 1 and cannot be negative, got {clip_eps}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip bounds the ratio of negative advantages and must exceed 1, got {dual_clip}")
    logps, old_logps = _fill(logps, keep), _fill(old_logps, keep)
    a = advantages if advantages.dim() == 2 else advantages[:, None]
    a = _fill(a.to(logps.dtype).expand_as(logps), keep)
    log_ratio = logps - old_logps
    if ratio == "sequence":
        log_ratio = (log_ratio.sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp(min=1)).expand_as(logps)
    elif ratio != "token":
        raise ValueError(f"ratio must be 'token' or 'sequence', got {ratio!r}")
    r = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = r.clamp(1 - low, 1 + high)
    if objective == "ppo":
        x = -torch.minimum(r * a, clipped * a)
        if dual_clip is not None:
            x = torch.where(a < 0, torch.minimum(x, -dual_clip * a), x)
    elif objective == "cispo":
        x = -clipped.detach() * a * logps
    else:
        raise ValueError(f"objective must be 'ppo' or 'cispo', got {objective!r}")

    means = {"ratio": r, "clip_low": (r < 1 - low) & (a < 0), "clip_high": (r > 1 + high) & (a > 0),
             "logp_diff": (logps - old_logps).abs()}
    if dual_clip is not None:
        means["clip_dual"] = (r > dual_clip) & (a < 0)
    if sampler_logps is not None:
        weight = (old_logps - _fill(sampler_logps, keep)).clamp(max=math.log(sampler_cap)).exp().detach()
        x = x * weight
        means |= {"sampler_weight": weight, "sampler_capped": weight >= sampler_cap}
    loss = _aggregate(x, keep, denominator, aggregation)
    metrics = {k: _aggregate(v.detach().to(logps.dtype), keep, denominator, aggregation) for k, v in means.items()}
    maxima = {k + "_max": _fill(means[k], keep).detach().amax() for k in ("ratio", "logp_diff")}
    return loss, {"policy_loss": loss.detach()} | metrics | maxima


# --- KL to the reference ----------------------------------------------------------------------------------------------


def kl_estimate(logps, ref_logps, kind="k3") -> Tensor:
    """KL(policy || reference) estimated at each sampled token (Schulman 2020, joschu.net/blog/kl-approx.html).

    With d = ref_logps - logps: "k1" -d; "k2" d^2 / 2; "k3" e^d - 1 - d. k1 and k3 have the right mean.
    """
    d = (ref_logps - logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d**2 / 2
    if kind == "k3":
        return d.expm1() - d
    raise ValueError(f"kind must be 'k1', 'k2' or 'k3', got {kind!r}")


def kl_penalty(logps, ref_logps, mask, *, denominator, kind="unbiased", old_logps=None, aggregation="token"):
    """KL in the loss: add `kl_coef * kl_penalty(...)` to `policy_loss` with the same denominator and aggregation.

    "unbiased": exp(logps - old_logps) k3 with the gradient through the ratio, whose mean over the sampler's tokens is
    the KL and whose gradient is the KL's at every visited prefix (DeepSeek-V3.2, arXiv 2512.02556, eq. 7). old_logps
    default to logps: on-policy. "k2" has the right gradient on-policy only; "k3" (GRPO) is biased, "k1" has mean zero.
    """
    keep = _keep(mask, logps, ref_logps)
    logps = _fill(logps, keep)
    x = kl_estimate(logps, _fill(ref_logps, keep), "k3" if kind == "unbiased" else kind)
    kl = _aggregate(x.detach(), keep, denominator, aggregation)
    if kind == "unbiased":
        log_ratio = logps - (logps.detach() if old_logps is None else _fill(old_logps, keep))
        x = x * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _aggregate(x, keep, denominator, aggregation), {"kl": kl}


def kl_reward(logps, ref_logps, mask, kind="k1") -> Tensor:
    """KL in the reward: each row's summed estimate (N,), detached; train on rewards - kl_coef * kl_reward(...).

    k1 at the sampler's logps gives the exact gradient of the sequence's KL; k2 and k3 do not.
    """
    keep = _keep(mask, logps, ref_logps)
    return _fill(kl_estimate(_fill(logps, keep), _fill(ref_logps, keep), kind), keep).sum(1).detach()
