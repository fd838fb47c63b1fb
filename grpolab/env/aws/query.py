"""`--query`: JMESPath, with a bound on how much an expression may make.

`[@,@]|[@,@]|...` doubles its result at every step, so a line of 300 characters would fill any machine's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jmespath
from jmespath.visitor import TreeInterpreter

BUDGET = 4_000_000  # characters that all values together may have which an expression makes on its way
VALUE = 16  # characters that each value counts for beside its own, a number, a mapping and an empty list too


class QueryTooLarge(ValueError):
    """The expression makes more than BUDGET."""


@dataclass(frozen=True)
class Query:
    """A compiled expression, with the `search` that awscli's formatters call."""

    tree: dict

    def search(self, value: Any) -> Any:
        """The result of the expression on `value`; raises QueryTooLarge, and jmespath's errors."""
        return _BoundedInterpreter().visit(self.tree, value)


def compile_query(text: str) -> Query:
    """The expression, or ValueError with what is wrong with it."""
    try:
        return Query(jmespath.compile(text).parsed)
    except Exception as error:  # noqa: BLE001  its lexer raises more than its own errors
        raise ValueError(f"Bad value for --query {text:.100}: {error}") from error


class _BoundedInterpreter(TreeInterpreter):
    """jmespath's interpreter, which counts what every node of the expression makes."""

    def __init__(self):
        super().__init__()
        self.budget = BUDGET

    def visit(self, node: dict, *args: Any, **kwargs: Any) -> Any:
        result = super().visit(node, *args, **kwargs)
        self.spend(size(result, self.budget))
        return result

    def visit_function_expression(self, node: dict, value: Any) -> Any:
        if node["value"] == "join" and len(node["children"]) == 2:  # the one function that multiplies two lengths
            glue, parts = (self.visit(child, value) for child in node["children"])
            if isinstance(glue, str) and isinstance(parts, list):
                self.spend(len(glue) * len(parts))
        return super().visit_function_expression(node, value)

    def spend(self, characters: int) -> None:
        self.budget -= characters
        if self.budget < 0:
            raise QueryTooLarge(f"--query makes more than {BUDGET} characters on its way; ask for less")


def size(value: Any, enough: int) -> int:
    """The characters of a value written out, roughly, a part as often as it occurs in it; counted until more than `enough`."""
    total, waiting = 0, [value]
    while waiting and total <= enough:
        value = waiting.pop()
        total += VALUE
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            total += sum(map(len, value))
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return total
