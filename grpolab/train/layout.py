"""How rollouts lie in a forward pass: padded rows of one rollout each, or one line of tokens with shared beginnings once.

Shapes: N rollouts, W tokens of the longest row, M tokens in a line, T tokens of the longest completion, K chosen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import add

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from grpolab.rollouts import Rollout

PADDING, SMALL = 1.25, 512  # a table of attention holds at most so many times its entries, or so many, before KEYS
KEYS = 16  # of which a mask has a multiple: else CUDA's kernel copies it in each layer, and for each head


@dataclass(frozen=True)
class Rows:
    """ids and positions (N, W), one rollout a row, padded at the right; `predictor` (K,): the flat index of the hidden state
    that predicts each chosen token."""

    ids: torch.Tensor
    positions: torch.Tensor
    predictor: torch.Tensor


@dataclass(frozen=True)
class Table:
    """R rows of T `queries` and S `keys`, numbers in a line of tokens, padded at the right with 0; `read` (R, T): whose result
    is wanted. `mask` (R, 1, T, S): 0 where a query looks at a key, -inf elsewhere. Without it the queries are the keys, and
    each looks at those up to itself."""

    queries: torch.Tensor
    keys: torch.Tensor
    read: torch.Tensor
    mask: torch.Tensor | None

    def to(self, device) -> Table:
        return Table(*(None if x is None else x.to(device) for x in (self.queries, self.keys, self.read, self.mask)))


@dataclass(frozen=True)
class Tokens:
    """M tokens in one line, ids and positions (M,). Each is read in one row of one of the `tables`. What follows a shared
    beginning is in a row that has the keys of this, too. `predictor` (K,): the token that predicts each chosen one."""

    ids: torch.Tensor
    positions: torch.Tensor
    predictor: torch.Tensor
    tables: tuple[Table, ...]

    def to(self, device) -> Tokens:
        return Tokens(self.ids.to(device), self.positions.to(device), self.predictor.to(device),
                      tuple(table.to(device) for table in self.tables))

    def filled(self, step: int) -> Tokens:
        """With tokens that nobody looks at, and predictors of nothing, behind the others up to multiples of `step`."""
        more, predictors = -len(self.ids) % step, -len(self.predictor) % step
        places = list(range(len(self.ids), len(self.ids) + more))
        tables = _tables([_Row().adding(places, places)] if more else [])
        return replace(
            self, ids=F.pad(self.ids, (0, more)), positions=torch.cat((self.positions, torch.arange(more))),
            predictor=F.pad(self.predictor, (0, predictors)), tables=(*self.tables, *tables))


@dataclass(frozen=True)
class Layout:
    """Rollouts, and for each of their K chosen tokens its id `target` and its place `row`, `column` in the (N, T) of the Batch.
    A rollout's last chosen token and what follows it are not read, since nothing that is needed comes after them."""

    rollouts: tuple[Rollout, ...]
    share: bool
    pad_id: int
    target: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    @cached_property
    def _read(self) -> list[tuple[int, ...]]:
        """The tokens of each completion that predict a chosen one."""
        last = torch.zeros(len(self.rollouts), dtype=torch.long).scatter_reduce(0, self.row, self.column, "amax")
        return [r.tokens[:n] for r, n in zip(self.rollouts, last.tolist())]

    @cached_property
    def rows(self) -> Rows:
        sequences = [torch.tensor(r.prompt + tokens or (self.pad_id,)) for r, tokens in zip(self.rollouts, self._read)]
        ids = pad_sequence(sequences, batch_first=True, padding_value=self.pad_id)
        lengths = torch.tensor([len(r.prompt) for r in self.rollouts])
        predictor = self.row * ids.shape[1] + lengths[self.row] + self.column - 1
        return Rows(ids, torch.arange(ids.shape[1]).expand_as(ids), predictor)

    @cached_property
    def tokens(self) -> Tokens:
        """Neighbours of one prompt share it and, rollout by rollout in the order of their tokens, what they begin with alike;
        with `share`."""
        ids, positions, read = [], [], self._read
        rows: list[_Row] = []  # of attention
        chains: list[list[int]] = [[] for _ in self.rollouts]  # the places of the last token of the prompt, and of what is read

        def line(tokens: Sequence[int], start: int = 0) -> list[int]:
            places = list(range(len(ids), len(ids) + len(tokens)))
            ids.extend(tokens)
            positions.extend(range(start, start + len(tokens)))
            return places

        for members in self._families():
            prompt = self.rollouts[members[0]].prompt
            if len(members) == 1:
                places = line(prompt + read[members[0]] or (self.pad_id,))
                rows.append(_Row().adding(places, places))
                chains[members[0]] = places[len(prompt) - 1 :] if prompt else [0, *places]
                continue
            members = sorted(members, key=read.__getitem__)
            common = alike(read[members[0]], read[members[-1]])  # of all members, as they are in order
            trunk = line(prompt + read[members[0]][:common])
            rows.append(_Row().adding(trunk, trunk))
            chain, before, ends = trunk[len(prompt) - 1 :], (), []
            for i in members:
                n = max(common, alike(read[i], before))
                new = line(read[i][n:], len(prompt) + n)
                chain, before = chain[: n + 1] + new, read[i]
                chains[i] = chain
                if new:
                    ends.append((new, chain[common + 1 :]))
            rows += _together(trunk, ends)
        starts = torch.tensor([0, *map(len, chains)]).cumsum(0)
        predictor = torch.tensor([place for chain in chains for place in chain])[starts[self.row] + self.column]
        return Tokens(torch.tensor(ids), torch.tensor(positions), predictor, tuple(_tables(rows)))

    def _families(self) -> list[list[int]]:
        """The numbers of neighbouring rollouts that share a prompt."""
        def shared(i: int):
            prompt = self.rollouts[i].prompt
            return prompt if self.share and prompt else i

        return [list(members) for _, members in groupby(range(len(self.rollouts)), key=shared)]


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@dataclass
class _Row:
    """Places of tokens in a row of attention. All its queries see the `trunk`; each list of `new` ones comes with the `ends`
    that its last one sees behind the trunk, and the one before it sees one less. `columns`: of all ends, each once."""

    trunk: list[int] = field(default_factory=list)
    new: list[list[int]] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)
    columns: dict[int, int] = field(default_factory=dict)
    queries: int = 0

    def adding(self, new: list[int], ends: list[int]) -> _Row:
        self.new.append(new)
        self.ends.append(ends)
        for place in ends:
            self.columns.setdefault(place, len(self.trunk) + len(self.columns))
        self.queries += len(new)
        return self

    @property
    def keys(self) -> list[int]:
        return [*self.trunk, *self.columns]

    @property
    def causal(self) -> bool:
        """Whether all keys are queries as well, at no cost: the kernel leaves out what follows a query, half of all pairs."""
        return len(self.new) == 1 and 2 * self.queries >= len(self.trunk) + len(self.columns)

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of keys and of queries."""
        keys = len(self.trunk) + len(self.columns)
        return keys, keys if self.causal else self.queries


def _together(trunk: list[int], ends: Sequence[tuple[list[int], list[int]]]) -> Iterator[_Row]:
    """Neighbours (new tokens, ends) share a row, which has a key once, as long as few of its scores are hidden. So a long
    trunk is copied seldom: a row of its own has what has new tokens for a quarter of what it sees, about."""
    row, needed = _Row(trunk), 0
    for new, of in ends:
        keys = len(trunk) + len(row.columns) + sum(place not in row.columns for place in of)
        scores = len(new) * (len(trunk) + len(of))
        if row.new and (row.queries + len(new)) * keys > PADDING * (needed + scores):
            yield row
            row, needed = _Row(trunk), 0
        row.adding(new, of)
        needed += scores
    if row.new:
        yield row


def _tables(rows: Sequence[_Row]) -> Iterator[Table]:
    """Rows of similar sizes together, those that need no mask first."""
    for causal in (True, False):
        part: list[_Row] = []
        longest, total = (0, 0), (0, 0)
        for row in sorted((row for row in rows if row.causal is causal), key=lambda row: row.size):
            size = row.size
            longest, total = tuple(map(max, longest, size)), tuple(map(add, total, size))
            if part and any((len(part) + 1) * n > max(SMALL, PADDING * real) for n, real in zip(longest, total)):
                yield _table(part, causal)
                part, longest, total = [], size, size
            part.append(row)
        if part:
            yield _table(part, causal)


def _table(rows: Sequence[_Row], causal: bool) -> Table:
    keys = queries = pad_sequence([torch.tensor(row.keys) for row in rows], batch_first=True)
    own = torch.tensor([[row.queries] for row in rows])
    if causal:
        last = torch.tensor([row.size[:1] for row in rows])
        column = torch.arange(keys.shape[1])
        return Table(queries, keys, (last - own <= column) & (column < last), None)
    queries = pad_sequence([torch.tensor(sum(row.new, [])) for row in rows], batch_first=True)
    keys = F.pad(keys, (0, -keys.shape[1] % KEYS))
    mask = torch.full((len(rows), 1, queries.shape[1], keys.shape[1]), -torch.inf)
    for row, (of_row,) in zip(rows, mask):
        _open(of_row, row)
    return Table(queries, keys, torch.arange(queries.shape[1]) < own, mask)


def _open(mask: torch.Tensor, row: _Row) -> None:
    """Let the queries of a row see their keys, mask (T, S). Padding sees the first, since it must look at something."""
    mask[: row.queries, : len(row.trunk)] = 0
    mask[row.queries :, 0] = 0
    start = 0
    for new, ends in zip(row.new, row.ends):
        columns = torch.tensor([row.columns[place] for place in ends])
        later = torch.full((len(new), len(ends)), -torch.inf).triu(1 + len(ends) - len(new))
        mask[start : start + len(new), columns] = later
        start += len(new)


def lay_out(rollouts: Sequence[Rollout], *, share: bool = True, pad_id: int = 0) -> Layout:
    """Rollouts -> Layout. ValueError where nothing comes before a chosen token."""
    width = max(len(r.mask) for r in rollouts)
    mask = torch.tensor([r.mask + (0,) * (width - len(r.mask)) for r in rollouts])
    row, column = mask.nonzero(as_tuple=True)
    if any(not r.prompt and r.mask[:1] == (1,) for r in rollouts):
        raise ValueError("a rollout with an empty prompt asks for the log-prob of its first token, which nothing predicts: "
                         "give it a prompt of at least one token, or set mask[0] to 0")
    ids = torch.tensor([r.tokens + (0,) * (width - len(r.tokens)) for r in rollouts], dtype=torch.long)
    return Layout(tuple(rollouts), share, pad_id, ids[row, column], row, column)


def micro_batches(lengths: Sequence[int], budget: int) -> Iterator[slice]:
    """Consecutive slices whose rows, padded to the longest, hold at most `budget` tokens (a longer row goes alone)."""
    start, longest = 0, 0
    for i, n in enumerate(lengths):
        longest = max(longest, n)
        if i > start and longest * (i + 1 - start) > budget:
            yield slice(start, i)
            start, longest = i, n
    if lengths:
        yield slice(start, len(lengths))


def distinct_parts(members: Sequence[Sequence[Rollout]], budget: int, share: bool = True) -> Iterator[slice]:
    """Consecutive slices of at most `budget` tokens (more go alone), where neighbours of one prompt count what they begin with
    alike once, with `share`."""
    start, distinct = 0, 0
    for i, of in enumerate(members):
        before = [*(members[i - 1][-1:] if i > start else ()), *of]
        alone = [len(r.prompt) + len(r.tokens) for r in of]
        shared = [len(r.prompt) + alike(r.tokens, last.tokens) if share and r.prompt == last.prompt else 0
                  for r, last in zip(before[1:], before)]
        new = sum(alone) - sum(shared)
        if i > start and distinct + new > budget:
            yield slice(start, i)
            start, distinct, new = i, 0, new + (shared[0] if len(before) > len(of) else 0)
        distinct += new
    if members:
        yield slice(start, len(members))
