"""The rows in progress as a structure of arrays: what each has drawn, where it is, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpolab.decode.sampling import uniforms

NO_ID = -1  # fills up the ids that end a row


class Batch:
    """Entries 0..n-1 are live. `position` is that of the newest token, which is drawn but not yet fed; `count` and `limit`
    are of the tokens drawn; `ends` holds the ids that end a row."""

    by_token = ("tokens", "logps", "raw_logps", "mass", "versions")
    arrays = ("token", "position", "count", "limit", "seed", "ends", *by_token)

    def __init__(self, capacity: int):
        self.n = 0
        self.token, self.position, self.count, self.limit = (np.zeros(capacity, np.int64) for _ in range(4))
        self.seed, self.ends = np.zeros(capacity, np.uint64), np.full((capacity, 1), NO_ID)
        self.tokens, self.versions = (np.zeros((capacity, 64), np.int64) for _ in range(2))
        self.logps, self.raw_logps, self.mass = (np.ones((capacity, 64), np.float32) for _ in range(3))

    def longest(self) -> int:
        """The most tokens that any row may come to have, prompt included."""
        n = self.n
        return int((self.position + 1 - self.count + self.limit)[:n].max()) if n else 0

    def append(self, length: int, limit: int, seed: int, ends: Sequence[int]) -> None:
        """A row that begins after a prompt of `length` tokens and may draw `limit`."""
        i, self.n = self.n, self.n + 1
        self.position[i], self.count[i], self.limit[i], self.seed[i] = length - 1, 0, limit, seed
        if len(ends) > self.ends.shape[1]:
            self.ends = np.pad(self.ends, ((0, 0), (0, len(ends) - self.ends.shape[1])), constant_values=NO_ID)
        self.ends[i], self.ends[i, : len(ends)] = NO_ID, list(ends)

    def uniforms(self, first: int, steps: int) -> np.ndarray:
        """One uniform for each of the next `steps` tokens of rows first.., (steps, n - first)."""
        positions = self.position[first: self.n] + np.arange(1, steps + 1)[:, None]
        return uniforms(self.seed[first: self.n], positions)

    def extend(self, rows: np.ndarray, tokens, logps, raw_logps, mass, version: int) -> None:
        """One more token for each of these rows, all (len(rows),), drawn under the weights of `version`; `mass` None where
        nothing was cut."""
        count = self.count[rows]
        if count.max(initial=0) >= self.tokens.shape[1]:
            for name in self.by_token:
                setattr(self, name, np.concatenate([getattr(self, name)] * 2, axis=1))
        self.tokens[rows, count], self.logps[rows, count], self.raw_logps[rows, count] = tokens, logps, raw_logps
        self.mass[rows, count], self.versions[rows, count] = 1.0 if mass is None else mass, version
        self.token[rows] = tokens
        self.count[rows] += 1
        self.position[rows] += 1

    def broken(self, rows: np.ndarray) -> np.ndarray:
        """Which of these rows drew their newest token from logits that are not finite."""
        last = rows, self.count[rows] - 1
        return ~(np.isfinite(self.raw_logps[last]) & np.isfinite(self.logps[last]))

    def over(self, rows: np.ndarray) -> np.ndarray:
        """Which of these rows their newest token ends: an id of `ends`, or the limit."""
        return (self.ends[rows] == self.token[rows, None]).any(1) | (self.count[rows] >= self.limit[rows])

    def drawn(self, i: int) -> list[np.ndarray]:
        """tokens, logps, raw_logps, kept mass and versions of row i, (count,) each."""
        return [getattr(self, name)[i, : self.count[i]] for name in self.by_token]

    def compact(self, done: Sequence[int]) -> list[tuple[int, int]]:
        """Forget these rows; the last ones move into the gaps. Returns the moves (to, from)."""
        n, gone = self.n - len(done), set(done)
        moves = list(zip((i for i in done if i < n), (i for i in range(n, self.n) if i not in gone)))
        for to, of in moves:
            for name in self.arrays:
                array = getattr(self, name)
                array[to] = array[of]
        self.n = n
        return moves
