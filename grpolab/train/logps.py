"""A policy's log-probabilities with gradient: the decoder on packed rows, then the head only where the mask asks."""

from __future__ import annotations

import torch

from grpolab.chat import Packed
from grpolab.models import Policy
from grpolab.train import losses, unpadded
from grpolab.train.layout import Layout


def decoder_states(policy: Policy, ids, positions, attention, at=None) -> torch.Tensor:
    """(R, W) ids -> (R, W, D) final hidden states, before the head; with flat indices `at` (K,) in (R, W), theirs: (K, D)."""
    d = policy.device
    ids, positions, mask = ids.to(d), positions.to(d), None if attention is None else attention.to(d)
    decoder = policy.model.get_decoder()
    if unpadded.readable(policy.model):
        hidden = unpadded.states(decoder, ids.flatten(), positions.flatten(), unpadded.in_rows(len(ids), mask), at)
        return hidden if at is not None else hidden.unflatten(0, ids.shape)
    hidden = decoder(ids, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state
    return hidden if at is None else hidden.flatten(0, 1).index_select(0, at)


def head_of(policy: Policy) -> dict:
    """The output head as `target_logps` and `token_logps` take it."""
    head = policy.model.get_output_embeddings()
    return {"head": head.weight, "bias": getattr(head, "bias", None)}


def masked_logps(policy: Policy, batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of the tokens that the batch's mask marks, 0 elsewhere, and that mask on the policy's device: (N, T) each."""
    ids, mask = batch.ids.to(policy.device), batch.mask.to(policy.device)
    chosen = losses.chosen_places(mask)
    hidden = decoder_states(policy, ids, batch.positions, batch.attention, chosen - 1)
    logps, _ = losses.target_logps(hidden, targets=ids.flatten()[chosen], **head_of(policy))
    return logps.new_zeros(ids.numel()).index_copy(0, chosen, logps).view(ids.shape), mask


def check_head(policy: Policy) -> None:
    """Logits must be head(hidden states): models that scale or cap them afterwards are refused, not trained wrongly."""
    ids = torch.tensor([[policy.eos_ids[0], policy.pad_id]], device=policy.device)
    with torch.no_grad(), policy.lock:
        expected = policy.model(ids, use_cache=False).logits.float()
        hidden = decoder_states(policy, ids, torch.arange(2)[None], None)
        head = head_of(policy)
        ours = torch.nn.functional.linear(hidden, head["head"], head["bias"]).float()
    if not torch.allclose(ours, expected, rtol=1e-3, atol=1e-3):
        raise ValueError(f"{policy.name!r} changes its logits after the head (a cap or a scale), which the losses here do not")


def rollout_logps(policy: Policy, layout: Layout, shape, temperature: float, with_entropy=False):
    """log p of the chosen tokens under `policy` at `temperature`: (N, T) = shape, 0 elsewhere; and their entropy, or None."""
    d = policy.device
    if unpadded.readable(policy.model):
        tokens = layout.tokens.to(d)
        decoder, attend = policy.model.get_decoder(), unpadded.with_prefixes(tokens)
        hidden = unpadded.states(decoder, tokens.ids, tokens.positions, attend, tokens.predictor)
    else:
        hidden = decoder_states(policy, layout.ids, layout.positions, layout.attention, layout.predictor.to(d))
    options = {"temperature": temperature, "with_entropy": with_entropy} | head_of(policy)
    values = losses.target_logps(hidden, targets=layout.target.to(d), **options)
    place = (layout.row.to(d), layout.column.to(d))
    return tuple(None if v is None else v.new_zeros(shape).index_put(place, v) for v in values)


def check_lengths(policy: Policy, longest: int, what: str) -> None:
    """Refuse what does not fit the context, before any work is done."""
    if longest > policy.context:
        raise ValueError(f"a {what} needs {longest} tokens; the context of {policy.name!r} is {policy.context}: shorten it")
