"""The gate of notebook 11 under sabotage: its own cells fail the check of what is broken underneath them."""

import asyncio
from types import SimpleNamespace

import pandas as pd
import pytest
from test_gates import failures_under, one_fault, report_logps_of_another_temperature, run_until

from grpolab import gate
from grpolab.evaluate import Interval
from grpolab.lab.gate import shortened
from grpolab.runs.run import Run
from grpolab.serve import sessions
from grpolab.train import GRPOConfig, SFTConfig

SHARED = dict(steps=2, group_size=4, lr=1e-3, warmup=0, schedule="constant", max_new_tokens=3)
RUNS = {"rewritten": [0.0, 0.0], "agent_errors": [0, 0], "agent_timeouts": [0, 0], "silent": [0, 0], "ratio": [1.0, 1.1]}


class Closed:
    async def aclose(self): ...


def metrics(**changes):
    return pd.DataFrame(RUNS | changes)


def values(tmp_path):
    return {
        "gate": gate, "shortened": shortened, "run": Run("11_agents", root=tmp_path), "stack": Closed(), "left_out": "",
        "checked": SimpleNamespace(max_error=1e-6), "one_each": 1, "made_up": 0, "made_up_under_a_stop": 0,
        "rewritten": SimpleNamespace(rollouts=[None, None]), "in_rollouts": 4, "on_the_wire": 4, "metrics": metrics(),
        "wrong_by_memory": 0, "wrong_by_restart": 0, "away": pd.DataFrame({"staleness": [0, 1, 0, 1]}), "bound": 1,
        "exact": {"best": 1.0, "random": 0.62, "edge": 0.43}, "paired": Interval(0.4, 0.35, 0.45), "before": 0.5,
        "found": {"imitation": Interval(0.5, 0.45, 0.55), "agent": Interval(0.95, 0.9, 0.97),
                  "single turns": Interval(0.38, 0.33, 0.43)},
        "sync": {"shared memory": 0.05, "restart": 5.0}, "answers": 2.6,
    }


# --- the notebook itself, with one thing broken ------------------------------------------------------------------------

SMALL = {
    "commits": 7, "tests": 3, "games_each": 1, "shared": SHARED, "left_out": "", "tasks": [{"culprit": c} for c in range(1, 8)],
    "sft_config": SFTConfig(steps=60, batch_size=16, lr=3e-3, warmup=6, pack_width=128),
    "config": GRPOConfig(prompts_per_step=7, **SHARED),
}
@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory):
    """What the cell of the warm-up leaves, once for all tests."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        folder = tmp_path_factory.mktemp("warm_up")
        left = run_until("11_agents", "service = await", folder, patch, runner, {}, {"commits, tests": SMALL})
        runner.run(left["stack"].aclose())
    return {name: left[name] for name in ("policy", "started", "rng")}


RECORDED = ("checked", "one_each", "made_up", "made_up_under_a_stop", "rewritten", "in_rollouts", "on_the_wire")
LOGPS, APPEND = {"recorded − recomputed logps, nats"}, {"rollouts of a session whose turns append"}
WIRE = {"tokens that the wire did not have", "tokens that the wire did not have, under a stop"}
SUMMARY = {"rollouts of a session with rewritten history"}


def tokenise_again(monkeypatch):
    """The recorder knows no turn again: each request is tokenised as a whole, and is a rollout of its own."""
    monkeypatch.setattr(sessions.Session, "_find", lambda self, key: None)


def claim_what_the_agent_said(monkeypatch):
    """What lies between two answers gets mask 1, too."""
    honest = sessions.joined

    def greedy(whole, turn):
        rollout = honest(whole, turn)
        return sessions.replace(rollout, mask=(1,) * len(rollout.mask))

    monkeypatch.setattr(sessions, "joined", greedy)


def go_on_in_spite_of_the_summary(monkeypatch):
    """Whatever is asked next is taken to go on from the last turn."""
    honest = sessions.Session.prompt_of_chat

    def joined_anyway(self, tokenizer, messages, *rest):
        prompt = honest(self, tokenizer, messages, *rest)
        if prompt.parent is not None or not self.turns:
            return prompt
        return sessions.Prompt(self.turns[-1].ids + prompt.ids, self.turns[-1], prompt.key)

    monkeypatch.setattr(sessions.Session, "prompt_of_chat", joined_anyway)


@pytest.mark.parametrize(
    ("sabotage", "expected"),
    one_fault([(None, set()), (report_logps_of_another_temperature, LOGPS), (tokenise_again, APPEND | WIRE),
     (claim_what_the_agent_said, WIRE | LOGPS), (go_on_in_spite_of_the_summary, SUMMARY)]),
)
def test_the_gate_sees_what_is_broken(warmed_up, tmp_path, monkeypatch, sabotage, expected):
    """The notebook's own cells up to the audit, on a short warm-up; what comes after them is filled in."""
    good = values(tmp_path)
    learned = {name: value for name, value in good.items() if name not in (*RECORDED, "stack")}
    skipped = {"commits, tests": SMALL, "policy, rng = load_policy": warmed_up}
    failed = failures_under(sabotage, "11_agents", "async def examine", learned, tmp_path, monkeypatch, skipped)
    assert failed is not None and failed == expected
