"""Which estimators of the policy gradient are biased, by how much, and how noisy are they? Exactly, on small problems.

Measured where every completion can be enumerated, so that the true gradient is known: a Llama of some 5,000 weights that counts
on in binary (`successor`), in completions of at most three tokens. An estimator is a function from a `Batch` to a loss.
`policy_gradient` makes those that the package trains with, of its own losses and advantages; one of yours stands beside them:

    def mine(batch):
        return -(batch.logps * batch.mask).sum(1) @ (batch.rewards.flatten() - 0.2) / len(batch.mask)

    bench(successor(), ON_POLICY | {"mine": mine})

Shapes: X prompts, C completions, T tokens, V vocabulary, W weights; a batch has B groups of G rollouts, N = B G rows. All of
it is float64. Each group asks a prompt that is drawn anew, so the true gradient is that of the mean reward over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement, product
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from grpolab.decode.sampling import SamplingParams, truncate
from grpolab.lab import plots
from grpolab.train import advantages as adv
from grpolab.train import forward, losses

ENUMERATED = 20_000  # batches; where there are more, or several groups in each, `draws` of them are sampled


class Batch(NamedTuple):
    """What an estimator sees. It must treat the rollouts of a group alike, since groups are enumerated without their order."""

    rewards: Tensor  # (B, G)
    logps: Tensor  # (N, T) of the policy now, with gradient
    sampler_logps: Tensor  # (N, T) as the sampler reports them
    mask: Tensor  # (N, T)


Estimator = Callable[[Batch], Tensor]


class Sampler(NamedTuple):
    """Who writes the completions: the logps of what is really drawn from, and those that are reported, (X, C, T) each."""

    drawn: Tensor
    reported: Tensor


@dataclass(frozen=True)
class Problem:
    """All completions of all prompts: tokens and mask (C, T), rewards (X, C). `versions` (K, X, C, T, V) is the policy's
    log-softmax after 0, 1, ... updates, the last the policy now; `half` (X, C, T, V) the same weights in bf16; `scores`
    (X C T, W) the gradient of each token's logp."""

    tokens: Tensor
    mask: Tensor
    rewards: Tensor
    versions: Tensor
    half: Tensor
    scores: Tensor

    @property
    def now(self) -> Tensor:
        """(X, C, T) logps."""
        return logps_of(self.versions[-1], self.tokens, self.mask)

    @property
    def success(self) -> Tensor:
        """(X,) the expected reward of each prompt."""
        return (self.now.sum(-1).exp() * self.rewards).sum(1)

    @property
    def gradient(self) -> Tensor:
        """(W,) the true one, of the mean of `success`: the sum over completions of p r times the gradient of log p."""
        weights = self.now.sum(-1).exp() * self.rewards / len(self.rewards)
        return (weights[..., None] * self.mask).flatten() @ self.scores


def logps_of(table: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """A log-softmax (X, C, T, V) at its completions' tokens (C, T): (X, C, T), 0 after their end."""
    return table.gather(-1, tokens.expand(table.shape[:-1])[..., None]).squeeze(-1).masked_fill(mask == 0, 0)


exact_norm = partial(torch.nn.RMSNorm, eps=1e-6, dtype=torch.float64)


def successor(seed: int = 0, shown: int = 2, updates: int = 16, lr: float = 3e-4) -> Problem:
    """The prompts `0` and `1` ask for the next number in binary. Right are `1.` and `01.`, and `10.`; three tokens without the
    end are wrong. An untrained Llama has made `shown` steps of SFT on right answers and `updates` of Adam at `lr` along
    the true gradient."""
    every = (c for length in (1, 2, 3) for c in product(range(3), repeat=length))
    rows = sorted(c for c in every if 0 not in c[:-1] and (len(c) == 3 or c[-1] == 0))
    texts = ["".join(".01"[t] for t in row) for row in rows]
    tokens = torch.tensor([[*row, 0, 0][:3] for row in rows])
    mask = torch.tensor([[float(t < len(row)) for t in range(3)] for row in rows], dtype=torch.float64)
    rewards = torch.tensor([[float(text in right) for text in texts] for right in (("1.", "01."), ("10.",))]).double()
    demonstrated = rewards / rewards.sum(1, keepdim=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=3, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=5, initializer_range=0.3, bos_token_id=None, eos_token_id=0,
            pad_token_id=None)).double().eval()
    for layer in model.model.layers:  # the library's norm rounds to float32
        layer.input_layernorm, layer.post_attention_layernorm = (exact_norm(16) for _ in range(2))
    model.model.norm = exact_norm(16)
    prompts = torch.tensor([[0, 1], [0, 2]]).repeat_interleave(len(rows), 0)  # an end before it tells it from a completion
    ids = torch.cat((prompts, tokens.repeat(2, 1)), 1)
    places = torch.arange(ids.shape[1]).repeat(len(ids))

    def attend(q, k, v, scale):
        return forward.attention(*(t.unflatten(0, ids.shape) for t in (q, k, v)), scale).flatten(0, 1)

    def table():
        """(X, C, T, V)."""
        hidden = forward.states(model.model, ids.flatten(), places, attend).unflatten(0, ids.shape)
        return model.lm_head(hidden)[:, 1:-1].double().log_softmax(-1).unflatten(0, (2, len(rows)))

    def climb(objective, steps, lr):
        """The policy's tables before each step, and after the last."""
        optimiser, tables = torch.optim.Adam(model.parameters(), lr), [table()]
        for _ in range(steps):
            optimiser.zero_grad()
            (-objective(logps_of(tables[-1], tokens, mask).sum(-1))).backward()
            optimiser.step()
            tables[-1] = tables[-1].detach()
            tables.append(table())
        return tables

    climb(lambda logp: (demonstrated * logp).sum(1).mean(), shown, 5e-3)
    versions = climb(lambda logp: (rewards * logp.exp()).sum(1).mean(), updates, lr)
    weights = list(model.parameters())
    scores = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(logp, weights, retain_graph=True)])
                          for logp in logps_of(versions[-1], tokens, mask).flatten()])
    versions = torch.stack(versions).detach()
    model.bfloat16()
    return Problem(tokens, mask, rewards, versions, table().detach(), scores)


