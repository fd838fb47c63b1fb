"""What multi-turn training promises where environments, questions and limits are not the usual: groups of one question,
limits and deadlines, long observations, malformed actions, curricula, and every option that it takes."""

import asyncio
import copy
import importlib
import json
import random
import threading
import warnings
from dataclasses import dataclass, replace

import pytest
import torch

from grpolab.arithmetic import Problem
from grpolab.chat import encode_chat, user
from grpolab.decode.sampler import Conversation, Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.env.action_format import TEXT
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.client import Deadlines
from grpolab.env.curriculum import Curriculum
from grpolab.env.faults import Faulty
from grpolab.env.pool import GroupFailed, GrpoPool
from grpolab.env.protocol import DeadlineExceeded, InvalidAction, ServerError, StepResult
from grpolab.env.server import serve
from grpolab.models.load import Policy
from grpolab.runs.run import Run
from grpolab.train import episodes as episodes_module
from grpolab.train import multiturn
from grpolab.train.advantages import advantages, reward_tensor
from grpolab.train.episodes import Limits, as_groups, demonstrate, play_all
from grpolab.train.grpo import GRPOConfig
from grpolab.train.multiturn import multi_turn_grpo
from grpolab.train.sft import SFTConfig, sft

PROBLEMS = [Problem(a, "+", b) for a in range(4) for b in range(4)]
CONFIG = GRPOConfig(steps=1, prompts_per_step=3, group_size=4, lr=1e-4, max_new_tokens=24)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.fixture(scope="module")
def _caller(_tiny):
    tiny = Policy(copy.deepcopy(_tiny.model), _tiny.tokenizer, _tiny.name, _tiny.eos_ids)
    rng = random.Random(0)
    chosen = [rng.choice(PROBLEMS) for _ in range(96)]
    examples = [demonstrate(tiny.tokenizer, CalculatorEnv(), p, [f"calc: {p.a} + {p.b}"] * (i % 3 != 0) + [p.target])
                for i, p in enumerate(chosen)]

    async def teach():
        async for _ in sft(tiny, examples, SFTConfig(steps=40, lr=2e-3, batch_size=32)):
            pass

    asyncio.run(teach())
    return tiny


@pytest.fixture
def caller(_caller):
    """A policy that mostly calls the calculator, a copy of its own for each test."""
    return Policy(copy.deepcopy(_caller.model), _caller.tokenizer, _caller.name, _caller.eos_ids)


@pytest.fixture
def trained(monkeypatch):
    """The groups that training got, a list for each step."""
    module = importlib.import_module("grpolab.train.grpo")
    seen, honest = [], module.grpo_update
    monkeypatch.setattr(module, "grpo_update", lambda policy, reference, groups, *rest: (
        seen.append(groups), honest(policy, reference, groups, *rest))[1])
    return seen


async def train(policy, env, problems=PROBLEMS, config=CONFIG, size=6, pool_options=None, reference=None, **options):
    """The rows of a run with `size` seats on a server of `env`."""
    async with serve(env, max_sessions=size) as server, GrpoPool(server.url, size=size, **(pool_options or {})) as pool:
        return [row async for row in multi_turn_grpo(policy, reference, problems, config, pool, **options)]


async def played(policy, env, tasks, limits=None, size=2, temperature=1.0, action_format=TEXT, max_new_tokens=24,
                 **pool_options):
    async with serve(env, max_sessions=size) as server, GrpoPool(server.url, size=size, **pool_options) as pool:
        async with Sampler(policy) as sampler:
            return await play_all(pool, sampler, tasks, seeds=range(len(tasks)), limits=limits or Limits(),
                                  action_format=action_format,
                                  params=SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens))


class StepGroups(CalculatorEnv):
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


# --- one question a group ---------------------------------------------------------------------------------------------


