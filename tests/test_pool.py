import asyncio
import gc
import hashlib
import os
import signal
import threading
import time
import weakref

import pytest
from env_harness import SOON, AsyncEchoEnv, EchoEnv, eventually, wait_for
from websockets.asyncio.server import serve as serve_websockets
from websockets.datastructures import Headers
from websockets.http11 import Response

from grpolab.env import protocol
from grpolab.env.calculator import CalculatorEnv
from grpolab.env.client import Deadlines, EnvSession
from grpolab.env.curriculum import Curriculum
from grpolab.env.pool import GroupFailed, GrpoPool, rollout_seed
from grpolab.env.protocol import (
    CapacityError,
    ConnectError,
    DeadlineExceeded,
    FactoryError,
    InvalidAction,
    ServerError,
    SessionLost,
    StepResult,
)
from grpolab.env.server import serve
from grpolab.env.sync_pool import MultiTurnEnvPool


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Counts begin anew, and afterwards no descriptor is left (`conftest` looks at tasks)."""
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    EchoEnv.live = EchoEnv.most = 0
    before = descriptors()
    yield
    # An earlier test's garbage may go meanwhile; a worker's thread closes its loop after the session's slot is free.
    wait_for(lambda: descriptors() <= before, SOON, "no descriptor is left")


async def two_steps(slot):
    await slot.step({"text": f"a{slot.index}"})
    result = await slot.step({"text": f"b{slot.index}"})
    return result.observation["echo"], result.reward


async def test_a_group_on_eight_sessions():
    async with serve(EchoEnv, max_sessions=8) as server:
        async with GrpoPool(server.url, size=8) as pool:
            assert server.status()["sessions"] == 8 == len(pool.slots)
            first = await pool.reset_group({"id": 3})
            assert [r.observation["task"] for r in first] == [{"id": 3}] * 8
            assert len({r.observation["env"] for r in first}) == 8
            assert await pool.run_group(two_steps) == [(f"b{i}", 2.0) for i in range(8)]
            stepped = await pool.run_group_step([{"text": str(i)} for i in range(8)])
            assert [r.observation["echo"] for r in stepped] == [str(i) for i in range(8)]
        assert server.status()["sessions"] == 0 and EchoEnv.live == 0


async def test_steps_of_a_group_keep_its_number_and_the_next_group_has_another():
    async with serve(EchoEnv, max_sessions=2) as server, GrpoPool(server.url, size=2, seed=7) as pool:
        seen = []

        async def rollout(slot):
            await slot.reset(seed=slot.group_seed)
            seen.append((slot.group, slot.group_seed, slot.seed))

        def numbers():
            return pool.group, [slot.group for slot in pool.slots]

        await pool.reset_group()
        assert numbers() == (0, [0, 0])
        for _ in range(2):
            await pool.run_group_step([{"text": "a"}] * 2)
            assert numbers() == (0, [0, 0])
        await pool.run_group(rollout)  # without a reset of its own: these are other rollouts
        assert numbers() == (1, [1, 1])
        assert sorted(seen) == sorted((1, rollout_seed(7, 1, -1), rollout_seed(7, 1, i)) for i in range(2))
        await pool.reset_group()
        await pool.run_group(two_steps)  # the group that was reset
        assert numbers() == (2, [2, 2])


async def test_all_or_nothing_over_capacity():
    async with serve(EchoEnv, max_sessions=2) as server:
        pool = GrpoPool(server.url, size=3)
        with pytest.raises(CapacityError) as caught:
            await pool.connect()
        assert caught.value.max_sessions == 2 and pool.slots == []
        for _ in range(10):
            with pytest.raises(CapacityError):
                await GrpoPool(server.url, size=5, queue=30).connect()  # it will never fit, so it does not wait
            assert server.status()["sessions"] == 0  # at once: the failed connect has waited for its goodbyes
        for unopened in (pool.reset_group, lambda: EnvSession(server.url).step({})):
            with pytest.raises(RuntimeError, match="not connected"):
                await unopened()
        async with GrpoPool(server.url, size=2) as smaller:
            await smaller.reset_group()


async def test_all_or_nothing_when_one_fails_while_others_still_connect():
    """The case in which gather and close leak every late arrival."""
    made = iter(range(99))

    def factory():
        if next(made) == 1:
            raise OSError("disk full")
        time.sleep(0.3)
        return EchoEnv()

    async with serve(factory, max_sessions=8) as server:
        with pytest.raises(FactoryError, match="disk full"):
            await GrpoPool(server.url, size=7).connect()
        await eventually(lambda: server.status()["sessions"] == 0 == EchoEnv.live, SOON)


async def test_a_cancelled_connect_leaves_nothing():
    class Slow(EchoEnv):
        def __init__(self):
            time.sleep(0.2)
            super().__init__()

    async with serve(Slow, max_sessions=8) as server:
        pool = GrpoPool(server.url, size=8)
        connecting = asyncio.create_task(pool.connect())
        await asyncio.sleep(0.1)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert pool.slots == [] and server.status()["sessions"] == 0 and EchoEnv.live == 0


async def test_a_pool_may_wait_for_a_full_server():
    async with serve(EchoEnv, max_sessions=2) as server, GrpoPool(server.url, size=2) as first:
        second = GrpoPool(server.url, size=2, queue=10)
        waiting = asyncio.create_task(second.connect())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await first.close()
        await waiting
        assert EchoEnv.most == 2 and server.status()["refused"] >= 2  # it was refused, and asked again
        await second.close()


async def test_a_hung_step_ends_at_its_deadline_and_its_siblings_keep_their_results():
    async def rollout(slot):
        if slot.index == 3:
            start = time.monotonic()
            try:
                await slot.step({"hang": True})
            finally:
                assert 1 <= time.monotonic() - start < SOON
        return (await slot.step({"text": str(slot.index)})).observation["echo"]

    async with serve(AsyncEchoEnv) as server:
        deadlines = Deadlines(step=1)
        async with GrpoPool(server.url, size=8, on_failure="drop", min_group=6, deadlines=deadlines) as pool:
            await pool.reset_group()
            results = await pool.run_group(rollout)
            assert results == [str(i) for i in range(8) if i != 3] and results.rollouts == (0, 1, 2, 4, 5, 6, 7)
            failure, = results.failures
            assert (failure.rollout, failure.turn) == (3, 0) and isinstance(failure.cause, DeadlineExceeded)
            assert failure.cause.phase == "step" and pool.failures == [failure]


@pytest.mark.parametrize("phase, deadlines", [("episode", Deadlines(episode=1)), ("group", Deadlines(group=1))])
async def test_the_deadlines_of_episode_and_group(phase, deadlines):
    async def forever(slot):
        while True:
            await slot.step({"sleep": 0.03})

    async with serve(AsyncEchoEnv) as server, GrpoPool(server.url, size=2, deadlines=deadlines) as pool:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            await pool.run_group(forever)
        assert caught.value.phase == phase and time.monotonic() - start < SOON
        await pool.reset_group()
        assert await pool.run_group(two_steps) == [("b0", 2.0), ("b1", 2.0)]


async def test_cancelling_a_group_leaves_no_task_and_the_next_one_works():
    async with serve(EchoEnv, max_sessions=8) as server, GrpoPool(server.url, size=4) as pool:
        await pool.reset_group()
        tasks = asyncio.all_tasks()
        group = asyncio.create_task(pool.run_group(lambda slot: slot.step({"sleep": 0.2})))
        await asyncio.sleep(0.05)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert all(not slot.session.open for slot in pool.slots)
        for go_on in (lambda: pool.run_group_step([{}] * 4), lambda: pool.run_group(two_steps)):
            with pytest.raises(SessionLost):  # not continued on a fresh environment behind the rollout's back
                await go_on()
        await pool.reset_group()
        assert await pool.run_group(two_steps) == [(f"b{i}", 2.0) for i in range(4)]
        await eventually(lambda: len(asyncio.all_tasks()) <= len(tasks), 1, "no task more than before")
        assert server.status()["sessions"] == 4


async def test_the_first_failure_cancels_the_rest_and_is_raised_as_it_is():
    ended = []

    async def rollout(slot):
        try:
            await slot.step({"raise": "bad move"} if slot.index == 2 else {"sleep": 0.5})
        finally:
            ended.append(slot.index)

    async with serve(EchoEnv) as server, GrpoPool(server.url, size=4) as pool:
        await pool.reset_group()
        with pytest.raises(ServerError, match="bad move"):
            await pool.run_group(rollout)
        assert sorted(ended) == [0, 1, 2, 3] and [f.rollout for f in pool.failures] == [2]


async def test_drop_needs_a_minimum_and_never_hides_a_bug():
    async def half(slot):
        await slot.step({"raise": "bad"} if slot.index % 2 else {"text": ""})
        return 1.0

    async def bug(slot):
        raise KeyError("a bug of the rollout")

    async with serve(EchoEnv) as server:
        async with GrpoPool(server.url, size=4, on_failure="drop", min_group=2) as pool:
            results = await pool.run_group(half)
            assert results == [1.0, 1.0] and [f.rollout for f in results.failures] == [1, 3]
            with pytest.raises(KeyError):
                await pool.run_group(bug)
        async with GrpoPool(server.url, size=4, on_failure="drop", min_group=3) as pool:
            with pytest.raises(GroupFailed, match="2 of 4 .* 3 are needed.*bad"):
                await pool.run_group(half)


async def test_the_slots_share_the_rollouts_that_there_are():
    """One that is lost holds up nobody, and is named by its number."""
    seeds = []

    async def job(slot, i):
        seeds.append(slot.seed)
        await slot.step({"raise": "bad"} if i == 4 else {"text": ""})
        return i, slot.index

    async with serve(EchoEnv) as server, GrpoPool(server.url, size=3, on_failure="drop", min_group=1) as pool:
        results = await pool.run_group(job, jobs=10)
        assert [i for i, _ in results] == [0, 1, 2, 3, 5, 6, 7, 8, 9] == list(results.rollouts)
        assert sorted(seeds) == sorted(rollout_seed(0, pool.group, i) for i in range(10))
        assert {index for _, index in results} == {0, 1, 2} and [f.rollout for f in pool.failures] == [4]


async def test_rollouts_that_no_slot_has_a_session_for_are_an_error():
    async def job(slot, i):
        if i > 1:
            raise ConnectError("the server is gone")
        return i

    async with serve(EchoEnv) as server, GrpoPool(server.url, size=2, on_failure="drop", min_group=1) as pool:
        with pytest.raises(GroupFailed, match="2 of 6 rollouts finished.*rollout 3"):
            await pool.run_group(job, jobs=6)
        assert [f.rollout for f in pool.failures] == [2, 3]  # each slot gave up at its first


class Mortal(EchoEnv):
    """{"poison": true} breaks it for good, as a dead backend does, but only once among all."""

    poisoned = False
    budget = 1

    def reset(self, seed=None, episode_id=None, task=None):
        if self.poisoned:
            raise RuntimeError("my backend is dead")
        return super().reset(seed, episode_id, task)

    def step(self, action):
        if action.pop("poison", False) and Mortal.budget:
            Mortal.budget, self.poisoned = 0, True
            raise RuntimeError("my backend is dead")
        return super().step(action)


async def test_a_session_whose_environment_raised_is_replaced_before_its_next_episode():
    async with serve(Mortal, max_sessions=4) as server:
        async with GrpoPool(server.url, size=4, on_failure="drop", min_group=3) as pool:
            async def rollout(slot):
                return (await slot.step({"poison": slot.index == 2})).observation["turn"]

            finished = []
            for _ in range(3):
                await pool.reset_group()
                finished.append((await pool.run_group(rollout)).rollouts)
            assert finished == [(0, 1, 3), (0, 1, 2, 3), (0, 1, 2, 3)]
            failure, = pool.failures
            assert failure.rollout == 2 and "my backend is dead" in str(failure.cause)
            assert server.status()["opened"] == 5 and server.status()["sessions"] == 4


async def test_a_session_whose_environment_has_no_state_before_its_first_reset_is_kept():
    class Stateless(EchoEnv):
        def state(self):
            raise RuntimeError("not begun")

    async with serve(Stateless) as server, GrpoPool(server.url, size=1) as pool:
        await pool.reset_group()
        await pool.reset_group()
        assert server.status()["opened"] == 1


async def test_an_action_that_cannot_be_read_costs_neither_the_session_nor_the_slot():
    """What becomes of it is the rollout's rule: here it tells the policy in one group, and gives up in the next."""
    async def tells(slot):
        first = (await slot.reset(seed=1)).observation["env"]
        with pytest.raises(InvalidAction, match="unknown keys \\['zzz'\\]"):
            await slot.step({"zzz": 1})
        result = await slot.step({"text": "better"})
        return slot.turn, result.observation["turn"], result.observation["env"] == first

    async def gives_up(slot):
        await slot.reset(seed=1)
        return await slot.step({"zzz": 1} if slot.index == 0 else {"text": ""})

    async with serve(EchoEnv) as server, GrpoPool(server.url, size=2, on_failure="drop", min_group=1) as pool:
        session = pool.slots[0].session
        assert await pool.run_group(tells) == [(1, 1, True)] * 2 and pool.failures == []
        results = await pool.run_group(gives_up)
        assert results.rollouts == (1,) and isinstance(results.failures[0].cause, InvalidAction)
        await pool.run_group(tells)
        assert pool.slots[0].session is session


