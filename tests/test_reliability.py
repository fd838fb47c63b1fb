"""The twelve behaviours of a pool that can be left alone, each with real processes. Everything that fails, fails in
bounded time, and the server's own count says what is left."""

import asyncio
import logging
import random
import signal
import sys
import time

import psutil
import pytest
from env_harness import SOON, eventually, server_process, start_process, status, wait_for
from test_kernel import Kernel
from websockets.asyncio.server import serve as serve_websockets

from grpolab.env import protocol
from grpolab.env.client import Deadlines, EnvSession
from grpolab.env.pool import GrpoPool
from grpolab.env.protocol import ConnectError, DeadlineExceeded, EnvError, SessionLost, StepResult
from grpolab.env.server import serve


def sessions(url):
    return status(url)["sessions"]


async def test_every_deadline_holds_against_a_real_process():
    with server_process() as (process, url):
        deadlines = Deadlines(connect=1, admit=1, reset=1, step=1, close=1)
        async with GrpoPool(url, size=2, deadlines=deadlines) as pool:
            await pool.reset_group()
            process.send_signal(signal.SIGSTOP)
            try:
                for phase, call in (("step", lambda: pool.run_group_step([{}] * 2)),
                                    ("connect", lambda: EnvSession(url, deadlines=deadlines).connect())):
                    start = time.monotonic()
                    with pytest.raises(DeadlineExceeded) as caught:
                        await call()
                    assert caught.value.phase == phase and 1 <= time.monotonic() - start < SOON
            finally:
                process.send_signal(signal.SIGCONT)
            await eventually(lambda: sessions(url) == 0, SOON)
            await pool.reset_group()  # on new sessions


async def test_admission_has_a_deadline_of_its_own():
    async with serve(lambda: time.sleep(10) or 1, close_timeout=0.1) as server:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            await EnvSession(server.url, deadlines=Deadlines(admit=0.2)).connect()
        assert caught.value.phase == "admit" and time.monotonic() - start < SOON


KERNEL_CELLS = [
    "import asyncio, psutil; from grpolab.env.pool import GrpoPool; pool = GrpoPool({url!r}, size=4)\n"
    "def count(): return len(asyncio.all_tasks()), sum(\n"
    "    bool(c.raddr) and c.raddr.port == int({url!r}.split(':')[-1]) for c in psutil.Process().net_connections())\n"
    "await pool.connect(); await pool.reset_group(); before = count()",
    "await pool.run_group(lambda slot: slot.step({{'sleep': 30}}))",
    "await pool.reset_group(); "
    "out = await pool.run_group(lambda slot: slot.step({{'text': 'ok'}}));"
    "after = count(); print([r.observation['echo'] for r in out], after[0] - before[0], before[1], after[1]);"
    "await pool.close(); print(count()[1])",
]


def test_interrupting_a_notebook_cell_leaves_nothing_and_the_next_cell_works():
    with server_process("env_harness:AsyncEchoEnv", "--max-sessions", "4") as (_, url):
        kernel, (begin, long, after) = Kernel(), (cell.format(url=url) for cell in KERNEL_CELLS)
        try:
            assert kernel.run(begin)[0] == "ok"
            start = time.monotonic()
            told, _, (error,), _ = kernel.run(long, seconds=0.5)
            assert told == "error" and ("KeyboardInterrupt" in error or "CancelledError" in error)
            assert time.monotonic() - start < SOON  # the step itself sleeps for 30 s
            told, text, errors, _ = kernel.run(after)
            assert told == "ok", errors
            assert text.split("\n")[:2] == ["['ok', 'ok', 'ok', 'ok'] 0 4 4", "0"]  # tasks; sockets before, after, closed
            wait_for(lambda: sessions(url) == 0, SOON)
        finally:
            kernel.close()


