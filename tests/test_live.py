"""Progress and pictures: they show the values that they are given."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import pytest

from grpolab import plots
from grpolab.evaluate import Interval
from grpolab.lab.live import Dashboard, sparkline
from grpolab.lab.run import Run


@pytest.fixture(autouse=True)
def house_style():
    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")


def test_outside_a_notebook_a_line_every_tenth(capsys):
    live = Dashboard(20, ["reward", "absent"], "GRPO")
    for step in range(20):
        live.update({"step": step, "reward": step / 20})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("GRPO 2/20") and "left" in lines[0]
    assert "20/20" in lines[-1] and "reward 0.95" in lines[-1] and "left" not in lines[-1]


def test_the_html_holds_the_latest_value_and_no_markup_from_outside():
    live = Dashboard(4, ["reward"], "<b>")
    for step, reward in enumerate([0.25, float("nan"), 0.75]):
        live.update({"step": step, "reward": reward})
    html = live._repr_html_()
    assert "&lt;b&gt;" in html and "0.75" in html and "nan" not in html and "value='3' max='4'" in html


def test_a_sparkline_rises_with_its_values():
    points = sparkline([0.0, 1.0, 2.0]).split("points='")[1].split("'")[0].split()
    heights = [float(p.split(",")[1]) for p in points]
    assert heights[0] > heights[1] > heights[2]  # SVG counts downwards
    assert sparkline([1.0]) == "" and sparkline([3.0, 3.0])


def test_a_curve_draws_the_column_and_its_running_mean():
    metrics = pd.DataFrame({"step": range(4), "reward": [0.0, 1.0, 0.0, 1.0]})
    ax = plots.curve(metrics, "reward", title="it rises", ylabel="reward", window=3)
    raw, mean = (line.get_ydata().tolist() for line in ax.lines)
    assert raw == [0, 1, 0, 1] and mean == pytest.approx([1 / 2, 1 / 3, 2 / 3, 1 / 2])  # centred: it does not lag
    assert ax.get_title(loc="left") == "it rises" and ax.get_ylabel() == "reward"


def test_bars_have_their_values_and_intervals():
    table = {"before": {"exact": Interval(0.2, 0.1, 0.4)}, "after": {"exact": Interval(0.6, 0.5, 0.7)}}
    ax = plots.rates(table, title="t")
    assert [round(p.get_height(), 6) for p in ax.patches] == [0.2, 0.6]
    assert [t.get_text() for t in ax.texts] == ["20.0%", "60.0%"]


def test_levels_are_dashed_lines_with_their_names_and_values():
    ax = plots.curve(pd.DataFrame({"step": [0, 1], "r": [0, 1]}), "r", title="t", ylabel="r")
    plots.levels({"base": 0.75}, ax)
    line = ax.lines[-1]
    assert line.get_linestyle() == "--" and set(line.get_ydata()) == {0.75}
    assert [t.get_text() for t in ax.texts] == ["base 75%"]


def test_group_health_fills_the_whole():
    metrics = pd.DataFrame({"step": [0, 1], "all_wrong": [0.5, 0.2], "mixed": [0.3, 0.3], "all_right": [0.2, 0.5]})
    ax = plots.group_health(metrics, title="t")
    assert max(c.get_paths()[0].vertices[:, 1].max() for c in ax.collections) == pytest.approx(1.0)


def test_a_figure_is_saved_in_the_runs_folder(tmp_path):
    run = Run("x", root=tmp_path)
    path = run.figure("reward", plots.curve(pd.DataFrame({"step": [0, 1], "r": [0, 1]}), "r", title="t", ylabel="r"))
    assert path == tmp_path / "x" / "figures" / "reward.png" and path.read_bytes().startswith(b"\x89PNG")
    assert run.log({"step": 0, "r": 0.5}) and (tmp_path / "x" / "metrics.csv").read_text() == "step,r\n0,0.5\n"
