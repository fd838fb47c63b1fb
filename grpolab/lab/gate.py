"""The gate that closes every notebook: measured values beside their bounds, one table, one error naming all failures."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from grpolab.files import atomic_write


class GateError(AssertionError):
    """At least one check of a gate failed; the message names each with its measured value and its bound."""

@dataclass(frozen=True)
class Check:
    name: str
    measured: float | int | str | bool
    bound: str
    passed: bool


class gate:
    """Collect checks, then show them, write them to `results.json`, and raise GateError if any failed.

        with gate("04 grpo") as g:
            g.close("KL at step 0", kl0, 0.0, atol=1e-6)

    A NaN passes nothing. A gate without checks fails. `folder` is where results.json goes: the run's folder, or by
    default runs/<name>. An error inside the block is recorded as a failure and goes on up.
    """

    def __init__(self, name: str, folder: str | Path | None = None):
        self.name = name
        if folder is None:
            from grpolab.lab.run import runs_folder  # here, since it brings torch along

            folder = runs_folder() / name.replace(" ", "_")
        self.path = Path(folder) / "results.json"
        self.checks: list[Check] = []
        self.values: dict = {}

    def close(self, name: str, measured: float, expected: float, *, atol: float):
        """|measured - expected| <= atol."""
        return self._add(name, measured, f"= {_show(expected)} ± {_show(atol)}", abs(measured - expected) <= atol)

    def equal(self, name: str, measured, expected):
        """measured == expected, exactly."""
        return self._add(name, measured, f"= {_show(expected)}", bool(measured == expected))

    def at_least(self, name: str, measured: float, bound: float):
        return self._compare(name, measured, "≥", bound, operator.ge)

    def at_most(self, name: str, measured: float, bound: float):
        return self._compare(name, measured, "≤", bound, operator.le)

    def above(self, name: str, measured: float, bound: float):
        """Strictly greater, as a confidence interval that excludes a value."""
        return self._compare(name, measured, ">", bound, operator.gt)

    def record(self, **values):
        """Numbers that stand in results.json beside the checks without being judged."""
        self.values |= values

    @property
    def failures(self) -> list[Check]:
        return [c for c in self.checks if not c.passed]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and not self.failures

    def _compare(self, name, measured, sign, bound, test):
        return self._add(name, measured, f"{sign} {_show(bound)}", bool(test(measured, bound)))

    def _add(self, name, measured, bound, passed):
        measured = measured.item() if hasattr(measured, "item") else measured
        self.checks.append(Check(name, measured, bound, bool(passed)))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None:
            self.checks.append(Check("the gate itself ran", f"{kind.__name__}: {error}", "no error", False))
        content = {"gate": self.name, "passed": self.passed, "checks": [_plain(asdict(c)) for c in self.checks]}
        atomic_write(self.path, json.dumps(content | {"values": _plain(self.values)}, indent=2) + "\n")
        _display(self)
        if error is None and not self.passed:
            lines = [f"  {c.name}: {_show(c.measured)}, must be {c.bound}" for c in self.failures]
            raise GateError(f"gate {self.name!r} failed\n" + "\n".join(lines or ["  it holds no checks"]))

    def __str__(self):
        width = max((len(c.name) for c in self.checks), default=0)
        lines = [f"{'✓' if c.passed else '✗'} {c.name:{width}}  {_show(c.measured)}  {c.bound}" for c in self.checks]
        return "\n".join([f"gate {self.name}: {'passed' if self.passed else 'FAILED'}", *lines])

    def _repr_html_(self):
        rows = "".join(
            f"<tr><td>{'✓' if c.passed else '<b>✗</b>'}</td><td style='text-align:left'>{escape(c.name)}</td>"
            f"<td>{escape(_show(c.measured))}</td><td style='text-align:left'>{escape(c.bound)}</td></tr>"
            for c in self.checks
        )
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"<b>gate {escape(self.name)}: {verdict}</b><table><tr><th></th><th style='text-align:left'>check</th>"
            f"<th>measured</th><th style='text-align:left'>bound</th></tr>{rows}</table>"
        )


def _show(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value):
    """JSON has no NaN and no infinity: they are written as text."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _display(shown):
    """Rich output in a notebook, plain text elsewhere."""
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(shown)
    else:
        display(shown)
