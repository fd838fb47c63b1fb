import asyncio
import copy
import random
from dataclasses import replace

import pytest
import torch

from grpolab.arithmetic import Problem
from grpolab.chat import encode_chat, observation_ids, prompt_ids, user
from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.client import Deadlines
from grpolab.env.faults import Faulty
from grpolab.env.pool import GrpoPool
from grpolab.env.server import serve
from grpolab.models.load import Policy
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.grpo import GRPOConfig, grpo_gradient
from grpolab.train.multiturn import Limits, as_groups, demonstrate, evaluate_episodes, multi_turn_grpo, play, play_all
from grpolab.train.sft import SFTConfig, sft

PROBLEMS = [Problem(a, "+", b) for a in range(4) for b in range(4)]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def demonstration(policy, problem, with_tool):
    turns = [f"calc: {problem.a} {problem.op} {problem.b}"] * with_tool + [problem.target]
    return demonstrate(policy.tokenizer, CalculatorEnv(), vars(problem), turns)


@pytest.fixture(scope="module")
def caller(_tiny):
    """A policy that mostly calls the calculator on small sums, sometimes answers at once, and is sometimes wrong."""
    tiny = Policy(copy.deepcopy(_tiny.model), _tiny.tokenizer, _tiny.name, _tiny.eos_ids)
    rng = random.Random(0)
    examples = [demonstration(tiny, rng.choice(PROBLEMS), i % 3 != 0) for i in range(96)]

    async def teach():
        async for _ in sft(tiny, examples, SFTConfig(steps=40, lr=2e-3, batch_size=32)):
            pass

    asyncio.run(teach())
    return tiny


def tasks(n):
    return [{"a": p.a, "op": p.op, "b": p.b} for p in (PROBLEMS * 4)[:n]]


async def episodes_of(policy, n=12, size=4, latency=0.0, limits=None, seed=0, temperature=1.0, **pool_options):
    sampler = Sampler(policy)
    async with serve(lambda: Faulty(CalculatorEnv(), latency=latency), max_sessions=size) as server, sampler:
        async with GrpoPool(server.url, size=size, **pool_options) as pool:
            params = SamplingParams(temperature=temperature, max_new_tokens=24)
            episodes = await play_all(pool, sampler, tasks(n), seeds=[seed + i for i in range(n)], params=params,
                                      limits=limits or Limits())
            return episodes, pool.trace, sampler.stats


def test_an_observation_stands_where_the_chat_template_puts_it(tiny):
    tokenizer = tiny.tokenizer
    said = [*user("What is 1 + 2?"), {"role": "assistant", "content": "calc: 1 + 2"}, *user("3")]
    answer = {"role": "assistant", "content": "1 + 2 = \\boxed{3}."}
    whole = encode_chat(tokenizer, [*said, answer])
    turns = [tokenizer.encode(m["content"], add_special_tokens=False) + [tokenizer.eos_token_id] for m in (said[1], answer)]
    pieces = [prompt_ids(tokenizer, said[:1]), turns[0], observation_ids(tokenizer, "3"), turns[1]]
    assert whole.ids == tuple(i for piece in pieces for i in piece)
    assert whole.mask == tuple(m for piece, m in zip(pieces, (0, 1, 0, 1)) for _ in piece)


def test_a_demonstration_is_what_the_environment_would_have_made_of_it(tiny):
    shown = demonstration(tiny, Problem(2, "+", 3), True)
    said = tiny.tokenizer.decode([i for i, m in zip(shown.ids, shown.mask) if m])
    heard = tiny.tokenizer.decode([i for i, m in zip(shown.ids, shown.mask) if not m])
    end = tiny.tokenizer.eos_token
    assert said == f"calc: 2 + 3{end}2 + 3 = \\boxed{{5}}.{end}" and "What is 2 + 3?" in heard and "User: 5\n" in heard
    assert demonstration(tiny, Problem(2, "+", 3), False).ids != shown.ids
    with pytest.raises(RuntimeError, match="over"):  # nothing can be said after the answer
        demonstrate(tiny.tokenizer, CalculatorEnv(), {"a": 2, "op": "+", "b": 3}, ["\\boxed{5}", "calc: 1"])


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny):
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    with pytest.raises(ValueError, match="rewrites"):
        observation_ids(tokenizer, "3")


