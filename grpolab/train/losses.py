"""The losses of post-training, to be read beside the papers: pure functions on log-probabilities; imports torch only.
Longer than most files here: the formulas share masks and denominators, and are compared with each other.

Shapes: N rows, T tokens, D hidden size, V vocabulary, P preference pairs. `logps[n, t]` in nats is of the token in
column t itself, given what precedes it. `mask` is 1 where the policy chose the token; what is masked can hold anything,
also NaN, and moves nothing.

Every loss is a sum divided by a `denominator` that the caller gives: `count` over the whole batch (all micro-batches,
all ranks), so that no way of splitting, padding or ordering the batch can change the gradient; gradients ADD over
micro-batches and ranks (DDP averages: multiply by the world size). Every loss returns `(loss, metrics)`. Metrics are
detached scalars that add over micro-batches too, except the names that end in `_max` (`combine` does both). The options of
a loss are checked by `check_policy_options` and `check_dpo_options`, for a configuration too.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 2**26  # of the logits in the default chunk, in the dtype of the product
KEPT_BYTES = 2**28  # up to so many of all logits are one chunk where a backward follows, which then finds them kept
STRIP = 2**20  # logits that are normalised together on a processor, where they stay in the cache; elsewhere 16 times as many
MAX_LOG_RATIO = 20.0  # ratios are capped at e^20 so that fp32 cannot overflow; beyond it the gradient is zero
LOW_LOGP = -10.0  # nats; of a token below it, one in 22,000 draws, the policy holds that it does not happen


# --- log-probabilities ------------------------------------------------------------------------------------------------

def target_logps(hidden, head, targets, *, bias=None, temperature=1.0, chunk=None, with_entropy=False):
    """log p of M tokens, each from its own hidden state: hidden (M, D), head (V, D), bias (V,) or None, targets (M,) ->
    logps (M,) and, if asked for, the detached entropy in nats of each distribution (M,), else None.

    The head is applied to `chunk` positions at a time. Of a single chunk the backward finds what it needs kept, which saves
    a product of four; of several each is made again, so that (M, V) never exists. By default it is one chunk where a
    backward follows and all logits take at most 256 MiB, else chunks of 64 MiB. The product is taken in the autocast
    dtype inside autocast, else in the wider dtype of hidden and head; its logits become fp32 (float64 stays) before
    temperature and normalisation. There is no second derivative.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}: score greedy decoding at temperature 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk counts positions and must be at least 1, got {chunk}")
    product = torch.promote_types(hidden.dtype, head.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and product != torch.float64:
        product = torch.get_autocast_dtype(hidden.device.type)
    hidden, head, bias = hidden.to(product), head.to(product), None if bias is None else bias.to(product)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, head, bias))
    if chunk is None:
        each = head.shape[0] * product.itemsize
        chunk = max(1, len(targets) if trained and len(targets) * each <= KEPT_BYTES else CHUNK_BYTES // each)
    return _TargetLogps.apply(hidden, head, bias, targets, temperature, chunk, with_entropy, trained)


class _TargetLogps(torch.autograd.Function):
    """With dlogits = softmax(x) - 1[y] at a position, where x = (W h + b) / T are its logits:
    d log p(y) / dh = -W^T dlogits / T, and d log p(y) / dW = -dlogits h^T / T. They are written over the logits."""

    @staticmethod
    def forward(ctx, hidden, head, bias, targets, temperature, chunk, with_entropy, trained):
        one_chunk = trained and len(targets) <= chunk
        parts = [_normalise(_logits(h, head, bias), y, temperature, with_entropy, one_chunk)
                 for h, y in zip(hidden.split(chunk), targets.split(chunk))]
        logps, entropies, dlogits = zip(*parts)
        ctx.save_for_backward(hidden, head, bias, targets, dlogits[0])
        ctx.temperature, ctx.chunk = temperature, chunk
        logps, entropies = torch.cat(logps), torch.cat(entropies) if with_entropy else None
        if with_entropy:
            ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        hidden, head, bias, targets, saved = ctx.saved_tensors
        wants_hidden, wants_head, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_head = grad_bias = None
        for start in range(0, max(1, len(targets)), ctx.chunk):
            at = slice(start, start + ctx.chunk)
            h, g = hidden[at], grad[at, None] / -ctx.temperature
            dlogits = saved
            if dlogits is None:
                _, _, dlogits = _normalise(_logits(h, head, bias), targets[at], ctx.temperature, with_dlogits=True)
            with torch.autocast(h.device.type, enabled=False):
                if wants_hidden:
                    grad_hidden[at] = (dlogits @ head) * g
                if wants_head:
                    grad_head = _added(grad_head, dlogits.T, (h * g).to(h.dtype), len(targets) > ctx.chunk)
                if wants_bias:
                    grad_bias = _added(grad_bias, dlogits.T, g.to(h.dtype), len(targets) > ctx.chunk)
        return grad_hidden, grad_head, None if grad_bias is None else grad_bias.squeeze(1), *[None] * 5


def _logits(hidden, head, bias):
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden, head, bias)


