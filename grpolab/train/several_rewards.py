"""Several rewards as one, and reward functions that were written for TRL."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from grpolab.rollouts import Group, Rollout
from grpolab.tasks import prompt_of
from grpolab.train.advantages import STD_FLOOR, advantages, informative, reward_tensor
from grpolab.train.rewards import Reward, Total, name_of, outcomes

COMBINATIONS = ("gated", "sum", "normalise_then_sum")


class Several:
    """Several rewards as one, by name with their weights; each stands in the step's row and in the record under its name.

    "gated" (default)      the sum of w_k r_k; but a group whose first rewards are all equal is not trained on: the first says
                           whether a rollout succeeded, and failures do not compete in form (verl-recipe#125).
    "sum"                  the sum of w_k r_k, TRL's sum_then_normalize: a group in which nothing succeeded is then trained on
                           what its failures differ in, a length, say.
    "normalise_then_sum"   each r_k standardised in its group, then the sum of w_k times that, over its std in the batch (GDPO,
                           arXiv 2601.05242; TRL's normalize_then_sum). `advantage_kind` is then not used.

    A rollout whose first reward abstains (None) abstains; another that does adds nothing.
    """

    def __init__(self, rewards: Mapping[str, tuple[Reward, float]], combination: str = "gated"):
        if combination not in COMBINATIONS:
            raise ValueError(f"combination={combination!r}: use one of {', '.join(COMBINATIONS)}")
        if not rewards:
            raise ValueError("several rewards are at least one: give {name: (reward, weight), ...}")
        for name, pair in rewards.items():
            reward, weight = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
            is_reward = (callable(reward) or hasattr(reward, "batch")) and not isinstance(reward, Several)
            if not (is_reward and name and isinstance(name, str) and isinstance(weight, int | float) and math.isfinite(weight)):
                raise ValueError(f"{{{name!r:.40}: {pair!r:.80}}} is no reward with its weight: give {{name: (reward, weight)}}"
                                 "; a name is a text, a weight a finite number, and no reward a Several itself")
        self.rewards, self.combination = dict(rewards), combination
        self.gate = next(iter(rewards)) if combination == "gated" else None  # whose differences alone teach
        self.__name__ = " + ".join(f"{weight:g} {name}" for name, (_, weight) in rewards.items())

    async def batch(self, texts: Sequence[str], rows: Sequence[Any], rollouts: Sequence[Rollout]) -> list[Total | Exception]:
        """Each rollout's total, or the error of the first of its rewards that raised. All rewards are computed at once."""
        by_name = await asyncio.gather(*(
            outcomes(reward, texts, rows, rollouts, name) for name, (reward, _) in self.rewards.items()))
        return [self._total(values) for values in zip(*by_name)]

    def _total(self, values: Sequence[Total | Exception]) -> Total | Exception:
        if error := next((value for value in values if isinstance(value, Exception)), None):
            return error
        parts = {name: value.reward for name, value in zip(self.rewards, values)}
        first, *others = [x and x * weight for x, (_, weight) in zip(parts.values(), self.rewards.values())]
        return Total(None if first is None else first + sum(x for x in others if x is not None), parts)

    def advantages(self, groups: Sequence[Group], kind: str) -> torch.Tensor | None:
        """(B, G), where the totals alone do not make them; `kind` as in `advantages.advantages`."""
        if self.combination == "sum" or not groups:
            return None
        totals = reward_tensor([g.rewards for g in groups])
        if self.gate:
            return advantages(totals, kind).masked_fill(~informative(part_of(groups, self.gate))[:, None], 0)
        there = ~totals.isnan()
        parts = {name: part_of(groups, name).masked_fill(~there, torch.nan) for name in self.rewards}  # none of who abstains
        each = [weight * advantages(parts[name], "standardised") for name, (_, weight) in self.rewards.items()]
        a = torch.stack(each).sum(0)
        return a / (a[there].std() + STD_FLOOR) if there.sum() > 1 else torch.zeros_like(a)


def check_sum(reward: Reward) -> None:
    """Refuse several rewards whose advantages are not those of their totals, where totals are all that is looked at."""
    if isinstance(reward, Several) and reward.combination != "sum":
        raise ValueError(f"with combination={reward.combination!r} advantages are not those of the totals, which are all that "
                         "is asked for here: give Several(..., 'sum'), or one of its rewards")


def part_of(groups: Sequence[Group], name: str) -> torch.Tensor:
    """(B, G): one of the rewards that theirs are made of; NaN where it abstained."""
    return reward_tensor([[r.parts.get(name) for r in g] for g in groups])


def trl_reward(function: Callable[..., Any]) -> Reward:
    """A reward function of TRL's, function(prompts, completions, completion_ids, **columns) -> a number, or None, for each,
    plain or async, as a reward here. The columns are those of the rows, which are mappings; a row with `messages` for its
    prompt has its completion as messages too. What TRL passes beside these (trainer_state, log_extra) is not there."""
    def arguments(texts, rows, rollouts):
        if wrong := next((row for row in rows if not isinstance(row, Mapping)), None):
            raise TypeError(f"a reward function of TRL's gets the columns of a row, so rows are mappings, got {wrong!r:.80}")
        talks = [not isinstance(prompt_of(row), str) for row in rows]
        completions = [[{"role": "assistant", "content": text}] if talk else text for text, talk in zip(texts, talks)]
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names if name not in ("prompt", "messages")}
        return columns | {"prompts": [prompt_of(row) for row in rows], "completions": completions,
                          "completion_ids": [list(r.tokens) for r in rollouts]}

    class FromTRL:
        __name__ = name_of(function)

        def batch(self, texts, rows, rollouts):  # of an async function an awaitable
            return function(**arguments(texts, rows, rollouts))

    return FromTRL()
