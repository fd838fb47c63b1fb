"""What was sampled under a session's URL: exact token ids, masks and log-probs, joined into rollouts where turns only append.

A turn goes on from an earlier one where the request's conversation begins with all that was said up to there, the sampled
answer in the caller's own words. Then the ids of before are taken as they were recorded, and what is new is tokenised on its
own: sampled text is never tokenised again. Where the caller rewrote history a new rollout begins. Each sampled token has
mask 1 in exactly one rollout: a second answer to what was answered already finds the turns before it in its prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from grpolab.chat import Message, prompt_ids, rest_ids, text_ids
from grpolab.decode.conversation import joined
from grpolab.decode.requests import Kept, Request
from grpolab.decode.sampling import fold_seed
from grpolab.rollouts import Rollout
from grpolab.serve.openai_schema import Refused

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
REMEMBERED = 65_536  # ids of sessions that ended, whose late requests get 410


@dataclass(frozen=True, eq=False)
class Turn:
    """One answer of the policy. `given`: the ids between the turn before and this answer; `rollout` holds no prompt."""

    parent: Turn | None
    given: tuple[int, ...]
    rollout: Rollout
    ended: bool  # by an end token of its own

    @property
    def prompt(self) -> tuple[int, ...]:
        """All ids that the answer was sampled after."""
        return (self.parent.ids if self.parent else ()) + self.given

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids up to the end of the answer."""
        parts, turn = [], self
        while turn is not None:
            parts += [turn.rollout.tokens, turn.given]
            turn = turn.parent
        return tuple(i for part in reversed(parts) for i in part)


@dataclass(frozen=True)
class Prompt:
    """The ids of a request, the turn that they go on from, and what the session finds it again by once it is answered."""

    ids: tuple[int, ...]
    parent: Turn | None = None
    key: bytes = b""  # of a chat
    text: str | None = None  # of a text prompt


