"""Drafts for speculative decoding out of the text itself, which repeats: a tool's result in the answer, a name in a command."""

from __future__ import annotations

from collections.abc import Iterable

NGRAM = 3  # tokens that must have stood together before
MOST = 16  # tokens of a draft: the pages of a row reach that far ahead (`cache.NEAR`)


class PromptLookup:
    """One rollout's tokens, prompt included, and what last followed each three of them (prompt lookup, Saxena 2023)."""

    def __init__(self, ids: Iterable[int], most: int):
        self.most = self.length = most
        self.ids: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        for token in ids:
            self.after[tuple(self.ids[-NGRAM:])] = len(self.ids)
            self.ids.append(token)

    def draft(self, room: int) -> list[int]:
        """Up to `room` tokens that may come next, or none."""
        start = self.after.get(tuple(self.ids[-NGRAM:]), len(self.ids))
        return self.ids[start: start + max(0, min(room, self.length))]

    def judge(self, drafted: int, accepted: int) -> None:
        """A draft that was right makes the next one longer, a wrong one as short as it was right."""
        if drafted:
            self.length = min(self.most, 2 * self.length) if accepted == drafted else max(1, accepted)
