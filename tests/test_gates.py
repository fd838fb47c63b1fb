"""The gates of notebooks 00 to 07 and of 10 under sabotage."""

import dataclasses
from importlib import import_module

import pytest
from gate_helpers import Fault, each, failures_under, start_of
from loop_helpers import rows_of

from grpolab import load_policy, losses, train
from grpolab.arithmetic import Task, generate
from grpolab.decode import sampling
from grpolab.env.guess import GuessEnv
from grpolab.lab import counterfactual, replay
from grpolab.rollouts import Group, given
from grpolab.train import preferences
from grpolab.train.grpo import GRPOConfig
from grpolab.train.loop import make_optimiser
from grpolab.train.sft import SFTConfig, demonstrations, sft


@pytest.fixture(scope="module")
def taught(taught_once, tmp_path_factory):
    """A folder with a policy that knows the format and gets some answers right."""
    def teach(policy):
        examples = demonstrations(policy, generate(400, 0, seed=1, task=Task("+-", max_operand=99))[0])
        rows_of(sft(policy, examples, SFTConfig(steps=60, lr=1e-3, batch_size=32, schedule="cosine")))

    return taught_once("taught", teach).save(tmp_path_factory.mktemp("taught") / "policy")


def taught_start(request, tmp_path, monkeypatch):
    start_of(request.getfixturevalue("taught"), tmp_path)
    return {}


def report_logps_of_another_temperature(monkeypatch):
    honest = sampling.draw_mixed

    def wrong(*args, **kw):
        drawn = honest(*args, **kw)
        return dataclasses.replace(drawn, logps=drawn.logps * 1.3)

    monkeypatch.setattr("grpolab.decode.scheduler.draw_mixed", wrong)


# --- 00 quickstart ----------------------------------------------------------------------------------------------------


def forget_the_mean(monkeypatch):
    monkeypatch.setattr("grpolab.train.advantages.advantages", lambda rewards, kind="centred": rewards.double())


# --- 01 sft -----------------------------------------------------------------------------------------------------------


def drop_the_mask(monkeypatch):
    honest = losses.sft_loss
    monkeypatch.setattr(losses, "sft_loss", lambda logps, mask, **kw: honest(logps, (logps != 0).float(), **kw))


# --- 02 decode engine -------------------------------------------------------------------------------------------------


# The cells of races, of bf16 and of the faults, which take most of the notebook's time.
RACED = ("def seconds_of", "fig, ax = plt.subplots()\nfor column", "rng = np.random", "def spent", "jobs = [",
         "fig, axes = plt.subplots(3, 1", "stalls, order", "half = load_policy", "on_cpu =",
         "from contextlib import nullcontext", "weights = sum", "sweep = []", "rates = [",
         "fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4))\n")


def let_the_slot_decide_the_draw(monkeypatch):
    honest = sampling.uniforms
    monkeypatch.setattr("grpolab.decode.batch.uniforms", lambda seeds, at: honest(seeds * 0 + range(len(seeds)), at))


def report_other_logps_and_let_the_slot_decide(monkeypatch):
    report_logps_of_another_temperature(monkeypatch)
    let_the_slot_decide_the_draw(monkeypatch)


# --- 03 dpo -----------------------------------------------------------------------------------------------------------


# The cells between the pairs and the appendix, which train and ask, and one that counts bytes: slow among many objects.
DPO_TRAINED = ("plain = await", "reference = cache_logps", "columns = [", "metrics, points", "last = points", "kinds = {",
               "far = ", "fig, axes = plt.subplots(1, 2", "def chosen_alone", "over_sft = {", "rates = {",
               "suite_table", "side_by_side", "parts = {", "def live_tensors")


def fewer_pairs(monkeypatch, **options):
    honest = preferences.sample_pairs

    async def fewer(policy, problems, **kw):
        return await honest(policy, problems[:80], **(kw | options))

    monkeypatch.setattr(preferences, "sample_pairs", fewer)


def taught_and_few_pairs(request, tmp_path, monkeypatch):
    fewer_pairs(monkeypatch, samples=8)
    return taught_start(request, tmp_path, monkeypatch)


def swap_chosen_and_rejected(monkeypatch):
    honest = losses.dpo_loss
    monkeypatch.setattr(losses, "dpo_loss", lambda c, r, rc, rr, **kw: honest(r, c, rr, rc, **kw))


# --- 05 reward model --------------------------------------------------------------------------------------------------


def taught_at_once(request, tmp_path, monkeypatch):
    """In place of the notebook's SFT: the taught policy."""
    taught = request.getfixturevalue("taught")

    async def learn(policy, examples, config, run=None):
        policy.model.load_state_dict(load_policy(str(taught), device="cpu").model.state_dict())
        yield {"step": config.steps - 1}

    monkeypatch.setattr(train, "sft", learn)
    fewer_pairs(monkeypatch)
    return {}


def read_the_reward_before_the_end(monkeypatch):
    reward = import_module("grpolab.train.reward_model")
    honest = reward.lay_out
    monkeypatch.setattr(reward, "lay_out", lambda asked: honest([given(r.prompt, r.tokens[:-1], r.mask[1:]) for r in asked]))


# --- 06 environment pool ----------------------------------------------------------------------------------------------


def let_sessions_hear_each_other(monkeypatch):
    """The sessions of the first group are told about the guess that came before theirs, whoever made it."""
    honest_init, honest_compare, first, said = GuessEnv.__init__, GuessEnv._compare, [], []

    def enter(self, *args, **kw):
        honest_init(self, *args, **kw)
        first.extend([self] * (len(first) < 4))

    def overhear(self, guess):
        said.append(guess)
        return honest_compare(self, said[-2] if any(env is self for env in first) and len(said) > 1 else guess)

    monkeypatch.setattr(GuessEnv, "__init__", enter)
    monkeypatch.setattr(GuessEnv, "_compare", overhear)


