"""Sampling ahead of the updates: equal to the synchronous loop at staleness 0, reproducible and resumed in every bit beyond."""

import asyncio
import dataclasses
import random
import shutil
import threading

import pytest
import torch
from loop_helpers import flat, fresh, rows_of
from transformers import DynamicCache

from grpolab.arithmetic import Problem
from grpolab.decode.sampling import SamplingParams
from grpolab.runs.run import Run
from grpolab.train import AsyncGRPOConfig, GRPOConfig, async_grpo, grpo
from grpolab.train.async_grpo import Actor

PROBLEMS = [Problem(a, "+", 7) for a in range(12)]
SMALL = {"steps": 6, "prompts_per_step": 3, "group_size": 4, "max_new_tokens": 12, "lr": 3e-3, "warmup": 1, "seed": 4,
         "max_logp_diff": None}
OWN = {"version", "staleness", "staleness_max"}


def digits(text, row, rollout):
    return float(sum(c.isdigit() for c in text))


async def late(text, row, rollout):
    """As `digits`, after a time that differs from run to run."""
    await asyncio.sleep(random.random() / 50)
    return digits(text, row, rollout)


def config(staleness, **more):
    return AsyncGRPOConfig(**SMALL | {"max_staleness": staleness} | more)


def train(policy, staleness=1, n=None, reward=late, run=None, **more):
    return rows_of(async_grpo(policy, None, PROBLEMS, config(staleness, **more), reward=reward, run=run), n)


def bits(rows, without=frozenset()):
    """The rows without their times."""
    return [{k: v for k, v in row.items() if not k.endswith("_s") and k not in without and v == v} for row in rows]


def recorded(run):
    return [(step, [(g.group, g.advantages, g.problem) for g in run.recorder.groups(step)]) for step in run.recorder.steps()]


def test_staleness_0_is_grpo_in_every_bit(tiny, tmp_path):
    runs = [Run(name, root=tmp_path) for name in ("sync", "async")]
    other = fresh(tiny)
    plain = rows_of(grpo(tiny, None, PROBLEMS, GRPOConfig(**SMALL), reward=digits, run=runs[0]))
    ours = train(other, 0, reward=digits, run=runs[1])
    assert bits(plain) == bits(ours, OWN) and torch.equal(flat(tiny), flat(other))
    assert recorded(runs[0]) == recorded(runs[1]) and len(recorded(runs[0])) == 6
    assert [r["staleness_max"] for r in ours] == [0] * 6 and not (runs[1].folder / "ahead").exists()


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_the_schedule_is_a_function_of_the_step(tiny, tmp_path, staleness):
    run, other = Run("one", root=tmp_path), fresh(tiny)
    rows = train(tiny, staleness, run=run)
    versions = [{v for g in run.recorder.groups(k) for r in g.group for v in r.token_versions} for k in range(6)]
    assert versions == [{max(0, k - staleness)} for k in range(6)] and tiny.version == 6
    assert [r["staleness"] for r in rows] == [min(k, staleness) for k in range(6)] == [r["staleness_max"] for r in rows]
    assert rows[0]["logp_diff"] < 1e-4 < 1e-3 < rows[-1]["logp_diff"]
    assert bits(rows) == bits(train(other, staleness)) and torch.equal(flat(tiny), flat(other))


async def test_steps_ahead_are_scored_at_once_and_never_more_than_the_bound(tiny):
    """Sampling begins while the update runs, and max_staleness + 1 steps are in progress at most."""
    open_steps, most, sampled_in_update, updating = {}, [], [], threading.Event()

    async def slow(text, row, rollout):
        sampled_in_update.append(updating.is_set())
        open_steps[rollout.seed] = rollout
        await asyncio.sleep(0.15)
        most.append(len(open_steps))
        del open_steps[rollout.seed]
        return digits(text, row, rollout)

    original = tiny.model.forward

    def forward(*args, **kwargs):  # of the policy that is trained, alone
        updating.set()
        return original(*args, **kwargs)

    tiny.model.forward = forward
    async for _ in async_grpo(tiny, None, PROBLEMS, config(2), reward=slow):
        updating.clear()
    assert max(most) == 3 * 12 and len(most) == 6 * 12
