"""Episodes and training on them: one token sequence with the policy's own log-probs, groups of one question, limits,
observations, malformed actions, lost episodes, curricula, and every option."""

import asyncio
import copy
import importlib
import json
import random
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from loop_helpers import fresh, rows_of

from grpolab.arithmetic import Problem
from grpolab.chat import encode_chat, observation_ids, prompt_ids, user
from grpolab.decode.audit import audit
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.action_format import TEXT
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.client import Deadlines
from grpolab.env.curriculum import Curriculum
from grpolab.env.faults import Faulty
from grpolab.env.pool import GroupFailed, GrpoPool
from grpolab.env.protocol import DeadlineExceeded, InvalidAction, StepResult
from grpolab.env.server import serve
from grpolab.runs.run import Run
from grpolab.train import multiturn
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.episodes import Limits, as_groups, demonstrate, evaluate_episodes, play_all
from grpolab.train.grpo import GRPOConfig, grpo_gradient
from grpolab.train.multiturn import multi_turn_grpo
from grpolab.train.sft import SFTConfig, sft

PROBLEMS = [Problem(a, "+", b) for a in range(4) for b in range(4)]
CONFIG = GRPOConfig(steps=1, prompts_per_step=3, group_size=4, lr=1e-4, max_new_tokens=24)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def demonstration(policy, problem, with_tool):
    turns = [f"calc: {problem.a} {problem.op} {problem.b}"] * with_tool + [problem.target]
    return demonstrate(policy.tokenizer, CalculatorEnv(), problem, turns)


@pytest.fixture(scope="module")
def caller(taught_once):
    """A policy that mostly calls the calculator on small sums, sometimes answers at once, and is sometimes wrong."""
    def teach(policy):
        rng = random.Random(0)
        examples = [demonstration(policy, rng.choice(PROBLEMS), i % 3 != 0) for i in range(96)]
        rows_of(sft(policy, examples, SFTConfig(steps=40, lr=2e-3, batch_size=32)))

    return taught_once("caller", teach)


@pytest.fixture
def learner(caller):
    """The caller, to be changed by one test."""
    return fresh(caller)


@pytest.fixture
def trained(monkeypatch):
    """The groups that training got, a list for each step."""
    module = importlib.import_module("grpolab.train.grpo")
    seen, honest = [], module.grpo_update
    monkeypatch.setattr(module, "grpo_update", lambda policy, reference, groups, *rest: (
        seen.append(groups), honest(policy, reference, groups, *rest))[1])
    return seen


async def train(policy, env, problems=PROBLEMS, config=CONFIG, size=6, pool_options=None, reference=None, **options):
    """The rows of a run with `size` slots on a server of `env`."""
    async with serve(env, max_sessions=size) as server, GrpoPool(server.url, size=size, **(pool_options or {})) as pool:
        return [row async for row in multi_turn_grpo(policy, reference, problems, config, pool, **options)]


async def played(policy, env, tasks, limits=None, size=2, temperature=1.0, action_format=TEXT, max_new_tokens=24, seed=0,
                 tell=None, **pool_options):
    async with serve(env, max_sessions=size + 1, close_timeout=0.1) as server, Sampler(policy) as sampler:
        async with GrpoPool(server.url, size=size, **pool_options) as pool:
            params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
            episodes = await play_all(pool, sampler, tasks, seeds=range(seed, seed + len(tasks)), limits=limits or Limits(),
                                      action_format=action_format, params=params)
            if tell is not None:
                tell.update(trace=pool.trace, failures=pool.failures)
            return episodes


class Seeded(CalculatorEnv):
    """Takes its question from the seed alone."""

    def reset(self, seed=None):
        return super().reset(seed=seed)


class Unruly(CalculatorEnv):
    """Takes its question from nowhere."""

    def reset(self):
        return super().reset(seed=random.SystemRandom().randrange(2**31))


class Paying(CalculatorEnv):
    """Pays a quarter for every turn and never ends by itself."""

    def step(self, action):
        return StepResult({"text": "0"}, 0.25)


def saying(text):
    """An environment that answers every turn with this text."""

    class Saying(CalculatorEnv):
        def step(self, action):
            return StepResult({"text": text}, 0.5)

    return Saying


# --- one token sequence -----------------------------------------------------------------------------------------------


