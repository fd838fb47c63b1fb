import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from env_harness import EchoEnv, alive, eventually, wait_for

from grpolab.env.backends import BackendError, BackendPool, ProcessBackend
from grpolab.env.client import EnvSession
from grpolab.env.protocol import SessionLost
from grpolab.env.server import serve

# A backend with a state that a tenant can dirty: "pid port" is its address; SET writes, GET reads, WIPE forgets.
STORE = """
import os, socket, sys, threading
listener = socket.create_server(("127.0.0.1", 0))
print(os.getpid(), listener.getsockname()[1], flush=True)
value = ""
while True:
    peer, _ = listener.accept()
    word, _, rest = peer.recv(1000).decode().partition(" ")
    if word == "SET": value = rest
    if word == "WIPE": value = ""
    if word == "HANG": threading.Event().wait()
    peer.sendall((value or "-").encode())
    peer.close()
"""


def ask(address: str, text: str, seconds: float = 2.0) -> str:
    import socket

    with socket.create_connection(("127.0.0.1", int(address.split()[1])), seconds) as peer:
        peer.settimeout(seconds)
        peer.sendall(text.encode())
        return peer.recv(1000).decode()


def store(index=0, scrub=True):
    return ProcessBackend([sys.executable, "-I", "-S", "-c", STORE], health=lambda a: ask(a, "GET") != "",
                          scrub=(lambda a: ask(a, "WIPE") == "-") if scrub else None)


def pid(lease) -> int:
    return int(lease.resource.split()[0])


def test_leases_are_exclusive_and_the_least_recently_used_comes_first():
    with BackendPool(store, 3) as pool:
        a, b, c = (pool.acquire() for _ in range(3))
        assert len({pid(x) for x in (a, b, c)}) == 3
        with pytest.raises(BackendError, match="all 3"):
            pool.acquire()
        assert pool.status() == {"size": 3, "free": 0, "leased": 3, "generations": [1, 1, 1]}
        for lease in (b, c, a):
            pool.release(lease)
        assert [pool.acquire().index for _ in range(3)] == [b.index, c.index, a.index]


def test_a_double_or_foreign_release_is_refused():
    with BackendPool(store, 2) as pool, BackendPool(store, 2) as other:
        mine, theirs = pool.acquire(), other.acquire()
        pool.release(mine)
        with pytest.raises(ValueError, match="twice"):
            pool.release(mine)
        with pytest.raises(ValueError, match="not ours"):
            pool.release(theirs)
        again = pool.acquire(), pool.acquire()
        with pytest.raises(ValueError):
            pool.release(mine)  # its backend is leased again, but not under this number
        assert pool.status()["leased"] == len(again) == 2


def test_a_tenant_never_sees_what_the_last_one_left():
    with BackendPool(store, 1) as pool:
        first = pool.acquire()
        assert ask(first.resource, "SET secret") == "secret"
        pool.release(first)
        second = pool.acquire()
        assert ask(second.resource, "GET") == "-"
        assert pid(second) == pid(first) and second.generation == first.generation  # wiped in place


def test_without_a_scrub_or_when_poisoned_the_next_tenant_gets_a_new_process():
    for scrub, poisoned in ((False, False), (True, True)):
        with BackendPool(lambda i, scrub=scrub: store(i, scrub), 1) as pool:
            first = pool.acquire()
            ask(first.resource, "SET secret")
            pool.release(first, poisoned=poisoned)
            second = pool.acquire()
            assert pid(second) != pid(first) and second.generation == 2 and not alive(pid(first))
            assert ask(second.resource, "GET") == "-"


def test_a_backend_that_died_is_replaced_free_or_leased():
    with BackendPool(store, 1) as pool:
        first = pool.acquire()
        os.kill(pid(first), signal.SIGKILL)  # under its tenant
        wait_for(lambda: not alive(pid(first)), 2)
        pool.release(first)
        second = pool.acquire()
        assert pid(second) != pid(first)
        pool.release(second)
        os.kill(pid(second), signal.SIGSTOP)  # while free: it does not answer
        third = pool.acquire()
        assert ask(third.resource, "GET") == "-" and third.generation == 3


def test_a_backend_that_cannot_start_says_what_it_printed_and_stops_the_others():
    made = []

    def make(index):
        made.append(store() if index == 0 else ProcessBackend([sys.executable, "-c", "raise SystemExit('no licence')"]))
        return made[-1]

    with pytest.raises(BackendError, match="no licence"):
        BackendPool(make, 2).start()
    assert [b.pid for b in made] == [None, None]
    with pytest.raises(BackendError, match="nothing"):
        ProcessBackend([sys.executable, "-c", "import time; time.sleep(60)"], start_timeout=0.2).start()
    with pytest.raises(ValueError, match="list"):
        ProcessBackend("echo hello")
    with pytest.raises(BackendError, match="do not run"):
        BackendPool(store, 1).acquire()


