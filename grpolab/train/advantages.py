"""Rewards of groups -> advantages. B prompts, G rollouts each; a reward of NaN (None in a list) abstains.

A group whose rewards are all equal carries no signal and gets exactly zero by an equality test: in floating point its
mean need not equal its members, and dividing by a tiny std would turn that rounding into a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STD_FLOOR = 1e-4


def reward_tensor(groups: Sequence[Sequence[float | None]]) -> Tensor:
    """Lists of rewards, None where a rollout has none -> (B, G) fp32 with NaN there."""
    sizes = {len(g) for g in groups}
    if len(sizes) != 1:
        raise ValueError(f"every group needs the same number of rewards, got sizes {sorted(sizes)}")
    return torch.tensor([[float("nan") if r is None else float(r) for r in g] for g in groups])


def advantages(rewards: Tensor, kind: str = "centred") -> Tensor:
    """(B, G) rewards -> (B, G) advantages. Abstaining rollouts get 0 and do not count in the group.

    "centred" (default): r - mean of the group (Dr. GRPO, arXiv 2503.20783).
    "standardised": that / (std of the group + 1e-4), the std with n - 1 (GRPO, arXiv 2402.03300).
    "leave_one_out": r - mean of the others = centred * n / (n - 1) (RLOO, arXiv 2402.14740).
    "batch_standardised": centred / (std of all rewards + 1e-4), the std with n - 1 (arXiv 2508.08221).
    """
    rewards = _checked(rewards)
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
    return a.masked_fill(rewards.isnan() | ~informative(rewards)[:, None], 0)


def informative(rewards: Tensor) -> Tensor:
    """(B, G) -> (B,) bool: the groups with at least two different rewards, which dynamic sampling keeps."""
    rewards = _checked(rewards)
    low, high = rewards.nan_to_num(torch.inf).amin(1), rewards.nan_to_num(-torch.inf).amax(1)
    return low < high


def group_health(rewards: Tensor, right: float = 1.0) -> dict[str, float]:
    """Shares of the groups (those with any reward): all_wrong, mixed and all_right add to 1; a rollout is right from
    a reward of `right` on. `uninformative` is the share with all rewards equal.
    """
    rewards = _checked(rewards)
    rewards = rewards[~rewards.isnan().all(1)]
    rights, n = (rewards >= right).sum(1), (~rewards.isnan()).sum(1)
    shares = {"all_wrong": rights == 0, "mixed": (0 < rights) & (rights < n), "all_right": rights == n,
              "uninformative": ~informative(rewards)}
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
    return rewards if rewards.is_floating_point() else rewards.float()
