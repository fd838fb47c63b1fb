"""Rewards: functions that are asked as rollouts finish, while the others are still being decoded.

    def reward(text, row, rollout): ...            # a number, or None to abstain; called off the event loop
    async def reward(text, row, rollout): ...      # the same, awaited on it: a judge behind a URL, say
    class Learned:                                 # all of a step in one call
        def batch(self, texts, rows, rollouts): ...

    reward = Several({"right": (right, 1.0), "brief": (brief, 0.1)})   # `several_rewards`

A reward that raises costs its own rollout, which abstains and is counted; the step goes on. Where it raises for every rollout
of a step it is taken to be broken, and the step fails with its error.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from grpolab.chat import prompt_ids
from grpolab.checker import correct_reward
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import Policy
from grpolab.rollouts import Group, Rollout
from grpolab.sync import run_sync
from grpolab.tasks import prompt_of, value_of
from grpolab.train import distributed
from grpolab.train.advantages import number
from grpolab.train.loop import off_loop

Reward = Callable[[str, Any, Rollout], Any]


def finished_and_correct(text: str, problem: Any, rollout: Rollout) -> float:
    """1.0 for a right boxed answer in a completion that the policy ended itself, else 0.0. A reward for the box alone
    would never ask for the end token, and the policy would forget to stop. ValueError for a row without an integer `answer`."""
    answer = value_of(problem, "answer")
    if not isinstance(answer, int):
        try:
            answer = int(str(answer))
        except ValueError:
            raise ValueError(f"the answer {answer!r:.40} of a row is no integer, which is all that a box can hold: give "
                             "another reward, e.g. tasks.right_number") from None
    return correct_reward(text, answer) if rollout.finish_reason == "eos" else 0.0


def name_of(reward: Reward) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


def is_async(reward: Reward) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


@dataclass(frozen=True)
class Total:
    """What a reward gave a rollout: the number that is trained on, and what it was made of, by name."""

    reward: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)


@dataclass
class Faults:
    """What rewards raised in one step: `count` rollouts abstain for it, `first` is the first error."""

    count: int = 0
    first: Exception | None = None

    def note(self, error: Exception) -> None:
        self.count, self.first = self.count + 1, self.first or error


async def faults_of_all(faults: Faults, place: str) -> Faults:
    """Those of all ranks; the first error is this rank's own where it has one."""
    if distributed.world().size == 1:
        return faults
    by_rank = await off_loop(lambda: distributed.exchange(place, [faults.count, faults.first and repr(faults.first)]))
    elsewhere = [RuntimeError(f"a reward of rank {rank} raised {first}") for rank, (_, first) in enumerate(by_rank) if first]
    return Faults(sum(count for count, _ in by_rank), faults.first or next(iter(elsewhere), None))


def score(
    policy: Policy, rows: Sequence[Any], groups: Sequence[Group], reward: Reward, faults: Faults | None = None
) -> list[Group]:
    """Groups with a reward for each rollout, from synchronous code; the reward may be async. TypeError for a reward that is no
    number, ValueError for an infinite one; what it raises itself goes to `faults` (its rollout abstains) where these are
    given."""
    texts = [[policy.decode(r.tokens) for r in g] for g in groups]
    return _rewarded(groups, _spread(reward, _asked(reward, *_flat(texts, rows, groups)), groups, faults))


async def scored(
    policy: Policy, rows: Sequence[Any], groups: Sequence[Group], reward: Reward, faults: Faults
) -> list[Group]:
    """`score` from async code: of an async reward all of these rollouts are asked at once."""
    if not answers_later(reward):
        return await off_loop(lambda: score(policy, rows, groups, reward, faults))
    texts = [[policy.decode(r.tokens) for r in g] for g in groups]
    outcomes = await _later(reward, *_flat(texts, rows, groups))
    return _rewarded(groups, _spread(reward, outcomes, groups, faults))


def ask_any(
    reward: Reward, texts: Sequence[Sequence[str]], rows: Sequence[Any], groups: Sequence[Sequence[Rollout]],
    faults: Faults | None = None,
) -> list[list[float | None]]:
    """The reward of each rollout of each group (B, G), whose completions are `texts`, from synchronous code; errors as `score`
    says. The reward may be async."""
    outcomes = _asked(reward, *_flat(texts, rows, groups))
    return [[x.reward for x in of] for of in _spread(reward, outcomes, groups, faults)]


