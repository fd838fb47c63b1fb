"""Tools that a server in a process of its own can import by name."""

import time

from grpolab.train.tools import Tools


def room(name: str) -> str:
    """The room of a person."""
    return {"Ann": "12"}.get(name, "30")


def hang() -> str:
    """Takes long."""
    time.sleep(3)


ROOMS = Tools([room, hang], lambda run: sum(not call.failed for call in run.calls), deadline=0.3)