def test_an_episode_is_one_token_sequence_with_the_policys_own_logps(caller):
    episodes, *_ = run(episodes_of(caller, n=36))
    end = caller.tokenizer.eos_token
    assert {len(e.turns) for e in episodes} >= {1, 2}
    for e in episodes:
        r = e.rollout
        assert list(r.prompt) == prompt_ids(caller.tokenizer, e.question)
        written = [t for t, m in zip(r.tokens, r.mask) if m]
        given = [t for t, m in zip(r.tokens, r.mask) if not m]
        between = [i for _, told in e.turns[:-1] for i in observation_ids(caller.tokenizer, told)]
        if r.finish_reason == "done":
            assert given == between and caller.decode(written).replace(end, "") == "".join(wrote for wrote, _ in e.turns)
        assert all(lp == 0.0 for lp, m in zip(r.logps, r.mask) if not m) and all(
            lp < 0.0 for lp, m in zip(r.logps, r.mask) if m and lp != 0.0)
        assert r.reward in (0.0, 1.0)
    assert any(e.rollout.reward == 1.0 for e in episodes) and any(e.calls for e in episodes)


def test_the_logps_recomputed_over_the_whole_sequence_equal_the_recorded_ones(caller):
    episodes, *_ = run(episodes_of(caller))
    found = audit(caller, [e.rollout for e in episodes])
    assert found.tokens > 100 and found.max_error < 1e-4 and found.after_stop == 0
    shifted = [replace(e.rollout, tokens=e.rollout.tokens[:1] + e.rollout.tokens[:-1]) for e in episodes]
    assert audit(caller, shifted).max_error > 0.1  # this comparison can fail


def test_the_episodes_do_not_depend_on_the_number_of_seats(caller):
    one, *_ = run(episodes_of(caller, n=8, size=1))
    four, *_ = run(episodes_of(caller, n=8, size=4, latency=0.01))
    assert [e.turns for e in one] == [e.turns for e in four]
    assert [e.rollout.tokens for e in one] == [e.rollout.tokens for e in four]
    other, *_ = run(episodes_of(caller, n=8, size=4, seed=100))
    assert [e.rollout.tokens for e in other] != [e.rollout.tokens for e in four]


def test_the_cache_is_kept_between_turns(caller):
    episodes, _, stats = run(episodes_of(caller))
    whole = shared = 0
    for e in episodes:
        end = caller.tokenizer.eos_token_id
        position = 0
        for _ in range(len(e.turns)):  # each turn would prefill all that stands before it
            whole += len(e.rollout.prompt) + position
            position = next((i + 1 for i in range(position, len(e.rollout.tokens))
                             if e.rollout.tokens[i] == end and e.rollout.mask[i]), len(e.rollout.tokens))
            while position < len(e.rollout.mask) and not e.rollout.mask[position]:
                position += 1
        # kept: the prompt, what was given, and the end token of each turn, which was drawn but not yet read
        shared += len(e.rollout.prompt) + e.rollout.mask.count(0) + len(e.turns)
    assert stats.prefill_tokens <= shared < whole


def test_generation_overlaps_the_environment_steps_of_others(caller):
    episodes, trace, _ = run(episodes_of(caller, n=8, size=8, latency=0.1))
    steps = [s for s in trace if s.phase == "step"]
    assert len(steps) == sum(len(e.turns) for e in episodes)

    def meanwhile(step, phase):
        return {s.session for s in trace if s.phase == phase and s.start < step.end and step.start < s.end} - {step.session}

    assert max(len(meanwhile(s, "step")) for s in steps) >= 3
    assert sum(bool(meanwhile(s, "generate")) for s in steps) >= 2


def test_the_turn_limit_and_the_token_budget(caller):
    episodes, *_ = run(episodes_of(caller, limits=Limits(max_turns=1)))
    assert all(len(e.turns) <= 1 for e in episodes)
    assert "turns" in {e.rollout.finish_reason for e in episodes} <= {"turns", "done", "length"}
    assert all(e.rollout.reward == 0.0 for e in episodes if e.rollout.finish_reason == "turns")
    episodes, *_ = run(episodes_of(caller, limits=Limits(max_total_tokens=40)))
    assert all(len(e.rollout.prompt) + len(e.rollout.tokens) <= 40 for e in episodes)
    cut = [e for e in episodes if e.rollout.finish_reason == "length"]
    assert cut and all(e.rollout.reward == 0.0 for e in cut)
    with pytest.raises(ValueError, match="max_total_tokens=8"):
        run(episodes_of(caller, limits=Limits(max_total_tokens=8)))
    with pytest.raises(ValueError, match="needs a turn"):
        Limits(max_turns=0)


