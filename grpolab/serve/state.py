"""The state behind a served policy's endpoint: its options, the sampler, open requests, sessions, how new weights come in."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpolab.access import check_host
from grpolab.decode.requests import Request
from grpolab.decode.sampler import Sampler
from grpolab.models.lora import exchange
from grpolab.rollouts import Rollout
from grpolab.serve.openai_schema import Refused
from grpolab.serve.sessions import Session, Sessions
from grpolab.serve.weight_sync import read_weights

DRAIN_ROWS = 120.0  # s; how long completions in progress may hold up new weights

# Requests, those refused, cancelled and failed, and places in answers that began a tool call and could not be read.
COUNTS = ("requests", "refused", "cancelled", "failed", "unparsed_calls")


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How a policy is served; `serve_policy(policy, port=8000)` builds one of these.

    name        what requests call the model (default: the policy's)
    token       every client must send it (an OpenAI client's api_key); required on an address that other machines reach
    seed        makes those of requests that bring none
    max_rows, max_sessions  completions in progress or waiting, and sessions that are open: beyond, requests get 429
    session_idle_s  seconds after which a session that nobody asks for may end where another needs its room
    max_cache_bytes  of keys and values of the newest turns of sessions, which the next turn need not compute again
    weights     the file through which a trainer in another process sends its updates (`RemoteSampler.publish`)
    adapters    the folder from which clients may load LoRA adapters
    """

    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one
    token: str | None = None
    seed: int = 0
    max_rows: int = 4096
    max_sessions: int = 4096
    session_idle_s: float = 3600.0
    max_cache_bytes: int = 256 * 2**20
    weights: str | Path | None = None
    adapters: str | Path | None = None

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
        """A new session; `session.url` is its base_url. Options as in `Session`. ValueError where it cannot be."""
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
        """Wait while new weights are loaded. Refused where so many more completions do not fit."""
        most = self.options.max_rows
        if rows > most:
            raise Refused(400, f"this request asks for {rows} completions, and this service takes {most} at a time; send "
                               "several with fewer", "n")
        async with self._loading:
            pass
        if self.rows + rows > most:  # after the wait: whoever waited here adds to the rows at once
            raise Refused(429, f"{self.rows} completions are in progress, and this service takes {most} at a time; this "
                               f"request asks for {rows}: send it again later")

    async def load_weights(self, mark: str | None = None) -> int:
        """Load what a trainer has published into the file of weights; returns their version. Refused without such a file, for
        weights of another model, and for others than those with this mark."""
        if self.options.weights is None:
            raise Refused(404, "this service loads no weights: start it with weights=FILE, or --weights FILE")

        def load() -> int:
            self.policy.version, self.mark = read_weights(Path(self.options.weights), self.policy.model, mark)
            return self.policy.version

        return await self._between_completions(load)

    async def load_adapter(self, name: str, path: str, version: int | None = None) -> int:
        """Put a LoRA adapter, saved as peft saves it, in the place of the one before; it is also served under `name`. Returns
        its version (default: one more). Refused for a folder outside that of `adapters`, and for what does not fit."""
        if self.options.adapters is None:
            raise Refused(404, "this service loads no adapters: start it with adapters=FOLDER, or --adapters FOLDER")
        home = Path(self.options.adapters).resolve()
        folder = (home / path).resolve()
        if not folder.is_relative_to(home):
            raise Refused(403, f"{path[:200]!r} is outside the folder of adapters that this service was started with",
                          "lora_path")
        if name == self.name:
            raise Refused(400, f"{name!r} is the name of the served model: call the adapter something else", "lora_name")

        def load() -> int:
            exchange(self.policy.model, folder)
            self.policy.version, self.adapter = self.policy.version + 1 if version is None else version, name
            self.mark = folder.name
            return self.policy.version

        return await self._between_completions(load)

    async def _between_completions(self, load: Callable[[], int]) -> int:
        """Newcomers wait, what is being sampled is finished, also for those who use the Sampler itself, then the weights change
        as a whole. Returns their version."""

        def unless_busy() -> int | None:  # in the worker's thread, where nothing begins or ends meanwhile
            return None if self.sampler.busy else load()

        async with self._loading:
            until = time.monotonic() + DRAIN_ROWS
            try:
                while self.rows or (version := await self.sampler.run(unless_busy)) is None:
                    if time.monotonic() > until:
                        raise Refused(503, f"completions were still in progress after {DRAIN_ROWS:.0f} s; the weights are as "
                                           "they were")
                    await asyncio.sleep(0.002)
                return version
            except Refused:
                raise
            except (OSError, ValueError, ImportError) as error:
                raise Refused(409, str(error)) from error

    def stop(self) -> None:
        """Refuse newcomers and end what is being sampled."""
        self.stopping = True
        self.sessions.close()
        for job in list(self.jobs):
            job.cancel()
