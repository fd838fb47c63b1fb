import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from grpolab.sync import FairLock, _omp_pause, set_own_threads

PROGRAM = """
import asyncio
from grpolab.sync import run_sync

async def work():
    await asyncio.sleep(0.01)
    return 7

def plain():
    return run_sync(work())

async def notebook():
    return plain()

print({call})
"""


@pytest.mark.parametrize("call", ["plain()", "asyncio.run(notebook())"], ids=["no loop", "a running loop"])
def test_a_coroutine_from_synchronous_code(call):
    """In a process of its own, since nest_asyncio patches asyncio."""
    program = PROGRAM.replace("{call}", call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "7", done.stderr


def test_a_loop_that_retakes_the_lock_lets_others_in():
    """It is also reentrant."""
    lock, done, turns = FairLock(), threading.Event(), []

    def greedy():
        while not done.is_set():
            with lock, lock:
                turns.append("loop")
                time.sleep(0.005)

    def waits():
        with lock:
            turns.append("waiter")

    loop, waiters = threading.Thread(target=greedy), [threading.Thread(target=waits) for _ in range(3)]
    loop.start()
    while not turns:
        time.sleep(0.001)
    started = len(turns)
    for thread in waiters:
        thread.start()
    for thread in waiters:
        thread.join(timeout=10)
    done.set()
    loop.join()
    assert turns.count("waiter") == 3 and turns[started: turns.index("waiter")].count("loop") <= 3


def test_a_thread_keeps_its_own_number_of_torch_threads():
    numbers, before = {}, torch.get_num_threads()

    def own(number):
        set_own_threads(number)
        torch.ones(64, 64) @ torch.ones(64, 64)
        numbers[number] = torch.get_num_threads()

    for number in (1, 3):
        thread = threading.Thread(target=own, args=(number,))
        thread.start()
        thread.join()
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert numbers == {1: 1, 3: 3} and later == [before] and torch.get_num_threads() == before


SPINS = [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "")]


@pytest.mark.parametrize(("given", "expected"), SPINS)
def test_idle_threads_give_up_soon_unless_the_user_says_otherwise(given, expected):
    """And before torch is there, since libgomp reads it then."""
    program = "import grpolab, os, sys; print(os.environ.get('GOMP_SPINCOUNT', ''), 'torch' in sys.modules)"
    plain = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=plain | given)
    assert done.stdout == f"{expected} False\n", done.stderr


THREADS = """
import os
import torch
from grpolab.sync import rest_threads

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
torch.ones(2000, 2000).exp()
busy = threads()
rest_threads()
print(busy - before, threads() - before)
"""


@pytest.mark.full
@pytest.mark.skipif(_omp_pause() is None, reason="torch's loops run on another OpenMP than GNU's here")
def test_who_stops_computing_keeps_no_threads():
    """In a process of its own, which counts its threads."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"OMP_NUM_THREADS": "2"})
    assert done.stdout == "1 0\n", done.stdout + done.stderr
