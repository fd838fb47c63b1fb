"""What was sampled under a session's URL: exact token ids, masks and log-probs, joined into rollouts where turns only append.

A turn goes on from an earlier one where the request repeats the conversation up to there. Then the recorded ids go on and
only what is new is tokenised: sampled text is never tokenised again. Where the caller rewrote history a new rollout begins.
Each sampled token has mask 1 in exactly one rollout: a second answer to the same finds the turns before it in its prompt.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

from grpolab.chat import Message, prompt_ids, rest_ids, text_ids
from grpolab.decode.conversation import joined
from grpolab.decode.requests import Prefix, Request
from grpolab.decode.sampling import fold_seed
from grpolab.rollouts import Rollout
from grpolab.serve.openai_schema import Refused
from grpolab.tool_calls import ParsedTurn, call_of

REMEMBERED = 65_536  # ids of sessions that ended, whose late requests get 410


@dataclass(frozen=True, eq=False)
class Turn:
    """One answer of the policy: a rollout without its prompt, which is the turn before and the ids `between`."""

    parent: Turn | None
    between: tuple[int, ...]
    rollout: Rollout
    ended: bool  # by an end token of its own
    key: bytes  # of the chat up to its end; empty for a completion

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids up to the end of the answer."""
        parts, turn = [], self
        while turn is not None:
            parts += [turn.rollout.tokens, turn.between]
            turn = turn.parent
        return tuple(i for part in reversed(parts) for i in part)


@dataclass(frozen=True)
class Prompt:
    """The ids of a request, the turn that they go on from, and the `key` by which the session finds a chat again."""

    ids: tuple[int, ...]
    parent: Turn | None = None
    key: bytes = b""


class Session:
    """The record of one session. Its seed makes those of its requests, in their order, where they bring none.

    temperature, max_tokens  what a request samples at and may take where it says nothing; with `fixed`, another temperature,
                             top-k, top-p or min-p is refused, since the loss could not use it
    limit                    the most tokens that a prompt and its answer may have together
    """

    def __init__(self, id: str, url: str, seed: int, temperature: float = 1.0, max_tokens: int | None = None,
                 limit: int | None = None, fixed: bool = False):
        for name, value in (("temperature", temperature), ("max_tokens", max_tokens), ("limit", limit)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} of a session: it is more than 0, or left out")
        self.id, self.url, self.seed = id, url, seed
        self.temperature, self.max_tokens, self.limit, self.fixed = temperature, max_tokens, limit, fixed
        self.turns: list[Turn] = []
        self.cancelled = 0  # answers that their caller did not wait for, which are in no rollout
        self.closed = False
        self.used = time.monotonic()  # when it was last asked for
        self.open: set[Request] = set()
        self._requests = 0
        self._lock = threading.Lock()

    def next_seed(self) -> int:
        with self._lock:
            self._requests += 1
            return fold_seed(self.seed, self._requests)

    def track(self, request: Request) -> None:
        """A request that is being sampled; the end of the session ends it."""
        with self._lock:
            self.open.add(request)
            if self.closed:
                request.cancel()

    def prompt_of_chat(self, tokenizer, messages: Sequence[Message], tools: Sequence[dict] = (), prefix: str = "") -> Prompt:
        """`prefix` is what the answer must begin with, given to the policy like the rest."""
        keys = [b"chat" + json.dumps(tools).encode()]
        for message in messages:
            keys.append(_key_after(keys[-1], message))
        begun = tuple(tokenizer.encode(prefix, add_special_tokens=False)) if prefix else ()
        for k in range(len(messages) - 1, 0, -1):
            turn = self._find(keys[k]) if messages[k - 1]["role"] == "assistant" else None
            rest = rest_ids(tokenizer, messages, k, turn.ended, tools) if turn else None
            if rest is not None:
                return Prompt(turn.ids + tuple(rest) + begun, turn, keys[-1])
        return Prompt(tuple(prompt_ids(tokenizer, messages, tools)) + begun, None, keys[-1])

    def prompts_of_completions(self, tokenizer, prompts: Sequence[str | Sequence[int]]) -> list[Prompt]:
        """Token ids go on from the longest turn that they begin with; a text is a prompt of its own."""
        turns = sorted(((turn.ids, turn) for turn in list(self.turns)), key=lambda of: len(of[0]), reverse=True)
        return [Prompt(tuple(text_ids(tokenizer, prompt))) if isinstance(prompt, str) else
                Prompt(tuple(prompt), next((turn for ids, turn in turns if tuple(prompt[: len(ids)]) == ids), None))
                for prompt in prompts]

    def record(self, prompt: Prompt, rollout: Rollout, answer: ParsedTurn, ended: bool) -> Turn | None:
        """Keep an answer as its caller got it; None where the session is closed."""
        before = len(prompt.parent.ids) if prompt.parent else 0
        calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
        message = {"role": "assistant", "content": answer.content, "tool_calls": calls}
        key = _key_after(prompt.key, message) if prompt.key else b""
        turn = Turn(prompt.parent, rollout.prompt[before:], replace(rollout, prompt=()), ended, key)
        with self._lock:
            if not self.closed:
                self.turns.append(turn)
                return turn

    def rollouts(self) -> list[Rollout]:
        """What was sampled so far: one rollout while turns only append, a further one for each time that history changed. A
        rollout's `finish_reason` is that of its last turn, its `policy_version` that of its first."""
        chains: list[list[Turn]] = []
        for turn in list(self.turns):
            chain = next((chain for chain in chains if chain[-1] is turn.parent), None)
            if chain is None:
                chains.append(chain := [])
            chain.append(turn)
        return [_rollout_of(chain) for chain in chains]

    def close(self) -> None:
        """End what is still being sampled and keep nothing more."""
        with self._lock:
            self.closed = True
            for request in self.open:
                request.cancel()

    def _find(self, key: bytes) -> Turn | None:
        """A turn that was answered with this: one that nothing goes on from yet, so that the next appends, else the last."""
        with self._lock:
            turns = [turn for turn in self.turns if turn.key == key]
            parents = {turn.parent for turn in self.turns}
            return next((turn for turn in turns if turn not in parents), turns[-1] if turns else None)


