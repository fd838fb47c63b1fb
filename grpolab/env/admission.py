"""The places of a server: who holds one, who waits in line for one, and for whom some are kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable

KEPT = 2.0  # s; how long the places of a party whose turn has come are kept for those of it that are still on their way
RETURNS = 3.0  # s; how long a named party that was sent away is still in line: Retry-After says 1 s, clients add up to a half
LONGEST_LINE = 1024  # handshakes


class _Party:
    """Sessions that get their places together, or not yet."""

    def __init__(self, size: int):
        self.left, self.waiting, self.turn = size, 0, asyncio.Event()
        self.returns = False  # it was sent away, and wanted to wait longer
        self.away: asyncio.TimerHandle | None = None  # until it counts as gone


class Places:
    """`total` places, first come, first served. A party of several is served when there is room for all of it, so that two
    of them never hold half the places each; until then nobody behind it is. Only who holds places already comes before the
    line, with those that are to replace lost ones: the first in line may be waiting for all that its group has. Who was sent
    away while wanting to wait longer (`returns`) keeps its turn for RETURNS s, if it has a name to come back under."""

    def __init__(self, total: int):
        self.total, self.taken, self.waiting = total, 0, 0
        self._line: dict[Hashable, _Party] = {}
        self._kept: dict[Hashable, _Party] = {}
        self._held: Counter[Hashable] = Counter()

    @property
    def _free(self) -> int:
        return self.total - self.taken - sum(party.left for party in self._kept.values())

    async def take(self, key: Hashable, size: int, seconds: float, gone: asyncio.Future, returns: bool = False) -> bool:
        """Take a place for one of the `size` sessions of `key`: waits in line up to `seconds`, or until `gone` is done; under
        `returns` it is expected again when the seconds are over. Nothing awaits between the taking and the return; who has
        True owes a `give_back`."""
        if key not in self._kept:
            holds = key in self._held
            crowded = (self._line and not holds) or self._free < size
            if size > self.total or (crowded and (seconds <= 0 or self.waiting >= LONGEST_LINE)):
                return False
            party = self._line.get(key)
            if party is None:
                party = _Party(size)
                self._line = {key: party, **self._line} if holds else self._line | {key: party}
            elif party.waiting >= party.left:  # one more than it said: they get their places together, too
                if party.left >= self.total:
                    return False
                party.left += 1
            self._serve()
            if key in self._line:
                await self._wait(key, party, seconds, gone, returns)
        party = self._kept.get(key)
        if party is None:
            return False
        if gone.done():
            if size == 1:
                self._drop(key, party)
            return False
        party.left -= 1
        if party.left == 0:
            del self._kept[key]
        self.taken += 1
        self._held[key] += 1
        return True

    async def _wait(self, key: Hashable, party: _Party, seconds: float, gone: asyncio.Future, returns: bool) -> None:
        turn = asyncio.ensure_future(party.turn.wait())
        if not party.waiting:  # it is back, or new
            party.returns = False
            if party.away is not None:
                party.away.cancel()
        party.waiting += 1
        self.waiting += 1
        try:
            done, _ = await asyncio.wait([turn, gone], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            party.returns |= returns and not done
        finally:
            turn.cancel()
            party.waiting -= 1
            self.waiting -= 1
            if not party.waiting and party.returns:
                party.away = asyncio.get_running_loop().call_later(RETURNS, self._leave, key, party)
            elif not party.waiting:
                self._leave(key, party)

    def _leave(self, key: Hashable, party: _Party) -> None:
        if self._line.get(key) is party:
            del self._line[key]
            self._serve()

    def give_back(self, key: Hashable) -> None:
        self.taken -= 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        self._serve()

    def close(self) -> None:
        """Nobody gets a place any more; who waits is told at once."""
        self.total = 0
        for party in self._line.values():
            party.turn.set()
        self._line.clear()
        self._kept.clear()

    def _serve(self) -> None:
        while self._line:
            key, party = next(iter(self._line.items()))
            if self._free < party.left:
                break
            del self._line[key]
            self._kept[key] = party
            party.turn.set()
            asyncio.get_running_loop().call_later(KEPT, self._drop, key, party)

    def _drop(self, key: Hashable, party: _Party) -> None:
        if self._kept.get(key) is party:
            del self._kept[key]
            self._serve()
