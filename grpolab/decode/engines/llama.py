"""Llama-shaped models read straight from their parameters: prefill, and the step that reads and extends keys and values.

Shapes: n rows, W new tokens a row, T cached positions, L layers, H key/value heads, g queries a
key/value head, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from grpolab.decode.cache import PAGE, Pages, SlotCache, round_up
from grpolab.decode.engines import attention
from grpolab.decode.engines.attention import EXACT, matmul_attention
from grpolab.models.load import attention_of, steady_context
from grpolab.models.lora import effective_weight

# --- weights laid out for few rows ------------------------------------------------------------------------------------


class PackedLinear:
    """y = (x * scale) W^T + b for stacked weights, copied from the live parameters by `refresh`.

    norm   the norm before it, whose weight is the scale, or None; order: a permutation of the output rows, or None.
    layout makes the product (x, b) -> x W^T + b out of W: `onednn`, or `compiled.Strips`; None of it is F.linear. Without a
    layout there is no copy, and the modules themselves are called.
    """

    def __init__(self, modules: list[nn.Linear], layout: Callable | None, norm: nn.Module | None = None, order=None):
        self.modules, self.layout, self.norm, self.order = modules, layout, norm, order
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        if self.layout is None:
            return
        weights, biases = [effective_weight(m) for m in self.modules], [m.bias for m in self.modules]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        if self.order is not None:
            weight, bias = weight[self.order], None if bias is None else bias[self.order]
        if self.norm is not None:
            weight = weight * self.norm.weight
        self.bias, self.packed = bias, self.layout(weight)
        self.weight = weight if self.packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout is None:
            x = x if self.norm is None else x * self.norm.weight
            y = torch.cat([m(x) for m in self.modules], -1) if len(self.modules) > 1 else self.modules[0](x)
            return y if self.order is None else y[:, self.order]
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x, self.bias)


def weighted_sums(table: torch.Tensor, members: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For each bag the sum of its table rows times their weights: `members` lists rows, `bags` where each begins in it."""
    return torch.embedding_bag(table, members, bags, False, 0, False, weights)[0]


def private_operations():
    """Torch has no public product that takes a bias and keeps oneDNN's layout. Where these fail, `F.linear` serves."""
    return torch.ops.mkldnn


