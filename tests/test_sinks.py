"""Sinks of a run: objects that are told each row, and what becomes of one that fails."""

import json
import sqlite3

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from grpolab.runs.run import Run


class Log:
    def __init__(self):
        self.rows = []

    def log(self, numbers, step):
        self.rows.append((step, dict(numbers)))


class Scalars:
    def __init__(self):
        self.seen = []

    def add_scalar(self, name, value, step):
        self.seen.append((name, value, step))


def test_every_sink_is_told_the_numbers_of_every_row(tmp_path):
    log, scalars = Log(), Scalars()
    run = Run("x", root=tmp_path, sinks=[log, scalars])
    run.log({"step": 0, "reward": 0.5, "curriculum": "{}"})
    run.log({"step": 1, "reward": 0.75, "tokens": 7})
    assert log.rows == [(0, {"reward": 0.5}), (1, {"reward": 0.75, "tokens": 7})]
    assert scalars.seen == [("reward", 0.5, 0), ("reward", 0.75, 1), ("tokens", 7, 1)]
    assert [row["reward"] for row in run.metrics] == [0.5, 0.75]


def test_a_sink_that_fails_is_warned_of_once_and_costs_no_row(tmp_path):
    class Broken(Log):
        def log(self, numbers, step):
            super().log(numbers, step)
            raise ConnectionError("the service is away")

    broken, log = Broken(), Log()
    run = Run("x", root=tmp_path, sinks=[broken, log])
    with pytest.warns(UserWarning, match="Broken took no more .* after step 0: .*service is away"):
        run.log({"step": 0, "reward": 0.5})
    run.log({"step": 1, "reward": 0.6})
    assert len(broken.rows) == 1 and len(log.rows) == len(run.metrics) == 2


def test_what_takes_no_rows_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match=r"a sink has \.log"):
        Run("x", root=tmp_path, sinks=[print])
    assert not list(tmp_path.iterdir())


def log_two_rows(run):
    """And what was measured after the second."""
    run.log({"step": 0, "reward": 0.5, "curriculum": "{}"})
    run.log({"step": 1, "reward": 0.75})
    run.log({"step": 1, "eval_score": 0.25})
    assert len(run.sinks) == 1


def test_the_writer_of_tensorboard_takes_them(tmp_path):
    writer = SummaryWriter(tmp_path / "board")
    log_two_rows(Run("x", root=tmp_path, sinks=[writer]))
    writer.close()
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward")] == [(0, 0.5), (1, 0.75)]
    assert [(event.step, event.value) for event in board.Scalars("eval_score")] == [(1, 0.25)]


def test_a_run_of_wandb_takes_them_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra [sinks]")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    sink = wandb.init(project="grpolab", dir=str(tmp_path))
    run = Run("x", root=tmp_path, sinks=[sink])
    log_two_rows(run)
    run.log({"step": 2, "reward": 1.0})  # wandb takes a step in when the next one begins
    assert sink.summary["eval_score"] == 0.25 and sink.step == 2
    sink.finish()
    assert list(tmp_path.rglob("*.wandb"))


def test_a_run_of_trackio_takes_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="needs the extra [sinks]")
    log_two_rows(Run("x", root=tmp_path, sinks=[trackio.init(project="grpolab", name="x")]))
    trackio.finish()
    (base,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(base) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    assert [(step, json.loads(numbers)) for step, numbers in rows] == [(0, {"reward": 0.5}), (1, {"reward": 0.75}),
                                                                       (1, {"eval_score": 0.25})]