async def test_a_message_that_nobody_asked_for_ends_the_session_and_shifts_no_reply():
    async def twice(connection):
        sent = 0
        async for text in connection:
            if text == protocol.CLOSE:
                return
            if text == protocol.STATE:
                await connection.send(protocol.message("state", {}))
                continue
            sent += 1
            reply = protocol.observation(StepResult({"n": sent}, float(sent)))
            await connection.send(reply)
            if sent == 2:
                await connection.send(reply)

    async with serve_websockets(twice, "127.0.0.1", 0) as listener:
        url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with GrpoPool(url, size=1) as pool:
            await pool.reset_group()
            assert (await pool.run_group_step([{}]))[0].observation == {"n": 2}
            with pytest.raises(SessionLost, match="nobody had asked for"):
                await pool.run_group_step([{}])
            assert not pool.slots[0].session.open
            assert (await pool.reset_group())[0].observation == {"n": 1}  # on a new session


async def test_what_a_pool_keeps_is_bounded(monkeypatch):
    monkeypatch.setattr("grpolab.env.pool.TRACE_SPANS", 20)
    monkeypatch.setattr("grpolab.env.pool.LAST_FAILURES", 3)
    held = []

    class Observed:
        pass

    async def fails(slot):
        observation = Observed()
        held.append(weakref.ref(observation))
        await slot.step({"raise": f"{len(held)}"})

    async with serve(EchoEnv) as server:
        async with GrpoPool(server.url, size=1, on_failure="drop", min_group=1) as pool:
            for _ in range(10):
                with pytest.raises(GroupFailed):
                    await pool.run_group(fails)
            for _ in range(30):
                await pool.run_group(lambda slot: slot.step({"text": "x" * 1000}))
            assert len(pool.trace) == 20 and [s.turn for s in pool.trace] == list(range(21, 41))
            assert [str(f.cause).split()[-2] for f in pool.failures] == ["8", "9", "10"]
            gc.collect()
            assert not any(ref() for ref in held)  # the records say what happened, and hold no observation