def test_the_rollouts_of_a_group_get_one_question_of_an_environment_that_draws_it_from_the_seed(caller, trained):
    run(train(caller, StepGroups, config=replace(CONFIG, steps=2)))
    questions = [{r.prompt for r in group} for step in trained for group in step]
    assert [len(q) for q in questions] == [1] * 6 and len(set.union(*questions)) == 6  # the groups', and the steps', differ
    drawn = [[r.tokens for r in group] for step in trained for group in step]
    assert sum(len(set(tokens)) > 1 for tokens in drawn) >= 2  # the draws of a group's rollouts are their own
    assert len({r.seed for step in trained for group in step for r in group}) == 24


def test_a_group_of_different_questions_is_refused_and_not_trained_on(caller, trained):
    before = caller.version
    with pytest.raises(ValueError, match="different questions, 'What is .*task and the seed"):
        run(train(caller, Unruly))
    assert caller.version == before and not trained


def test_the_run_makes_the_questions_and_the_draws(caller, trained):
    def again(env, problems, seed):
        policy = Policy(copy.deepcopy(caller.model), caller.tokenizer, caller.name, caller.eos_ids)
        run(train(policy, env, problems, config=replace(CONFIG, prompts_per_step=2, seed=seed)))
        rollouts = [r for group in trained.pop() for r in group]
        return [r.prompt for r in rollouts], [r.tokens for r in rollouts]

    first = again(StepGroups, PROBLEMS, 0)
    assert first == again(StepGroups, PROBLEMS, 0) and set(first[0]).isdisjoint(again(StepGroups, PROBLEMS, 1)[0])
    same, other = (again(CalculatorEnv, PROBLEMS[:1], seed) for seed in (0, 1))
    assert same[0] == other[0] and same[1] != other[1]  # one question, other draws


# --- limits, and what an episode earns --------------------------------------------------------------------------------


def test_episodes_that_outgrow_the_context_are_refused_before_the_first(caller):
    asked = []

    class Counting(CalculatorEnv):
        def reset(self, **options):
            asked.append(1)
            return super().reset(**options)

    for work in (train(caller, Counting, limits=Limits(max_total_tokens=513)),
                 played(caller, Counting, PROBLEMS[:1], Limits(max_total_tokens=513))):
        with pytest.raises(ValueError, match=r"limits.max_total_tokens.* needs 513 tokens; the context of 'tiny' is 512"):
            run(work)
    assert not asked


def test_a_turn_that_fills_the_context_is_cut_and_not_said(tiny):
    """As many tokens as there are: the base model babbles to the end of the context, and the episode ends there."""
    tiny.eos_ids = (0,)  # never drawn in earnest
    episode, = run(played(tiny, CalculatorEnv, PROBLEMS[:1], Limits(max_total_tokens=512), max_new_tokens=10**6))
    assert episode.rollout.finish_reason == "length" and episode.turns == () and episode.rollout.reward == 0.0
    assert len(episode.rollout.prompt) + len(episode.rollout.tokens) == 512


@pytest.mark.parametrize("reason", ["length", "context", "cancelled"])
def test_a_turn_that_the_policy_did_not_end_is_heard_by_nobody(caller, reason, monkeypatch):
    honest = Conversation.sample

    async def cut(self, ids, params=None):
        return replace(await honest(self, ids, params), finish_reason=reason)

    monkeypatch.setattr(Conversation, "sample", cut)
    episode, = run(played(caller, CalculatorEnv, PROBLEMS[:1]))
    assert episode.rollout.finish_reason == "length" and episode.turns == ()


def test_what_was_paid_is_kept_by_an_episode_that_was_cut(caller):
    episode, = run(played(caller, Paying, PROBLEMS[:1], Limits(max_turns=2), temperature=1e-3))
    assert (episode.rollout.finish_reason, episode.rollout.reward, len(episode.turns)) == ("turns", 0.5, 2)
    found = run(played(caller, Paying, PROBLEMS[:4], Limits(max_turns=50, max_total_tokens=90)))
    assert {e.rollout.finish_reason for e in found} == {"length"}
    assert all(e.rollout.reward == 0.25 * len(e.turns) > 0 for e in found)


