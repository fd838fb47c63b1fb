"""Sources of groups and rewards: any source trains as grpo's own does, slow rewards overlap, and a fault costs its rollout."""

import asyncio
import dataclasses
import json
import time

import pytest
import torch
from loop_helpers import flat as weights
from loop_helpers import rows_of

from grpolab.arithmetic import Problem
from grpolab.chat import prompt_ids
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.curriculum import Curriculum
from grpolab.lab.restore import restore
from grpolab.models.load import load_policy
from grpolab.rollouts import Group, Rollout
from grpolab.runs.run import Run
from grpolab.train import GRPOConfig, grpo, grpo_from
from grpolab.train.grpo import asked
from grpolab.train.rewards import finished_and_correct, sample_and_score
from grpolab.train.sources import StepGroups

ROWS = [{"prompt": f"What is {a} + 2?", "answer": a + 2} for a in range(6)]
CONFIG = GRPOConfig(steps=2, prompts_per_step=3, group_size=4, max_new_tokens=8, lr=1e-3, seed=5)


@pytest.fixture
def tiny():
    return load_policy("tiny")


def vowels(text, row, rollout):
    return float(sum(text.count(v) for v in "aeiou0123"))


def train(policy, rows=ROWS, reward=vowels, config=CONFIG, **more):
    return rows_of(grpo(policy, None, rows, config, reward=reward, **more))