@pytest.mark.parametrize("token", ["secret\n", "", "secret\u00df"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(token):
    with pytest.raises(ValueError, match="token") as caught:
        GrpoPool("ws://127.0.0.1:9", token=token)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status, body, error", [
    (503, '{"error":"full","active_sessions":2,"max_sessions":2}', CapacityError),
    (503, '{"active_sessions":"two","max_sessions":[]}', CapacityError), (503, "[1]", CapacityError),
    (503, "[" * 200_000, CapacityError), (502, "<html>", ConnectError), (401, '{"error":null}', ConnectError)])
async def test_a_refused_handshake_is_typed_whatever_it_says(status, body, error):
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode("latin-1"))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listener:
        url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        with pytest.raises(ConnectError, match=url) as caught:
            await EnvSession(url).connect()
        assert type(caught.value) is error and f"HTTP {status}" in str(caught.value) and len(str(caught.value)) < 3000
        if error is CapacityError:
            assert caught.value.active in (None, 2) and caught.value.max_sessions in (None, 2)


async def test_seeds_are_documented_distinct_and_repeatable():
    assert rollout_seed(0, 0, 0) == int(hashlib.sha256(b"0:0:0").hexdigest()[:8], 16)
    seeds = {rollout_seed(s, g, i) for s in range(5) for g in range(20) for i in range(-1, 8)}
    assert len(seeds) == 5 * 20 * 9 and all(0 <= s < 2**32 for s in seeds)

    async def transcript(seed):
        async with GrpoPool(CalculatorEnv, size=3, seed=seed) as pool:
            return [[r.observation["text"] for r in await pool.reset_group()] for _ in range(4)]

    first, again, other = [await transcript(seed) for seed in (1, 1, 2)]
    assert first == again != other
    assert all(len(set(group)) == 1 for group in first) and len({group[0] for group in first}) == 4