class Session:
    """The record of one session. Its seed makes those of its requests, in their order, where they bring none.

    temperature, max_tokens  what a request samples at and may take where it says nothing; with `fixed`, another temperature,
                             top-k, top-p or min-p is refused, since the loss could not use it
    limit                    the most tokens that a prompt and its answer may have together
    """

    def __init__(self, id: str, url: str, seed: int, temperature: float = 1.0, max_tokens: int | None = None,
                 limit: int | None = None, fixed: bool = False):
        self.id, self.url, self.seed = id, url, seed
        self.temperature, self.max_tokens, self.limit, self.fixed = temperature, max_tokens, limit, fixed
        self.turns: list[Turn] = []
        self.tokens = 0  # that it keeps
        self.cancelled = 0  # answers that their caller did not wait for, which are in no rollout
        self.closed = False
        self.used = time.monotonic()  # when it was last asked for
        self.open: set[Request] = set()
        self._chains: list[list[Turn]] = []
        self._asked = 0
        self._lock = threading.Lock()
        self._said: dict[bytes, list[Turn]] = {}
        self._lengths: set[tuple[str, int]] = set()  # kinds and lengths of what `_said` knows beside chats

    def next_seed(self) -> int:
        """The seed of the next request."""
        with self._lock:
            self._asked += 1
            return fold_seed(self.seed, self._asked)

    def track(self, request: Request) -> None:
        """A request that is being sampled; the end of the session ends it."""
        with self._lock:
            self.open.add(request)
            if self.closed:
                request.cancel()

    def prompt_of_chat(self, tokenizer, messages: Sequence[Message]) -> Prompt:
        keys = [b"chat"]
        for m in messages:
            keys.append(_roll(keys[-1], m))
        for k in range(len(messages) - 1, 0, -1):
            turn = self._find(keys[k]) if messages[k - 1]["role"] == "assistant" else None
            rest = rest_ids(tokenizer, messages, k, turn.ended) if turn else None
            if rest is not None:
                return Prompt(turn.ids + tuple(rest), turn, keys[-1])
        return Prompt(tuple(prompt_ids(tokenizer, messages)), None, keys[-1])

    def prompt_of_text(self, tokenizer, text: str) -> Prompt:
        for length in self._known("text", len(text)):
            if turn := self._find(_digest("text", text[:length])):
                rest = text_ids(tokenizer, text[length:]) if length < len(text) else []
                lead = 1 if rest and rest[0] == tokenizer.bos_token_id and turn.ids[0] == rest[0] else 0
                return Prompt(turn.ids + tuple(rest[lead:]), turn, text=text)
        return Prompt(tuple(text_ids(tokenizer, text)), text=text)

    def prompt_of_ids(self, ids: tuple[int, ...]) -> Prompt:
        for length in self._known("ids", len(ids)):
            if turn := self._find(_digest("ids", ids[:length])):
                return Prompt(ids, turn)
        return Prompt(ids)

    def record(self, prompt: Prompt, rollout: Rollout, text: str, ended: bool) -> Turn | None:
        """Keep an answer, `text` as its caller got it; None where the session is closed."""
        before = len(prompt.parent.ids) if prompt.parent else 0
        turn = Turn(prompt.parent, rollout.prompt[before:], replace(rollout, prompt=()), ended)
        ids = rollout.prompt + rollout.tokens
        keys = [_digest("ids", ids)]
        if prompt.key:
            keys.append(_roll(prompt.key, {"role": "assistant", "content": text}))
        with self._lock:
            if self.closed:
                return None
            self.turns.append(turn)
            self.tokens += len(turn.given) + len(rollout.tokens)
            self._lengths.add(("ids", len(ids)))
            if prompt.text is not None:
                keys.append(_digest("text", prompt.text + text))
                self._lengths.add(("text", len(prompt.text + text)))
            for key in keys:
                self._said.setdefault(key, []).append(turn)
            tail = next((c for c in self._chains if c[-1] is turn.parent), None)
            self._chains.append([turn]) if tail is None else tail.append(turn)
        return turn

    def rollouts(self) -> list[Rollout]:
        """What was sampled so far: one rollout while turns only append, a further one for each time that history changed. A
        rollout's `finish_reason` is that of its last turn, its `policy_version` that of its first."""
        with self._lock:
            chains = [list(chain) for chain in self._chains]
        out = []
        for chain in chains:
            whole = replace(chain[0].rollout, prompt=chain[0].prompt)
            for turn in chain[1:]:
                whole = joined(whole, replace(turn.rollout, prompt=whole.prompt + whole.tokens + turn.given))
            out.append(whole)
        return out

    def close(self) -> None:
        """End what is still being sampled and keep nothing more."""
        with self._lock:
            self.closed = True
            waiting = list(self.open)
        for request in waiting:
            request.cancel()

    def _find(self, key: bytes) -> Turn | None:
        """A turn that was answered with this: one that nothing goes on from yet, so that the next appends, else the last."""
        with self._lock:
            turns = self._said.get(key, [])
            tails = {id(chain[-1]) for chain in self._chains} if len(turns) > 1 else set()
            return next((t for t in turns if id(t) in tails), turns[-1] if turns else None)

    def _known(self, kind: str, most: int) -> list[int]:
        with self._lock:
            return sorted((n for k, n in self._lengths if k == kind and n <= most), reverse=True)


def _roll(key: bytes, message: Message) -> bytes:
    """The key of a conversation that goes on with a message."""
    return hashlib.sha256(key + json.dumps([message["role"], message["content"]]).encode()).digest()


def _digest(kind: str, what: str | Sequence[int]) -> bytes:
    data = what.encode("utf-8", "surrogatepass") if isinstance(what, str) else array("q", what).tobytes()
    return hashlib.sha256(kind.encode() + b"\0" + data).digest()


