"""Where the rows of a decode batch keep their keys and values: each in a slot of its own, or in pages.

A prefill fills a `SlotCache`. `Slots` keeps row i in slot i of one of them, a copy of its prompt included: any engine on
any device can read it as one tensor. `Pages` lets the samples of a prompt read the same pages of it, and a row read no
further than it is long: for engines whose attention takes its keys and values row by row (`weighted_sums`).
Letters: L layers, H key/value heads, D head size, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

WINDOW = 16  # cached positions are read in multiples of this
PAGE = 32  # positions of a page
NEAR = 16  # a row this close to the end of its page gets the next one together with a row that needs it
ROOM = 128  # positions that a cache is allocated ahead of need
ZEROS, SPILL, FIRST = 0, 1, 2  # the page where a row has none; that which padding rows write; the first of the others


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

    def put(self, slots: Sequence[int], source: SlotCache, rows: Sequence[int], width: int) -> None:
        """Copy the first `width` positions of the source's rows into these slots, all at once."""
        device = self.tensors[0].device
        slots, rows = torch.tensor(slots, device=device), torch.tensor(rows, device=device)
        for to, of, time in zip(self.tensors, source.tensors, self.times):
            to.narrow(time, 0, width)[..., slots, :, :, :] = of.narrow(time, 0, width)[..., rows, :, :, :]


@dataclass(frozen=True)
class Prefilled:
    """A prompt of `length` tokens in a row of a prefill's cache."""

    cache: SlotCache
    row: int
    length: int


class Slots:
    """Row i in slot i. `most`: the rows there may come to be."""

    unit = WINDOW

    def __init__(self, engine, most: int):
        self.engine, self.most = engine, most + engine.min_rows
        self.cache: SlotCache | None = None

    def room(self, tokens: int) -> int:
        """The positions that a row of `tokens` may come to occupy."""
        return round_up(tokens, WINDOW)

    def fit(self, positions: np.ndarray, rows: int, steps: int, longest: int) -> None:
        """Room for `rows` rows, of which the first ones write at `positions` and `steps` - 1 further; none will come to be
        longer than `longest`."""
        self._grow(rows, int(positions.max()) + steps, longest)

    def _grow(self, rows: int, width: int, longest: int) -> None:
        """With room ahead, so that growing stays rare, but never more than the rows may come to use."""
        if self.cache is None:
            self.cache = self.engine.allocate(rows + self.engine.min_rows, self._roomy(width, 0, longest))
        slots, wide = self.cache.slots, self.cache.width
        if rows > slots:
            slots = max(rows, min(2 * slots, self.most))
        if width > wide:
            wide = self._roomy(width, wide, longest)
        if (slots, wide) != (self.cache.slots, self.cache.width):
            self.cache = self.cache.resized(slots, wide)

    @staticmethod
    def _roomy(width: int, before: int, longest: int) -> int:
        return round_up(max(width, min(max(2 * before, width + ROOM), longest)), WINDOW)

    def enter(self, first: int, prompts: Sequence[Prefilled], longest: int) -> None:
        """Rows first.. begin with these prompts."""
        self._grow(first + len(prompts), max(p.length for p in prompts), longest)
        by_cache: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            by_cache.setdefault(id(prompt.cache), []).append(i)
        for members in by_cache.values():
            width = max(prompts[i].length for i in members)
            self.cache.put([first + i for i in members], prompts[members[0]].cache, [prompts[i].row for i in members], width)

    def move(self, to: Sequence[int], of: Sequence[int], width: int) -> None:
        """Rows `to` become what rows `of` were, of up to `width` positions."""
        self.cache.put(to, self.cache, of, width)

    def release(self, row: int, broken: bool) -> None:
        """The row is done; what a `broken` one leaves may be NaN."""
        if broken:
            for t in self.cache.tensors:
                t.narrow(-4, row, 1).zero_()

    def take(self, row: int, length: int) -> SlotCache:
        """A copy of the row's first `length` positions, as a cache of one slot."""
        cache = self.cache
        parts = [t.narrow(-4, row, 1).narrow(time, 0, length).clone() for t, time in zip(cache.tensors, cache.times)]
        return SlotCache(parts, cache.times)


