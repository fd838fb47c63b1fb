"""The gate of notebook 12 under sabotage: where accounts are shared, or the grader believes claims, its own cells stop."""

import json
from types import SimpleNamespace

import pytest
from test_gates import cells, failures_under, one_fault

from grpolab import gate
from grpolab.env.aws import environment
from grpolab.env.aws.backend import Simulator
from grpolab.evaluate import Interval, mean_interval, wilson
from grpolab.runs.run import Run, repository

TIERS = ("warmup", "beginner")


class Closed:
    def __init__(self, left=0):
        self.left = left

    async def close(self): ...

    async def aclose(self): ...

    def status(self):
        return {"sessions": self.left}


def said(solved, of=60):
    """The held-out tasks of each tier, so many of them solved."""
    return {tier: (["aws s3 ls"] * of, [1.0] * solved + [0.0] * (of - solved)) for tier in TIERS}


def values(tmp_path):
    return {
        "gate": gate, "wilson": wilson, "run": Run("12_aws", root=tmp_path), "pool": Closed(), "stack": Closed(),
        "server": Closed(), "left_out": "", "strangers": 0, "left_over": [{}] * 8, "replayed": [1.0] * 60,
        "ignored": [0.0, 0.0], "paid": dict.fromkeys("abc", 1.0) | dict.fromkeys("defgh", 0.0), "shared": set(), "TIERS": TIERS,
        "curriculum": SimpleNamespace(results=192), "steps": 24, "prompts_per_step": 8, "first": said(15), "last": said(54),
        "gain": Interval(0.6, 0.5, 0.7), "added": Interval(0.1, 0.06, 0.14),
        "rates": {"as it is": {"both": Interval(0.0, 0.0, 0.02)}},
        "differing": 0, "unlike": 0, "imitation": 1.0, "best_size": {"rejection sampling": 64.0},
        "reached": {("rejection sampling", 64.0): [0.9]}, "at_eight": Interval(0.04, 0.03, 0.05),
        "at_best": Interval(0.0, -0.01, 0.01), "compared": {"first set": {"lower": 0.05}, "third set": {"lower": 0.07}},
    }


# --- the notebook itself, with one thing broken ------------------------------------------------------------------------


def one_account_for_all(monkeypatch):
    """Every session gets the first account."""
    first = []

    class Shared(Simulator):
        def __init__(self):
            if not first:
                super().__init__()
                first.append(self)
            self.guard, self.address = first[0].guard, first[0].address

    monkeypatch.setattr(environment, "Simulator", Shared)


def take_them_at_their_word(monkeypatch):
    """A line that is no command earns the reward."""
    honest = environment.AwsEnv._run

    def run(self, command):
        output = honest(self, command)
        if output.call is None and not self._done:  # of an episode, not of its set-up
            self._grade = environment.Grade(True, 1.0, ())
        return output

    monkeypatch.setattr(environment.AwsEnv, "_run", run)


MEASURED = ("pool", "stack", "server", "strangers", "left_over", "replayed", "ignored", "paid", "left_out", "differing")


@pytest.mark.parametrize(
    ("sabotage", "failed"), one_fault([(None, set()), (one_account_for_all, None), (take_them_at_their_word, None)]),
)
def test_the_notebook_stops_where_accounts_or_grader_are_broken(sabotage, failed, tmp_path, monkeypatch):
    """Its own cells up to the templates; None: one of its assertions stops it."""
    monkeypatch.setattr("grpolab.lab.plots.use_style", lambda: None)
    small = {"TIERS": TIERS[:1], "n_eval": 2, "record": {}, "recipe": {"seats": 2}, "left_out": ""}
    learned = {name: value for name, value in values(tmp_path).items() if name not in MEASURED}
    skipped = {"TIERS = ": small}
    assert failures_under(sabotage, "12_aws", "held_out = ", learned, tmp_path, monkeypatch, skipped, model="small") == failed


def test_the_record_bears_what_the_page_says():
    """The gate judges the record of SmolLM2 from the outcomes of the tasks; the rates that stand there are the same ones."""
    record = json.loads((repository() / "benchmarks" / "results" / "smollm2_aws.json").read_text())
    runs = {name: found for name, found in record.items() if name.split(" ")[0] in record["settings"]["grpo"]}
    assert runs and "result, trained = record" in "".join(cell.source for cell in cells("12_aws"))
    measured = [record["base"]["alone"], record["best"], record["best twice"], *(run["after"] for run in runs.values())]
    sets = ("second set", "third set")
    for found in [*measured, *(of[name] for of in measured for name in sets if name in of)]:
        both = "".join(found["flags"][tier] for tier in record["settings"]["tiers"])
        assert found["both"] == str(wilson(both.count("1"), len(both)))
    for name, run in runs.items():
        start = record["best twice" if "second set" in run else "best"]
        more = [(start[name], run["after"][name], run[name]) for name in sets if name in run]
        for before, after, gains in [(start, run["after"], run), *more]:
            pairs = zip("".join(before["flags"].values()), "".join(after["flags"].values()))
            assert gains["gain"] == str(mean_interval([int(b) - int(a) for a, b in pairs]))
        told = [pair.split(":") for line in run["path"].values() for pair in line.split()]
        recipe = record["settings"]["grpo"][name.split(" ")[0]]
        assert len(told) == recipe.get("rounds", 1) * recipe["steps"] * recipe["prompts_per_step"]
        assert all(0 <= float(rate) <= 1 for _, rate in told)
