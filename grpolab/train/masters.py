"""fp32 master weights behind a model whose parameters are bf16: what the sampler reads and the trainer multiplies is half as
wide, and no step is lost to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Masters:
    """An optimiser whose steps are taken on fp32 copies of bf16 parameters, which are then what the copies round to
    (arXiv 1710.03740, section 3.1). A step of 1e-6 on a weight of 1 would otherwise be lost, since bf16 keeps eight bits.

    Used as a torch optimiser: `param_groups` are the copies, and their state, saved as any other, holds the copies. Where
    somebody else changed a parameter (a loaded checkpoint, a run that begins again), it wins over its copy.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]):
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        self.optimiser = make(self.masters)

    @property
    def param_groups(self) -> list[dict]:
        return self.optimiser.param_groups

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the parameters' gradients to their copies, of which those are renewed that their parameter left."""
        for p, master in zip(self.parameters, self.masters):
            if not torch.equal(master.to(p.dtype), p):
                master.copy_(p)
            master.grad, p.grad = None if p.grad is None else p.grad.float(), None

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
