"""The decoder of Llama-shaped models for training: tokens without rows, (M, D), and attention apart from the rest.

It calls the model's own modules in the order of its own forward. Shapes: M tokens, D hidden size, H heads, H' of keys and
values, g = H / H', d head size; R rows of T queries and S keys in a table (`layout.Table`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from grpolab.models.load import attention_of, llama_obstacle
from grpolab.train.layout import Table, Tokens

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


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q k^T scale) v of rows, where nothing sees what follows it: q (R, T, H, d), k and v (R, T, H', d) ->
    (R, T, H, d). In fp32 on a processor, where attention in bf16 is slower as well as coarser."""
    groups, dtype, exact = q.shape[2] // k.shape[2], v.dtype, q.device.type == "cpu"
    if exact:
        q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
    shared = exact and len(q) > 1  # the kernel then reads a group's keys once; one row alone is better cut by its query heads
    if groups > 1 and not shared:
        k, v = (t[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with torch.autocast(q.device.type, enabled=not exact and torch.is_autocast_enabled(q.device.type)):
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
    return mixed.transpose(1, 2).to(dtype)


def partial_attention(q: Tensor, k: Tensor, v: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """What the queries of a table find among those keys that they look at in it: softmax(q k^T) v (R, T, H, d), and
    log sum exp(q k^T) (R, T, H), by which it is added to what they find elsewhere. q (R, T, H, d), k and v (R, S, H', d);
    in fp32 or wider."""
    k, v = (t.transpose(1, 2).contiguous() for t in (k, v))
    q = q.unflatten(2, (k.shape[1], -1)).transpose(1, 2).contiguous()
    mixed, lse = _PartialAttention.apply(q, k, v, table)
    return mixed.transpose(1, 2).flatten(2, 3), lse.transpose(1, 2).flatten(2)


class _PartialAttention(torch.autograd.Function):
    """With P = exp(q k^T - lse): dS = P (dO v^T - sum(dO O) + dlse), as in FlashAttention (arXiv 2205.14135, appendix B.2),
    where lse had no gradient. q (R, H', T, g, d), k and v (R, H', S, d). The scores are made again in the backward."""

    @staticmethod
    def forward(ctx, q, k, v, table):
        mixed, lse = torch.empty_like(q), q.new_empty(*q.shape[:-1], 1)
        with torch.autocast(q.device.type, enabled=False):
            for r, t, n, hidden in table.blocks:
                scores = _scores(q[r, :, t], k[r, :, :n], hidden)
                top = scores.amax(-1, keepdim=True)
                total = scores.sub_(top).exp_().sum(-1, keepdim=True)
                shape = q[r, :, t].shape
                mixed[r, :, t] = (scores @ v[r, :, :n]).div_(total).view(shape)
                lse[r, :, t] = (top + total.log()).view(*shape[:-1], 1)
        ctx.save_for_backward(q, k, v, mixed, lse)
        ctx.table = table
        return mixed, lse.squeeze(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_lse):
        q, k, v, mixed, lse = ctx.saved_tensors
        shift = grad_lse[..., None] - (grad * mixed).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with torch.autocast(q.device.type, enabled=False):
            for r, t, n, hidden in ctx.table.blocks:
                p = _scores(q[r, :, t], k[r, :, :n], hidden)
                p = p.sub_(lse[r, :, t].flatten(2, 3)).exp_()
                g = grad[r, :, t].flatten(2, 3)
                ds = (g @ v[r, :, :n].mT).add_(shift[r, :, t].flatten(2, 3)).mul_(p)
                grad_q[r, :, t] = (ds @ k[r, :, :n]).view(q[r, :, t].shape)
                grad_k[r, :, :n] += ds.mT @ q[r, :, t].flatten(2, 3)
                grad_v[r, :, :n] += p.mT @ g
        return grad_q, grad_k, grad_v, None


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """q k^T: q (r, H', t, g, d), k (r, H', n, d) -> (r, H', t g, n); -inf where `hidden` (r, 1, t, 1, n)."""
    scores = q.flatten(2, 3) @ k.mT
    if hidden is not None:
        scores.view(*q.shape[:-1], -1).masked_fill_(hidden, -torch.inf)
    return scores


def attending(tokens: Tokens) -> Attend:
    """Every token sees what comes before it in its own rollout. What follows a shared beginning attends to that and to the rest
    apart; the two are weighed by the exponentials of their scores, so that no key of a beginning is copied."""

    def places(tables):
        """Where the results of the tables stand one after another, and the tokens that they are of."""
        none = torch.empty(0, dtype=torch.long, device=tokens.ids.device)
        seen, queries = (torch.cat([none, *(x.flatten() for x in of)]) for of in ([t.seen for t in tables],
                                                                                  [t.queries for t in tables]))
        real = seen.nonzero().squeeze(1)
        return real, queries[real], len(seen)

    (at, which, alone), (at_beginning, which_beginning, _), (at_rest, which_rest, _) = map(
        places, (tokens.alone, tokens.beginnings, tokens.completions))
    where = torch.empty_like(tokens.ids)
    where[which_beginning] = at_beginning
    at_beginning = where[which_rest]
    where[which], where[which_rest] = at, torch.arange(alone, alone + len(which_rest), device=where.device)

    def attend(q, k, v, scale):
        def rows(x, table):
            return pick(x, table.flatten()).unflatten(0, table.shape)

        def found(tables, at):
            parts = [partial_attention(rows(wide_q, t.queries), rows(wide_k, t.keys), rows(wide_v, t.keys), t) for t in tables]
            return (pick(torch.cat([x.flatten(0, 1) for x in of]), at) for of in zip(*parts))

        out = [attention(*(rows(x, t.keys) for x in (q, k, v)), scale).flatten(0, 1) for t in tokens.alone]
        if tokens.completions:
            wide_q, wide_k, wide_v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
            wide_q = wide_q * scale
            (a, lse_a), (b, lse_b) = found(tokens.beginnings, at_beginning), found(tokens.completions, at_rest)
            out.append(torch.lerp(b, a, (lse_a - lse_b).sigmoid()[..., None]).to(v.dtype))
        return pick(torch.cat(out), where)

    return attend
