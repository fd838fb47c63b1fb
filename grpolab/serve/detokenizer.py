"""From sampled tokens to the text that a caller reads: what has been said so far, never half a character or half a stop."""

from __future__ import annotations

from collections.abc import Sequence

from grpolab.models.load import Policy
from grpolab.rollouts import Rollout


def text_of(policy: Policy, rollout: Rollout, stops: Sequence[str] = ()) -> str:
    """What a finished rollout says: without the end token, and up to the stop that ended it."""
    tokens = rollout.tokens[:-1] if rollout.finish_reason == "stop_id" else rollout.tokens
    text = policy.decode(tokens)
    if rollout.finish_reason == "stop_string":
        text = text[: min((at for s in stops if (at := text.find(s)) >= 0), default=len(text))]
    return text


def pieces_of(policy: Policy, tokens: Sequence[int]) -> list[str]:
    """Each token's own text; one that is a part of a character shows as U+FFFD."""
    return [policy.tokenizer.decode([t], skip_special_tokens=False) for t in tokens]


class Said:
    """The text of a rollout while it grows.

        new = said.add(tokens)          as tokens come; held back is what may still become a character or a stop
        new = said.end(rollout)         the rest; `said.text` is then all that the caller was given
    """

    def __init__(self, policy: Policy, stops: Sequence[str] = (), stop_ids: Sequence[int] = ()):
        self.policy, self.stops, self.stop_ids = policy, tuple(stops), frozenset(stop_ids)
        self.text = ""
        self._tokens: list[int] = []
        self._from = self._read = 0  # where the window begins whose text is compared, and how far it was read
        self._held, self._stopped = "", False

    def add(self, tokens: Sequence[int]) -> str:
        self._tokens += [t for t in tokens if t not in self.stop_ids]
        decode = self.policy.decode
        before, now = decode(self._tokens[self._from : self._read]), decode(self._tokens[self._from :])
        if self._stopped or now.endswith("\ufffd") or not now.startswith(before):
            return ""
        self._held += now[len(before) :]
        self._from, self._read = self._read, len(self._tokens)
        stopped = [at for s in self.stops if (at := self._held.find(s)) >= 0]
        self._stopped = bool(stopped)
        return self._give(min(stopped) if stopped else len(self._held) - self._beginning())

    def end(self, rollout: Rollout) -> str:
        text = text_of(self.policy, rollout, self.stops)
        new = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text += new
        return new

    def _give(self, letters: int) -> str:
        new, self._held = self._held[:letters], self._held[letters:]
        self.text += new
        return new

    def _beginning(self) -> int:
        """How many of the last letters may be the beginning of a stop."""
        longest = min(len(self._held), max((len(s) - 1 for s in self.stops), default=0))
        ends = (n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self.stops))
        return next(ends, 0)