def test_a_demonstration_is_what_the_environment_would_have_made_of_it(tiny):
    shown, end = demonstration(tiny, Problem(2, "+", 3), True), tiny.tokenizer.eos_token
    said, heard = (tiny.tokenizer.decode([i for i, m in zip(shown.ids, shown.mask) if m == chosen]) for chosen in (1, 0))
    assert said == f"calc: 2 + 3{end}2 + 3 = \\boxed{{5}}.{end}" and "What is 2 + 3?" in heard and "User: 5\n" in heard
    with pytest.raises(RuntimeError, match="over"):  # nothing can be said after the answer
        demonstrate(tiny.tokenizer, CalculatorEnv(), {"a": 2, "op": "+", "b": 3}, ["\\boxed{5}", "calc: 1"])
    shown = demonstrate(tiny.tokenizer, Numbers(), [2, 3], ["2 + 3 = \\boxed{5}."], action_format=speaking())
    assert tiny.tokenizer.decode(shown.ids).startswith("User: What is 2 + 3?\nAssistant: 2 + 3 = ")


def test_an_episode_is_one_token_sequence_with_the_policys_own_logps(caller):
    episodes, tokenizer = run(played(caller, CalculatorEnv, (PROBLEMS * 3)[:36], size=4)), caller.tokenizer
    assert {len(e.turns) for e in episodes} >= {1, 2}
    for e in episodes:
        r = e.rollout
        assert list(r.prompt) == prompt_ids(tokenizer, e.question) and r.reward in (0.0, 1.0)
        assert all(lp == 0.0 for lp, m in zip(r.logps, r.mask) if not m)
        if r.finish_reason == "done":
            assert e.heard == tuple(answer for _, answer in e.turns[:-1])
            observations = [i for answer in e.heard for i in observation_ids(tokenizer, answer)]
            assert [t for t, m in zip(r.tokens, r.mask) if not m] == observations
            said = user(e.question)
            for wrote, answer in e.turns:
                said += [{"role": "assistant", "content": wrote}, *user(answer)]
            assert tokenizer.decode([*r.prompt, *r.tokens]) == tokenizer.decode(encode_chat(tokenizer, said[:-1]).ids)
    assert any(e.rollout.reward == 1.0 for e in episodes) and any(e.calls for e in episodes)
    found = audit(caller, [e.rollout for e in episodes])
    assert found.tokens > 100 and found.max_error < 1e-4 and found.after_stop == 0
    shifted = [replace(e.rollout, tokens=e.rollout.tokens[:1] + e.rollout.tokens[:-1]) for e in episodes]
    assert audit(caller, shifted).max_error > 0.1  # this comparison can fail


def test_the_episodes_do_not_depend_on_the_number_of_slots(caller):
    one = run(played(caller, CalculatorEnv, PROBLEMS[:8], size=1))
    four = run(played(caller, lambda: Faulty(CalculatorEnv(), latency=0.01), PROBLEMS[:8], size=4))
    assert [e.turns for e in one] == [e.turns for e in four]
    assert [e.rollout.tokens for e in one] == [e.rollout.tokens for e in four]
    other = run(played(caller, CalculatorEnv, PROBLEMS[:8], size=4, seed=100))
    assert [e.rollout.tokens for e in other] != [e.rollout.tokens for e in four]


def test_generation_overlaps_the_environment_steps_of_others(caller):
    seen = {}
    episodes = run(played(caller, lambda: Faulty(CalculatorEnv(), latency=0.1), PROBLEMS[:8], size=8, tell=seen))
    steps = [s for s in seen["trace"] if s.phase == "step"]
    assert len(steps) == sum(len(e.turns) for e in episodes)

    def meanwhile(step, phase):
        spans = (s for s in seen["trace"] if s.phase == phase and s.start < step.end and step.start < s.end)
        return {s.session for s in spans} - {step.session}

    assert max(len(meanwhile(s, "step")) for s in steps) >= 3
    assert sum(bool(meanwhile(s, "generate")) for s in steps) >= 2


# --- one question a group ---------------------------------------------------------------------------------------------