def test_the_group_rate_reaches_the_curriculum():
    curriculum = Curriculum([["t"]])
    pool = GrpoPool("ws://127.0.0.1:9", size=4, curriculum=curriculum)
    assert pool.record_group_result("t", [0.85, 0.5, 0.0, 1.0], success=0.8) == 0.5 == curriculum.table()[0]["rate"]


async def test_close_is_idempotent_and_a_pool_can_be_opened_again():
    async with serve(EchoEnv, max_sessions=2) as server:
        pool = GrpoPool(server.url, size=2)
        for _ in range(3):
            await pool.connect()
            await pool.connect()
            await pool.reset_group()
            await pool.close()
            await pool.close()
        assert server.status()["opened"] == 6 and server.status()["sessions"] == 0


async def test_one_group_at_a_time():
    async with serve(EchoEnv) as server, GrpoPool(server.url, size=2) as pool:
        group = asyncio.create_task(pool.run_group(lambda slot: slot.step({"sleep": 0.1})))
        await asyncio.sleep(0.02)
        with pytest.raises(RuntimeError, match="runs a group already"):
            await pool.reset_group()
        await group
        with pytest.raises(ValueError, match="3 actions for 2 sessions"):
            await pool.run_group_step([{}] * 3)
        other = GrpoPool(server.url, size=2)
        again = await asyncio.gather(other.connect(), other.connect(), return_exceptions=True)
        assert isinstance(again[1], RuntimeError) and server.status()["sessions"] == 4
        await other.close()
        assert server.status()["sessions"] == 2


