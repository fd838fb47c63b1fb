"""Forks of episodes: a step done again from its record, the steps after it played in the user's pool."""

import asyncio
import copy
import shutil

import pytest
import torch

from grpolab.env.calculator import CalculatorEnv
from grpolab.env.pool import GrpoPool
from grpolab.env.server import serve
from grpolab.lab.counterfactual import fork, unchanged, with_advantage, with_reward, with_token, without_group
from grpolab.lab.replay import replay
from grpolab.lab.restore import restore
from grpolab.models.load import Policy
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig
from grpolab.train.multiturn import Limits, multi_turn_grpo
from tests.test_multiturn import PROBLEMS as SUMS
from tests.test_multiturn import caller  # noqa: F401
from tests.test_rollout_log import content, digits, length

CONFIG = GRPOConfig(steps=3, prompts_per_step=3, group_size=4, max_new_tokens=24, lr=1e-3)
LIMITS = Limits(3, 96)


def flat(policy):
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


@pytest.fixture(scope="module")
def left(caller, tmp_path_factory):  # noqa: F811
    run = Run("x", root=tmp_path_factory.mktemp("runs"), replay_every=2)
    policy = Policy(copy.deepcopy(caller.model), caller.tokenizer, "copy", caller.eos_ids)

    async def cell():
        async with serve(CalculatorEnv, max_sessions=8) as server, GrpoPool(server.url, size=8) as pool:
            async for _ in multi_turn_grpo(policy, None, SUMS, CONFIG, pool, limits=LIMITS, run=run):
                pass

    asyncio.run(cell())
    return run.folder


@pytest.fixture
def run(left, tmp_path):
    return Run(root=shutil.copytree(left, tmp_path / "x"), replay_every=2)


def forked(run, step, name="twin", **options):
    return asyncio.run(fork(run, step, name, SUMS, **options))


def played(run, step, name="twin", problems=SUMS, limits=LIMITS, **options):
    async def cell():
        async with serve(CalculatorEnv, max_sessions=8) as server, GrpoPool(server.url, size=8) as pool:
            return await fork(run, step, name, problems, pool=pool, limits=limits, **options)

    return asyncio.run(cell())


@pytest.mark.parametrize("edit", [None, unchanged], ids=["played again", "from the record"])
def test_without_a_change_it_is_the_run_in_every_bit(run, edit):
    twin = played(run, 1, edit=edit)
    assert content(twin.recorder.folder) == content(run.recorder.folder)
    assert torch.equal(flat(restore(twin, 3).policy), flat(restore(run, 3).policy)) and len(twin.metrics) == 3


@pytest.mark.full
def test_without_a_pool_the_step_itself_is_done_again(run, capsys):
    """With a change of the configuration, of an advantage, of the groups; there the fork ends."""
    end = flat(restore(run, 2).policy)
    value = run.recorder.groups(1)[0].advantages[1]
    changes = {"same": {}, "a": {"edit": with_advantage(0, 1, value)}, "lr": {"lr": 1e-4},
               "b": {"edit": with_advantage(0, 1, 9.0)}, "c": {"edit": without_group(1)}}
    twins = {name: forked(run, 1, name, **change) for name, change in changes.items()}
    assert "those of the steps after it have to be played" in capsys.readouterr().out
    assert {name: torch.equal(flat(restore(t, 2).policy), end) for name, t in twins.items()} == {
        "same": True, "a": True, "lr": False, "b": False, "c": False}
    same = twins["same"]
    assert content(same.recorder.folder) == [x for x in content(run.recorder.folder) if not x.startswith(b'{"step": 2')]
    assert [row["step"] for row in same.metrics] == [0, 1] and replay(same, 1).equal
    assert len(twins["c"].recorder.groups(1)) == 2
    later = played(twins["lr"], 1, "later", lr=1e-3)  # a fork of a fork, on the run's way again
    assert content(later.recorder.folder) == content(run.recorder.folder)


def test_the_recorded_episodes_of_a_step_are_paid_otherwise(run):
    groups = run.recorder.groups(1)
    as_paid = dict(zip([r.seed for g in groups for r in g.group], [r.reward for g in groups for r in g.group]))
    same = forked(run, 1, "same", edit=with_reward(lambda text, task, r: as_paid[r.seed]))
    assert torch.equal(flat(restore(same, 2).policy), flat(restore(run, 2).policy))
    seen = []
    other = forked(run, 1, "other", edit=with_reward(lambda text, task, r: seen.append(task) or length(text, task, r)))
    assert vars(seen[0]) == groups[0].problem and len(seen) == 12
    new = other.recorder.groups(1)
    assert [r.reward for g in new for r in g.group] == [float(len(r.tokens)) for g in new for r in g.group]
    assert all(sum(g.advantages) == pytest.approx(0, abs=1e-4) for g in new)
    assert not torch.equal(flat(restore(other, 2).policy), flat(restore(run, 2).policy))


def test_what_differs_before_the_update_is_told(run):
    """A fork in another setting is no counterfactual."""
    with pytest.warns(UserWarning, match=r"of 12 rollouts of step 1 are not the run's.*limits"):
        played(run, 1, limits=Limits(1, 96))


@pytest.mark.parametrize("options, text", [
    ({"reward": digits}, "come from their environment.*with_reward"),
    ({"watch": {"digits": digits}}, "come from their environment.*with_reward"),
    ({"edit": with_token(0, 0, 0, 5)}, "a token cannot be forced in an episode"),
    ({"edit": lambda groups, state: []}, "leaves nothing of step 1 to learn from"),
])
def test_what_an_episode_cannot_have_is_named(run, options, text):
    with pytest.raises(ValueError, match=text):
        forked(run, 1, **options)
