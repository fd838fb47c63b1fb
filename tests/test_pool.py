import asyncio
import contextlib
import hashlib
import os
import threading
import time

import pytest
from env_harness import SOON, AsyncEchoEnv, EchoEnv, eventually, proxy, wait_for

from grpolab.env.calculator import CalculatorEnv
from grpolab.env.client import Deadlines, EnvSession
from grpolab.env.pool import GroupFailed, GrpoPool, rollout_seed
from grpolab.env.protocol import (
    CapacityError,
    ConnectError,
    DeadlineExceeded,
    FactoryError,
    ServerError,
    SessionLost,
    StepResult,
)
from grpolab.env.seat import ReplayDiverged
from grpolab.env.server import serve
from grpolab.env.sync_pool import MultiTurnEnvPool


def run(coroutine):
    """asyncio.run, and nothing is left: no task, no descriptor."""
    async def main():
        await asyncio.wait_for(coroutine, 20)
        await eventually(lambda: len(asyncio.all_tasks()) == 1, 1, "no task is left")

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    asyncio.run(main())
    assert descriptors() <= before  # an earlier test's garbage may go meanwhile


@pytest.fixture(autouse=True)
def fresh_counts():
    EchoEnv.live = EchoEnv.most = 0
    EchoEnv.close_seconds = 0.0


async def two_steps(seat):
    await seat.step({"text": f"a{seat.index}"})
    result = await seat.step({"text": f"b{seat.index}"})
    return result.observation["echo"], result.reward


def test_a_group_on_eight_sessions():
    async def main():
        async with serve(EchoEnv, max_sessions=8) as server:
            async with GrpoPool(server.url, size=8) as pool:
                assert server.status()["sessions"] == 8 == len(pool.seats)
                first = await pool.reset_group({"id": 3})
                assert [r.observation["task"] for r in first] == [{"id": 3}] * 8
                assert len({r.observation["env"] for r in first}) == 8
                assert await pool.run_group(two_steps) == [(f"b{i}", 2.0) for i in range(8)]
                stepped = await pool.run_group_step([{"text": str(i)} for i in range(8)])
                assert [r.observation["echo"] for r in stepped] == [str(i) for i in range(8)]
            assert server.status()["sessions"] == 0 and EchoEnv.live == 0

    run(main())


def test_rollouts_overlap_in_time():
    async def main():
        async with serve(AsyncEchoEnv) as server, GrpoPool(server.url, size=8) as pool:
            start = time.perf_counter()
            await pool.run_group(lambda seat: seat.step({"sleep": 0.5}))
            assert time.perf_counter() - start < 3  # one after another it is 4
            steps = [s for s in pool.trace if s.phase == "step"]
            assert max(s.start for s in steps) < min(s.end for s in steps)

    run(main())


def test_all_or_nothing_over_capacity():
    async def main():
        async with serve(EchoEnv, max_sessions=2) as server:
            pool = GrpoPool(server.url, size=3)
            with pytest.raises(CapacityError) as caught:
                await pool.connect()
            assert caught.value.max_sessions == 2 and pool.seats == []
            for _ in range(10):
                with pytest.raises(CapacityError):
                    await GrpoPool(server.url, size=5).connect()
                assert server.status()["sessions"] == 0  # at once: the failed connect has waited for its goodbyes
            with pytest.raises(RuntimeError, match="not connected"):
                await pool.reset_group()
            async with GrpoPool(server.url, size=2) as smaller:
                await smaller.reset_group()

    run(main())


def test_all_or_nothing_when_one_is_refused_while_others_still_connect():
    """The case in which gather and close leak every late arrival."""
    async def main():
        async with serve(EchoEnv, max_sessions=8) as server, proxy(server.url, lambda n: None if n == 1 else 0.3) as p:
            with pytest.raises(ConnectError):
                await GrpoPool(p.url, size=7).connect()
            await asyncio.sleep(0.6)
            assert server.status()["sessions"] == 0 and EchoEnv.live == 0

    run(main())