def stale(problem: Problem, updates: int = 0) -> Sampler:
    """The policy so many updates ago; with 0 the policy itself."""
    if not 0 <= updates < len(problem.versions):
        raise ValueError(f"this policy has made {len(problem.versions) - 1} updates, got {updates}: give the problem more")
    logps = logps_of(problem.versions[-1 - updates], problem.tokens, problem.mask)
    return Sampler(logps, logps)


def bf16(problem: Problem) -> Sampler:
    """The policy's weights and arithmetic in bf16."""
    logps = logps_of(problem.half, problem.tokens, problem.mask)
    return Sampler(logps, logps)


def top_p(problem: Problem, p: float, *, with_mass: bool = False) -> Sampler:
    """The policy cut to its nucleus. Without the mass that the cut left it reports its logps before the cut."""
    whole = problem.versions[-1]
    cut = truncate(whole.flatten(0, -2), SamplingParams(top_p=p)).log_softmax(-1).view_as(whole)
    drawn = logps_of(cut, problem.tokens, problem.mask)
    return Sampler(drawn, drawn if with_mass else problem.now)


# --- estimators -------------------------------------------------------------------------------------------------------


def policy_gradient(kind: str | None = "leave_one_out", *, old: str = "sampler", aggregation: str = "constant",
                    max_new_tokens: int = 1, **options) -> Estimator:
    """`losses.policy_loss` with the advantages of this kind, or with None the rewards. By default all tokens' sum is divided by
    the number of rows. `old` says what the policy is compared with: the "sampler", in its ratio; itself ("policy"), so
    that nothing is corrected; or itself with each token weighed by what the sampler reports ("weighed", as with
    `GRPOConfig.sampler_cap`)."""
    if old not in ("sampler", "policy", "weighed"):
        raise ValueError(f"old must be 'sampler', 'policy' or 'weighed', got {old!r}")

    def estimator(batch: Batch) -> Tensor:
        a = batch.rewards if kind is None else adv.advantages(batch.rewards, kind)
        old_logps = batch.sampler_logps if old == "sampler" else batch.logps.detach()
        weights = {"sampler_logps": batch.sampler_logps} if old == "weighed" else {}
        denominator = losses.count(batch.mask, aggregation, max_new_tokens=max_new_tokens)
        return losses.policy_loss(batch.logps, old_logps, a.flatten(), batch.mask, denominator=denominator,
                                  aggregation=aggregation, **weights, **options)[0]

    return estimator


ON_POLICY: Mapping[str, Estimator] = {
    "no baseline": policy_gradient(None),
    "leave one out": policy_gradient(),
    "group mean": policy_gradient("centred"),
    "group mean / std": policy_gradient("standardised"),
    "group mean, constant (Dr. GRPO)": policy_gradient("centred", max_new_tokens=3),
    "mean over tokens (DAPO)": policy_gradient(aggregation="token"),
    "mean per sequence": policy_gradient(aggregation="sequence"),
    "std, mean per sequence (GRPO)": policy_gradient("standardised", aggregation="sequence"),
    "GSPO": policy_gradient(ratio="sequence", aggregation="sequence"),
    "GSPO's ratio, summed over tokens": policy_gradient(ratio="sequence"),
    "CISPO": policy_gradient(objective="cispo", clip_eps=(1.0, 0.2)),
}


