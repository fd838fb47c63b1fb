"""Python's own parser, of text that is never run.

CPython 3.11's `ast.parse` fails ("AST constructor recursion depth mismatch") where a garbage collection in the midst of it ends
in another one, as a finaliser's traceback does.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected within the block."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def parse_python(source: str, mode: str = "exec") -> ast.AST:
    """`ast.parse`, with its errors."""
    with without_collection():
        return ast.parse(source, mode=mode)
