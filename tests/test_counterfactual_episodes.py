"""Forks of episodes: a step done again from its record, the steps after it played in the user's pool."""

import asyncio
import shutil

import pytest
import torch
from loop_helpers import digits, flat, fresh

from grpolab.env.calculator import CalculatorEnv
from grpolab.env.pool import GrpoPool
from grpolab.env.server import serve
from grpolab.lab.counterfactual import fork, with_advantage, without_group
from grpolab.lab.replay import replay
from grpolab.lab.restore import restore
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig
from grpolab.train.multiturn import Limits, multi_turn_grpo
from tests.test_multiturn import PROBLEMS as SUMS
from tests.test_multiturn import caller  # noqa: F401
from tests.test_rollout_log import content

CONFIG = GRPOConfig(steps=3, prompts_per_step=3, group_size=4, max_new_tokens=24, lr=1e-3)
LIMITS = Limits(3, 96)


@pytest.fixture(scope="module")
def left(caller, tmp_path_factory):  # noqa: F811
    run = Run("x", root=tmp_path_factory.mktemp("runs"), replay_every=2)

    async def cell():
        async with serve(CalculatorEnv, max_sessions=8) as server, GrpoPool(server.url, size=8) as pool:
            return [row async for row in multi_turn_grpo(fresh(caller), None, SUMS, CONFIG, pool, limits=LIMITS, run=run)]

    asyncio.run(cell())
    return run.folder


@pytest.fixture
def run(left, tmp_path):
    return Run(root=shutil.copytree(left, tmp_path / "x"), replay_every=2)


def played(run, step, name="twin", problems=SUMS, limits=LIMITS, **options):
    async def cell():
        async with serve(CalculatorEnv, max_sessions=8) as server, GrpoPool(server.url, size=8) as pool:
            return await fork(run, step, name, problems, pool=pool, limits=limits, **options)

    return asyncio.run(cell())


@pytest.mark.parametrize("edit", [None, pytest.param(lambda groups, state: groups, marks=pytest.mark.full)],
                         ids=["played again", "from the record"])
def test_without_a_change_it_is_the_run_in_every_bit(run, edit):
    twin = played(run, 1, edit=edit)
    assert content(twin.recorder.folder) == content(run.recorder.folder)
    assert torch.equal(flat(restore(twin, 3).policy), flat(restore(run, 3).policy)) and len(twin.metrics) == 3


@pytest.mark.full
def test_an_edited_step_is_done_again_from_its_recorded_episodes(run):
    value = run.recorder.groups(1)[0].advantages[1]
    same, other, fewer = (played(run, 1, name, edit=edit, steps=2) for name, edit in (
        ("same", with_advantage(0, 1, value)), ("other", with_advantage(0, 1, 9.0)), ("fewer", without_group(1))))
    end = flat(restore(run, 2).policy)
    assert [torch.equal(flat(restore(twin, 2).policy), end) for twin in (same, other, fewer)] == [True, False, False]
    assert [row["step"] for row in same.metrics] == [0, 1] and replay(same, 1).equal and len(fewer.recorder.groups(1)) == 2
    later = played(fewer, 1, "later", steps=3)  # a fork of a fork, on the run's way again
    assert content(later.recorder.folder) == content(run.recorder.folder)


def test_a_fork_of_episodes_needs_their_environment(run):
    with pytest.raises(ValueError, match="forked with a pool"):
        asyncio.run(fork(run, 1, "twin", SUMS))
    for options in ({"reward": digits}, {"watch": {"digits": digits}}):
        with pytest.raises(ValueError, match="without a reward or watch"):
            played(run, 1, **options)
    with pytest.raises(ValueError, match="leaves nothing of step 1 to learn from"):
        played(run, 1, edit=lambda groups, state: [])
