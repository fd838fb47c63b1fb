"""The parity of bits: a task that cannot be guessed and that is easy step by step, with demonstrations of both kinds.

`1011?` -> short `\\boxed{1}`, or long `ooeo \\boxed{1}`: after each bit whether the ones so far are
odd or even. After the mixtures of arXiv 2510.11495.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Parity:
    """A question with its one right answer; `bits` is a text of 0s and 1s."""

    bits: str

    def __post_init__(self):
        if not self.bits or set(self.bits) - {"0", "1"}:
            raise ValueError(f"bits={self.bits!r:.60}: write at least one 0 or 1, and nothing else")

    @property
    def question(self) -> str:
        return f"{self.bits}?"

    @property
    def answer(self) -> int:
        """1 where the number of ones is odd, else 0."""
        return self.bits.count("1") % 2

    @property
    def short(self) -> str:
        """The answer at once."""
        return f"\\boxed{{{self.answer}}}"

    @property
    def long(self) -> str:
        """After each bit o or e, whether the ones so far are odd or even; then the answer."""
        running = accumulate((int(b) for b in self.bits), lambda odd, bit: odd ^ bit)
        return "".join("eo"[odd] for odd in running) + " " + self.short


def generate_parity(n_train: int, n_eval: int, *, bits: int, seed: int) -> tuple[list[Parity], list[Parity]]:
    """Distinct questions of `bits` bits to train on and to hold out; a function of the arguments alone.

    Raises ValueError where they would be more than half of the 2**bits that exist: a model could then learn them by heart.
    """
    n, there = n_train + n_eval, 2**bits
    if not 1 <= bits <= 62 or min(n_train, n_eval) < 0 or n > there // 2:
        raise ValueError(f"{n_train} + {n_eval} questions of bits={bits}: at most half of the {there} may be used; take "
                         "other bits, from 1 to 62")
    drawn = [Parity(f"{k:0{bits}b}") for k in random.Random(seed).sample(range(there), n)]
    return drawn[:n_train], drawn[n_train:]


def mixture(problems: Sequence[Parity], share: float) -> list[tuple[str, str]]:
    """(question, demonstration) of each problem: the first `share` of them long, the others short."""
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} of long demonstrations: it lies between 0 and 1")
    n_long = round(share * len(problems))
    return [(p.question, p.long if i < n_long else p.short) for i, p in enumerate(problems)]
