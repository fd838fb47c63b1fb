"""Weights laid out for few rows: fused products, oneDNN's blocked layout, strips of two cache lines."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from grpolab.models.lora import effective_weight

SMALL = 2**17  # weights with fewer entries than this are read faster than a packed product is called
STRIP_BYTES = 128  # of a row of weights laid out in strips


class PackedLinear:
    """y = (x * scale) W^T + b for stacked weights, copied from the live parameters by `refresh`.

    norm   the norm before it, whose weight is the scale, or None; order: a permutation of the output rows, or None.
    layout None: as it is. "onednn": oneDNN's blocked layout; MKL is weak at few rows on some machines, and oneDNN gives
           a row the same bits at every row count. "strips": for one row at a time, see `Strips`.
    """

    def __init__(self, modules: list[nn.Linear], layout: str | None, norm: nn.Module | None = None, order=None):
        self.modules, self.layout, self.norm, self.order = modules, layout, norm, order
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        weights, biases = [effective_weight(m) for m in self.modules], [m.bias for m in self.modules]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        if self.order is not None:
            weight, bias = weight[self.order], None if bias is None else bias[self.order]
        if self.norm is not None:
            weight = weight * self.norm.weight
        self.bias, self.packed = bias, None
        if self.layout is not None:
            self.packed = Strips(weight) if self.layout == "strips" else _pack(weight)
        self.weight = weight if self.packed is None else None

    @property
    def bytes(self) -> int:
        """What the copy takes beside the parameters; 0 where it is the one parameter itself."""
        copied = self.packed is not None or len(self.modules) > 1 or self.order is not None or self.norm is not None
        return sum(m.weight.numel() * m.weight.element_size() for m in self.modules) if copied else 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x, self.bias)


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

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) == 1:
            weights = x.expand(self.strips, self.inputs).reshape(-1)
            y = weighted_sums(self.table, self.members, self.bags, weights).view(1, -1)
        else:
            y = (x @ self.table.view(self.strips, self.inputs, -1)).transpose(0, 1).reshape(len(x), -1)
        return y if bias is None else y.add_(bias)


def weighted_sums(table: torch.Tensor, members: torch.Tensor, bags: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For each bag the sum of its table rows times their weights: `members` lists rows, `bags` where each begins in it."""
    return torch.embedding_bag(table, members, bags, False, 0, False, weights)[0]


def private_operations():
    """Torch has no public product that takes a bias and keeps oneDNN's layout. Where these fail, `F.linear` serves."""
    return torch.ops.mkldnn


def _pack(weight: torch.Tensor):
    """The product x -> x W^T + b on weights in oneDNN's blocked layout, or None where torch has no such product here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        operations = private_operations()
        product, packed = operations._linear_pointwise, operations._reorder_linear_weight(weight.contiguous(), 64)
        product(weight.new_zeros(2, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return lambda x, bias: product(x, packed, bias, "none", [], "")
