"""Who gets a session when there are fewer than wanted."""

import asyncio
import json
import os
import sys

import pytest
from env_harness import ROOT, EchoEnv, server_process, status
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from grpolab.env import protocol, server
from grpolab.env.server import serve


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.fixture(autouse=True)
def fresh_counts():
    EchoEnv.live = EchoEnv.most = 0
    yield
    EchoEnv.close_seconds = 0.0


async def reopened(url, times):
    """Refusals of a client that says close, does not wait for the environment, and comes again at once (as OpenEnv's)."""
    counts = 0
    for _ in range(times):
        try:
            raw = await connect(url + "/ws", proxy=None)
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


def test_pools_of_two_processes_share_a_server_of_a_third():
    """Two pools of three sessions each, on four slots, for ten groups: each in turn, and each sees its own sessions alone."""
    code = ("import asyncio, json, sys\nfrom grpolab.env.pool import GrpoPool\n"
            "async def main():\n"
            "    seen = []\n"
            "    for round in range(10):\n"
            "        async with GrpoPool(sys.argv[1], size=3, queue=30) as pool:\n"
            "            await pool.reset_group(sys.argv[2] + str(round))\n"
            "            async def rollout(slot):\n"
            "                task = slot.result.observation['task']\n"
            "                said = [await slot.step({'text': f'{sys.argv[2]}{round}.{slot.index}.{n}'}) for n in range(3)]\n"
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
            assert counts["most_sessions"] <= 4 and counts["opened"] == counts["closed"] >= 60 and counts["sessions"] == 0

    run(main())