def test_the_rollouts_of_a_group_get_one_question_of_an_environment_that_draws_it_from_the_seed(learner, trained):
    run(train(learner, Seeded, config=replace(CONFIG, steps=2)))
    questions = [{r.prompt for r in group} for step in trained for group in step]
    assert [len(q) for q in questions] == [1] * 6 and len(set.union(*questions)) == 6  # the groups', and the steps', differ
    drawn = [[r.tokens for r in group] for step in trained for group in step]
    assert sum(len(set(tokens)) > 1 for tokens in drawn) >= 2  # the draws of a group's rollouts are their own
    assert len({r.seed for step in trained for group in step for r in group}) == 24


def test_a_group_of_different_questions_is_refused_and_not_trained_on(learner, trained):
    before = learner.version
    with pytest.raises(ValueError, match="different questions, 'What is .*task and the seed"):
        run(train(learner, Unruly))
    assert learner.version == before and not trained


# --- limits, and what an episode earns --------------------------------------------------------------------------------


def test_episodes_that_cannot_fit_are_refused(caller):
    started = []

    class Counting(CalculatorEnv):
        def reset(self, **options):
            started.append(1)
            return super().reset(**options)

    for work in (train(caller, Counting, limits=Limits(max_total_tokens=513)),
                 played(caller, Counting, PROBLEMS[:1], Limits(max_total_tokens=513))):
        with pytest.raises(ValueError, match=r"limits.max_total_tokens.* needs 513 tokens; the context of 'tiny' is 512"):
            run(work)
    assert not started
    with pytest.raises(ValueError, match="max_total_tokens=8"):
        run(played(caller, CalculatorEnv, PROBLEMS[:1], Limits(max_total_tokens=8)))
    with pytest.raises(ValueError, match="needs a turn"):
        Limits(max_turns=0)


def test_what_was_paid_is_kept_by_an_episode_that_was_cut(caller):
    class Welcoming(Paying):
        def reset(self, seed=None, task=None):
            return replace(super().reset(seed=seed, task=task), reward=1.0)

    for env, paid in ((Paying, 0.5), (Welcoming, 1.5)):
        episode, = run(played(caller, env, PROBLEMS[:1], Limits(max_turns=2), temperature=1e-3))
        assert (episode.rollout.finish_reason, episode.rollout.reward, len(episode.turns)) == ("turns", paid, 2)
    found = run(played(caller, Paying, PROBLEMS[:4], Limits(max_turns=50, max_total_tokens=90)))
    assert {e.rollout.finish_reason for e in found} == {"length"}
    assert all(e.rollout.reward == 0.25 * len(e.turns) > 0 for e in found)


def test_no_reward_is_made_up(caller):
    class Over(CalculatorEnv):
        def reset(self, seed=None, task=None):
            return replace(super().reset(seed=seed, task=task), reward=1.0, done=True)

    class Silent(CalculatorEnv):
        def step(self, action):
            return replace(super().step(action), reward=None, done=True)

    for env, says in ((Over, "ended its episode as it was reset"), (Silent, "without any reward")):
        with pytest.raises(ValueError, match=says):
            run(played(caller, env, PROBLEMS[:1]))


# --- lost episodes ----------------------------------------------------------------------------------------------------


def test_a_lost_episode_abstains_and_its_slot_goes_on(learner):
    """Its group trains on the others, with their own mean, as if it had never been."""
    born, seen = [], {}

    def first_hangs():
        born.append(1)
        return Faulty(CalculatorEnv(), faults={1: "hang"} if len(born) == 1 else {})

    options = {"size": 1, "on_failure": "drop", "min_group": 1, "deadlines": Deadlines(step=1)}
    sums = [p for p in PROBLEMS[:2] for _ in range(4)]
    episodes = run(played(learner, first_hangs, sums, tell=seen, **options))
    assert [e is None for e in episodes] == [True] + [False] * 7
    assert [(f.rollout, type(f.cause)) for f in seen["failures"]] == [(0, DeadlineExceeded)]
    groups = [g.trained for g in as_groups(PROBLEMS[:2], episodes, "centred")]
    absent = groups[0][0]
    assert [len(g) for g in groups] == [4, 4]
    assert absent.reward is None and absent.tokens == () and absent.finish_reason == "lost"

    def gradient(rollouts, a):
        learner.model.zero_grad()
        grpo_gradient(learner, None, rollouts, a, GRPOConfig(steps=1))
        return torch.cat([p.grad.flatten() for p in learner.model.parameters()])

    rewards = [[None if r.reward is None else i % 2 for i, r in enumerate(g)] for g in groups]
    a = advantages(reward_tensor(rewards)).flatten()
    rollouts = [r for g in groups for r in g]
    assert a[0] == 0.0
    torch.testing.assert_close(gradient(rollouts, a), gradient(rollouts[1:], a[1:]), rtol=1e-4, atol=1e-7)


