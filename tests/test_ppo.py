"""The critic: its advantages against a direct sum, PPO against GRPO where both must be equal, and what a critic learns."""

import dataclasses
import math

import pytest
import torch
from loop_helpers import flat, rows_of

from grpolab import load_policy
from grpolab.arithmetic import Task, generate
from grpolab.rollouts import Group, Rollout
from grpolab.runs.run import Run
from grpolab.runs.selection import Selection
from grpolab.train import Critic, CriticConfig, GRPOConfig, RewardModel, Several, SFTConfig, demonstrations, grpo, sft
from grpolab.train.loop import make_optimiser
from grpolab.train.ppo import gae

KNOWN, _ = generate(200, 10, seed=3, task=Task(ops="+", max_operand=30))
CONFIG = GRPOConfig(steps=3, prompts_per_step=4, group_size=4, max_new_tokens=16, lr=1e-4)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A policy that is right sometimes, as a folder."""
    policy = load_policy("tiny")
    rows_of(sft(policy, demonstrations(policy, KNOWN[:50]), SFTConfig(steps=40, batch_size=16, lr=1e-3)))
    return str(policy.save(tmp_path_factory.mktemp("start") / "policy"))


def by_definition(reward, values, gamma, lam):
    """The sum over all later tokens, of one row without gaps."""
    ahead = [*(gamma * v for v in values[1:]), reward]
    delta = [after - v for after, v in zip(ahead, values)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(values))) for t in range(len(values))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.9), (0.97, 0.8), (0.9, 0.0)])
def test_gae_is_the_direct_sum_over_the_tokens_that_the_policy_chose(gamma, lam):
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0.0]])
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    rewards = torch.tensor([1.0, -0.5, 0.3, 2.0], dtype=torch.float64)
    a = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert (a[mask == 0] == 0).all()
    for row, kept, v, r in zip(a, mask.bool(), values, rewards):
        wanted = torch.tensor(by_definition(r.item(), v[kept].tolist(), gamma, lam), dtype=torch.float64)
        torch.testing.assert_close(row[kept], wanted)


class GroupMean(Critic):
    """Its value is the mean reward of the rollout's group everywhere."""

    def judge(self, policy, groups, config):
        self.means = {id(r): sum(g.rewards) / len(g) for g in groups for r in g}
        return super().judge(policy, groups, config)

    def values(self, policy, rollouts, config):
        values = super().values(policy, rollouts, config)
        return values * 0 + torch.tensor([[self.means[id(r)]] for r in rollouts])


@pytest.mark.parametrize("options", [{}, *(pytest.param(more, marks=pytest.mark.full) for more in (
    {"inner_epochs": 2, "minibatches": 2}, {"token_budget": 64}))])
def test_ppo_is_grpo_where_lambda_is_1_and_the_value_the_groups_mean(start, options):
    """The same rows and the same weights, to rounding; with another lambda they are others."""
    config = dataclasses.replace(CONFIG, **options)
    policies = {}
    for name, lam in (("grpo", None), ("ppo", 1.0), ("other", 0.5)):
        policies[name] = policy = load_policy(start)
        critic = None if lam is None else GroupMean(RewardModel.from_policy(policy), CriticConfig(lam=lam))
        rows = rows_of(grpo(policy, None, KNOWN[50:], config, critic=critic))
        assert any(row["trained_groups"] for row in rows)
    moved = (flat(policies["grpo"]) - flat(load_policy(start))).norm()
    assert (flat(policies["ppo"]) - flat(policies["grpo"])).norm() < 1e-3 * moved
    assert (flat(policies["other"]) - flat(policies["grpo"])).norm() > 0.01 * moved
    assert not hasattr(policies["ppo"].model, "critic")


def rollout(prompt, tokens, mask, reward):
    zeros = (0.0,) * len(tokens)
    return Rollout(tuple(prompt), tuple(tokens), tuple(mask), zeros, zeros, "done", reward=reward)