class KeptTurns:
    """Keys and values of the newest answers, at most `most` bytes of them, so that a next turn feeds only what is new. They are
    a shortcut: without them, as after new weights, a turn is fed as a whole."""

    def __init__(self, most: int):
        self.most, self._bytes = most, 0
        self._by_turn: OrderedDict[Turn, tuple[Kept, int]] = OrderedDict()
        self._lock = threading.Lock()

    def after(self, turn: Turn | None) -> Kept:
        """What was kept of a turn; nothing where it is gone."""
        with self._lock:
            return self._by_turn[turn][0] if turn in self._by_turn else Kept()

    def keep(self, turn: Turn, kept: Kept) -> None:
        """In the place of what was kept of the turn before."""
        size = sum(t.nbytes for t in kept.cache.tensors) if kept.cache is not None else 0
        self.forget([turn.parent])
        with self._lock:
            if 0 < size <= self.most:
                self._by_turn[turn] = kept, size
                self._bytes += size
            while self._bytes > self.most:
                self._bytes -= self._by_turn.popitem(last=False)[1][1]

    def forget(self, turns: Sequence[Turn | None]) -> None:
        with self._lock:
            for turn in turns:
                self._bytes -= self._by_turn.pop(turn, (None, 0))[1]


class Sessions:
    """The sessions of a service, by id. At most `most` at a time, which keep at most `tokens` tokens together; a request that
    finds no room is refused. Room is made only by sessions that nobody asked for during `idle_s` seconds, as those of a trainer
    that died: they end, and what they recorded is gone."""

    def __init__(self, url: str, seed: int, most: int, tokens: int, kept_bytes: int, idle_s: float = 3600.0):
        self.url, self.seed, self.most, self.tokens, self.kept = url, seed, most, tokens, KeptTurns(kept_bytes)
        self.idle_s = idle_s
        self._by_id: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED)
        self._made = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, id: str | None = None, seed: int | None = None, **options) -> Session:
        """A new session. Refused for an id that is taken, odd or of a session that ended, and where there is no room."""
        if len(self._by_id) >= self.most:
            self._end_idle()
        with self._lock:
            id = secrets.token_hex(8) if id is None else _checked_id(id)
            if id in self._by_id:
                raise Refused(409, f"there is a session {id!r} already; collect it first, or take another id")
            if id in self._ended:
                raise _gone(id)
            if len(self._by_id) >= self.most:
                raise Refused(429, f"{self.most} sessions are open, as many as this service keeps; collect some of them")
            self._made += 1
            seed = fold_seed(self.seed, self._made) if seed is None else seed
            session = self._by_id[id] = Session(id, f"{self.url}/sessions/{id}/v1", seed, **options)
            return session

    def get(self, id: str, create: bool = False) -> Session:
        """The session; with `create`, a first request opens it."""
        session = self._by_id.get(_checked_id(id))
        if session is not None:
            session.used = time.monotonic()
            return session
        if id in self._ended:
            raise _gone(id)
        if not create:
            raise Refused(404, f"there is no session {id!r}")
        try:
            return self.open(id)
        except Refused as refused:
            if refused.status == 409:  # another request of the same moment opened it
                return self.get(id)
            raise

    def check_room(self) -> None:
        if self._kept_tokens() >= self.tokens:
            self._end_idle()
        if (kept := self._kept_tokens()) >= self.tokens:
            raise Refused(429, f"the sessions keep {kept} tokens, and this service keeps at most {self.tokens}; collect some")

    def _kept_tokens(self) -> int:
        return sum(s.tokens for s in list(self._by_id.values()))

    def _end_idle(self) -> None:
        for session in list(self._by_id.values()):
            if not session.open and time.monotonic() - session.used > self.idle_s:
                with suppress(Refused):  # somebody collects it at this moment
                    self.end(session.id)

    def end(self, id: str) -> Session:
        """Forget a session; its requests end, and later ones get 410."""
        with self._lock:
            session = self._by_id.pop(id, None)
            if session is None:
                raise _gone(id) if id in self._ended else Refused(404, f"there is no session {id!r}")
            self._ended.append(id)
        session.close()
        self.kept.forget(session.turns)
        return session

    def close(self) -> None:
        for session in list(self._by_id.values()):
            session.close()


def _checked_id(id: str) -> str:
    if not ID.fullmatch(id):
        raise Refused(400, f"{id[:80]!r} is no session id: take 1 to 128 letters, digits, dots, hyphens and underscores, "
                           "a letter or a digit first")
    return id


def _gone(id: str) -> Refused:
    return Refused(410, f"the session {id!r} has ended, and its rollouts were collected; open another")