def test_too_few_episodes_are_an_error_and_not_a_small_step(caller):
    with pytest.raises(GroupFailed, match="0 of 3 rollouts finished"):
        run(played(caller, lambda: Faulty(CalculatorEnv(), faults={1: "raise"}), PROBLEMS[:3], on_failure="drop", min_group=1))


def test_a_group_with_too_few_left_abstains(caller):
    found = run(played(caller, CalculatorEnv, [PROBLEMS[0]] * 8))
    found = [None, None, None, *found[3:]]
    counted = [[r.reward is not None for r in g.trained] for g in as_groups("ab", found, "centred", min_group=2)]
    assert counted == [[True] * 4, [False] * 4]  # groups that are not trained on stand last
    first, _ = as_groups("ab", found, "centred")
    assert [r.reward is not None for r in first.trained] == [False, False, False, True]


def test_a_policy_that_never_ends_a_turn_is_named_once(learner):
    with pytest.warns(UserWarning, match="never writes its end token within max_new_tokens=2") as said:
        rows = run(train(learner, CalculatorEnv, config=replace(CONFIG, steps=3, max_new_tokens=2)))
    assert len(said) == 1
    assert [(row["unheard"], row["truncated"], row["trained_tokens"]) for row in rows] == [(1.0, 1.0, 0)] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        row, = run(train(learner, CalculatorEnv))
    assert row["unheard"] < 0.5


# --- observations -----------------------------------------------------------------------------------------------------


def test_what_an_environment_may_say(caller):
    class Endless(CalculatorEnv):
        def reset(self, seed=None, task=None):
            return StepResult({"text": "x" * 2_000_000})

    with pytest.raises(ValueError, match="takes more than 191 tokens.*max_total_tokens=192"):
        run(played(caller, Endless, PROBLEMS[:1]))
    episode, = run(played(caller, saying("x" * 2_000_000), PROBLEMS[:1]))
    assert (episode.rollout.finish_reason, episode.rollout.reward, episode.heard) == ("length", 0.5, ())
    assert episode.turns[0][1].endswith("(2000000 characters, which did not fit)")
    assert len(episode.turns[0][1]) < 2100 and episode.rollout.mask.count(0) == 0
    episode, = run(played(caller, saying("a \udcff b"), PROBLEMS[:1], Limits(max_turns=2), temperature=1e-3))
    assert episode.turns[0][1] == "a ? b"  # half a surrogate pair is no text
    for size, heard in ((2100, False), (100, True)):
        episode, = run(played(caller, saying("x" * size), PROBLEMS[:1], Limits(max_turns=2, max_total_tokens=512)))
        assert episode.heard == ("x" * size,) * heard


# --- malformed actions ------------------------------------------------------------------------------------------------


class Numbers:
    """Wants {"number": n}; pays 1.0 for the sum, and refuses numbers beyond 5."""

    def reset(self, seed=None, task=None):
        self.task = task
        return StepResult({"say": f"What is {task[0]} + {task[1]}?"})

    def step(self, action):
        if set(action) != {"number"} or action["number"] > 5:
            raise InvalidAction(f"{action}: a number up to 5")
        return StepResult({"say": "thanks"}, float(action["number"] == sum(self.task)), True)

    def state(self):
        return {}

    def close(self): ...


def number(text):
    """The last digit of what was written, as an action; ValueError where it is a call and the digit is odd."""
    digits = [int(c) for c in text if c.isdigit()]
    if not digits or text.startswith("calc") and digits[-1] % 2:
        raise ValueError("odd")
    return {"number": digits[-1]}


def speaking(**rule):
    return replace(TEXT, to_action=number, to_text=lambda seen: seen["say"], **rule)


LARGE = [[a, b] for a in (2, 3) for b in (2, 3)]  # JSON lists as tasks; sums of 4 to 6