# --- 07 multi-turn grpo -----------------------------------------------------------------------------------------------


# The cells between the episodes and the appendix, which train and ask, and one that is on the clock.
MULTI_TURN_TRAINED = ("async def examine", "watched = ", "columns = [", "metrics = run", "ax = plots.curve", "fig, axes",
                      "early, late", "looks, shown", "told = {", "def all_its_own", "def difference", "def surprise",
                      "right = [", "sizes = (", "async def timed")


# --- 10 replay --------------------------------------------------------------------------------------------------------


KNOWN, HELD_OUT = generate(300, 40, seed=1, task=Task(ops="+-", max_operand=99))
SMALL = {
    "whole": 4, "fault": 300, "planted": 1, "known": KNOWN, "held_out": HELD_OUT, "practice": KNOWN[100:],
    "sft_config": None, "config": GRPOConfig(steps=4, prompts_per_step=6, group_size=4, inner_epochs=2, lr=2e-4,
                                             schedule="constant", warmup=0, max_new_tokens=24),
}
BITS = {"rollouts replayed in every bit", "the step that was carried away agrees in every bit"}
TWICE = {"fork without a change: rollouts that differ", "fork without a change: the same weights"}
MISLED = TWICE | {"step that the bisection finds − planted step", "rollouts after it that differ"}  # forked at another step


def taught_and_small(request, tmp_path, monkeypatch):
    return taught_start(request, tmp_path, monkeypatch) | {"whole, fault": SMALL}


def replay_with_other_draws(monkeypatch):
    """The weights and the prompts are right, and each rollout is drawn with its neighbour's seed."""
    honest = replay.regenerate

    def other(state, groups, places, *rest):
        moved = [dataclasses.replace(g, group=Group(tuple(dataclasses.replace(r, seed=r.seed + 1) for r in g.group)))
                 for g in groups]
        return honest(state, moved, places, *rest)

    monkeypatch.setattr(replay, "regenerate", other)


def forget_the_optimiser(monkeypatch):
    """A fork goes on from the run's weights with moments of its own."""
    honest = counterfactual._prepare

    def other(run, twin, state, config, edit, reference):
        anew = make_optimiser(state.policy, config) if twin.folder.name == "fork-unchanged" else state.optimiser
        return honest(run, twin, dataclasses.replace(state, optimiser=anew), config, edit, reference)

    monkeypatch.setattr(counterfactual, "_prepare", other)


def look_one_step_too_far(monkeypatch):
    """The bisection measures the policy after one more update than it says."""
    honest = counterfactual.bisect

    async def other(run, measure, at_least, **options):
        rebuilt = counterfactual.restore
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(counterfactual, "restore", lambda run, done, **o: rebuilt(run, min(done + (0 < done), 4), **o))
            return await honest(run, measure, at_least, **options)

    monkeypatch.setattr(counterfactual, "bisect", other)


def draw_anew_and_forget_the_optimiser(monkeypatch):
    """At once, since neither touches what the other breaks, and each run of the cells takes ten seconds."""
    replay_with_other_draws(monkeypatch)
    forget_the_optimiser(monkeypatch)


FAULTS = [
    Fault("00_quickstart", forget_the_mean, {"advantages of a group sum to"}, "config = GRPOConfig(", full=True),
    Fault("01_sft", drop_the_mask, {"loss after the prompt's labels were replaced, change",
                                    "pull where a prompt token is predicted"},
          "from grpolab.lab.dashboard", without=("from grpolab.evaluate",)),
    Fault("02_decode_engine", report_other_logps_and_let_the_slot_decide,
          {"sampler's logps against the forward, largest", "sampler's logps against the forward, mean",
           "distance from float64, mean: sampler / fp32 forward", "three turns: logps against the forward, largest",
           "rollouts changed by refill", "rollouts changed by the rest of the batch",
           "slot sampler: rollouts unlike the engine's"},
          "await sampler.close", without=RACED, parameters={"new_tokens": 36}),
    Fault("03_dpo", swap_chosen_and_rejected,
          {"naive loss − package loss", "relative gradient difference, naive to package",
           "three steps by hand and by the package: apart, of the way"}, "with gate", without=DPO_TRAINED,
          prepare=taught_and_few_pairs),
    Fault("04_grpo", report_logps_of_another_temperature, {"sampler − trainer, nats a token"}, "fixed = doubtful",
          prepare=taught_start),
    Fault("05_reward_model", read_the_reward_before_the_end,
          {"naive loss − package loss", "relative gradient difference, naive to package"},
          "scorer = RewardModel.from_policy(policy)\nasync for", prepare=taught_at_once),
    Fault("06_env_pool", let_sessions_hear_each_other, {"transcripts equal to those of lone sessions"},
          "def slow_calculator", parameters={"size": 4}),  # what follows is on the clock
    Fault("07_multi_turn_grpo", report_logps_of_another_temperature,
          {"recorded − recomputed logps of whole episodes, nats"}, "await pool.close", without=MULTI_TURN_TRAINED,
          parameters={"warm_up_steps": 40, "n_eval": 8}),
    Fault("10_replay", draw_anew_and_forget_the_optimiser, BITS | TWICE, "ends = {}", prepare=taught_and_small),
    Fault("10_replay", look_one_step_too_far, MISLED, "ends = {}", prepare=taught_and_small, full=True),
]


@each(FAULTS)
def test_the_gate_sees_what_is_broken(fault, request, tmp_path, monkeypatch):
    assert failures_under(fault, request, tmp_path, monkeypatch) == fault.fails
