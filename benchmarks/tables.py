"""What the tables of the results share: a record that may be missing, a table, how a rate, a difference and a ratio read."""

from __future__ import annotations

import json
import re
from pathlib import Path


def record(name: str, results: Path):
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def rate(interval: str) -> str:
    """The value of "45.4% [42.3%, 48.5%]" without its interval."""
    return interval.split(" ")[0]


def share(interval: str) -> str:
    """"99.5% [98.5%, 100.5%]", a normal interval of older records, cut where a share cannot be."""
    value, low, high = (float(x) for x in re.findall(r"-?[0-9.]+(?=%)", interval))
    return f"{value:.1f}% [{max(0.0, low):.1f}%, {min(high, 100.0):.1f}%]"


def points(difference: str) -> str:
    """"31.7% [28.7%, 34.7%]", a difference of rates, in percentage points."""
    return difference.replace("%", "") + " points"


def times(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{low}×" if low == high else f"{low} to {high}×"
