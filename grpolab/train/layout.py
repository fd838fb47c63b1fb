"""How rollouts lie in a forward pass: padded rows of one rollout each, or one line of tokens with shared beginnings once.

Shapes: N rollouts, W tokens of the longest row, M tokens in a line, T tokens of the longest completion, K chosen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from grpolab.rollouts import Rollout

COPIES = 8  # times the budget of tokens: of keys and values of shared completions that a pass without rows gathers
PADDING, SMALL = 1.25, 512  # a table of attention holds at most so many times its entries, or so many
SCORES = 2**17  # scores of a head that are computed together, which stay in a processor's cache


@dataclass(frozen=True)
class Rows:
    """ids and positions (N, W), one rollout a row, padded at the right; `predictor` (K,): the flat index of the hidden state
    that predicts each chosen token."""

    ids: torch.Tensor
    positions: torch.Tensor
    predictor: torch.Tensor


@dataclass(frozen=True)
class Table:
    """R rows of T `queries` and S `keys`, numbers in a line of tokens, padded at the right with 0: query t of row r looks at
    the first `seen[r, t]` keys, at none where it is padding."""

    queries: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor

    def to(self, device) -> Table:
        return Table(self.queries.to(device), self.keys.to(device), self.seen.to(device))

    @cached_property
    def blocks(self) -> list[tuple[slice, slice, int, torch.Tensor | None]]:
        """(rows, queries, keys that they need, which of these each must not see: (r, 1, t, 1, S), or None) of each part that
        is computed at once. Padding sees the first key."""
        (r, t), s = self.queries.shape, self.keys.shape[1]
        size = SCORES if self.seen.device.type == "cpu" else 64 * SCORES
        rows, columns = max(1, size // (t * s)), max(1, min(t, size // s))
        out = []
        for i in range(0, r, rows):
            for j in range(0, t, columns):
                part = slice(i, i + rows), slice(j, j + columns)
                seen = self.seen[part].clamp(min=1)
                need = int(seen.max())
                hidden = torch.arange(need, device=seen.device) >= seen[:, None, :, None, None]
                out.append((*part, need, hidden if bool(hidden.any()) else None))
        return out


@dataclass(frozen=True)
class Tokens:
    """M tokens in one line, ids and positions (M,). What sees only itself is in a table of `alone`: shared beginnings, and
    rollouts that share none. What follows a shared beginning looks at it in a table of `beginnings`, a family a row, and at
    the rest of its rollout in one of `completions`. `predictor` (K,): the token that predicts each chosen one."""

    ids: torch.Tensor
    positions: torch.Tensor
    predictor: torch.Tensor
    alone: tuple[Table, ...]
    beginnings: tuple[Table, ...]
    completions: tuple[Table, ...]

    def to(self, device) -> Tokens:
        tables = (tuple(t.to(device) for t in of) for of in (self.alone, self.beginnings, self.completions))
        return Tokens(self.ids.to(device), self.positions.to(device), self.predictor.to(device), *tables)

    def filled(self, step: int) -> Tokens:
        """With tokens that nobody looks at, and predictors of nothing, behind the others up to multiples of `step`."""
        more, predictors = -len(self.ids) % step, -len(self.predictor) % step
        places = list(range(len(self.ids), len(self.ids) + more))
        return replace(
            self, ids=F.pad(self.ids, (0, more)), positions=torch.cat((self.positions, torch.arange(more))),
            predictor=F.pad(self.predictor, (0, predictors)), alone=(*self.alone, *_tables([(places, places)] * (more > 0))))


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
        alone, beginnings, completions = [], [], []  # (queries, keys) of each row
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
                alone.append((places, places))
                chains[members[0]] = places[len(prompt) - 1 :] if prompt else [0, *places]
                continue
            members = sorted(members, key=read.__getitem__)
            common = alike(read[members[0]], read[members[-1]])  # of all members, as they are in order
            trunk = line(prompt + read[members[0]][:common])
            alone.append((trunk, trunk))
            chain, before, rest = trunk[len(prompt) - 1 :], (), []
            for i in members:
                n = max(common, alike(read[i], before))
                new = line(read[i][n:], len(prompt) + n)
                chain, before = chain[: n + 1] + new, read[i]
                chains[i], rest = chain, rest + new
                if new:
                    completions.append((new, chain[common + 1 :]))
            if rest:
                beginnings.append((rest, trunk))
        starts = torch.tensor([0, *map(len, chains)]).cumsum(0)
        predictor = torch.tensor([place for chain in chains for place in chain])[starts[self.row] + self.column]
        return Tokens(torch.tensor(ids), torch.tensor(positions), predictor, tuple(_tables(alone)),
                      tuple(_tables(beginnings, causal=False)), tuple(_tables(completions)))

    def _families(self) -> list[list[int]]:
        """The numbers of neighbouring rollouts that share a prompt."""
        def shared(i: int):
            prompt = self.rollouts[i].prompt
            return prompt if self.share and prompt else i

        return [list(members) for _, members in groupby(range(len(self.rollouts)), key=shared)]


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _tables(rows: Sequence[tuple[list[int], list[int]]], causal: bool = True) -> Iterator[Table]:
    """Rows of (queries, keys) of similar lengths together. `causal`: the queries are the last keys, and each sees no further
    than itself; else each sees all keys of its row."""
    part: list[tuple[list[int], list[int]]] = []
    for row in sorted(rows, key=lambda row: (len(row[1]), len(row[0]))):
        more = [*part, row]
        entries = [(len(more) * max(lengths), sum(lengths)) for lengths in ([len(x) for x in side] for side in zip(*more))]
        if part and any(held > max(SMALL, PADDING * real) for held, real in entries):
            yield _table(part, causal)
            more = [row]
        part = more
    if part:
        yield _table(part, causal)


def _table(rows: Sequence[tuple[list[int], list[int]]], causal: bool) -> Table:
    queries, keys = (pad_sequence([torch.tensor(x) for x in side], batch_first=True) for side in zip(*rows))
    own, all_keys = (torch.tensor([[len(x)] for x in side]) for side in zip(*rows))
    column = torch.arange(queries.shape[1])
    seen = all_keys - own + column + 1 if causal else all_keys.expand_as(queries)
    return Table(queries, keys, torch.where(column < own, seen, 0))


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
    alike once, with `share`. Each looks at its own copy of a completion's keys and values, shared or not: of these at most
    COPIES times `budget`."""
    start, distinct, copied = 0, 0, 0
    for i, of in enumerate(members):
        before = [*(members[i - 1][-1:] if i > start else ()), *of]
        alone = [len(r.prompt) + len(r.tokens) for r in of]
        shared = [len(r.prompt) + alike(r.tokens, last.tokens) if share and r.prompt == last.prompt else 0
                  for r, last in zip(before[1:], before)]
        new, copies = sum(alone) - sum(shared), sum(len(r.tokens) for r in of)
        if i > start and (distinct + new > budget or copied + copies > COPIES * budget):
            yield slice(start, i)
            start, distinct, copied, new = i, 0, 0, new + (shared[0] if len(before) > len(of) else 0)
        distinct, copied = distinct + new, copied + copies
    if members:
        yield slice(start, len(members))
