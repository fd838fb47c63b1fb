"""Between threads and loops: a coroutine from synchronous code, a fair lock, a thread's own torch threads and their rest."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


def run_sync(coroutine: Coroutine[object, object, T]) -> T:
    """The coroutine's result: through `asyncio.run`, or where a loop already runs (a notebook) inside that loop, which
    nest_asyncio then patches for the rest of the process. Prefer `await`: notebooks have it at the top level."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    try:
        import nest_asyncio2 as nest_asyncio  # the maintained successor
    except ImportError:
        import nest_asyncio

    nest_asyncio.apply(loop)
    return loop.run_until_complete(coroutine)


class FairLock:
    """A reentrant lock that goes to those who wait in order of arrival.

    A `threading.RLock` lets a thread that releases and takes it in a loop, as a decode loop does, starve all others.
    """

    def __init__(self):
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def held(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> FairLock:
        me = threading.get_ident()
        with self._guard:
            if self._owner is None or self._owner == me:
                self._owner, self._depth = me, self._depth + 1
                return self
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()  # released by whoever hands the lock over
        except BaseException:  # an interrupt while waiting
            self._give_up(me, turn)
            raise
        return self

    def __exit__(self, *_) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth == 0:
                self._hand_over()

    def _hand_over(self) -> None:
        self._owner = None
        if self._waiting:
            (self._owner, turn), self._depth = self._waiting.popleft(), 1
            turn.release()

    def _give_up(self, me: int, turn: threading.Lock) -> None:
        with self._guard:
            if (me, turn) in self._waiting:
                self._waiting.remove((me, turn))
            else:  # it had just been handed over
                self._depth = 0
                self._hand_over()


def set_own_threads(number: int) -> None:
    """`torch.set_num_threads` for the calling thread alone: threads that start later keep the process's number."""
    common = torch.get_num_threads()  # asking ends the thread's own start-up, which would set its number once more
    if number != common:
        torch.set_num_threads(number)
        restore = threading.Thread(target=torch.set_num_threads, args=(common,))
        restore.start()
        restore.join()


SOFT_PAUSE = 1  # omp_pause_soft, OpenMP 5.0 section 3.2.43
FORKED = 0x40  # PF_FORKNOEXEC among the flags of a Linux process
PROCESS = os.getpid()


def rest_threads() -> None:
    """Let go the threads that GNU OpenMP keeps for the parallel loops of the calling thread; its next loop gets new ones.

    For a thread that stops computing while another one goes on. Every thread that ran such a loop keeps threads of its own
    for the next, and once all of them are more than the processors, they sleep after each loop instead of waiting a moment:
    a step of decoding, which has a thousand short loops, then takes much longer (`benchmarks/threads.py`)."""
    for pause in _pauses(os.getpid()):
        pause(SOFT_PAUSE)


@cache
def _pauses(process: int) -> list[Callable[[int], int]]:
    """`omp_pause_resource_all` of each GNU OpenMP that the process has loaded; none where OpenMP is another. A forked process
    has none either: it has no threads but the one that forked, and a pause would wait for those of its parent for ever."""
    try:
        flags = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[6])
        files = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_bytes().splitlines() if b"/" in line}
    except OSError:
        return []
    found = []
    for path in map(os.fsdecode, sorted(files)) if process == PROCESS and not flags & FORKED else ():
        if os.path.basename(path).startswith("libgomp"):
            with contextlib.suppress(OSError, AttributeError):  # no library, or replaced since; older than GCC 9
                found.append(ctypes.CDLL(path).omp_pause_resource_all)
    return found
