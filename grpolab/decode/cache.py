"""Where the rows of a decode batch keep their keys and values: row i in slot i, a copy of its prompt included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

WINDOW = 16  # cached positions are read in multiples of this
ROOM = 128  # positions that a cache is allocated ahead of need


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass
class SlotCache:
    """Keys and values by slot. In every tensor the slot is dimension -4 and time is dimension `times[i]` (-1 or -2).

    Zero-filled on purpose: a masked key has weight 0, but 0 times a NaN left over in memory would still be NaN.
    """

    tensors: list[torch.Tensor]
    times: list[int]
    views: tuple | None = None  # an engine's own views of the tensors

    @property
    def slots(self) -> int:
        return self.tensors[0].shape[-4]

    @property
    def width(self) -> int:
        return self.tensors[0].shape[self.times[0]]

    def resized(self, slots: int, width: int) -> SlotCache:
        """A larger cache that begins with what this one holds."""
        fresh = []
        for old, time in zip(self.tensors, self.times):
            shape = list(old.shape)
            shape[-4], shape[time] = slots, width
            new = old.new_zeros(shape)
            new.narrow(-4, 0, self.slots).narrow(time, 0, self.width).copy_(old)
            fresh.append(new)
        return SlotCache(fresh, self.times)

    def row(self, i: int) -> SlotCache:
        """Slot i as a cache of one slot, in the same memory."""
        return SlotCache([t.narrow(-4, i, 1) for t in self.tensors], self.times)

    def copy(self, i: int, length: int) -> SlotCache:
        """The first `length` positions of slot i, as a cache of one slot."""
        row = self.row(i)
        return SlotCache([t.narrow(time, 0, length).clone() for t, time in zip(row.tensors, row.times)], self.times)

    def put(self, slots: Sequence[int], source: SlotCache, rows: Sequence[int], width: int) -> None:
        """Copy the first `width` positions of the source's rows into these slots, all at once."""
        device = self.tensors[0].device
        slots, rows = torch.tensor(slots, device=device), torch.tensor(rows, device=device)
        for to, of, time in zip(self.tensors, source.tensors, self.times):
            to.narrow(time, 0, width)[..., slots, :, :, :] = of.narrow(time, 0, width)[..., rows, :, :, :]

    def clear(self, i: int) -> None:
        for t in self.row(i).tensors:
            t.zero_()


def grown(cache: SlotCache | None, engine, most: int, rows: int, width: int, longest: int) -> SlotCache:
    """The cache with room for `rows` rows of `width` positions: with room ahead, so that growing stays rare, but for no more
    than the `most` rows and `longest` positions that there may come to be."""
    before = cache.width if cache else 0
    if width > before:
        width = round_up(max(width, min(max(2 * before, width + ROOM), longest)), WINDOW)
    if cache is None:
        return engine.allocate(rows + engine.min_rows, width)
    slots = cache.slots if rows <= cache.slots else max(rows, min(2 * cache.slots, most))
    same = slots == cache.slots and width <= before
    return cache if same else cache.resized(slots, max(width, before))