def answers_later(reward: Reward) -> bool:
    """Whether the reward, or its `batch`, is async."""
    return inspect.iscoroutinefunction(getattr(reward, "batch", None)) or is_async(reward)


def _flat(texts: Sequence[Sequence[str]], rows: Sequence[Any], groups: Sequence[Sequence[Rollout]]) -> tuple[list, list, list]:
    """What a `batch` takes: a text, a row and a rollout for each."""
    return [t for ts in texts for t in ts], [row for row, g in zip(rows, groups) for _ in g], [r for g in groups for r in g]


def _now(reward: Reward, texts: Sequence[str], rows: Sequence[Any], rollouts: Sequence[Rollout]) -> Any:
    """What the reward gave for each, an exception where it raised."""
    if hasattr(reward, "batch"):
        return reward.batch(texts, rows, rollouts)

    def one(*of):
        try:
            return reward(*of)
        except Exception as error:
            return error

    return list(map(one, texts, rows, rollouts))


def _asked(reward: Reward, *lists: Sequence) -> Any:
    """`_now` of any reward, from synchronous code."""
    return run_sync(_later(reward, *lists)) if answers_later(reward) else _now(reward, *lists)


async def _later(reward: Reward, texts: Sequence[str], rows: Sequence[Any], rollouts: Sequence[Rollout]) -> Any:
    """`_now` of a reward that `answers_later`, of all at once."""
    if inspect.iscoroutinefunction(getattr(reward, "batch", None)):
        return await reward.batch(texts, rows, rollouts)
    return await asyncio.gather(*map(reward, texts, rows, rollouts), return_exceptions=True)


def _rewarded(groups: Sequence[Group], outcomes: Sequence[Sequence[Total]]) -> list[Group]:
    return [g.with_rewards([x.reward for x in of], [x.parts for x in of]) for g, of in zip(groups, outcomes)]


async def outcomes_of(reward: Reward, texts: Sequence[str], rows: Sequence[Any], rollouts: Sequence[Rollout], name: str
                      ) -> list[float | None | Total | Exception]:
    """What any reward, called `name`, gave for each rollout, an exception where it raised."""
    work = _later(reward, texts, rows, rollouts) if answers_later(reward) else off_loop(
        lambda: _now(reward, texts, rows, rollouts))
    return _each(await work, len(texts), name)


def _spread(reward: Reward, outcomes: Any, groups: Sequence[Sequence], faults: Faults | None) -> list[list[Total]]:
    """What a reward gave for each rollout, checked, by group."""
    def checked(outcome):
        if not isinstance(outcome, Exception):
            return outcome if isinstance(outcome, Total) else Total(outcome)
        if faults is None:
            raise outcome
        faults.note(outcome)
        return Total(None)

    each = map(checked, _each(outcomes, sum(map(len, groups)), name_of(reward)))
    return [[next(each) for _ in g] for g in groups]


def _each(outcomes: Any, wanted: int, name: str) -> list[float | None | Total | Exception]:
    """What a reward gave for so many rollouts, checked."""
    try:
        outcomes = list(outcomes)
    except TypeError:
        raise TypeError(f"the batch of the reward {name!r} gave {outcomes!r:.60}: it gives a list of a number, or None, for "
                        f"each of its {wanted} rollouts") from None
    if len(outcomes) != wanted:
        raise ValueError(f"the batch of the reward {name!r} gave {len(outcomes)} rewards for {wanted} rollouts: give each its "
                         "own, or None")
    return [x if isinstance(x, Exception | Total) else number(x, name) for x in outcomes]


