"""The decoder of Llama-shaped models for training: tokens without rows, (M, D), and attention apart from the rest.

It calls the model's own modules in the order of its own forward. Shapes: M tokens, D hidden size, H heads, H' of keys and
values, d head size; R rows of T queries and S keys in a table (`layout.Table`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from grpolab.models.load import attention_of, llama_obstacle
from grpolab.train.layout import Tokens

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # queries, keys, values (M, H, d), scale -> (M, H, d)


def readable(model) -> bool:
    """Whether `states` computes what this model's own forward does: not under another attention (or one that transformers does
    not name), nor with its dropout, nor where somebody hooked or replaced the forward of a part."""
    return attention_of(model) == "sdpa" and not model.training and llama_obstacle(model) is None


def states(
    decoder, ids: Tensor, positions: Tensor, attend: Attend, at: Tensor | None = None, checkpointed: bool = False
) -> Tensor:
    """ids, positions: (M,) -> final hidden states (M, D), or those of the tokens `at` (K,) alone: (K, D). `checkpointed`: the
    backward keeps the inputs of the layers alone, and computes the rest again."""
    x = _embedded(decoder.embed_tokens, ids)
    rotation = tuple(t[0, :, None] for t in decoder.rotary_emb(x[None], positions[None]))
    layer_step = partial(checkpoint, _layer, use_reentrant=False) if checkpointed else _layer
    for layer in decoder.layers:
        x = layer_step(layer, x, rotation, attend, at if layer is decoder.layers[-1] else None)
    return decoder.norm(x)


def pick(x: Tensor, at: Tensor) -> Tensor:
    """x[at], of which some may be picked twice: on a GPU by an operation whose backward adds up in a fixed order."""
    return x[at] if x.is_cuda else x.index_select(0, at)


def _embedded(embedding, ids: Tensor) -> Tensor:
    """The embeddings of the tokens. On a processor torch adds the gradients of 16-bit rows up in 16 bits, so that a token that
    is seen often would lose most of its own; looked up in fp32 they add up in fp32."""
    weight = embedding.weight
    if type(embedding) is torch.nn.Embedding and weight.dtype.itemsize == 2 and weight.device.type == "cpu":
        return F.embedding(ids, weight.float(), embedding.padding_idx).to(weight.dtype)
    return embedding(ids)


def _layer(layer, x, rotation, attend, at):
    """One layer; the last one goes on after its attention with the tokens `at` only, since the others are not needed."""
    a = layer.self_attn
    h = layer.input_layernorm(x)
    q, k, v = (p(h).unflatten(-1, (-1, a.head_dim)) for p in (a.q_proj, a.k_proj, a.v_proj))
    if hasattr(a, "q_norm"):
        q, k = a.q_norm(q), a.k_norm(k)
    mixed = attend(_rotated(q, *rotation), _rotated(k, *rotation), v, a.scaling).flatten(1)
    if at is not None:
        x, mixed = pick(x, at), pick(mixed, at)
    x = x + a.o_proj(mixed)
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + d/2}) turned by its angle. x: (M, H, d); cos, sin: (M, 1, d)."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T scale + mask) v of rows: q (R, T, H, d), k and v (R, S, H', d), mask (R, 1, T, S) in the dtype of the
    scores -> (R, T, H, d); without a mask nothing sees what follows it. In fp32 on a processor, where attention in bf16 is
    slower as well as coarser."""
    groups, dtype, exact = q.shape[2] // k.shape[2], v.dtype, q.device.type == "cpu"
    if exact:
        q, k, v = map(_wide, (q, k, v))
    shared = exact and len(q) > 1  # the kernel then reads a group's keys once; one row alone is better cut by its query heads
    if groups > 1 and not shared:
        k, v = (t[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with torch.autocast(q.device.type, enabled=not exact and torch.is_autocast_enabled(q.device.type)):
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared)
    return mixed.transpose(1, 2).to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attending(tokens: Tokens) -> Attend:
    """Every token sees what comes before it in its own rollout, each in its row of a table."""
    read = torch.cat([t.read.flatten() for t in tokens.tables])
    where = torch.empty_like(tokens.ids)  # of each token, among the queries of all tables
    where[torch.cat([t.queries.flatten() for t in tokens.tables])[read]] = read.nonzero().squeeze(1)

    @cache  # all layers share them, and keep them for the backward
    def masks(dtype):
        return [None if t.mask is None else t.mask.to(dtype) for t in tokens.tables]

    def attend(q, k, v, scale):
        def rows(x, places):
            return pick(x, places.flatten()).unflatten(0, places.shape)

        dtype, device = v.dtype, q.device.type
        if device == "cpu":  # before the rows are picked, so that the gradients of a key's copies add up in fp32
            q, k, v = map(_wide, (q, k, v))
        scores = torch.get_autocast_dtype(device) if device != "cpu" and torch.is_autocast_enabled(device) else q.dtype
        out = [attention(rows(q, t.queries), rows(k, t.keys), rows(v, t.keys), scale, mask).flatten(0, 1)
               for t, mask in zip(tokens.tables, masks(scores))]
        return pick(torch.cat(out), where).to(dtype)

    return attend
