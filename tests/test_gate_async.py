"""The gate of notebook 16 under sabotage: its own cells fail the check of what is broken underneath them."""

from importlib import import_module

import pytest
from test_gates import failures_under, one_fault

from grpolab.decode.batch import Batch
from grpolab.evaluate import Interval

module = import_module("grpolab.train.async_grpo")
LEARNED = {
    "left_out": "", "speedup": 2.0, "speedup_fast": 1.0, "toy": {0: 6.0}, "limit": lambda s: 6.0,
    "live": {2: {"oldest": 2}}, "seeds": {0: {}}, "baselines": {"SFT": 0.6}, "ends": lambda name: [0.7],
    "lost": {(8, "none"): Interval(-0.3, -0.4, -0.2)},
}
SKIPPED = {"S, R, U =": {}}  # the toy clock


def publish_nothing(monkeypatch):
    """The sampler keeps the weights that it started with, and says that they are the newest."""
    def take(self):
        self.copy.version = self.policy.version

    monkeypatch.setattr(module.Actor, "_take", take)


def forget_what_was_drawn_ahead(monkeypatch):
    monkeypatch.setattr(module.Draws, "_keep", lambda *rest: None)


def one_version_a_rollout(monkeypatch):
    """A token is said to be of the version with which its rollout began."""
    extend = Batch.extend

    def of_the_first(self, rows, *columns):
        extend(self, rows, *columns)
        self.versions[rows] = self.versions[rows, :1]

    monkeypatch.setattr(Batch, "extend", of_the_first)


@pytest.mark.filterwarnings("ignore:.*holds no rollouts of steps")
@pytest.mark.full  # forty processor seconds a fault
@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (publish_nothing, {"staleness 0, weights with other bits than by grpo", "staleness 0, rewards as by grpo",
                           "stopped and resumed, weights with other bits", "in flight, recorded − recomputed logps, nats"}),
        (forget_what_was_drawn_ahead, {"stopped and resumed, weights with other bits"}),
        (one_version_a_rollout, {"in flight, rollouts of several versions", "in flight, the same by the first version alone",
                                 "in flight, the same with the prefix anew"}),
    ]),
)
def test_the_gate_sees_what_is_broken(sabotage, names, tmp_path, monkeypatch):
    failed = failures_under(sabotage, "16_async_grpo", "slowest =", LEARNED, tmp_path, monkeypatch, SKIPPED, quick=True)
    assert failed == names
