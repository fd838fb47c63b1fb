"""Where rollouts lie in a forward pass: a shared prompt once, its completions side by side.

A Layout is built once, of segments: runs of tokens that see themselves and, a completion, the prompt that it continues. What
a forward pass reads follows from them: padded rows, or one line of tokens without rows.
Shapes: R rows of W tokens, M tokens in a line, K chosen tokens, N rollouts, T tokens of the longest completion.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from grpolab.rollouts import Rollout

COPIES = 8  # times the budget of tokens: of keys and values that a pass without rows gathers


@dataclass(frozen=True)
class Segment:
    """Tokens side by side in a row, at the positions `start`, `start` + 1, ...; each sees those before it in its segment
    and, where `prompt` is the number of another segment, all of that."""

    ids: tuple[int, ...]
    start: int = 0
    prompt: int | None = None


class Chosen(NamedTuple):
    """The K chosen tokens, (K,) each: `segment` and `offset` of the token whose hidden state predicts it, its id `target`, and
    its place `row`, `column` in the (N, T) of the Batch."""

    segment: torch.Tensor
    offset: torch.Tensor
    target: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """Segments, and the numbers of those in each row: one rollout's tokens, or a prompt and after it several completions,
    each at the positions that it would have alone. `limit` is the most tokens of a shared row; 0: none is shared.

    """

    rollouts: tuple[Rollout, ...]
    limit: int
    pad_id: int
    segments: tuple[Segment, ...]
    rows: tuple[tuple[int, ...], ...]
    chosen: Chosen

    @cached_property
    def width(self) -> int:
        """W, the tokens of the longest row."""
        return max(sum(len(self.segments[s].ids) for s in row) for row in self.rows)

    @cached_property
    def _begins(self) -> torch.Tensor:
        """The flat index in (R, W) of each segment's first token."""
        begins = (
            r * self.width + sum(len(self.segments[before].ids) for before in row[:k])
            for r, row in enumerate(self.rows) for k in range(len(row))
        )
        return torch.tensor(list(begins))

    @property
    def predictor(self) -> torch.Tensor:
        """The flat index in (R, W) of the hidden state that predicts each chosen token: (K,)."""
        return self._begins[self.chosen.segment] + self.chosen.offset

    @property
    def ids(self) -> torch.Tensor:
        """(R, W), padded at the right."""
        return self._in_rows((s.ids for s in self.segments), self.pad_id)

    @property
    def positions(self) -> torch.Tensor:
        """(R, W), 0 on padding."""
        return self._in_rows((range(s.start, s.start + len(s.ids)) for s in self.segments), 0)

    @property
    def attention(self) -> torch.Tensor | None:
        """(R, 1, W, W), True where a query may look, or None where causal attention is enough."""
        if all(len(row) == 1 for row in self.rows):
            return None
        own = self._in_rows(([s] * len(x.ids) for s, x in enumerate(self.segments)), -1)
        prompt = self._in_rows(([-2 if x.prompt is None else x.prompt] * len(x.ids) for x in self.segments), -2)
        causal = torch.ones(self.width, self.width, dtype=torch.bool).tril()
        same, before = own[:, :, None] == own[:, None, :], prompt[:, :, None] == own[:, None, :]
        return ((same | before) & causal)[:, None]

    @cached_property
    def apart(self) -> Layout:
        """The same rollouts, one a row."""
        return lay_out(self.rollouts, width=0, pad_id=self.pad_id)

    @cached_property
    def together(self) -> Layout:
        """The same rollouts, a shared prompt once however long it is: for a forward that has no rows."""
        return lay_out(self.rollouts, width=sys.maxsize, pad_id=self.pad_id) if 0 < self.limit < sys.maxsize else self

    @cached_property
    def tokens(self) -> Tokens:
        """The same without rows and padding."""
        ends = list(accumulate(len(s.ids) for s in self.segments))
        line = [torch.arange(end - len(s.ids), end) for s, end in zip(self.segments, ends)]
        ids = torch.tensor([i for s in self.segments for i in s.ids])
        positions = torch.cat([torch.arange(s.start, s.start + len(s.ids)) for s in self.segments])
        predictor = torch.tensor([0, *ends])[self.chosen.segment] + self.chosen.offset
        lone = [x for x, s in zip(line, self.segments) if s.prompt is None]
        completions = [(line[s.prompt], x) for x, s in zip(line, self.segments) if s.prompt is not None]
        prompts, completions = zip(*completions) if completions else ((), ())
        return Tokens(ids, positions, predictor, *_table(lone), *_table(prompts), *_table(completions))

    def _in_rows(self, values: Iterable[Iterable[int]], filler: int) -> torch.Tensor:
        """One value a token of each segment -> (R, W)."""
        table = torch.full((len(self.rows) * self.width,), filler)
        for begin, x in zip(self._begins.tolist(), map(list, values)):
            table[begin : begin + len(x)] = torch.tensor(x, dtype=torch.long)
        return table.view(len(self.rows), self.width)


