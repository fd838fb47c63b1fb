"""Any program that talks to an OpenAI endpoint, trained: a source of groups for `train.grpo_from`.

    async def agent(base_url: str, task) -> float | None:
        client = AsyncOpenAI(base_url=base_url, api_key="-")
        reply = await client.chat.completions.create(model="tiny", messages=[...])
        return 1.0 if right(reply) else 0.0

Each run of an agent has a session of its own, which records what was sampled in it: one rollout where it only appended turns,
several where it rewrote history, which share the advantage of their run. A run that raises, takes too long or never asked the
policy abstains and is counted: no reward is made up for it.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import fold_seed
from grpolab.env.protocol import first_fault
from grpolab.models.load import Policy
from grpolab.rollouts import Group, RecordedGroup, Rollout
from grpolab.runs.run import Run
from grpolab.serve.service import Service, serve_policy
from grpolab.train import distributed
from grpolab.train.advantages import advantages, number, reward_tensor
from grpolab.train.grpo import GRPOConfig, check_reference, grpo_from
from grpolab.train.loop import off_loop
from grpolab.train.rewards import is_async, name_of
from grpolab.train.sources import Source, StepGroups, Tasks

GRACE = 1.0  # s; how long a run may take to end once it was cancelled
Agent = Callable[[str, Any], Awaitable[float | None]]


@dataclass(frozen=True)
class AgentRun:
    """One run of an agent: what the policy wrote for it, and its reward, None where it abstains or never asked. `fault` is what
    it raised or that it took too long; `cancelled` counts answers that it did not wait for."""

    rollouts: tuple[Rollout, ...]
    reward: float | None
    fault: Exception | None = None
    cancelled: int = 0
    seconds: float = field(default=0.0, compare=False)

    @property
    def trained(self) -> bool:
        return self.reward is not None


async def run_agent(service: Service, agent: Agent, task: Any, *, timeout: float, seed: int | None = None,
                    **options: Any) -> AgentRun:
    """Run an agent on a task in a session of its own (`options` are the session's) and collect what was sampled. TypeError or
    ValueError for a reward that is no finite number."""
    session, began = service.open_session(seed=seed, **options), time.perf_counter()
    running = asyncio.ensure_future(agent(session.url, task))
    reward, fault = None, None
    try:
        await asyncio.wait({running}, timeout=timeout)
        if not running.done():
            fault = TimeoutError(f"the agent took longer than {timeout} s for {task!r:.100}")
        elif running.cancelled():
            fault = RuntimeError(f"the agent cancelled itself on {task!r:.100}")
        elif isinstance(running.exception(), Exception):
            fault = running.exception()
        else:
            reward = number(running.result(), name_of(agent))
    finally:
        rollouts = service.rollouts(session)  # also ends what it still asks
        if not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=GRACE)
    reward = reward if rollouts else None
    return AgentRun(tuple(replace(r, reward=reward) for r in rollouts), reward, fault, session.cancelled,
                    time.perf_counter() - began)


async def run_agents(service: Service, agent: Agent, tasks: Sequence[Any], *, seeds: Sequence[int], timeout: float,
                     concurrent: int, **options: Any) -> list[AgentRun]:
    """A run of the agent on each task, at most `concurrent` at a time."""
    places = asyncio.Semaphore(concurrent)

    async def one(task, seed):
        async with places:
            return await run_agent(service, agent, task, timeout=timeout, seed=seed, **options)

    try:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(one(task, seed)) for task, seed in zip(tasks, seeds)]
    except BaseExceptionGroup as group:
        raise first_fault(group) from None
    return [run.result() for run in runs]


def agent_source(service: Service, agent: Agent, tasks: Tasks, config: GRPOConfig, *, timeout: float = 120.0,
                 concurrent: int = 64, max_total_tokens: int | None = None) -> Source:
    """The source of `agent_grpo`: groups of runs of an agent against a service of the policy that is trained."""
    if not is_async(agent):
        raise TypeError(f"{name_of(agent)} must be an async function (base_url, task) -> reward; call one that blocks in a "
                        "thread: `return await asyncio.to_thread(blocking, base_url, task)`")
    if not timeout > 0 or concurrent < 1:
        raise ValueError(f"timeout must be positive and concurrent at least 1, got {timeout} s and {concurrent}")
    warned = False

    async def source(step: int) -> StepGroups:
        nonlocal warned
        size, step_tasks = config.group_size, tasks.tasks(step)
        runs = await run_agents(
            service, agent, [task for task in step_tasks for _ in range(size)], timeout=timeout, concurrent=concurrent,
            seeds=[fold_seed(config.seed, step, i) for i in range(len(step_tasks) * size)], temperature=config.temperature,
            max_tokens=config.max_new_tokens, limit=max_total_tokens, fixed=True)
        faults = [run.fault for run in runs if run.fault is not None]
        if len(faults) == len(runs):
            raise faults[0]
        if not any(run.rollouts for run in runs):
            raise ValueError("no agent of this step asked the policy: they must call the base_url that they are given")
        if faults and not warned:
            warned = True
            warnings.warn(f"an agent failed with {faults[0]!r}; its run abstains, and rows count such runs as agent_errors and "
                          "agent_timeouts", stacklevel=2)
        by_task = [runs[i : i + size] for i in range(0, len(runs), size)]
        groups = sorted(as_groups(step_tasks, by_task, config.advantage_kind), key=lambda group: not group.used)
        most = max(len(group.group) for group in groups)
        trained = [group.filled(most) for group in groups if group.used]
        return StepGroups(
            [group for group, _ in trained], habits(runs),
            seen=[last_rollouts(members) for members in by_task if any(run.rollouts for run in members)],
            tokens=sum(sum(r.mask) for run in runs for r in run.rollouts),
            after_step=lambda: tasks.record(step_tasks, [[run.reward for run in members] for members in by_task]),
            advantages=torch.tensor([a for _, a in trained]) if trained else None, record=lambda: groups,
            engine=service.sampler.engine.name)

    return source


def as_groups(tasks: Sequence[Any], runs: Sequence[Sequence[AgentRun]], kind: str) -> list[RecordedGroup]:
    """Each task's runs with all that was sampled in them, as the record keeps it: a run's rollouts share its advantage, and are
    absent where it abstains. Tasks for which nothing was sampled are left out."""
    sampled = [(task, members) for task, members in zip(tasks, runs) if any(run.rollouts for run in members)]
    weights = advantages(reward_tensor([[run.reward for run in members] for _, members in sampled]), kind).tolist()
    groups = []
    for (task, members), row in zip(sampled, weights):
        rollouts = [(i, run, rollout) for i, run in enumerate(members) for rollout in run.rollouts]
        groups.append(RecordedGroup(
            Group(tuple(rollout for *_, rollout in rollouts)), tuple(row[i] if run.trained else 0.0 for i, run, _ in rollouts),
            task, parts={"run": [float(i) for i, *_ in rollouts]}, used=any(run.trained for run in members),
            absent=tuple(not run.trained for _, run, _ in rollouts)))
    return groups


def last_rollouts(runs: Sequence[AgentRun]) -> Group:
    """One rollout a run, which the step's row describes: an empty one where it abstains."""
    prompt = next(run.rollouts[0].prompt for run in runs if run.rollouts)
    return Group(tuple(run.rollouts[-1] if run.trained else Rollout(prompt, (), (), (), (), "lost") for run in runs))


def habits(runs: Sequence[AgentRun]) -> dict:
    """What a step's runs were like, for its row. Counts: `agent_errors`, `agent_timeouts`, `silent` (runs that never asked the
    policy), `unread` (answers that nobody waited for). Shares of the runs: `rewritten` (they left several rollouts),
    `abstained` (they are not trained on). `agent_s` are a run's mean seconds."""
    late = sum(isinstance(run.fault, TimeoutError) for run in runs)
    return {"agent_errors": sum(run.fault is not None for run in runs) - late, "agent_timeouts": late,
            "silent": sum(not run.rollouts and run.fault is None for run in runs),
            "abstained": sum(not run.trained for run in runs) / len(runs),
            "rewritten": sum(len(run.rollouts) > 1 for run in runs) / len(runs),
            "unread": sum(run.cancelled for run in runs), "agent_s": sum(run.seconds for run in runs) / len(runs)}


async def agent_grpo(policy: Policy, reference: Policy | None, problems: Any, config: GRPOConfig, agent: Agent, *,
                     service: Service | None = None, timeout: float = 120.0, concurrent: int = 64,
                     max_total_tokens: int | None = None, success: float = 1.0, run: Run | None = None) -> AsyncIterator[dict]:
    """GRPO (arXiv 2402.03300) on an agent: `async agent(base_url, task)` talks to the policy at its base_url like to any OpenAI
    endpoint and returns its reward, a number, or None to abstain.

    `problems` as for `grpo`: rows, or a curriculum. A completion takes `config.max_new_tokens` where the agent does not say,
    and a prompt with its completion at most `max_total_tokens` (default: the context). `service` is one of this policy that is
    open already (default: one is opened). `timeout` is of one run, in seconds. Rows hold what `grpo` yields, and `habits`.
    """
    check_reference(policy, reference, config)
    if config.refills:
        raise ValueError(f"refills={config.refills}: dynamic sampling is grpo's; leave it 0 for agents")
    if distributed.world().size > 1:
        raise ValueError("agents are run by one process, and several ranks were started: start one, or train from a record")
    if service is not None and service.policy is not policy:
        raise ValueError(f"the service is of another policy object ({service.name!r}) than the one that is trained")
    if service is not None and config.exact and not service.sampler.exact:
        raise ValueError("exact=True, and the service's sampler is not exact: open it with Sampler(policy, exact=True)")
    async with AsyncExitStack() as stack:
        if service is None:
            sampler = await stack.enter_async_context(await off_loop(lambda: Sampler(policy, exact=config.exact)))
            service = await stack.enter_async_context(serve_policy(sampler, seed=config.seed))
        longest = policy.context if max_total_tokens is None else min(max_total_tokens, policy.context)
        tasks = Tasks(problems, config, run, success)
        source = agent_source(service, agent, tasks, config, timeout=timeout, concurrent=concurrent, max_total_tokens=longest)
        steps = grpo_from(policy, reference, source, config, longest=longest, run=run, content=tasks.content)
        async with aclosing(steps) as rows:
            async for row in rows:
                yield row
