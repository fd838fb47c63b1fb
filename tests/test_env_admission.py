"""Who gets a slot when there are fewer than wanted: at once, in line, or not."""

import asyncio
import json
import os
import sys
import time

import pytest
from env_harness import ROOT, SOON, EchoEnv, eventually, server_process, status
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from grpolab.env import admission, protocol, server
from grpolab.env.admission import KEPT, Places
from grpolab.env.client import EnvSession
from grpolab.env.pool import GrpoPool
from grpolab.env.protocol import CapacityError
from grpolab.env.server import serve


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.fixture(autouse=True)
def fresh_counts():
    EchoEnv.live = EchoEnv.most = 0
    yield
    EchoEnv.close_seconds = 0.0


def opens(url, wait=None, group=None):
    headers = {name: text for name, text in (("Prefer", wait and f"wait={wait}"), ("X-Session-Group", group)) if text}
    return connect(url + "/ws", proxy=None, additional_headers=headers)


async def refused(url, **asked):
    with pytest.raises(InvalidStatus) as caught:
        await opens(url, **asked)
    return caught.value.response.status_code


async def reopened(url, times):
    """Refusals of a client that says close, does not wait for the environment, and comes again at once (as OpenEnv's)."""
    counts = 0
    for _ in range(times):
        try:
            raw = await opens(url)
        except InvalidStatus:
            counts += 1
            continue
        await raw.send('{"type":"reset"}')
        await raw.recv()
        await raw.send(protocol.CLOSE)
        await raw.close()
    return counts


def test_a_client_that_reopens_at_once_is_never_refused(monkeypatch):
    async def main():
        EchoEnv.close_seconds = 0.01
        async with serve(EchoEnv, max_sessions=1) as one:
            assert await reopened(one.url, 100) == 0 and EchoEnv.most == 1
            monkeypatch.setattr(server, "LEAVING", 0.0)
            assert await reopened(one.url, 20) > 0  # so the wait is what lets it in

    run(main())


def test_who_does_not_ask_to_wait_is_refused_promptly():
    async def main():
        async with serve(EchoEnv, max_sessions=1) as one, EnvSession(one.url):
            start = time.monotonic()
            for _ in range(10):
                assert await refused(one.url) == 503
            assert time.monotonic() - start < SOON and one.status()["waiting"] == 0
            start = time.monotonic()
            assert await refused(one.url, wait=1) == 503
            assert 1 <= time.monotonic() - start < SOON
        async with serve(EchoEnv, max_sessions=1, queue_timeout=0.2) as one, EnvSession(one.url):
            start = time.monotonic()
            assert await refused(one.url, wait=900000) == 503  # the server's bound
            assert time.monotonic() - start < SOON

    run(main())


def test_who_waits_comes_before_who_came_later():
    """One reopens each round and tries again at once; the other waits in line and is next."""
    async def main():
        async with serve(EchoEnv, max_sessions=1) as one:
            raw = await opens(one.url)
            waiting = asyncio.create_task(opens(one.url, wait=9).__aenter__())
            await eventually(lambda: one.status()["waiting"] == 1, SOON)
            await raw.send(protocol.CLOSE)
            await raw.close()
            again = asyncio.create_task(refused(one.url))
            patient = await asyncio.wait_for(waiting, SOON)
            assert await again == 503
            await patient.close()

    run(main())


def test_the_line_is_served_in_its_order():
    async def main():
        async with serve(EchoEnv, max_sessions=1) as one:
            raw, order = await opens(one.url), []

            async def come(number):
                async with opens(one.url, wait=9) as mine:
                    order.append(number)
                    await mine.send(protocol.CLOSE)
                    await mine.wait_closed()

            comers = []
            for number in range(5):
                comers.append(asyncio.create_task(come(number)))
                await eventually(lambda number=number: one.status()["waiting"] == number + 1, SOON)
            await raw.close()
            await asyncio.gather(*comers)
            assert order == list(range(5)) and EchoEnv.most == 1 == one.status()["most_sessions"]

    run(main())


