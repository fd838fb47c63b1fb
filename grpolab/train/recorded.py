"""What a step sampled, as its record keeps it: groups with their advantages, the question, and what else is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from grpolab.rollouts import Group, RecordedGroup
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.episodes import Episode, as_task


def as_recorded(
    sampled: Sequence[tuple[Any, Group]], used: Sequence[Group], parts: Mapping[str, Sequence], kind: str,
    made: Tensor | None = None,
) -> list[RecordedGroup]:
    """The groups that the update gets, in their order, then the others of those `sampled`, (problem, group). `parts` holds a
    (B, G) by name for the first B of them; `kind` is that of the advantage, `made` (B, G) the used ones' where it is of no
    kind."""
    place = {id(group): i for i, (_, group) in enumerate(sampled)}
    rest = [group for _, group in sampled if all(group is not g for g in used)]
    used_a = _advantages(used, kind) if made is None else made.tolist()
    order, a = [*used, *rest], used_a + _advantages(rest, kind)  # as the update has them, its groups alone
    return [
        RecordedGroup(g, tuple(a[k]), sampled[place[id(g)]][0], used=k < len(used),
                      parts={name: [r.parts.get(name) for r in g] for name in dict.fromkeys(n for r in g for n in r.parts)}
                      | {name: values[place[id(g)]] for name, values in parts.items() if place[id(g)] < len(values)})
        for k, g in enumerate(order)
    ]


def episodes_as_recorded(
    asked: Sequence, episodes: Sequence[Episode | None], groups: Sequence[Group], scored: Sequence[Group], kind: str
) -> list[RecordedGroup]:
    """The groups that `as_groups` made of the episodes of the tasks `asked`; `scored` are those that the update gets. What an
    episode wrote that the update does not get is there too."""
    size, out = len(episodes) // max(1, len(asked)), []
    chunks = [(task, episodes[i * size : (i + 1) * size]) for i, task in enumerate(asked)]
    played = [(task, members) for task, members in chunks if any(e is not None for e in members)]
    for (task, members), group, values in zip(played, groups, _advantages(groups, kind)):
        measures = dict.fromkeys(name for e in members if e is not None for name in e.measures)
        out.append(RecordedGroup(
            Group(tuple(r if e is None else e.rollout for e, r in zip(members, group))), tuple(values), as_task(task),
            parts={name: [e and e.measures.get(name) for e in members] for name in measures},
            turns=[() if e is None else e.turns for e in members], used=any(group is g for g in scored),
            absent=tuple(e is None or r is not e.rollout for e, r in zip(members, group))))
    return sorted(out, key=lambda g: not g.used)


def _advantages(groups: Sequence[Group], kind: str) -> list[list[float]]:
    return advantages(reward_tensor([g.rewards for g in groups]), kind).tolist() if groups else []
