"""Weights laid out for few rows: fused products in oneDNN's blocked layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from grpolab.models.lora import effective_weight


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

    @property
    def bytes(self) -> int:
        """What the copy takes beside the parameters; 0 where it is the one parameter itself."""
        if self.layout is None:
            return 0
        copied = self.packed is not None or len(self.modules) > 1 or self.order is not None or self.norm is not None
        return sum(m.weight.numel() * m.weight.element_size() for m in self.modules) if copied else 0

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