CLIENT = """
import asyncio, sys
from grpolab.env.client import EnvSession
async def main():
    async with EnvSession(sys.argv[1]) as session:
        await session.reset()
        print("in at ws://x", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_stopped_client_loses_its_slot_in_seconds_and_a_killed_one_at_once():
    with server_process("env_harness:EchoEnv", "--ping-interval", "0.5", "--ping-timeout", "0.5") as (_, url):
        client, _ = start_process(sys.executable, "-c", CLIENT, url)
        assert sessions(url) == 1
        client.send_signal(signal.SIGSTOP)
        wait_for(lambda: sessions(url) == 0, SOON, "interval + timeout + the close handshake")
        client.kill()
        client.wait()
    with server_process("env_harness:EchoEnv", "--ping-interval", "0") as (_, url):  # by the closed socket alone
        client, _ = start_process(sys.executable, "-c", CLIENT, url)
        assert sessions(url) == 1
        client.kill()
        wait_for(lambda: sessions(url) == 0, SOON)
        client.wait()


async def test_a_server_that_has_gone_silent_is_found_by_pings():
    with server_process() as (process, url):
        session = EnvSession(url, ping_interval=0.5, ping_timeout=1, deadlines=Deadlines(step=30, close=0.3))
        await session.connect()
        process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        try:
            with pytest.raises(SessionLost):
                await session.step({"text": "into the void"})
            assert time.monotonic() - start < SOON  # not the step's 30 s
            await session.close()
        finally:
            process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("isolate", ["thread", "process"])
async def test_a_client_that_leaves_a_hung_step_frees_its_slot_within_the_step_timeout(isolate):
    options = ("--step-timeout", "1", "--close-timeout", "0.2", "--isolate", isolate)
    with server_process("env_harness:EchoEnv", *options) as (process, url):
        session = EnvSession(url)
        await session.connect()
        step = asyncio.create_task(session.step({"hang": True}))
        await eventually(lambda: status(url)["session_list"][0]["busy"] == "step", 5)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        await asyncio.to_thread(wait_for, lambda: sessions(url) == 0, SOON, "the step's timeout and the closing's")
        assert status(url)["abandoned"] == (isolate == "thread")  # a thread, which nothing can end, is counted
        assert psutil.Process(process.pid).children() == []


async def test_a_killed_server_fails_every_rollout_at_once():
    with server_process() as (process, url):
        pool = GrpoPool(url, size=4)
        await pool.connect()
        await pool.reset_group()
        group = asyncio.create_task(pool.run_group(lambda slot: slot.step({"sleep": 30})))
        await asyncio.sleep(0.2)
        process.kill()
        start = time.monotonic()
        with pytest.raises(SessionLost):
            await group
        with pytest.raises(ConnectError):
            await pool.reset_group()
        await pool.close()
        assert time.monotonic() - start < SOON
        await eventually(lambda: len(asyncio.all_tasks()) == 2, SOON)


def test_five_hundred_cycles_leave_descriptors_threads_children_and_memory_flat():
    """Both ends are measured: the server in its process, the client in this one. (With a process for each session:
    test_process.)"""
    with server_process("env_harness:EchoEnv", "--max-sessions", "4", "--isolate", "thread") as (process, url):
        server, client = psutil.Process(process.pid), psutil.Process()

        async def cycles(n):
            for i in range(n // 4):
                async with GrpoPool(url, size=4) as pool:
                    await pool.reset_group()
                    if i % 5 == 0:  # now and then in the middle of a step
                        group = asyncio.create_task(pool.run_group(lambda slot: slot.step({"sleep": 0.02})))
                        await asyncio.sleep(0.005)
                        group.cancel()
                        await asyncio.gather(group, return_exceptions=True)
                if i % 5 == 0:
                    await eventually(lambda: sessions(url) == 0, SOON)

        def counts():
            wait_for(lambda: sessions(url) == 0, 2)
            time.sleep(0.1)
            return [f(p) for p in (server, client) for f in (
                psutil.Process.num_fds, psutil.Process.num_threads, lambda p: len(p.children()),
                lambda p: p.memory_info().rss)]

        asyncio.run(cycles(100))  # what is allocated once
        before = counts()
        asyncio.run(cycles(500))
        after = counts()
        for i in (0, 1, 2, 4, 5, 6):
            assert after[i] <= before[i], f"fds, threads, children of server and client: {before} -> {after}"
        for i in (3, 7):
            assert after[i] - before[i] < 4 * 2**20, f"bytes of memory: {before[i]} -> {after[i]}"
        assert sessions(url) == 0 and status(url)["opened"] == status(url)["closed"] == 600


class Liar:
    """A deterministic environment whose server cuts connections, sends garbage, answers late, twice, or with an error, each
    time with chance `evil`; `calls` counts requests. What it says honestly is `truth(seed, turn, text)`."""

    GARBAGE = ("{", "[]", '"x"', '{"type":"observation"}', '{"type":"observation","data":{"observation":{},"reward":"1"}}',
               '{"type":"observation","data":{"observation":{},"reward":1e999}}', '{"type":"state","data":{"n":1}}', "[" * 5000,
               '{"type":"error","data":null}', '{"type":"error","data":{"code":["x"],"errors":null}}', b"\x00\xff", "",
               '{"type":"error","data":{"code":"SESSION_ERROR","message":{}}}', '{"type":"mcp","data":{}}')

    def __init__(self, rng, evil):
        self.rng, self.evil, self.calls, self.wrong = rng, evil, 0, 0

    @staticmethod
    def truth(seed, turn, text):
        return f"{seed}/{turn}/{text}"

    async def handle(self, connection):
        seed, turn = None, 0
        async for message in connection:
            kind, data = protocol.parse_request(message)
            if kind == "close":
                return
            if kind == "state":
                await connection.send(protocol.message("state", {}))
                continue
            self.calls += 1
            seed, turn = (data.get("seed"), 0) if kind == "reset" else (seed, turn + 1)
            reply = protocol.observation(StepResult({"said": self.truth(seed, turn, data.get("text"))}, float(turn)))
            act = self.rng.randrange(6) if self.rng.random() < self.evil else None
            self.wrong += act is not None
            if act == 0:
                connection.transport.abort()
            elif act == 1:
                await connection.send(self.rng.choice(self.GARBAGE))
            elif act == 2:
                await asyncio.sleep(self.rng.uniform(0.3, 0.6))  # past the deadline: the connection should be gone
                await connection.send(reply)
            elif act == 3:
                await connection.send(reply)
                await connection.send(reply)
            elif act == 4:
                await connection.send(protocol.error("no", self.rng.choice(["EXECUTION_ERROR", "STEP_TIMEOUT", "WHAT"])))
            elif act == 5:
                await connection.send([reply[:7], reply[7:]])  # honest, in pieces
            else:
                await connection.send(reply)


@pytest.mark.parametrize("policy, seed", [("drop", 1), pytest.param("drop", 2, marks=pytest.mark.full), ("fail", 5)])
async def test_whatever_a_server_does_a_result_is_true_or_there_is_none(policy, seed):
    logging.getLogger("grpolab.test.quiet").setLevel(logging.CRITICAL)
    liar, true, failed = Liar(random.Random(seed), 0.1 if policy == "drop" else 0.05), 0, 0
    async with serve_websockets(liar.handle, "127.0.0.1", 0, logger=logging.getLogger("grpolab.test.quiet")) as listener:
        url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        options = {"deadlines": Deadlines(step=0.2, reset=0.2, close=0.5), "on_failure": policy, "min_group": 1}
        before = len(psutil.Process().net_connections()), len(asyncio.all_tasks())
        async with GrpoPool(url, size=4, seed=seed, **options) as pool:
            async def rollout(slot):
                said = [(await slot.reset(seed=slot.seed)).observation["said"]]
                for i in range(4):
                    result = await slot.step({"text": f"{slot.index}.{i}"})
                    said.append(result.observation["said"])
                    assert result.reward == i + 1
                assert said == [Liar.truth(slot.seed, 0, None)] + [
                    Liar.truth(slot.seed, i + 1, f"{slot.index}.{i}") for i in range(4)]
                return 1.0

            for _ in range(25):
                try:
                    results = await pool.run_group(rollout)
                    true, failed = true + len(results), failed + len(results.failures)
                except EnvError:
                    failed += 1
        assert liar.wrong > 10 and true > 3, (liar.wrong, true, failed)
    await eventually(lambda: len(psutil.Process().net_connections()) < before[0]
                     and len(asyncio.all_tasks()) < before[1] + 1, SOON, "no socket and no task is left")
