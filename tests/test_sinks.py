"""Sinks of a run: objects that are told each row, and what becomes of one that fails."""

import pytest

from grpolab.lab.run import Run


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


def test_the_writer_of_tensorboard_takes_them(tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    writer = board.SummaryWriter(tmp_path / "board")
    Run("x", root=tmp_path, sinks=[writer]).log({"step": 0, "reward": 0.5})
    writer.close()
    assert list((tmp_path / "board").iterdir())
