"""The gates of notebooks 08 and 09 under sabotage."""

from types import SimpleNamespace

import pandas as pd
import pytest
from test_gates import failures_under, leave_sessions_open, one_fault, report_logps_of_another_temperature

from grpolab import gate, load_policy
from grpolab.checker import check_answer
from grpolab.env.guess import fewest_guesses
from grpolab.evaluate import Interval, mean_interval, wilson
from grpolab.parity import Parity, generate_parity
from grpolab.runs.run import Run


class Closed:
    """A pool, a stack and a server in one: nothing to close, and the sessions it is told of."""

    def __init__(self, left=0):
        self.left = left

    async def close(self): ...

    async def aclose(self): ...

    def status(self):
        return {"sessions": self.left}


def game(turns, first="5", reward=0.7):
    guesses = [(first, "higher"), *[("7", "higher")] * (turns - 1)]
    return SimpleNamespace(turns=tuple(guesses), rollout=SimpleNamespace(reward=reward))


def games(turns, **of):
    """(greedy, sampled) games with these numbers of turns."""
    played = [game(n, **of) for n in turns]
    return played, played * 32


def cost(e):
    return len(e.turns) if e.rollout.reward > 0 else 6


PERFECT = [1, 2, 2, 3, 3, 3, 3, 4, 4]
AT_RANDOM = [2, 3, 4, 4, 3, 4, 4, 3, 3]


def guess_values(tmp_path):
    metrics = pd.DataFrame({"ratio": [1.0, 1.1], "lost": [0, 0], "sampling_s": [1.0, 1.0], "update_s": [1.0, 1.0]})
    return {
        "gate": gate, "run": Run("08_guess", root=tmp_path), "pool": Closed(), "stack": Closed(), "server": Closed(),
        "best": fewest_guesses, "fewest_guesses": fewest_guesses, "depths": PERFECT, "highest": 9,
        "optimum": 25 / 9, "teacher": 30 / 9, "middle": [4, 5, 6], "total": 0.3, "within": 0.2, "between": 0.1,
        "left_out": "", "metrics": metrics,
        "checked": SimpleNamespace(max_error=1e-6), "before": games(AT_RANDOM, first="1"), "after": games(PERFECT),
        "cost": cost, "opening": lambda greedy: greedy[0].turns[0][0],
        "won": lambda played: wilson(sum(e.rollout.reward > 0 for e in played), len(played)),
        "guesses": lambda played: mean_interval([float(cost(e)) for e in played]),
        "counts": lambda played: "counted",
    }


def stop_too_early(monkeypatch):
    monkeypatch.setattr("grpolab.env.guess.fewest_guesses", lambda n: max(0, n - 1))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (report_logps_of_another_temperature, {"recorded − recomputed logps, nats"}),
        (leave_sessions_open, {"sessions that the closed pool left"}),
        (stop_too_early, None),
    ]),
)
def test_the_guess_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """The cells up to the training, of which the embedded model, without a warm-up, takes part; the claims are not judged."""
    learned = {k: guess_values(tmp_path)[k] for k in ("metrics", "after", "middle")}
    policy = load_policy("tiny")
    failed = failures_under(sabotage, "08_guess", "grpo_run = run.child", learned, tmp_path, monkeypatch,
                            {"def untrained": {"policy": policy}}, warm_up_steps=1, steps=1)
    assert failed == names  # None: the notebook's own assertion stops it


class Answers:
    """An evaluation: its rate of right answers and the length of each."""

    def __init__(self, rate, length):
        self.exact, self.length = Interval(rate, rate - 0.04, rate + 0.04), length


def longer_values(tmp_path):
    held_out = generate_parity(0, 500, bits=12, seed=0)[1]
    table = pd.DataFrame({"ratio": [1.0, 1.1]})
    return {
        "gate": gate, "left_out": "",
        "run": Run("09_longer_answers", root=tmp_path), "shares": (0.0, 0.1), "rare": 0.1, "held_out": held_out,
        "check_answer": check_answer, "smaller": [0.0], "simulated": 0.245, "predicted": 0.245, "tables": {0.1: table},
        "imitated": {0.1: 0.1}, "length": lambda e: e.length, "together": 0.95, "beyond": 0.01,
        "skill": Interval(0.99, 0.98, 1.0), "before": {s: (Answers(0.5, 9), None) for s in (0.0, 0.1)},
        "after": {0.0: (Answers(0.5, 9), None), 0.1: (Answers(0.99, 26), None)}, "more": (Answers(0.5, 9), None),
    }


def forget_the_baseline(monkeypatch):
    monkeypatch.setattr("grpolab.train.advantages.advantages", lambda rewards, kind: rewards)


def box_the_other_parity(monkeypatch):
    honest = Parity.short.fget
    monkeypatch.setattr(Parity, "short", property(lambda self: honest(Parity(self.bits + "1"))))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()), (box_the_other_parity, {"demonstrations that the checker calls wrong"}), (forget_the_baseline, None),
    ]),
)
def test_the_longer_answers_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """The cells up to the training, without the imitation; the claims are not judged."""
    given = ("tables", "imitated", "together", "beyond", "skill", "before", "after", "more", "shares")
    learned = {k: v for k, v in longer_values(tmp_path).items() if k in given}
    skipped = {"def demonstrations": {}, "before = {": {}}
    learned |= {"length": longer_values(tmp_path)["length"]}
    failed = failures_under(sabotage, "09_longer_answers", "tables = {}", learned, tmp_path, monkeypatch, skipped, steps=1)
    assert failed == names  # None: the notebook's own assertion stops it


# --- 00 quickstart ----------------------------------------------------------------------------------------------------


def forget_the_mean(monkeypatch):
    monkeypatch.setattr("grpolab.train.advantages.advantages", lambda rewards, kind="centred": rewards.double())


@pytest.mark.full
@pytest.mark.parametrize(("sabotage", "names"), [(None, set()), (forget_the_mean, {"advantages of a group sum to"})])
def test_the_quickstart_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """Its own cells up to the training."""
    learned = {"gain": Interval(0.18, 0.13, 0.23), "first": 0.5, "last": 0.7}
    assert failures_under(sabotage, "00_quickstart", "live = Dashboard(", learned, tmp_path, monkeypatch) == names
