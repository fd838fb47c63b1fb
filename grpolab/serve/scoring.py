"""The log-probs of given token ids by the trainer's forward, and the most probable token at each place: OpenAI's `echo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from grpolab.models.load import Policy
from grpolab.rollouts import given
from grpolab.train import losses
from grpolab.train.grpo import GRPOConfig
from grpolab.train.layout import lay_out
from grpolab.train.logps import head_of, parts_of, rollout_states

CHUNK = 256  # places whose logits stand in memory together


@dataclass(frozen=True)
class Scores:
    """Of a sequence of T tokens: `logps` (T - 1) at temperature 1 of each but the first; with `tops` also the most probable
    token after each of them, `best` and its log-prob `best_logps` (T each, the last one of the token that would follow)."""

    logps: list[float]
    best: list[int]
    best_logps: list[float]


@torch.no_grad()
def scores(policy: Policy, sequences: Sequence[Sequence[int]], tops: bool) -> list[Scores]:
    """The Scores of each sequence. A token that is the most probable one has its log-prob in every bit."""
    config, out = GRPOConfig(), []
    follow = (0,) * tops  # in the place of what would follow
    rollouts = [given(ids[:1], (*ids[1:], *follow), (1,) * (len(ids) - 1 + tops)) for ids in sequences]
    with policy.acting():
        for part in parts_of(policy, rollouts, config.token_budget, share=config.share_prompts):
            lengths = [len(r.tokens) for r in rollouts[part]]
            if not any(lengths):
                out += [Scores([], [], [])] * len(lengths)
                continue
            layout = lay_out(rollouts[part], share=config.share_prompts, pad_id=policy.pad_id)
            hidden, head = rollout_states(policy, layout), head_of(policy)
            targets = layout.target.to(policy.device)
            logps, _ = losses.target_logps(hidden, targets=targets, **head)
            columns = [logps]
            if tops:
                best = torch.cat([F.linear(h.to(head["head"].dtype), *head.values()).argmax(1) for h in hidden.split(CHUNK)])
                best_logps, _ = losses.target_logps(hidden, targets=best, **head)
                columns += [torch.where(logps >= best_logps, targets, best), torch.maximum(logps, best_logps)]
            for own, *others in zip(*(column.split(lengths) for column in columns)):
                best, best_logps = others or (own[:0], own[:0])
                out.append(Scores(own[: len(own) - tops].tolist(), best.tolist(), best_logps.tolist()))
    return out