def test_who_has_waited_longer_than_the_server_lets_wait_keeps_its_place_in_line():
    """`queue_timeout` ends the handshake, not the turn: who asks again under its name is where it was."""
    async def main():
        async with serve(EchoEnv, max_sessions=2, queue_timeout=0.5) as two:
            first, order = [await opens(two.url) for _ in range(2)], []

            async def pool(name, queue):
                async with GrpoPool(two.url, size=2, queue=queue, name=name) as mine:
                    order.append(name)
                    await mine.reset_group()

            waiting = [asyncio.create_task(pool("early", 20))]
            await eventually(lambda: two.status()["waiting"] == 2, SOON)
            while two.status()["waiting"]:  # it was sent away
                await asyncio.sleep(0.01)
            waiting.append(asyncio.create_task(pool("late", 20)))
            await eventually(lambda: two.status()["waiting"] == 2, SOON)
            for raw in first:
                await raw.close()
            await asyncio.gather(*waiting)
            assert order == ["early", "late"]

    run(main())


def test_who_does_not_come_back_loses_its_place_in_line(monkeypatch):
    async def main():
        monkeypatch.setattr(admission, "RETURNS", 0.3)
        monkeypatch.setattr(admission, "KEPT", 0.3)
        async with serve(EchoEnv, max_sessions=2, queue_timeout=0.2) as two:
            raw = await opens(two.url)
            assert await refused(two.url, wait=9, group="gone 2") == 503  # of two slots there is one
            start = time.monotonic()
            async with GrpoPool(two.url, size=1, queue=6):  # which nobody else waits for any more
                assert 0.05 < time.monotonic() - start < 6
                assert await refused(two.url, wait=9) == 503  # without a name none can come back
            await raw.close()
            await (await opens(two.url)).close()

    run(main())


def test_a_group_gets_its_slots_together():
    """Two of four each on four slots, of which one is taken: neither holds what the other lacks."""
    async def main():
        async with serve(EchoEnv, max_sessions=4) as four:
            raw = await opens(four.url)
            assert await refused(four.url, group="small 4") == 503  # at once: three are free
            assert await refused(four.url, group="large 5", wait=9) == 503  # never

            async def party(name):
                mine = await asyncio.gather(*(opens(four.url, wait=9, group=f"{name} 4").__aenter__() for _ in range(4)))
                assert four.status()["sessions"] == 4
                for one in mine:
                    await one.send(protocol.CLOSE)
                    await one.wait_closed()

            parties = [asyncio.create_task(party(name)) for name in "ab"]
            await eventually(lambda: four.status()["waiting"] == 8, SOON)
            assert four.status()["sessions"] == 1 and await refused(four.url) == 503  # the free ones are theirs
            await raw.close()
            await asyncio.gather(*parties)
            assert EchoEnv.most == 4 and four.status()["waiting"] == 0
            assert await refused(four.url, group="no number") == 400

    run(main())


def test_who_replaces_a_lost_session_comes_before_the_line():
    """The first in line waits for all four slots, of which the group has three: both would wait for ever."""
    async def main():
        async with serve(EchoEnv, max_sessions=4) as four:
            mine = [await opens(four.url, group="mine 4") for _ in range(4)]
            all_four = asyncio.gather(*(opens(four.url, wait=9, group="all 4") for _ in range(4)))
            await eventually(lambda: four.status()["waiting"] == 4, SOON)
            mine[0].transport.abort()
            mine[1].transport.abort()
            again = await asyncio.gather(*(opens(four.url, wait=9, group="mine 1") for _ in range(2)))  # on the two at once
            assert four.status()["sessions"] == 4 and four.status()["waiting"] == 4 and not all_four.done()
            again[0].transport.abort()
            await eventually(lambda: four.status()["sessions"] == 3, SOON)
            assert await refused(four.url) == 503
            again[0] = await opens(four.url, group="mine 1")  # without waiting, too
            for one in (*mine[2:], *again):
                await one.close()
            for one in await asyncio.wait_for(all_four, SOON):
                await one.close()

    run(main())


def test_who_leaves_the_line_holds_nobody_up():
    async def main():
        async with serve(EchoEnv, max_sessions=1) as one:
            raw = await opens(one.url)
            first = asyncio.create_task(opens(one.url, wait=9, group="first 1").__aenter__())
            await eventually(lambda: one.status()["waiting"] == 1, SOON)
            second = asyncio.create_task(opens(one.url, wait=9).__aenter__())
            await eventually(lambda: one.status()["waiting"] == 2, SOON)
            first.cancel()
            await eventually(lambda: one.status()["waiting"] == 1, SOON)
            await raw.close()
            await (await asyncio.wait_for(second, SOON)).close()

    run(main())


