"""Live progress: one display in a notebook that is redrawn at most once a second and keeps its last state, tqdm elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape

from IPython import get_ipython
from IPython.display import display
from tqdm import tqdm

from grpolab.checker import parse_boxed_answer
from grpolab.lab.diagnose import diagnose
from grpolab.lab.interrupts import quiet_interrupts
from grpolab.lab.metrics import METRICS, Metric, readable, short
from grpolab.lab.plots import WARNING
from grpolab.lab.tokens import tokens_html as tokens_html  # notebook 08 imports it from here
from grpolab.runs.selection import PREFIX

CELL = "style='text-align:left;vertical-align:middle'"


class Dashboard:
    """A progress bar, the time left, and for each of `columns` its latest value, a sparkline, its healthy range and meaning.

        live = Dashboard(config.steps, ["reward", "kl"], "GRPO", run=run)
        async for row in grpo(..., run=run):
            live.update(row)
            await live.ask(policy, held_out[:3])

    A value outside its range in `METRICS` is coloured; `meanings` describes columns of your own. Below them stands what is
    wrong with the run (`diagnose`), with the remedy to try. With the `run` that the loop writes to, the rows before an
    interrupt are shown, too, and an interrupt says where a rerun of the cell goes on. Without columns it is the bar alone, and
    what is wrong. Outside a notebook it is a bar of tqdm, and asks nothing.
    """

    def __init__(self, steps: int, columns: Sequence[str], title: str = "", *, run=None,
                 meanings: Mapping[str, str] | None = None):
        self.steps, self.columns, self.title, self.run = steps, tuple(columns), title, run
        measured = Metric("evaluated during training, every so many steps (`Selection`)")
        self.metrics = {c: METRICS.get(c, measured if c.startswith(PREFIX) else Metric("")) for c in columns}
        self.metrics |= {c: self.metrics[c]._replace(meaning=text) for c, text in (meanings or {}).items() if c in columns}
        self.rows: list[dict] = []
        self._earlier = 0  # rows of the run before an interrupt
        self.interrupted = False
        self.asked: dict[str, tuple[str, str]] = {}  # question -> (marks so far, latest completion)
        self._began = self._drawn = time.monotonic()
        self._ask_after, self._asks = 0.0, 0
        self._shell = get_ipython()
        if self._shell is None:
            self._bar = tqdm(total=steps, desc=title)
        else:
            self._handle = display(self, display_id=True)
            quiet_interrupts(self._shell, self)

    def update(self, row: dict) -> None:
        """Take one row of metrics, which holds `step`."""
        if not self.rows and self.run is not None:
            self.rows = [r for r in self.run.metrics if r["step"] < row["step"]]
            self._earlier = len(self.rows)
        self.rows.append(row)
        if self._shell is None:
            self._bar.set_postfix_str(self._values(), refresh=False)
            self._bar.update(self.done - self._bar.n)
            if self.done >= self.steps:
                self._bar.close()
        else:
            quiet_interrupts(self._shell, self)
            if self.done >= self.steps or time.monotonic() - self._drawn > 1:
                self._draw()

    async def ask(self, policy, problems: Sequence, *, max_new_tokens: int = 32) -> None:
        """Ask `problems` afresh (one completion each, at temperature 1) and show the checker's ✓ or ✗ after the earlier
        marks, and the latest completion with an answer that can be read. At most once a second and a tenth of the time; the
        training stays what it is without it."""
        now = time.monotonic()
        if self._shell is None or (now < self._ask_after and self.done < self.steps):
            return
        from grpolab.evaluate import evaluate  # here, since it brings torch along

        self._asks += 1
        answers = await evaluate(policy, problems, samples=1, seed=self._asks, max_new_tokens=max_new_tokens)
        for problem, (text,), right in zip(problems, answers.texts, answers.exact_rates):
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
        reached = max(self.done, self.run.checkpointed())
        again = f"goes on from {reached}" if reached else "starts over"
        return f"stopped at {self.done} of {self.steps}; a rerun of this cell {again}"

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._handle.update(self)

    def _progress(self) -> str:
        """Steps, the time that they took, and the time left."""
        elapsed = time.monotonic() - self._began
        remaining = elapsed / max(1, len(self.rows) - self._earlier) * (self.steps - self.done)
        state = ", interrupted" if self.interrupted else f", about {remaining:.0f} s left" if 0 < self.done < self.steps else ""
        return f"{self.done}/{self.steps}, {elapsed:.0f} s{state}"

    def _values(self) -> str:
        return "  ".join(f"{c} {readable(self.rows[-1][c])}" for c in self.columns if self.rows and c in self.rows[-1])

    def __repr__(self):
        findings = "".join(f"  ⚠ {finding.illness}" for finding in diagnose(self.rows))
        return f"{self.title} {self._progress()}  {self._values()}{findings}".strip()

    def _repr_html_(self):
        rows = "".join(self._row(c) for c in self.columns)
        findings = "".join(f"<div style='color:{WARNING}'>⚠ {escape(str(finding))}</div>" for finding in diagnose(self.rows))
        asked = "".join(
            f"<tr><td {CELL}>{escape(question)}</td><td {CELL}>{marks[-20:]}</td><td {CELL}><code>{escape(short(text))}</code>"
            "</td></tr>" for question, (marks, text) in self.asked.items()
        )
        return (
            f"<div style='text-align:left'><b>{escape(self.title)}</b> <progress value='{self.done}' max='{self.steps}'>"
            f"</progress> {self._progress()}<table style='margin:0'>{rows}</table>{findings}"
            f"<table style='margin:0'>{asked}</table></div>"
        )

    def _row(self, column: str) -> str:
        values = [r[column] for r in self.rows if r.get(column) is not None and r[column] == r[column]]
        metric, latest = self.metrics[column], readable(values[-1]) if values else "–"
        if values and metric.strays(values[-1]):
            latest = f"<span style='color:{WARNING}'>{latest} ⚠</span>"
        bars = sparkline([v for v in values if math.isfinite(v)])
        meaning = f"{metric.meaning}; usually {metric.range}" if metric.range else metric.meaning
        cells = (escape(column), f"<b>{latest}</b>", bars, f"<small>{escape(meaning)}</small>")
        return "<tr>" + "".join(f"<td {CELL}>{cell}</td>" for cell in cells) + "</tr>"


def sparkline(values: Sequence[float]) -> str:
    """A line of bars as high as the last 40 values, each the mean of as many as it takes."""
    size = -(-len(values) // 40)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size or 1)]
    low, span = min(means, default=0.0), (max(means, default=0.0) - min(means, default=0.0)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (mean - low) / span)] for mean in means)
