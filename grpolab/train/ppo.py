"""A critic: with it the advantages of GRPO become those of PPO, one a token, and the rest of the step stays as it is.

    critic = Critic(RewardModel.from_policy(policy), CriticConfig(lam=0.95))
    async for row in multi_turn_grpo(policy, None, tasks, config, pool, critic=critic): ...

GRPO compares a rollout with the others of its group, and all of its tokens get one number. A critic learns the value V of every
prefix, what is still to be earned from there, so that a token gets what it changed. While the loop runs it is a module of the
policy's model, by which it is optimised and kept in checkpoints; save the policy before or after.

Shapes: B prompts, G rollouts each, N = B G rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpolab.models.load import Policy
from grpolab.rollouts import Group, RecordedGroup, Rollout, padded
from grpolab.runs.run import Run
from grpolab.train import distributed, losses
from grpolab.train.advantages import reward_tensor
from grpolab.train.layout import lay_out
from grpolab.train.logps import parts_of, rollout_states, way_of
from grpolab.train.loop import accumulate, apply_gradient, autocast
from grpolab.train.reward_model import RewardModel


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16): A_t = sum_k (gamma lam)^k delta_{t+k}, with
    delta_t = gamma V_{t+1} - V_t, and r - V_t at the last. It counts the kept tokens alone; (N, T), 0 elsewhere.

    rewards (N,): paid after the last kept token; values (N, T): of the prefix before each token; mask (N, T).
    """
    a, following, after = torch.zeros_like(values), torch.zeros_like(rewards), rewards
    for t in reversed(range(mask.shape[1])):
        keep = mask[:, t].bool()
        a[:, t] = torch.where(keep, after - values[:, t] + lam * following, 0)
        following, after = (torch.where(keep, gamma * now[:, t], then) for now, then in ((a, following), (values, after)))
    return a


@dataclass(frozen=True)
class CriticConfig:
    """With lam = 1 and gamma = 1 an advantage is the reward less the value; with a smaller lam values of later prefixes
    stand for what came of them, which is less noisy and as wrong as the values are."""

    lam: float = 0.95  # lambda of the generalised advantage estimation
    gamma: float = 1.0  # discount a token
    lr: float = 1e-3  # the critic's learning rate, with the policy's warm-up and schedule
    epochs: int = 1  # optimiser steps of the critic on each step's rollouts

    def __post_init__(self):
        if not (0 <= self.lam <= 1 and 0 < self.gamma <= 1 and self.lr > 0 and self.epochs >= 1):
            raise ValueError(f"lam lies in [0, 1], gamma in (0, 1], lr is positive and epochs at least 1, got {self}")


class Critic:
    """The values of prefixes: those of a reward model that reads the prompt and a part of the completion."""

    def __init__(self, model: RewardModel, config: CriticConfig | None = None):
        self.model, self.config = model, config or CriticConfig()

    def values(self, policy: Policy, rollouts: Sequence[Rollout], config) -> Tensor:
        """(N, T) with gradient: the value before each token that the policy chose, 0 elsewhere."""
        layout = lay_out(rollouts, share=config.share_prompts, pad_id=policy.pad_id)
        with autocast(policy, config):
            states = rollout_states(self.model, layout, way=way_of(policy, "rollouts"),
                                    checkpointed=config.checkpoint_activations)
        values, width = self.model.head(states), max(1, *(len(r.tokens) for r in rollouts))
        return values.new_zeros(len(rollouts), width).index_put((layout.row.to(values.device), layout.column.to(values.device)),
                                                                values)

    @torch.no_grad()
    def judge(self, policy: Policy, groups: Sequence[Group], config) -> tuple[Tensor, Tensor]:
        """The advantages of the groups' tokens, and the values that the critic shall learn, A + V: (B, G, T) each. A rollout
        that abstains gets 0, and is not learned."""
        rollouts = [r for g in groups for r in g]
        if not rollouts:
            return (torch.zeros(0, 0, 1),) * 2
        mask = padded([r.mask for r in rollouts])
        values = torch.zeros_like(mask)
        for part in parts_of(policy, rollouts, config.token_budget, share=config.share_prompts):
            part_values = self.values(policy, rollouts[part], config).cpu()
            values[part, : part_values.shape[1]] = part_values
        rewards = reward_tensor([g.rewards for g in groups]).flatten().float()
        a = gae(rewards.nan_to_num(), values, mask * ~rewards.isnan()[:, None], gamma=self.config.gamma, lam=self.config.lam)
        return tuple(x.unflatten(0, (len(groups), -1)) for x in (a, a + values))

    def fit(self, policy: Policy, groups: Sequence[Group], returns: Tensor, config, optimiser, step: int) -> dict:
        """Steps of the critic towards the returns (B, G, T), by half the squared error of a token; the first step's metrics."""
        rewarded = [(r, target) for g, targets in zip(groups, returns) for r, target in zip(g, targets) if r.reward is not None]
        rollouts, targets = [r for r, _ in rewarded], [target for _, target in rewarded]
        tokens, rows = sum(sum(r.mask) for r in rollouts), []
        if not tokens:
            return {"value_loss": float("nan"), "explained": float("nan")}

        def parts():
            for part in parts_of(policy, rollouts, config.token_budget, share=config.share_prompts):
                values = self.values(policy, rollouts[part], config)
                mask = padded([r.mask for r in rollouts[part]]).to(values.device)
                target = torch.stack(targets[part])[:, : values.shape[1]].to(values.device)
                loss = losses.aggregate((values - target).square() / 2, mask, denominator=tokens)
                yield loss, {"value_loss": loss.detach()}

        for _ in range(self.config.epochs):
            rows.append(accumulate(self.model, parts()))
            apply_gradient(self.model, optimiser, replace(config, lr=self.config.lr), step)
        learned = torch.cat([target[: len(r.mask)][torch.tensor(r.mask).bool()] for r, target in rewarded])
        spread = learned.var(unbiased=False).item() / 2
        return rows[0] | {"explained": 1 - rows[0]["value_loss"] / spread if spread else float("nan")}

    def recorded(self, groups: Sequence[RecordedGroup], a: Tensor) -> list[RecordedGroup]:
        """The recorded groups with the mean advantage of each rollout's tokens; those that the update got stand first."""
        means = [[x[: len(r.mask)].sum().item() / max(1, sum(r.mask)) for x, r in zip(of, g.trained)]
                 for of, g in zip(a, groups)]
        return [replace(g, advantages=tuple(row)) for g, row in zip(groups, means)] + list(groups[len(a):])

    def check(self, policy: Policy, run: Run | None) -> None:
        """Refuse what it cannot do, before the first step."""
        if self.model.model is policy.model or type(self.model.model.base_model) is not type(policy.model.base_model):
            raise ValueError(f"the critic is another kind of model than {policy.name!r}: make it with "
                             "RewardModel.from_policy(policy)")
        if self.model.dtype == torch.float16:
            raise ValueError("a critic has no loss scaling: load policy and critic with dtype='bfloat16' or 'float32'")
        if distributed.world().size > 1:
            raise ValueError("a critic trains in one process: start one, or train without critic")
        if run is not None and run.replay_every:
            raise ValueError(f"replay_every={run.replay_every}: the steps of a run with a critic cannot be done again from its "
                             "record, which has no values; leave it 0")

    @contextmanager
    def beside(self, policy: Policy) -> Iterator[None]:
        """A module of the policy's model for the while, for the optimiser and the checkpoints."""
        policy.model.add_module("critic", self.model.model)
        try:
            yield
        finally:
            del policy.model.critic
