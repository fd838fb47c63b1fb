"""Rollouts against the policy's own forward: what the gates of the decode engine measure, and the ways to break them.

`audit` teacher-forces finished rollouts through the unmodified model, one row, no cache, no padding. `sabotage` puts one known
fault into a sampler, which is of no use afterwards; a gate that stays green under it measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch

from grpolab.decode import scheduler
from grpolab.decode.engines import attention
from grpolab.models.load import evaluating
from grpolab.rollouts import Rollout

FAULTS = ("position off by one", "pad key visible", "stale keys visible", "eos row still counted",
          "temperature missing", "keys of two samples swapped")


@dataclass(frozen=True)
class Audit:
    """Measured over all tokens that the policy chose; errors in nats.

    disagreements  tokens that are not the forward's argmax (meaningful for greedy rollouts)
    worst_ulps     how far below its top logit the worst of them is, in units of the top logit's last place
    margin         least ratio of the distance between the two best logits to the error of the token there: where it is small,
                   rounding can have decided a greedy one
    max_error, mean_error   |sampler's logp - forward's logp| under the sampling temperature
    raw_max_error  the largest at temperature 1
    after_stop     tokens that follow an end token inside a turn
    """

    tokens: int
    disagreements: int
    worst_ulps: float
    margin: float
    max_error: float
    mean_error: float
    raw_max_error: float
    after_stop: int


@torch.no_grad()
def audit(policy, rollouts: Iterable[Rollout], temperature: float = 1.0) -> Audit:
    """Teacher-force rollouts (each one row) and compare; only for sampling by temperature alone, or greedy (T = 1)."""
    gaps, ulps, errors, raw_errors, after_stop = [], [], [], [], 0
    eps = torch.finfo(policy.dtype).eps
    for r in rollouts:
        ids = torch.tensor([r.prompt + r.tokens], device=policy.device)
        chosen = torch.tensor(r.mask, dtype=torch.bool)
        with evaluating(policy.model):
            logits = policy.model(ids, use_cache=False).logits[0, len(r.prompt) - 1: -1].float().cpu()[chosen]
        tokens = torch.tensor(r.tokens)[chosen]
        best = logits.topk(2).values
        gaps.append(best[:, 0] - best[:, 1])
        ulps.append((best[:, 0] - _at(logits, tokens)) / (eps * best[:, 0].abs().log2().floor().exp2()))
        for scaled, logps, differences in ((logits / temperature, r.logps, errors), (logits, r.raw_logps, raw_errors)):
            differences.append((_at(scaled.log_softmax(-1), tokens) - torch.tensor(logps)[chosen]).abs())
        ends = [t in policy.eos_ids and m == 1 for t, m in zip(r.tokens, r.mask)]
        after_stop += sum(end and m == 1 for end, m in zip(ends, r.mask[1:]))
    gap, ulp, error, raw = (torch.cat(parts) for parts in (gaps, ulps, errors, raw_errors))
    margin = (gap / raw.clamp(min=1e-12)).min()
    return Audit(len(gap), int((ulp > 0).sum()), float(ulp.max()), float(margin), float(error.max()), float(error.mean()),
                 float(raw.max()), after_stop)


def _at(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return table.gather(1, tokens[:, None]).squeeze(1)


@torch.no_grad()
def recompute(policy, prompt, new_tokens: int) -> tuple[int, ...]:
    """Greedy tokens the slow way: the whole prefix anew for every token, up to and including an end token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + new_tokens and not (len(ids) > len(prompt) and ids[-1] in policy.eos_ids):
        with evaluating(policy.model):
            logits = policy.model(torch.tensor([ids], device=policy.device), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return tuple(ids[len(prompt):])


@contextmanager
def sabotage(sampler, fault: str):
    """Run with one of FAULTS in a sampler with engine="llama" or "hf": the compiled step has no masks to replace."""
    engine, forward = sampler.engine, sampler.engine.forward
    mask_bias, draw_mixed, ended = attention.mask_bias, scheduler.draw_mixed, scheduler.Scheduler._ended

    def earlier(tokens, start, last, cache, window):
        return forward(tokens, (start - int(tokens.shape[1] == 1)).clamp(min=0), last, cache, window)

    def one_more(positions, *rest):
        return mask_bias(positions + int(positions.shape[1] == 1), *rest)

    def everything(positions, *rest):
        bias = mask_bias(positions, *rest)
        return torch.zeros_like(bias) if positions.shape[1] == 1 else bias

    def without_eos(self, alive):
        rows = self.rows
        return {i: why for i, why in ended(self, alive).items() if why != "eos" or rows.count[i] >= rows.limit[i]}

    def mislabelled(*args):
        drawn = draw_mixed(*args)
        return replace(drawn, logps=drawn.raw_logps)

    def swapped(tokens, start, last, cache, window):
        if tokens.shape[1] == 1:
            rows = range(sampler._scheduler.rows.n)  # without a row of padding
            sampler._scheduler.store.move(rows, [*rows[-1:], *rows[:-1]], window)
        return forward(tokens, start, last, cache, window)

    patches = dict(zip(FAULTS, (
        mock.patch.object(engine, "forward", earlier), mock.patch.object(attention, "mask_bias", one_more),
        mock.patch.object(attention, "mask_bias", everything), mock.patch.object(scheduler.Scheduler, "_ended", without_eos),
        mock.patch.object(scheduler, "draw_mixed", mislabelled), mock.patch.object(engine, "forward", swapped))))
    if fault not in patches:
        raise ValueError(f"fault must be one of {FAULTS}, got {fault!r}")
    with patches[fault]:
        yield