def _rollout_of(chain: Sequence[Turn]) -> Rollout:
    """The turns of a chain as one rollout."""
    first, *later = chain
    whole = replace(first.rollout, prompt=(first.parent.ids if first.parent else ()) + first.between)
    for turn in later:
        whole = joined(whole, replace(turn.rollout, prompt=whole.prompt + whole.tokens + turn.between))
    return whole


def _key_after(key: bytes, message: Message) -> bytes:
    """The key of a conversation that goes on with a message. Ids of calls are not in it, nor how their JSON is written: agents
    change both on the way back."""
    calls = [call_of(call.get("function", call)).key for call in message.get("tool_calls") or []]
    content = [message["role"], message.get("content") or "", message.get("name") or "", calls]
    return hashlib.sha256(key + json.dumps(content).encode()).digest()


class TurnCaches:
    """Keys and values of the newest answers, at most `most` bytes of them, so that a next turn feeds only what is new. Without
    them, as after new weights, a turn is fed as a whole."""

    def __init__(self, most: int):
        self.most = most
        self._by_turn: dict[Turn, Prefix] = {}  # the oldest first

    @property
    def nbytes(self) -> int:
        caches = [prefix.cache for prefix in list(self._by_turn.values()) if prefix.cache is not None]
        return sum(tensor.nbytes for cache in caches for tensor in cache.tensors)

    def after(self, turn: Turn | None) -> Prefix:
        """The cache after a turn; an empty one where it is gone."""
        return self._by_turn.get(turn) or Prefix()

    def keep(self, turn: Turn, prefix: Prefix) -> None:
        """In the place of the one after the turn before."""
        self.forget([turn.parent])
        self._by_turn[turn] = prefix
        while self.nbytes > self.most:
            self.forget([next(iter(self._by_turn))])

    def forget(self, turns: Sequence[Turn | None]) -> None:
        for turn in turns:
            self._by_turn.pop(turn, None)


class Sessions:
    """The sessions of a service, by id, at most `most` at a time. Room is made only by sessions that nobody asked for during
    `idle_s` seconds, as those of a trainer that died: they end, and what they recorded is gone."""

    def __init__(self, url: str, seed: int, *, most: int, cache_bytes: int, idle_s: float):
        self.url, self.seed, self.most, self.idle_s = url, seed, most, idle_s
        self.caches = TurnCaches(cache_bytes)
        self._by_id: dict[str, Session] = {}
        self._ended: dict[str, None] = {}  # ids, the oldest first
        self._opened = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, id: str | None = None, seed: int | None = None, **options) -> Session:
        """A new session. Refused for an id that is taken or no part of a path, and where there is no room."""
        id = secrets.token_hex(8) if id is None else id
        if id in ("", ".", "..") or "/" in id or len(id) > 200:  # which are remembered when they have ended
            raise Refused(400, f"the id {id[:80]!r} cannot stand in an address: take one without a slash, of 200 characters "
                               "at most", "id")
        with self._lock:
            if id in self._by_id:
                raise Refused(409, f"there is a session {id!r} already; collect it first, or take another id")
            if id in self._ended:
                raise self._missing(id)
            if len(self._by_id) >= self.most:
                self._end_idle()
            if len(self._by_id) >= self.most:
                raise Refused(429, f"{self.most} sessions are open, as many as this service keeps; collect some of them")
            self._opened += 1
            seed = fold_seed(self.seed, self._opened) if seed is None else seed
            session = self._by_id[id] = Session(id, f"{self.url}/sessions/{quote(id, safe='')}/v1", seed, **options)
            return session

    def all(self) -> list[Session]:
        return list(self._by_id.values())

    def get(self, id: str, create: bool = False) -> Session:
        """The session; with `create`, a first request opens it."""
        with self._lock:
            if id not in self._by_id and not create:
                raise self._missing(id)
            session = self._by_id.get(id) or self.open(id)
            session.used = time.monotonic()
            return session

    def end(self, id: str) -> Session:
        """Forget a session; its requests end, and later ones get 410."""
        with self._lock:
            session = self._by_id.pop(id, None)
            if session is None:
                raise self._missing(id)
            self._ended[id] = None
            if len(self._ended) > REMEMBERED:
                del self._ended[next(iter(self._ended))]
        session.close()
        self.caches.forget(session.turns)
        return session

    def close(self) -> None:
        for session in self.all():
            session.close()

    def _end_idle(self) -> None:
        for session in self.all():
            if not session.open and time.monotonic() - session.used > self.idle_s:
                self.end(session.id)

    def _missing(self, id: str) -> Refused:
        if id in self._ended:
            return Refused(410, f"the session {id!r} has ended, and its rollouts are gone; open another")
        return Refused(404, f"there is no session {id[:80]!r}")
