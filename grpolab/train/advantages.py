"""Rewards of groups -> advantages. B prompts, G rollouts each; a reward of NaN (None in a list) abstains.

A group whose rewards are all equal carries no signal and gets exactly zero by an equality test: in floating point its
mean need not equal its members, and dividing by a tiny std would turn that rounding into a gradient. All of it is computed
in float64, since in fp32 rewards of 1e9 and 1e9 + 1 are one number.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

STD_FLOOR = 1e-4
ROUNDING = 1e-12  # rewards whose difference is a smaller share of them are equal: sums of the same numbers in another order


def number(value, giver: str) -> float | None:
    """The reward that `giver` gave, as a float: a number of Python, or a scalar of numpy or torch; None abstains. TypeError
    for anything else, also text that spells a number; ValueError for what is not finite (NaN abstains, as None does)."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if value is None or value != value:
        return None
    if not isinstance(value, Real):
        raise TypeError(f"the reward {giver!r} gave {value!r:.40}, of type {type(value).__name__}: a reward is a number, or "
                        "None to abstain")
    if abs(value) > sys.float_info.max:
        raise ValueError(f"the reward {giver!r} gave a number that is infinite or too large: a reward is a finite one, or None "
                         "to abstain")
    return float(value)


def reward_tensor(groups: Sequence[Sequence[float | None]]) -> Tensor:
    """Lists of rewards, None where a rollout has none -> (B, G) float64 with NaN there."""
    sizes = {len(g) for g in groups}
    if len(sizes) != 1:
        raise ValueError(f"every group needs the same number of rewards, got sizes {sorted(sizes)}")
    return torch.tensor([[float("nan") if r is None else float(r) for r in g] for g in groups], dtype=torch.float64)


def advantages(rewards: Tensor, kind: str = "centred") -> Tensor:
    """(B, G) rewards -> (B, G) advantages in the same dtype. Abstaining rollouts get 0 and do not count in the group.

    "centred" (default): r - mean of the group (Dr. GRPO, arXiv 2503.20783).
    "standardised": that / (std of the group + 1e-4), the std with n - 1 (GRPO, arXiv 2402.03300).
    "leave_one_out": r - mean of the others = centred * n / (n - 1) (RLOO, arXiv 2402.14740).
    "batch_standardised": centred / (std of all rewards + 1e-4), the std with n - 1 (arXiv 2508.08221).
    """
    dtype, rewards = rewards.dtype, _checked(rewards)
    n = (~rewards.isnan()).sum(1, keepdim=True)
    centred = rewards - rewards.nanmean(1, keepdim=True)
    if kind == "centred":
        a = centred
    elif kind == "standardised":
        a = centred / (_std(rewards, dim=1) + STD_FLOOR)
    elif kind == "leave_one_out":
        a = centred * n / (n - 1)
    elif kind == "batch_standardised":
        a = centred / (_std(rewards.flatten(), dim=0) + STD_FLOOR)
    else:
        kinds = "'centred', 'standardised', 'leave_one_out' or 'batch_standardised'"
        raise ValueError(f"kind must be {kinds}, got {kind!r}")
    a = a.masked_fill(rewards.isnan() | ~informative(rewards)[:, None], 0)
    return a.to(dtype) if dtype.is_floating_point else a.float()


def informative(rewards: Tensor) -> Tensor:
    """(B, G) -> (B,) bool: the groups with at least two different rewards, which dynamic sampling keeps. Rewards are equal
    within ROUNDING of their size."""
    rewards = _checked(rewards)
    low, high = rewards.nan_to_num(torch.inf).amin(1), rewards.nan_to_num(-torch.inf).amax(1)
    return high - low > ROUNDING * torch.maximum(low.abs(), high.abs())


def group_health(rewards: Tensor, right: float = 1.0) -> dict[str, float]:
    """Shares of the groups (those with any reward), which add to 1: `mixed`, whose rewards differ, so that only they have a
    gradient from the reward; and of those whose rewards are all equal `all_right`, from a reward of `right` on, and
    `all_wrong`. `uninformative` is the share of both.
    """
    rewards = _checked(rewards)
    rewards = rewards[~rewards.isnan().all(1)]
    mixed, right_at_all = informative(rewards), (rewards >= right).any(1)
    shares = {"all_wrong": ~mixed & ~right_at_all, "mixed": mixed, "all_right": ~mixed & right_at_all, "uninformative": ~mixed}
    return {k: v.float().mean().item() if len(rewards) else 0.0 for k, v in shares.items()}


def _std(x, dim):
    """Standard deviation with n - 1 over what is not NaN, kept dimension."""
    n = (~x.isnan()).sum(dim, keepdim=True)
    squares = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (squares / (n - 1)).sqrt()


def _checked(rewards):
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be (B, G), got shape {tuple(rewards.shape)}")
    if bool(rewards.isinf().any()):
        raise ValueError("rewards must be finite, or NaN to abstain, but some are infinite")
    return rewards.double()