def outcomes(policy, **rule):
    """(the episodes with an action that could not be read, the others that acted)"""
    found = run(played(policy, Numbers, LARGE * 5, Limits(max_turns=2), action_format=speaking(**rule)))
    wrong, right = [e for e in found if e.invalid], [e for e in found if not e.invalid and e.turns]
    assert len(wrong) > 3 and len(right) > 3 and all(e.rollout.reward in (0.0, 1.0) for e in right)
    return wrong


def test_a_malformed_action_is_told_to_the_policy(caller):
    wrong = outcomes(caller)
    assert "error: odd" in {answer for e in wrong for _, answer in e.turns}  # our own reading of the text
    for e in wrong:
        assert any(answer.startswith("error") for _, answer in e.turns) and e.rollout.reward is not None
        assert len(e.turns) == 2 or e.rollout.finish_reason in ("length", "done")
        assert not e.heard or e.heard[0] == e.turns[0][1]
    refused = replace(speaking(), to_action=lambda text: {"number": 9})
    episode, = run(played(caller, Numbers, LARGE[:1], Limits(max_turns=2), action_format=refused))
    assert episode.invalid == 2 and episode.turns[0][1] == "error: data: {'number': 9}: a number up to 5"


def test_a_malformed_action_costs_what_the_user_named(caller):
    ended = [e for e in outcomes(caller, on_invalid="penalise", penalty=-0.25) if e.rollout.finish_reason == "turns"]
    assert ended and all(e.rollout.reward == -0.25 * e.invalid for e in ended)


def test_an_episode_with_a_malformed_action_abstains(learner, trained):
    wrong = outcomes(learner, on_invalid="abstain")
    assert all((e.rollout.reward, e.rollout.finish_reason, len(e.turns)) == (None, "invalid", 1) for e in wrong)
    row, = run(train(learner, Numbers, LARGE, limits=Limits(max_turns=2), action_format=speaking(on_invalid="abstain")))
    assert 0 < row["abstained"] < 1 and row["invalid"] == row["abstained"] and row["lost"] == 0
    absent = [r for group in trained[0] for r in group if r.reward is None]
    without = 3 - len(trained[0])  # groups of which every rollout abstained are left out
    assert len(absent) + 4 * without == round(12 * row["abstained"]) and all(r.tokens == () for r in absent)


# --- tasks, hooks and options -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    a: int
    b: int


def test_rows_say_what_the_episodes_were_like(learner):
    async def main():
        config = replace(CONFIG, steps=2, prompts_per_step=4)
        async with serve(CalculatorEnv, max_sessions=8) as server, GrpoPool(server.url, size=8) as pool:
            rows = [row async for row in multi_turn_grpo(learner, None, PROBLEMS, config, pool)]
            async with Sampler(learner) as sampler:
                return rows, await evaluate_episodes(pool, sampler, PROBLEMS[:5], limits=Limits())

    before = learner.version
    rows, evaluated = run(main())
    assert learner.version > before and [row["step"] for row in rows] == [0, 1] and len(evaluated) == 5
    for row in rows:
        assert 1 <= row["turns"] <= 4 and row["lost"] == 0 and 0 <= row["reward"] <= 1
        assert 0 < row["tool_rate"] <= row["calls"] and row["env_s"] > 0

    async def introduce(slot):
        return f"Slot {slot.session.open}."

    action_format = replace(TEXT, introduce=introduce, measure=lambda results: {"steps_heard": len(results), "calls": 0})
    episode, = run(played(learner, CalculatorEnv, PROBLEMS[:1], action_format=action_format))
    assert episode.question == "Slot True.\nWhat is 0 + 0?"
    row, = run(train(learner, CalculatorEnv, action_format=action_format))
    assert row["steps_heard"] == row["turns"] > 0 and row["tool_rate"] == row["calls"] == 0
    for name in ("reward", "step", "invalid"):
        with pytest.raises(ValueError, match=f"'{name}'.* a measure"):
            run(train(learner, CalculatorEnv, action_format=replace(TEXT, measure=lambda results, name=name: {name: 42.0})))


def test_the_rate_of_sampling_counts_the_policys_own_tokens(caller, tmp_path):
    """And not the observations; and a number of numpy stops no checkpoint."""
    action_format = replace(TEXT, measure=lambda results: {"mean": np.float32(1.5)})
    record = Run("rate", root=tmp_path)
    config = replace(CONFIG, steps=2, save_every=1)
    row, _ = run(train(fresh(caller), CalculatorEnv, action_format=action_format, run=record, config=config))
    masks = record.rollouts(0)["mask"]
    own = sum(map(sum, masks))
    assert 0 < own < sum(map(len, masks)) - 10
    assert row["sampled_tokens_per_s"] * row["sampling_s"] == pytest.approx(own) and row["mean"] == 1.5


