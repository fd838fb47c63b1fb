"""Rewards: functions that are called as rollouts finish, while the others are still being decoded.

    def reward(text, row, rollout): ...            # a number, or None to abstain; called off the event loop
    async def reward(text, row, rollout): ...      # the same, awaited on it: a judge behind a URL, say
    class Learned:                                 # all of a step in one call, plain or async
        def batch(self, texts, rows, rollouts): ...

    reward = Several({"right": (right, 1.0), "brief": (brief, 0.1)})   # `several_rewards`

A reward that raises costs its own rollout, which abstains and is counted; the step goes on. Where it raises for every rollout
of a step it is taken to be broken, and the step fails with its error.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from grpolab.chat import prompt_ids
from grpolab.checker import check_answer, integer_answer
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.protocol import first_fault
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
    answer = integer_answer(value_of(problem, "answer"))
    return float(rollout.finish_reason == "eos" and check_answer(text, answer))


def name_of(reward: Reward) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


def is_async(function: Callable) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


@dataclass(frozen=True)
class Total:
    """The reward of a rollout, and by name the rewards that it was made of."""

    reward: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)


async def faults_of_all(faults: Sequence[Exception], place: str) -> list[Exception]:
    """What rewards raised on all ranks, this one's own errors first."""
    by_rank = await off_loop(lambda: distributed.exchange(place, list(map(repr, faults))))
    others = [(rank, error) for rank, errors in enumerate(by_rank) if rank != distributed.world().rank for error in errors]
    return [*faults, *(RuntimeError(f"a reward of rank {rank} raised {error}") for rank, error in others)]


# --- calling a reward -------------------------------------------------------------------------------------------------


def _call(reward: Reward, texts: Sequence[str], rows: Sequence[Any], rollouts: Sequence[Rollout]) -> Any:
    """What the reward returns for each rollout, an exception where it raises; awaitables where it is async."""
    if hasattr(reward, "batch"):
        return reward.batch(texts, rows, rollouts)

    def one(*arguments):
        try:
            return reward(*arguments)
        except Exception as error:
            return error

    return list(map(one, texts, rows, rollouts))


def _pending(values: Any) -> bool:
    """Whether something is to be awaited for the values that `_call` returned."""
    return inspect.isawaitable(values) or isinstance(values, list) and any(map(inspect.isawaitable, values))


async def _awaited(values: Any) -> Any:
    """Such values, those of a list all at once."""
    async def one(value):
        return await value if inspect.isawaitable(value) else value

    return await (asyncio.gather(*map(one, values), return_exceptions=True) if isinstance(values, list) else values)


def _checked(values: Any, expected: int, name: str) -> list[Total | Exception]:
    """The values as rewards. TypeError or ValueError for what is none, and where there are more or fewer than rollouts."""
    if not isinstance(values, Iterable):
        raise TypeError(f"the batch of the reward {name!r} gave {values!r:.60}: it gives a list of a number, or None, for "
                        f"each of its {expected} rollouts")
    values = list(values)
    if len(values) != expected:
        raise ValueError(f"the batch of the reward {name!r} gave {len(values)} rewards for {expected} rollouts: give each its "
                         "own, or None")
    return [x if isinstance(x, Exception | Total) else Total(number(x, name)) for x in values]


async def outcomes(reward: Reward, texts: Sequence[str], rows: Sequence[Any], rollouts: Sequence[Rollout],
                   name: str | None = None) -> list[Total | Exception]:
    """The reward of each rollout, the exception where it raised; `name` is what errors call it."""
    if is_async(getattr(reward, "batch", reward)):
        values = _call(reward, texts, rows, rollouts)
    else:
        values = await off_loop(lambda: _call(reward, texts, rows, rollouts))
    return _checked(await _awaited(values) if _pending(values) else values, len(texts), name or name_of(reward))


def _rewarded(groups: Sequence[Sequence[Rollout]], values: Sequence[Total | Exception],
              faults: list[Exception] | None) -> list[Group]:
    """The groups with their rewards. An exception joins `faults`, and its rollout abstains; without these it is raised."""
    errors = [value for value in values if isinstance(value, Exception)]
    if errors and faults is None:
        raise errors[0]
    if errors:
        faults.extend(errors)
    totals = (Total(None) if isinstance(value, Exception) else value for value in values)
    return [Group(tuple(replace(r, reward=t.reward, parts=t.parts) for r, t in zip(g, totals))) for g in groups]


def score(policy: Policy | None, rows: Sequence[Any], groups: Sequence[Sequence[Rollout]], reward: Reward,
          faults: list[Exception] | None = None, texts: Sequence[str] | None = None) -> list[Group]:
    """Groups with a reward for each rollout, from synchronous code; the reward may be async. TypeError for a reward that is no
    number, ValueError for an infinite one; what it raises itself joins `faults` (its rollout abstains) where these are
    given. Where the completions' `texts` are known, one a rollout, no policy is needed."""
    texts = [policy.decode(r.tokens) for g in groups for r in g] if texts is None else texts
    values = _call(reward, texts, *_flat(rows, groups))
    values = run_sync(_awaited(values)) if _pending(values) else values
    return _rewarded(groups, _checked(values, len(texts), name_of(reward)), faults)