async def sample_and_score(
    policy: Policy, sampler: Sampler, rows: Sequence[Any], prompts: Sequence[Sequence[int]], group_size: int,
    params: SamplingParams, reward: Reward, faults: Faults, seeds: Sequence[Sequence[int]] | None = None,
) -> list[Group]:
    """A group of rollouts of each prompt with their rewards; `rows` are what the reward gets, `seeds` (B, G) the rollouts'
    own where `params.seed` does not make them. Rewards are asked while the sampler decodes on: async ones at once, each in a
    task of its own, others in the thread of the steps, all that have arrived since its last look."""
    seeded = {"seeds": seeds} if seeds is not None else {}
    if hasattr(reward, "batch"):
        groups = await sampler.sample(prompts, group_size=group_size, params=params, **seeded)
        return await scored(policy, rows, groups, reward, faults)
    groups: list[list[Rollout | None]] = [[None] * group_size for _ in prompts]
    arrived: list[tuple[int, int, Rollout]] = []
    looking: asyncio.Task | None = None

    async def look():
        while arrived:
            batch, arrived[:] = arrived[:], []
            ones = [Group((rollout,)) for _, _, rollout in batch]
            for (i, g, _), (one,) in zip(batch, await scored(policy, [rows[i] for i, _, _ in batch], ones, reward, faults)):
                groups[i][g] = one

    async def sample(tasks):
        nonlocal looking
        async with aclosing(sampler.stream(prompts, group_size=group_size, params=params, **seeded)) as stream:
            async for item in stream:
                arrived.append(item)
                if looking is None or looking.done() or is_async(reward):
                    looking = tasks.create_task(look())

    try:
        async with asyncio.TaskGroup() as tasks:
            await sample(tasks)
    except BaseExceptionGroup as group:  # one fault is its own error, not a group of one
        raise group.exceptions[0] from None
    return [Group(tuple(g)) for g in groups]


def report(faults: Faults, rollouts: int, warnings_given: list[str]) -> dict:
    """The count of faults for the step's row. A warning says the first of a run; raises it where every rollout had one."""
    if faults.first is not None and faults.count == rollouts:
        faults.first.add_note(f"(a reward raised this, or another error, for each of the step's {rollouts} rollouts)")
        raise faults.first
    if faults.first is not None and not warnings_given:
        warnings_given.append(repr(faults.first))
        warnings.warn(f"a reward raised {faults.first!r}; its rollout abstains, and rows count such rollouts as "
                      "reward_errors", stacklevel=2)
    return {"reward_errors": faults.count}


def held_out_reward(
    rows: Sequence[Any], reward: Reward = finished_and_correct, *, samples: int = 0, max_new_tokens: int = 32, seed: int = 0
) -> Callable[[Policy], Awaitable[float]]:
    """A measure for a `Selection`: the mean reward over `rows`, each asked greedily or `samples` times at temperature 1. What
    abstains does not count; where everything does it is NaN."""
    if not rows:
        raise ValueError("there are no held-out rows to measure on")
    params = SamplingParams(greedy=samples == 0, max_new_tokens=max_new_tokens, seed=seed)
    warnings_given: list[str] = []

    async def measure(policy: Policy) -> float:
        prompts = await off_loop(lambda: [prompt_ids(policy.tokenizer, prompt_of(row)) for row in rows])
        faults = Faults()
        async with await off_loop(lambda: Sampler(policy)) as sampler:
            groups = await sample_and_score(policy, sampler, rows, prompts, samples or 1, params, reward, faults)
        report(faults, len(rows) * (samples or 1), warnings_given)
        numbers = [r for g in groups for r in g.rewards if r is not None]
        return sum(numbers) / len(numbers) if numbers else float("nan")

    return measure


async def watched(
    policy: Policy, rows: Sequence[Any], groups: Sequence[Group], trained: Reward, watch: Mapping[str, Reward],
    warnings_given: list[str],
) -> dict[str, list[list[float | None]]]:
    """Each watched reward of each rollout, (B, G); the groups hold those of the `trained` one already. Faults as there."""
    rewards = {}
    for name, reward in watch.items():
        faults, shard = Faults(), distributed.shard(groups)
        of = shard if reward is trained else await scored(policy, distributed.shard(rows), shard, reward, faults)
        values, place = [g.rewards for g in of], f"the watched reward {name}"
        if distributed.world().size > 1:
            values = await off_loop(lambda: distributed.gathered(place, rows, values, list, list))  # noqa: B023
        report(await faults_of_all(faults, place), sum(map(len, groups)), warnings_given)
        rewards[name] = values
    return rewards