def test_what_the_reset_paid_counts_and_an_episode_that_is_over_at_its_reset_is_refused(caller):
    class Welcoming(Paying):
        def reset(self, seed=None, task=None):
            return replace(super().reset(seed=seed, task=task), reward=1.0)

    class Over(CalculatorEnv):
        def reset(self, seed=None, task=None):
            return replace(super().reset(seed=seed, task=task), reward=1.0, done=True)

    episode, = run(played(caller, Welcoming, PROBLEMS[:1], Limits(max_turns=2), temperature=1e-3))
    assert episode.rollout.reward == 1.5
    with pytest.raises(ValueError, match="ended its episode as it was reset"):
        run(played(caller, Over, PROBLEMS[:1]))


def test_half_a_surrogate_pair_is_no_text(caller):
    episode, = run(played(caller, saying("a \udcff b"), PROBLEMS[:1], Limits(max_turns=2), temperature=1e-3))
    assert episode.turns[0][1] == "a ? b"


@pytest.mark.full
def test_the_environments_deadline_is_each_episodes_own(caller):
    """Four episodes of a second each on one seat, and two and a half seconds for one of them."""
    deadlines = Deadlines(episode=2.5, group=2.5)
    answered = run(played(caller, lambda: Faulty(CalculatorEnv(), latency=0.5), PROBLEMS[:4], Limits(max_turns=1), size=1,
                          deadlines=deadlines))
    assert len(answered) == 4 and None not in answered
    with pytest.raises(DeadlineExceeded, match="episode of episode 0"):
        run(played(caller, lambda: Faulty(CalculatorEnv(), latency=3), PROBLEMS[:1], Limits(max_turns=1), size=1,
                   deadlines=Deadlines(episode=0.5)))


def test_a_seat_goes_on_after_an_episode_was_lost(caller):
    born = []

    def first_hangs():
        born.append(1)
        return Faulty(CalculatorEnv(), faults={1: "hang"} if len(born) == 1 else {})

    async def main():
        async with serve(first_hangs, max_sessions=2, close_timeout=0.1) as server, Sampler(caller) as sampler:
            options = {"on_failure": "drop", "min_group": 1, "deadlines": Deadlines(step=1)}
            async with GrpoPool(server.url, size=1, **options) as pool:
                params = SamplingParams(max_new_tokens=24)
                found = await play_all(pool, sampler, PROBLEMS[:4], seeds=range(4), params=params, limits=Limits(max_turns=1))
                return found, pool.failures

    found, failures = run(main())
    assert [e is None for e in found] == [True, False, False, False]
    assert [(f.rollout, type(f.cause)) for f in failures] == [(0, DeadlineExceeded)]


def test_too_few_episodes_are_an_error_and_not_a_small_step(caller):
    with pytest.raises(GroupFailed, match="0 of 3 episodes finished"):
        run(played(caller, lambda: Faulty(CalculatorEnv(), faults={1: "raise"}), PROBLEMS[:3], on_failure="drop", min_group=1))


def test_a_group_with_too_few_left_abstains(caller):
    found = run(played(caller, CalculatorEnv, [PROBLEMS[0]] * 8))
    found = [None, None, None, *found[3:]]
    counted = [[r.reward is not None for r in g] for g in as_groups(found, 4, min_group=2)]
    assert counted == [[False] * 4, [True] * 4]
    assert [r.reward is not None for r in as_groups(found, 4, min_group=1)[0]] == [False, False, False, True]


def test_a_policy_that_never_ends_a_turn_is_named_once(caller):
    with pytest.warns(UserWarning, match="never writes its end token within max_new_tokens=2") as said:
        rows = run(train(caller, CalculatorEnv, config=replace(CONFIG, steps=3, max_new_tokens=2)))
    assert len(said) == 1
    assert [(row["unheard"], row["truncated"], row["trained_tokens"]) for row in rows] == [(1.0, 1.0, 0)] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        row, = run(train(caller, CalculatorEnv))
    assert row["unheard"] < 0.5


