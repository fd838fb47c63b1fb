"""The gate that closes every notebook: measured values beside their bounds, one table, one error naming all failures."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from grpolab.files import atomic_write
from grpolab.lab.metrics import readable


class GateError(AssertionError):
    """At least one check of a gate failed; the message names each with its measured value and its bound."""

    def _render_traceback_(self):
        """What IPython shows of it: the message. The table above it is the rest, and no line of the gate is at fault."""
        return [f"GateError: {self}"]


# What to change where a check fails and has no advice of its own.
ADVICE = {
    False: "this holds for any seed and size: look at the code that computes it",
    True: "this depends on the run: take its own parameters, more steps or questions, or look at another seed",
}


@dataclass(frozen=True)
class Check:
    """One comparison. A `claim` is not judged where the run was shortened; everything else always is."""

    name: str
    measured: float | int | str | bool
    bound: str
    passed: bool
    claim: bool = False
    judged: bool = True
    advice: str = ""

    @property
    def failed(self) -> bool:
        return self.judged and not self.passed

    @property
    def mark(self) -> str:
        return "–" if not self.judged else "✓" if self.passed else "✗"

    @property
    def shown(self) -> str:
        """The measured value; with all its digits where four would look like the bound that it misses."""
        text = readable(self.measured)
        return repr(self.measured) if self.failed and text in self.bound.split() else text


def shortened(**parts: tuple[int, int]) -> str:
    """What a run leaves out of the whole one: shortened(steps=(20, 150), questions=(1000, 1000)) is "20 of 150 steps", and
    "" where nothing is left out, as `gate` takes it."""
    return ", ".join(f"{readable(done)} of {readable(whole)} {name}" for name, (done, whole) in parts.items() if done < whole)


def quick_run(quick: bool) -> bool:
    """A notebook's parameter `quick`, or True where the environment variable GRPOLAB_QUICK is 1: so `make test` shortens the
    notebooks, whose kernels take no parameters there."""
    return quick or os.environ.get("GRPOLAB_QUICK", "0") not in ("", "0")


class gate:
    """Collect checks, then show them, write them to `results.json`, and raise GateError if any failed.

        with gate("04 grpo", run, shortened=shortened(steps=(config.steps, 150))) as g:
            g.close("KL at step 0", kl0, 0.0, atol=1e-6)
            g.claims()
            g.above("greedy gain: lower end of its interval", gain.low, 0.0, advice="-p steps 300 learns more")

    Identities hold at any size. After `g.claims()` stand the statements that only the whole run bears; where `shortened`
    says why this was not the whole run ("20 of 150 steps"; "" for a whole one) they are shown and not judged.
    A NaN passes nothing. A gate without a check that is judged fails. `place` is where results.json goes: a Run, whose
    files are then listed below the table, or a folder (default: runs/<name>). An error inside the block is recorded as a
    failure and goes on up. `advice` is the one line below a failed check (default: by its kind).
    """

    def __init__(self, name: str, place=None, *, shortened: str = ""):
        self.name, self.shortened = name, shortened
        self.run = place if hasattr(place, "made") else None
        if place is None:
            from grpolab.runs.run import runs_folder  # here, since it brings torch along

            place = runs_folder() / name.replace(" ", "_")
        self.path = Path(self.run.folder if self.run else place) / "results.json"
        self.checks: list[Check] = []
        self.values: dict = {}
        self._claims = False

    def claims(self) -> None:
        """From here on: what the whole run claims. Identities stand before."""
        self._claims = True

    def close(self, name: str, measured: float, expected: float, *, atol: float, advice: str = ""):
        """|measured - expected| <= atol."""
        bound = f"= {readable(expected)} ± {readable(atol)}"
        return self._add(name, measured, bound, abs(measured - expected) <= atol, advice)

    def equal(self, name: str, measured, expected, *, advice: str = ""):
        """measured == expected, exactly."""
        return self._add(name, measured, f"= {readable(expected)}", bool(measured == expected), advice)

    def at_least(self, name: str, measured: float, bound: float, *, advice: str = ""):
        return self._compare(name, measured, "≥", bound, operator.ge, advice)

    def at_most(self, name: str, measured: float, bound: float, *, advice: str = ""):
        return self._compare(name, measured, "≤", bound, operator.le, advice)

    def above(self, name: str, measured: float, bound: float, *, advice: str = ""):
        """Strictly greater, as a confidence interval that excludes a value."""
        return self._compare(name, measured, ">", bound, operator.gt, advice)

    def record(self, **values):
        """Values that stand in results.json beside the checks without being judged: numbers, tensors, anything with a text."""
        self.values |= values

    @property
    def failures(self) -> list[Check]:
        return [c for c in self.checks if c.failed]

    @property
    def passed(self) -> bool:
        return any(c.judged for c in self.checks) and not self.failures

    @property
    def verdict(self) -> str:
        if not self.passed:
            return "FAILED"
        return f"identities passed; claims not judged: {self.shortened}" if self.shortened else "passed"

    def _compare(self, name, measured, sign, bound, test, advice):
        return self._add(name, measured, f"{sign} {readable(bound)}", bool(test(measured, bound)), advice)

    def _add(self, name, measured, bound, passed, advice):
        measured = measured.item() if hasattr(measured, "item") else measured
        judged = not (self._claims and self.shortened)
        advice = advice or ADVICE[self._claims]
        self.checks.append(Check(name, measured, bound, bool(passed), self._claims, judged, advice))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None:
            broken = f"{kind.__name__}: {error}"
            advice = "the gate's own cell, or a cell before it that did not run"
            self.checks.append(Check("the gate itself ran", broken, "no error", False, advice=advice))
        content = {"gate": self.name, "passed": self.passed, "shortened": self.shortened}
        kept = ("name", "measured", "bound", "passed", "judged", "claim")
        checks = [_plain({k: getattr(c, k) for k in kept}) for c in self.checks]
        atomic_write(self.path, json.dumps(content | {"checks": checks, "values": _plain(self.values)}, indent=2) + "\n")
        _display(self)
        if error is None and not self.passed:
            lines = [f"  {c.name}: {c.shown}, must be {c.bound}" for c in self.failures]
            raise GateError(f"gate {self.name!r} failed\n" + "\n".join(lines or ["  it holds no checks that are judged"]))

    def _in_order(self) -> list[Check]:
        """The failed ones first."""
        return sorted(self.checks, key=lambda c: not c.failed)

    def __repr__(self):
        width = max((len(c.name) for c in self.checks), default=0)
        lines = [f"gate {self.name}: {self.verdict}"]
        for c in self._in_order():
            lines.append(f"{c.mark} {c.name:{width}}  {c.shown}  {c.bound}" + (f"\n    → {c.advice}" if c.failed else ""))
        return "\n".join(lines + ([self.run.made()] if self.run else []))

    def _repr_html_(self):
        rows = "".join(_row(c) for c in self._in_order())
        color = "#D55E00" if not self.passed else "#7F7F7F" if self.shortened else "#009E73"
        made = f"<small>{escape(self.run.made())}</small>" if self.run else ""
        return (
            f"<div style='border-left:4px solid {color};padding:2px 8px;text-align:left'><b>gate {escape(self.name)}: "
            f"{escape(self.verdict)}</b><table style='margin:0'><tr><th></th><th style='text-align:left'>check</th>"
            f"<th style='text-align:left'>measured</th><th style='text-align:left'>bound</th></tr>{rows}</table>{made}</div>"
        )


def _row(c: Check) -> str:
    """A row of the table; a failed one is coloured, with its advice in a row below."""
    shade = "background:rgba(230,110,30,.3);" if c.failed else "opacity:.6;" if not c.judged else ""
    cells = "".join(f"<td style='{shade}text-align:left'>{escape(text)}</td>" for text in (c.mark, c.name, c.shown, c.bound))
    advice = f"<tr><td></td><td colspan='3' style='text-align:left'>→ {escape(c.advice)}</td></tr>" if c.failed else ""
    return f"<tr>{cells}</tr>{advice}"


def _plain(value):
    """What JSON can hold of a value: tensors and arrays as numbers, NaN, infinity and other objects as text."""
    if hasattr(value, "tolist"):  # of torch or numpy
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    plain = value is None or isinstance(value, str | int) or isinstance(value, float) and math.isfinite(value)
    return value if plain else str(value)


def _display(shown):
    """Rich output in a notebook, plain text elsewhere."""
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(shown)
    else:
        display(shown)
