"""From sampled tokens to the text that a caller reads, also while it grows: never half a character or half a stop."""

from __future__ import annotations

from collections.abc import Sequence

from grpolab.models.load import Policy
from grpolab.rollouts import Rollout


def text_of(policy: Policy, rollout: Rollout, stops: Sequence[str] = ()) -> str:
    """The text of a finished rollout: without the end token, and up to the stop that ended it."""
    tokens = rollout.tokens[:-1] if rollout.finish_reason == "stop_id" else rollout.tokens
    text = policy.decode(tokens)
    if rollout.finish_reason == "stop_string":
        text = text[: min((at for s in stops if (at := text.find(s)) >= 0), default=len(text))]
    return text


def pieces_of(policy: Policy, tokens: Sequence[int]) -> list[str]:
    """Each token's own text; one that is a part of a character shows as U+FFFD."""
    return [policy.tokenizer.decode([t], skip_special_tokens=False) for t in tokens]


class StreamedText:
    """The text of a rollout while it grows: `add(tokens)` and at last `end(rollout)` return what is new of `text`. Held back is
    what may still become a character or a stop."""

    def __init__(self, policy: Policy, stops: Sequence[str] = (), stop_ids: Sequence[int] = ()):
        self.policy, self.stops, self.stop_ids = policy, tuple(stops), frozenset(stop_ids)
        self.text = ""
        self.begun, self.sent = False, 0  # whether any of it was sent, and how many of its characters
        self.offset = 0  # characters of the tokens' own texts so far
        self._tokens: list[int] = []
        self._begin = self._read = 0  # the window of tokens whose text is compared, and how far it was read
        self._pending, self._stopped = "", False

    def add(self, tokens: Sequence[int]) -> str:
        self._tokens += [t for t in tokens if t not in self.stop_ids]
        decode = self.policy.decode
        before, now = decode(self._tokens[self._begin : self._read]), decode(self._tokens[self._begin :])
        if self._stopped or now.endswith("\ufffd") or not now.startswith(before):
            return ""
        self._pending += now[len(before) :]
        self._begin, self._read = self._read, len(self._tokens)
        stops = [at for s in self.stops if (at := self._pending.find(s)) >= 0]
        self._stopped = bool(stops)
        end = min(stops) if stops else len(self._pending) - self._begun_stop()
        new, self._pending = self._pending[:end], self._pending[end:]
        self.text += new
        return new

    def end(self, rollout: Rollout) -> str:
        text = text_of(self.policy, rollout, self.stops)
        new = text.removeprefix(self.text) if text.startswith(self.text) else ""
        self.text += new
        return new

    def _begun_stop(self) -> int:
        """How many of the last characters may be the beginning of a stop."""
        longest = min(len(self._pending), max((len(s) - 1 for s in self.stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._pending[-n:]) for s in self.stops)), 0)
