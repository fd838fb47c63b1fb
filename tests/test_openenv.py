"""Interoperability with the real OpenEnv packages, each in its own interpreter: our client with their server, their
client with ours."""

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from env_harness import ROOT, server_process, start_process

from grpolab.env.action_format import MCP
from grpolab.env.client import EnvSession
from grpolab.env.pool import GrpoPool
from grpolab.env.protocol import CapacityError, ServerError
from grpolab.env.server import serve

PEER = str(ROOT / "tests" / "openenv_peer.py")


RELEASES = [pytest.param("openenv-core 0.3.0", marks=pytest.mark.full), "openenv 0.10.0"]


@pytest.fixture(scope="module", params=RELEASES)
def python(request):
    """An interpreter that has this release: the one that `make openenv` makes, or the one that runs the tests."""
    name, version = request.param.split()
    own = ROOT / ".venv" / f"{name}-{version}" / "bin" / "python"
    if own.exists():
        return str(own)
    try:
        if importlib.metadata.version(name) == version:
            return sys.executable
    except importlib.metadata.PackageNotFoundError:
        pass
    missing = f"{name} {version} is not installed: make openenv"
    if os.environ.get("REQUIRE_OPENENV"):  # `make test` says so: there, a skip would be a hole
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="module")
def their_server(python):
    """Their server for two sessions: (process, url). One for all tests of a release: it is slow to import."""
    process, url = start_process(python, PEER, "server", "2")
    yield process, url
    process.kill()
    process.wait()


async def test_our_client_with_their_server(their_server):
    _, url = their_server

    async with EnvSession(url) as session, EnvSession(url) as other:
        assert await session.state() == {"episode_id": None, "step_count": 0}
        first = await session.reset(seed=7, episode_id="ep1", task={"id": 3})
        assert (first.observation["seed"], first.reward, first.done) == (7, None, False)
        result = await session.step({"text": "hello"})
        assert (result.observation["echo"], result.observation["turn"], result.reward) == ("hello", 1, 5.0)
        assert "metadata" not in result.observation
        assert (await session.state())["step_count"] == 1
        with pytest.raises(ServerError) as caught:
            await session.step({"zzz": 1})
        assert caught.value.code == "VALIDATION_ERROR" and "zzz" in str(caught.value)
        with pytest.raises(ServerError, match="boom: x") as caught:
            await session.step({"boom": "boom: x"})
        assert caught.value.code == "EXECUTION_ERROR"
        assert (await session.step({"text": "on"})).observation["turn"] == 3
        assert (await other.reset()).observation["env"] != first.observation["env"]
        with pytest.raises(CapacityError) as caught:  # behind a handshake that succeeded
            await EnvSession(url).connect()
        assert (caught.value.active, caught.value.max_sessions) == (2, 2)


async def test_our_pool_is_all_or_nothing_on_their_server(their_server):
    _, url = their_server

    for _ in range(5):
        with pytest.raises(CapacityError):
            await GrpoPool(url, size=3).connect()
    async with GrpoPool(url, size=2, queue=5) as pool:  # nothing was leaked
        await pool.reset_group()
        assert await pool.run_group(lambda slot: slot.step({"text": "abc"})) is not None
    for _ in range(10):  # close waits for the server, so the slots are free at once
        async with GrpoPool(url, size=2) as pool:
            await pool.reset_group()


def test_their_client_with_our_server(python):
    with server_process("env_harness:EchoEnv", "--max-sessions", "3") as (_, url):
        reply = subprocess.run([python, PEER, "client", url.replace("ws://", "http://")], capture_output=True,
                               text=True, timeout=60)
        assert reply.returncode == 0, reply.stderr[-2000:]
        said = json.loads(reply.stdout)
    assert said["before"]["step_count"] == 0 and said["before"]["episode_id"] is None
    observation, reward, done = said["reset"]
    assert (observation["seed"], observation["task"], reward, done) == (7, {"id": 3}, None, False)
    observation, reward, done = said["step"]
    assert (observation["echo"], observation["turn"], reward, done) == ("hello", 1, 1.0, False)
    assert said["after"]["episode_id"] == "ep1" and said["after"]["step_count"] == 1
    assert "VALIDATION_ERROR" in said["invalid"]
    assert "boom: x" in said["raised"] and "EXECUTION_ERROR" in said["raised"]
    assert said["again"]["echo"] == "still here"
    assert said["refused"].startswith("ConnectionError") and "503" in said["refused"]  # from connect()


@pytest.mark.parametrize("isolate", ["thread", pytest.param("process", marks=pytest.mark.full)])
def test_their_client_calls_the_tools_of_our_server(python, isolate):
    """`Tools` over the wire: listed and called by OpenEnv's own client, by MCP's messages, and seen by the reward."""
    async def main():
        async with serve("tool_envs:ROOMS", isolate=isolate) as server:
            asked = await asyncio.create_subprocess_exec(python, PEER, "caller", server.url.replace("ws://", "http://"),
                                                         stdout=asyncio.subprocess.PIPE)
            said = json.loads((await asked.communicate())[0])
            assert [tool["name"] for tool in said["tools"]] == ["room", "hang"]
            assert said["called"]["result"]["content"][0]["text"] == "12" and said["called"]["error"] is None
            assert said["unknown"]["error"]["message"].startswith("there is no tool 'nothing'")
            assert said["last"] == [True, 1.0]
            async with EnvSession(server.url) as session:
                await session.reset(seed=1, task={"prompt": "Where is Ann?"})
                (tool, _) = (await session.mcp("tools/list"))["tools"]
                assert tool["inputSchema"]["required"] == ["name"] and tool["description"] == "The room of a person."
                called = await session.mcp("tools/call", {"name": "room", "arguments": {"name": "Ann"}})
                assert called == {"content": [{"type": "text", "text": "12"}], "isError": False}
                wrong = await session.mcp("tools/call", {"name": "room", "arguments": {"nam": 1}})
                assert wrong["isError"] and "Missing required argument" in wrong["content"][0]["text"]
                late = await session.mcp("tools/call", {"name": "hang"})
                assert late["isError"] and "longer than 0.3 s" in late["content"][0]["text"]
                assert MCP.texts(await MCP.act(session, '{"name": "room", "arguments": {"name": "Ann"}}')) == ["12"]
                for method, params, code in (("tools/nothing", {}, -32601), ("tools/call", {"name": 5}, -32602)):
                    with pytest.raises(ServerError, match=str(code)):
                        await session.mcp(method, params)
                assert (await session.step({"text": "12"})).reward == 2.0  # two calls that were answered

    asyncio.run(asyncio.wait_for(main(), 180))  # their packages are slow to import
