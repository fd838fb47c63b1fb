"""Sinks of a run: objects that get each row, and what becomes of one that fails."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from grpolab.runs.run import Run


class Log:
    """As a run of wandb or trackio."""

    def __init__(self, broken=False):
        self.rows, self.broken = [], broken

    def log(self, numbers, step):
        self.rows.append((step, dict(numbers)))
        if self.broken:
            raise ConnectionError("the service is away")


def test_every_sink_gets_the_numbers_of_every_row_and_one_that_fails_is_dropped(tmp_path):
    log, broken, writer = Log(), Log(broken=True), SummaryWriter(tmp_path / "board")
    run = Run("x", root=tmp_path, sinks=[broken, log, writer])
    with pytest.warns(UserWarning, match="Log took no more .* after step 0: .*service is away"):
        run.log({"step": 0, "reward": 0.5, "curriculum": "{}"})
    run.log({"step": 1, "reward": 0.75, "tokens": 7})
    writer.close()
    assert log.rows == [(0, {"reward": 0.5}), (1, {"reward": 0.75, "tokens": 7})]
    assert len(broken.rows) == 1 and [row["reward"] for row in run.metrics] == [0.5, 0.75]
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("reward")] == [(0, 0.5), (1, 0.75)]
    with pytest.raises(ValueError, match=r"a sink has \.log"):
        Run("y", root=tmp_path, sinks=[print])


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_run_of_a_tracker_takes_them(tracker, tmp_path, monkeypatch):
    """Both are large, or do not fit requirements.lock: extra [sinks]."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    module = pytest.importorskip(tracker)
    sink = module.init(project="grpolab", **({"dir": str(tmp_path)} if tracker == "wandb" else {"name": "x"}))
    run = Run("x", root=tmp_path, sinks=[sink])
    for step in range(3):
        run.log({"step": step, "reward": step / 2, "curriculum": "{}"})
    module.finish()
    assert run.sinks == [sink] and list(tmp_path.rglob("*.wandb" if tracker == "wandb" else "*.db"))
