"""Progress and figures show the values of the run."""

import asyncio
from io import BytesIO
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from PIL import Image

from grpolab import plots
from grpolab.evaluate import Interval
from grpolab.lab.dashboard import Dashboard, sparkline
from grpolab.runs.run import Run


@pytest.fixture(autouse=True)
def style():
    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")


def test_outside_a_notebook_it_is_a_bar_of_tqdm(capsys):
    live = Dashboard(20, ["reward", "absent"], "GRPO")
    for step in range(20):
        live.update({"step": step, "reward": step / 20})
    last = capsys.readouterr().err.splitlines()[-1].split("\r")[-1]
    assert last.startswith("GRPO: 100%") and "20/20" in last and "reward 0.95" in last


def test_the_html_holds_the_latest_value_and_no_markup_from_outside():
    live = Dashboard(4, ["reward", "eval_score"], "<b>")
    for step, reward in enumerate([0.25, float("nan"), 0.75]):  # an evaluation now and then keeps its last value
        live.update({"step": step, "reward": reward} | ({"eval_score": 0.125} if step == 1 else {}))
    html = live._repr_html_()
    assert "&lt;b&gt;" in html and "0.75" in html and "nan" not in html and "value='3' max='4'" in html
    assert "0.125" in html and "evaluated during training" in html


def test_a_sparkline_rises_with_its_values():
    assert sparkline([0.0, 1.0, 2.0]) == "▁▄█" and sparkline([3.0, 3.0]) == "▁▁" and sparkline([]) == ""
    assert sparkline(range(1000)) == "".join(sorted(sparkline(range(1000)))) and len(sparkline(range(1000))) == 40


def test_an_infinite_value_has_no_bar():
    dashboard = Dashboard(3, ["loss"], "SFT")
    dashboard.rows = [{"loss": 1.0}, {"loss": float("inf")}, {"loss": 2.0}]
    assert "▁█" in dashboard._row("loss")


def test_a_value_outside_its_healthy_range_is_coloured():
    live = Dashboard(4, ["mixed", "ratio", "own"], meanings={"own": "what I count"})
    live.update({"step": 0, "mixed": 0.5, "ratio": 1.05, "own": 11657.3})
    assert plots.WARNING not in live._repr_html_()
    live.update({"step": 1, "mixed": 0.05, "ratio": 1.3, "own": 1.5})
    mixed, ratio, own = live._repr_html_().split("<tr>")[1:]
    assert plots.WARNING in mixed and "only these have a gradient" in mixed and "usually at least 0.1" in mixed
    assert plots.WARNING in ratio and "usually 0.8 to 1.2" in ratio
    assert plots.WARNING not in own and "what I count<" in own
    assert "own 1.5" in repr(live) and repr(live) == str(live)


def test_a_run_that_goes_on_is_shown_from_its_start_and_its_time_left_from_this_session(tmp_path, monkeypatch):
    run = Run("x", root=tmp_path)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    live = Dashboard(100, ["loss"], run=run)  # at 0 seconds
    for step in range(51):
        run.log({"step": step, "loss": 1.0 / (step + 1)})
    now[0] = 6.0
    live.update(run.metrics[-1])  # at 6: one row of this session, 49 to come
    assert [r["step"] for r in live.rows] == list(range(51)) and live.done == 51
    assert "6 s, about 294 s left" in repr(live)


def test_a_curve_draws_the_column_and_its_running_mean():
    metrics = pd.DataFrame({"step": range(4), "reward": [0.0, 1.0, 0.0, 1.0]})
    ax = plots.curve(metrics, "reward", title="it rises", ylabel="reward", window=3)
    raw, mean = (line.get_ydata().tolist() for line in ax.lines)
    assert raw == [0, 1, 0, 1] and mean == pytest.approx([1 / 2, 1 / 3, 2 / 3, 1 / 2])
    turning = pd.DataFrame({"step": range(7), "reward": [0.0, 1.0, 2.0, 3.0, 2.0, 1.0, 0.0]})
    mean = plots.curve(turning, "reward", title="t", ylabel="y", window=3).lines[1].get_ydata()
    assert mean.argmax() == 3 and list(mean) == list(mean)[::-1]  # its peak is where the values have theirs
    assert ax.get_title(loc="left") == "it rises" and ax.get_ylabel() == "reward"


