"""The calculator environment: the question of the arithmetic task, a tool, and an answer in a box.

The policy writes `calc: 12 * (3 + 4)` and reads the result in the next observation, or ends the episode with
`\\boxed{84}`. Expressions are parsed within bounds; nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import random
import re

from grpolab.arithmetic import Problem, Task
from grpolab.checker import check_answer, parse_boxed_answer
from grpolab.env.protocol import InvalidAction, StepResult, check_counts, whole
from grpolab.syntax import parse_python

MAX_CHARACTERS = 100
MAX_DIGITS = 12  # of one number in an expression
MAX_RESULT_DIGITS = 40

_CALL = re.compile(r"calc:[ \t]{0,8}([^\n]{0,200})")
_SIGNS = str.maketrans({"\u2212": "-", "\u00d7": "*"})
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.UAdd: operator.pos,
              ast.USub: operator.neg}


class ExpressionError(ValueError):
    """The expression is not integers joined by + - * and parentheses within the bounds."""


def calculate(expression: str) -> int:
    """The value of an expression of integers, + - * and parentheses (also the signs − and ×).

    Bounds: 100 characters, 12 digits a number, 40 digits of the result. Raises ExpressionError.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    text = expression.translate(_SIGNS).strip()
    if strange := re.search(r"[^-+*() \t0-9]", text):
        raise ExpressionError(f"cannot read {text[strange.start():strange.start() + 10]!r}")
    if re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text):
        raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
    try:
        tree = parse_python(re.sub(r"\b0+(?=[0-9])", "", text), mode="eval")  # Python refuses leading zeros
    except (SyntaxError, MemoryError):
        raise ExpressionError("numbers are joined by + - * and pairs of parentheses") from None
    value = _value(tree.body)
    if abs(value) >= 10**MAX_RESULT_DIGITS:
        raise ExpressionError(f"a result of more than {MAX_RESULT_DIGITS} digits")
    return value


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value):
            return value
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op, operand):
            return _OPERATORS[type(op)](_value(operand))
    raise ExpressionError("numbers are joined by + - * and pairs of parentheses")  # as in 2**3 and 2(3)


def action_text(action: dict) -> str:
    """The text of an action `{"text": "..."}`; raises InvalidAction for anything else."""
    if set(action) - {"metadata"} != {"text"} or not isinstance(action["text"], str):
        raise InvalidAction(f'an action here is {{"text": "..."}}, got the keys {sorted(action)}')
    return action["text"]


class CalculatorEnv:
    """One question an episode. Reward, paid once: 1.0 for the right boxed answer, 0.0 for a wrong one or none in time.

    The question comes from `task` ({"a": 3, "op": "*", "b": 4}) or, without one, from `seed`. The observation is
    {"text": ...}: the question, then the calculator's results. A boxed answer ends the episode, calls or not.
    """

    def __init__(self, *, problems: Task | None = None, max_turns: int = 4):
        check_counts(max_turns=max_turns)
        self.problems, self.max_turns = problems or Task(), max_turns
        self._problem: Problem | None = None
        self._turn = 0
        self._calls = 0
        self._done = True

    def reset(self, seed: int | None = None, task: dict | None = None) -> StepResult:
        self._problem = self._draw(random.Random(seed)) if task is None else read_problem(task)
        self._turn = self._calls = 0
        self._done = False
        return StepResult({"text": self._problem.question})

    def _draw(self, rng: random.Random) -> Problem:
        op = rng.choice(self.problems.ops)
        return Problem(rng.randrange(self.problems.operands(op)), op, rng.randrange(self.problems.operands(op)))

    def step(self, action: dict) -> StepResult:
        text = action_text(action)
        if self._done:
            raise RuntimeError("the episode is over: reset before the next step")
        self._turn += 1
        if parse_boxed_answer(text) is not None:
            self._done = True
            reward = float(check_answer(text, self._problem.answer))
            return StepResult({"text": "correct" if reward else "wrong"}, reward, True, {"calls": self._calls})
        output = self._use_tool(text)
        self._done = self._turn >= self.max_turns
        return StepResult({"text": output}, 0.0 if self._done else None, self._done, {"calls": self._calls})

    def _use_tool(self, text: str) -> str:
        call = _CALL.search(text)
        if call is None:
            return "write calc: and an expression, or the answer in \\boxed{}"
        self._calls += 1
        try:
            return str(calculate(call[1]))
        except ExpressionError as fault:
            return f"error: {fault}"

    def state(self) -> dict:
        return {"turn": self._turn, "calls": self._calls, "max_turns": self.max_turns, "done": self._done}

    def close(self) -> None: ...


def read_problem(task: dict) -> Problem:
    """{"a": int, "op": one of + - *, "b": int} as a Problem, each number of at most MAX_DIGITS digits; other keys are
    ignored. Raises InvalidAction."""
    a, op, b = (task.get(key) for key in ("a", "op", "b")) if isinstance(task, dict) else (None,) * 3
    if any(whole(number) is None or abs(number) >= 10**MAX_DIGITS for number in (a, b)) or op not in ("+", "-", "*"):
        raise InvalidAction(f'a task here is {{"a": 3, "op": "*", "b": 4}} with whole numbers of at most {MAX_DIGITS} digits '
                            f"and '+', '-' or '*', got {task!r:.100}")
    return Problem(a, op, b)
