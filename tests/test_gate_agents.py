"""The gate of notebook 11 under sabotage: its own cells fail the check of what is broken underneath them."""

import asyncio

import pandas as pd
import pytest
from test_gates import failures_under, one_fault, report_logps_of_another_temperature, run_until

from grpolab.evaluate import Interval
from grpolab.serve import sessions
from grpolab.train import GRPOConfig, SFTConfig

SHARED = dict(steps=2, group_size=4, lr=1e-3, warmup=0, schedule="constant", max_new_tokens=3)
LEARNED = {
    "metrics": pd.DataFrame({"rewritten": [0.0, 0.0], "agent_errors": [0, 0], "agent_timeouts": [0, 0], "silent": [0, 0],
                             "ratio": [1.0, 1.1]}),
    "wrong_by_memory": 0, "wrong_by_restart": 0, "away": pd.DataFrame({"staleness": [0, 1, 0, 1]}), "bound": 1, "left_out": "",
    "exact": {"best": 1.0, "random": 0.62, "edge": 0.43}, "paired": Interval(0.4, 0.35, 0.45),
    "over_rejection": Interval(0.2, 0.1, 0.3), "over_seeds": {"rejection sampling": Interval(0.2, 0.1, 0.3)}, "spent": {},
    "found": {"imitation": Interval(0.5, 0.45, 0.55), "agent": Interval(0.95, 0.9, 0.97),
              "single turns": Interval(0.38, 0.33, 0.43), "rejection sampling": Interval(0.6, 0.55, 0.65)},
    "sync": {"shared file": 0.05, "restart": 5.0}, "answers": 2.6,
}


# --- the notebook itself, with one thing broken ------------------------------------------------------------------------

SMALL = {
    "commits": 7, "tests": 3, "games_each": 1, "shared": SHARED, "left_out": "", "tasks": [{"culprit": c} for c in range(1, 8)],
    "sft_config": SFTConfig(steps=60, batch_size=16, lr=3e-3, warmup=6),
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


LOGPS, APPEND = {"recorded − recomputed logps, nats"}, {"rollouts of a session whose turns append"}
WIRE = {"tokens that the wire did not have", "tokens that the wire did not have, under a stop"}
SUMMARY = {"rollouts of a session with rewritten history"}


def tokenise_again(monkeypatch):
    """The recorder knows no turn again: each request is tokenised as a whole, and is a rollout of its own."""
    monkeypatch.setattr(sessions.Session, "_find", lambda self, key: None)


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
     (go_on_in_spite_of_the_summary, SUMMARY)]),
)
def test_the_gate_sees_what_is_broken(warmed_up, tmp_path, monkeypatch, sabotage, expected):
    """The notebook's own cells up to the audit, on a short warm-up; what comes after them is filled in."""
    skipped = {"commits, tests": SMALL, "policy, rng = load_policy": warmed_up}
    failed = failures_under(sabotage, "11_agents", "async def examine", LEARNED, tmp_path, monkeypatch, skipped)
    assert failed is not None and failed == expected