@pytest.mark.parametrize("options, message", [
    ({"size": 0}, "size=0"), ({"size": 2.5}, "size=2.5"), ({"on_failure": "retry"}, "use one of fail, drop"),
    ({"on_failure": "drop", "min_group": 9}, "min_group=9"),
    ({"queue": float("inf")}, "queue=inf"), ({"queue": -1}, "queue=-1"), ({"queue": float("nan")}, "queue=nan")])
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        GrpoPool("ws://127.0.0.1:9", **options)


def test_the_synchronous_twin():
    threads = threading.active_count()
    with MultiTurnEnvPool(EchoEnv, size=4) as pool:
        assert [r.observation["task"] for r in pool.reset_group({"id": 1})] == [{"id": 1}] * 4
        assert pool.run_group(two_steps) == [(f"b{i}", 2.0) for i in range(4)]
        stepped = pool.run_group_step([{"text": str(i)} for i in range(4)])
        assert [r.observation["echo"] for r in stepped] == list("0123")
        assert pool.record_group_result("t", [1.0, 0.0]) == 0.5
        with pytest.raises(ServerError, match="bad"):
            pool.run_group(lambda slot: slot.step({"raise": "bad"}))
    pool.close()
    assert EchoEnv.live == 0
    with pytest.raises(RuntimeError, match="not started"):
        pool.reset_group()
    wait_for(lambda: threading.active_count() <= threads, 2, "every thread has ended")


async def test_the_synchronous_twin_starts_after_a_failed_start_and_in_a_running_loop():
    made = []

    def factory():
        made.append(1)
        if len(made) == 1:
            raise OSError("disk full")
        return EchoEnv()

    pool = MultiTurnEnvPool(factory, size=1)
    with pytest.raises(FactoryError, match="disk full"):
        pool.start()
    with pool:
        assert len(pool.reset_group()) == 1


def test_the_synchronous_twin_under_an_interrupt():
    with MultiTurnEnvPool(AsyncEchoEnv, size=2) as pool:
        pool.reset_group()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pool.run_group(lambda slot: slot.step({"hang": True}))
        assert time.monotonic() - start < SOON
        pool.reset_group()
        assert pool.run_group(two_steps) == [("b0", 2.0), ("b1", 2.0)]


@pytest.mark.parametrize("target", ["http://127.0.0.1:1/ws", "mailto:x"])
async def test_a_redirect_to_what_is_no_websocket_is_a_connect_error(target):
    def redirect(connection, request):
        return Response(302, "Found", Headers([("Location", target), ("Content-Length", "0")]))

    async with serve_websockets(lambda _: None, "127.0.0.1", 0, process_request=redirect) as listener:
        url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        with pytest.raises(ConnectError, match="redirects to"):
            await EnvSession(url).connect()