def test_a_backend_that_talks_much_is_never_blocked():
    backend = ProcessBackend([sys.executable, "-u", "-c", "print('here')\nfor i in range(50_000): print('x' * 20)\n"
                                                          "import time; time.sleep(60)"])
    assert backend.start() == "here"
    time.sleep(0.2)
    assert backend.healthy()
    backend.stop()


def test_many_threads_share_the_pool():
    def tenant(number):
        for _ in range(10):
            try:
                lease = pool.acquire()
            except BackendError:  # all are leased
                continue
            ask(lease.resource, f"SET {number}")
            assert ask(lease.resource, "GET") == str(number)
            pool.release(lease)

    with BackendPool(store, 4) as pool, ThreadPoolExecutor(8) as threads:
        list(threads.map(tenant, range(8)))
        assert pool.status()["free"] == 4


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_no_backend_outlives_its_guard():
    backend = store()
    command = int(backend.start().split()[0])
    os.kill(backend.pid, signal.SIGKILL)
    wait_for(lambda: not alive(command), 2)
    assert not backend.healthy()
    backend.stop()


def test_stop_takes_the_whole_process_group():
    backend = ProcessBackend([sys.executable, "-c", "import subprocess, time\nc = subprocess.Popen(['sleep', '60'])\n"
                                                    "print(c.pid, flush=True)\ntime.sleep(60)"])
    grandchild = int(backend.start())
    assert alive(grandchild)
    backend.stop()
    wait_for(lambda: not alive(grandchild), 2)


class StoreEnv(EchoEnv):
    """Its step talks to the leased backend."""

    def step(self, action):
        if action.get("kill"):
            os.kill(int(self.resource.split()[0]), signal.SIGKILL)
        answer = ask(self.resource, action["text"], 60)
        return self._result({"answer": answer, "pid": int(self.resource.split()[0])}, 1.0)


async def test_sessions_lease_a_backend_for_their_life():
    EchoEnv.close_seconds = 0.0
    async with serve(StoreEnv, max_sessions=2, backends=BackendPool(store, 2)) as server:
        async with EnvSession(server.url) as a, EnvSession(server.url) as b:
            await a.step({"text": "SET mine"})
            assert (await b.step({"text": "GET"})).observation["answer"] == "-"
            assert (await a.step({"text": "GET"})).observation["answer"] == "mine"
            assert server.status()["backends"]["leased"] == 2
            assert sorted(s["backend"] for s in server.status()["session_list"]) == ["backend-0.1", "backend-1.1"]
        assert server.status()["backends"] == {"size": 2, "free": 2, "leased": 0, "generations": [1, 1]}
        for _ in range(30):  # at once after close, and clean, each time
            async with EnvSession(server.url) as c:
                assert (await c.step({"text": "GET"})).observation["answer"] == "-"
                await c.step({"text": "SET dirty"})
    with pytest.raises(ValueError, match="1 backends for max_sessions=2"):
        async with serve(StoreEnv, max_sessions=2, backends=BackendPool(store, 1)):
            pass


async def test_a_hung_step_gets_its_backend_killed_which_frees_the_thread():
    async with serve(StoreEnv, max_sessions=1, backends=BackendPool(store, 1), step_timeout=0.2) as server:
        async with EnvSession(server.url) as session:
            before = (await session.step({"text": "GET"})).observation["pid"]
            with pytest.raises(SessionLost, match="STEP_TIMEOUT"):
                await session.step({"text": "HANG"})
        await eventually(lambda: server.status()["sessions"] == 0, 3, "the slot is free")
        assert server.status()["abandoned"] == 0 and not alive(before)
        async with EnvSession(server.url) as session:
            again = (await session.step({"text": "GET"})).observation
            assert again["pid"] != before and again["answer"] == "-"
        assert server.status()["backends"]["generations"] == [2]


async def test_an_environment_that_does_not_close_in_order_poisons_its_backend():
    class Breaks(StoreEnv):
        def close(self):
            super().close()
            raise OSError("left a mess")

    async with serve(Breaks, max_sessions=1, backends=BackendPool(store, 1)) as server:
        for generation in (1, 2, 3):
            async with EnvSession(server.url):
                assert server.status()["backends"]["generations"] == [generation]