def test_all_or_nothing_when_one_environment_cannot_be_made():
    made = []

    def factory():
        made.append(1)
        if len(made) == 4:
            raise OSError("disk full")
        return EchoEnv()

    async def main():
        async with serve(factory, max_sessions=8) as server:
            with pytest.raises(FactoryError, match="disk full"):
                await GrpoPool(server.url, size=8).connect()
            await eventually(lambda: server.status()["sessions"] == 0 and EchoEnv.live == 0, SOON)

    run(main())


def test_a_cancelled_connect_leaves_nothing():
    class Slow(EchoEnv):
        def __init__(self):
            time.sleep(0.2)
            super().__init__()

    async def main():
        async with serve(Slow, max_sessions=8) as server:
            pool = GrpoPool(server.url, size=8)
            connecting = asyncio.create_task(pool.connect())
            await asyncio.sleep(0.1)
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting
            assert pool.seats == [] and server.status()["sessions"] == 0 and EchoEnv.live == 0

    run(main())


def test_a_pool_may_wait_in_line():
    async def main():
        async with serve(EchoEnv, max_sessions=2) as server, GrpoPool(server.url, size=2) as first:
            second = GrpoPool(server.url, size=2, queue=10)
            waiting = asyncio.create_task(second.connect())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await first.close()
            await waiting
            assert [s.phase for s in second.trace].count("queue") >= 1 and EchoEnv.most == 2
            await second.close()

    run(main())


def test_a_hung_step_ends_at_its_deadline_and_its_siblings_keep_their_results():
    async def rollout(seat):
        if seat.index == 3:
            start = time.monotonic()
            try:
                await seat.step({"hang": True})
            finally:
                assert 1 <= time.monotonic() - start < SOON
        return (await seat.step({"text": str(seat.index)})).observation["echo"]

    async def main():
        async with serve(AsyncEchoEnv) as server:
            deadlines = Deadlines(step=1)
            async with GrpoPool(server.url, size=8, on_failure="drop", min_group=6, deadlines=deadlines) as pool:
                await pool.reset_group()
                results = await pool.run_group(rollout)
                assert results == [str(i) for i in range(8) if i != 3] and results.rollouts == (0, 1, 2, 4, 5, 6, 7)
                failure, = results.failures
                assert (failure.rollout, failure.turn) == (3, 0) and isinstance(failure.cause, DeadlineExceeded)
                assert failure.cause.phase == "step" and pool.failures == [failure]

    run(main())


@pytest.mark.parametrize("phase, deadlines", [("episode", Deadlines(episode=1)), ("group", Deadlines(group=1))])
def test_the_deadlines_of_episode_and_group(phase, deadlines):
    async def forever(seat):
        while True:
            await seat.step({"sleep": 0.03})

    async def main():
        async with serve(AsyncEchoEnv) as server, GrpoPool(server.url, size=2, deadlines=deadlines) as pool:
            start = time.monotonic()
            with pytest.raises(DeadlineExceeded) as caught:
                await pool.run_group(forever)
            assert caught.value.phase == phase and time.monotonic() - start < SOON
            await pool.reset_group()
            assert await pool.run_group(two_steps) == [("b0", 2.0), ("b1", 2.0)]

    run(main())


def test_a_timeout_of_the_rollout_itself_is_not_ours():
    async def own(seat):
        raise TimeoutError("mine")

    async def main():
        async with serve(EchoEnv) as server, GrpoPool(server.url, size=2) as pool:
            with pytest.raises(TimeoutError, match="mine") as caught:
                await pool.run_group(own)
            assert not isinstance(caught.value, DeadlineExceeded)

    run(main())


def test_no_stale_reply_ever():
    async def slow(seat):
        await seat.step({"text": "slow", "sleep": 1.5})

    async def main():
        async with serve(EchoEnv, max_sessions=4) as server:
            async with GrpoPool(server.url, size=2, deadlines=Deadlines(step=1)) as pool:
                first = await pool.reset_group()
                with pytest.raises(DeadlineExceeded):
                    await pool.run_group(slow)
                again = await pool.reset_group()
                assert {r.observation["env"] for r in first}.isdisjoint(r.observation["env"] for r in again)
                for i in range(20):
                    for result in await pool.run_group_step([{"text": f"{i}.{n}"} for n in range(2)]):
                        assert result.observation["turn"] == i + 1
                    assert [s.result.observation["echo"] for s in pool.seats] == [f"{i}.0", f"{i}.1"]

    run(main())