def test_a_critic_learns_what_a_prefix_is_worth(start):
    """The third token decides the reward; before it the value goes to the mean, after it to the reward. Nothing else counts."""
    policy = load_policy(start)
    critic = Critic(RewardModel.from_policy(policy), CriticConfig(lam=1.0, lr=3e-3, epochs=60))
    good, bad = ([20, 21, token, 24, 25] for token in (22, 23))
    groups = [Group((rollout([5, 6, 7], good, [1, 1, 1, 0, 1], 1.0), rollout([5, 6, 7], bad, [1, 1, 1, 0, 1], 0.0),
                     rollout([5, 6, 7], [30, 31], [1, 1], None)))]
    before = flat(policy).clone()
    with critic.beside(policy):
        optimiser = make_optimiser(policy, CONFIG)
        a, returns = critic.judge(policy, groups, CONFIG)
        row = critic.fit(policy, groups, returns, CONFIG, optimiser, 5)
    torch.testing.assert_close(a[0, 0], torch.tensor([1.0, 1, 1, 0, 1]))  # of a head of zeros
    assert a[0, 1].abs().max() == a[0, 2].abs().max() == 0 and row["value_loss"] == pytest.approx(0.25)
    learned = critic.values(policy, groups[0].rollouts, CONFIG).detach()
    assert (learned[:2, :3] - 0.5).abs().max() < 0.1
    assert (learned[0, 4] - 1).abs() < 0.1 and learned[1, 4].abs() < 0.1 and learned[0, 3] == 0
    assert torch.equal(flat(policy), before)


@pytest.mark.full
def test_a_run_with_a_critic_goes_on_in_every_bit(start, tmp_path):
    """Broken off after two steps, and taken up by another policy and critic, as in another process."""
    def taken(folder, steps):
        policy = load_policy(start)
        critic = Critic(RewardModel.from_policy(policy), CriticConfig())
        loop = grpo(policy, None, KNOWN[50:], dataclasses.replace(CONFIG, steps=4), critic=critic,
                    run=Run("a", root=tmp_path / folder))
        return policy, critic, rows_of(loop, steps)

    whole, critic, rows = taken("whole", 4)
    taken("broken", 2)
    again, critic_again, more = taken("broken", 4)
    assert [row["step"] for row in more] == [2, 3] and len({row["value_loss"] for row in rows}) == 4
    assert torch.equal(flat(whole), flat(again))
    assert torch.equal(flat(critic.model), flat(critic_again.model))
    recorded = Run("a", root=tmp_path / "whole").recorder.groups(3)
    assert any(sum(g.advantages) > 1e-3 for g in recorded)  # the critic's: those of a group add up to 0


def test_what_a_critic_cannot_do_is_refused(start, tmp_path):
    policy = load_policy(start)
    critic = Critic(RewardModel.from_policy(policy))
    with pytest.raises(ValueError, match="replay_every=2"):
        rows_of(grpo(policy, None, KNOWN, CONFIG, critic=critic, run=Run("a", root=tmp_path, replay_every=2)))
    for options in ({"lam": 1.1}, {"gamma": 0.0}, {"lr": 0.0}, {"epochs": 0}):
        with pytest.raises(ValueError, match="lam lies in"):
            CriticConfig(**options)
    gated = Several({"a": (lambda *_: 1.0, 1.0)})
    with pytest.raises(ValueError, match="gated"):
        rows_of(grpo(policy, None, KNOWN, CONFIG, critic=critic, reward=gated))


def test_the_best_policy_beside_a_critic_is_the_policy_alone(start, tmp_path):
    """And a step without a group to train on is a row as any other."""
    policy, seen = load_policy(start), []
    critic = Critic(RewardModel.from_policy(policy))

    def measure(policy):
        seen.append(flat(policy))
        return float(len(seen))

    run = Run("best", root=tmp_path, select=Selection(measure, every=1))
    config = dataclasses.replace(CONFIG, steps=2)
    rows_of(grpo(policy, None, KNOWN, config, critic=critic, run=run))
    n = sum(p.numel() for p in load_policy(start).model.parameters())
    assert torch.equal(flat(run.best()), seen[-1][:n]) and len(seen) == 3
    rows = rows_of(grpo(policy, None, KNOWN, dataclasses.replace(config, refills=1), critic=critic, reward=lambda *_: 1.0))
    assert [(row["trained_groups"], math.isnan(row["value_loss"])) for row in rows] == [(0, True)] * 2
