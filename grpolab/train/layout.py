"""Where rollouts lie in a forward pass: a shared prompt once, its completions side by side.

Shapes: R rows of W tokens, K chosen tokens, N rollouts, T tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.utils.rnn import pad_sequence

from grpolab.rollouts import Rollout


@dataclass(frozen=True)
class Layout:
    """How rollouts lie in a forward pass: each of R rows holds a prompt once and after it, side by side, as many of its
    completions as fit; a completion sees the prompt and itself, at the positions it would have alone.

    ids, positions, owner: (R, W); owner is -1 on padding, 0 on the prompt, k on the row's k-th completion. For each of K
    chosen tokens: `predictor`, the flat index in (R, W) of the hidden state that predicts it, `target`, its id, and `row`,
    `column`, its place in the (N, T) of the Batch.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    owner: torch.Tensor
    predictor: torch.Tensor
    target: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    @property
    def attention(self) -> torch.Tensor | None:
        """(R, 1, W, W), True where a query may look, or None where causal attention is enough."""
        if self.owner.max() < 2:
            return None
        causal = torch.ones(2 * self.owner.shape[1:], dtype=torch.bool).tril()
        query, key = self.owner[:, :, None], self.owner[:, None, :]
        return (((key == 0) | (key == query)) & causal)[:, None]

    @cached_property
    def tokens(self) -> Tokens:
        """The same without rows and padding."""
        real = (self.owner >= 0).flatten()
        number = real.cumsum(0) - 1
        lone, prompts, completions = [], [], []
        for owner, row in zip(self.owner, number.view_as(self.owner)):
            parts = row[owner >= 0].split(owner[owner >= 0].unique_consecutive(return_counts=True)[1].tolist())
            shared = len(parts) > 2
            lone.append(parts[0] if shared else torch.cat(parts))
            if shared:
                prompts += parts[:1] * (len(parts) - 1)
                completions += parts[1:]
        ids, positions = (x.flatten()[real] for x in (self.ids, self.positions))
        return Tokens(ids, positions, number[self.predictor], *_table(lone), *_table(prompts), *_table(completions))


@dataclass(frozen=True)
class Tokens:
    """M tokens in one line, ids and positions (M,), and tables of their numbers. What sees only itself is a row of `lone`
    (A, P): shared prompts, and rollouts that share none. A row of `completions` (S, T) also sees its row of `prompts`
    (S, P'). Tables are padded at the right with 0; `*_real` is True where they are not padding."""

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
    a row. Neighbouring rollouts of the same prompt share it."""
    rows: list[list[int]] = []
    for i, r in enumerate(rollouts):
        fits = rows and rollouts[rows[-1][0]].prompt == r.prompt
        taken = len(r.prompt) + sum(len(rollouts[j].tokens) for j in rows[-1]) if fits else 0
        if fits and taken + len(r.tokens) <= width:
            rows[-1].append(i)
        else:
            rows.append([i])
    length = max(len(rollouts[row[0]].prompt) + sum(len(rollouts[i].tokens) for i in row) for row in rows)
    ids = torch.full((len(rows), length), pad_id)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    owner = torch.full((len(rows), length), -1)
    places = []
    for r, row in enumerate(rows):
        prompt = rollouts[row[0]].prompt
        p = at = len(prompt)
        ids[r, :p], positions[r, :p], owner[r, :p] = torch.tensor(prompt), torch.arange(p), 0
        for k, i in enumerate(row, start=1):
            tokens, span = rollouts[i].tokens, slice(at, at + len(rollouts[i].tokens))
            ids[r, span], owner[r, span] = torch.tensor(tokens), k
            positions[r, span] = torch.arange(p, p + len(tokens))
            chosen = torch.tensor(rollouts[i].mask).nonzero().squeeze(1)
            before = torch.where(chosen == 0, p - 1, at + chosen - 1)
            target = torch.tensor(tokens, dtype=torch.long)[chosen]  # also where there are none
            places.append(torch.stack([before + r * length, target, torch.full_like(chosen, i), chosen]))
            at += len(tokens)
    return Layout(ids, positions, owner, *torch.cat(places, dim=1))
