"""What travels along the flow: Rollout (one completion), Group (G rollouts of one prompt), Batch (tensors for the loss),
and RecordedGroup (a group as a run keeps it).

Shapes: B prompts, G rollouts each, N = B * G rollouts, T tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

CUT = frozenset({"length", "context", "cancelled"})  # finish reasons of what the policy did not end itself


@dataclass(frozen=True)
class Rollout:
    """One completion. `mask`, `logps` and `raw_logps` have one entry a token of `tokens`.

    `mask` is 1 where the policy chose the token and 0 where an environment wrote it (its logps are then 0.0).
    `logps` are under the distribution that was sampled from, `raw_logps` at temperature 1, both in nats. `kept_mass` is the
    probability that top-k, top-p or min-p left at each token, empty where nothing was cut. `versions` are those of the weights
    that drew each token, empty where all are `policy_version`. `parts` are the numbers, by name, that the reward was made of,
    where it has several. `temperature` is the one that it was sampled at where that is not the loss's.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    logps: tuple[float, ...]
    raw_logps: tuple[float, ...]
    finish_reason: str
    seed: int = 0
    policy_version: int = 0
    reward: float | None = None
    kept_mass: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    parts: Mapping[str, float | None] = field(default_factory=dict, compare=False)
    temperature: float | None = None

    def __post_init__(self):
        lengths = {name: len(getattr(self, name)) for name in ("tokens", "mask", "logps", "raw_logps")}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a rollout needs one mask, logp and raw_logp for each token, but the lengths are {lengths}")

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The version of the weights that drew each token."""
        return self.versions or (self.policy_version,) * len(self.tokens)


@dataclass(frozen=True)
class Group:
    """G rollouts of one prompt; indexes and iterates like a tuple of rollouts."""

    rollouts: tuple[Rollout, ...]

    def __getitem__(self, i):
        return self.rollouts[i]

    def __len__(self):
        return len(self.rollouts)

    def __iter__(self):
        return iter(self.rollouts)

    @property
    def rewards(self) -> list[float | None]:
        return [r.reward for r in self.rollouts]

    def with_rewards(self, rewards: Sequence[float | None], parts: Sequence[Mapping[str, float | None]] = ()) -> Group:
        """The same group with one reward a rollout, and what each was made of."""
        if len(rewards) != len(self):
            raise ValueError(f"{len(rewards)} rewards for a group of {len(self)} rollouts")
        made = zip(self.rollouts, rewards, parts or ({},) * len(self), strict=True)
        return Group(tuple(replace(r, reward=reward, parts=of) for r, reward, of in made))


@dataclass(frozen=True)
class RecordedGroup:
    """A group of a step as a loop hands it to its Run, and as the record gives it back.

    `advantages` one a rollout; `problem` any JSON value or dataclass; `parts` further numbers of each rollout by name
    (watched rewards, measures of an episode); `turns` of each rollout, pairs (what the policy wrote, what it was told).
    `used` is False for a group that the update did not get, and `absent` is True for a rollout that it did not get.
    """

    group: Group
    advantages: tuple[float, ...]
    problem: Any = None
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    turns: Sequence[Sequence[tuple[str, str]]] = ()
    used: bool = True
    absent: tuple[bool, ...] = ()

    @property
    def trained(self) -> Group:
        """The group as the update gets it: an absent rollout is empty and has no reward."""
        lost = [Rollout(r.prompt, (), (), (), (), "lost") for r in self.group]
        return Group(tuple(x if gone else r for r, x, gone in zip(self.group, lost, self.absent or (False,) * len(lost))))

    def filled(self, n: int) -> tuple[Group, list[float]]:
        """`trained` and its advantages, `n` of each: empty rollouts without reward fill it up."""
        more = n - len(self.group)
        lost = Rollout(self.group[0].prompt, (), (), (), (), "lost")
        return Group((*self.trained, *[lost] * more)), [*self.advantages, *[0.0] * more]


@dataclass(frozen=True)
class Batch:
    """What the losses read: N rollouts, T the longest completion, right-padded. mask, old_logps: (N, T); advantages: (N,), or
    (N, T) with a critic. Column t speaks of the t-th token after the prompt."""

    mask: torch.Tensor
    old_logps: torch.Tensor
    advantages: torch.Tensor


def given(prompt: Sequence[int], tokens: Sequence[int], mask: Sequence[int]) -> Rollout:
    """A completion that nobody sampled, as the layout of a forward pass takes it: its logps are not known (NaN)."""
    unknown = (float("nan"),) * len(tokens)
    return Rollout(tuple(prompt), tuple(tokens), tuple(mask), unknown, unknown, "given")


def collate(rollouts: Sequence[Rollout], advantages: torch.Tensor) -> Batch:
    """Rollouts and their advantages, (N,) or of each token (N, at least T) -> Batch; old_logps are the sampler's."""
    if not rollouts:
        raise ValueError("cannot collate an empty list of rollouts")
    mask = padded([r.mask for r in rollouts])
    a = advantages if advantages.dim() == 1 else advantages[:, : mask.shape[1]]
    return Batch(mask, padded([r.logps for r in rollouts]), a.float())


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """N lists of a number a token -> (N, T) in fp32, padded at the right with 0; T is at least 1."""
    table = torch.zeros(len(rows), max([1, *map(len, rows)]))
    for line, row in zip(table, rows):
        line[: len(row)] = torch.as_tensor(row, dtype=torch.float32)
    return table
