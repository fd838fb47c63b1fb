"""How rollouts lie in a forward pass: padded rows of one rollout each, or one line of tokens with shared beginnings once.

Shapes: N rollouts, W tokens of the longest row, M tokens in a line, T tokens of the longest completion, K chosen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from grpolab.rollouts import Rollout

PADDING, SMALL = 1.25, 512  # a table of attention holds at most so many times its entries, or so many
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
    """R rows of T `queries` and S `keys`, numbers in a line of tokens, padded at the right with 0; the first `own` (R,) queries
    are real. `mask` (R, 1, T, S): 0 where a query looks at a key, -inf elsewhere. Without it the queries are the keys, and each
    looks at those up to itself."""

    queries: torch.Tensor
    keys: torch.Tensor
    own: torch.Tensor
    mask: torch.Tensor | None

    def to(self, device) -> Table:
        return Table(*(None if x is None else x.to(device) for x in (self.queries, self.keys, self.own, self.mask)))


@dataclass(frozen=True)
class Tokens:
    """M tokens in one line, ids and positions (M,). Each is a query in one row of one of the `tables`: shared beginnings, and
    rollouts that share none, in those without a mask; what follows a shared beginning in the others, which have its keys, too.
    `predictor` (K,): the token that predicts each chosen one."""

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
        return replace(
            self, ids=F.pad(self.ids, (0, more)), positions=torch.cat((self.positions, torch.arange(more))),
            predictor=F.pad(self.predictor, (0, predictors)), tables=(*self.tables, *_tables([_Row([places])] * (more > 0))))


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
        alone, rest = [], []  # the rows of attention
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
                alone.append(_Row([places]))
                chains[members[0]] = places[len(prompt) - 1 :] if prompt else [0, *places]
                continue
            members = sorted(members, key=read.__getitem__)
            common = alike(read[members[0]], read[members[-1]])  # of all members, as they are in order
            trunk = line(prompt + read[members[0]][:common])
            alone.append(_Row([trunk]))
            line_of, before, chosen = trunk[len(prompt) - 1 :], (), []
            for i in members:
                n = max(common, alike(read[i], before))
                new = line(read[i][n:], len(prompt) + n)
                line_of, before = line_of[: n + 1] + new, read[i]
                chains[i] = line_of
                if new:
                    chosen.append((new, trunk + line_of[common + 1 :]))
            rest += _together(chosen)
        starts = torch.tensor([0, *map(len, chains)]).cumsum(0)
        predictor = torch.tensor([place for of in chains for place in of])[starts[self.row] + self.column]
        return Tokens(torch.tensor(ids), torch.tensor(positions), predictor, (*_tables(alone), *_tables(rest)))

    def _families(self) -> list[list[int]]:
        """The numbers of neighbouring rollouts that share a prompt."""
        def shared(i: int):
            prompt = self.rollouts[i].prompt
            return prompt if self.share and prompt else i

        return [list(members) for _, members in groupby(range(len(self.rollouts)), key=shared)]


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class _Row:
    """Places of queries, and for each list of them what its last one sees: the one before it sees one less. Without it the
    queries see themselves."""

    queries: list[list[int]]
    seen: list[list[int]] | None = None

    @cached_property
    def keys(self) -> dict[int, int]:
        """The place of each key, once, and its column."""
        return {place: i for i, place in enumerate(dict.fromkeys(chain.from_iterable(self.seen or self.queries)))}

    @property
    def size(self) -> tuple[int, int]:
        return len(self.keys), sum(map(len, self.queries))


def _together(chosen: Sequence[tuple[list[int], list[int]]]) -> Iterator[_Row]:
    """Neighbours (queries, what their last one sees) share a row and its keys as long as it has few scores that are hidden. So
    long beginnings are copied seldom: to a row of its own goes what has new tokens for a quarter of what it sees, about."""
    row, keys, queries, needed = _Row([], []), {}, 0, 0
    for new, seen in chosen:
        more, scores = keys | dict.fromkeys(seen), len(new) * len(seen)
        if row.queries and (queries + len(new)) * len(more) > PADDING * (needed + scores):
            yield row
            row, more, queries, needed = _Row([], []), dict.fromkeys(seen), 0, 0
        row.queries.append(new)
        row.seen.append(seen)
        keys, queries, needed = more, queries + len(new), needed + scores
    if row.queries:
        yield row


def _tables(rows: Sequence[_Row]) -> Iterator[Table]:
    """Rows of similar sizes together."""
    part: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.size):
        more = [*part, row]
        entries = [(len(more) * max(lengths), sum(lengths)) for lengths in zip(*(row.size for row in more))]
        if part and any(held > max(SMALL, PADDING * real) for held, real in entries):
            yield _table(part)
            more = [row]
        part = more
    if part:
        yield _table(part)


def _table(rows: Sequence[_Row]) -> Table:
    queries = [[*chain.from_iterable(row.queries)] for row in rows]
    places, keys = (pad_sequence([torch.tensor([*x]) for x in of], batch_first=True)
                    for of in (queries, [row.keys for row in rows]))
    own, mask = torch.tensor([*map(len, queries)]), None
    if rows[0].seen is not None:
        keys = F.pad(keys, (0, -keys.shape[1] % KEYS))
        mask = torch.stack([_mask(row, places.shape[1], keys.shape[1]) for row in rows])[:, None]
    return Table(places, keys, own, mask)


def _mask(row: _Row, width: int, keys: int) -> torch.Tensor:
    """(width, keys), where padding looks at the first key, since it must look at something."""
    mask, start = torch.full((width, keys), -torch.inf), 0
    for new, seen in zip(row.queries, row.seen):
        columns = torch.tensor([row.keys[place] for place in seen])
        later = torch.full((len(new), len(seen)), -torch.inf).triu(1 + len(seen) - len(new))
        mask[start : start + len(new)] = mask[start : start + len(new)].index_copy(1, columns, later)
        start += len(new)
    mask[start:, 0] = 0
    return mask


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
