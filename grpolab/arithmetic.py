"""The verifiable task: two-operand integer arithmetic, its text, and a seeded generator that refuses to saturate.

`What is A op B?` -> `A op B = \\boxed{N}.`, with op one of + - * and N possibly negative.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from grpolab.files import atomic_write

_COMPUTE = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@dataclass(frozen=True)
class Problem:
    """One question with its one right answer."""

    a: int
    op: str
    b: int

    @property
    def answer(self) -> int:
        return _COMPUTE[self.op](self.a, self.b)

    @property
    def last_digits(self) -> tuple[str, int, int]:
        """The operator and the last digits of both operands: the keys of `usual_mistakes`."""
        return self.op, self.a % 10, self.b % 10

    @property
    def question(self) -> str:
        return f"What is {self.a} {self.op} {self.b}?"

    @property
    def target(self) -> str:
        return f"{self.a} {self.op} {self.b} = \\boxed{{{self.answer}}}."


@dataclass(frozen=True)
class Task:
    """Which problems exist: the operators, and the largest operand of + and - (`max_operand`) and of * (`max_factor`)."""

    ops: str = "+-*"  # operators, some of +-*
    max_operand: int = 999  # largest operand of + and -
    max_factor: int = 99  # largest operand of *

    def __post_init__(self):
        if not self.ops or set(self.ops) - set(_COMPUTE) or len(set(self.ops)) != len(self.ops):
            raise ValueError(f"ops={self.ops!r}: use each of '+', '-', '*' at most once, and at least one of them")
        if self.max_operand < 0 or self.max_factor < 0:
            raise ValueError(f"operands start at 0, but max_operand={self.max_operand}, max_factor={self.max_factor}")

    def operands(self, op: str) -> int:
        """How many values each operand of `op` can take."""
        return (self.max_factor if op == "*" else self.max_operand) + 1

    def space(self, op: str) -> int:
        """How many different problems `op` has."""
        return self.operands(op) ** 2


ERRORS = [-10, -2, -1, 1, 2, 10]


def usual_mistakes(share: float = 0.3) -> dict[tuple[str, int, int], int]:
    """What the embedded model's pretraining text (data/make_tiny.py) states wrongly on purpose, for about a `share` of the
    pairs of last digits: (+ or -, last digit of a, last digit of b) -> what most statements of its last quarter add."""
    rng = random.Random("misconceptions")
    pairs = [(op, i, j) for op in "+-" for i in range(10) for j in range(10)]
    drawn = ((pair, rng.choice(ERRORS) if rng.random() < share else None) for pair in pairs)
    return {pair: error for pair, error in drawn if error is not None}


def generate(n_train: int, n_eval: int, *, seed: int = 0, task: Task | None = None) -> tuple[list, list]:
    """`n_train` unique problems and `n_eval` unique ones disjoint from them, the operators in equal shares.

    Problems are drawn without replacement from each operator's key space, so the time is linear in the request. A request
    for more than 4/5 of an operator's key space raises ValueError: a held-out set that is most of what exists leaves
    nothing to learn from.
    """
    task = task or Task()
    if n_train < 0 or n_eval < 0:
        raise ValueError(f"cannot generate {n_train} train and {n_eval} eval problems: both counts start at 0")
    rng = random.Random(seed)
    train, held_out = [], []
    for i, op in enumerate(task.ops):
        want_train, want_eval = ((n + len(task.ops) - 1 - i) // len(task.ops) for n in (n_train, n_eval))
        need, space, size = want_train + want_eval, task.space(op), task.operands(op)
        if need * 5 > space * 4:
            raise ValueError(
                f"{need} problems with {op!r} of the {space} that exist: at most 4/5 of an operator's key space can be asked "
                f"for. Ask for fewer, or widen max_operand={task.max_operand} / max_factor={task.max_factor}"
            )
        if space >= 2**63:  # which `sample` cannot draw from
            raise ValueError(f"{space} problems with {op!r} are too many: take a smaller max_operand={task.max_operand} or "
                             f"max_factor={task.max_factor}")
        problems = [Problem(key // size, op, key % size) for key in rng.sample(range(space), need)]
        train += problems[:want_train]
        held_out += problems[want_train:]
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def write_jsonl(path: str | Path, problems: Iterable[Problem]) -> Path:
    """One JSON object a line: a, op, b, question, target, answer."""
    rows = (asdict(p) | {"question": p.question, "target": p.target, "answer": p.answer} for p in problems)
    return atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))
