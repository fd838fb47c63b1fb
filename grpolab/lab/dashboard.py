"""Live progress in a notebook: one display that is redrawn at most once a second and keeps its last state."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape

from grpolab.checker import parse_boxed_answer
from grpolab.lab.diagnose import diagnose
from grpolab.lab.interrupts import in_progress, report_interrupts
from grpolab.lab.metrics import MEASURED, METRICS, UNKNOWN, readable, short
from grpolab.lab.plots import POLICY, WARNING
from grpolab.lab.tokens import tokens_html as tokens_html  # the notebooks' old address
from grpolab.runs.selection import PREFIX

LONG = 4.0  # seconds without a row after which the display says how long the step takes
CELL = "style='text-align:left;vertical-align:middle'"


class Dashboard:
    """A progress bar, the time left, and for each of `columns` its latest value, a sparkline, its healthy range and meaning.

        live = Dashboard(config.steps, ["reward", "kl"], "GRPO", run=run)
        async for row in grpo(..., run=run):
            live.update(row)
            await live.ask(policy, held_out[:3])

    A value outside its range in `METRICS` is coloured; `meanings` says in a line what a column of your own is. An interrupt of
    the cell is marked here and reported in one line; the `run` that the loop writes to gives its earlier rows, and where a
    rerun goes on. What ails the run (`diagnose`) stands below, with the remedy to try. While no row comes for some seconds, as
    during an evaluation, it says how long the step takes.
    Outside a notebook it prints a line every tenth of the way, and asks nothing.
    """

    def __init__(self, steps: int, columns: Sequence[str], title: str = "", *, run=None,
                 meanings: Mapping[str, str] | None = None):
        from IPython import get_ipython
        from IPython.display import display

        self.steps, self.columns, self.title, self.run = steps, tuple(columns), title, run
        known = {c: METRICS.get(c, MEASURED if c.startswith(PREFIX) else UNKNOWN) for c in columns}
        self.metrics = {c: metric._replace(meaning=(meanings or {}).get(c, metric.meaning)) for c, metric in known.items()}
        self.rows: list[dict] = []
        self._earlier = 0  # rows of the run before an interrupt
        self.interrupted = False
        self.asked: dict[str, tuple[str, str]] = {}  # question -> (marks so far, latest completion)
        self._began = self._drawn = self._seen = time.monotonic()
        self._ask_after, self._asks = 0.0, 0
        self._waits = False  # whether a later redraw is scheduled
        self._shell = get_ipython()
        self._handle = None  # while it is drawn for the first time
        self._handle = display(self, display_id=True) if self._shell is not None else None
        report_interrupts(self)

    def update(self, row: dict) -> None:
        """Take one row of metrics, which holds `step`."""
        if not self.rows and self.run is not None:
            self.rows = [r for r in self.run.metrics if r["step"] < row["step"]]
            self._earlier = len(self.rows)
        self.rows.append(row)
        self._seen = time.monotonic()
        report_interrupts(self)
        self._redraw_later()
        if self._handle is not None:
            if self.done >= self.steps or self._seen - self._drawn > 1:
                self._draw()
        elif self.done >= self.steps or len(self.rows) % max(1, self.steps // 10) == 0:
            print(self)

    async def ask(self, policy, problems: Sequence, *, max_new_tokens: int = 32) -> None:
        """Ask `problems` afresh (one completion each, at temperature 1) and show the checker's ✓ or ✗ after the earlier
        marks, and the latest completion with an answer that can be read. At most once a second and a tenth of the time; the
        training stays what it is without it."""
        now = time.monotonic()
        if self._handle is None or (now < self._ask_after and self.done < self.steps):
            return
        from grpolab.evaluate import evaluate  # here, since it brings torch along

        self._asks += 1
        found = await evaluate(policy, problems, samples=1, seed=self._asks, max_new_tokens=max_new_tokens)
        for problem, (text,), right in zip(problems, found.texts, found.exact_rates):
            marks, shown = self.asked.get(problem.question, ("", ""))
            readable_answer = parse_boxed_answer(text) is not None or parse_boxed_answer(shown) is None
            self.asked[problem.question] = (marks + "✗✓"[int(right)], text if readable_answer else shown)
        took = time.monotonic() - now
        self._ask_after = now + max(1.0, 10 * took)
        self._draw()

    @property
    def done(self) -> int:
        """Steps done, those of the run before an interrupt included."""
        return self.rows[-1]["step"] + 1 if self.rows else 0

    def stopped(self) -> str:
        """Mark the display as interrupted; the line that says so."""
        self.interrupted = True
        self._draw()
        if self.run is None:
            return f"stopped at {self.done} of {self.steps}"
        kept = max(self.done, self.run.checkpointed())
        again = f"goes on from {kept}" if kept else "starts over"
        return f"stopped at {self.done} of {self.steps}; a rerun of this cell {again}"

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(self)

    def _redraw_later(self) -> None:
        """Redraw while no row comes, as during an evaluation of a minute, until the cell or the run ends."""
        if self._handle is None or self._waits or not self.running:
            return

        def redraw():
            self._waits = False
            if in_progress(self):
                if time.monotonic() - self._seen > LONG:
                    self._draw()
                self._redraw_later()

        with suppress(RuntimeError):  # a cell without an event loop shows its rows only
            asyncio.get_running_loop().call_later(LONG / 2, redraw)
            self._waits = True

    @property
    def running(self) -> bool:
        return 0 < self.done < self.steps and not self.interrupted

    def _clock(self) -> str:
        elapsed = self._seen - self._began
        left = elapsed / max(1, len(self.rows) - self._earlier) * (self.steps - self.done)
        waited = time.monotonic() - self._seen
        late = f", step {self.done} in progress for {waited:.0f} s" if self._handle is not None and waited > LONG else ""
        return f"{elapsed:.0f} s" + (f", about {left:.0f} s left{late}" if self.running else "")

    def __repr__(self):
        values = "  ".join(f"{c} {readable(self.rows[-1][c])}" for c in self.columns if self.rows and c in self.rows[-1])
        ill = "".join(f"  ⚠ {finding.illness}" for finding in diagnose(self.rows))
        state = f"({self._clock()}{', interrupted' * self.interrupted})"
        return f"{self.title} {self.done}/{self.steps} {state}  {values}{ill}".strip()

    def _repr_html_(self):
        rows = "".join(self._row(c) for c in self.columns)
        state = f", <b style='color:{WARNING}'>interrupted</b>" if self.interrupted else ""
        findings = "".join(f"<div style='color:{WARNING}'>⚠ {escape(str(finding))}</div>" for finding in diagnose(self.rows))
        asked = "".join(
            f"<tr><td {CELL}>{escape(question)}</td><td {CELL}>{marks[-20:]}</td><td {CELL}><code>{escape(short(text))}</code>"
            "</td></tr>" for question, (marks, text) in self.asked.items()
        )
        return (
            f"<div style='text-align:left'><b>{escape(self.title)}</b> <progress value='{self.done}' max='{self.steps}'>"
            f"</progress> {self.done}/{self.steps}, {self._clock()}{state}<table style='margin:0'>{rows}</table>{findings}"
            f"<table style='margin:0'>{asked}</table></div>"
        )

    def _row(self, column: str) -> str:
        values = [r[column] for r in self.rows if r.get(column) is not None and r[column] == r[column]]
        metric, latest = self.metrics[column], readable(values[-1]) if values else "–"
        if values and metric.strays(values[-1]):
            latest = f"<span style='color:{WARNING}'>{latest} ⚠</span>"
        meaning = f"{metric.meaning}; usually {metric.range}" if metric.range else metric.meaning
        cells = (escape(column), f"<b>{latest}</b>", sparkline(values), f"<small>{escape(meaning)}</small>")
        return "<tr>" + "".join(f"<td {CELL}>{cell}</td>" for cell in cells) + "</tr>"


def sparkline(values: Sequence[float], width: int = 120, height: int = 28) -> str:
    """A small line through at most 120 of the values, as an image: Jupyter strips SVG from a notebook that it does not
    trust, and keeps images."""
    values = list(values)[:: max(1, len(values) // 120)]
    if len(values) < 2:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    points = " ".join(
        f"{i * width / (len(values) - 1):.1f},{height - 2 - (v - low) / span * (height - 4):.1f}" for i, v in enumerate(values)
    )
    line = f"<polyline points='{points}' fill='none' stroke='{POLICY}' stroke-width='1.5'/>"
    image = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}'>{line}</svg>"
    data = base64.b64encode(image.encode()).decode()
    return f"<img width='{width}' height='{height}' alt='' src='data:image/svg+xml;base64,{data}'>"
