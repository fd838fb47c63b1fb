"""A policy's log-probabilities with gradient: the decoder, then the head only where the mask asks.

A forward can be taken in two ways, and both must give what the model's own plain forward gives on one sequence: "unpadded",
`train.forward`, for Llama-shaped models, where sequences lie in one line and may share how they begin; and through the model's
own decoder "rows", one sequence a row, padded at the right. `train.verify` finds the first that is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from grpolab.chat import Example
from grpolab.decode.snapshot import verified_of
from grpolab.models.load import Policy
from grpolab.rollouts import Rollout, given, padded
from grpolab.train import forward, losses
from grpolab.train.forward import pick
from grpolab.train.layout import Layout, distinct_parts, lay_out, micro_batches


def way_of(policy: Policy, what: str) -> str:
    """The way in which this model's forward is taken for `what` ("rollouts", "rewards"): the verified one, else the first that
    may be right."""
    verified = verified_of(policy).get(("way", what, policy.model.training))
    return verified or ("unpadded" if forward.readable(policy.model) else "rows")


def parts_of(
    policy: Policy, rollouts: Sequence[Rollout], budget: int, *, share: bool, what: str = "rollouts", together: int = 1
) -> Iterator[slice]:
    """Slices of the rollouts for a forward pass each, of at most `budget` tokens that are computed. So many neighbours stay
    `together`."""
    members = [rollouts[i : i + together] for i in range(0, len(rollouts), together)]
    if way_of(policy, what) == "unpadded":
        parts = distinct_parts(members, budget, share)
    else:
        longest = [max(len(r.prompt) + len(r.tokens) for r in of) for of in members]
        parts = micro_batches([together * n for n in longest], budget)
    return (slice(part.start * together, part.stop * together) for part in parts)


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


def head_of(policy: Policy) -> dict:
    """The output head as `target_logps` takes it."""
    head = policy.model.get_output_embeddings()
    return {"head": head.weight, "bias": getattr(head, "bias", None)}


def example_logps(
    policy: Policy, rollouts: Sequence[Rollout], *, way: str | None = None, checkpointed: bool = False
) -> tuple[Tensor, Tensor]:
    """log p of the tokens that the masks of examples (`as_rollouts`) mark, 0 elsewhere, and the mask: (N, T) each."""
    mask = padded([r.mask for r in rollouts]).to(policy.device)
    layout = lay_out(rollouts, share=False, pad_id=policy.pad_id)
    return rollout_logps(policy, layout, mask.shape, 1.0, way=way, checkpointed=checkpointed)[0], mask


def as_rollouts(examples: Sequence[Example]) -> list[Rollout]:
    """Examples as a layout takes them: what comes before the first token that is trained on is the prompt."""
    cuts = [1 + (*e.mask[1:], 1).index(1) for e in examples]
    return [given(e.ids[:n], e.ids[n:], e.mask[n:]) for e, n in zip(examples, cuts)]


def row_step(policy: Policy) -> int:
    """Of what the rows of a product shall be a multiple: on a processor oneDNN compiles those in bf16 for each number of rows
    anew, for longer than a small model's product takes, and keeps all of them."""
    half = torch.bfloat16 in (policy.dtype, torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
    return 64 if half and policy.device.type == "cpu" else 1


def rollout_states(policy: Policy, layout: Layout, *, way: str | None = None, checkpointed: bool = False) -> Tensor:
    """The final hidden states, before the head, that predict the chosen tokens: (K, D). `checkpointed`: the backward computes
    the layers again instead of keeping what they computed."""
    way, decoder = way or way_of(policy, "rollouts"), policy.model.get_decoder()
    if way == "unpadded":
        tokens = layout.tokens.filled(row_step(policy)).to(policy.device)
        line = tokens.ids, tokens.positions, forward.attending(tokens), tokens.predictor
        return forward.states(decoder, *line, checkpointed)[: len(layout.target)]
    ids, positions, at = (getattr(layout.rows, name).to(policy.device) for name in ("ids", "positions", "predictor"))
    with _checkpointing(policy) if checkpointed else nullcontext():
        return pick(decoder(ids, position_ids=positions, use_cache=False).last_hidden_state.flatten(0, 1), at)


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
