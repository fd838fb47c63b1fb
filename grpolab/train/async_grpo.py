"""Asynchronous GRPO: sampling, rewards and updates at the same time, on rollouts of weights that may be some updates old.

    config = AsyncGRPOConfig(max_staleness=2, sampler_cap=2.0)
    async for row in async_grpo(policy, None, problems, config, reward=slow_judge): ...

The sampler has weights of its own. They follow the policy after each update, and the groups of step k are begun as soon as the
weights are those before step k - max_staleness, while earlier steps are sampled, scored and trained on. By default new weights
wait until the completions in progress have ended; with `in_flight` they come between two decode steps (PipelineRL, arXiv
2509.19128). What is exact, and what depends on the clock: docs/async.md.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import Policy
from grpolab.rollouts import Group, RecordedGroup, Rollout
from grpolab.runs.rollout_log import Recorder, step_of
from grpolab.runs.run import Run
from grpolab.train import distributed
from grpolab.train.grpo import asked, check_reference, grpo_from, mean
from grpolab.train.grpo_config import GRPOConfig
from grpolab.train.loop import in_thread
from grpolab.train.rewards import Reward, finished_and_correct
from grpolab.train.sources import Source, StepGroups, as_step_groups, sampled

CALL: ContextVar[tuple[int, asyncio.Future]] = ContextVar("CALL")  # the step that a task samples for; done as sampling begins


@dataclass(frozen=True)
class AsyncGRPOConfig(GRPOConfig):
    """A step as in GRPO. Rollouts come from weights that are up to `max_staleness` steps old; 0 is `grpo` in every bit.

    Without `sampler_cap` the clipped ratio to the log-probs of whoever drew a token is all that corrects for its age; with it
    each token is weighed by min(pi / pi_drawn, cap) besides. Old rollouts may differ from the policy by more than
    `max_logp_diff`, which then must admit them."""

    max_staleness: int = 1  # steps that the weights of a rollout may be behind
    in_flight: bool = False  # new weights come between two decode steps, not after the completions in progress

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(0, "max_staleness")
        if self.in_flight and not self.max_staleness:
            raise ValueError("in_flight=True with max_staleness=0: nothing is in progress when weights change; set 1 or more")
        if self.refills:
            raise ValueError(f"refills={self.refills}: they are drawn later, from other weights; leave it 0")
        if self.exact:
            raise ValueError("exact=True shares the sampler's attention with the trainer's model, and here the sampler has a "
                             "model of its own: leave it False")


async def async_grpo(
    policy: Policy, reference: Policy | None, problems: Sequence[Any], config: AsyncGRPOConfig, *,
    reward: Reward = finished_and_correct, watch: Mapping[str, Reward] | None = None, run: Run | None = None,
    sampler: Any = None,
) -> AsyncIterator[dict]:
    """`grpo` with the sampling ahead of the updates. `reward` is as there; a slow one should be async.

    `sampler`: None for one in this process, with a copy of the weights; or a `RemoteSampler` with a bridge. Rows also hold
    `version` (of the weights before the step), and `staleness` and `staleness_max`: how many optimiser steps the weights that
    drew a token were behind, over the step's tokens. A run that is stopped finishes and keeps the completions in progress (with
    `in_flight`, and without a `run`, they are dropped, and a line says how many). Resumed, it takes from the run's folder what
    was drawn before.
    """
    if distributed.world().size > 1:
        raise ValueError("async_grpo runs in one process: start it without torchrun, or give it a RemoteSampler")
    if config.in_flight and sampler is not None:
        raise ValueError("in_flight=True needs the sampler of this process: a served policy changes between completions")
    check_reference(policy, reference, config)
    tasks, ids_of, longest = await asked(policy, problems, config, reward, watch, run, 1.0)
    if tasks.adaptive:
        raise ValueError("a curriculum chooses by the results of the step before, which are not known here yet: give it rows")
    actor = sampler or await in_thread(policy, lambda: Actor(policy))
    draws = Draws(actor, policy, run)
    groups = sampled(policy, draws, tasks, ids_of, config, reward, watch)
    async with nullcontext() if sampler else actor, ahead(draws, groups, policy, config) as source:
        steps = grpo_from(policy, reference, source, config, longest=longest, run=run, content=tasks.content)
        async with aclosing(steps) as rows:
            async for row in rows:
                yield row
    draws.forget()


@asynccontextmanager
async def ahead(draws: Draws, groups: Source, policy: Policy, config: AsyncGRPOConfig) -> AsyncIterator[Source]:
    """A source that begins `groups(step)`, which samples from `draws`, up to config.max_staleness steps before it is asked for
    them. Between two calls one update is made. At the end its tasks are cancelled."""
    tasks: dict[int, asyncio.Task] = {}

    async def begin(step: int) -> None:
        """Start a step's task; returns once its request is with the sampler, or it failed before."""
        began, context = asyncio.get_running_loop().create_future(), copy_context()
        context.run(CALL.set, (step, began))
        tasks[step] = task = asyncio.create_task(groups(step), context=context)
        await asyncio.wait([task, began], return_when=asyncio.FIRST_COMPLETED)

    async def source(step: int) -> StepGroups:
        if not tasks:
            draws.start(step, min(step + config.max_staleness, config.steps))
        if not config.in_flight:
            await draws.settled()
        await draws.sampler.publish()
        for later in range(max([step - 1, *tasks]) + 1, min(step + config.max_staleness + 1, config.steps)):
            await begin(later)
        await asyncio.wait([tasks[step]])  # unlike `await`, it leaves the task alone where this is cancelled
        batch = as_step_groups(await tasks.pop(step))
        if draws.run is not None and (step + 1) % config.save_every == 0:
            await draws.settled()  # so that what is not to be had again is on the disk before the checkpoint
        return replace(batch, row=dict(batch.row) | aged(batch, policy.version))

    try:
        yield source
    finally:
        try:
            if draws.run is not None and not config.in_flight:
                await draws.settled()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            if draws.dropped:
                print(f"{draws.dropped} rollouts in flight were dropped")