def test_bars_have_their_values_and_intervals():
    table = {"before": {"exact": Interval(0.2, 0.1, 0.4)}, "after": {"exact": Interval(0.6, 0.5, 0.7)}}
    ax = plots.rates(table, title="t")
    assert [round(p.get_height(), 6) for p in ax.patches] == [0.2, 0.6]
    assert [t.get_text() for t in ax.texts] == ["20.0%", "60.0%"]
    assert len(plots.rates({str(k): {"exact": Interval(0.2, 0.1, 0.4)} for k in range(9)}, title="t").patches) == 9


def test_the_curves_of_several_runs_have_colours_of_their_own_and_their_names():
    table = pd.DataFrame({"step": range(3), "r": [0.0, 1.0, 2.0]})
    ax = plots.curves({"a": table, "b": table + 1}, "r", title="t", ylabel="r")
    named = {text.get_text(): line.get_color() for text, line in zip(ax.get_legend().get_texts(), ax.lines)}
    assert list(named) == ["a", "b"] and len(set(named.values())) == 2


def test_a_figure_has_more_pixels_than_it_shows_and_few_bytes():
    ax = plots.curve(pd.DataFrame({"step": range(50), "r": range(50)}), "r", title="t", ylabel="r", color=plots.REWARD)
    data, size = plots._for_notebook(ax.figure)
    image = Image.open(BytesIO(data))
    assert image.width > 900 and size["width"] == round(image.width / 1.5)
    assert len(data) < 40_000
    drawn = {color for _, color in image.convert("RGB").getcolors()}
    assert (0, 158, 115) in drawn and (255, 255, 255) in drawn  # the palette's green is exactly itself


def test_a_table_has_text_at_the_left_and_numbers_for_people_at_the_right():
    frame = pd.DataFrame({"text": ["a<b>", "c\n<td>d"], "loss": [5.629e-7, 11657.3], "n": [1, 12]}, index=["x<i>", "y"])
    html = plots.table(frame)
    assert html.count("<td style='text-align:left'>") == 2 and html.count("<td style='text-align:right'>") == 4
    assert "5.629·10⁻⁷</td>" in html and "11,660</td>" in html and "right'>12</td>" in html
    assert "<b>" not in html and "<i>" not in html and "&lt;td&gt;d" in html and "<th>" not in html
    head, body = html.split("<tbody>")
    assert "<thead>" in head and head.count("<th style='text-align:left'>") == 4  # the corner and three columns


def test_a_figure_is_saved_in_the_runs_folder(tmp_path):
    run = Run("x", root=tmp_path)
    path = run.figure("reward", plots.curve(pd.DataFrame({"step": [0, 1], "r": [0, 1]}), "r", title="t", ylabel="r"))
    assert path == tmp_path / "x" / "figures" / "reward.png" and path.read_bytes().startswith(b"\x89PNG")


def test_the_sample_shown_is_the_latest_with_an_answer(monkeypatch):
    shell = SimpleNamespace(custom_exceptions=(), execution_count=1, set_custom_exc=lambda *_: None)
    monkeypatch.setattr("grpolab.lab.dashboard.get_ipython", lambda: shell)
    monkeypatch.setattr("grpolab.lab.dashboard.display", lambda live, display_id: SimpleNamespace(update=lambda live: None))
    live, written = Dashboard(3, ["loss"]), iter(["\\boxed{1}<|end|>", "\\boxed{8<.", "no box"])
    question = SimpleNamespace(question="What is 0 + 1?")

    async def evaluate(policy, problems, **options):
        text = next(written)
        return SimpleNamespace(texts=[(text,)], exact_rates=[float("1" in text)])

    monkeypatch.setattr("grpolab.evaluate.evaluate", evaluate)
    for now in (10.0, 100.0, 1000.0):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        asyncio.run(live.ask(None, [question]))
    html = live._repr_html_()
    assert "✓✗✗" in html and "<code>\\boxed{1}&lt;|end|&gt;</code>" in html