# --- observations -----------------------------------------------------------------------------------------------------


def test_an_episode_reads_as_the_chat_template_writes_it_to_the_last_token(caller):
    found = run(played(caller, CalculatorEnv, PROBLEMS[:12], temperature=0.5))
    tokenizer, longer = caller.tokenizer, 0
    for e in found:
        if e.rollout.finish_reason != "done":
            continue
        said = user(e.question)
        for wrote, told in e.turns:
            said += [{"role": "assistant", "content": wrote}, *user(told)]
        whole = encode_chat(tokenizer, said[:-1])
        assert tokenizer.decode([*e.rollout.prompt, *e.rollout.tokens]) == tokenizer.decode(whole.ids)
        assert e.heard == tuple(told for _, told in e.turns[:-1])
        longer += len(e.turns) > 1
    assert longer


def test_an_observation_of_two_megabytes_is_not_tokenised(caller, monkeypatch):
    honest, sizes = episodes_module.observation_ids, []
    monkeypatch.setattr(episodes_module, "observation_ids", lambda tokenizer, texts, role: (
        sizes.append((len(texts[0]), threading.current_thread().name)), honest(tokenizer, texts, role))[1])
    episode, = run(played(caller, saying("x" * 2_000_000), PROBLEMS[:1]))
    assert (episode.rollout.finish_reason, episode.rollout.reward, episode.heard) == ("length", 0.5, ())
    assert sizes == [] and episode.turns[0][1].endswith("(2000000 characters, which did not fit)")
    assert len(episode.turns[0][1]) < 2100 and episode.rollout.mask.count(0) == 0
    # One that could fit, by its characters, is tokenised, and where that takes long in a thread of its own.
    episode, = run(played(caller, saying("x" * 2100), PROBLEMS[:1], Limits(max_total_tokens=512)))
    (size, thread), = sizes
    assert size == 2100 and thread.startswith("grpolab-tokenise") and episode.rollout.finish_reason == "length"
    sizes.clear()
    episode, = run(played(caller, saying("x" * 100), PROBLEMS[:1], Limits(max_turns=2, max_total_tokens=512)))
    assert sizes == [(100, "MainThread")] and episode.heard == ("x" * 100,)


def test_a_question_of_two_megabytes_is_refused_by_name(caller):
    class Endless(CalculatorEnv):
        def reset(self, seed=None, task=None):
            return StepResult({"text": "x" * 2_000_000})

    with pytest.raises(ValueError, match="takes more than 191 tokens.*max_total_tokens=192"):
        run(played(caller, Endless, PROBLEMS[:1]))


# --- malformed actions ------------------------------------------------------------------------------------------------


class Numbers:
    """Wants {"number": n}; told a sum, pays 1.0 for it, and refuses numbers beyond 5."""

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
    found = run(played(policy, Numbers, LARGE * 5, Limits(max_turns=2), action_format=speaking(**rule)))
    return found, [e for e in found if e.invalid], [e for e in found if not e.invalid and e.turns]


def test_a_malformed_action_is_told_to_the_policy(caller):
    found, wrong, right = outcomes(caller)
    assert len(wrong) > 3 and len(right) > 3
    reasons = {told for e in wrong for _, told in e.turns if told.startswith("error")}
    assert "error: odd" in reasons  # our own reading of the text
    for e in wrong:
        assert e.turns[0][1].startswith("error") == (e.turns[0][1] in reasons) and e.rollout.reward is not None
        assert len(e.turns) == 2 or e.rollout.finish_reason in ("length", "done")
        assert not e.heard or e.heard[0] == e.turns[0][1]
    assert all(e.rollout.reward in (0.0, 1.0) for e in right)


def test_a_malformed_action_that_the_environment_refuses_is_told_too(caller):
    action_format = replace(speaking(), to_action=lambda text: {"number": 9})
    episode, = run(played(caller, Numbers, LARGE[:1], Limits(max_turns=2), action_format=action_format))
    assert episode.invalid == 2 and episode.turns[0][1] == "error: data: {'number': 9}: a number up to 5"