def masked_weights(batch: Batch, cap: float = 2.0) -> Tensor:
    """Leave one out, each token weighed by pi / pi_sampler, and left out where that is not in [1 / cap, cap] (IcePop)."""
    near = (batch.logps.detach() - batch.sampler_logps).abs() <= math.log(cap)
    a = adv.advantages(batch.rewards, "leave_one_out").flatten()
    return losses.policy_loss(batch.logps, batch.logps.detach(), a, batch.mask * near, denominator=len(a),
                              sampler_logps=batch.sampler_logps, sampler_cap=cap)[0]


def sequence_weights(batch: Batch, cap: float = math.inf) -> Tensor:
    """Leave one out, with the whole rollout's pi / pi_sampler, at most `cap`, on the rewards: exact where no weight is infinite
    and none is capped."""
    weights = losses.sequence_logps(batch.logps.detach() - batch.sampler_logps, batch.mask).exp().clamp(max=cap)
    a = adv.advantages(batch.rewards, "leave_one_out")
    return policy_gradient(None, old="policy")(batch._replace(rewards=weights.view_as(a) * a))


FREE = (math.inf, math.inf)  # a clip that clips nothing
OFF_POLICY = {
    "nothing corrected": policy_gradient(old="policy"),
    "token ratio, no clip": policy_gradient(clip_eps=FREE),
    "clip 0.2": policy_gradient(),
    "clip 0.2 and 0.28": policy_gradient(clip_eps=(0.2, 0.28)),
    "clip 0.2, dual 3": policy_gradient(dual_clip=3.0),
    "GSPO": ON_POLICY["GSPO"],
    "GSPO's ratio, no clip, summed": policy_gradient(ratio="sequence", clip_eps=FREE),
    "CISPO": ON_POLICY["CISPO"],
    "weights truncated at 2": policy_gradient(old="weighed"),
    "weights masked beyond 2": masked_weights,
    "weights of sequences": sequence_weights,
    "weights of sequences, truncated at 2": partial(sequence_weights, cap=2.0),
}


# --- what they are worth ----------------------------------------------------------------------------------------------


