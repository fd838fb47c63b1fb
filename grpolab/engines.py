"""The forward passes of the sampler: slots of keys and values, and the step that reads and extends them.

An engine is model arithmetic alone; who sits in which slot is the business of `sampler.py`. Shapes: n rows (row i is
slot i), W new tokens a row, T cached positions, H key/value heads, g queries a key/value head, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

WINDOW = 32  # cached positions are read in multiples of this


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass
class SlotCache:
    """Keys and values by slot. In every tensor the slot is dimension -4 and time is dimension `times[i]` (-1 or -2).

    Zero-filled on purpose: a masked key has weight 0, but 0 times a NaN left over in memory would still be NaN.
    """

    tensors: list[torch.Tensor]
    times: list[int]

    @property
    def slots(self) -> int:
        return self.tensors[0].shape[-4]

    @property
    def width(self) -> int:
        return self.tensors[0].shape[self.times[0]]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def resized(self, slots: int, width: int) -> SlotCache:
        """A cache of another size that holds what fits of this one."""
        fresh = []
        keep_slots, keep_width = min(slots, self.slots), min(width, self.width)
        for t, time in zip(self.tensors, self.times):
            shape = list(t.shape)
            shape[-4], shape[time] = slots, width
            new = t.new_zeros(shape)
            new.narrow(-4, 0, keep_slots).narrow(time, 0, keep_width).copy_(
                t.narrow(-4, 0, keep_slots).narrow(time, 0, keep_width))
            fresh.append(new)
        return SlotCache(fresh, self.times)

    def put(self, slots: torch.Tensor, source: SlotCache, rows: torch.Tensor, width: int) -> None:
        """Copy the first `width` positions of the source's rows (m,) into these slots (m,)."""
        for t, s, time in zip(self.tensors, source.tensors, self.times):
            t.narrow(time, 0, width)[..., slots, :, :, :] = s.narrow(time, 0, width)[..., rows, :, :, :]

    def take(self, slot: int, width: int) -> SlotCache:
        """A copy of one slot's first `width` positions, as a cache of one slot."""
        parts = [t.narrow(-4, slot, 1).narrow(time, 0, width).clone() for t, time in zip(self.tensors, self.times)]
        return SlotCache(parts, self.times)

    def clear(self, slot: int) -> None:
        for t in self.tensors:
            t.narrow(-4, slot, 1).zero_()


class PackedLinear:
    """y = x W^T + b over one or several stacked weights that it reads from the live parameters.

    On a CPU the weight is also kept in oneDNN's blocked layout: MKL is weak at few rows on some machines, and oneDNN gives
    a row the same bits at every row count. `refresh` copies the parameters anew.
    """

    def __init__(self, weights: list[torch.Tensor], biases: list[torch.Tensor | None]):
        self.weights, self.biases = weights, biases
        self.refresh()

    def refresh(self) -> None:
        many = len(self.weights) > 1
        weight = torch.cat([w.detach() for w in self.weights]) if many else self.weights[0].detach()
        biased = self.biases[0] is not None
        self.bias = (torch.cat([b.detach() for b in self.biases]) if many else self.biases[0].detach()) if biased else None
        self.packed = _pack(weight)
        self.weight = weight if self.packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    except (AttributeError, RuntimeError):  # a private op: absent or refused in another torch, then F.linear serves
        return None


