"""The state behind a served policy's endpoint: the sampler, open requests, sessions, and how new weights come in."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from grpolab.decode.requests import Request
from grpolab.decode.sampler import Sampler
from grpolab.models.load import Policy
from grpolab.models.lora import exchange
from grpolab.rollouts import Rollout
from grpolab.serve.openai_schema import Refused
from grpolab.serve.sessions import Session, Sessions
from grpolab.serve.shared_weights import SharedWeights, Torn, mark_of

DRAIN_ROWS = 120.0  # s; how long completions in progress may hold up new weights


class Service:
    """What `serve_policy` yields. `url` is the address, `url + "/v1"` what a client takes as its base_url."""

    def __init__(self, policy: Policy, sampler: Sampler, name: str, url: str, *, token: str | None, seed: int,
                 max_rows: int, max_sessions: int, max_session_tokens: int, max_body_bytes: int, max_kept_bytes: int,
                 weights: Path | None, adapters: Path | None):
        self.policy, self.sampler, self.name, self.url, self.token = policy, sampler, name, url, token
        self.max_rows, self.max_body_bytes, self.stopping = max_rows, max_body_bytes, False
        self.sessions = Sessions(url, seed, max_sessions, max_session_tokens, max_kept_bytes)
        self.counts: Counter = Counter()
        self.open: set[Request] = set()  # that are being sampled
        self.adapter: str | None = None  # the name of the one that a trainer put in
        self.mark = ""  # what tells weights that a trainer sent from others of their version (`wire.fingerprint`)
        self._weights, self._adapters, self._gate = weights, adapters, None

    @property
    def names(self) -> list[str]:
        """What requests may call the model: its own name, whatever weights it has now, and the adapter's while it has that."""
        return [self.name, *([self.adapter] if self.adapter else [])]

    @property
    def rows(self) -> int:
        """How many completions are being sampled."""
        return sum(len(r.prompts) * len(r.seeds[0]) for r in list(self.open))

    def open_session(self, id: str | None = None, **options) -> Session:
        """A new session; `session.url` is its base_url. Options as in `Session`. ValueError where it cannot be."""
        try:
            return self.sessions.open(id, **options)
        except Refused as refused:
            raise ValueError(refused.message) from None

    def rollouts(self, session: str | Session) -> list[Rollout]:
        """Collect a session: its rollouts, after which it has ended and its memory is free. Several where its caller rewrote
        history, none where nothing was sampled. KeyError for a session that is not there."""
        return self._known(session, self.sessions.end).rollouts()

    def rollout(self, session: str | Session) -> Rollout:
        """Collect a session that is one rollout; ValueError, and it stays, where it is none or several."""
        found = self._known(session, self.sessions.get).rollouts()
        if len(found) != 1:
            why = "its caller rewrote history; take service.rollouts(session)" if found else "nothing was sampled in it"
            raise ValueError(f"the session has {len(found)} rollouts, not one: {why}")
        return self.rollouts(session)[0]

    def _known(self, session: str | Session, find) -> Session:
        try:
            return find(session if isinstance(session, str) else session.id)
        except Refused as refused:
            raise KeyError(refused.message) from None

    def status(self) -> dict:
        """Counts since the start, and what is open now, as JSON-able numbers."""
        return {"status": "healthy", "model": self.name, "policy_version": self.policy.version, "rows": self.rows,
                "sessions": len(self.sessions), **{k: self.counts[k] for k in ("requests", "refused", "cancelled", "failed")}}

    def model_cards(self) -> list[dict]:
        """The served model under each of its names, as /v1/models lists it."""
        about = {"object": "model", "created": 0, "owned_by": "grpolab", "max_model_len": self.sampler.context,
                 "policy_version": self.policy.version, "root": self.policy.name}
        put_in = {"parent": self.name, "root": self.mark}
        return [{"id": name} | about | (put_in if name == self.adapter else {}) for name in self.names]

    async def admitted(self) -> None:
        """Wait while new weights are taken in."""
        while self._gate is not None:
            await self._gate.wait()

    async def load_weights(self, wanted: int | None = None) -> int:
        """Take in what a trainer has published into the file of weights; returns their version. Refused without such a file,
        for one of another model, where it never rests, and where its checksum is not the `wanted` one."""
        if self._weights is None:
            raise Refused(404, "this service takes in no weights: start it with weights=FILE, or serve-policy --weights FILE")
        return await self._taken_in(lambda: self._load(wanted))

    async def load_adapter(self, name: str, path: str, version: int | None = None) -> int:
        """Put a LoRA adapter, saved as peft saves it, in the place of the one before; it is also served under `name`. Returns
        its version (default: one more). Refused for a folder outside that of `adapters`, and for what does not fit."""
        if self._adapters is None:
            raise Refused(404, "this service takes in no adapters: start it with adapters=FOLDER, or serve-policy --adapters "
                               "FOLDER")
        folder = (self._adapters / path).resolve()
        if not folder.is_relative_to(self._adapters):
            raise Refused(403, f"{path[:200]!r} is outside the folder of adapters that this service was started with",
                          "lora_path")
        if name == self.name:
            raise Refused(400, f"{name!r} is the name of the served model: call the adapter something else", "lora_name")

        def put() -> int:
            exchange(self.policy.model, folder)
            self.policy.version, self.adapter = self.policy.version + 1 if version is None else version, name
            self.mark = folder.name
            return self.policy.version

        return await self._taken_in(put)

    async def _taken_in(self, load: Callable[[], int]) -> int:
        """Newcomers wait, what is being sampled is finished, also for those who use the Sampler itself, then the weights change
        as a whole. Returns their version."""

        def unless_busy() -> int | None:  # in the worker's thread, where nothing begins or ends meanwhile
            return None if self.sampler.busy else load()

        await self.admitted()
        self._gate = asyncio.Event()
        until = time.monotonic() + DRAIN_ROWS
        try:
            while self.open or (version := await self.sampler.run(unless_busy)) is None:
                if time.monotonic() > until:
                    raise Refused(503, f"completions were still in progress after {DRAIN_ROWS:.0f} s; the weights are as they "
                                       "were")
                await asyncio.sleep(0.002)
            return version
        except (OSError, ValueError, ImportError, Torn) as error:
            raise Refused(409, str(error)) from error
        finally:
            self._gate, gate = None, self._gate
            gate.set()

    def _load(self, wanted: int | None) -> int:
        shared = SharedWeights(self._weights)
        try:
            self.policy.version, checksum = shared.read(self.policy.model, expected=wanted)
            self.mark = mark_of(checksum)
        finally:
            shared.close()
        return self.policy.version

    def stop(self) -> None:
        """Refuse newcomers and end what is being sampled."""
        self.stopping = True
        self.sessions.close()
        for request in list(self.open):
            request.cancel()