def test_rows_of_any_kind_train_alike(tiny):
    train(tiny)
    for rows in ([Problem(a, "+", 2) for a in range(6)],
                 [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": 0} for r in ROWS]):
        other = load_policy("tiny")
        train(other, rows)
        assert torch.equal(weights(tiny), weights(other))


def test_a_source_of_ones_own_trains_as_grpo_does(tiny):
    """The same groups through `grpo_from` give the same weights as `grpo`, and the source's row stands in the step's."""
    seen, other = [], load_policy("tiny")

    def spy(text, row, rollout):
        seen.append((row["prompt"], rollout, vowels(text, row, rollout)))
        return seen[-1][2]

    train(tiny, reward=spy)

    async def again(step):
        of_step, groups = seen[step * 12 : (step + 1) * 12], []
        for prompt in dict.fromkeys(prompt for prompt, _, _ in of_step):
            members = sorted(((r, reward) for p, r, reward in of_step if p == prompt), key=lambda m: m[0].seed)
            groups.append(Group(tuple(r for r, _ in members)).with_rewards([reward for _, reward in members]))
        return StepGroups(groups, {"cost": 7.0 + step})

    rows = from_source(other, again)
    assert [row["cost"] for row in rows] == [7.0, 8.0]
    assert torch.allclose(weights(tiny), weights(other), atol=2e-5)
    assert not torch.equal(weights(other), weights(load_policy("tiny")))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_raises_costs_its_own_rollout(tiny, is_async):
    def fragile(text, row, rollout):
        if rollout.seed % 3 == 0:
            raise KeyError("no such judge")
        return vowels(text, row, rollout)

    async def later(text, row, rollout):
        return fragile(text, row, rollout)

    with pytest.warns(UserWarning, match="no such judge.*abstains"):
        rows = train(tiny, reward=later if is_async else fragile)
    assert all(0 < row["reward_errors"] < 12 for row in rows) and tiny.version == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_of_another_type_is_an_error_that_names_it(tiny, is_async):
    def spelled(text, row, rollout):
        return "0.5"

    async def spelled_later(text, row, rollout):
        return "0.5"

    with pytest.raises(TypeError, match="spelled.*'0.5', of type str"):
        train(tiny, reward=spelled_later if is_async else spelled)
    assert tiny.version == 0


def test_a_cancelled_step_leaves_no_reward_behind(tiny):
    async def endless(text, row, rollout):
        await asyncio.sleep(3600)

    async def run():
        steps = grpo(tiny, None, ROWS, CONFIG, reward=endless)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(steps), 3)
        await steps.aclose()
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(run()) == [] and tiny.version == 0


def from_source(policy, source, config=CONFIG, run=None):
    return rows_of(grpo_from(policy, None, source, config, longest=64, run=run))


async def sampled_groups(policy, step, size=4, n=2):
    async with Sampler(policy) as sampler:
        prompts = [prompt_ids(policy.tokenizer, row["prompt"]) for row in ROWS[:n]]
        groups = await sampler.sample(prompts, group_size=size, params=SamplingParams(max_new_tokens=6, seed=step))
        return [g.with_rewards([float(len(r.tokens) + i) for i, r in enumerate(g)]) for g in groups]


@pytest.mark.parametrize("cap, far", [(None, False), (2.0, False), (None, True)])
def test_a_step_without_signal_has_the_columns_of_any_other(tiny, cap, far):
    async def source(step):
        groups = await sampled_groups(tiny, step)
        return StepGroups([g.with_rewards([1.0] * 4) for g in groups] if step else groups, off_policy=far)

    first, second = from_source(tiny, source, dataclasses.replace(CONFIG, sampler_cap=cap))
    assert first.keys() == second.keys() and second["trained_groups"] == 0


@pytest.mark.parametrize("given, error, says", [
    (lambda groups: [], ValueError, "gave no groups"), (lambda groups: "groups", TypeError, "not 'groups'"),
    (lambda groups: [list(groups[0])], TypeError, "Groups of rollouts"), (lambda groups: None, TypeError, "not None"),
    (lambda groups: StepGroups([*groups, Group(groups[0].rollouts[:2])]), ValueError, r"groups of \[2, 4\] rollouts"),
])
def test_what_a_source_gives_is_checked_before_a_weight_moves(tiny, given, error, says):
    async def source(step):
        return given(await sampled_groups(tiny, step))

    before = weights(tiny)
    with pytest.raises(error, match=says):
        from_source(tiny, source)
    assert torch.equal(before, weights(tiny))


def test_slow_rewards_overlap_with_each_other_and_with_decoding(tiny):
    """Of twelve rewards of 0.2 s, asked as the rollouts finish, the first is done before the last is asked; the time in which
    any of them waits is far from their sum."""
    spans = []

    async def judge(text, row, rollout):
        began = time.perf_counter()
        await asyncio.sleep(0.2)
        spans.append((began, time.perf_counter()))
        return 1.0

    async def run():
        async with Sampler(tiny, slots=4) as sampler:
            prompts = [prompt_ids(tiny.tokenizer, row["prompt"]) for row in ROWS]
            params = SamplingParams(max_new_tokens=200, seed=0, ignore_eos=True)
            return await sample_and_score(tiny, sampler, ROWS, prompts, 2, params, judge, [])

    groups = asyncio.run(run())
    waited, until = 0.0, 0.0
    for began, ended in sorted(spans):
        waited, until = waited + max(0.0, ended - max(began, until)), max(until, ended)
    assert len(spans) == 12 and all(r.reward == 1.0 for g in groups for r in g)
    assert waited < 0.6 * sum(ended - began for began, ended in spans)
    assert min(ended for _, ended in spans) < max(began for began, _ in spans)


# --- what rewards may be ----------------------------------------------------------------------------------------------


def test_the_default_reward_reads_the_answer_of_any_row():
    ended = Rollout((1,), (2,), (1,), (0.0,), (0.0,), "eos")
    cut = dataclasses.replace(ended, finish_reason="length")
    for row in (Problem(1, "+", 2), {"answer": 3}, {"answer": "3"}):
        assert finished_and_correct("\\boxed{3}", row, ended) == 1.0 and finished_and_correct("\\boxed{4}", row, ended) == 0.0
        assert finished_and_correct("\\boxed{3}", row, cut) == 0.0
    with pytest.raises(ValueError, match="the answer '3 apples' of a row is no integer"):
        finished_and_correct("\\boxed{3}", {"answer": "3 apples"}, ended)


def test_rows_without_what_the_default_reward_asks_for_are_an_error_not_a_zero(tiny):
    """Also where no completion has ended, so that the answer would not matter yet."""
    with pytest.raises(ValueError, match="has no 'answer'; it has .'prompt'") as told:
        train(tiny, [{"prompt": "a"}, {"prompt": "b"}], finished_and_correct)
    assert "each of the step's 12 rollouts" in told.value.__notes__[0] and tiny.version == 0


class Together:
    def __init__(self, give):
        self.give = give

    def batch(self, texts, rows, rollouts):
        return self.give(texts)


class Later(Together):
    async def batch(self, texts, rows, rollouts):
        await asyncio.sleep(0.01)
        return self.give(texts)


def count(texts):
    return [vowels(text, None, None) for text in texts]


async def vowels_later(text, row, rollout):
    await asyncio.sleep(0.001 * (len(text) % 3))
    return vowels(text, row, rollout)


def test_a_batch_and_an_async_reward_train_as_the_plain_one_does(tiny):
    train(tiny)
    for reward in (Together(count), Later(count), vowels_later):
        other = load_policy("tiny")
        train(other, reward=reward)
        assert torch.equal(weights(tiny), weights(other))


@pytest.mark.parametrize("kind", [Together, Later])
@pytest.mark.parametrize("give, error, says", [
    (lambda texts: [1.0], ValueError, "gave 1 rewards for 12 rollouts"),
    (lambda texts: None, TypeError, "gave None: it gives a list"),
    (lambda texts: ["x"] * 12, TypeError, "gave 'x', of type str"),
])
def test_a_batch_of_another_length_or_type_is_named(tiny, kind, give, error, says):
    with pytest.raises(error, match=f"{kind.__name__}.*{says}"):
        train(tiny, reward=kind(give))
    assert tiny.version == 0


def test_watched_rewards_may_be_async_and_may_fail_for_some(tiny):
    async def later(text, row, rollout):
        await asyncio.sleep(0.001)
        return 2.0

    def fragile(text, row, rollout):
        if rollout.seed % 3 == 0:
            raise KeyError("no such judge")
        return 3.0

    other = load_policy("tiny")
    train(tiny)
    with pytest.warns(UserWarning, match="no such judge"):
        rows = train(other, watch={"later": later, "fragile": fragile, "same": vowels})
    assert all(row["later"] == 2.0 and row["fragile"] == 3.0 and row["reward_errors"] == 0 for row in rows)
    assert torch.equal(weights(tiny), weights(other))


def test_advantages_of_a_sources_own_are_recorded_and_trained_again(tiny, tmp_path):
    """A run of `grpo_from` without a record of its own is restored to the weights that it ended with."""
    async def source(step):
        groups = await sampled_groups(tiny, step)
        return StepGroups(groups, advantages=torch.tensor([[1.0, -1.0, 0.5, -0.5], [0.0, 2.0, -1.0, -1.0]]))

    run = Run("own", root=tmp_path, replay_every=5)
    from_source(tiny, source, run=run)
    assert run.rollouts(0)["advantage"].tolist() == [1.0, -1.0, 0.5, -0.5, 0.0, 2.0, -1.0, -1.0]
    state = restore(run, 2)
    assert state.notes == () and torch.equal(weights(state.policy), weights(tiny))


def test_a_curriculum_of_dataclasses(tiny):
    class Sums:
        def __init__(self):
            self.results = []

        def next_tasks(self, n):
            return [Problem(a, "+", 2) for a in range(n)]

        def record_result(self, task, rate):
            self.results.append((task, rate))

    sums = Sums()
    rows = train(tiny, sums, finished_and_correct)
    assert len(rows) == 2 and len(sums.results) == 6 and json.loads(rows[0]["curriculum"])["results"][0][0]["op"] == "+"


async def test_the_forward_is_verified_as_far_as_the_tasks_of_a_curriculum_reach(tiny):
    longest = [(await asked(tiny, rows, CONFIG, vowels, None, None, 1.0))[2] for rows in (ROWS, Curriculum([ROWS]))]
    assert longest[0] == longest[1] < tiny.context