def test_an_ending_without_a_reward_is_an_error_and_not_a_zero(caller):
    class Silent(CalculatorEnv):
        def step(self, action):
            return replace(super().step(action), reward=None, done=True)

    async def main():
        async with serve(Silent) as server, Sampler(caller) as sampler, GrpoPool(server.url, size=1) as pool:
            params = SamplingParams(max_new_tokens=24)
            await pool.run_group(lambda seat: play(seat, sampler, tasks(1)[0], seed=0, params=params, limits=Limits()))

    with pytest.raises(ValueError, match="without any reward"):
        run(main())


def test_a_lost_episode_abstains(caller):
    """Its group trains on the others, with their own mean, as if it had never been."""
    born = []

    def one_hangs():
        born.append(1)
        return Faulty(CalculatorEnv(), faults={1: "hang"} if len(born) == 2 else {})

    async def main():
        options = {"size": 4, "on_failure": "drop", "min_group": 2, "deadlines": Deadlines(step=2)}
        async with serve(one_hangs, close_timeout=0.1) as server, Sampler(caller) as sampler:
            async with GrpoPool(server.url, **options) as pool:
                params = SamplingParams(max_new_tokens=24)
                asked = [task for task in tasks(2) for _ in range(4)]
                return await play_all(pool, sampler, asked, seeds=range(8), params=params, limits=Limits())

    episodes = run(main())
    assert episodes.count(None) == 1
    lost = episodes.index(None)
    groups = as_groups(episodes, 4)
    assert [len(g) for g in groups] == [4, 4]
    absent = groups[lost // 4][lost % 4]
    assert absent.reward is None and absent.tokens == () and absent.finish_reason == "lost"

    def gradient(rollouts, a):
        caller.model.zero_grad()
        grpo_gradient(caller, None, rollouts, a, GRPOConfig(steps=1))
        return torch.cat([p.grad.flatten() for p in caller.model.parameters()])

    rewards = [[None if r.reward is None else i % 2 for i, r in enumerate(g)] for g in groups]
    a = advantages(reward_tensor(rewards)).flatten()
    assert a[lost] == 0.0
    rollouts = [r for g in groups for r in g]
    kept = [i for i in range(8) if i != lost]
    torch.testing.assert_close(gradient(rollouts, a), gradient([rollouts[i] for i in kept], a[kept]), rtol=1e-4, atol=1e-7)


def test_a_kl_penalty_needs_a_reference_of_its_own(caller):
    async def first_row(reference, **options):
        async with serve(CalculatorEnv) as server, GrpoPool(server.url, size=1) as pool:
            async for _ in multi_turn_grpo(caller, reference, PROBLEMS, GRPOConfig(steps=1, **options), pool):
                pass

    with pytest.raises(ValueError, match="needs a reference"):
        run(first_row(None, kl_coef=0.1))
    with pytest.raises(ValueError, match="move along"):
        run(first_row(caller))


def test_training_runs_and_reports_its_habits(caller, tmp_path):
    config = GRPOConfig(steps=2, prompts_per_step=4, group_size=4, lr=1e-4, max_new_tokens=24)

    caller = Policy(copy.deepcopy(caller.model), caller.tokenizer, caller.name, caller.eos_ids)

    async def main():
        async with serve(CalculatorEnv, max_sessions=8) as server, GrpoPool(server.url, size=8) as pool:
            before = caller.version
            rows = [row async for row in multi_turn_grpo(caller, None, PROBLEMS, config, pool)]
            assert caller.version > before
            async with Sampler(caller) as sampler:
                evaluated = await evaluate_episodes(pool, sampler, PROBLEMS[:5], limits=Limits())
            return rows, evaluated

    rows, evaluated = run(main())
    assert [row["step"] for row in rows] == [0, 1] and len(evaluated) == 5
    for row in rows:
        assert 1 <= row["turns"] <= 4 and 0 < row["tool_rate"] <= 1 and row["lost"] == 0 and 0 <= row["reward"] <= 1