@pytest.mark.parametrize("options, holds", [
    ({}, lambda found: len(found) == 12 and any(len(e.turns) > 1 for e in found)),
    ({"limits": Limits(max_turns=1)}, lambda found: all(len(e.turns) <= 1 for e in found)),
    ({"limits": Limits(max_total_tokens=45)},
     lambda found: 30 < max(len(e.rollout.prompt + e.rollout.tokens) for e in found) <= 45),
    ({"config": replace(CONFIG, max_new_tokens=3)}, lambda found: all(len(e.rollout.tokens) == 3 for e in found)),
    ({"config": replace(CONFIG, temperature=1e-4)}, lambda found: len({e.rollout.tokens for e in found}) == 3),
    ({"action_format": replace(TEXT, to_text=lambda seen: seen["text"] + "!")}, lambda found: found[0].question.endswith("?!")),
], ids=["default", "max_turns", "max_total_tokens", "max_new_tokens", "cold", "action_format"])
@pytest.mark.filterwarnings("ignore:no turn of this step")
def test_training_plays_by_its_options(options, holds, learner, monkeypatch):
    found, honest = [], multiturn.as_groups
    monkeypatch.setattr(multiturn, "as_groups", lambda tasks, episodes, *rest: (
        found.extend(episodes), honest(tasks, episodes, *rest))[1])
    run(train(learner, CalculatorEnv, [Problem(a, "+", 1) for a in range(3)], **options))
    assert holds(found)


def test_dynamic_sampling_is_refused_and_not_ignored(caller):
    with pytest.raises(ValueError, match="refills=1"):
        run(train(caller, CalculatorEnv, config=replace(CONFIG, refills=1)))


def test_the_gradient_is_that_of_the_policys_own_tokens(learner, trained):
    """Against float64 by hand; counting the environment's tokens in would change the norm."""
    model = copy.deepcopy(learner.model).double()
    row, = run(train(learner, CalculatorEnv))
    groups, = trained
    a = advantages(reward_tensor([g.rewards for g in groups]))
    kept = [(r, a[i, j]) for i, g in enumerate(groups) if a[i].any() for j, r in enumerate(g)]
    assert any(0 in r.mask for r, _ in kept)

    def norm(mask_of):
        model.zero_grad()
        total = sum(sum(mask_of(r)) for g in groups for r in g)  # those of groups without signal count too
        for r, advantage in kept:
            logps = model(torch.tensor([r.prompt + r.tokens])).logits[0, len(r.prompt) - 1 : -1].log_softmax(-1)
            chosen = logps[range(len(r.tokens)), list(r.tokens)]
            (-advantage.double() * (chosen * torch.tensor(mask_of(r))).sum() / total).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()

    assert row["grad_norm"] == pytest.approx(norm(lambda r: r.mask), rel=1e-4)
    assert row["grad_norm"] != pytest.approx(norm(lambda r: (1,) * len(r.mask)), rel=1e-2)


# --- a curriculum -----------------------------------------------------------------------------------------------------


def tiers(seed=3):
    return Curriculum([[{"a": a, "op": "+", "b": b} for a in range(2) for b in range(3)],
                       [{"a": 40 + a, "op": "+", "b": 50} for a in range(4)]], seed=seed)


def used_tiers():
    """With a result from before the run."""
    curriculum = tiers()
    curriculum.record_result(curriculum.next_task(), 0.5)
    return curriculum


class Forgetful:
    """A curriculum without a state."""

    def __init__(self):
        self.log = []

    def next_tasks(self, n):
        return [{"a": 1, "op": "+", "b": i} for i in range(n)]

    def record_result(self, task, rate):
        self.log.append(rate)


def rate_of(curriculum, task):
    return next(row["rate"] for row in curriculum.table() if row["task"] == task)


