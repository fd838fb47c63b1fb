"""Every check of the gate of notebook 11 can fail: good values pass, each bad one fails its own; and the notebook's own cells
fail the check of what is broken underneath them."""

import asyncio
from types import SimpleNamespace

import pandas as pd
import pytest
from test_gates import fails_alone, failures_under, report_logps_of_another_temperature, run_until

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


def found(**changes):
    return {"found": {"imitation": Interval(0.5, 0.45, 0.55), "agent": Interval(0.95, 0.9, 0.97),
                      "single turns": Interval(0.38, 0.33, 0.43)} | {k.replace("_", " "): v for k, v in changes.items()}}


FAILED = "runs of the training that failed"


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"checked": SimpleNamespace(max_error=0.01)}, "recorded − recomputed logps, nats"),
        ({"one_each": 2}, "rollouts of a session whose turns append"),
        ({"made_up": 1}, "tokens that the wire did not have"),
        ({"made_up_under_a_stop": 1}, "tokens that the wire did not have, under a stop"),
        ({"rewritten": SimpleNamespace(rollouts=[None])}, "rollouts of a session with rewritten history"),
        ({"in_rollouts": 5}, "sampled tokens in them − on the wire"),
        ({"metrics": metrics(rewritten=[0.0, 0.1])}, "runs of the training with several rollouts"),
        ({"metrics": metrics(agent_errors=[0, 1])}, FAILED),
        ({"metrics": metrics(agent_timeouts=[1, 0])}, FAILED),
        ({"metrics": metrics(silent=[0, 2])}, FAILED),
        ({"metrics": metrics(ratio=[1.01, 1.0])}, "ratio at step 0"),
        ({"wrong_by_memory": 1}, "remote rollouts that differ from those here"),
        ({"wrong_by_restart": 1}, "remote rollouts that differ from those here"),
        ({"away": pd.DataFrame({"staleness": [0, 2]})}, "versions that a rollout is behind"),
        ({"exact": {"best": 0.9, "random": 0.53, "edge": 0.4}}, "chance of the best player"),
        (found(imitation=Interval(0.7, 0.65, 0.75)), "found before"),
        (found(agent=Interval(0.85, 0.8, 0.9)), "found after"),
        ({"paired": Interval(0.25, 0.2, 0.3)}, "reward gain"),
        (found(single_turns=Interval(0.6, 0.55, 0.65)), "found after single turns"),
        ({"sync": {"shared memory": 2.0, "restart": 5.0}}, "seconds a sync"),
    ],
)
def test_every_check_of_the_agents_gate_can_fail(bad, name, tmp_path):
    fails_alone("11_agents", values(tmp_path), bad, name)


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

    def joined_anyway(self, tokenizer, messages):
        prompt = honest(self, tokenizer, messages)
        if prompt.parent is not None or not self.turns:
            return prompt
        return sessions.Prompt(self.turns[-1].ids + prompt.ids, self.turns[-1], prompt.key)

    monkeypatch.setattr(sessions.Session, "prompt_of_chat", joined_anyway)


@pytest.mark.parametrize(
    ("sabotage", "expected"),
    [(None, set()), (report_logps_of_another_temperature, LOGPS), (tokenise_again, APPEND | WIRE),
     (claim_what_the_agent_said, WIRE | LOGPS), (go_on_in_spite_of_the_summary, SUMMARY)],
    ids=["nothing", "another temperature", "tokenised again", "the agent's words", "joined in spite of the summary"],
)
def test_the_gate_sees_what_is_broken(warmed_up, tmp_path, monkeypatch, sabotage, expected):
    """The notebook's own cells up to the audit, on a short warm-up; what comes after them is filled in."""
    good = values(tmp_path)
    learned = {name: value for name, value in good.items() if name not in (*RECORDED, "stack")}
    skipped = {"commits, tests": SMALL, "policy, rng = load_policy": warmed_up}
    failed = failures_under(sabotage, "11_agents", "async def examine", learned, tmp_path, monkeypatch, skipped)
    assert failed is not None and failed == expected