def _normalise(logits, targets, temperature, with_entropy=False, with_dlogits=False):
    """logits (M, V), not divided by the temperature yet -> log p of the targets (M,), entropies (M,), both in fp32 or wider,
    and dlogits (M, V), which are written over the logits; None for what is not asked for."""
    m, vocab = logits.shape
    at_once = STRIP if logits.device.type == "cpu" else 16 * STRIP
    strips = max(1, m // max(2, at_once // vocab))  # none of one row alone: its sum has another order
    logps, entropies, dtype = [], [], torch.promote_types(logits.dtype, torch.float32)
    room = [logits.new_empty(-(-m // strips), vocab, dtype=dtype) for _ in range(2)]  # fresh memory costs more than arithmetic
    for part, y in zip(logits.tensor_split(strips), targets[:, None].tensor_split(strips)):
        x, mass = (r[: len(part)] for r in room)
        x.copy_(part)
        if temperature != 1.0:
            x.div_(temperature)
        at_y, top = x.gather(1, y), x.amax(1, keepdim=True)
        total = torch.exp(x.sub_(top), out=mass).sum(1, keepdim=True)
        logps.append(at_y - (top + total.log()))
        if with_entropy:  # log total - E[x]; what has no mass counts 0, not 0 * -inf
            x.clamp_(min=torch.finfo(dtype).min)
            entropies.append((total.log() - x.mul_(mass).sum(1, keepdim=True) / total).squeeze(1))
        if with_dlogits:
            part.copy_(mass.div_(total).scatter_add_(1, y, at_y.new_full((), -1.0).expand_as(y)))
    return torch.cat(logps).squeeze(1), torch.cat(entropies) if with_entropy else None, logits if with_dlogits else None


def _added(total, a, b, several):
    """total + a b, or a b where there is no total yet; in fp32 or wider where there are several terms to come."""
    dtype = torch.promote_types(a.dtype, torch.float32) if several else a.dtype
    if total is not None and dtype == a.dtype:
        return total.addmm_(a, b)  # in place: the product alone can be as large as the head
    return (a @ b).to(dtype) if total is None else total.add_(a @ b)


def sequence_logps(logps, mask) -> Tensor:
    """Sum of the kept tokens' logps in each row: (N, T) -> (N,); 0 for a row that keeps none."""
    return _fill(logps, _keep(mask, logps)).sum(1)


# --- aggregation ------------------------------------------------------------------------------------------------------

AGGREGATIONS = ("token", "sequence", "constant")


def count(mask, aggregation="token", *, max_new_tokens=None) -> Tensor:
    """This batch's share of the denominator, a 0-d tensor; add it over micro-batches and ranks before the first loss.

    "token": kept tokens. "sequence": rows that keep at least one token. "constant": those rows times `max_new_tokens`
    (Dr. GRPO, arXiv 2503.20783). Preference losses have one term a pair: their denominator is the number of pairs.
    """
    keep = _keep(mask)
    _check_choice("aggregation", aggregation, AGGREGATIONS)
    if aggregation == "constant" and not max_new_tokens:
        raise ValueError("aggregation 'constant' divides by the token budget of a row: give max_new_tokens")
    if aggregation == "token":
        return keep.sum()
    return keep.any(1).sum() * (max_new_tokens if aggregation == "constant" else 1)


def aggregate(x, mask, *, denominator, aggregation="token") -> Tensor:
    """(N, T) -> scalar: the sum over the kept tokens, for "sequence" the sum of the rows' means; over `denominator`."""
    _check_choice("aggregation", aggregation, AGGREGATIONS)
    keep = mask.bool()
    x = _fill(x, keep)
    if aggregation == "sequence":
        x = x / keep.sum(1, keepdim=True).clamp(min=1)
    return _divide(x.sum(), denominator, keep)


def combine(metrics: list[dict]) -> dict[str, float]:
    """Metrics of all micro-batches -> those of the batch: maxima for names that end in `_max`, sums for the rest."""
    columns = {k: torch.tensor([float(m[k]) for m in metrics], dtype=torch.float64) for k in metrics[0]}
    return {k: (v.amax() if k.endswith("_max") else v.sum()).item() for k, v in columns.items()}


def _check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}")


def _divide(total, denominator, terms):
    denominator = float(denominator)
    if denominator > 0:
        return total / denominator
    if denominator == 0 and not bool(terms.any()):
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

DPO_KINDS = ("sigmoid", "ipo", "hinge")

def sft_loss(logps, mask, *, denominator):
    """Negative log-likelihood of the kept tokens: -sum logps / denominator. logps, mask: (N, T)."""
    loss = -aggregate(logps, _keep(mask, logps), denominator=denominator)
    return loss, {"sft_loss": loss.detach()}


def dpo_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, *, beta, denominator, kind="sigmoid",
             label_smoothing=0.0, lengths=None):
    """Direct preference optimisation; all logps are `sequence_logps`, (P,). With
    delta = (chosen - ref_chosen) - (rejected - ref_rejected):

    "sigmoid": -log sigmoid(beta delta) (DPO, arXiv 2305.18290, eq. 7); `label_smoothing` e in [0, 0.5) weighs it 1 - e
    and the swapped pair e (cDPO). "ipo": (delta - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17). "hinge":
    max(0, 1 - beta delta) (RSO, arXiv 2309.06657). `lengths` = (chosen, rejected) token counts, two (P,), divides each
    sequence's logps: the length-normalised form of any kind. Denominator: the number of pairs.
    """
    check_dpo_options(beta, kind, label_smoothing)
    lengths = () if lengths is None else lengths
    _check_pairs(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, *lengths)
    chosen, rejected = chosen_logps - ref_chosen_logps.detach(), rejected_logps - ref_rejected_logps.detach()
    if len(lengths):
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
    else:
        x = (1 - beta * delta).clamp(min=0)
    return _pair_loss(denominator, dpo_loss=x, accuracy=delta > 0, margin=beta * delta,
                      reward_chosen=beta * chosen, reward_rejected=beta * rejected,
                      logps_chosen=chosen_logps, logps_rejected=rejected_logps)


def check_dpo_options(beta, kind, label_smoothing):
    _check_choice("kind", kind, DPO_KINDS)
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and kind != "sigmoid"):
        raise ValueError(f"label_smoothing is in [0, 0.5) and for kind 'sigmoid', got {label_smoothing} with {kind!r}")


def bradley_terry_loss(chosen_rewards, rejected_rewards, *, denominator, margin=0.0, centering=0.0):
    """Reward-model loss -log sigmoid(chosen - rejected - margin) (InstructGPT, arXiv 2203.02155, eq. 1; the margin:
    Llama 2, arXiv 2307.09288, eq. 2) + centering (chosen + rejected)^2, which pins the free constant of the rewards.

    Rewards: (P,); margin: a number or (P,). Denominator: the number of pairs.
    """
    _check_pairs(chosen_rewards, rejected_rewards, *([margin] if isinstance(margin, Tensor) else []))
    gap = chosen_rewards - rejected_rewards
    x = -F.logsigmoid(gap - margin) + centering * (chosen_rewards + rejected_rewards) ** 2
    return _pair_loss(denominator, bradley_terry_loss=x, accuracy=gap > 0, margin=gap,
                      reward_chosen=chosen_rewards, reward_rejected=rejected_rewards)


def _check_pairs(*tensors):
    shapes = [tuple(x.shape) for x in tensors]
    if set(shapes) != {shapes[0]} or len(shapes[0]) != 1:
        raise ValueError(f"preference losses take (P,) tensors of one length, got {shapes}")


def _pair_loss(denominator, **terms):
    """The first term's sum over `denominator` as the loss, and that of every term as metrics."""
    values = {k: _divide(v.sum(), denominator, torch.ones_like(v)) for k, v in terms.items()}
    return next(iter(values.values())), {k: v.detach() for k, v in values.items()}


# --- policy gradient --------------------------------------------------------------------------------------------------

OBJECTIVES, RATIOS = ("ppo", "cispo"), ("token", "sequence")


def policy_loss(logps, old_logps, advantages, mask, *, denominator, objective="ppo", ratio="token", clip_eps=(0.2, 0.2),
                dual_clip=None, aggregation="token", sampler_logps=None, sampler_cap=2.0, tokens=None):
    """The clipped policy gradient. logps, old_logps, mask: (N, T); advantages: (N,) or (N, T).

    `ratio`: pi / pi_old of each token, or of the "sequence" its geometric mean over the row (GSPO, arXiv 2507.18071, eq. 7).
    `objective` "ppo": -min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, eq. 7; high above low: DAPO, arXiv 2503.14476,
    eq. 10), with `dual_clip` at most -dual_clip A where A < 0 (arXiv 1912.09729, eq. 5); "cispo": -sg(clip(r)) A log pi, which
    leaves a clipped token its gradient (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5, with clip_eps = (1, high)). An infinite
    clip_eps opens its side. Summed as `aggregation` says (see `count`): "token" (DAPO), "sequence" (GRPO, arXiv 2402.03300,
    eq. 3), "constant" (Dr. GRPO).

    sampler_logps (N, T): for a sampler that is not the trainer, whose own are then old_logps; each token is weighed by
    min(pi_old / pi_sampler, sampler_cap), truncated importance sampling (Ionides 2008, J. Comput. Graph. Stat. 17, p. 295; by
    the step: IMPALA, arXiv 1802.01561, eq. 1). Metrics are means over `tokens`, the kept tokens of the whole batch (default:
    the denominator). Of the trainer's log-probs minus the sampler's: `diff_mean`, `diff_abs_mean`, and `diff_max`, the largest
    absolute one; `sampler_kl` is k3 of KL(sampler || policy). clip_low, clip_high: share of tokens beyond the clip, on
    the side where "ppo" has no gradient; low_logp: of tokens whose log-prob is below LOW_LOGP.
    """
    keep = _keep(mask, logps, old_logps, *([] if sampler_logps is None else [sampler_logps]))
    check_policy_options(objective, ratio, clip_eps, dual_clip, sampler_cap)
    if advantages.shape not in (mask.shape[:1], mask.shape):
        raise ValueError(f"advantages must be (N,) or (N, T) for N, T = {tuple(mask.shape)}: {tuple(advantages.shape)}")
    a = _fill(advantages if advantages.dim() == 2 else advantages[:, None], keep)
    if not bool(a.isfinite().all()):
        raise ValueError("advantages of kept tokens must be finite: give 0 to rollouts whose reward abstains")
    logps, old_logps = _fill(logps, keep), _fill(old_logps, keep).detach()
    sampled = old_logps if sampler_logps is None else _fill(sampler_logps, keep).detach()

    log_ratio = logps - old_logps
    if ratio == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp(min=1)
    r = _exp(log_ratio)
    clipped = r.clamp(1 - clip_eps[0], 1 + clip_eps[1])
    x = -clipped.detach() * a * logps if objective == "cispo" else -torch.minimum(r * a, clipped * a)
    means = {"ratio": r, "clip_low": (r < 1 - clip_eps[0]) & (a < 0), "clip_high": (r > 1 + clip_eps[1]) & (a > 0),
             "diff_mean": logps - sampled, "diff_abs_mean": (logps - sampled).abs(), "sampler_kl": kl_estimate(sampled, logps),
             "low_logp": logps < LOW_LOGP}
    if dual_clip is not None:
        x = torch.where(a < 0, torch.minimum(x, -dual_clip * a), x)
        means["clip_dual"] = (r > dual_clip) & (a < 0)
    if sampler_logps is not None:
        weight = (old_logps - sampled).clamp(max=math.log(sampler_cap)).exp()
        x = x * weight
        means |= {"sampler_weight": weight, "sampler_capped": old_logps - sampled > math.log(sampler_cap)}
    loss = aggregate(x, keep, denominator=denominator, aggregation=aggregation)
    tokens = denominator if tokens is None else tokens
    values = {k: aggregate(v.to(logps.dtype), keep, denominator=tokens) for k, v in means.items()}
    maxima = {"ratio_max": _fill(r, keep).amax(), "diff_max": (logps - sampled).abs().amax()}
    return loss, {k: v.detach() for k, v in ({"policy_loss": loss} | values | maxima).items()}


def _exp(log_ratio):
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_policy_options(objective, ratio, clip_eps, dual_clip, sampler_cap):
    _check_choice("objective", objective, OBJECTIVES)
    _check_choice("ratio", ratio, RATIOS)
    pair = isinstance(clip_eps, tuple | list) and len(clip_eps) == 2
    if not (pair and all(isinstance(e, int | float) and e >= 0 for e in clip_eps)):
        raise ValueError(f"clip_eps must be (low, high), distances of the ratio from 1 that are not negative, got {clip_eps!r}")
    if dual_clip is not None and not (dual_clip > 1 and objective == "ppo"):
        raise ValueError(f"dual_clip must be above 1 and is for objective 'ppo', got {dual_clip} with {objective!r}")
    if not sampler_cap >= 1:
        raise ValueError(f"sampler_cap must be at least 1, or it shrinks the on-policy tokens too, got {sampler_cap}")


# --- KL to the reference ----------------------------------------------------------------------------------------------

def kl_estimate(logps, ref_logps, kind="k3") -> Tensor:
    """KL(policy || reference) estimated at each sampled token (Schulman 2020, joschu.net/blog/kl-approx.html).

    With d = ref_logps - logps: "k1" -d; "k2" d^2 / 2; "k3" e^d - 1 - d. k1 and k3 have the right mean.
    """
    d = (ref_logps - logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    _check_choice("kind", kind, ("k1", "k2", "k3"))
    return -d if kind == "k1" else d**2 / 2 if kind == "k2" else d.expm1() - d


def kl_penalty(logps, ref_logps, mask, *, denominator, kind="unbiased", old_logps=None, aggregation="token", tokens=None):
    """KL in the loss: add `kl_coef * kl_penalty(...)` to `policy_loss` with the same denominator and aggregation.

    "unbiased": exp(logps - old_logps) k3 with the gradient through the ratio (DeepSeek-V3.2, arXiv 2512.02556, eq. 7):
    over tokens of the sampler old_logps (default: on-policy) its mean is the KL at the visited prefixes and its
    gradient that KL's. "k2" has this gradient on-policy only, "k3" (GRPO) never, and the mean gradient of "k1" is zero.
    None of them counts that a token changes the prefixes to come. The metric `kl` is k3 (or `kind`), a mean over `tokens`, the
    kept tokens of the whole batch (default: as the loss has it).
    """
    keep = _keep(mask, logps, ref_logps, *([] if old_logps is None else [old_logps]))
    logps = _fill(logps, keep)
    kl = x = kl_estimate(logps, _fill(ref_logps, keep).detach(), "k3" if kind == "unbiased" else kind)
    if kind == "unbiased":
        log_ratio = logps - (logps if old_logps is None else _fill(old_logps, keep)).detach()
        x = kl * _exp(log_ratio)
    loss = aggregate(x, keep, denominator=denominator, aggregation=aggregation)
    return loss, {"kl": aggregate(kl.detach(), keep, denominator=denominator, aggregation=aggregation)
                  if tokens is None else aggregate(kl.detach(), keep, denominator=tokens)}


# --- distillation -----------------------------------------------------------------------------------------------------

def divergence(logp, logq, beta: float = 1.0) -> Tensor:
    """Between a student's and a teacher's distribution at each of M tokens, from their log-probs (M, V): (M,), in nats.

    beta 1: the reverse KL(p || q); 0: the forward KL(q || p); between: beta KL(q || m) + (1 - beta) KL(p || m) with the
    mixture m = beta q + (1 - beta) p (generalised Jensen-Shannon, GKD, arXiv 2306.13649). What has no mass counts 0.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie between 0 (forward KL) and 1 (reverse KL), got {beta}")
    if beta in (0, 1):
        return _kl(logp, logq) if beta else _kl(logq, logp)
    mixture = torch.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))
    return beta * _kl(logq, mixture) + (1 - beta) * _kl(logp, mixture)


def _kl(logp, logq):
    p = logp.exp()
    return torch.where(p > 0, p * (logp - logq), 0.0).sum(-1)