@dataclass(frozen=True)
class Tokens:
    """M tokens in one line, ids and positions (M,), and tables of their numbers. What sees only itself is a row of `lone`
    (A, P): shared prompts, and rollouts that share none. A row of `completions` (S, T) also sees its row of `prompts`
    (S, P'). Tables are padded at the right with 0; `*_real` is True where they are not padding. `predictor` (K,)."""

    ids: torch.Tensor
    positions: torch.Tensor
    predictor: torch.Tensor
    lone: torch.Tensor
    lone_real: torch.Tensor
    prompts: torch.Tensor
    prompts_real: torch.Tensor
    completions: torch.Tensor
    completions_real: torch.Tensor

    def to(self, device) -> Tokens:
        return Tokens(**{name: x.to(device) for name, x in vars(self).items()})


def _table(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths, padded at the right with 0, and where they are not."""
    if not rows:
        return torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, 0, dtype=torch.bool)
    table = pad_sequence(list(rows), batch_first=True)
    return table, torch.arange(table.shape[1]) < torch.tensor([[len(row)] for row in rows])


def lay_out(rollouts: Sequence[Rollout], *, width: int = 512, pad_id: int = 0) -> Layout:
    """Rollouts -> Layout with rows of at most `width` tokens (a single rollout may be longer); `width=0` gives one rollout
    a row. Neighbouring rollouts of the same prompt share it. A rollout's last chosen token and what follows it are not read,
    since nothing that is needed comes after them. ValueError where nothing comes before a chosen token."""
    segments: list[Segment] = []
    rows, chosen = [], []
    for members in _families(rollouts, width):
        prompt, first = rollouts[members[0]].prompt, len(segments)
        columns = {i: torch.tensor(rollouts[i].mask).nonzero().squeeze(1) for i in members}
        read = {i: rollouts[i].tokens[: c[-1]] for i, c in columns.items() if len(c)}  # what predicts the chosen tokens
        if read and not prompt and any(columns[i][0] == 0 for i in read):
            raise ValueError("a rollout with an empty prompt asks for the log-prob of its first token, which nothing predicts: "
                             "give it a prompt of at least one token, or set mask[0] to 0")
        shared = len(read) > 1
        segments.append(Segment(prompt if shared else prompt + sum(read.values(), ()) or (pad_id,)))
        for i, tokens in read.items():
            column = columns[i]
            if shared and tokens:
                segments.append(Segment(tokens, len(prompt), first))
            after_prompt = shared & (column == 0)  # what a prompt's last token predicts
            chosen.append(Chosen(
                segment=torch.where(after_prompt, first, len(segments) - 1),
                offset=torch.where(after_prompt, len(prompt) - 1, column - 1 + (0 if shared else len(prompt))),
                target=torch.tensor(rollouts[i].tokens)[column], row=torch.full_like(column, i), column=column))
        rows.append(tuple(range(first, len(segments))))
    nothing = torch.zeros(0, dtype=torch.long)
    joined = (torch.cat([nothing, *fields]) for fields in zip(*chosen)) if chosen else [nothing] * len(Chosen._fields)
    return Layout(tuple(rollouts), width, pad_id, tuple(segments), tuple(rows), Chosen(*joined))


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


def distinct_parts(rollouts: Sequence[Rollout], budget: int) -> Iterator[slice]:
    """Consecutive slices of at most `budget` tokens (a longer rollout goes alone), where neighbours of one prompt count it
    once. Each still attends to its own copy of the prompt's keys and values: of these at most COPIES times `budget`."""
    start, distinct, copied = 0, 0, 0
    for i, r in enumerate(rollouts):
        whole = len(r.prompt) + len(r.tokens)
        new = len(r.tokens) if i > start and r.prompt == rollouts[i - 1].prompt else whole
        if i > start and (distinct + new > budget or copied + whole > COPIES * budget):
            yield slice(start, i)
            start, distinct, copied, new = i, 0, 0, whole
        distinct, copied = distinct + new, copied + whole
    if rollouts:
        yield slice(start, len(rollouts))


def _families(rollouts: Sequence[Rollout], width: int) -> list[list[int]]:
    """The numbers of neighbouring rollouts of one prompt that fit a row together."""
    families: list[list[int]] = []
    used = 0
    for i, r in enumerate(rollouts):
        if families and rollouts[families[-1][0]].prompt == r.prompt and used + len(r.tokens) <= width:
            families[-1].append(i)
            used += len(r.tokens)
        else:
            families.append([i])
            used = len(r.prompt) + len(r.tokens)
    return families