def test_a_server_that_stops_refuses_its_line():
    async def main():
        async with serve(EchoEnv, max_sessions=1, drain=0.1) as one:
            raw = await opens(one.url)
            waiting = asyncio.create_task(refused(one.url, wait=9))
            await eventually(lambda: one.status()["waiting"] == 1, SOON)
            start = time.monotonic()
        assert await waiting == 503 and time.monotonic() - start < SOON
        await raw.close()

    run(main())


def test_places_that_are_kept_for_who_never_comes_are_free_again():
    async def main():
        places, gone = Places(2), asyncio.get_running_loop().create_future()
        assert await places.take("pair", 2, 0, gone)
        assert not await places.take("other", 1, 0, gone)  # one is kept for the second of the pair
        start = time.monotonic()
        assert await places.take("other", 1, 30, gone)
        assert KEPT / 2 < time.monotonic() - start < KEPT + SOON and places.taken == 2
        places.give_back("pair")
        places.give_back("other")
        assert await places.take("pair", 2, 0, gone) and await places.take("pair", 2, 0, gone)

    run(main())


def test_pools_of_two_processes_take_turns():
    """One opens, closes and opens again without waiting for anybody; the other waits, and is in after that round."""
    code = ("import asyncio, sys\nfrom grpolab.env.pool import GrpoPool\n"
            "async def main():\n    async with GrpoPool(sys.argv[1], size=2, queue=15) as pool:\n"
            "        print('in', flush=True)\n        await pool.reset_group()\nasyncio.run(main())")

    async def main():
        async with serve(EchoEnv, max_sessions=2) as two:
            pool = GrpoPool(two.url, size=2)
            await pool.connect()
            other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, two.url, stdout=asyncio.subprocess.PIPE,
                                                         env={**os.environ, "PYTHONPATH": str(ROOT)})
            rounds = 0
            await eventually(lambda: two.status()["waiting"] == 2, 15)
            while rounds < 50 and two.status()["opened"] < 2 * rounds + 3:
                await pool.close()
                rounds += 1
                try:
                    await pool.connect()
                except CapacityError:
                    break
            assert rounds == 1 and await other.stdout.readline() == b"in\n"
            assert await other.wait() == 0
            await pool.close()

    run(main())


def test_pools_of_two_processes_share_a_server_of_a_third():
    """Two pools of three sessions each, on four slots, for ten groups: each in turn, and each sees its own sessions alone."""
    code = ("import asyncio, json, sys\nfrom grpolab.env.pool import GrpoPool\n"
            "async def main():\n"
            "    seen = []\n"
            "    for round in range(10):\n"
            "        async with GrpoPool(sys.argv[1], size=3, queue=30) as pool:\n"
            "            await pool.reset_group(sys.argv[2] + str(round))\n"
            "            async def rollout(seat):\n"
            "                task = seat.result.observation['task']\n"
            "                said = [await seat.step({'text': f'{sys.argv[2]}{round}.{seat.index}.{n}'}) for n in range(3)]\n"
            "                return task, [(s.observation['echo'], s.observation['turn']) for s in said]\n"
            "            seen.append(await pool.run_group(rollout))\n"
            "        await asyncio.sleep(0.05)\n"
            "    print(json.dumps(seen))\n"
            "asyncio.run(main())")

    async def main():
        with server_process("env_harness:EchoEnv", "--max-sessions", "4", "--isolate", "thread") as (_, url):
            clients = [await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, url, name, stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(ROOT)}) for name in "ab"]
            said = [json.loads((await client.communicate())[0]) for client in clients]
            for name, groups in zip("ab", said, strict=True):
                assert groups == [[[f"{name}{r}", [[f"{name}{r}.{i}.{n}", n + 1] for n in range(3)]] for i in range(3)]
                                  for r in range(10)]
            counts = await asyncio.to_thread(status, url)
            assert counts["most_sessions"] <= 4 and counts["opened"] == counts["closed"] == 60 and counts["sessions"] == 0

    run(main())
