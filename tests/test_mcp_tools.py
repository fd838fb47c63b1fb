"""The tools of real MCP servers: a session for each episode, and whatever a server does ends in a word or an error."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest
from env_harness import ROOT, eventually, free_port, wait_for
from test_tools import call, turns_of

from grpolab.env.pool import GrpoPool
from grpolab.env.protocol import EnvError
from grpolab.train.episodes import demonstrate
from grpolab.train.mcp_tools import McpServer
from grpolab.train.tools import Tools, ToolsLost

PACKAGES, pytestmark = "agents", pytest.mark.usefixtures("packages")
COMMAND = [sys.executable, ROOT / "tests" / "mcp_server.py"]
ENV = {"PYTHONPATH": str(ROOT / ".venv" / "agents"), "NOTE": "hello"}


@pytest.fixture(scope="module")
def tools(packages):
    return Tools(McpServer(COMMAND, env=ENV), lambda run: float(len(run.calls)), deadline=5)


def servers():
    return [p for p in psutil.Process().children(recursive=True) if "mcp_server.py" in " ".join(p.cmdline())]


def test_what_a_server_lists_is_what_the_policy_is_told(tools, tiny):
    by_name = {tool["function"]["name"]: tool["function"] for tool in tools.schemas}
    assert list(by_name) == ["write", "read", "hang", "leave"] and by_name["write"]["description"] == "Keep a note."
    assert by_name["write"]["parameters"]["properties"]["times"]["type"] == "integer"
    shown = demonstrate(tiny.tokenizer, tools(), {"prompt": "What is first?"}, [call("read", key="first"), "hello"],
                        action_format=tools.action_format(tiny.tokenizer))
    assert "Tool: hello\nAssistant: hello" in tiny.tokenizer.decode(list(shown.ids))
    wait_for(lambda: not servers(), 20)


def test_calls_are_made_and_told_with_their_errors(tools, tiny):
    asked = [call("read", key="first"), call("write", key="a", value="x", times=2) + call("read", key="a"),
             call("read", key="nothing"), call("write", key="a"), call("sing"), "done"]
    results, form = asyncio.run(turns_of(tools, tiny.tokenizer, *asked))
    told = [form.texts(result) for result in results]
    assert told[:2] == [["hello"], ["2 notes", "xx"]]
    assert all(text.startswith("error: ") for (text,) in told[2:5]) and "value" in told[3][0] and "write, read" in told[4][0]
    assert results[-1].reward == 6.0 and form.measure(results) == {"calls": 3, "tool_errors": 3}
    wait_for(lambda: not servers(), 20)


async def test_every_episode_has_a_session_of_its_own(tools, tiny):
    form = tools.action_format(tiny.tokenizer)
    async with GrpoPool(tools, size=2) as pool:
        first, second = pool.slots
        for slot in pool.slots:
            await slot.reset(task={"prompt": "?"}, seed=1)
        assert len(servers()) == 2
        assert form.texts(await form.act(first, call("write", key="a", value="x"))) == ["2 notes"]
        assert "error" in form.texts(await form.act(second, call("read", key="a")))[0]
        await first.reset(task={"prompt": "?"}, seed=2)
        assert "error" in form.texts(await form.act(first, call("read", key="a")))[0]
        assert len(servers()) == 2
    await eventually(lambda: not servers(), 20)


async def test_a_server_that_ends_costs_the_episode_and_one_that_hangs_only_the_call(tools, tiny):
    short = Tools(tools.tools, tools.reward, deadline=1)
    form = short.action_format(tiny.tokenizer)
    async with GrpoPool(short, size=1) as pool:
        slot = pool.slots[0]
        await slot.reset(task={"prompt": "?"}, seed=1)
        began = time.monotonic()
        assert form.texts(await form.act(slot, call("hang"))) == ["error: TimeoutError: longer than 1 s"]
        assert time.monotonic() - began < 5
        await slot.reset(task={"prompt": "?"}, seed=1)
        with pytest.raises(EnvError, match="MCP server ended during leave"):
            await form.act(slot, call("leave"))
        await slot.reset(task={"prompt": "?"}, seed=2)
        assert form.texts(await form.act(slot, call("read", key="first"))) == ["hello"]
    await eventually(lambda: not servers(), 20)


def test_a_server_on_http(tiny):
    port = free_port()
    address = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(ToolsLost, match=r"could not be reached: \w*(Connect|MCP|Closed)\w*Error"):  # not an ExceptionGroup
        Tools(McpServer(address, connect=2), lambda run: 0)
    with subprocess.Popen([*COMMAND, str(port)], env=os.environ | ENV, stderr=subprocess.DEVNULL) as process:
        try:
            def answers():
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    return True

            wait_for(answers, 20)
            http = Tools(McpServer(address), lambda run: 1.0)
            results, form = asyncio.run(turns_of(http, tiny.tokenizer, call("read", key="first"), "done"))
            assert form.texts(results[0]) == ["hello"] and results[-1].reward == 1.0
        finally:
            process.kill()


@pytest.mark.parametrize("server", ["localhost:80", "python server.py", [], [5]])
def test_what_is_no_server_is_refused(server):
    with pytest.raises(ValueError, match="address"):
        McpServer(server)
    with pytest.raises(ToolsLost, match="no-such-program"):
        Tools(McpServer(["no-such-program"]), lambda run: 0)


def test_a_server_that_never_lists_its_tools_is_not_waited_for(tmp_path):
    (tmp_path / "mute.py").write_text('''
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "mute", "version": "1"}}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
    elif message.get("method") != "tools/list" and "id" in message:
        error = {"code": -32601, "message": "no such method"}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}), flush=True)
''')
    with pytest.raises(ToolsLost, match="list"):
        Tools(McpServer([sys.executable, tmp_path / "mute.py"], connect=2), lambda run: 0)
