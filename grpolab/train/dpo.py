"""Direct preference optimisation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from grpolab.models.load import Policy
from grpolab.runs.checkpoints import data_hash
from grpolab.runs.run import Run
from grpolab.train import losses
from grpolab.train.loop import Optimisation, accumulate, autocast, over_batches
from grpolab.train.preferences import Pair, check_pairs, pair_batches, pair_counts, pair_lengths
from grpolab.train.reference import ReferenceLogps, pair_logps, prove_reference, reference_key, reference_values
from grpolab.train.verify import verify_forward


@dataclass(frozen=True)
class DPOConfig(Optimisation):
    """`batch_size` pairs a step; `beta`, `kind` and `label_smoothing` as in `losses.dpo_loss`, `length_normalised` divides
    each completion's log-prob by its kept tokens."""

    batch_size: int = 32  # pairs a step
    beta: float = 0.1  # strength of the tie to the reference
    kind: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"  # the loss
    label_smoothing: float = 0.0  # probability that a pair's sides are mislabelled
    length_normalised: bool = False  # divide each log-prob by the completion's length
    share_prompts: bool = True  # compute a prompt once for its completions (Llama-shaped models)

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size")
        losses.check_dpo_options(self.beta, self.kind, self.label_smoothing)


def dpo(
    policy: Policy, reference: Policy | ReferenceLogps, pairs: Sequence[Pair], config: DPOConfig, *, run: Run | None = None
) -> AsyncIterator[dict]:
    """Direct preference optimisation (arXiv 2305.18290): raise the chosen completions against the rejected ones, both
    measured from the reference.

    `reference` is a resident model, or its log-probs from `cache_logps`, which need none; the steps are the same in
    every bit on a CPU.
    """
    if reference is policy or isinstance(reference, Policy) and reference.model is policy.model and not reference.bare:
        raise ValueError("the reference is the policy itself, so it would move along: cache_logps(policy, pairs) keeps it")
    reference_at = reference_values(reference, pairs, config)

    def check():
        check_pairs(policy, pairs)
        verify_forward(policy, config, max((p.longest for p in pairs), default=0))
        if isinstance(reference, Policy):
            prove_reference(reference, pairs, config)

    def gradient(indices, denominator):
        return dpo_gradient(policy, [pairs[i] for i in indices], reference_at(indices), config, denominator=denominator)

    return over_batches(policy, range(len(pairs)), config, run, check=check, gradient=gradient,
                        counts=lambda indices: pair_counts([pairs[i] for i in indices]),
                        data=lambda: f"{data_hash(pairs)} {reference_key(reference)}")


def dpo_gradient(
    policy: Policy, pairs: Sequence[Pair], ref_logps: torch.Tensor, config: DPOConfig, *, denominator: int | None = None
) -> dict:
    """Accumulate the gradient of the batch's mean pair loss, whatever the micro-batches; returns the metrics.
    ref_logps: (P, 2), chosen and rejected. Where `pairs` are a part, the `denominator` counts all."""
    metrics = accumulate(policy, _losses(policy, pairs, ref_logps, config, len(pairs) if denominator is None else denominator))
    return {"loss": metrics.pop("dpo_loss")} | metrics


def _losses(policy: Policy, pairs: Sequence[Pair], ref_logps: torch.Tensor, config: DPOConfig, denominator: int) -> Iterator:
    """`losses.dpo_loss` of each micro-batch."""
    for indices in pair_batches(policy, pairs, config, share=config.share_prompts):
        part = [pairs[i] for i in indices]
        with autocast(policy, config):
            logps = pair_logps(policy, part, config.share_prompts, checkpointed=config.checkpoint_activations)
        yield losses.dpo_loss(
            *logps.T, *ref_logps[indices].to(logps.device).T, beta=config.beta, denominator=denominator, kind=config.kind,
            label_smoothing=config.label_smoothing, lengths=pair_lengths(part, logps) if config.length_normalised else None,
        )


def implicit_rewards(
    policy: Policy, reference: Policy | ReferenceLogps, pairs: Sequence[Pair], config: DPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """DPO's reward beta (log pi - log pi_ref) of each pair's chosen and rejected completion, and log pi: (P, 2) each."""
    check_pairs(policy, pairs)
    ref_logps, logps = reference_values(reference, pairs, config)(range(len(pairs))), torch.zeros(len(pairs), 2)
    with torch.no_grad(), policy.lock, policy.acting(), autocast(policy, config):
        for indices in pair_batches(policy, pairs, config, share=config.share_prompts):
            logps[indices] = pair_logps(policy, [pairs[i] for i in indices], config.share_prompts).cpu()
    scale = pair_lengths(pairs, logps).T if config.length_normalised else 1.0
    return config.beta * (logps - ref_logps) / scale, logps
