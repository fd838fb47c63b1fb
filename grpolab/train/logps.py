"""A policy's log-probabilities with gradient: the decoder, then the head only where the mask asks.

A forward can be taken in three ways, and all of them must give what the model's own plain forward gives on one sequence:
"unpadded", `train.forward`, for Llama-shaped models, where several sequences may share a prompt or a row; and through the
model's own decoder "rows", one sequence a row, padded at the right, and "alone", one sequence a pass. `train.verify` finds the
first that is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from grpolab.chat import Packed
from grpolab.decode.snapshot import verified_of
from grpolab.models.load import Policy
from grpolab.rollouts import Rollout
from grpolab.train import forward, losses
from grpolab.train.forward import pick
from grpolab.train.layout import Layout, distinct_parts, micro_batches


def way_of(policy: Policy, what: str) -> str:
    """The way in which this model's forward is taken for `what` ("rollouts", "examples", "rewards"): the verified one, else the
    first that may be right."""
    verified = verified_of(policy).get(("way", what, policy.model.training))
    return verified or ("unpadded" if forward.readable(policy.model) else "rows")


def can_pack(policy: Policy) -> bool:
    """Whether examples may share a row."""
    return way_of(policy, "examples") == "unpadded"


def decoder_states(policy: Policy, ids, positions, attention, at=None, *, way: str, checkpointed: bool = False) -> Tensor:
    """(R, W) ids -> (R, W, D) final hidden states, before the head; with flat indices `at` (K,) in (R, W), theirs: (K, D).
    attention: (R, 1, W, W), True where a query may look, or None where causal attention is enough. `checkpointed`: the
    backward computes the layers again instead of keeping what they computed."""
    d = policy.device
    ids, positions, decoder = ids.to(d), positions.to(d), policy.model.get_decoder()
    if way == "unpadded":
        attend = forward.in_rows(len(ids), None if attention is None else attention.to(d))
        hidden = forward.states(decoder, ids.flatten(), positions.flatten(), attend, at, checkpointed)
        return hidden if at is not None else hidden.unflatten(0, ids.shape)
    if attention is not None:
        raise ValueError(f"sequences cannot share rows in the forward of {policy.name!r}: give each a row (chat.pad)")
    with _checkpointing(policy) if checkpointed else nullcontext():
        if way == "alone" and at is not None:
            return _alone(decoder, ids, positions, at)
        hidden = decoder(ids, position_ids=positions, use_cache=False).last_hidden_state
    return hidden if at is None else pick(hidden.flatten(0, 1), at)


def parts_of(policy: Policy, rollouts: Sequence[Rollout], config) -> Iterator[slice]:
    """Slices of the rollouts for a forward pass each, within `config.token_budget`: of the tokens that are computed."""
    if config.share_prompts and way_of(policy, "rollouts") == "unpadded":
        return distinct_parts(rollouts, config.token_budget)
    return micro_batches([len(r.prompt) + len(r.tokens) for r in rollouts], config.token_budget)


@contextmanager
def _checkpointing(policy: Policy) -> Iterator[None]:
    """The model's own layers, checkpointed for one pass: its own switch works in training mode only, with its dropout."""
    layers = [m for m in policy.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{policy.name!r} has no layers that can be checkpointed: set checkpoint_activations=False")
    try:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _alone(decoder, ids, positions, at):
    """Each row in a pass of its own, up to the last place that is needed: nothing of another's length is seen."""
    rows, columns, out = at // ids.shape[1], at % ids.shape[1], []
    for r in rows.unique_consecutive().tolist():
        needed = columns[rows == r]
        end = int(needed.max()) + 1
        hidden = decoder(ids[r : r + 1, :end], position_ids=positions[r : r + 1, :end], use_cache=False).last_hidden_state
        out.append(pick(hidden[0], needed))
    return torch.cat(out) if out else decoder(ids[:1, :1], use_cache=False).last_hidden_state[0, :0]


def head_of(policy: Policy) -> dict:
    """The output head as `target_logps` takes it."""
    head = policy.model.get_output_embeddings()
    return {"head": head.weight, "bias": getattr(head, "bias", None)}


def masked_logps(
    policy: Policy, batch: Packed, *, way: str | None = None, checkpointed: bool = False
) -> tuple[Tensor, Tensor]:
    """log p of the tokens that the batch's mask marks, 0 elsewhere, and that mask on the policy's device: (N, T) each."""
    ids, mask = batch.ids.to(policy.device), batch.mask.to(policy.device)
    chosen = losses.chosen_places(mask)
    way = way or way_of(policy, "examples")
    places = batch.ids, batch.positions, batch.attention, chosen - 1
    hidden = decoder_states(policy, *places, way=way, checkpointed=checkpointed)
    logps, _ = losses.target_logps(hidden, targets=ids.flatten()[chosen], **head_of(policy))
    return logps.new_zeros(ids.numel()).index_copy(0, chosen, logps).view(ids.shape), mask


def rollout_states(policy: Policy, layout: Layout, *, way: str | None = None, checkpointed: bool = False) -> Tensor:
    """The final hidden states that predict the chosen tokens: (K, D)."""
    way = way or way_of(policy, "rollouts")
    if way == "unpadded":
        tokens = layout.tokens.to(policy.device)
        decoder, attend = policy.model.get_decoder(), forward.with_prefixes(tokens)
        return forward.states(decoder, tokens.ids, tokens.positions, attend, tokens.predictor, checkpointed)
    rows = layout.rows
    places = rows.ids, rows.positions, None, rows.predictor.to(policy.device)
    return decoder_states(policy, *places, way=way, checkpointed=checkpointed)


def rollout_logps(
    policy: Policy, layout: Layout, shape, temperature: float, with_entropy=False, *, way: str | None = None,
    checkpointed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p of the chosen tokens under `policy` at `temperature`, or a rollout's own: (N, T) = shape, 0 elsewhere; and their
    entropy, or None."""
    d, hidden = policy.device, rollout_states(policy, layout, way=way, checkpointed=checkpointed)
    own = torch.tensor([r.temperature or temperature for r in layout.rollouts])
    if bool((own != temperature).any()):  # logits W h / T are W (h / T): target_logps divides by the one temperature
        if head_of(policy)["bias"] is not None:
            raise ValueError(f"the head of {policy.name!r} has a bias: give all rollouts the loss's temperature, {temperature}")
        hidden = hidden * (temperature / own)[layout.row].to(d, hidden.dtype)[:, None]
    options = {"temperature": temperature, "with_entropy": with_entropy} | head_of(policy)
    values = losses.target_logps(hidden, targets=layout.target.to(d), **options)
    place = (layout.row.to(d), layout.column.to(d))
    return tuple(None if v is None else v.new_zeros(shape).index_put(place, v) for v in values)


def check_lengths(policy: Policy, longest: int, what: str) -> None:
    """Refuse what does not fit the context, before any work is done."""
    if longest > policy.context:
        raise ValueError(f"a {what} needs {longest} tokens; the context of {policy.name!r} is {policy.context}: shorten it")