async def scored(policy: Policy, rows: Sequence[Any], groups: Sequence[Group], reward: Reward,
                 faults: list[Exception]) -> list[Group]:
    """`score` from async code: an async reward is awaited for all of these rollouts at once."""
    texts = [policy.decode(r.tokens) for g in groups for r in g]
    return _rewarded(groups, await outcomes(reward, texts, *_flat(rows, groups)), faults)


def _flat(rows: Sequence[Any], groups: Sequence[Sequence[Rollout]]) -> tuple[list, list[Rollout]]:
    """A row and a rollout for each text."""
    return [row for row, g in zip(rows, groups) for _ in g], [r for g in groups for r in g]


async def sample_and_score(
    policy: Policy, sampler: Sampler, rows: Sequence[Any], prompts: Sequence[Sequence[int]], group_size: int,
    params: SamplingParams, reward: Reward, faults: list[Exception], seeds: Sequence[Sequence[int]] | None = None,
) -> list[Group]:
    """A group of rollouts of each prompt with their rewards, each scored as it finishes (by a `batch`: all at the end).
    `rows` are what the reward gets, `seeds` (B, G) the rollouts' own where `params.seed` does not make them."""
    options = {"group_size": group_size, "params": params} | ({"seeds": seeds} if seeds is not None else {})
    if hasattr(reward, "batch"):
        return await scored(policy, rows, await sampler.sample(prompts, **options), reward, faults)
    rollouts: list[list[Rollout | None]] = [[None] * group_size for _ in prompts]

    async def score_one(i: int, g: int, rollout: Rollout) -> None:
        ((rollouts[i][g],),) = await scored(policy, [rows[i]], [Group((rollout,))], reward, faults)

    try:
        async with asyncio.TaskGroup() as tasks, aclosing(sampler.stream(prompts, **options)) as stream:
            async for finished in stream:
                tasks.create_task(score_one(*finished))
    except BaseExceptionGroup as group:
        raise first_fault(group) from None
    return [Group(tuple(g)) for g in rollouts]


def report(faults: Sequence[Exception], rollouts: int, warnings_given: list[str]) -> dict:
    """The count of faults for the step's row. The first of a run is warned of; it is raised where every rollout had one."""
    if faults and len(faults) == rollouts:
        faults[0].add_note(f"(a reward raised this, or another error, for each of the step's {rollouts} rollouts)")
        raise faults[0]
    if faults and not warnings_given:
        warnings_given.append(repr(faults[0]))
        warnings.warn(f"a reward raised {faults[0]!r}; its rollout abstains, and rows count such rollouts as "
                      "reward_errors", stacklevel=2)
    return {"reward_errors": len(faults)}


def held_out_reward(
    rows: Sequence[Any], reward: Reward = finished_and_correct, *, samples: int = 0, max_new_tokens: int = 32, seed: int = 0
) -> Callable[[Policy], Awaitable[float]]:
    """A measure for a `Selection`: the mean reward over `rows`, each sampled greedily or `samples` times at temperature 1.
    Abstentions do not count; NaN where all abstain."""
    if not rows:
        raise ValueError("there are no held-out rows to measure on")
    params = SamplingParams(greedy=samples == 0, max_new_tokens=max_new_tokens, seed=seed)
    warnings_given: list[str] = []

    async def measure(policy: Policy) -> float:
        prompts = await off_loop(lambda: [prompt_ids(policy.tokenizer, prompt_of(row)) for row in rows])
        faults: list[Exception] = []
        async with await off_loop(lambda: Sampler(policy)) as sampler:
            groups = await sample_and_score(policy, sampler, rows, prompts, samples or 1, params, reward, faults)
        report(faults, len(rows) * (samples or 1), warnings_given)
        numbers = [r for g in groups for r in g.rewards if r is not None]
        return sum(numbers) / len(numbers) if numbers else float("nan")

    return measure


async def watched(
    policy: Policy, rows: Sequence[Any], groups: Sequence[Group], trained: Reward, watch: Mapping[str, Reward],
    warnings_given: list[str],
) -> list[Group]:
    """The groups with each watched reward among the `parts` of their rollouts; they hold those of the `trained` one already."""
    for name, reward in watch.items():
        faults, shard, place = [], distributed.shard(groups), f"the watched reward {name}"
        if reward is not trained:
            shard = await scored(policy, distributed.shard(rows), shard, reward, faults)
        own = [g.rewards for g in shard]
        values = await off_loop(lambda: distributed.gathered(place, rows, own))  # noqa: B023
        report(await faults_of_all(faults, place), sum(map(len, groups)), warnings_given)
        groups = [g.with_rewards(g.rewards, [{**r.parts, name: x} for r, x in zip(g, of)]) for g, of in zip(groups, values)]
    return groups
