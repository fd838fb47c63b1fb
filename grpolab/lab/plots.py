"""One function a figure, one palette. Each draws into the given Axes, or into new ones, and returns them; none saves a file.

Colour is meaning: policy blue, reference and base grey, reward green, KL and warnings vermillion, chosen blue against rejected
orange (Okabe and Ito's palette, which colour-blind readers can tell apart), held-out values black dots. What has no meaning of
its own takes the next colour of PALETTE.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import BytesIO
from itertools import cycle

import matplotlib.pyplot as plt
import pandas as pd
from IPython import get_ipython
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation
from PIL import Image  # matplotlib brings it

from grpolab.files import DPI, png
from grpolab.lab.interrupts import quiet_interrupts
from grpolab.lab.metrics import readable

POLICY, REFERENCE, REWARD, WARNING = "#0072B2", "#7F7F7F", "#009E73", "#D55E00"
CHOSEN, REJECTED, HELD_OUT, SKY, PURPLE = "#0072B2", "#E69F00", "#000000", "#56B4E9", "#CC79A7"

PALETTE = (POLICY, WARNING, REWARD, PURPLE, SKY, REJECTED)

SHARPNESS = 1.5  # of a figure in a notebook, whose file shall stay small: pixels of the image a pixel of the page

STYLE = {
    "figure.figsize": (6.4, 3.2), "figure.dpi": DPI, "figure.constrained_layout.use": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3,
    "axes.titlelocation": "left", "axes.titlesize": 11, "axes.labelsize": 10, "font.size": 10, "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def use_style() -> None:
    """Apply the package's style to the figures that follow. A notebook then shows figures at 1.5 times their resolution,
    tables with rounded numbers, and an interrupt as one line."""
    plt.rcParams.update(STYLE)
    shell = get_ipython()
    if getattr(shell, "kernel", None):
        plt.close(plt.figure())  # at its first use the inline backend puts in a formatter of its own
        shell.display_formatter.formatters["image/png"].for_type(Figure, _for_notebook)
        shell.display_formatter.formatters["text/html"].for_type(pd.DataFrame, table)
        quiet_interrupts(shell)


def table(frame: pd.DataFrame) -> str:
    """A DataFrame as HTML: text at the left, numbers at the right and as `readable` writes them, everything escaped. Jupyter
    would put everything at the right and show six digits."""
    sides = cycle("right" if pd.api.types.is_numeric_dtype(kind) else "left" for kind in frame.dtypes)
    html = frame.to_html(border=0, float_format=readable, max_rows=pd.get_option("display.max_rows"))
    html = re.sub("<td>", lambda _: f"<td style='text-align:{next(sides)}'>", html)
    return re.sub("<th(?=[ >])", "<th style='text-align:left'", html)


def _for_notebook(figure: Figure) -> tuple[bytes, dict]:
    image = png(figure, SHARPNESS)
    width, height = Image.open(BytesIO(image)).size
    return image, {"width": round(width / SHARPNESS), "height": round(height / SHARPNESS)}


def _axes(ax):
    return ax if ax is not None else plt.subplots()[1]


def _below(ax, columns: int, points: float = 34) -> None:
    """The legend so many points under the axes, however high they are."""
    place = ax.transAxes + ScaledTranslation(0, -points / 72, ax.figure.dpi_scale_trans)
    ax.legend(ncols=columns, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=place)


def curve(metrics: pd.DataFrame, column: str, *, title: str, ylabel: str, color=POLICY, window: int = 1, legend=None, ax=None):
    """One metric over steps: the values faint, the mean of the `window` steps around each solid (fewer at both ends)."""
    ax = _axes(ax)
    x, y = metrics["step"], metrics[column]
    if window > 1:
        ax.plot(x, y, color=color, alpha=0.25, linewidth=1)
        y = running_mean(y, window)
    ax.plot(x, y, color=color, label=legend)
    ax.set(title=title, xlabel="step" + (f" (mean of the {window} around it)" if window > 1 else ""), ylabel=ylabel)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def running_mean(values, window: int):
    """The mean of the `window` values around each, fewer at both ends: it turns where the values turn, not later."""
    return values.rolling(window, min_periods=1, center=True).mean()


def curves(runs: dict[str, pd.DataFrame], column: str, *, title: str, ylabel: str, window: int = 1, ax=None):
    """One metric over steps for several runs, in the colours of PALETTE; the legend is under the axes."""
    ax = _axes(ax)
    for (name, metrics), color in zip(runs.items(), cycle(PALETTE)):
        curve(metrics, column, title=title, ylabel=ylabel, color=color, window=window, legend=name, ax=ax)
    _below(ax, len(runs))
    return ax


def held_out(points: Sequence[tuple[int, object]], ax, label: str = "held-out", color: str = HELD_OUT) -> None:
    """Evaluations as dots with their 95 % intervals: (step, Interval) pairs."""
    steps = [s for s, _ in points]
    values = [i.value for _, i in points]
    errors = [[i.value - i.low for _, i in points], [i.high - i.value for _, i in points]]
    ax.errorbar(steps, values, yerr=errors, fmt="o", color=color, markersize=5, capsize=3, zorder=5, label=label)


def levels(values: dict[str, float], ax, *, outside: bool = False) -> None:
    """What a curve is compared with, as dashed lines across it: values[name] = height, the name written on the line, or
    `outside`, at the right of the axes, where bars would cover it."""
    place = {"xytext": (4, 0), "ha": "left", "va": "center"} if outside else {"xytext": (-2, 2), "ha": "right", "va": "bottom"}
    for name, height in values.items():
        ax.axhline(height, color=REFERENCE, linestyle="--", linewidth=1.2, zorder=1)
        ax.annotate(f"{name} {height:.0%}", (1.0, height), xycoords=("axes fraction", "data"),
                    textcoords="offset points", color=REFERENCE, fontsize=9, **place)


def group_health(metrics: pd.DataFrame, *, title: str, ax=None):
    """Share of groups all wrong, mixed and all right over steps: only the mixed have a gradient from the reward."""
    ax = _axes(ax)
    shares = [metrics["all_wrong"], metrics["mixed"], metrics["all_right"]]
    names = ("all wrong", "mixed", "all right")
    ax.stackplot(metrics["step"], shares, colors=[REFERENCE, SKY, REWARD], alpha=0.85, labels=names)
    ax.set(title=title, xlabel="step", ylabel="share of groups", ylim=(0, 1))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.margins(x=0)
    _below(ax, 3)
    return ax


def rates(table: dict[str, dict[str, object]], *, title: str, xlabel="", ylabel="rate", colors=None, ax=None):
    """Grouped bars with 95 % intervals: table[series][category] = Interval. Narrow bars have shorter labels."""
    ax = _axes(ax)
    categories = list(next(iter(table.values())))
    width = 0.8 / len(table)
    room = width / len(categories) * 0.85 * ax.figure.get_figwidth() * 72  # points that a bar has for its label
    written, size = ("{:.1%}", 9) if room > 32 else ("{:.0%}", 8)
    colors = dict(zip(table, cycle((REFERENCE, *PALETTE)))) | (colors or {})
    for k, (series, values) in enumerate(table.items()):
        x = [i + (k - (len(table) - 1) / 2) * width for i in range(len(categories))]
        bars = [values[c] for c in categories]
        y = [bar.value for bar in bars]
        errors = [[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]]
        ax.bar(x, y, width * 0.92, color=colors[series], yerr=errors, capsize=3, label=series, ecolor="#333333")
        for xi, yi, up in zip(x, y, errors[1]):
            label = written.format(yi) if yi >= 0.005 or yi == 0 else f"{yi:.1%}"  # what is not 0 does not read as 0
            ax.annotate(label, (xi, yi + up), xytext=(0, 4), textcoords="offset points", ha="center",
                        fontsize=size, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4})
    ax.set_xticks(range(len(categories)), categories)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.12))
    if len(table) > 1:
        _below(ax, len(table), 34 if xlabel else 18)
    return ax


PHASES = {"reset": PURPLE, "step": SKY, "generate": POLICY}  # others are grey


def timeline(spans: Sequence, *, title: str, ax=None):
    """A pool's trace: one row a session, one bar a phase (`Span` objects), seconds since the first; failed ones outlined."""
    ax = _axes(ax)
    zero = min(s.start for s in spans)
    for phase in dict.fromkeys(s.phase for s in spans):
        bars = [s for s in spans if s.phase == phase]
        ax.barh([s.session for s in bars], [s.end - s.start for s in bars], left=[s.start - zero for s in bars], height=0.72,
                color=PHASES.get(phase, REFERENCE), label=phase, linewidth=[2.0 if s.error else 0.4 for s in bars],
                edgecolor=[WARNING if s.error else "white" for s in bars])
    ax.set(title=title, xlabel="seconds", ylabel="session", yticks=sorted({s.session for s in spans}))
    ax.invert_yaxis()
    ax.grid(False)
    _below(ax, 4)
    return ax


