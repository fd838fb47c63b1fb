"""Between threads and loops: a coroutine from synchronous code, a fair lock, a thread's own torch threads and their rest."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
# Held while transformers makes a model: it changes torch for the whole process meanwhile, so that of two at once in threads
# one lacks its tied weights, and so does every later one.
MODEL_LOADING = threading.Lock()


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
    """A reentrant lock that a thread which releases and takes it in a loop, as a decode loop does, cannot keep from others.

    Whoever wants `_lock` waits for it inside `_entry`, so a thread that comes back waits behind those already there.
    """

    def __init__(self):
        self._entry, self._lock = threading.Lock(), threading.Lock()
        self._owner, self._depth = None, 0

    def held(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> FairLock:
        if not self.held():
            with self._entry:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1
        return self

    def __exit__(self, *_) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()


def set_own_threads(number: int) -> None:
    """`torch.set_num_threads` for the calling thread alone: threads that start later keep the process's number."""
    common = torch.get_num_threads()  # asking ends the thread's own start-up, which would set its number once more
    if number != common:
        torch.set_num_threads(number)
        restore = threading.Thread(target=torch.set_num_threads, args=(common,))
        restore.start()
        restore.join()


SOFT_PAUSE = 1  # omp_pause_soft, OpenMP 5.0 section 3.2.43
PROCESS = os.getpid()


def rest_threads() -> None:
    """Let go the threads that GNU OpenMP keeps for the parallel loops of the calling thread; its next loop gets new ones.

    For a thread that stops computing while another one goes on. Every thread that ran such a loop keeps threads of its own
    for the next, and once all of them are more than the processors, they sleep after each loop instead of waiting a moment:
    a step of decoding, which has a thousand short loops, then takes much longer (`benchmarks/threads.py`). Nothing happens
    where torch has another OpenMP, nor in a forked process, where a pause would wait for its parent's threads for ever.
    """
    pause = _omp_pause()
    if pause is not None and os.getpid() == PROCESS:
        pause(SOFT_PAUSE)


@cache
def _omp_pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the GNU OpenMP that torch brings or has loaded; None where there is none."""
    packages = Path(torch.__file__).parents[1]
    for path in (*packages.glob("torch/lib/libgomp*.so*"), *packages.glob("torch.libs/libgomp*.so*"), "libgomp.so.1"):
        with contextlib.suppress(OSError, AttributeError):  # no such library, or older than GCC 9
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW).omp_pause_resource_all
    return None
