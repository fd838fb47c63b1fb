"""The one helper for calling a coroutine from synchronous code, also inside a running notebook.

Prefer `await`: notebooks have it at the top level. `Sampler.sample_sync` and `MultiTurnEnvPool` need neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run_sync(coroutine: Coroutine[object, object, T]) -> T:
    """The coroutine's result: through `asyncio.run`, or where a loop already runs (a notebook) inside that loop, which
    nest_asyncio then patches for the rest of the process."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    import nest_asyncio

    nest_asyncio.apply(loop)
    return loop.run_until_complete(coroutine)
