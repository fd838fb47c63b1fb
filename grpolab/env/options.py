"""The options of an environment server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpolab.access import check_host
from grpolab.env.backends import BackendPool
from grpolab.env.process import Isolation


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a server treats its sessions. Times are in seconds, and `serve(factory, max_sessions=4)` builds one of these.

    isolate       where a session's environment lives: "thread", in one of its own here (an `async` environment with an event
                  loop of its own); or "process", one that can be killed and inherits no secrets, for which the environment
                  must be importable; an `Isolation(env=, cwd=, memory_mib=)` says more about that process
    backends      each session leases one of them
    token         every client must send it; required on an address that other machines reach
    ping_interval, ping_timeout
                  a client that answers no ping for the sum of both is gone, however long its step takes, and so is one that
                  has not taken a reply by then; None turns pings off
    """

    max_sessions: int = 8
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    isolate: str | Isolation = "thread"
    backends: BackendPool | None = None
    token: str | None = None
    reset_timeout: float = 60.0
    step_timeout: float = 60.0
    close_timeout: float = 5.0
    ping_interval: float | None = 5.0
    ping_timeout: float | None = 10.0

    def __post_init__(self):
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port}: a port is 0 (any free one) to 65535")
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions={self.max_sessions}: a server holds at least one session")
        for name in ("reset_timeout", "step_timeout", "close_timeout", "ping_interval", "ping_timeout"):
            seconds = getattr(self, name)
            if seconds is None and name.startswith("ping"):
                continue
            if not 0 < (seconds or 0) < math.inf:
                raise ValueError(f"{name}={seconds}: seconds, more than 0 and finite")
        check_host(self.host, self.token)
        if self.backends is not None and self.backends.size < self.max_sessions:
            raise ValueError(f"{self.backends.size} backends for max_sessions={self.max_sessions}: each session leases one")
        if self.isolate not in ("thread", "process") and not isinstance(self.isolate, Isolation):
            raise ValueError(f"isolate={self.isolate!r}: use 'thread', 'process' or an Isolation(...)")

    @property
    def isolation(self) -> Isolation | None:
        """How a session's process runs; None for a thread."""
        if self.isolate == "thread":
            return None
        return Isolation() if self.isolate == "process" else self.isolate

    @property
    def patience(self) -> float | None:
        """Seconds after which a client that takes nothing is gone; None for never."""
        return None if self.ping_interval is None or self.ping_timeout is None else self.ping_interval + self.ping_timeout