def test_a_malformed_action_costs_what_the_user_named(caller):
    _, wrong, right = outcomes(caller, on_invalid="penalise", penalty=-0.25)
    assert wrong and right and all(e.rollout.reward in (0.0, 1.0) for e in right)
    ended = [e for e in wrong if e.rollout.finish_reason == "turns"]
    assert ended and all(e.rollout.reward == -0.25 * e.invalid for e in ended)


def test_an_episode_with_a_malformed_action_abstains(caller, trained):
    _, wrong, right = outcomes(caller, on_invalid="abstain")
    assert wrong and right and all(e.rollout.reward is None and e.rollout.finish_reason == "invalid" for e in wrong)
    assert all(len(e.turns) == 1 for e in wrong)
    row, = run(train(caller, Numbers, LARGE, limits=Limits(max_turns=2), action_format=speaking(on_invalid="abstain")))
    assert 0 < row["abstained"] < 1 and row["invalid"] == row["abstained"] and row["lost"] == 0
    absent = [r for group in trained[0] for r in group if r.reward is None]
    without = 3 - len(trained[0])  # groups of which every rollout abstained are left out
    assert len(absent) + 4 * without == round(12 * row["abstained"]) and all(r.tokens == () for r in absent)


@pytest.mark.parametrize("on_failure", ["fail", "drop"])
def test_training_goes_on_over_malformed_actions(caller, on_failure):
    """Under `drop` without losing a seat for it."""
    rows = run(train(caller, Numbers, LARGE, config=replace(CONFIG, steps=2), limits=Limits(max_turns=2),
                     action_format=speaking(), pool_options={"on_failure": on_failure}))
    assert [row["lost"] for row in rows] == [0, 0] and all(row["invalid"] > 0 for row in rows)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_where_every_episode_abstains_the_row_and_a_warning_say_so(caller, kl_coef):
    reference = Policy(copy.deepcopy(caller.model), caller.tokenizer, caller.name, caller.eos_ids)
    action_format = replace(speaking(on_invalid="abstain"), to_action=lambda text: {"number": 9})
    before = [p.clone() for p in caller.model.parameters()]
    with pytest.warns(UserWarning, match="every episode of this step abstained"):
        row, = run(train(caller, Numbers, LARGE, config=replace(CONFIG, kl_coef=kl_coef, max_new_tokens=40),
                         action_format=action_format, reference=reference))
    assert row["abstained"] == 1 and row["trained_tokens"] == 0
    assert all(torch.equal(p, q) for p, q in zip(before, caller.model.parameters()))


def test_an_error_of_the_environment_is_not_taken_for_the_policys(caller):
    with pytest.raises(ServerError, match="injected fault"):
        run(played(caller, lambda: Faulty(CalculatorEnv(), faults={1: "raise"}), PROBLEMS[:1]))


# --- tasks and hooks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    a: int
    b: int


@pytest.mark.parametrize("task, sent", [
    (Sum(1, 2), {"a": 1, "b": 2}), ({"a": [1]}, {"a": [1]}), ("two", "two"), ([3, 4], [3, 4]), (5, 5),
], ids=["dataclass", "dict", "string", "list", "number"])
def test_a_task_is_any_json_value(caller, task, sent):
    got = []

    class Asked(CalculatorEnv):
        def reset(self, seed=None, task=None):
            got.append(task)
            return super().reset(seed=0)

    run(train(caller, Asked, [task], config=replace(CONFIG, prompts_per_step=1, group_size=2)))
    assert got == [sent, sent]


def test_a_demonstration_speaks_the_dialect(caller):
    shown = demonstrate(caller.tokenizer, Numbers(), [2, 3], ["2 + 3 = \\boxed{5}."], action_format=speaking(),
                        introduction="Add.")
    assert caller.tokenizer.decode(shown.ids).startswith("User: Add.\nWhat is 2 + 3?\nAssistant: 2 + 3 = ")
    with pytest.raises(InvalidAction):
        demonstrate(caller.tokenizer, Numbers(), [2, 3], ["five"], action_format=speaking())


