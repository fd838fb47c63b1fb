"""The log-probs of given token ids by the trainer's forward, and the most probable token at each place: OpenAI's `echo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from grpolab.models.load import Policy
from grpolab.rollouts import given
from grpolab.train.grpo import GRPOConfig
from grpolab.train.layout import lay_out
from grpolab.train.logps import head_of, parts_of, rollout_states

CHUNK = 256  # places whose logits stand in memory together


@dataclass(frozen=True)
class Scores:
    """Of a sequence of T tokens: `logps` (T - 1) at temperature 1 of each but the first; the most probable token after each of
    them, `best`, and its log-prob `best_logps` (T each, the last one of the token that would follow)."""

    logps: list[float]
    best: list[int]
    best_logps: list[float]


@torch.no_grad()
def scores(policy: Policy, sequences: Sequence[Sequence[int]], ended: Callable[[], bool]) -> list[Scores]:
    """The Scores of each sequence. A token that is the most probable one has its log-prob in every bit. Those of no further
    sequences once `ended` says that nobody waits for them."""
    config, out = GRPOConfig(), []
    rollouts = [given(ids[:1], (*ids[1:], 0), (1,) * len(ids)) for ids in sequences]  # 0 in the place of what would follow
    with policy.acting():
        for part in parts_of(policy, rollouts, config.token_budget, share=config.share_prompts):
            if ended():
                break
            layout = lay_out(rollouts[part], share=config.share_prompts, pad_id=policy.pad_id)
            hidden, head, columns = rollout_states(policy, layout), head_of(policy), []
            for h, targets in zip(hidden.split(CHUNK), layout.target.to(policy.device).split(CHUNK)):
                table = F.linear(h.to(head["head"].dtype), *head.values()).float().log_softmax(-1)
                best_logps, best = table.max(-1)
                columns.append((table.gather(1, targets[:, None]).squeeze(1), best, best_logps))
            lengths = [len(r.tokens) for r in rollouts[part]]
            for own, best, best_logps in zip(*(torch.cat(column).split(lengths) for column in zip(*columns))):
                out.append(Scores(own[:-1].tolist(), best.tolist(), best_logps.tolist()))
    return out
