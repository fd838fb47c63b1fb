"""How rollouts lie in a forward pass: padded rows of one rollout each, or one line of tokens with a shared prompt once.

Shapes: N rollouts, W tokens of the longest row, M tokens in a line, T tokens of the longest completion, K chosen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby

import torch
from torch.nn.utils.rnn import pad_sequence

from grpolab.rollouts import Rollout

COPIES = 8  # times the budget of tokens: of keys and values that a pass without rows gathers


@dataclass(frozen=True)
class Rows:
    """ids and positions (N, W), one rollout a row, padded at the right; `predictor` (K,): the flat index of the hidden state
    that predicts each chosen token."""

    ids: torch.Tensor
    positions: torch.Tensor
    predictor: torch.Tensor


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
        return Tokens(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


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
        """Neighbours of one prompt share it, with `share`."""
        ids, positions, lone, prompts, completions = [], [], [], [], []
        end_of_prompt, first = ([0] * len(self.rollouts) for _ in range(2))  # where the last and the next token stand

        def line(tokens: Sequence[int], start: int = 0) -> torch.Tensor:
            ids.extend(tokens)
            positions.extend(range(start, start + len(tokens)))
            return torch.arange(len(ids) - len(tokens), len(ids))

        for members in self._families():
            prompt = self.rollouts[members[0]].prompt
            if len(members) > 1:
                shared = line(prompt)
                lone.append(shared)
            for i in members:
                if len(members) > 1:
                    own = line(self._read[i], len(prompt))
                    end_of_prompt[i], first[i] = int(shared[-1]), len(ids) - len(own)
                    if len(own):
                        prompts.append(shared)
                        completions.append(own)
                else:
                    lone.append(line(prompt + self._read[i] or (self.pad_id,)))
                    first[i] = int(lone[-1][0]) + len(prompt)
                    end_of_prompt[i] = first[i] - 1
        ends, firsts = torch.tensor(end_of_prompt)[self.row], torch.tensor(first)[self.row]
        predictor = torch.where(self.column == 0, ends, firsts + self.column - 1)
        return Tokens(torch.tensor(ids), torch.tensor(positions), predictor, *_table(lone), *_table(prompts),
                      *_table(completions))

    def _families(self) -> list[list[int]]:
        """The numbers of neighbouring rollouts that share a prompt."""
        def shared(i: int):
            prompt = self.rollouts[i].prompt
            return prompt if self.share and prompt else i

        return [list(members) for _, members in groupby(range(len(self.rollouts)), key=shared)]


def _table(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths, padded at the right with 0, and where they are not."""
    if not rows:
        return torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, 0, dtype=torch.bool)
    table = pad_sequence(list(rows), batch_first=True)
    return table, torch.arange(table.shape[1]) < torch.tensor([[len(row)] for row in rows])


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
