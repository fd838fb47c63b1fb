"""The text that a caller reads: of a rollout that is finished, and of one that still grows in a stream."""

from __future__ import annotations

from collections.abc import Sequence

from grpolab.decode.sampling import SamplingParams
from grpolab.models.load import Policy
from grpolab.rollouts import Rollout


def text_of(policy: Policy, rollout: Rollout, stops: Sequence[str]) -> str:
    """The text of a finished rollout: without the end token, and up to the stop that ended it."""
    text = policy.decode(rollout.tokens[:-1] if rollout.finish_reason == "stop_id" else rollout.tokens)
    return text[: _stop_in(text, stops)] if rollout.finish_reason == "stop_string" else text


class StreamedText:
    """The text of a rollout while it grows, without what may still become a character or a stop. It is decoded as a whole each
    time (0.1 ms for 1000 tokens), since what a token says may depend on those before."""

    def __init__(self, policy: Policy, params: SamplingParams):
        self.policy, self.stops, self.stop_ids = policy, params.stop_strings, frozenset(params.stop_ids)
        self.first, self.sent, self.offset = True, 0, 0  # whether nothing was sent, else its characters, those of its tokens
        self._text = ""
        self._tokens: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        """All of the text so far."""
        self._tokens += [t for t in tokens if t not in self.stop_ids]
        text = self.policy.decode(self._tokens).rstrip("\ufffd")
        longest = min(len(text), max((len(s) - 1 for s in self.stops), default=0))
        begun = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self.stops)), 0)
        return self._grown(text[: min(_stop_in(text, self.stops), len(text) - begun)])

    def end(self, rollout: Rollout) -> str:
        return self._grown(text_of(self.policy, rollout, self.stops))

    def _grown(self, text: str) -> str:
        self._text = text if text.startswith(self._text) else self._text
        return self._text


def _stop_in(text: str, stops: Sequence[str]) -> int:
    """Where the first of the stops begins; the end of the text where it has none."""
    return min((at for s in stops if (at := text.find(s)) >= 0), default=len(text))
