"""The forward passes of the sampler: prefill, and the step that reads and extends keys and values.

An engine is model arithmetic alone; where rows keep theirs is the business of `slots.py`. `GeneralEngine` drives any
causal LM of transformers through its own forward; `LlamaEngine` reads the parameters of Llama-shaped models straight.
Shapes: n rows, W new tokens a row, T cached positions, L layers, H key/value heads, g queries a
key/value head, D head size, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import statistics
from collections.abc import Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import eager_mask

from grpolab.slots import PAGE, Pages, Prefilled, SlotCache, places_for, round_up

log = logging.getLogger(__name__)

EXACT = "grpolab_exact"  # the attention implementation that sampler and trainer share in exact mode
SMALL = 2**17  # weights with fewer entries than this are read faster than a packed product is called
STRIP_BYTES = 128  # of a row of weights laid out in strips


def mask_bias(positions: torch.Tensor, window: int, dtype: torch.dtype, span: int | None = None) -> torch.Tensor:
    """0 where the query at `positions` (n, W) sees the cached position, else -inf: (n, W, T).

    Causal, and no more than `span` positions back (itself included) in a sliding window.
    """
    behind = positions[:, :, None] - torch.arange(window, device=positions.device)
    hidden = behind < 0 if span is None else (behind < 0) | (behind >= span)
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


# --- any causal LM ----------------------------------------------------------------------------------------------------


class _Layer(DynamicLayer):
    """One layer's slots as transformers sees them: `update` writes each row at its own position."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor, window: int):
        super().__init__()
        self.slots_k, self.slots_v, self.start, self.window = keys, values, start, window
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        n, width = key_states.shape[0], key_states.shape[2]
        rows = torch.arange(n, device=key_states.device)[:, None]
        positions = self.start[:, None] + torch.arange(width, device=key_states.device)
        self.slots_k.transpose(1, 2)[rows, positions] = key_states.transpose(1, 2)
        self.slots_v.transpose(1, 2)[rows, positions] = value_states.transpose(1, 2)
        return self.slots_k[:n, :, : self.window], self.slots_v[:n, :, : self.window]

    def get_seq_length(self) -> int:
        return self.window


