"""What a process does at a signal while a coroutine works."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def at_signals(call: Callable[[], object], *numbers: int) -> Iterator[None]:
    """Within the block the running loop calls `call` at these signals; behind it they do what they did before. Needed where
    the loop lives on, as one that nest_asyncio has patched does: it would keep the handler."""
    loop, before = asyncio.get_running_loop(), {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # one that was installed in C cannot be put back from here
                signal.signal(number, handler)
