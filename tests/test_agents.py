"""Agents that talk to a served policy, as a source of groups: what is trained is what was sampled for them, nothing else."""

import asyncio
import time
import warnings
from contextlib import asynccontextmanager

import pytest
from loop_helpers import fresh
from openai import AsyncOpenAI

from grpolab.arithmetic import generate
from grpolab.decode.audit import audit
from grpolab.rollouts import Rollout
from grpolab.runs.run import Run
from grpolab.serve.agents import AgentRun, agent_grpo, as_groups, last_rollouts, run_agent
from grpolab.serve.service import serve_policy
from grpolab.train import GRPOConfig

ROWS, _ = generate(16, 0, seed=1)
MORE = {"role": "user", "content": "Again."}


@asynccontextmanager
async def one_client():
    """Agents make a client of their own; making its TLS takes longer than all that the tiny model writes."""
    global CLIENT
    async with AsyncOpenAI(base_url="http://none", api_key="-", max_retries=0) as CLIENT:
        yield


async def ask(url, messages, **options):
    create = CLIENT.with_options(base_url=url).chat.completions.create
    return (await create(model="tiny", messages=messages, **options)).choices[0].message.content


def asked(problem):
    return [{"role": "user", "content": problem.question}]


async def ones(url, problem):
    """Rewarded is the share of ones in the answer, which is quickly learned."""
    text = await ask(url, asked(problem))
    return text.count("1") / 8


def config(**options):
    return GRPOConfig(**dict(prompts_per_step=2, group_size=4, steps=2, max_new_tokens=8, lr=1e-3) | options)


def rows_of(policy, agent, cfg=None, **options):
    async def main():
        async with one_client():
            return [row async for row in agent_grpo(policy, None, ROWS, cfg or config(), agent, **options)]

    return asyncio.run(main())


def test_an_agent_learns(tiny):
    """Through its own HTTP calls; the sampler's and the trainer's log-probs agree all the way."""
    rows = rows_of(tiny, ones, config(steps=8, group_size=8, lr=5e-3))
    first, last = (sum(r["reward"] for r in part) / 3 for part in (rows[:3], rows[-3:]))
    assert last > first + 0.2, (first, last)
    assert max(r.get("diff_max", 0) for r in rows) < 1e-3 and tiny.version > 5
    assert all(r["agent_errors"] == r["agent_timeouts"] == r["silent"] == r["rewritten"] == 0 for r in rows)


def test_an_agent_of_several_turns_and_its_record(tiny, tmp_path):
    """Each group's rollouts stand in the record with their own prompts, also where an agent asks as it likes."""
    calls = []

    async def agent(url, problem):
        calls.append(problem)
        number = len(calls)
        said = [{"role": "system", "content": f"Number {number}"}, *asked(problem)]
        for _ in range(2):
            said += [{"role": "assistant", "content": await ask(url, said)}, MORE]
        return float(number % 2)

    run = Run(root=tmp_path / "run")
    rows = rows_of(tiny, agent, config(steps=1), run=run)
    assert calls[0] in ROWS and rows[0]["trained_groups"] == 2
    groups = run.recorder.groups(0)
    rollouts = [r for g in groups for r in g.group]
    assert len({r.prompt for r in rollouts}) == len(rollouts) == 8
    assert all(0 in r.mask for r in rollouts)


def test_a_run_that_rewrites_history_counts_once(tiny):
    """Its rollouts share the advantage that the run has among runs; the others of the group are filled up with nothing."""
    def rollout(tokens, reward):
        n = len(tokens)
        return Rollout((1, 2), tuple(tokens), (1,) * n, (-1.0,) * n, (-1.0,) * n, "eos", reward=reward)

    runs = [AgentRun((rollout([3], 1.0), rollout([4, 5], 1.0), rollout([6], 1.0)), 1.0), AgentRun((rollout([7], 0.0),), 0.0),
            AgentRun((), None, KeyError("boom")), AgentRun((rollout([8], None),), None), AgentRun((), None)]
    group, abstained = as_groups("tus", [runs, [runs[3]] * 5, [runs[4]] * 5], "centred")  # in u none asked
    assert group.used and not abstained.used and list(abstained.advantages) == [0.0] * 5
    assert group.absent == (False, False, False, False, True) and group.parts["run"] == [0, 0, 0, 1, 3]
    assert group.advantages == (0.5, 0.5, 0.5, -0.5, 0.0)
    rollouts, weights = group.filled(7)
    assert weights == [0.5, 0.5, 0.5, -0.5, 0, 0, 0] and [r.tokens for r in rollouts] == [(3,), (4, 5), (6,), (7,), (), (), ()]
    assert [r.reward for r in rollouts] == [1.0, 1.0, 1.0, 0.0, None, None, None]
    assert [r.reward for r in last_rollouts(runs)] == [1.0, 0.0, None, None, None]