def stacked(bars: dict[str, dict[str, float]], *, title: str, xlabel: str, colors: dict[str, str], ax=None):
    """Horizontal stacked bars: bars[name][part] = value, each part in its colour and labelled with its value."""
    ax = pd.DataFrame(bars).T.plot.barh(stacked=True, color=colors, width=0.8, ax=_axes(ax))
    for part in ax.containers:
        ax.bar_label(part, fmt=lambda value: f"{value:.3g}" if value else "", label_type="center", color="white", fontsize=9)
    ax.set(title=title, xlabel=xlabel)
    ax.grid(False)
    _below(ax, len(colors))
    return ax


def two_sides(metrics: pd.DataFrame, points: pd.DataFrame, *, title: str, ylabel: str, window: int = 10, ax=None):
    """`logps_chosen` and `logps_rejected` over steps, and those of held-out pairs as dots (`points` has the same columns)."""
    ax = _axes(ax)
    for side, color in (("chosen", CHOSEN), ("rejected", REJECTED)):
        curve(metrics, f"logps_{side}", title=title, ylabel=ylabel, color=color, window=window, legend=side, ax=ax)
        ax.plot(points["step"], points[f"logps_{side}"], "o", color=color, markeredgecolor=HELD_OUT, markersize=6, zorder=5)
    _below(ax, 2)
    return ax
