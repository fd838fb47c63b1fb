"""Live progress in a notebook: one display that is redrawn at most once a second and keeps its last state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from grpolab.lab.plots import POLICY
from grpolab.lab.tokens import tokens_html as tokens_html  # the notebooks' old address


class Dashboard:
    """A progress bar, the time left, and for each of `columns` its latest value and a sparkline.

        live = Dashboard(config.steps, ["reward", "kl"])
        async for row in grpo(...): live.update(row)

    Outside a notebook it prints a line every tenth of the way.
    """

    def __init__(self, steps: int, columns: Sequence[str], title: str = ""):
        from IPython import get_ipython
        from IPython.display import display

        self.steps, self.columns, self.title = steps, tuple(columns), title
        self.rows: list[dict] = []
        self._began = self._drawn = time.monotonic()
        self._handle = display(self, display_id=True) if get_ipython() is not None else None

    def update(self, row: dict) -> None:
        """Take one row of metrics, which holds `step`."""
        self.rows.append(row)
        last = row["step"] + 1 >= self.steps
        if self._handle is not None:
            if last or time.monotonic() - self._drawn > 1:
                self._drawn = time.monotonic()
                self._handle.update(self)
        elif last or len(self.rows) % max(1, self.steps // 10) == 0:
            print(self)

    def _progress(self) -> tuple[int, str]:
        done = self.rows[-1]["step"] + 1 if self.rows else 0
        elapsed = time.monotonic() - self._began
        left = elapsed / max(1, len(self.rows)) * (self.steps - done)
        return done, f"{elapsed:.0f} s" + (f", about {left:.0f} s left" if 0 < done < self.steps else "")

    def __str__(self):
        done, clock = self._progress()
        values = "  ".join(f"{c} {self.rows[-1][c]:.4g}" for c in self.columns if self.rows and c in self.rows[-1])
        return f"{self.title} {done}/{self.steps} ({clock})  {values}".strip()

    def _repr_html_(self):
        done, clock = self._progress()
        cells = "".join(self._cell(c) for c in self.columns)
        return (
            f"<div><b>{escape(self.title)}</b> <progress value='{done}' max='{self.steps}'></progress> "
            f"{done}/{self.steps}, {clock}<table><tr>{cells}</tr></table></div>"
        )

    def _cell(self, column: str) -> str:
        values = [r[column] for r in self.rows if r.get(column) is not None and r[column] == r[column]]
        latest = f"{values[-1]:.4g}" if values else "–"
        return f"<td style='text-align:left'>{escape(column)}<br><b>{latest}</b><br>{sparkline(values)}</td>"


def sparkline(values: Sequence[float], width: int = 120, height: int = 28) -> str:
    """A small SVG line through at most 120 of the values."""
    values = list(values)[:: max(1, len(values) // 120)]
    if len(values) < 2:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    points = " ".join(
        f"{i * width / (len(values) - 1):.1f},{height - 2 - (v - low) / span * (height - 4):.1f}" for i, v in enumerate(values)
    )
    line = f"<polyline points='{points}' fill='none' stroke='{POLICY}' stroke-width='1.5'/>"
    return f"<svg width='{width}' height='{height}'>{line}</svg>"