def test_a_rewriting_agent_trains(tiny):
    async def agent(url, problem):
        one = await ask(url, asked(problem))
        two = await ask(url, [*asked(problem), {"role": "assistant", "content": "Let me see."}, MORE])
        return (one + two).count("1") / 8

    rows = rows_of(tiny, agent)
    assert all(r["rewritten"] == 1 for r in rows) and rows[0]["trained_tokens"] > 0 and rows[0]["diff_max"] < 1e-3


def test_a_run_that_raises_abstains_or_never_asked_costs_itself(tiny):
    """It is counted, and the first fault is reported once."""
    count = iter(range(100))

    async def agent(url, problem):
        kind = next(count) % 4
        text = "" if kind == 0 else await ask(url, asked(problem))
        if kind == 1:
            raise KeyError("boom")
        return None if kind == 2 else text.count("1") / 8

    with pytest.warns(UserWarning, match="boom") as warned:
        rows = rows_of(tiny, agent)
    assert [(r["agent_errors"], r["silent"], r["abstained"], r["trained_groups"]) for r in rows] == [(2, 2, 0.75, 0)] * 2
    assert sum("boom" in str(w.message) for w in warned) == 1


async def raises(url, problem):
    raise ZeroDivisionError("always")


async def never_asks(url, problem):
    return 1.0


async def cold(url, problem):
    await ask(url, asked(problem), temperature=0)


def giving(value):
    async def agent(url, problem):
        await ask(url, asked(problem))
        return value

    return agent


@pytest.mark.parametrize(("agent", "why"), [
    (raises, "always"), (never_asks, "no agent of this step asked the policy"), (cold, "this session is trained on"),
    (giving("1"), "agent"), (giving(float("inf")), "agent"), (giving([1]), "agent"),
    (lambda url, problem: 1.0, "must be an async function")])
def test_agents_that_all_fail_end_the_training(tiny, agent, why):
    with pytest.raises(Exception, match=why):
        rows_of(tiny, agent)


@pytest.mark.parametrize("stubborn", [False, True])
async def test_an_agent_that_takes_too_long(tiny, stubborn):
    """Also one that swallows its cancellation: bounded time, no reward, its session is gone and later calls fail."""
    late = []

    async def agent(url, problem):
        await ask(url, asked(problem))
        if problem == ROWS[0]:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                if not stubborn:
                    raise
                try:
                    await ask(url, asked(problem))
                except Exception as error:
                    late.append(error)
                return 1.0
        return 0.5

    async with one_client(), serve_policy(tiny) as service:
        await run_agent(service, ones, ROWS[0], timeout=60, max_tokens=8)  # the engine is chosen
        began = time.perf_counter()
        run = await run_agent(service, agent, ROWS[0], timeout=1.5, max_tokens=8)
        assert time.perf_counter() - began < 5
        assert isinstance(run.fault, TimeoutError) and run.reward is None and not run.trained and len(run.rollouts) == 1
        assert len(service.sessions) == 0 and [getattr(e, "status_code", 0) for e in late] == [410] * stubborn
        assert (await run_agent(service, agent, ROWS[1], timeout=20, max_tokens=8)).reward == 0.5


@pytest.mark.parametrize(("options", "config_options"), [(dict(timeout=0), {}), ({}, dict(refills=1))])
def test_what_cannot_be_trained_is_refused(tiny, options, config_options):
    with pytest.raises(ValueError, match="timeout must be positive|refills=1"):
        rows_of(tiny, ones, config(**config_options), **options)


async def test_an_interrupted_step_leaves_nothing_behind(tiny):
    """Cancelled while its agents wait: no session and no row stays."""
    async def agent(url, problem):
        await ask(url, asked(problem))
        await asyncio.sleep(30)

    async with one_client(), serve_policy(tiny) as service:
        steps = agent_grpo(tiny, None, ROWS, config(), agent, service=service)
        task = asyncio.ensure_future(anext(steps))
        while not len(service.sessions):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(service.sessions) == 0
        async with asyncio.timeout(10):
            while service.jobs:
                await asyncio.sleep(0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = await run_agent(service, ones, ROWS[0], timeout=20, max_tokens=8)
        assert audit(tiny, run.rollouts).max_error < 1e-4


async def test_a_service_of_another_policy(tiny):
    async with serve_policy(tiny) as service:
        with pytest.raises(ValueError, match="another policy object"):
            await anext(agent_grpo(fresh(tiny), None, ROWS, config(), ones, service=service))
        with pytest.raises(ValueError, match="sampler is not exact"):
            await anext(agent_grpo(tiny, None, ROWS, config(exact=True), ones, service=service))