class Pages:
    """The methods of `Slots` on pages of PAGE positions, for the step of a `LlamaEngine` on a processor.

    keys (L, pages, H, D, PAGE), values (L, pages, H, PAGE, D); `table` (rows, blocks) holds the page of each PAGE positions
    of a row. Samples of a prompt that enter together share its full pages; `users` counts the rows that read a page.
    """

    unit = PAGE

    def __init__(self, engine, most: int):
        layers, self.heads, self.size = engine.shape
        self.keys = torch.zeros(layers, 0, self.heads, self.size, PAGE, dtype=engine.dtype)
        self.values = torch.zeros(layers, 0, self.heads, PAGE, self.size, dtype=engine.dtype)
        self.table = np.zeros((most + engine.min_rows, 1), np.int64)
        self.users, self.free = np.zeros(0, np.int64), []
        self.picked: tuple | None = None  # what a step reads, until the table changes
        self._give(FIRST)  # zeros and spill

    @property
    def cache(self) -> Pages:
        return self

    def room(self, tokens: int) -> int:
        return round_up(tokens + NEAR, PAGE)

    def fit(self, positions: np.ndarray, rows: int, steps: int, longest: int) -> None:
        n = len(positions)
        blocks = (positions + np.array([[0], [steps - 1], [NEAR]])) // PAGE
        self._widen(int(blocks.max()) + 1)
        if not self.table[np.arange(n), blocks[:2]].all():
            for block in blocks:
                bare = np.flatnonzero(self.table[np.arange(n), block] == ZEROS)
                self._assign(bare, block[bare], self._give(len(bare)))
        if (self.table[n:rows, 0] != SPILL).any():
            self.table[n:rows, 0], self.picked = SPILL, None

    def enter(self, first: int, prompts: Sequence[Prefilled], longest: int) -> None:
        self._widen(max(p.length for p in prompts) // PAGE + 1)
        shared: dict[tuple[int, int], np.ndarray] = {}
        copies: dict[int, tuple[SlotCache, list]] = {}
        for row, prompt in enumerate(prompts, first):
            full, rest = divmod(prompt.length, PAGE)
            _, wanted = copies.setdefault(id(prompt.cache), (prompt.cache, []))
            key = id(prompt.cache), prompt.row
            if key not in shared:
                shared[key] = self._give(full)
                wanted += [(page, prompt.row, block) for block, page in enumerate(shared[key])]
            self.table[row] = ZEROS
            self._assign(row, np.arange(full), shared[key])
            if rest:
                own = self._give(1)[0]
                wanted.append((own, prompt.row, full))
                self._assign(row, full, own)
        for cache, wanted in copies.values():
            self._copy(cache, *np.array(wanted).T)

    def _copy(self, cache: SlotCache, pages: np.ndarray, rows: np.ndarray, blocks: np.ndarray) -> None:
        """Fill the i-th page with the blocks[i]-th PAGE positions of the cache's row rows[i]."""
        keys, values = cache.tensors
        self.keys[:, pages] = keys.unflatten(-1, (-1, PAGE))[:, rows, :, :, blocks].transpose(0, 1)
        self.values[:, pages] = values.unflatten(-2, (-1, PAGE))[:, rows, :, blocks].transpose(0, 1)

    def move(self, to: Sequence[int], of: Sequence[int], width: int) -> None:
        moved, self.picked = self.table[list(of)], None
        self.table[list(of)] = ZEROS
        self.table[list(to)] = moved

    def release(self, row: int, broken: bool) -> None:
        pages = self.table[row][self.table[row] >= FIRST]
        self.users[pages] -= 1
        unused = pages[self.users[pages] == 0]
        if broken:
            self.keys[:, unused] = self.values[:, unused] = 0
        self.free.extend(unused.tolist())
        self.table[row], self.picked = ZEROS, None

    def take(self, row: int, length: int) -> SlotCache:
        pages = self.table[row, : -(-length // PAGE)]
        keys = self.keys[:, pages].permute(0, 2, 3, 1, 4).flatten(3)[:, None]
        return SlotCache([keys, self.values[:, pages].transpose(1, 2).flatten(2, 3)[:, None]], [-1, -2])

    def locate(self, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and offset of position start[i] of row i: (n,) each."""
        table = torch.from_numpy(self.table[: len(start)])
        return table.gather(1, (start // PAGE)[:, None]).squeeze(1), start % PAGE

    def reading(self, n: int, blocks: int, groups: int) -> tuple[torch.Tensor, ...]:
        """For the `weighted_sums` of n rows: key rows by (row, head, query, block) and value rows by (row, head, query),
        each with where its bags begin. Blocks that a row has not reached are zeros, which stay near the processor."""
        if self.picked is None or self.picked[0] != (n, blocks):
            def integers(stop, step=1, *shape):
                return torch.arange(0, stop, step, dtype=torch.int32).view(*shape or (-1,))

            page = torch.from_numpy(self.table[:n, :blocks].astype(np.int32))[:, None, None, :, None]
            head, shape = integers(self.heads, 1, self.heads, 1, 1, 1), (n, self.heads, groups, blocks)
            keys = ((page * self.heads + head) * self.size + integers(self.size)).expand(*shape, self.size).reshape(-1)
            values = ((page * self.heads + head) * PAGE + integers(PAGE)).expand(*shape, PAGE).reshape(-1)
            bags = integers(len(keys), self.size), integers(len(values), blocks * PAGE)
            self.picked = (n, blocks), (keys, bags[0], values, bags[1])
        return self.picked[1]

    def _assign(self, rows, blocks, pages: np.ndarray) -> None:
        self.table[rows, blocks], self.picked = pages, None
        self.users[pages] += 1

    def _give(self, count: int) -> np.ndarray:
        """Pages that nobody reads; where too few are left, a quarter more are made."""
        size = len(self.users)
        if count > len(self.free):
            more = max(count - len(self.free), size // 4)
            self.layers = []  # views of what goes: the two grow one after the other, so that only one is there twice
            self.keys = _grown(self.keys, more)
            self.values = _grown(self.values, more)
            self.users = np.pad(self.users, (0, more))
            self.free += range(size, size + more)
            self.layers = [(k.permute(0, 3, 1, 2), k.view(-1, PAGE), v.transpose(1, 2), v.view(-1, self.size))
                           for k, v in zip(self.keys, self.values)]
        given, self.free = self.free[:count], self.free[count:]
        return np.array(given, np.int64)

    def _widen(self, blocks: int) -> None:
        missing = blocks - self.table.shape[1]
        if missing > 0:
            self.table, self.picked = np.pad(self.table, ((0, 0), (0, missing))), None


def _grown(pages: torch.Tensor, more: int) -> torch.Tensor:
    """(L, pages, ...) with so many more pages of zeros."""
    return torch.cat([pages, pages.new_zeros(len(pages), more, *pages.shape[2:])], 1)


def store_for(engine, most: int) -> Slots | Pages:
    """Pages where the engine's step reads them, else slots."""
    return (Pages if getattr(engine, "paged", False) else Slots)(engine, most)
