"""The gate of notebook 10 under sabotage: its own cells fail the check of what is broken underneath them."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
from test_gates import failures_under, one_fault, taught  # noqa: F401  (a fixture)

from grpolab.arithmetic import Task, generate
from grpolab.evaluate import Interval
from grpolab.lab import counterfactual, replay
from grpolab.rollouts import Group
from grpolab.train.grpo import GRPOConfig
from grpolab.train.loop import make_optimiser

LEARNED = {
    "other": "rescored", "findings": {"healthy": (), "collapsed": (SimpleNamespace(illness="the reward has fallen"),)},
    "rate": {"collapsed": 0.0, "mended": 0.45}, "at_start": 0.47, "held_out": [None] * 300,
    "ends": {"mended": SimpleNamespace(exact=Interval(0.45, 0.4, 0.5))},
}


# --- the notebook itself, with one thing broken ------------------------------------------------------------------------

KNOWN, HELD_OUT = generate(300, 40, seed=1, task=Task(ops="+-", max_operand=99))
SMALL = {
    "whole": 4, "fault": 300, "planted": 1, "known": KNOWN, "held_out": HELD_OUT, "practice": KNOWN[100:],
    "sft_config": None, "config": GRPOConfig(steps=4, prompts_per_step=6, group_size=4, inner_epochs=2, lr=2e-4,
                                             schedule="constant", warmup=0, max_new_tokens=24),
}
BITS = {"rollouts replayed in every bit", "the step that was carried away agrees in every bit"}
TWICE = {"fork without a change"}
BISECTION = {"step that the bisection finds − planted step"}
MISLED = BISECTION | TWICE | {"rollouts after it that differ"}  # forked at a step that is not the fault's
IDENTITIES = BITS | TWICE | BISECTION | {
    "what is not as it was recorded", "fork without the fault", "rollouts before the fault's update that differ",
    "seeds after it are the same", "rollouts after it that differ",
}


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


@pytest.mark.parametrize(
    ("sabotage", "expected"),
    one_fault([(None, set()), (draw_anew_and_forget_the_optimiser, BITS | TWICE), (look_one_step_too_far, MISLED)]),
)
def test_the_gate_sees_what_is_broken(taught, tmp_path, monkeypatch, sabotage, expected):  # noqa: F811
    """All of the notebook's own cells, on a run small enough for a test; its learning is not judged, the identities and the
    bisection are."""
    shutil.copytree(taught, tmp_path / "runs" / "01_sft" / "tiny" / "policy")  # where the notebook looks first
    failed = failures_under(sabotage, "10_replay", "ends = {}", LEARNED, tmp_path, monkeypatch, {"whole, fault": SMALL})
    assert failed & IDENTITIES == expected
