"""GRPO on episodes: groups of them from the slots of a pool, their rewards from the environment (`episodes.py`)."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.action_format import TEXT, ActionFormat
from grpolab.env.pool import GrpoPool, rollout_seed
from grpolab.models.load import Policy
from grpolab.runs.run import Run
from grpolab.train import distributed
from grpolab.train.episodes import Episode, Limits, as_groups, as_task, check_limits, play_all
from grpolab.train.grpo import GRPOConfig, check_names, check_reference, grpo_from
from grpolab.train.loop import off_loop
from grpolab.train.ppo import Critic
from grpolab.train.sources import Source, StepGroups, Tasks


async def multi_turn_grpo(policy: Policy, reference: Policy | None, problems: Any, config: GRPOConfig, pool: GrpoPool, *,
                          limits: Limits | None = None, action_format: ActionFormat = TEXT, success: float = 1.0,
                          run: Run | None = None, critic: Critic | None = None) -> AsyncIterator[dict]:
    """GRPO (arXiv 2402.03300) on episodes, or with a `critic` PPO (`ppo`); `config` as for one turn, where `max_new_tokens`
    now bounds each turn.

    `problems` are tasks, JSON values or dataclasses, or a curriculum: an object with `next_tasks(n)` and
    `record_result(task, rate)`, called after each step with the share of a group that earned at least `success`; with
    `state()` and `load(state)` too, a run that was interrupted goes on exactly, and a cell that is run again begins with the
    curriculum as it was. An environment may also draw its question from the seed: the rollouts of a group are reset with
    one, their draws have their own. `action_format` says how text becomes actions and observations text.

    Rows hold what `grpo` yields, and: turns, tool_rate (share of episodes with a call), calls and what else the action format
    measures, invalid (actions an episode that could not be read), abstained, unheard (share of the episodes in which the
    policy ended no turn), lost, env_s (mean seconds that an episode waited for its environment); with a
    curriculum, its tier and, as JSON, the results that it got.
    """
    limits = limits or Limits()
    check_reference(policy, reference, config)
    check_limits(policy, limits)
    if config.refills:
        raise ValueError(f"refills={config.refills}: dynamic sampling is grpo's; leave it 0 for episodes")
    sampler = await off_loop(lambda: Sampler(policy, exact=config.exact))
    tasks = Tasks(problems, config, run, success)
    source = played(pool, sampler, tasks, config, limits, action_format)
    steps = grpo_from(policy, reference, source, config, longest=limits.max_total_tokens, run=run,
                      content=lambda: map(as_task, tasks.content()), critic=critic)
    async with sampler, aclosing(steps) as rows:
        async for row in rows:
            yield row


def played(pool: GrpoPool, sampler: Sampler, tasks: Tasks, config: GRPOConfig, limits: Limits,
           action_format: ActionFormat) -> Source:
    """The source of `multi_turn_grpo`: episodes of the tasks on the slots of a pool."""
    warnings_given: list[str] = []

    async def source(step: int) -> StepGroups:
        size = config.group_size
        rows = [as_task(row) for row in tasks.tasks(step)]
        shard = distributed.shard(range(len(rows)))
        episodes = await play_all(
            pool, sampler, [rows[g] for g in shard for _ in range(size)], limits=limits, action_format=action_format,
            params=SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens),
            seeds=[_draws_of(config.seed, step, g * size + i) for g in shard for i in range(size)],
            reset_seeds=[rollout_seed(config.seed, step, -1 - g) for g in shard for _ in range(size)])
        own = [episodes[i * size : (i + 1) * size] for i in range(len(shard))]
        by_task = await off_loop(lambda: distributed.gathered(f"the episodes of step {step}", rows, own))
        episodes = [episode for members in by_task for episode in members]
        groups = as_groups(rows, episodes, config.advantage_kind, pool.min_group if pool.on_failure == "drop" else 1)
        check_names(None, {name for e in episodes if e for name in e.measures})
        habits = _habits(episodes)
        _warn(habits, config, limits, warnings_given)
        rewards = [[e and e.rollout.reward for e in members] for members in by_task]
        return StepGroups(
            [g.trained for g in groups if g.used], habits, seen=[g.trained for g in groups],
            tokens=sum(sum(e.rollout.mask) for e in episodes if e is not None),
            after_step=lambda: tasks.record(rows, rewards), record=lambda: groups, engine=sampler.engine.name)

    return source


def _draws_of(seed: int, step: int, rollout: int) -> int:
    """The seed of one rollout's draws, below 2**63: of the width of the sampler's, not of an environment's."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{rollout}".encode()).digest()[:8], "big") >> 1


def _habits(episodes: Sequence[Episode | None]) -> dict:
    ended = [e for e in episodes if e is not None]

    def share(values) -> float:
        return sum(values) / len(ended)

    measured = dict.fromkeys(name for e in ended for name in e.measures)
    return {name: share(e.measures.get(name, 0) for e in ended) for name in measured} | {
        "turns": share(len(e.turns) for e in ended), "tool_rate": share(e.calls > 0 for e in ended),
        "invalid": share(e.invalid for e in ended), "abstained": share(e.rollout.reward is None for e in ended),
        "unheard": share(not e.turns for e in ended), "lost": len(episodes) - len(ended),
        "env_s": share(e.env_s for e in ended)}


def _warn(habits: dict, config: GRPOConfig, limits: Limits, warnings_given: list[str]) -> None:
    """Once a run, where a step can teach nothing, say why."""
    why = None
    if habits["unheard"] == 1:
        why = (f"the policy ended no turn of this step's episodes, so no environment got an action and nothing is learned: it "
               f"never writes its end token within max_new_tokens={config.max_new_tokens} (and {limits}). Raise that, or show "
               "it first how a turn ends (`sft` on `demonstrate`)")
    elif habits["abstained"] == 1:
        why = ("every episode of this step abstained over an action that could not be read, so there is nothing to learn from: "
               "use on_invalid='tell' or 'penalise', or show the form of an action first")
    if why and not warnings_given:
        warnings_given.append(why)
        warnings.warn(why, stacklevel=2)
