"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpolab.chat import Example, encode_chat
from grpolab.models.load import Policy
from grpolab.runs.checkpoints import data_hash
from grpolab.runs.run import Run
from grpolab.tasks import demonstration_of
from grpolab.train import losses
from grpolab.train.logps import as_rollouts, check_lengths, example_logps, parts_of
from grpolab.train.loop import Optimisation, accumulate, autocast, over_batches
from grpolab.train.verify import verify_forward


@dataclass(frozen=True)
class SFTConfig(Optimisation):
    """`batch_size` examples a step. Where there are held-out examples, their loss stands in the rows of every `held_out_every`
    steps and in the last one."""

    batch_size: int = 64  # examples a step
    held_out_every: int = 10  # steps between measurements of the held-out loss

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size", "held_out_every")


def demonstrations(policy: Policy, rows: Sequence[Any]) -> list[Example]:
    """Each row's conversation (`tasks.demonstration_of`: a Problem's question and target, messages, ...), tokenised, with the
    `tools` of the row where it has some."""
    return [encode_chat(policy.tokenizer, demonstration_of(row), row.get("tools") or () if isinstance(row, Mapping) else ())
            for row in rows]


def sft(
    policy: Policy, examples: Sequence[Example], config: SFTConfig, *, held_out: Sequence[Example] = (), run: Run | None = None
) -> AsyncIterator[dict]:
    """Supervised fine-tuning: maximise the log-likelihood of the assistant's tokens, end tokens included.

    `held_out_loss` is that of the `held_out` examples by the same weights as the row's `loss`: those before the step."""

    def check():
        check_examples(examples)
        check_examples(held_out, "held-out example")
        longest = max((len(e.ids) for e in (*examples, *held_out)), default=0)
        check_lengths(policy, longest, "example")
        verify_forward(policy, config, longest)

    def before(step):
        due = step % config.held_out_every == 0 or step == config.steps - 1
        return {"held_out_loss": sft_value(policy, held_out, config)} if held_out and due else {}

    return over_batches(
        policy, examples, config, run, check=check, before=before, data=lambda: data_hash(examples),
        gradient=lambda part, denominator: sft_gradient(policy, part, config, denominator=denominator),
        counts=lambda batch: (targets_of(batch), {"tokens_per_s": sum(len(e.ids) for e in batch)}),
    )


def check_examples(examples: Sequence[Example], name: str = "example") -> None:
    """Refuse what has nothing to be trained on, by its place."""
    for i, e in enumerate(examples):
        if len(e.mask) != len(e.ids) or not set(e.mask) <= {0, 1}:
            raise ValueError(f"{name} {i} has {len(e.ids)} tokens and the mask {e.mask}: give each token 0 or 1")
        if not any(e.mask[1:]):
            raise ValueError(f"{name} {i} has no token to train on: its mask marks none after the first")


def sft_gradient(policy: Policy, batch: Sequence[Example], config: SFTConfig, *, denominator: int | None = None) -> dict:
    """Accumulate the gradient of the batch's mean token loss, whatever the micro-batches; returns the metrics. Where `batch`
    is a part, the `denominator` counts the whole (`targets_of`)."""
    metrics = accumulate(policy, _losses(policy, batch, config, targets_of(batch) if denominator is None else denominator))
    return {"loss": metrics["sft_loss"], "tokens": targets_of(batch)}


@torch.no_grad()
def sft_value(policy: Policy, examples: Sequence[Example], config: SFTConfig) -> float:
    """The mean token loss of the examples, in nats, without dropout."""
    with policy.lock, policy.acting():
        parts = [metrics for _, metrics in _losses(policy, examples, config, targets_of(examples))]
    return losses.combine(parts)["sft_loss"]


def targets_of(examples: Sequence[Example]) -> int:
    """The tokens that are trained on: the first of an example follows nothing."""
    return sum(sum(e.mask[1:]) for e in examples)


def _losses(policy: Policy, batch: Sequence[Example], config: SFTConfig, denominator: int) -> Iterator[tuple]:
    """`losses.sft_loss` of each micro-batch."""
    rollouts = as_rollouts(sorted(batch, key=lambda e: len(e.ids)))
    for part in parts_of(policy, rollouts, config.token_budget, share=False):
        with autocast(policy, config):
            logps, mask = example_logps(policy, rollouts[part], checkpointed=config.checkpoint_activations)
        yield losses.sft_loss(logps, mask, denominator=denominator)
