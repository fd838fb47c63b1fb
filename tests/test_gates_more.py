"""The gates of notebooks 00, 08, 09, 13, 15 and 17 under sabotage."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from test_gates import failures_under, one_fault, report_logps_of_another_temperature

from grpolab import load_policy
from grpolab.evaluate import Interval
from grpolab.parity import Parity
from grpolab.train import ppo
from grpolab.train.grpo import trainer_logps


def games(turns):
    """(greedy, sampled) games that are won with these numbers of turns."""
    played = [SimpleNamespace(turns=(("5", "higher"), *[("7", "higher")] * (n - 1)), rollout=SimpleNamespace(reward=0.7))
              for n in turns]
    return played, played * 32


GUESS_LEARNED = {
    "metrics": pd.DataFrame({"ratio": [1.0, 1.1], "lost": [0, 0], "sampling_s": [1.0, 1.0], "update_s": [1.0, 1.0]}),
    "after": games([1, 2, 2, 3, 3, 3, 3, 4, 4]), "middle": [4, 5, 6], "imitated": games([1, 2, 2, 3, 3, 3, 3, 4, 4]),
    "examined": [games([1, 2, 2, 3, 3, 3, 3, 4, 4])] * 2, "learnt_from": {"rejection sampling": [], "GRPO, as many games": []},
}


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (report_logps_of_another_temperature, {"recorded − recomputed logps, nats"}),
    ]),
)
def test_the_guess_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """The cells up to the training, of which the embedded model, without a warm-up, takes part; the claims are not judged."""
    failed = failures_under(sabotage, "08_guess", "grpo_run = run.child", GUESS_LEARNED, tmp_path, monkeypatch,
                            {"def untrained": {"policy": load_policy("tiny")}}, warm_up_steps=1, steps=1)
    assert failed == names


class Answers:
    """An evaluation: its rate of right answers and the length of each."""

    def __init__(self, rate, length):
        self.exact, self.length = Interval(rate, rate - 0.04, rate + 0.04), length


SHORT, LONG = (Answers(0.5, 9), None), (Answers(0.99, 26), None)
LONGER_LEARNED = {
    "shares": (0.0, 0.1), "tables": {0.1: pd.DataFrame({"ratio": [1.0, 1.1]})}, "imitated": {0.1: 0.1}, "together": 0.95,
    "beyond": 0.01, "skill": Interval(0.99, 0.98, 1.0), "length": lambda e: e.length, "before": {0.0: SHORT, 0.1: SHORT},
    "after": {0.0: SHORT, 0.1: LONG}, "more": SHORT,
}


def box_the_other_parity(monkeypatch):
    honest = Parity.short.fget
    monkeypatch.setattr(Parity, "short", property(lambda self: honest(Parity(self.bits + "1"))))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()), (box_the_other_parity, {"demonstrations that the checker calls wrong"}),
    ]),
)
def test_the_longer_answers_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """The cells up to the training, without the imitation; the claims are not judged."""
    skipped = {"def demonstrations": {}, "before = {": {}}
    failed = failures_under(sabotage, "09_longer_answers", "tables = {}", LONGER_LEARNED, tmp_path, monkeypatch, skipped,
                            steps=1)
    assert failed == names


# --- 00 quickstart ----------------------------------------------------------------------------------------------------


def forget_the_mean(monkeypatch):
    monkeypatch.setattr("grpolab.train.advantages.advantages", lambda rewards, kind="centred": rewards.double())


@pytest.mark.full
@pytest.mark.parametrize(("sabotage", "names"), [(None, set()), (forget_the_mean, {"advantages of a group sum to"})])
def test_the_quickstart_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """Its own cells up to the training."""
    learned = {"gain": Interval(0.18, 0.13, 0.23), "first": 0.5, "last": 0.7}
    assert failures_under(sabotage, "00_quickstart", "live = Dashboard(", learned, tmp_path, monkeypatch) == names


# --- 13 rejection sampling --------------------------------------------------------------------------------------------

NOTHING = Interval(0.0, -0.1, 0.1)
LOOP = {"gain": NOTHING, "after_rejection": Answers(0.8, 9)}
BOTH_LEARNED = {
    "rollouts_of": {"rejection sampling": 64, "GRPO": 64}, "tokens_of": {}, "after_grpo": Answers(0.8, 9), "apart": {},
    "pass_at": {"SFT": [NOTHING], "rejection sampling": [NOTHING], "GRPO": [NOTHING]}, "over_seeds": {"greedy": NOTHING},
    "spread": {"grpo": 0.04, "rejection": 0.01},
}


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (report_logps_of_another_temperature, {"gradient of imitation − policy gradient with rewards, of its length"}),
    ]),
)
def test_the_rejection_sampling_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """The cells up to the run of GRPO, without the loop; the claims are not judged."""
    failed = failures_under(sabotage, "13_rejection_sampling", "policy = load_policy(str(saved))", BOTH_LEARNED, tmp_path,
                            monkeypatch, {"policy, own": LOOP}, quick=True)
    assert failed == names


# --- 15 distillation --------------------------------------------------------------------------------------------------


def ask_the_teacher_at_another_temperature(monkeypatch):
    monkeypatch.setattr(sys.modules["grpolab.train.distil"], "trainer_logps",
                        lambda policy, rollouts, config: trainer_logps(policy, rollouts, replace(config, temperature=1.3)))


DISTILLED = {
    "kl_first": 0.1, "kl_last": 0.05, "gain": NOTHING, "worth": {"with the number behind it": NOTHING}, "spent": 0,
    "after": Answers(0.7, 16), "mean": {"grpo": 0.7}, "best": "grpo", "level": 0.9,
    "compared": {("teacher_sft", "grpo"): {"greedy": NOTHING}},
    "before": Answers(0.6, 16), "target": Answers(0.9, 16), "start": "", "ahead": {"distillation, 4 questions a step": NOTHING},
}


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (ask_the_teacher_at_another_temperature, {"package − plain code, sampled tokens, of the gradient's length"}),
    ]),
)
def test_the_distillation_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """Its cells but for the training; the claims are not judged."""
    policies = {"student": load_policy("tiny"), "teacher": load_policy("tiny")}
    with torch.no_grad():
        for p in policies["teacher"].model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    skipped = {"async def imitate": policies, "questions = practice": DISTILLED, "grouped = load_policy": {}}
    failed = failures_under(sabotage, "15_distillation", "async def share_right", DISTILLED, tmp_path, monkeypatch, skipped,
                            quick=True)
    assert failed == names


# --- 17 critic --------------------------------------------------------------------------------------------------------

CRITIC_LEARNED = {
    "tables": {"PPO": pd.DataFrame({"ratio": [1.0, 1.1]})}, "taken": {}, "explained": pd.Series([-0.5, 0.5]), "learned": 0.9,
    "reward_of": {"grpo": [0.8], "start": [0.7], "rejection": [0.6], "ppo_1": [0.8], "ppo_50": [0.7]},
    "against": {"ppo_95": NOTHING}, "mean": lambda values: sum(values) / len(values),
    "change": {"GRPO": Interval(0.05, 0.02, 0.08), "PPO": NOTHING},
}
# The cells between the critic by hand and the appendix, which train and read the record.
CRITIC_TRAINED = dict.fromkeys(("async def examined", "explained = ", "learner, critic", "record = ", "mean = "), {})


def wait_for_the_whole_return(monkeypatch):
    honest = ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *args, lam=1.0, **kw: honest(*args, lam=1.0, **kw))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (wait_for_the_whole_return, {"GAE by hand − of the package", "critic by hand − of the package after five steps"}),
    ]),
)
def test_the_critic_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """The cells but for the runs; the claims are not judged."""
    failed = failures_under(sabotage, "17_critic", "with gate(", CRITIC_LEARNED, tmp_path, monkeypatch, CRITIC_TRAINED,
                            quick=True)
    assert failed == names
