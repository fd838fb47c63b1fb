"""Whether a policy's model is still the one whose weights were read: its modules, its hooks, its parameters' values."""

from __future__ import annotations

from itertools import chain
from operator import is_

import torch

from grpolab.models.load import attention_of

PLAIN = (bool, int, float)


class Watch:
    """What a model was made of when `look` last ran, against what it is made of now.

    `modules_changed`  another model object, module, hook, replaced forward, attention implementation, or parameters of another
                       dtype or device: an engine must be chosen anew
                       `deep` also compares the plain numbers and switches that are set on modules (a scale, an adapter's)
    `weights_changed`  the policy's version, or a parameter replaced, moved or edited in place (torch counts those edits).
                       `deep` also sums the bits of all weights, which sees edits through `.data`, that torch does not
                       count; it reads every weight once, as a decode step does, so it is for when nothing runs.
    """

    def __init__(self, policy):
        self.policy = policy
        self.look()

    def look(self) -> None:
        """Take what is there now for known."""
        self.model, self.version = self.policy.model, self.policy.version
        self.spaces = [vars(m) for m in self.model.modules()]
        tables = ("_modules", "_buffers", "_parameters", "_forward_hooks", "_forward_pre_hooks")
        children, buffers, parameters, *hooks = ([space[name] for space in self.spaces] for name in tables)
        self.parts, self.own = [d for d in (*children, *buffers) if d], [d for d in parameters if d]
        self.hooks = [*hooks[0], *hooks[1]]
        self.known, self.form, self.constants = self._parts(), self._form(), self._constants()
        self.stamp, self.sums = self._stamp(), checksum(self.model)

    def modules_changed(self, deep: bool) -> bool:
        if self.policy.model is not self.model:
            return True
        now = self._parts()
        if len(now) != len(self.known) or not all(map(is_, now, self.known)) or self._form() != self.form:
            return True
        return deep and self._constants() != self.constants

    def weights_changed(self, deep: bool) -> bool:
        return self._stamp() != self.stamp or (deep and checksum(self.model) != self.sums)

    def _parts(self) -> list:
        return list(chain.from_iterable(map(dict.values, self.parts)))

    def _parameters(self) -> list:
        return [p for p in chain.from_iterable(map(dict.values, self.own)) if p is not None]

    def _form(self) -> tuple:
        """Hooks by their number, which is never given twice; forwards that somebody set on a single module."""
        replaced, parameters = [id(space["forward"]) for space in self.spaces if "forward" in space], self._parameters()
        return (tuple(chain.from_iterable(self.hooks)), replaced, attention_of(self.model),
                [p.dtype for p in parameters], [p.device for p in parameters])

    def _constants(self) -> list:
        return [(name, x) for space in self.spaces for name, x in space.items() if type(x) in PLAIN and name != "training"]

    def _stamp(self) -> tuple:
        parameters = self._parameters()
        return (self.policy.version, list(map(id, parameters)), [p._version for p in parameters],
                [p.data_ptr() for p in parameters])


@torch.no_grad()
def checksum(model) -> list[int]:
    """A number for each parameter and buffer: the sum of its bits as integers, a row of them times the row's number.

    It changes with every change of a single entry and of the order of rows; not with the order inside a row.
    """
    sums = [_bits(t.detach()) for t in chain(model.parameters(), model.buffers()) if t.numel()]
    return torch.stack([s.cpu() for s in sums]).tolist() if sums else []


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.contiguous().reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
    wide = rows.shape[1] * rows.element_size() % 8 == 0 and rows.data_ptr() % 8 == 0
    sums = rows.view(torch.int64 if wide else torch.uint8).sum(1, dtype=torch.int64)
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
