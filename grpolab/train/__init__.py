"""The training methods: short async generators that yield a row a step, over losses that are pure functions."""

from grpolab.train.async_grpo import AsyncGRPOConfig, async_grpo
from grpolab.train.distil import DistilConfig, distil
from grpolab.train.dpo import DPOConfig, dpo, dpo_gradient, implicit_rewards
from grpolab.train.episodes import Limits
from grpolab.train.grpo import GRPOConfig, grpo, grpo_from
from grpolab.train.multiturn import multi_turn_grpo
from grpolab.train.ppo import Critic, CriticConfig
from grpolab.train.replay_source import recorded_groups
from grpolab.train.reward_model import RewardConfig, RewardModel, reward_gradient, reward_model
from grpolab.train.rewards import finished_and_correct, score
from grpolab.train.several_rewards import Several, trl_reward
from grpolab.train.sft import SFTConfig, demonstrations, sft

__all__ = [
    "AsyncGRPOConfig", "Critic", "CriticConfig", "DPOConfig", "DistilConfig", "GRPOConfig", "Limits", "RewardConfig",
    "RewardModel", "SFTConfig", "Several", "async_grpo", "demonstrations", "distil", "dpo", "dpo_gradient",
    "finished_and_correct", "grpo", "grpo_from", "implicit_rewards", "multi_turn_grpo", "recorded_groups",
    "reward_gradient", "reward_model", "score", "sft", "trl_reward",
]
