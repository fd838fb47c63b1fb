"""Numbers as people read them: four digits, thousands apart, no "e+04"."""

from __future__ import annotations

import math

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def readable(value, digits: int = 4) -> str:
    """`digits` significant digits: 0.9876, 11,660, 5.629·10⁻⁷, 10⁻⁶. What is not a number is its text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = f"{float(mantissa):g}"
        power = f"10{str(int(exponent)).translate(SUPERSCRIPT)}"
        return power if mantissa == "1" else f"{mantissa}·{power}"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
