"""The gate that closes every notebook: measured values beside their bounds, one table, one error naming all failures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from IPython import get_ipython
from IPython.display import display

from grpolab.files import atomic_write
from grpolab.lab.metrics import readable


class GateError(AssertionError):
    """At least one check of a gate failed; the message names each with its measured value and its bound."""

    def _render_traceback_(self):
        """What IPython shows of it: the message. The table above it is the rest, and no line of the gate is at fault."""
        return [f"GateError: {self}"]


IDENTITY_FAILED = "this holds for any seed and size: look at the code that computes it"
CLAIM_FAILED = "this depends on the run: keep the default parameters, take more steps or questions, or try another seed"


@dataclass(frozen=True)
class Check:
    """One comparison. A `claim` is not judged where the run was shortened; everything else always is."""

    name: str
    measured: float | int | str | bool
    bound: str
    passed: bool
    claim: bool = False
    judged: bool = True

    @property
    def failed(self) -> bool:
        return self.judged and not self.passed

    @property
    def shown(self) -> str:
        """The measured value; with all its digits where four would look like the bound that it misses."""
        text = readable(self.measured)
        return repr(self.measured) if self.failed and text in self.bound.split() else text

    def line(self, width: int) -> str:
        """The check as a line whose name takes so many characters; below a failed one, what to change."""
        mark = "–" if not self.judged else "✓" if self.passed else "✗"
        advice = f"\n    → {CLAIM_FAILED if self.claim else IDENTITY_FAILED}" if self.failed else ""
        return f"{mark} {self.name:{width}}  {self.shown}  {self.bound}{advice}"


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
            g.above("greedy gain: lower end of its interval", gain.low, 0.0)

    Identities hold at any size. After `g.claims()` stand the statements that only the whole run bears; where `shortened`
    says why this was not the whole run ("20 of 150 steps"; "" for a whole one) they are shown and not judged.
    A NaN passes nothing. A gate without a check that is judged fails. `place` is where results.json goes: a Run, whose
    files are then listed below the table, or a folder (default: runs/<name>). An error inside the block is recorded as a
    failure and goes on up.
    """

    def __init__(self, name: str, place=None, *, shortened: str = ""):
        self.name, self.shortened = name, shortened
        self.run = place if hasattr(place, "made") else None
        self.path = Path(self.run.folder if self.run else place or Path("runs", name.replace(" ", "_"))) / "results.json"
        self.checks: list[Check] = []
        self.values: dict = {}
        self._claims = False

    def claims(self) -> None:
        """From here on: what the whole run claims. Identities stand before."""
        self._claims = True

    def close(self, name: str, measured: float, expected: float, *, atol: float) -> None:
        """|measured - expected| <= atol."""
        self._add(name, measured, f"= {readable(expected)} ± {readable(atol)}", abs(measured - expected) <= atol)

    def equal(self, name: str, measured, expected) -> None:
        """measured == expected, exactly."""
        self._add(name, measured, f"= {readable(expected)}", measured == expected)

    def at_least(self, name: str, measured: float, bound: float) -> None:
        self._add(name, measured, f"≥ {readable(bound)}", measured >= bound)

    def at_most(self, name: str, measured: float, bound: float) -> None:
        self._add(name, measured, f"≤ {readable(bound)}", measured <= bound)

    def above(self, name: str, measured: float, bound: float) -> None:
        """Strictly greater, as a confidence interval that excludes a value."""
        self._add(name, measured, f"> {readable(bound)}", measured > bound)

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

    def _add(self, name, measured, bound, passed) -> None:
        measured = measured.item() if hasattr(measured, "item") else measured
        self.checks.append(Check(name, measured, bound, bool(passed), self._claims, not (self._claims and self.shortened)))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None:
            self.checks.append(Check("the gate itself ran", f"{kind.__name__}: {error}", "no error", False))
        content = {"gate": self.name, "passed": self.passed, "shortened": self.shortened}
        content |= {"checks": _plain([asdict(c) for c in self.checks]), "values": _plain(self.values)}
        atomic_write(self.path, json.dumps(content, indent=2) + "\n")
        display(self) if get_ipython() else print(self)
        if error is None and not self.passed:
            lines = [f"  {c.name}: {c.shown}, must be {c.bound}" for c in self.failures]
            raise GateError(f"gate {self.name!r} failed\n" + "\n".join(lines or ["  it holds no checks that are judged"]))

    def __repr__(self):
        width = max((len(c.name) for c in self.checks), default=0)
        lines = [c.line(width) for c in sorted(self.checks, key=lambda c: not c.failed)]  # the failed ones first
        return "\n".join([f"gate {self.name}: {self.verdict}", *lines, *([self.run.made()] if self.run else [])])

    def _repr_html_(self):
        """A line to unfold; unfolded where the gate failed."""
        color = "#D55E00" if not self.passed else "#7F7F7F" if self.shortened else "#009E73"
        verdict, _, lines = escape(repr(self)).partition("\n")
        opened = "" if self.passed else " open"
        return (f"<details{opened} style='border-left:4px solid {color};padding:2px 8px'><summary>{verdict} "
                f"(facts: {len(self.checks)})</summary><pre style='font-family:monospace'>\n{lines}</pre></details>")


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