def test_what_introduces_stands_before_the_question(caller):
    async def introduce(seat):
        return f"Slot {seat.session.open}."

    episode, = run(played(caller, CalculatorEnv, PROBLEMS[:1], action_format=replace(TEXT, introduce=introduce)))
    assert episode.question == "Slot True.\nWhat is 0 + 0?"


def test_the_dialects_measures_stand_in_the_row(caller):
    action_format = replace(TEXT, measure=lambda results: {"steps_heard": len(results), "calls": 0})
    row, = run(train(caller, CalculatorEnv, action_format=action_format))
    assert row["steps_heard"] == row["turns"] > 0 and row["tool_rate"] == row["calls"] == 0
    row, = run(train(caller, CalculatorEnv))
    assert 0 < row["tool_rate"] <= row["calls"] and row["env_s"] > 0


# --- every option counts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, holds", [
    ({}, lambda found: len(found) == 12 and any(len(e.turns) > 1 for e in found)),
    ({"limits": Limits(max_turns=1)}, lambda found: all(len(e.turns) <= 1 for e in found)),
    ({"limits": Limits(max_total_tokens=45)},
     lambda found: 30 < max(len(e.rollout.prompt + e.rollout.tokens) for e in found) <= 45),
    ({"config": replace(CONFIG, max_new_tokens=3)},
     lambda found: all(len(e.rollout.tokens) == 3 for e in found)),
    ({"config": replace(CONFIG, group_size=2)}, lambda found: len(found) == 6),
    ({"config": replace(CONFIG, prompts_per_step=1)}, lambda found: len(found) == 4),
    ({"config": replace(CONFIG, temperature=1e-4)}, lambda found: len({e.rollout.tokens for e in found}) == 3),
    ({"config": CONFIG}, lambda found: len({e.rollout.tokens for e in found}) > 3),
    ({"action_format": replace(TEXT, to_text=lambda seen: seen["text"] + "!")}, lambda found: found[0].question.endswith("?!")),
], ids=["default", "max_turns", "max_total_tokens", "max_new_tokens", "group_size", "prompts_per_step", "cold", "warm",
        "action_format"])
@pytest.mark.filterwarnings("ignore:no turn of this step")
def test_training_plays_by_its_options(options, holds, caller, monkeypatch):
    found, honest = [], multiturn.as_groups
    monkeypatch.setattr(multiturn, "as_groups", lambda episodes, *rest: (found.extend(episodes), honest(episodes, *rest))[1])
    run(train(caller, CalculatorEnv, [Problem(a, "+", 1) for a in range(3)], **options))
    assert holds(found)


def test_dynamic_sampling_is_refused_and_not_ignored(caller):
    with pytest.raises(ValueError, match="refills=1"):
        run(train(caller, CalculatorEnv, config=replace(CONFIG, refills=1)))


def test_the_gradient_is_that_of_the_policys_own_tokens(caller, trained):
    """Against float64 by hand; counting the environment's tokens in would change the norm."""
    model = copy.deepcopy(caller.model).double()
    row, = run(train(caller, CalculatorEnv))
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


def test_a_curriculum_gives_the_tasks_and_hears_the_rates(caller, trained):
    curriculum = tiers()
    wanted = curriculum.next_tasks(3)
    row, = run(train(caller, CalculatorEnv, curriculum))
    told = json.loads(row["curriculum"])["results"]
    asked = [caller.decode(g[0].prompt) for g in trained[0]]
    assert [task for task, _ in told] == wanted and row["tier"] == 0
    assert all(f"What is {t['a']} + {t['b']}?" in text for t, text in zip(wanted, asked))
    rates = [sum(r >= 1.0 for r in g.rewards) / 4 for g in trained[0]]
    assert [rate for _, rate in told] == rates == [curriculum.rate(task) for task in wanted] and 0 < sum(rates)