def test_cancelling_a_group_leaves_no_task_and_the_next_one_works():
    async def main():
        async with serve(EchoEnv, max_sessions=8) as server, GrpoPool(server.url, size=4) as pool:
            await pool.reset_group()
            tasks = asyncio.all_tasks()
            group = asyncio.create_task(pool.run_group(lambda seat: seat.step({"sleep": 0.2})))
            await asyncio.sleep(0.05)
            group.cancel()
            with pytest.raises(asyncio.CancelledError):
                await group
            assert all(not seat.session.open for seat in pool.seats)
            with pytest.raises(SessionLost):  # not continued on a fresh environment behind the rollout's back
                await pool.run_group_step([{}] * 4)
            await pool.reset_group()
            assert await pool.run_group(two_steps) == [(f"b{i}", 2.0) for i in range(4)]
            await eventually(lambda: len(asyncio.all_tasks()) <= len(tasks), 1, "no task more than before")
            assert server.status()["sessions"] == 4

    run(main())


def test_the_first_failure_cancels_the_rest_and_is_raised_as_it_is():
    ended = []

    async def rollout(seat):
        try:
            await seat.step({"raise": "bad move"} if seat.index == 2 else {"sleep": 0.5})
        finally:
            ended.append(seat.index)

    async def main():
        async with serve(EchoEnv) as server, GrpoPool(server.url, size=4) as pool:
            await pool.reset_group()
            with pytest.raises(ServerError, match="bad move"):
                await pool.run_group(rollout)
            assert sorted(ended) == [0, 1, 2, 3] and [f.rollout for f in pool.failures] == [2]

    run(main())


def test_drop_needs_a_minimum_and_never_hides_a_bug():
    async def half(seat):
        await seat.step({"raise": "bad"} if seat.index % 2 else {"text": ""})
        return 1.0

    async def bug(seat):
        raise KeyError("a bug of the rollout")

    async def main():
        async with serve(EchoEnv) as server:
            async with GrpoPool(server.url, size=4, on_failure="drop", min_group=2) as pool:
                results = await pool.run_group(half)
                assert results == [1.0, 1.0] and [f.rollout for f in results.failures] == [1, 3]
                with pytest.raises(KeyError):
                    await pool.run_group(bug)
            async with GrpoPool(server.url, size=4, on_failure="drop", min_group=3) as pool:
                with pytest.raises(GroupFailed, match="2 of 4 .* 3 are needed.*bad"):
                    await pool.run_group(half)

    run(main())


def test_retry_replays_and_the_result_is_that_of_an_undisturbed_run():
    async def play(seat):
        await seat.reset(seed=seat.group_seed)
        said = []
        for i in range(6):
            if i == 3 and seat.index == 1 and seat.pool.name == "disturbed" and not seat.pool.retried:
                seat.session._socket.transport.abort()
            said.append((await seat.step({"text": f"{i}"})).observation["text"])
        return said

    async def main():
        from grpolab.env.guess import GuessEnv

        async with serve(GuessEnv, max_sessions=4) as server:
            outcome = {}
            for name in ("quiet", "disturbed"):
                async with GrpoPool(server.url, size=2, on_failure="retry", name=name, seed=5) as pool:
                    outcome[name] = await pool.run_group(play)
                    assert len(pool.retried) == (name == "disturbed")
                    if name == "disturbed":
                        assert (pool.retried[0].rollout, pool.retried[0].turn) == (1, 3)
                        assert [s.phase for s in pool.trace].count("replay") == 1
            assert outcome["quiet"] == outcome["disturbed"]

    run(main())


def test_retry_refuses_an_environment_that_is_not_deterministic():
    async def play(seat):
        await seat.reset()
        await seat.step({"text": "a"})
        seat.session._socket.transport.abort()
        await seat.step({"text": "b"})

    async def main():
        async with serve(EchoEnv) as server:  # shows its id() in every observation
            async with GrpoPool(server.url, size=1, on_failure="retry") as pool:
                with pytest.raises(ReplayDiverged, match="at its reset"):
                    await pool.run_group(play)

    run(main())


