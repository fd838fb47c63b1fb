"""Optimisers by name; and fp32 master weights behind a model whose parameters are bf16 or fp16: what the sampler reads and the
trainer multiplies is half as wide, and no step is lost to rounding."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

LOW = (torch.bfloat16, torch.float16)  # dtypes of parameters that have fp32 master weights
FIRST_SCALE, MOST_SCALE = 2.0**14, 2.0**16  # of the losses in float16, whose smallest number is 6e-8 and largest 65504
BETAS = (0.9, 0.99)  # of both AdamWs: the second moment forgets in 100 steps, since the runs here last a few hundred
ADAMW = partial(torch.optim.AdamW, fused=True, betas=BETAS)  # in one pass over everything, also on a processor


def adamw_8bit(parameters, **options):
    """AdamW with block-wise 8-bit moments (arXiv 2110.02861), two bytes a parameter in place of eight."""
    try:
        return importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, betas=BETAS, **options)
    except ImportError as error:
        raise ImportError("optimiser 'adamw_8bit' needs bitsandbytes: pip install 'grpolab[8bit]'") from error


# One more is an entry here: (parameters, lr=, weight_decay=) -> an optimiser. That of adamw_cpu gets copies on the processor.
OPTIMISERS = {
    "adamw": ADAMW,
    "adamw_8bit": adamw_8bit,
    "adafactor": torch.optim.Adafactor,  # factored second moments and no first one (arXiv 1804.04235), its step kept at lr
    "adamw_cpu": ADAMW,
}


def make_optimiser(policy, config) -> torch.optim.Optimizer | Masters:
    """The optimiser of the parameters that are trained; of bf16 and fp16 ones, and with adamw_cpu, over fp32 master weights.
    Of fp16 ones it also sets the policy's `loss_scale`."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    make = partial(OPTIMISERS[config.optimiser], lr=config.lr, weight_decay=config.weight_decay)
    host = config.optimiser == "adamw_cpu"
    kept_apart = host or any(p.dtype in LOW for p in trained)
    policy.loss_scale = FIRST_SCALE if any(p.dtype == torch.float16 for p in trained) else 1.0
    return Masters(trained, make, "cpu" if host else None) if kept_apart else make(trained)


class Masters:
    """An optimiser whose steps are taken on fp32 copies of the parameters, on `device`, which are then what the copies round to
    (arXiv 1710.03740, section 3.1). A step of 1e-6 on a weight of 1 would otherwise be lost, since bf16 keeps eight bits.

    On the processor (adamw_cpu) copies, moments and the step take none of an accelerator's memory, and the way there and back
    is what it costs.

    The gradients of micro-batches add up in fp32 too (`Tensor.grad_dtype`): in bf16 a small share added to a large sum is lost.

    Used as a torch optimiser: `param_groups` are the copies, and their state, saved as any other, holds the copies. Where
    somebody else changed a parameter (a loaded checkpoint, a run that begins again), it wins over its copy.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
                 device: str | None = None):
        self.parameters = list(parameters)
        self.masters = [p.detach().to(device or p.device, torch.float32, copy=True) for p in self.parameters]
        for p in self.parameters:
            if p.grad_dtype != torch.float32:
                p.grad, p.grad_dtype = None, torch.float32
        self.optimiser = make(self.masters)

    @property
    def param_groups(self) -> list[dict]:
        return self.optimiser.param_groups

    @torch.no_grad()
    def take_gradients(self, scale: float = 1.0) -> None:
        """Move the parameters' gradients, divided by `scale`, to their copies, of which those are renewed that their parameter
        left."""
        for p, master in zip(self.parameters, self.masters):
            if not torch.equal(master.to(p), p):
                master.copy_(p)
            master.grad, p.grad = None if p.grad is None else p.grad.to(master).div_(scale), None

    @torch.no_grad()
    def step(self) -> None:
        self.optimiser.step()
        for p, master in zip(self.parameters, self.masters):
            p.copy_(master)

    def zero_grad(self) -> None:
        self.optimiser.zero_grad()
        for p in self.parameters:
            p.grad = None

    def state_dict(self) -> dict:
        found = self.optimiser.state_dict()
        return found | {"state": {i: found["state"].get(i, {}) | {"master": m} for i, m in enumerate(self.masters)}}

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        slots = {i: dict(values) for i, values in saved["state"].items()}
        for i, master in enumerate(self.masters):
            if "master" not in slots.get(i, {}):
                raise ValueError("this checkpoint's optimiser has no fp32 master weights: it is of a run whose parameters "
                                 "were fp32; load the policy with dtype='float32' to go on with it")
            master.copy_(slots[i].pop("master"))
        moved = {i: values for i, values in slots.items() if values}  # a copy without a step has no moments
        self.optimiser.load_state_dict(saved | {"state": moved})
