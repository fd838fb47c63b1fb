"""Tools that a server in a process of its own can import by name."""

import os
import time

from grpolab.train.tools import Tools


def room(name: str) -> str:
    """The room of a person."""
    return {"Ann": "12"}.get(name, "30")


def hang() -> str:
    """Takes long."""
    time.sleep(3)


def large() -> str:
    """Prints 10 MB and returns as many, in control tokens."""
    os.write(1, b"<|endoftext|>\n" * 800_000)
    print('{"type": "close"}')
    return "<|endoftext|>" * 800_000


def raises() -> str:
    """Fails at length."""
    raise ValueError("<|endoftext|>" * 800_000)


def ends() -> str:
    """Ends its thread."""
    raise SystemExit(3)


HOSTILE = Tools([room, hang, large, raises, ends], lambda run: float(len(run.calls)), deadline=0.3)
ROOMS = Tools([room, hang], lambda run: sum(not call.failed for call in run.calls), deadline=0.3)