def test_retry_gives_up_after_its_retries():
    async def play(seat):
        await seat.reset(seed=1)
        await seat.step({"text": "calc: 1", "hang": True})

    class Hangs(CalculatorEnv):
        async def step(self, action):
            await asyncio.sleep(60)

    async def main():
        async with serve(Hangs) as server:
            deadlines = Deadlines(step=0.1)
            async with GrpoPool(server.url, size=1, on_failure="retry", retries=2, deadlines=deadlines) as pool:
                with pytest.raises(DeadlineExceeded):
                    await pool.run_group(play)
                assert len(pool.retried) == 2 and server.status()["opened"] == 3

    run(main())


def test_seeds_are_documented_distinct_and_repeatable():
    assert rollout_seed(0, 0, 0) == int(hashlib.sha256(b"0:0:0").hexdigest()[:8], 16)
    seeds = {rollout_seed(s, g, i) for s in range(5) for g in range(20) for i in range(-1, 8)}
    assert len(seeds) == 5 * 20 * 9 and all(0 <= s < 2**32 for s in seeds)

    async def play(seat):
        question = (await seat.reset(seed=seat.group_seed)).observation["text"]
        return question, seat.seed

    async def transcript(url, seed):
        async with GrpoPool(url, size=3, seed=seed) as pool:
            by_rollout = [await pool.run_group(play) for _ in range(4)]
            by_pool = [[r.observation["text"] for r in await pool.reset_group(distinct=d)] for d in (False, True)]
            return by_rollout, by_pool

    async def main():
        async with serve(CalculatorEnv) as server:
            first, again, other = [await transcript(server.url, seed) for seed in (1, 1, 2)]
            assert first == again != other
            groups, (shared, distinct) = first
            assert all(len({q for q, _ in group}) == 1 for group in groups) and len({g[0][0] for g in groups}) == 4
            assert len({s for group in groups for _, s in group}) == 12
            assert len(set(shared)) == 1 and len(set(distinct)) == 3

    run(main())


def test_the_group_rate_reaches_the_curriculum():
    told = []

    class Curriculum:
        def record_result(self, task, rate):
            told.append((task, rate))

    pool = GrpoPool("ws://127.0.0.1:9", size=4, curriculum=Curriculum())
    assert pool.record_group_result("t", [1.0, 0.0, 0.0, 1.0]) == 0.5
    assert pool.record_group_result("t", [0.85, 0.5], success=0.8) == 0.5
    assert told == [("t", 0.5), ("t", 0.5)]
    with pytest.raises(ValueError, match="no rewards"):
        pool.record_group_result("t", [])


def test_the_phases_of_a_group_add_up_to_its_wall_time():
    async def play(seat):
        await seat.reset()
        for i in range(3):
            with seat.span("generate"):
                await asyncio.sleep(0.02)
            await seat.step({"text": str(i), "sleep": 0.02})

    async def main():
        async with serve(AsyncEchoEnv) as server, GrpoPool(server.url, size=2) as pool:
            start = time.perf_counter()
            await pool.run_group(play)
            wall = time.perf_counter() - start
            for i in range(2):
                spans = [s for s in pool.trace if s.session == i and s.start >= start]
                assert [s.phase for s in spans] == ["reset"] + ["generate", "step"] * 3
                assert sum(s.end - s.start for s in spans) > 0.9 * wall
                assert [s.turn for s in spans if s.phase == "step"] == [1, 2, 3]

    run(main())


def test_close_is_idempotent_and_a_pool_can_be_opened_again():
    async def main():
        async with serve(EchoEnv, max_sessions=2) as server:
            pool = GrpoPool(server.url, size=2)
            for _ in range(3):
                await pool.connect()
                await pool.connect()
                await pool.reset_group()
                await pool.close()
                await pool.close()
            assert server.status()["opened"] == 6 and server.status()["sessions"] == 0

    run(main())