def onednn(weight: torch.Tensor) -> Callable | None:
    """The product (x, b) -> x W^T + b on weights in oneDNN's blocked layout, or None where torch has no such product here. MKL
    is weak at few rows on some machines, and oneDNN gives a row the same bits at every row count."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        operations = private_operations()
        product, packed = operations._linear_pointwise, operations._reorder_linear_weight(weight.contiguous(), 64)
        product(weight.new_zeros(2, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return lambda x, bias: product(x, packed, bias, "none", [], "")


# --- the engine -------------------------------------------------------------------------------------------------------


class LlamaEngine:
    """Llama-shaped models (RMSNorm, rotary positions, grouped queries, gated MLP) read straight from their parameters.

    Fused QKV and gate/up products. A step reads pages on a processor with AVX (`_paged`), else slots whose keys are stored
    transposed, (L, slots, H, D, T), so that the scores are one batched product over contiguous time. In fp32 norm weights
    are folded into the products and the two halves of a head are interleaved, so that a rotation is one complex product.
    In bf16 and fp16 slots round as transformers does, in the same order, which is what makes exact mode possible.
    One row is computed as two, since alone it takes kernels with other last bits.
    """

    name, verified, layout = "llama", False, staticmethod(onednn)

    def __init__(self, model):
        self.model, config, base = model, model.config, model.model
        self.context = steady_context(config)
        weight = base.embed_tokens.weight
        self.dtype, self.device, self.vocab = weight.dtype, weight.device, weight.shape[0]
        self.min_rows = 2
        self.layers, self.fp32 = list(base.layers), weight.dtype == torch.float32
        self.heads = config.num_key_value_heads
        self.size = self.layers[0].self_attn.head_dim
        self.groups = config.num_attention_heads // self.heads
        self.eps = torch.tensor(base.norm.variance_epsilon, device=self.device)
        self.scaling = self.layers[0].self_attn.scaling
        self.normed = hasattr(self.layers[0].self_attn, "q_norm")
        self.act = F.silu if config.hidden_act in ("silu", "swish") else self.layers[0].mlp.act_fn
        self.halves = torch.arange(self.size, device=self.device).view(2, -1).t().reshape(-1)  # interleaves them
        self.shape = len(self.layers), self.heads, self.size
        self.table = None
        # where a weighted sum of table rows is a kernel of its own; exact mode has the kernels of the trainer instead
        summing = self.device.type == "cpu" and "AVX" in torch.backends.cpu.get_cpu_capability()
        self.paged = summing and attention_of(model) != EXACT
        self.layer_products = [self._layer_products(layer) for layer in self.layers]
        self.head = self._product([model.lm_head], base.norm)

    def _product(self, modules, norm=None, order=None) -> PackedLinear:
        return PackedLinear(modules, self.layout, norm if self.fp32 else None, order)

    def _layer_products(self, layer) -> list[PackedLinear]:
        a, m = layer.self_attn, layer.mlp
        return [self._product([a.q_proj, a.k_proj, a.v_proj], layer.input_layernorm, self._qkv_order()),
                self._product([a.o_proj]),
                self._product([m.gate_proj, m.up_proj], layer.post_attention_layernorm, self._gate_up_order()),
                self._product([m.down_proj])]

    def _qkv_order(self) -> torch.Tensor:
        """Rows of the stacked q, k, v weights so that each key/value head has its g queries, its key and its value."""
        heads, groups, size = self.heads, self.groups, self.size
        rows = torch.arange(heads * (groups + 2) * size, device=self.device).view(-1, size)
        turned = rows[:, self.halves] if self.fp32 else rows
        q, k = turned[: heads * groups].view(heads, groups, size), turned[heads * groups: heads * (groups + 1), None]
        return torch.cat((q, k, rows[heads * (groups + 1):, None]), 1).view(-1)

    def _gate_up_order(self) -> torch.Tensor | None:
        """Rows of the stacked gate and up weights, where they are not one after the other."""

    def _gate_and_up(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return y.chunk(2, -1)

    def products(self) -> list[PackedLinear]:
        return [*(product for layer in self.layer_products for product in layer), self.head]

    def refresh(self) -> None:
        """Read the parameters anew into the packed copies."""
        for product in self.products():
            product.refresh()
        self.table = None

    def rows(self, n: int) -> int:
        """How many rows a step of n rows is computed with."""
        return max(n, self.min_rows)

    def bytes_per_token(self) -> int:
        return 2 * len(self.layers) * self.heads * self.size * self.dtype.itemsize

    def allocate(self, slots: int, width: int) -> SlotCache:
        shape, make = (len(self.layers), slots, self.heads), dict(dtype=self.dtype, device=self.device)
        keys, values = torch.zeros(*shape, self.size, width, **make), torch.zeros(*shape, width, self.size, **make)
        return SlotCache([keys, values], [-1, -2])

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, start: torch.Tensor, last: torch.Tensor | None, cache: SlotCache | Pages,
                window: int) -> torch.Tensor:
        """Feed tokens (n, W) at positions start (n,) .. start + W - 1 into slots 0..n-1; extend their keys and values.

        Queries see the cached positions up to their own; `window` is at least max(start) + W. What columns past `last`
        write is padding, masked until real tokens overwrite it. Returns fp32 logits (n, V) after column `last` (n,).
        """
        n, width = tokens.shape
        positions = start[:, None]
        if width > 1:
            positions = positions + torch.arange(width, device=self.device)
        rotation = [t.index_select(0, positions.reshape(-1)) for t in self._rotations(window)]
        bias = attention.mask_bias(positions, window, self.dtype)
        attend = self._paged(cache, start, bias) if isinstance(cache, Pages) else self._slotted(cache, positions, bias)
        x = F.embedding(tokens.reshape(-1), self.model.model.embed_tokens.weight)
        for i, (layer, (qkv, out, gate_up, down)) in enumerate(zip(self.layers, self.layer_products)):
            h = qkv(self._norm(x, layer.input_layernorm)).view(n * width, self.heads, self.groups + 2, self.size)
            if self.normed:
                self._norm_heads(h, layer.self_attn)
            self._rotate(h, rotation)
            x.add_(out(attend(i, h)))
            gate, up = self._gate_and_up(gate_up(self._norm(x, layer.post_attention_layernorm)))
            x.add_(down(self.act(gate).mul_(up)))
        if width > 1:
            x = x.view(n, width, -1)[torch.arange(n, device=self.device), last]
        if n < self.min_rows:
            x = x.expand(self.min_rows, -1).contiguous()
        return self.head(self._norm(x, self.model.model.norm))[:n].float()

    def _slotted(self, cache: SlotCache, positions: torch.Tensor, bias: torch.Tensor):
        """The attention of layer i over slots 0..n-1, after writing its keys and values: h (n*W, H, g + 2, D) of queries,
        key and value to (n*W, q_heads*D)."""
        (n, width), window, heads = positions.shape, bias.shape[-1], self.heads
        if width == 1:
            bias = bias.expand(n, heads, window).reshape(n * heads, 1, window)
        row_heads, views = self._views(cache, n, window)
        write_at = row_heads, positions[:, None].expand(n, heads, width).reshape(n * heads, width)

        def attend(i: int, h: torch.Tensor) -> torch.Tensor:
            keys, values, all_keys, all_values = views[i]
            q, k, v = self._by_head(h, n, width)
            all_keys.index_put_(write_at, k)
            all_values.index_put_(write_at, v)
            return self._attend(q, keys, values, bias, n, width)

        return attend

    def _paged(self, pages: Pages, start: torch.Tensor, bias: torch.Tensor):
        """As `_slotted` for one new token a row, on pages, as weighted sums of table rows: a page's scores are the rows of
        its transposed keys weighted by a query, the result is the rows of values weighted by the softmax. A small matrix
        product for each row and head is mostly call, and reads a shared prompt once for each sample."""
        n, _, window = bias.shape
        at, blocks = pages.locate(start), window // PAGE
        key_rows, key_bags, value_rows, value_bags = pages.reading(n, blocks, self.groups)

        def attend(i: int, h: torch.Tensor) -> torch.Tensor:
            all_keys, key_table, all_values, value_table = pages.layers[i]
            all_keys.index_put_(at, h[:, :, -2])
            all_values.index_put_(at, h[:, :, -1])
            q = h[:, :, :-2, None].expand(-1, -1, -1, blocks, -1).reshape(-1)
            scores = weighted_sums(key_table, key_rows, key_bags, q).view(n, -1, window)
            if self.fp32:
                weights = torch.add(bias, scores, alpha=self.scaling).softmax(-1)
            else:
                weights = scores.mul_(self.scaling).add_(bias).softmax(-1, dtype=torch.float32).to(self.dtype)
            return weighted_sums(value_table, value_rows, value_bags, weights.view(-1)).view(n, -1)

        return attend

    def _views(self, cache: SlotCache, n: int, window: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
        """0..n*H-1 as a column, and for each layer keys (n*H, D, T) and values (n*H, T, D) to read, and all of them by
        (slot*H, time) to write."""
        if cache.views is None or cache.views[0] != (n, window):
            rows, layers = n * self.heads, []
            for k, v in zip(*(t.flatten(1, 2) for t in cache.tensors)):
                layers.append((k[:rows, :, :window], v[:rows, :window], k.transpose(1, 2), v))
            cache.views = (n, window), torch.arange(rows, device=self.device)[:, None], layers
        return cache.views[1:]

    def _norm(self, x: torch.Tensor, module) -> torch.Tensor:
        """RMSNorm; in fp32 without the weight, which the next product carries."""
        if self.fp32:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x * torch.addcmul(self.eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        wide = x.float()
        wide.mul_(wide.pow(2).mean(-1, keepdim=True).add_(module.variance_epsilon).rsqrt_())
        return wide.to(x.dtype).mul_(module.weight)

    def _norm_heads(self, h: torch.Tensor, attention) -> None:
        """Qwen3's norms over each query and key of h (m, H, g + 2, D), in place."""
        queries, keys = h[:, :, : self.groups], h[:, :, self.groups]
        for part, module in ((queries, attention.q_norm), (keys, attention.k_norm)):
            normed = self._norm(part, module)
            part.copy_(normed * module.weight[self.halves] if self.fp32 else normed)

    def _rotations(self, width: int) -> tuple[torch.Tensor, ...]:
        """fp32: cos + i sin, (T, 1, 1, D/2). Else cos and sin with rotate_half's sign folded in, each (T, 1, 1, D)."""
        if self.table is None or self.table[0].shape[0] < width:
            self.table = self._table(round_up(width, 256))
        return self.table

    def _table(self, width: int) -> tuple[torch.Tensor, ...]:
        positions, half = torch.arange(width, device=self.device)[None], self.size // 2
        rotary = self.model.model.rotary_emb
        cos, sin = (t[0, :, None, None] for t in rotary(torch.empty(0, dtype=self.dtype, device=self.device), positions))
        if self.fp32:
            return (torch.complex(cos[..., :half], sin[..., :half]),)
        return cos.contiguous(), torch.cat((-sin[..., :half], sin[..., half:]), -1)

    def _rotate(self, h: torch.Tensor, rotation) -> None:
        """Turn the queries and keys of h (m, H, g + 2, D) by their positions, in place."""
        if self.fp32:
            torch.view_as_complex(h.view(*h.shape[:3], -1, 2))[:, :, :-1].mul_(rotation[0])
        else:
            (cos, sin), turned = rotation, h[:, :, :-1]
            across = turned.roll(self.size // 2, -1).mul_(sin)
            turned.mul_(cos).add_(across)

    def _by_head(self, h: torch.Tensor, n: int, width: int) -> tuple[torch.Tensor, ...]:
        """h (n*W, H, g + 2, D) -> queries, which a step keeps as (n*H, g, D), else (n, H, g, W, D); k, v (n*H, W, D)."""
        if width == 1:
            h = h.flatten(0, 1)
            return h[:, :-2], h[:, -2:-1], h[:, -1:]
        h = h.view(n, width, self.heads, self.groups + 2, self.size).permute(0, 2, 3, 1, 4)
        return h[:, :, :-2], h[:, :, -2].flatten(0, 1), h[:, :, -1].flatten(0, 1)

    def _attend(self, q, keys, values, bias, n: int, width: int) -> torch.Tensor:
        """Queries of `_by_head`, keys (n*H, D, T), values (n*H, T, D) -> (n*W, q_heads*D)."""
        if width > 1:
            q, keys, values = q.flatten(1, 2), keys.unflatten(0, (n, -1)), values.unflatten(0, (n, -1))
            return matmul_attention(q, keys, values, bias[:, None], self.scaling).transpose(1, 2).reshape(n * width, -1)
        if self.fp32:
            weights = torch.baddbmm(bias, q, keys, alpha=self.scaling).softmax(-1)
        else:
            weights = torch.bmm(q, keys).mul_(self.scaling).add_(bias).softmax(-1, dtype=torch.float32).to(self.dtype)
        return torch.bmm(weights, values).view(n, -1)


class UnpackedEngine(LlamaEngine):
    """The same without copies of the weights: the projections themselves are called, which takes more time, and no memory
    beside the parameters."""

    layout = None
