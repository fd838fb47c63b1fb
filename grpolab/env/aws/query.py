"""`--query`: JMESPath, with an end to how much an expression may make.

`[@,@]|[@,@]|...` doubles its result at every step, so a line of 300 characters would fill any machine's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from grpolab.env.aws.clients import missing

BUDGET = 4_000_000  # characters that all values together may have which an expression makes on its way
VALUE = 16  # characters that each value counts for beside its own, a number, a mapping and an empty list too


class QueryTooLarge(ValueError):
    """The expression makes more than BUDGET."""


@dataclass(frozen=True)
class Query:
    """A compiled expression, with the `search` that awscli's formatters call."""

    tree: dict

    def search(self, value: Any) -> Any:
        """What the expression finds in `value`; raises QueryTooLarge, and jmespath's errors."""
        return _bounded()().visit(self.tree, value)


def compile_query(text: str) -> Query:
    """The expression, or ValueError with what is wrong with it."""
    try:
        import jmespath
    except ModuleNotFoundError as fault:
        raise missing(fault) from fault
    try:
        return Query(jmespath.compile(text).parsed)
    except Exception as fault:  # noqa: BLE001  its lexer raises more than its own errors
        raise ValueError(f"Bad value for --query {text:.100}: {fault}") from fault


@cache
def _bounded() -> type:
    """jmespath's interpreter, which counts what every node of the expression makes."""
    from jmespath.visitor import TreeInterpreter

    class Bounded(TreeInterpreter):
        def __init__(self):
            super().__init__()
            self.left = BUDGET

        def visit(self, node: dict, *args: Any, **kwargs: Any) -> Any:
            made = super().visit(node, *args, **kwargs)
            self.spend(size(made, self.left))
            return made

        def visit_function_expression(self, node: dict, value: Any) -> Any:
            if node["value"] == "join" and len(node["children"]) == 2:  # the one function that multiplies two lengths
                glue, parts = (self.visit(child, value) for child in node["children"])
                if isinstance(glue, str) and isinstance(parts, list):
                    self.spend(len(glue) * len(parts))
            return super().visit_function_expression(node, value)

        def spend(self, characters: int) -> None:
            self.left -= characters
            if self.left < 0:
                raise QueryTooLarge(f"--query makes more than {BUDGET} characters on its way; ask for less")

    return Bounded


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