def test_one_group_at_a_time_and_bad_arguments():
    async def main():
        async with serve(EchoEnv) as server, GrpoPool(server.url, size=2) as pool:
            group = asyncio.create_task(pool.run_group(lambda seat: seat.step({"sleep": 0.1})))
            await asyncio.sleep(0.02)
            with pytest.raises(RuntimeError, match="runs a group already"):
                await pool.reset_group()
            await group
            with pytest.raises(ValueError, match="3 actions for 2 sessions"):
                await pool.run_group_step([{}] * 3)

    run(main())
    for bad, match in (({"size": 0}, "size=0"), ({"on_failure": "ignore"}, "ignore"),
                       ({"on_failure": "drop", "min_group": 9}, "min_group=9")):
        with pytest.raises(ValueError, match=match):
            GrpoPool("ws://127.0.0.1:9", **{"size": 8, **bad})
    with pytest.raises(TypeError, match="MultiTurnEnvPool"):
        with GrpoPool("ws://127.0.0.1:9"):
            pass


@contextlib.contextmanager
def served(factory, **options):
    """A server on a loop in another thread, for synchronous tests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    manager = serve(factory, **options)
    server = asyncio.run_coroutine_threadsafe(manager.__aenter__(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(manager.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_the_synchronous_twin():
    threads = threading.active_count()
    with served(EchoEnv, max_sessions=4) as server:
        with MultiTurnEnvPool(server.url, size=4) as pool:
            assert [r.observation["task"] for r in pool.reset_group({"id": 1})] == [{"id": 1}] * 4
            assert pool.run_group(two_steps) == [(f"b{i}", 2.0) for i in range(4)]
            stepped = pool.run_group_step([{"text": str(i)} for i in range(4)])
            assert [r.observation["echo"] for r in stepped] == list("0123")
            assert pool.record_group_result("t", [1.0, 0.0]) == 0.5
            with pytest.raises(ServerError, match="bad"):
                pool.run_group(lambda seat: seat.step({"raise": "bad"}))
        pool.close()
        wait_for(lambda: server.status()["sessions"] == 0, 2, "those that were cut in mid-step are gone as well")
        with pytest.raises(RuntimeError, match="not started"):
            pool.reset_group()
    wait_for(lambda: threading.active_count() <= threads, 2, "every thread has ended")


def test_the_synchronous_twin_starts_after_a_failed_start():
    with served(EchoEnv, max_sessions=2) as server:
        blocker = MultiTurnEnvPool(server.url, size=2)
        blocker.start()
        pool = MultiTurnEnvPool(server.url, size=1)
        with pytest.raises(CapacityError):
            pool.start()
        blocker.close()
        with pool:
            assert len(pool.reset_group()) == 1


def test_the_synchronous_twin_in_a_running_loop():
    async def cell():
        with MultiTurnEnvPool(url, size=2) as pool:
            pool.reset_group()
            return pool.run_group(two_steps)

    with served(EchoEnv, max_sessions=2) as server:
        url = server.url
        assert asyncio.run(cell()) == [("b0", 2.0), ("b1", 2.0)]


def test_the_synchronous_twin_under_an_interrupt():
    import _thread
    import signal

    with served(AsyncEchoEnv, max_sessions=2) as server, MultiTurnEnvPool(server.url, size=2) as pool:
        pool.reset_group()
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            threading.Timer(0.2, _thread.interrupt_main).start()
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                pool.run_group(lambda seat: seat.step({"hang": True}))
            assert time.monotonic() - start < SOON
        finally:
            signal.signal(signal.SIGINT, handler)
        pool.reset_group()
        assert pool.run_group(two_steps) == [("b0", 2.0), ("b1", 2.0)]


def test_a_rollout_on_a_lost_session_fails_instead_of_going_on_elsewhere():
    async def main():
        async with serve(EchoEnv) as server, GrpoPool(server.url, size=2) as pool:
            await pool.reset_group()
            pool.seats[0].session._socket.transport.abort()
            with pytest.raises(SessionLost):
                await pool.run_group(two_steps)
            result, = {type(r) for r in await pool.reset_group()}
            assert result is StepResult
            with pytest.raises(RuntimeError, match="not connected"):
                await EnvSession(server.url).step({})

    run(main())
