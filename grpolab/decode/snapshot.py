"""Whether a policy's model is still the one that was verified, and whether its weights are still those that were read."""

from __future__ import annotations

import weakref
from itertools import chain, count
from operator import is_

import torch
from torch import Tensor

from grpolab.models.load import HOOKS, attention_of

PLAIN = (bool, int, float)  # values set on a module that its forward may read
_epochs = count()


class Structure:
    """What a model is made of, as it is now; it does not keep the model itself alive.

    `changed`  whether it is another model, or a module, buffer, hook, replaced forward or attention implementation is another
               one, or parameters have another dtype or device; `deep` also compares the plain numbers set on modules
    """

    def __init__(self, model):
        self.model, self.config, self.spaces = weakref.ref(model), model.config, [vars(m) for m in model.modules()]
        self.objects, self.form, self.constants = self._objects(), self._form(), self._constants()

    def changed(self, model, deep: bool) -> bool:
        objects = self._objects()
        if self.model() is not model or len(objects) != len(self.objects) or not all(map(is_, objects, self.objects)):
            return True
        return self._form() != self.form or (deep and self._constants() != self.constants)

    def parameters(self) -> list:
        return [p for space in self.spaces for p in space["_parameters"].values() if p is not None]

    def _objects(self) -> list:
        return [x for space in self.spaces for name in ("_modules", "_buffers") for x in space[name].values()]

    def _form(self) -> tuple:
        """Hooks by their number, which is never given twice; forwards that somebody set on a single module."""
        hooks = [number for space in self.spaces for name in HOOKS for number in space[name]]
        replaced, parameters = [id(space["forward"]) for space in self.spaces if "forward" in space], self.parameters()
        return hooks, replaced, attention_of(self), [p.dtype for p in parameters], [p.device for p in parameters]

    def _constants(self) -> list:
        found = [(name, x) for space in self.spaces for name, x in space.items() if type(x) in PLAIN and name != "training"]
        return found + [dict(s["scaling"]) for s in self.spaces if isinstance(s.get("scaling"), dict)]  # of peft's LoRA


def verified_of(policy) -> dict:
    """What was verified of a policy's model as it is now, to read and to add to; empty once its structure has changed."""
    structure, verified = policy.verified or (None, {})
    if structure is None or structure.changed(policy.model, deep=True) or str(policy.model.config) != verified["config"]:
        verified = {"config": str(policy.model.config)}
        policy.verified = Structure(policy.model), verified
    return verified


class Snapshot:
    """A policy's model and weights as an engine read them last (`renew`); `epoch` is the number of that reading.

    `model_changed`    see `Structure`
    `weights_changed`  the policy's version, or a parameter replaced, moved or edited in place (torch counts those edits).
                       `deep` also sums the bits of all weights, which sees edits through `.data`, that torch does not count;
                       it reads every weight once, as a decode step does, so it is for when nothing runs.
    """

    def __init__(self, policy):
        self.structure = Structure(policy.model)
        self.renew(policy)

    def renew(self, policy) -> None:
        self.version, self.epoch = policy.version, next(_epochs)
        self.stamp, self.sums = self._stamp(), checksum(policy.model)

    def model_changed(self, policy, deep: bool) -> bool:
        return self.structure.changed(policy.model, deep)

    def weights_changed(self, policy, deep: bool) -> bool:
        if policy.version != self.version or self._stamp() != self.stamp:
            return True
        return deep and checksum(policy.model) != self.sums

    def _stamp(self) -> list:
        return [(id(p), p._version, p.data_ptr()) for p in self.structure.parameters()]


def update(engine, policy, deep: bool) -> None:
    """Let the engine read weights that have changed since its snapshot."""
    if engine.snapshot.weights_changed(policy, deep):
        engine.refresh()
        engine.snapshot.renew(policy)


@torch.no_grad()
def checksum(model) -> list[int]:
    """A number for each parameter and buffer: the sum of its bits as integers, a row of them times an odd number of its own.

    It changes with every change of a single entry and of the order of rows; not with the order inside a row.
    """
    sums = [_bits(t.detach()) for t in chain(model.parameters(), model.buffers()) if t.numel()]
    return torch.stack([s.cpu() for s in sums]).tolist() if sums else []


def _bits(tensor: Tensor) -> Tensor:
    rows = tensor.contiguous().reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
    wide = rows.shape[1] * rows.element_size() % 8 == 0 and rows.data_ptr() % 8 == 0
    if not wide:
        sums = rows.view(torch.uint8).sum(1, dtype=torch.int64)
    else:  # the upper half folded into the lower: a sum modulo 2^64 forgets every second flip of the uppermost bit, a sign
        lanes = rows.view(torch.int64)
        folded = torch.empty_like(lanes[:256])  # few rows at a time stay in the processor's cache
        sums = torch.cat([torch.bitwise_right_shift(some, 32, out=folded[: len(some)]).bitwise_xor_(some).sum(1)
                          for some in lanes.split(256)])
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()