def aged(batch: StepGroups, version: int) -> dict:
    """The columns of a step's row about the age of its tokens."""
    ages = [version - v for g in batch.seen or batch.groups for r in g for v, m in zip(r.token_versions, r.mask) if m]
    return {"version": version, "staleness": mean(ages), "staleness_max": max(ages, default=float("nan"))}


class Actor:
    """The policy a second time, and its sampler; `publish` brings the policy's weights over, between two decode steps."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.copy = Policy(copy.deepcopy(policy.model).requires_grad_(False), policy.tokenizer, policy.name, policy.eos_ids)
        self.sampler = Sampler(self.copy)
        self.stream, self.close = self.sampler.stream, self.sampler.close

    @property
    def engine(self):
        return self.sampler.engine

    async def publish(self) -> int:
        """Returns the version of the weights. The policy is at rest: no update is in progress."""
        await self.sampler.run(self._take)
        return self.copy.version

    @torch.no_grad()
    def _take(self) -> None:
        for own, new in zip(self.copy.model.parameters(), self.policy.model.parameters(), strict=True):
            own.copy_(new)
        self.copy.version = self.policy.version

    async def __aenter__(self) -> Actor:
        await self.sampler.__aenter__()
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()


class Draws:
    """A sampler for `sampled` whose completions stay in the run's folder, in ahead/, until a checkpoint is past their step: a
    resumed run gets them from there, with the log-probs and versions that they had. One call a step."""

    def __init__(self, sampler: Any, policy: Policy, run: Run | None):
        self.sampler, self.policy, self.run = sampler, policy, run
        self.kept = run and Recorder(run.folder / "ahead")
        self.dropped = self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def engine(self):
        return self.sampler.engine

    async def settled(self) -> None:
        """Wait until no completion is in progress."""
        await self._idle.wait()

    def start(self, step: int, begun: int) -> None:
        """Before the first step of a loop: of an earlier one, what steps `step` to `begun` - 1 had drawn is all that counts."""
        if not step:
            return self.forget()
        if missing := [s for s in range(step, begun) if s not in self.kept.steps()]:
            warnings.warn(f"{self.run.shown(self.run.folder)} holds no rollouts of steps {missing}, which had begun before the "
                          "stop: they are drawn anew from the present weights, so the run is another than without a stop",
                          stacklevel=2)

    def forget(self, before: int | None = None) -> None:
        """Drop what was kept for the steps `before` that one, or all of it."""
        if self.kept is not None and before is None:
            shutil.rmtree(self.kept.folder, ignore_errors=True)
        elif self.kept is not None:
            for path in self.kept.files():
                if step_of(path) < before:
                    path.unlink(missing_ok=True)  # two threads may keep

    async def sample(self, prompts: Sequence[Sequence[int]], *, group_size: int, params: SamplingParams) -> list[Group]:
        rollouts = {}
        async with aclosing(self.stream(prompts, group_size=group_size, params=params)) as stream:
            async for i, g, rollout in stream:
                rollouts[i, g] = rollout
        return [Group(tuple(rollouts[i, g] for g in range(group_size))) for i in range(len(prompts))]

    async def stream(self, prompts: Sequence[Sequence[int]], *, group_size: int,
                     params: SamplingParams) -> AsyncIterator[tuple[int, int, Rollout]]:
        """(prompt index, sample index, rollout): those that are kept for the step, else as the sampler gives them."""
        step, began = CALL.get()
        if not began.done():
            began.set_result(None)
        if self.kept is not None and step in self.kept.steps():
            for i, recorded in enumerate(self.kept.groups(step)):
                for g, rollout in enumerate(recorded.group):
                    yield i, g, rollout
            return
        rollouts: list[list[Rollout | None]] = [[None] * group_size for _ in prompts]
        self._calls += 1
        self._idle.clear()
        try:
            async with aclosing(self.sampler.stream(prompts, group_size=group_size, params=params)) as stream:
                async for i, g, rollout in stream:
                    rollouts[i][g] = rollout
                    yield i, g, rollout
            if self.kept is not None:
                await asyncio.to_thread(self._keep, step, rollouts)
        finally:
            self.dropped += sum(rollout is None for row in rollouts for rollout in row)
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _keep(self, step: int, rollouts: Sequence[Sequence[Rollout]]) -> None:
        groups = [RecordedGroup(Group(tuple(row)), (0.0,) * len(row)) for row in rollouts]
        self.kept.add(step, groups, self.policy.decode, {})
        self.forget(self.run.checkpointed())