@pytest.mark.parametrize("success, counts", [(1.0, False), (0.25, True)])
def test_what_counts_as_a_success_is_the_users(caller, success, counts):
    curriculum = tiers()
    wanted = curriculum.next_tasks(3)
    run(train(caller, Paying, curriculum, limits=Limits(max_turns=1), success=success))
    assert any(curriculum.rate(task) > 0 for task in wanted) == counts


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


def test_a_resumed_run_goes_on_with_the_curriculum_where_it_was(caller, tmp_path):
    """The rows say what the curriculum was told, so neither a fresh one nor one that was told more loses the way."""

    def policy():
        return Policy(copy.deepcopy(caller.model), caller.tokenizer, caller.name, caller.eos_ids)

    def known():
        curriculum = tiers()
        curriculum.record_result(curriculum.next_task(), 0.5)  # before the run
        return curriculum

    whole = known()
    expected = run(until(policy(), whole, 4, tmp_path / "whole"))
    assert [step for step, _ in expected] == [0, 1, 2, 3] and len({said for _, said in expected}) == 4
    for name, again in (("fresh", lambda used: tiers(seed=99)), ("used", lambda used: used)):
        used = known()
        assert run(until(policy(), used, 3, tmp_path / name)) == expected[:3]
        after = again(used)
        rows = run(until(policy(), after, 4, tmp_path / name))
        assert rows and rows == expected[-len(rows):] and len(rows) < 4  # not from the start
        assert after.state() == whole.state() and after.next_tasks(3) == whole.next_tasks(3)


def test_a_curriculum_that_cannot_be_brought_back_is_refused(caller, tmp_path):
    class Forgetful:
        def __init__(self):
            self.log = []

        def next_tasks(self, n):
            return [{"a": 1, "op": "+", "b": i} for i in range(n)]

        def record_result(self, task, rate):
            self.log.append(rate)

    source = Forgetful()
    run(until(caller, source, 3, tmp_path))
    assert len(source.log) == 9  # it trains
    with pytest.raises(ValueError, match="cannot be brought back"):
        run(until(caller, Forgetful(), 4, tmp_path))


def test_a_cell_run_again_begins_with_the_curriculum_as_it_was(caller, tmp_path, capsys):
    """On the same policy and curriculum, which both have gone on: the same tasks, the same rows; whole or interrupted."""
    curriculum = tiers()
    curriculum.record_result(curriculum.next_task(), 0.5)  # before the run: kept
    first = run(until(caller, curriculum, 2, tmp_path / "one", steps=2))
    then = run(until(caller, curriculum, 2, tmp_path / "two", steps=2))
    assert first != then and "the curriculum goes back" not in capsys.readouterr().out
    assert run(until(caller, curriculum, 2, tmp_path / "two", steps=2)) == then
    assert run(until(caller, curriculum, 2, tmp_path / "one", steps=2)) == first
    assert capsys.readouterr().out.count("the curriculum goes back to where") == 2
    assert run(until(caller, curriculum, 2, tmp_path / "two", steps=2)) == then  # from what the first made of it
    run(until(caller, curriculum, 1, tmp_path / "one", steps=2))
    assert run(until(caller, curriculum, 2, tmp_path / "one", steps=2)) == first[1:]
    assert run(until(caller, curriculum, 2, tmp_path / "one", steps=2)) == first  # also after it was resumed


def test_a_curriculum_that_cannot_be_taken_back_is_refused_when_its_cell_runs_again(caller, tmp_path):
    class Forgetful:
        def next_tasks(self, n):
            return [{"a": 1, "op": "+", "b": i} for i in range(n)]

        def record_result(self, task, rate):
            pass

    source = Forgetful()
    run(until(caller, source, 1, tmp_path, steps=1))
    with pytest.raises(ValueError, match="cannot be taken back: make it anew"):
        run(until(caller, source, 1, tmp_path, steps=1))
    run(until(caller, Forgetful(), 1, tmp_path, steps=1))