class GeneralEngine:
    """Any causal LM of transformers through its own forward: our cache, explicit positions and a 4-D mask.

    Sliding-window layers keep all their keys and mask those that they no longer see. ValueError for a model that does
    not keep plain keys and values.
    """

    name, min_rows = "general", 1

    def __init__(self, model, single: bool = False):
        self.model, config = model, model.config
        weight = model.get_input_embeddings().weight
        self.dtype, self.device, self.vocab = weight.dtype, weight.device, weight.shape[0]
        takes = inspect.signature(model.forward).parameters
        missing = [name for name in ("position_ids", "past_key_values", "attention_mask") if name not in takes]
        if missing or config.is_encoder_decoder:
            raise ValueError(self._refusal(f"its forward does not take {', '.join(missing) or 'decoder tokens alone'}"))
        if config._attn_implementation not in ("eager", "sdpa", EXACT):
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        self.extra = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.shapes = self._layer_shapes()
        kinds = list(getattr(config, "layer_types", None) or [])
        sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self.sliding = sliding
        self.kinds = sorted(set(kinds)) or ["sliding_attention" if sliding else "full_attention"]
        unknown = set(self.kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(self._refusal(f"its attention is of the kind {sorted(unknown)}"))

    def _refusal(self, why: str) -> str:
        return (f"{type(self.model).__name__} cannot be sampled with a cache of keys and values: {why}. "
                "Use a decoder-only model with full or sliding-window attention")

    @torch.no_grad()
    def _layer_shapes(self) -> list[tuple[int, int, int]]:
        """(heads, key size, value size) of every layer that caches, seen on a forward over two tokens."""
        ids, cache = torch.zeros(1, 2, dtype=torch.long, device=self.device), DynamicCache(config=self.model.config)
        with _evaluating(self.model):
            out = self.model(ids, past_key_values=cache, use_cache=True)
        layers = getattr(getattr(out, "past_key_values", None), "layers", [])
        plain = [isinstance(layer, DynamicLayer) and getattr(layer, "keys", None) is not None for layer in layers]
        if not layers or not all(plain):
            raise ValueError(self._refusal("some layers keep another kind of state"))
        return [(la.keys.shape[1], la.keys.shape[3], la.values.shape[3]) for la in layers]

    def refresh(self) -> None:
        """Nothing is copied: the module reads its own parameters."""

    def bytes_per_token(self) -> int:
        return sum(h * (k + v) for h, k, v in self.shapes) * self.dtype.itemsize

    def allocate(self, slots: int, width: int) -> SlotCache:
        make = dict(dtype=self.dtype, device=self.device)
        tensors = [torch.zeros(slots, h, width, size, **make) for h, k, v in self.shapes for size in (k, v)]
        return SlotCache(tensors, [-2] * len(tensors))

    def forward(self, tokens: torch.Tensor, start: torch.Tensor, last: torch.Tensor | None, cache: SlotCache,
                window: int) -> torch.Tensor:
        """As `LlamaEngine.forward`. Of a prompt the last token is fed once more, alone: its column differs by row."""
        with _evaluating(self.model):
            logits = self._run(tokens, start, cache, window)
            if tokens.shape[1] > 1:
                rows = torch.arange(len(tokens), device=self.device)
                logits = self._run(tokens[rows, last][:, None], start + last, cache, window)
        return logits[:, -1].float()

    def _run(self, tokens, start, cache, window):
        positions = start[:, None] + torch.arange(tokens.shape[1], device=self.device)
        spans = {"full_attention": None, "sliding_attention": self.sliding}
        masks = {kind: mask_bias(positions, window, self.dtype, spans[kind])[:, None] for kind in self.kinds}
        keys, values = cache.tensors[::2], cache.tensors[1::2]
        layers = [_Layer(k, v, start, window) for k, v in zip(keys, values)]
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return self.model(tokens, attention_mask=mask, position_ids=positions, past_key_values=Cache(layers=layers),
                          use_cache=True, **self.extra).logits


@contextmanager
def _evaluating(model):
    """Eval mode for the while: a trainer may have left dropout on."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


# --- Llama-shaped models ----------------------------------------------------------------------------------------------


class PackedLinear:
    """y = (x * scale) W^T + b for stacked weights, copied from the live parameters by `refresh`.

    norm   the norm before it, whose weight is the scale, or None; order: a permutation of the output rows, or None.
    layout None: as it is. "onednn": oneDNN's blocked layout; MKL is weak at few rows on some machines, and oneDNN gives
    a row the same bits at every row count. "strips": for one row at a time, see `Strips`.
    """

    def __init__(self, modules: list[nn.Linear], layout: str | None, norm: nn.Module | None = None, order=None):
        self.modules, self.layout, self.norm, self.order = modules, layout, norm, order
        self.weight = self.bias = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        weights, biases = [m.weight.detach() for m in self.modules], [m.bias for m in self.modules]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        if self.order is not None:
            weight, bias = weight[self.order], None if bias is None else bias[self.order]
        if self.norm is not None:
            weight = weight * self.norm.weight
        self.bias, self.packed = _renewed(self.bias, bias), None
        if self.layout is not None:
            self.packed = Strips(weight) if self.layout == "strips" else _pack(weight)
        self.weight = _renewed(self.weight, weight) if self.packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        if self.layout == "strips":
            y = self.packed(x)
            return y if self.bias is None else y.add_(self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Strips:
    """W (o, i) as o/s strips (i, s) of two cache lines a row, for products that wait for memory: one row x takes y, strip
    by strip, as the sum of the strip's rows weighted by x, which reads memory faster than a matrix product of one row."""

    def __init__(self, weight: torch.Tensor):
        outputs, self.inputs = weight.shape
        self.width = STRIP_BYTES // weight.element_size()
        self.strips = outputs // self.width
        self.table = weight.view(self.strips, self.width, -1).transpose(1, 2).reshape(-1, self.width)
        self.members = torch.arange(len(self.table), dtype=torch.int32)
        self.bags = self.members[:: self.inputs].clone()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            weights = x.expand(self.strips, self.inputs).reshape(-1)
            return weighted_sums(self.table, self.members, self.bags, weights).view(1, -1)
        return (x @ self.table.view(self.strips, self.inputs, -1)).transpose(0, 1).reshape(len(x), -1)


def weighted_sums(table: torch.Tensor, members: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For each bag the sum of its table rows times their weights: `members` lists rows, `bags` where each begins in it."""
    return torch.embedding_bag(table, members, bags, False, 0, False, weights)[0]


def _renewed(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    """`new`, on a GPU at the address of `old`: captured graphs read there."""
    if old is None or new is None or old.device.type != "cuda" or old.data_ptr() == new.data_ptr():
        return new
    return old.copy_(new)


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
    except (AttributeError, RuntimeError):  # a private op: absent or refused in another torch, then F.linear serves
        return None


def llama_obstacle(model) -> str | None:
    """Why `LlamaEngine` cannot read this model, or None where it can."""
    config = model.config
    if config.model_type not in ("llama", "qwen2", "qwen3", "mistral"):
        return f"model type {config.model_type!r} is not one that the llama engine knows"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (config.model_type == "mistral" and config.sliding_window):
        return "it has sliding-window layers"
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in ("default", "linear", "llama3", "yarn"):
        return f"its rotary positions of type {rope!r} change with the length"
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        for linear in (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj):
            if type(linear) is not nn.Linear:
                return f"a projection is a {type(linear).__name__}, not a plain Linear"
    if len({(p.dtype, p.device) for p in model.parameters()}) != 1:
        return "its parameters differ in dtype or device"
    return None


class LlamaEngine:
    """Llama-shaped models (RMSNorm, rotary positions, grouped queries, gated MLP) read straight from their parameters.

    Fused QKV and gate/up products. A step reads pages on a processor with AVX (`_paged`), else slots whose keys are stored
    transposed, (L, slots, H, D, T), so that the scores are one batched product over contiguous time. In fp32 norm weights
    are folded into the products and the two halves of a head are interleaved, so that a rotation is one complex product.
    In bf16 and fp16 slots round as transformers does, in the same order, which is what makes exact mode possible.
    `single`: a batch of one row, for which calls matter more than throughput; otherwise one row is computed as two, since
    alone it takes kernels with other last bits.
    """

    name = "llama"

    def __init__(self, model, single: bool = False):
        self.model, config, base = model, model.config, model.model
        weight = base.embed_tokens.weight
        self.dtype, self.device, self.vocab = weight.dtype, weight.device, weight.shape[0]
        self.min_rows = 1 if single else 2
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
        self.table, self._single = None, single
        # where a weighted sum of table rows is a kernel of its own; exact mode has the kernels of the trainer instead
        summing = self.device.type == "cpu" and "AVX" in torch.backends.cpu.get_cpu_capability()
        self.summing = summing and config._attn_implementation != EXACT
        self.paged = self.summing and not (single and self.fp32)
        self.products = [self._layer_products(layer) for layer in self.layers]
        self.head = self._product([model.lm_head], base.norm)

    def _product(self, modules, norm=None, order=None) -> PackedLinear:
        outputs, strip = sum(m.out_features for m in modules), STRIP_BYTES // self.dtype.itemsize
        if not self._single:
            layout = "onednn"
        elif modules[0].weight.numel() < SMALL:
            layout = None
        else:
            layout = "strips" if self.summing and outputs % strip == 0 else "onednn"
        return PackedLinear(modules, layout, norm if self.fp32 else None, order)

    def _layer_products(self, layer) -> list[PackedLinear]:
        a, m = layer.self_attn, layer.mlp
        return [self._product([a.q_proj, a.k_proj, a.v_proj], layer.input_layernorm, self._qkv_order()),
                self._product([a.o_proj]),
                self._product([m.gate_proj, m.up_proj], layer.post_attention_layernorm), self._product([m.down_proj])]

    def _qkv_order(self) -> torch.Tensor:
        """Rows of the stacked q, k, v weights so that each key/value head has its g queries, its key and its value."""
        heads, groups, size = self.heads, self.groups, self.size
        rows = torch.arange(heads * (groups + 2) * size, device=self.device).view(-1, size)
        turned = rows[:, self.halves] if self.fp32 else rows
        q, k = turned[: heads * groups].view(heads, groups, size), turned[heads * groups: heads * (groups + 1), None]
        return torch.cat((q, k, rows[heads * (groups + 1):, None]), 1).view(-1)

    def refresh(self) -> None:
        """Read the parameters anew into the packed copies."""
        for product in (*(p for layer in self.products for p in layer), self.head):
            product.refresh()

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
        bias = mask_bias(positions, window, self.dtype)
        attention = self._paged(cache, start, bias) if isinstance(cache, Pages) else self._slotted(cache, positions, bias)
        x = F.embedding(tokens.reshape(-1), self.model.model.embed_tokens.weight)
        for i, (layer, (qkv, out, gate_up, down)) in enumerate(zip(self.layers, self.products)):
            h = qkv(self._norm(x, layer.input_layernorm)).view(n * width, self.heads, self.groups + 2, self.size)
            if self.normed:
                self._norm_heads(h, layer.self_attn)
            self._rotate(h, rotation)
            x.add_(out(attention(i, h)))
            gate, up = gate_up(self._norm(x, layer.post_attention_layernorm)).chunk(2, -1)
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

        def attention(i: int, h: torch.Tensor) -> torch.Tensor:
            keys, values, all_keys, all_values = views[i]
            q, k, v = self._by_head(h, n, width)
            all_keys.index_put_(write_at, k)
            all_values.index_put_(write_at, v)
            return self._attend(q, keys, values, bias, n, width)

        return attention

    def _paged(self, pages: Pages, start: torch.Tensor, bias: torch.Tensor):
        """As `_slotted` for one new token a row, on pages, as weighted sums of table rows: a page's scores are the rows of
        its transposed keys weighted by a query, the result is the rows of values weighted by the softmax. A small matrix
        product for each row and head is mostly call, and reads a shared prompt once for each sample."""
        n, _, window = bias.shape
        at, blocks = pages.places(start), window // PAGE
        key_rows, key_bags, value_rows, value_bags = pages.reading(n, blocks, self.groups)

        def attention(i: int, h: torch.Tensor) -> torch.Tensor:
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

        return attention

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
            positions = torch.arange(round_up(width, 256), device=self.device)[None]
            rotary = self.model.model.rotary_emb
            cos, sin = (t[0, :, None, None] for t in rotary(torch.empty(0, dtype=self.dtype, device=self.device), positions))
            half = self.size // 2
            if self.fp32:
                self.table = (torch.complex(cos[..., :half], sin[..., :half]),)
            else:
                self.table = cos.contiguous(), torch.cat((-sin[..., :half], sin[..., half:]), -1)
        return self.table

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


# --- attention that sampler and trainer share -------------------------------------------------------------------------


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
    out = matmul_attention(query, key.transpose(2, 3).contiguous(), value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def share_attention(model) -> None:
    """Let the model's own forward, and so the trainer's, use the attention of the llama engine (exact mode)."""
    AttentionInterface.register(EXACT, _exact_attention)
    AttentionMaskInterface.register(EXACT, eager_mask)
    model.set_attn_implementation(EXACT)


# --- choosing ---------------------------------------------------------------------------------------------------------


def choose_engine(model, engine: str = "auto", single: bool = False):
    """The engine for a model: "llama", "general", or "auto" (llama where the model allows it and the check passes).

    Whatever is chosen has reproduced the model's own forward (`disagreement`). ValueError where nothing does.
    """
    if engine not in ("auto", "llama", "general"):
        raise ValueError(f"engine must be 'auto', 'llama' or 'general', got {engine!r}")
    if engine != "general":
        why = llama_obstacle(model)
        if why is None:
            fast = LlamaEngine(model, single)
            why = disagreement(fast, model)
            if why is None:
                return fast
        if engine == "llama":
            raise ValueError(f"the llama engine does not fit {type(model).__name__}: {why}; use engine='auto'")
        log.warning("general engine for %s, since %s", type(model).__name__, why)
    general = GeneralEngine(model, single)
    why = disagreement(general, model)
    if why is not None:
        raise ValueError(general._refusal(f"its cached step is not its own forward ({why})"))
    return general


@torch.no_grad()
def disagreement(engine, model) -> str | None:
    """None when prompts of 3 lengths and 3 ragged steps give the logits of the model's own uncached forward.

    fp32: to 1e-4 of the largest logit. Lower precision: mean |difference of logps| within twice what the model differs
    from itself by, with its own cache or its other attention, since there is no one right order of rounding.
    """
    lengths, steps = _probe_lengths(model), 3
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, engine.vocab, (len(lengths), max(lengths) + steps), generator=generator).to(engine.device)
    with _evaluating(model):
        ours = cached_logits(engine, ids, lengths, steps)
        own = _own_logits(model, ids, lengths, steps)
    if not bool(torch.isfinite(own).all()):
        return None  # a broken policy says nothing about the engine; its rollouts report it
    worst, bound = float((ours - own).abs().max()), 1e-4 * float(own.abs().max())
    if engine.dtype == torch.float32:
        return None if worst <= bound else f"logits differ by {worst:.2e}, bound {bound:.2e}"
    with _evaluating(model):
        others = [_own_cached_logits(model, ids, lengths, steps)]
        with _other_attention(model):
            others.append(_own_logits(model, ids, lengths, steps))
    mean, *floors = (float((o.log_softmax(-1) - own.log_softmax(-1)).abs().mean()) for o in (ours, *others))
    bound = 2 * max(floors)
    return None if mean <= bound else f"logps differ by {mean:.2e} on average, bound {bound:.2e}"


def _own_logits(model, ids, lengths, steps) -> torch.Tensor:
    """The model's forward without a cache, a row at a time: logits (n, steps + 1, V) after the last positions."""
    whole = [model(row[None, : length + steps], use_cache=False).logits[0] for row, length in zip(ids, lengths)]
    return torch.stack([logits[-steps - 1:] for logits in whole]).float()


def _own_cached_logits(model, ids, lengths, steps) -> torch.Tensor:
    rows = []
    for row, length in zip(ids, lengths):
        out = model(row[None, :length], use_cache=True)
        parts = [out.logits[0, -1:]]
        for t in range(length, length + steps):
            out = model(row[None, t: t + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits[0])
        rows.append(torch.cat(parts))
    return torch.stack(rows).float()


@contextmanager
def _other_attention(model):
    """The same model with eager attention in place of sdpa, or the reverse, for the while."""
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if own == "eager" and model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def cached_logits(engine, ids: torch.Tensor, lengths: list[int], steps: int) -> torch.Tensor:
    """Logits (n, steps + 1, V) after each of the last positions: ids (n, .), prefill to lengths, then `steps` steps."""
    n, ends = len(lengths), torch.tensor(lengths, device=engine.device)
    places = places_for(engine, n)
    window = round_up(max(lengths) + steps, places.unit)
    prompts, cache = ids[:, : max(lengths)], engine.allocate(n, window)
    out = [engine.forward(prompts, torch.zeros_like(ends), ends - 1, cache, window)]
    places.enter(0, [Prefilled(cache, i, length) for i, length in enumerate(lengths)], window)
    places.fit(np.array(lengths), n, steps, window)
    for t in range(steps):
        tokens = ids.gather(1, (ends + t)[:, None])
        out.append(engine.forward(tokens, ends + t, None, places.cache, window))
    return torch.stack(out, 1)


def _probe_lengths(model) -> list[int]:
    room = min(getattr(model.config, "max_position_embeddings", 64), 64) - 3
    return [max(1, min(length, room)) for length in (13, 5, PAGE - 1)]  # the last one's steps cross into a second page


@torch.no_grad()
def seconds_a_step(engine, rows: int, numbers: Sequence[int], rounds: int = 5) -> dict[int, float]:
    """Number of torch threads -> median seconds of a step of `rows` rows; they take turns, so that drift hits all."""
    last, places = 2 * PAGE - 1, places_for(engine, rows)
    places.enter(0, [Prefilled(engine.allocate(1, 2 * PAGE), 0, last)] * rows, 2 * PAGE)
    places.fit(np.full(rows, last), rows, 1, 2 * PAGE)
    start = torch.full((rows,), last, device=engine.device)
    tokens, seconds = torch.zeros(rows, 1, dtype=torch.long, device=engine.device), {n: [] for n in numbers}
    common = torch.get_num_threads()
    for n in [*numbers] * (rounds + 1):  # the first round warms up
        torch.set_num_threads(n)
        started = perf_counter()
        engine.forward(tokens, start, None, places.cache, 2 * PAGE)
        seconds[n].append(perf_counter() - started)
    torch.set_num_threads(common)
    return {n: statistics.median(times[1:]) for n, times in seconds.items()}


@torch.no_grad()
def inexact_share(engine, model) -> float:
    """Share of logps that differ in any bit between the engine's steps and the model's right-padded forward."""
    lengths, steps = _probe_lengths(model) * 2, 3
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, engine.vocab, (len(lengths), max(lengths) + steps), generator=generator).to(engine.device)
    with _evaluating(model):
        ours = cached_logits(engine, ids, lengths, steps)
        whole = model(ids, use_cache=False).logits.float()
    own = torch.stack([row[length - 1: length + steps] for row, length in zip(whole, lengths)])
    targets = torch.stack([row[length: length + steps] for row, length in zip(ids, lengths)])[..., None]
    a, b = (t[:, :-1].gather(2, targets) - t[:, :-1].logsumexp(-1, keepdim=True) for t in (ours, own))
    return float((a != b).float().mean())
