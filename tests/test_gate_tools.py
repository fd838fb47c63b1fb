"""The gate of notebook 14 under sabotage: its own cells fail the check of what is broken underneath them."""

from dataclasses import replace

import pandas as pd
import pytest
from test_gates import failures_under, one_fault

from grpolab.evaluate import Interval
from grpolab.tool_calls import parse_calls

LOW, HIGH, NONE = Interval(0.66, 0.6, 0.72), Interval(0.98, 0.95, 0.99), Interval(0.0, 0.0, 0.02)


def shares(of):
    row = {f"right {what}, {how}": of for what in ("calls", "answers") for how in ("greedy", "sampled")}
    return row | {"unreadable, sampled": NONE}


LEARNED = {
    "left_out": "", "tokens": {"GRPO": 1000, "rejection": 1000}, "gain": {("warm-up", "sampled"): Interval(0.3, 0.2, 0.4)},
    "metrics": pd.DataFrame({"ratio": [1.0, 1.1], "lost": [0, 0], "sampling_s": [1.0, 1.0], "update_s": [1.0, 1.0]}),
    "found": {"base": shares(NONE), "warm-up": shares(LOW), "rejection sampling": shares(LOW), "GRPO": shares(HIGH)},
}
# What is left out: evaluation, training and what is made of them.
SKIPPED = {start: {} for start in ("columns =", "metrics = run.table", "half =", "seen |=", "told =")}


def repair_what_cannot_be_read(monkeypatch):
    """The first call of a turn is made, whatever follows it."""
    def first(text, form):
        turn = parse_calls(text, form)
        return replace(parse_calls(text.partition(")")[0] + ")]", form), unparsed=0) if turn.unparsed else turn

    monkeypatch.setattr("grpolab.train.tools.parse_calls", first)


@pytest.mark.parametrize(
    ("sabotage", "names"),
    one_fault([
        (None, set()),
        (repair_what_cannot_be_read, {"calls made of turns that cannot be read"}),
    ]),
)
def test_the_gate_sees_what_is_broken(sabotage, names, tmp_path, monkeypatch):
    """On a policy that a warm-up of one step taught nothing, whose turns differ in length; the claims are not judged on it."""
    failed = failures_under(sabotage, "14_tools", "print(run.shown", LEARNED, tmp_path, monkeypatch,
                            SKIPPED, warm_up_steps=1, n_eval=2)
    assert failed == names
