"""The frozen reference of preference learning: its log-probs from a resident model, or computed once and cached on disk.

A forward pass takes BLOCK neighbours of the data at a time and nothing else, so every bit of a value depends on weights and
data alone: when it was computed cannot change a training run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import safetensors.torch
import torch

from grpolab.files import atomic_write
from grpolab.models.load import Policy
from grpolab.rollouts import collate
from grpolab.runs.checkpoints import data_hash, weights_hash
from grpolab.train import losses
from grpolab.train.layout import lay_out
from grpolab.train.logps import rollout_logps
from grpolab.train.loop import Optimisation, autocast
from grpolab.train.preferences import Pair
from grpolab.train.verify import verify_forward

BLOCK = 8
FORWARD = 5  # counts changes of what a forward computes: a file of an earlier one is not found
UNRELATED = ("_name_or_path", "transformers_version", "architectures")  # entries of a model's configuration


def pair_logps(policy: Policy, pairs: Sequence[Pair], share: bool = True, checkpointed: bool = False) -> torch.Tensor:
    """log p of each pair's chosen and rejected completion, summed over its kept tokens: (P, 2).

    `share`: the two share their prompt, where the forward allows it.
    """
    sides = [side for p in pairs for side in p.sides]
    mask = collate(sides, torch.zeros(len(sides))).mask.to(policy.device)
    layout = lay_out(sides, share=share, pad_id=policy.pad_id)
    logps, _ = rollout_logps(policy, layout, mask.shape, 1.0, checkpointed=checkpointed)
    return losses.sequence_logps(logps, mask).view(-1, 2)


@dataclass(frozen=True)
class ReferenceLogps:
    """`values` (P, 2): the reference's log-probs of the pairs whose `data_hash` is `data`, in their order; `weights` is the
    hash of its weights, by which a run that goes on knows it again."""

    values: torch.Tensor
    data: str
    weights: str = ""
    autocast: str | None = None  # of the forward that computed them


def cache_logps(
    reference: Policy, pairs: Sequence[Pair], folder: str | Path | None = None, *, config: Optimisation | None = None
) -> ReferenceLogps:
    """The log-probs of all pairs, computed once. With a `folder` they are stored there in a file named by the content of
    weights and pairs, which is read where both are the same.

    The reference may be the policy itself before its first step; then no second model exists at all. `config` is the
    training's, for its autocast. Raises ValueError for a damaged file.
    """
    config, data, weights = config or Optimisation(), data_hash(pairs), weights_hash(reference)
    if folder is None:
        return ReferenceLogps(_compute(reference, pairs, config), data, reference_key(reference), config.autocast)
    model = {k: v for k, v in reference.model.config.to_dict().items() if k not in UNRELATED}
    key = json.dumps([weights, data, model, reference.device.type, config.autocast, FORWARD], sort_keys=True, default=str)
    path = Path(folder) / f"reference-{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    if not path.exists():
        atomic_write(path, safetensors.torch.save({"logps": _compute(reference, pairs, config).contiguous()}))
    try:
        return ReferenceLogps(safetensors.torch.load_file(path)["logps"], data, reference_key(reference), config.autocast)
    except Exception as error:  # safetensors has types of its own for every kind of damage
        raise ValueError(f"{path} is damaged ({error}): delete it, and it will be computed again") from error


def reference_values(
    reference: Policy | ReferenceLogps, pairs: Sequence[Pair], config: Optimisation
) -> Callable[[Sequence[int]], torch.Tensor]:
    """The function from indices of `pairs` to the reference's log-probs of those, (n, 2). A resident model scores a block once,
    when one of its pairs comes up."""
    if isinstance(reference, ReferenceLogps):
        if reference.data != data_hash(pairs) or len(reference.values) != len(pairs):
            raise ValueError("the cached reference log-probs are of other pairs: call cache_logps with these")
        if reference.autocast != config.autocast:
            raise ValueError(f"the cached reference log-probs were computed with autocast={reference.autocast!r}, and the "
                             f"training has {config.autocast!r}: call cache_logps(..., config=config)")
        return lambda indices: reference.values[list(indices)]
    score = cache(lambda block: _score_block(reference, pairs, block, config))
    return lambda indices: torch.stack([score(i // BLOCK)[i % BLOCK] for i in indices])


def reference_key(reference: Policy | ReferenceLogps) -> str:
    """A hash of the reference's weights."""
    if isinstance(reference, Policy) and reference.bare:
        return "the policy without its adapter"  # whose weights the run's start has in its own hash
    return weights_hash(reference) if isinstance(reference, Policy) else reference.weights


def prove_reference(reference: Policy, pairs: Sequence[Pair], config: Optimisation) -> None:
    """The reference's forward, proved on rows like those in which its log-probs are computed."""
    if reference.bare:  # the policy's own forward, which is proved
        return
    with reference.acting():  # as its log-probs are taken
        verify_forward(reference, config, max((p.longest for p in pairs), default=0))


def _score_block(reference: Policy, pairs: Sequence[Pair], block: int, config: Optimisation) -> torch.Tensor:
    """(up to BLOCK, 2) on the CPU."""
    with torch.no_grad(), reference.lock, reference.acting(), autocast(reference, config):
        return pair_logps(reference, pairs[block * BLOCK : (block + 1) * BLOCK]).cpu()


def _compute(reference: Policy, pairs: Sequence[Pair], config: Optimisation) -> torch.Tensor:
    if not pairs:
        raise ValueError("there are no pairs to score")
    prove_reference(reference, pairs, config)
    return reference_values(reference, pairs, config)(range(len(pairs)))