def test_a_curriculum_gives_the_tasks_and_gets_the_rates(learner, trained):
    curriculum = tiers()
    wanted = curriculum.next_tasks(3)
    row, = run(train(learner, CalculatorEnv, curriculum))
    results = json.loads(row["curriculum"])["results"]
    asked = [learner.decode(g[0].prompt) for g in trained[0]]
    assert [task for task, _ in results] == wanted and row["tier"] == 0
    assert all(f"What is {t['a']} + {t['b']}?" in text for t, text in zip(wanted, asked))
    rates = [sum(r >= 1.0 for r in g.rewards) / 4 for g in trained[0]]
    assert [rate for _, rate in results] == rates == [rate_of(curriculum, task) for task in wanted] and 0 < sum(rates)


@pytest.mark.parametrize("success, counts", [(1.0, False), (0.25, True)])
def test_what_counts_as_a_success_is_the_users(learner, success, counts):
    curriculum = tiers()
    wanted = curriculum.next_tasks(3)
    run(train(learner, Paying, curriculum, limits=Limits(max_turns=1), success=success))
    assert any(rate_of(curriculum, task) for task in wanted) == counts


async def until(policy, curriculum, stop, folder, steps=4):
    """The rows' `curriculum`s of a run that is left after `stop` steps, or ends there."""
    config = replace(CONFIG, steps=steps, save_every=2)
    async with serve(CalculatorEnv, max_sessions=6) as server, GrpoPool(server.url, size=6) as pool:
        rows, left = [], multi_turn_grpo(policy, None, curriculum, config, pool, run=Run(root=folder))
        async for row in left:
            rows.append((row["step"], row["curriculum"]))
            if row["step"] + 1 == stop:
                break
        await left.aclose()
        return rows


@pytest.mark.full
def test_a_resumed_run_goes_on_with_the_curriculum_where_it_was(caller, tmp_path):
    """The rows hold its results, so neither a fresh one nor one that has gone on loses the way."""
    whole = used_tiers()
    expected = run(until(fresh(caller), whole, 4, tmp_path / "whole"))
    assert [step for step, _ in expected] == [0, 1, 2, 3] and len({said for _, said in expected}) == 4
    for name, again in (("fresh", lambda used: tiers(seed=99)), ("used", lambda used: used)):
        used = used_tiers()
        assert run(until(fresh(caller), used, 3, tmp_path / name)) == expected[:3]
        after = again(used)
        rows = run(until(fresh(caller), after, 4, tmp_path / name))
        assert rows and rows == expected[-len(rows):] and len(rows) < 4  # not from the start
        assert after.state() == whole.state() and after.next_tasks(3) == whole.next_tasks(3)


@pytest.mark.full
def test_a_cell_run_again_begins_with_the_curriculum_as_it_was(learner, tmp_path, capsys):
    """On the same policy and curriculum, which both have gone on: the same tasks, the same rows; whole or interrupted."""
    curriculum = used_tiers()
    first = run(until(learner, curriculum, 2, tmp_path / "one", steps=2))
    then = run(until(learner, curriculum, 2, tmp_path / "two", steps=2))
    assert first != then and "the curriculum goes back" not in capsys.readouterr().out
    assert run(until(learner, curriculum, 2, tmp_path / "two", steps=2)) == then
    assert run(until(learner, curriculum, 2, tmp_path / "one", steps=2)) == first
    assert capsys.readouterr().out.count("the curriculum goes back to where") == 2
    assert run(until(learner, curriculum, 2, tmp_path / "two", steps=2)) == then  # from what the first made of it
    run(until(learner, curriculum, 1, tmp_path / "one", steps=2))
    assert run(until(learner, curriculum, 2, tmp_path / "one", steps=2)) == first[1:]
    assert run(until(learner, curriculum, 2, tmp_path / "one", steps=2)) == first  # also after it was resumed


def test_a_curriculum_without_a_state_trains_and_can_neither_be_resumed_nor_run_again(learner, tmp_path):
    source = Forgetful()
    run(until(learner, source, 3, tmp_path))
    assert len(source.log) == 9
    with pytest.raises(ValueError, match="cannot be brought back"):
        run(until(learner, Forgetful(), 4, tmp_path))
    run(until(learner, source, 1, tmp_path / "other", steps=1))
    with pytest.raises(ValueError, match="cannot be taken back: make it anew"):
        run(until(learner, source, 1, tmp_path / "other", steps=1))
    run(until(learner, Forgetful(), 1, tmp_path / "other", steps=1))