class LlamaEngine:
    """Llama-shaped models (RMSNorm, rotary positions, grouped queries, gated MLP) read straight from their parameters.

    Fused QKV and gate/up products; keys are stored transposed, (L, slots, H, D, T), so that one step's scores are one
    batched product over contiguous time.
    """

    name = "llama"
    min_rows = 2  # one row takes other matmul kernels, and so other last bits, than two or more

    def __init__(self, model):
        self.model, config = model, model.config
        base = model.model
        self.dtype, self.device = base.embed_tokens.weight.dtype, base.embed_tokens.weight.device
        self.layers = list(base.layers)
        self.q_heads, self.heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.groups = self.q_heads // self.heads
        self.vocab = base.embed_tokens.weight.shape[0]
        self.scaling = self.layers[0].self_attn.scaling
        self.rotary, self.table = base.rotary_emb, None
        self.linears = []
        for layer in self.layers:
            a, m = layer.self_attn, layer.mlp
            stacks = ((a.q_proj, a.k_proj, a.v_proj), (a.o_proj,), (m.gate_proj, m.up_proj), (m.down_proj,))
            self.linears.append([PackedLinear([p.weight for p in s], [p.bias for p in s]) for s in stacks])
        self.head = PackedLinear([model.lm_head.weight], [model.lm_head.bias])

    def refresh(self) -> None:
        """Read the parameters anew into the packed copies."""
        for linear in (*(linear for layer in self.linears for linear in layer), self.head):
            linear.refresh()

    def allocate(self, slots: int, width: int) -> SlotCache:
        shape = (len(self.layers), slots, self.heads)
        make = dict(dtype=self.dtype, device=self.device)
        keys = torch.zeros(*shape, self.head_dim, width, **make)
        return SlotCache([keys, torch.zeros(*shape, width, self.head_dim, **make)], [-1, -2])

    def bytes_per_token(self) -> int:
        return 2 * len(self.layers) * self.heads * self.head_dim * self.dtype.itemsize

    def _rotary_table(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sign-folded sin, (T, D): rotate_half(x) * sin equals swapped halves of x times sin with its sign."""
        if self.table is None or self.table[0].shape[0] < width:
            positions = torch.arange(round_up(width, 256), device=self.device)[None]
            cos, sin = self.rotary(torch.empty(0, dtype=self.dtype, device=self.device), positions)
            sin = sin[0].clone()
            sin[:, : self.head_dim // 2].neg_()
            self.table = cos[0].contiguous(), sin
        return self.table

    def forward(self, tokens: torch.Tensor, start: torch.Tensor, last: torch.Tensor | None, cache: SlotCache,
                window: int) -> torch.Tensor:
        """Feed tokens (n, W) at positions start (n,) .. start + W - 1 into slots 0..n-1 and extend their keys and values.

        Queries see the cached positions up to their own; `window` (a multiple of WINDOW) is at least max(start) + W.
        What columns past `last` write is padding, masked until real tokens overwrite it.
        Returns fp32 logits (n, V) after column `last` (n,) of each row, or after column 0 where last is None.
        """
        n, width = tokens.shape
        cos_table, sin_table = self._rotary_table(window)
        offsets = torch.arange(width, device=self.device)
        positions = start[:, None] + offsets
        cos, sin = cos_table[positions][:, :, None], sin_table[positions][:, :, None]
        seen = torch.arange(window, device=self.device) <= positions[:, :, None]
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        bias = bias[:, None]  # (n, 1, W, T)
        rows = torch.arange(n, device=self.device)[:, None]
        keys, values = cache.tensors
        x = self.model.model.embed_tokens.weight[tokens.reshape(-1)]
        for i, layer in enumerate(self.layers):
            qkv, out, gate_up, down = self.linears[i]
            attn = layer.self_attn
            h = qkv(_rms_norm(x, layer.input_layernorm)).view(n, width, self.q_heads + 2 * self.heads, self.head_dim)
            qk, v = h[:, :, : self.q_heads + self.heads], h[:, :, self.q_heads + self.heads:]
            if hasattr(attn, "q_norm"):
                q, k = qk[:, :, : self.q_heads], qk[:, :, self.q_heads:]
                qk = torch.cat((_rms_norm(q, attn.q_norm), _rms_norm(k, attn.k_norm)), 2)
            qk = qk * cos + qk.roll(self.head_dim // 2, -1) * sin
            q, k = qk[:, :, : self.q_heads], qk[:, :, self.q_heads:]
            keys[i].permute(0, 3, 1, 2)[rows, positions] = k
            values[i].permute(0, 2, 1, 3)[rows, positions] = v
            attended = self._attend(q, keys[i, :n, :, :, :window], values[i, :n, :, :window], bias)
            x = x + out(attended)
            gate, up = gate_up(_rms_norm(x, layer.post_attention_layernorm)).chunk(2, -1)
            x = x + down(layer.mlp.act_fn(gate) * up)
        if width > 1:
            x = x.view(n, width, -1)[torch.arange(n, device=self.device), last]
        x = _rms_norm(x, self.model.model.norm)
        if n < self.min_rows:
            return self.head(x.expand(self.min_rows, -1).contiguous())[:n].float()
        return self.head(x).float()

    def _attend(self, q, keys, values, bias) -> torch.Tensor:
        """q (n, W, H*g, D), keys (n, H, D, T), values (n, H, T, D), bias (n, 1, W, T) -> (n*W, H*g*D)."""
        n, width, _, size = q.shape
        window = keys.shape[-1]
        q = q.transpose(1, 2).reshape(n * self.heads, self.groups * width, size)
        scores = torch.bmm(q, keys.reshape(n * self.heads, size, window)).mul_(self.scaling)
        scores.view(n, self.q_heads, width, window).add_(bias)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.bmm(weights, values.reshape(n * self.heads, window, size))
        return mixed.view(n, self.q_heads, width, size).transpose(1, 2).reshape(n * width, self.q_heads * size)


def _rms_norm(x: torch.Tensor, module) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)
    wide = x.float()  # as transformers rounds it: normalise in fp32, round, then scale
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * wide.to(x.dtype)
