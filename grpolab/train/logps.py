"""A policy's log-probabilities with gradient: the decoder, then the head only where the mask asks.

A forward can be taken in four ways, and all of them must give what the model's own plain forward gives on one sequence:
"unpadded", `train.forward`, for Llama-shaped models; "packed", the model's own decoder on rows that several sequences share,
under masks that keep them apart; "rows", one sequence a row, padded at the right; "alone", one sequence a pass.
`train.verify` finds the first that is right and leaves it here; a model that nobody verified gets no packed rows.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from grpolab.chat import Packed
from grpolab.models.load import Policy, attention_of
from grpolab.train import forward, losses
from grpolab.train.layout import Layout


class Proved(NamedTuple):
    way: str
    state: tuple  # of the model, when it was proved


_proved: WeakKeyDictionary[torch.nn.Module, dict[str, Proved]] = WeakKeyDictionary()


def state_of(model) -> tuple:
    """What a proof holds for: another attention, dropout, or a changed module makes it void."""
    return forward.readable(model), attention_of(model), model.training, len(list(model.modules()))


def remember(policy: Policy, what: str, way: str) -> None:
    """`way` is right for `what` ("rollouts", "examples", "rewards") of this model as it stands."""
    _proved.setdefault(policy.model, {})[what] = Proved(way, state_of(policy.model))


def way_of(policy: Policy, what: str) -> str:
    """The way in which this model's forward is taken: the proved one, else one that packs nothing."""
    state, found = state_of(policy.model), _proved.get(policy.model, {}).get(what)
    if found is not None and found.state == state:
        return found.way
    return "unpadded" if state[0] else "rows"


def can_pack(policy: Policy) -> bool:
    """Whether examples may share a row."""
    return way_of(policy, "examples") in ("unpadded", "packed")


def decoder_states(policy: Policy, ids, positions, attention, at=None, *, way: str) -> Tensor:
    """(R, W) ids -> (R, W, D) final hidden states, before the head; with flat indices `at` (K,) in (R, W), theirs: (K, D).
    attention: (R, 1, W, W), True where a query may look, or None where causal attention is enough."""
    d = policy.device
    ids, positions, seen = ids.to(d), positions.to(d), None if attention is None else attention.to(d)
    decoder = policy.model.get_decoder()
    if way == "unpadded":
        hidden = forward.states(decoder, ids.flatten(), positions.flatten(), forward.in_rows(len(ids), seen), at)
        return hidden if at is not None else hidden.unflatten(0, ids.shape)
    if seen is not None and way != "packed":
        raise ValueError(
            f"rows shared by several sequences are not proved right for {policy.name!r}: let train.verify.verify_forward "
            "try them, or give each sequence a row of its own (chat.pad)"
        )
    if way == "alone" and at is not None:
        return _alone(decoder, ids, positions, at)
    mask = None if seen is None else masks(policy.model.config, seen, positions, policy.dtype)
    hidden = decoder(ids, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state
    return hidden if at is None else hidden.flatten(0, 1).index_select(0, at)


def _alone(decoder, ids, positions, at):
    """Each row in a pass of its own, up to the last place that is asked for: nothing of another's length is seen."""
    rows, columns, out = at // ids.shape[1], at % ids.shape[1], []
    for r in rows.unique_consecutive().tolist():
        asked = columns[rows == r]
        end = int(asked.max()) + 1
        hidden = decoder(ids[r : r + 1, :end], position_ids=positions[r : r + 1, :end], use_cache=False).last_hidden_state
        out.append(hidden[0].index_select(0, asked))
    return torch.cat(out) if out else decoder(ids[:1, :1], use_cache=False).last_hidden_state[0, :0]


def masks(config, seen: Tensor, positions: Tensor, dtype) -> Tensor | dict[str, Tensor]:
    """What a decoder adds to its scores, 0 or the dtype's least number, (R, 1, W, W): one mask, or one for each kind of its
    layers. Windows and chunks are counted in positions, which in a shared row are not the columns."""
    config = config.get_text_config()
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    query, key = positions[:, None, :, None], positions[:, None, None, :]

    def mask(kind):
        visible = seen
        if kind == "sliding_attention" and window:
            visible = visible & (query - key < window)
        if kind == "chunked_attention" and chunk:
            visible = visible & (query // chunk == key // chunk)
        return torch.zeros(visible.shape, dtype=dtype, device=seen.device).masked_fill_(~visible, torch.finfo(dtype).min)

    return {kind: mask(kind) for kind in kinds} if len(kinds) > 1 else mask(*kinds)


def head_of(policy: Policy) -> dict:
    """The output head as `target_logps` takes it."""
    head = policy.model.get_output_embeddings()
    return {"head": head.weight, "bias": getattr(head, "bias", None)}


def masked_logps(policy: Policy, batch: Packed, *, way: str | None = None) -> tuple[Tensor, Tensor]:
    """log p of the tokens that the batch's mask marks, 0 elsewhere, and that mask on the policy's device: (N, T) each."""
    ids, mask = batch.ids.to(policy.device), batch.mask.to(policy.device)
    chosen = losses.chosen_places(mask)
    way = way or way_of(policy, "examples")
    hidden = decoder_states(policy, ids, batch.positions, batch.attention, chosen - 1, way=way)
    logps, _ = losses.target_logps(hidden, targets=ids.flatten()[chosen], **head_of(policy))
    return logps.new_zeros(ids.numel()).index_copy(0, chosen, logps).view(ids.shape), mask


def rollout_states(policy: Policy, layout: Layout, *, way: str | None = None) -> tuple[Tensor, Layout]:
    """The final hidden states that predict the chosen tokens: (K, D); and the layout in whose order they are."""
    d, way = policy.device, way or way_of(policy, "rollouts")
    if way == "unpadded":
        layout = layout.together
        tokens = layout.tokens.to(d)
        decoder, attend = policy.model.get_decoder(), forward.with_prefixes(tokens)
        return forward.states(decoder, tokens.ids, tokens.positions, attend, tokens.predictor), layout
    layout = layout.apart if way in ("rows", "alone") else layout
    return decoder_states(policy, layout.ids, layout.positions, layout.attention, layout.predictor.to(d), way=way), layout


def rollout_logps(policy: Policy, layout: Layout, shape, temperature: float, with_entropy=False, *, way: str | None = None):
    """log p of the chosen tokens under `policy` at `temperature`: (N, T) = shape, 0 elsewhere; and their entropy, or None."""
    d, (hidden, layout) = policy.device, rollout_states(policy, layout, way=way)
    options = {"temperature": temperature, "with_entropy": with_entropy} | head_of(policy)
    values = losses.target_logps(hidden, targets=layout.target.to(d), **options)
    place = (layout.row.to(d), layout.column.to(d))
    return tuple(None if v is None else v.new_zeros(shape).index_put(place, v) for v in values)


def check_lengths(policy: Policy, longest: int, what: str) -> None:
    """Refuse what does not fit the context, before any work is done."""
    if longest > policy.context:
        raise ValueError(f"a {what} needs {longest} tokens; the context of {policy.name!r} is {policy.context}: shorten it")
