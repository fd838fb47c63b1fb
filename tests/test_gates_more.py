"""Every claim of the gates of notebooks 08 and 09 can fail: good values pass, each bad one fails the check it belongs to."""

from types import SimpleNamespace

import pandas as pd
import pytest
from test_gates import fails_alone, failures_under, judge, leave_sessions_open, report_logps_of_another_temperature

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


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        ({"depths": PERFECT[1:]}, {"optimum by trying all − sum of the depths"}),
        ({"fewest_guesses": lambda n: 24}, {"optimum by trying all − the package's"}),
        ({"between": 0.2}, {"variance − within − between secrets"}),
        ({"checked": SimpleNamespace(max_error=0.1)}, {"recorded − recomputed logps, nats"}),
        ({"metrics": {"ratio": 1.1}}, {"ratio at step 0"}),
        ({"metrics": {"lost": 1}}, {"games lost"}),
        ({"teacher": 3.6}, {"sampled guesses before"}),
        ({"server": Closed(1)}, {"sessions that the closed pool left"}),
        ({"before": (games([1, *PERFECT[:-1]])[0], games(AT_RANDOM)[1])}, {"greedy guesses for all secrets, before"}),
        ({"after": (games([1, *PERFECT[:-1]])[0], games(PERFECT)[1])}, {"greedy guesses for all secrets, after"}),
        ({"before": games([3] * 17 + [2])}, {"sampled guesses before"}),
        ({"after": games(AT_RANDOM)}, {"sampled guesses before, lower end − after, upper end",
          "sampled guesses above the optimum", "greedy guesses after / optimum"}),
        ({"after": (games([4] * 9)[0], games(PERFECT)[1])}, {"greedy guesses after / optimum"}),
        ({"after": (games(PERFECT)[0][:-1] + [game(4, reward=0.0)], games(PERFECT)[1])}, {"greedy games won after"}),
        ({"after": games(PERFECT, first="1")}, {"first greedy guess is one of the best"}),
    ],
)
def test_every_claim_of_the_guess_gate_can_fail(bad, names, tmp_path):
    good = guess_values(tmp_path)
    assert judge("08_guess", dict(good)) == []
    changed = {k: good[k].assign(**v) if k == "metrics" else v for k, v in bad.items()}
    assert {name.split(":")[0] for name in judge("08_guess", good | changed)} == names


def stop_too_early(monkeypatch):
    monkeypatch.setattr("grpolab.env.guess.fewest_guesses", lambda n: max(0, n - 1))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    [
        (None, set()),
        (report_logps_of_another_temperature, {"recorded − recomputed logps, nats"}),
        (leave_sessions_open, {"sessions that the closed pool left"}),
        (stop_too_early, None),
    ],
    ids=["honest", "wrong logps", "leak", "wrong optimum"],
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


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"smaller": [0.0, -0.1]}, "largest correlation with a smaller parity"),
        ({"check_answer": lambda text, answer: "e" not in text}, "demonstrations that the checker calls wrong"),
        ({"simulated": 0.28}, "advantage of a long answer − formula"),
        ({"tables": {0.1: pd.DataFrame({"ratio": [0.9]})}}, "ratio at step 0 − 1, largest"),
        ({"imitated": {0.1: 0.2}}, "π(long) after imitating 10%"),
        ({"before": {0.0: (Answers(0.5, 9), None), 0.1: (Answers(0.63, 9), None)}}, "greedy before"),
        ({"more": (Answers(0.7, 9), None)}, "greedy after twice the imitation"),
        ({"after": {0.0: (Answers(0.5, 9), None), 0.1: (Answers(0.9, 26), None)}}, "greedy after GRPO"),
        ({"after": {0.0: (Answers(0.5, 9), None), 0.1: (Answers(0.99, 16), None)}}, "length after / before"),
        ({"together": 0.5}, "correlation of reward and length over the steps"),
        ({"beyond": -0.1}, "reward above what the choice alone explains"),
        ({"skill": Interval(0.6, 0.5, 0.7)}, "walks right before"),
        ({"after": {0.0: (Answers(0.7, 9), None), 0.1: (Answers(0.99, 26), None)}},
         "no long demonstrations"),
        ({"after": {0.0: (Answers(0.5, 12), None), 0.1: (Answers(0.99, 26), None)}}, "no long demonstrations"),
    ],
)
def test_every_claim_of_the_longer_answers_gate_can_fail(bad, name, tmp_path):
    fails_alone("09_longer_answers", longer_values(tmp_path), bad, name)


def forget_the_baseline(monkeypatch):
    monkeypatch.setattr("grpolab.train.advantages.advantages", lambda rewards, kind: rewards)


def box_the_other_parity(monkeypatch):
    honest = Parity.short.fget
    monkeypatch.setattr(Parity, "short", property(lambda self: honest(Parity(self.bits + "1"))))


@pytest.mark.parametrize(
    ("sabotage", "names"),
    [(None, set()), (forget_the_baseline, None), (box_the_other_parity, {"demonstrations that the checker calls wrong"})],
    ids=["honest", "no baseline", "wrong box"],
)
def test_the_longer_answers_gate_sees_sabotage(sabotage, names, tmp_path, monkeypatch):
    """The cells up to the training, without the imitation; the claims are not judged."""
    given = ("tables", "imitated", "together", "beyond", "skill", "before", "after", "more", "shares")
    learned = {k: v for k, v in longer_values(tmp_path).items() if k in given}
    skipped = {"def demonstrations": {}, "before = {": {}}
    learned |= {"length": longer_values(tmp_path)["length"]}
    failed = failures_under(sabotage, "09_longer_answers", "tables = {}", learned, tmp_path, monkeypatch, skipped, steps=1)
    assert failed == names  # None: the notebook's own assertion stops it