def batches(sampler: Sampler, groups: int, group_size: int, draws: int, seed: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Prompts (M, B), completions (M, B, G) and probabilities (M,) of every batch, or of `draws` sampled ones; whether it is
    every. The order in a group makes no difference."""
    p = sampler.drawn.sum(-1).exp()
    possible = [row.nonzero().squeeze(1).tolist() for row in p]
    if groups == 1 and sum(math.comb(len(c) + group_size - 1, group_size) for c in possible) <= ENUMERATED:
        every = [(x, g) for x, c in enumerate(possible) for g in combinations_with_replacement(c, group_size)]
        prompts, chosen = torch.tensor([x for x, _ in every])[:, None], torch.tensor([g for _, g in every])[:, None]
        orders = torch.tensor([math.factorial(group_size) // math.prod(math.factorial(g.count(c)) for c in set(g))
                               for _, g in every])
        return prompts, chosen, p[prompts, chosen[:, 0]].prod(1) * orders / len(p), True
    rng = torch.Generator().manual_seed(seed)
    prompts = torch.randint(len(p), (draws, groups), generator=rng)
    chosen = p[prompts.flatten()].multinomial(group_size, replacement=True, generator=rng).view(draws, groups, group_size)
    return prompts, chosen, torch.full((draws,), 1 / draws, dtype=p.dtype), False


def pushes(problem: Problem, estimator: Estimator, sampler: Sampler, prompts: Tensor, chosen: Tensor) -> Tensor:
    """Minus the gradient of the loss by the logp of each token, for each batch: (M, X C T). Times `scores` it is minus the
    gradient by the weights."""
    now, out = problem.now, torch.zeros(len(prompts), *problem.now.shape, dtype=torch.float64)
    for row, x, c in zip(out, prompts, chosen):
        at = x[:, None].expand_as(c).flatten(), c.flatten()
        logps = now[at].requires_grad_()
        loss = estimator(Batch(problem.rewards[at].view_as(c), logps, sampler.reported[at], problem.mask[at[1]]))
        row.index_put_(at, -torch.autograd.grad(loss, logps)[0], accumulate=True)
    return out.flatten(1)


def measure(problem: Problem, estimator: Estimator, sampler: Sampler | None = None, *, groups: int = 1, group_size: int = 4,
            draws: int = 1000, seed: int = 0) -> dict:
    """The estimator's gradient g of a batch beside the true one t, by default on-policy:

    how           "exact", over every batch with its probability, or the number of sampled batches; then the columns that end
                  in `_error` are standard errors, and a bias below its own shows nothing
    scale         <E g, t> / |t|^2: how much of t its mean holds
    bias          |E g - t| / |t|
    cosine        of E g and t
    variance      E |g - E g|^2 / |t|^2
    noise         variance / scale^2, which a constant factor on the loss leaves alone
    batch_cosine  E of the cosine of g and t; a batch without a gradient counts 0
    """
    sampler = stale(problem) if sampler is None else sampler
    prompts, chosen, p, exact = batches(sampler, groups, group_size, draws, seed)
    c, true = pushes(problem, estimator, sampler, prompts, chosen), problem.gradient
    norm, mean = true.norm(), p @ c @ problem.scores
    gram = problem.scores @ problem.scores.T
    size = ((c @ gram) * c).sum(1).clamp(min=0).sqrt()
    cosine = torch.where(size > 0, c @ (problem.scores @ true) / norm / size, 0)
    away = c - p @ c
    spread = ((away @ gram) * away).sum(1) / norm**2 * (1 if exact else draws / (draws - 1))
    variance, scale = p @ spread, mean @ true / norm**2
    row = {"scale": scale, "bias": (mean - true).norm() / norm, "cosine": mean @ true / mean.norm() / norm,
           "variance": variance, "noise": variance / scale**2, "batch_cosine": p @ cosine}
    errors = {"variance_error": spread.std() / draws**0.5, "bias_error": (variance / draws).sqrt(),
              "batch_cosine_error": cosine.std() / draws**0.5}
    return {"samples": groups * group_size, "how": "exact" if exact else f"{draws:,} draws",
            **{name: value.item() for name, value in row.items()},
            **{name: 0.0 if exact else value.item() for name, value in errors.items()}}


def bench(problem: Problem, estimators: Mapping[str, Estimator], samplers: Mapping[str, Sampler] | None = None, *,
          groups: Sequence[int] = (1,), **options) -> pd.DataFrame:
    """`measure` of each estimator with each sampler and each number of groups: a row each."""
    samplers = {"policy": stale(problem)} if samplers is None else samplers
    return pd.DataFrame({"sampler": who, "estimator": name, **measure(problem, estimator, sampler, groups=n, **options)}
                        for who, sampler in samplers.items() for name, estimator in estimators.items() for n in groups)


# --- a record of several problems (benchmarks/estimators.py) as one figure ----------------------------------------------


LINES = {  # what is drawn: the corrections over staleness, and baselines over the samples of a batch
    "nothing corrected": plots.REFERENCE, "clip 0.2": plots.WARNING, "weights masked beyond 2": plots.REJECTED,
    "token ratio, no clip": plots.POLICY, "weights of sequences": plots.HELD_OUT}
GROWING = {"no baseline": plots.HELD_OUT, "leave one out": plots.POLICY, "mean per sequence": plots.WARNING}


def draw(record: dict):
    """The cosine of mean and true gradient as the sampler gets older, and of a batch's as it grows; means over the record's
    problems, the bars from the least to the largest. The Figure."""
    fig, (left, right) = plots.plt.subplots(1, 2, figsize=(9.6, 3.4))
    off, drawn = (pd.concat(pd.DataFrame(of[part]) for of in record["seeds"].values()) for part in ("off_policy", "samples"))
    off = off[off["sampler"].str.contains("old")].assign(updates=lambda t: t["sampler"].str.extract(r"(\d+)").astype(int))
    for ax, table, lines, x, y in ((left, off, LINES, "updates", "cosine"), (right, drawn, GROWING, "samples", "batch_cosine")):
        for name, color in lines.items():
            of = table[table["estimator"] == name].groupby(x)[y]
            mean = of.mean()
            ax.errorbar(mean.index, mean, yerr=[mean - of.min(), of.max() - mean], fmt="o-", color=color, capsize=3, label=name)
        at = sorted(table[x].unique())
        ax.set(xscale="log", xticks=at, xticklabels=at)
        ax.minorticks_off()
        ax.legend(fontsize=8, loc="lower left" if ax is left else "lower right")
    oldest = off[off["updates"] == off["updates"].max()].groupby("estimator")["cosine"].mean()[list(LINES)]
    left.set(xlabel="updates since the sampler's weights", ylabel="cosine with the true gradient",
             title=f"Old samples mislead most with “{oldest.idxmin()}”")
    largest = drawn[drawn["samples"] == drawn["samples"].max()].groupby("estimator")["batch_cosine"].mean()[list(GROWING)]
    right.set(xlabel="samples in a batch, on-policy", title=f"A large batch is furthest off with “{largest.idxmin()}”")
    return fig
