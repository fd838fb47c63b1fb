"""The state behind a served policy's endpoint: its options, the sampler, open requests, sessions, how new weights come in."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpolab.access import check_host
from grpolab.decode.constraint import Grammars
from grpolab.decode.requests import Request
from grpolab.decode.sampler import Sampler
from grpolab.rollouts import Rollout
from grpolab.serve.openai_schema import Refused
from grpolab.serve.sessions import Session, Sessions

DRAIN_ROWS = 120.0  # s; how long completions in progress may hold up new weights

# Requests, those refused, cancelled and failed, places in answers that began a tool call and could not be read, and answers
# that are not in the format that was asked for.
COUNTS = ("requests", "refused", "cancelled", "failed", "unparsed_calls", "format_errors")


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How a policy is served; `serve_policy(policy, port=8000)` builds one of these."""

    name: str | None = None  # what requests call the model (default: the policy's)
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    token: str | None = None  # that clients must send (as api_key); required on an address that other machines reach
    seed: int = 0  # makes the seeds of requests that bring none
    max_rows: int = 4096  # completions in progress or waiting: beyond, requests get 429
    max_sessions: int = 4096  # that are open: beyond, requests get 429
    session_idle_s: float = 3600.0  # after which a session that nobody asks for may end where another needs its room
    max_cache_bytes: int = 256 * 2**20  # keys and values of the newest turns of sessions, kept for their next turns
    constrained: bool = False  # sample under a mask where `response_format` or `tool_choice` asks for a form (llguidance)
    weights: str | Path | None = None  # file through which a trainer in another process sends its updates (SharedFile)
    adapters: str | Path | None = None  # folder from which clients may load LoRA adapters (AdapterSwap)

    def __post_init__(self):
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port}: a port is 0 (any free one) to 65535")
        for name in ("max_rows", "max_sessions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        check_host(self.host, self.token)


class Service:
    """What `serve_policy` yields. `url` is the address, `url + "/v1"` what a client takes as its base_url."""

    def __init__(self, sampler: Sampler, url: str, options: ServiceOptions):
        self.policy, self.sampler, self.url, self.options = sampler.policy, sampler, url, options
        self.name, self.stopping = options.name or sampler.policy.name, False
        self.sessions = Sessions(url, options.seed, most=options.max_sessions, cache_bytes=options.max_cache_bytes,
                                 idle_s=options.session_idle_s)
        self.grammars = Grammars(sampler.policy) if options.constrained else None
        self.counts: Counter = Counter()
        self.jobs: set[Request] = set()  # at the sampler, or done and not yet answered
        self.adapter: str | None = None  # the name of the one that a trainer put in
        self.mark = ""  # what tells weights that a trainer sent from others of their version (`openai_schema.fingerprint`)
        self._loading = asyncio.Lock()  # held while new weights come in

    @property
    def names(self) -> list[str]:
        """What requests may call the model: its own name, whatever weights it has now, and the adapter's while it has that."""
        return [self.name, *([self.adapter] if self.adapter else [])]

    @property
    def rows(self) -> int:
        """How many completions are being sampled."""
        return sum(len(job.prompts) * len(job.seeds[0]) for job in list(self.jobs) if not job.future.done())

    def open_session(self, id: str | None = None, **options) -> Session:
        """A new session, with the options of `Session`; `session.url` is its base_url. ValueError where it cannot be."""
        return self.sessions.open(id, **options)

    def rollouts(self, session: str | Session) -> list[Rollout]:
        """Collect a session: its rollouts, after which it has ended and its memory is free. Several where its caller rewrote
        history, none where nothing was sampled. ValueError for a session that is not there."""
        return self.sessions.end(getattr(session, "id", session)).rollouts()

    def rollout(self, session: str | Session) -> Rollout:
        """Collect a session that is one rollout; ValueError, and it stays, where it is none or several."""
        rollouts = self.sessions.get(getattr(session, "id", session)).rollouts()
        if len(rollouts) != 1:
            why = "its caller rewrote history; take service.rollouts(session)" if rollouts else "nothing was sampled in it"
            raise ValueError(f"the session has {len(rollouts)} rollouts, not one: {why}")
        return self.rollouts(session)[0]

    def status(self) -> dict:
        """Counts since the start, and what is open now, as JSON-able numbers."""
        return {"status": "healthy", "model": self.name, "policy_version": self.policy.version, "rows": self.rows,
                "sessions": len(self.sessions), **{k: self.counts[k] for k in COUNTS}}

    def model_cards(self) -> list[dict]:
        """The served model under each of its names, as /v1/models lists it."""
        about = {"object": "model", "created": 0, "owned_by": "grpolab", "max_model_len": self.sampler.context,
                 "policy_version": self.policy.version, "root": self.policy.name}
        adapter = {"parent": self.name, "root": self.mark}
        return [{"id": name} | about | (adapter if name == self.adapter else {}) for name in self.names]

    async def admit(self, rows: int) -> None:
        """Wait while new weights are loaded. Refused where so many more completions do not fit now."""
        most = self.options.max_rows
        async with self._loading:
            pass
        if self.rows + rows > most:  # after the wait: whoever waited here adds to the rows at once
            raise Refused(429, f"{self.rows} completions are in progress, and this service takes {most} at a time: ask later")

    async def between_completions(self, load: Callable[[], int]) -> int:
        """Load weights, once what is being sampled is finished, also for those who use the Sampler itself; newcomers wait.
        Returns their version. Refused for weights that do not fit."""

        async def unless_busy() -> int | None:
            try:  # in the worker's thread, where nothing begins or ends meanwhile
                return await self.sampler.run(lambda: None if self.sampler.busy else load())
            except (OSError, ValueError, ImportError) as error:  # also of an engine that does not fit
                raise Refused(409, str(error)) from error

        async with self._loading:
            until = time.monotonic() + DRAIN_ROWS
            while self.rows or (version := await unless_busy()) is None:
                if time.monotonic() > until:
                    raise Refused(503, f"completions still run after {DRAIN_ROWS:.0f} s; the weights are as they were")
                await asyncio.sleep(0.002)
            return version

    def stop(self) -> None:
        """Refuse newcomers and end what is being sampled."""
        self.stopping = True
        self.sessions.close()
        for job in list(self.jobs):
            job.cancel()
