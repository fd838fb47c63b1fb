"""The attention that sampler and trainer share in exact mode, and the mask of a cached step."""

from __future__ import annotations

import weakref

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from grpolab.models.load import attention_of

EXACT = "grpolab_exact"  # the attention implementation that sampler and trainer share in exact mode
_replaced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> the attention that it had before exact mode


def mask_bias(positions: torch.Tensor, window: int, dtype: torch.dtype, span: int | None = None) -> torch.Tensor:
    """0 where the query at `positions` (n, W) sees the cached position, else -inf: (n, W, T).

    Causal, and no more than `span` positions back (itself included) in a sliding window.
    """
    behind = positions[:, :, None] - torch.arange(window, device=positions.device)
    hidden = behind < 0 if span is None else (behind < 0) | (behind >= span)
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


def matmul_attention(q, keys, values, bias, scaling: float) -> torch.Tensor:
    """q (n, q_heads, W, D), keys transposed (n, H, D, T), values (n, H, T, D), bias (n or 1, 1, W, T) -> as q.

    Plain batched products with the softmax in fp32, rounded like the eager attention of transformers.
    """
    n, q_heads, width, size = q.shape
    heads, window = keys.shape[1], keys.shape[3]
    q = q.reshape(n * heads, q_heads // heads * width, size)
    scores = torch.bmm(q, keys.reshape(n * heads, size, window)) * scaling
    scores = scores.view(n, q_heads, width, window) + bias
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype).view(n * heads, -1, window)
    return torch.bmm(weights, values.reshape(n * heads, window, size)).view(n, q_heads, width, size)


def _exact_attention(module, query, key, value, attention_mask, scaling=None, dropout: float = 0.0, **_):
    """`matmul_attention` behind the interface of transformers: query (n, q_heads, W, D), key and value (n, H, T, D)."""
    if dropout:
        raise ValueError(f"exact mode has no attention dropout, got {dropout}: set config.attention_dropout to 0")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling  # as every attention of transformers reads None
    out = matmul_attention(query, key.transpose(2, 3).contiguous(), value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def share_attention(model) -> None:
    """Let the model's own forward, and so the trainer's, use the attention of the llama engine (exact mode)."""
    if attention_of(model) != EXACT:
        _replaced[model] = attention_of(model)
    AttentionInterface.register(EXACT, _exact_attention)
    AttentionMaskInterface.register(EXACT, eager_mask)
    model.set_attn_implementation(EXACT)


def restore_attention(model) -> None:
    """Undo `share_attention`; torch's own where the model had none that transformers names."""
    if attention_of(model) == EXACT and model in _replaced:
        name = _replaced.pop(model)
        model.set_attn_implementation(name) if name else set_common(model)


def set_common(model) -> None:
    """Give the model the attention of torch, or where it has none, the one that every model of transformers has."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # it does not support it
        model.set_attn_implementation("eager")
