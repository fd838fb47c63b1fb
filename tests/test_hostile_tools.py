"""Tools, schemas and callers that do what they should not: told or refused, bounded, and nothing is left behind."""

import asyncio
import json
import threading
import time

import pytest
from env_harness import eventually, wait_for
from openai import BadRequestError
from test_serve_tools import ask
from test_sessions import in_session
from test_tools import call, turns_of
from tool_envs import HOSTILE, hang
from websockets.asyncio.client import connect

from grpolab.chat import user
from grpolab.env.server import serve
from grpolab.serve.answer_format import AnswerFormat
from grpolab.train import tools as tools_module
from grpolab.train.tools import MAX_RESULT, Tools

RESET = {"type": "reset", "data": {"task": {"prompt": "x"}, "seed": 1}}
ANN = {"method": "tools/call", "params": {"name": "room", "arguments": {"name": "Ann"}}}


def mcp(**request):
    return {"type": "mcp", "data": request}


def tool_call(name, arguments=None):
    return mcp(method="tools/call", params={"name": name, "arguments": arguments})


@pytest.mark.parametrize("isolate", ["thread", pytest.param("process", marks=pytest.mark.full)])
async def test_a_session_outlives_whatever_its_mcp_client_and_its_tools_do(isolate):
    """Each message has an answer, and then a call has its own."""
    strange = [
        (mcp(id=1), -32601), (mcp(id=2, method=["tools/list"]), -32601), (mcp(id=3, method="initialize"), -32601),
        (mcp(id=4, method="tools/call", params=5), -32602), (mcp(id=5, method="tools/call", params=[]), -32602),
        (tool_call(5), -32602), (tool_call("room", [1]), -32602), (tool_call("room", "x"), -32602),
        (tool_call("nothing", {}), "there is no tool 'nothing'"), (tool_call("room", {"name": 5}), "valid string"),
        (tool_call("room"), "Missing required argument"), (tool_call("hang"), "longer than 0.3 s"),
        (tool_call("large"), "<|endoftext|><|"), (tool_call("raises"), "error: ValueError: <|endoftext|>"),
        (tool_call("ends"), "error: SystemExit: 3"),
    ]
    async with serve(HOSTILE if isolate == "thread" else "tool_envs:HOSTILE", isolate=isolate) as server:
        async with connect(server.url + "/ws", proxy=None, max_size=2**20) as raw:
            async def ask(message):
                await raw.send(message if isinstance(message, str) else json.dumps(message))
                return json.loads(await asyncio.wait_for(raw.recv(), 30))["data"]

            await ask(RESET)
            for message, told in strange:
                answer = await ask(message)
                if isinstance(told, int):
                    assert answer["error"]["code"] == told, message
                else:
                    (content,) = answer["result"]["content"]
                    assert told in content["text"] and len(content["text"]) < MAX_RESULT + 100
                    assert answer["result"]["isError"] == (message != tool_call("large"))
            for id, kept in (("1e999", None), ("-1e999", None), ('{"a": 1}', None), ('"\\ud800"', "\ud800"), ("7", 7)):
                request = json.dumps(mcp(**ANN)).replace('{"method"', f'{{"id": {id}, "method"', 1)
                answer = await ask(request)
                assert answer["id"] == kept and answer["result"]["content"][0]["text"] == "12"
            refused = await ask({"type": "step", "data": {"text": 5}})
            assert "an answer is a text" in refused["message"]
            assert (await ask({"type": "step", "data": {"text": "12"}}))["reward"] == 12.0
        await eventually(lambda: server.status()["sessions"] == 0, 10)


def test_calls_that_never_return_are_so_many_and_no_more(tiny, monkeypatch):
    def running():
        return sum(t.name == "grpolab-tool" for t in threading.enumerate())

    left = running()
    monkeypatch.setattr(tools_module, "MAX_THREADS", left + 2)
    tools = Tools([hang], lambda run: 0.0, deadline=0.1)
    results, form = asyncio.run(turns_of(tools, tiny.tokenizer, call("hang"), call("hang"), call("hang"), "12"))
    told = [text for result in results[:-1] for text in form.texts(result)]
    assert told[:2] == ["error: TimeoutError: longer than 0.1 s"] * 2 and "have not returned" in told[2]
    wait_for(lambda: running() <= left, 20)
    (again, _), _ = asyncio.run(turns_of(tools, tiny.tokenizer, call("hang"), "12"))
    assert form.texts(again) == told[:1]  # those that have ended are not counted for ever


@pytest.mark.parametrize("schema", [{"enum": 5}, {"type": 5}, {"anyOf": 5}, {"type": {}}, True, None, [], "x"], ids=str)
async def test_schemas_that_no_template_can_write_are_refused(tiny, schema):
    """Or written; the service does not fail."""
    async with in_session(tiny) as (service, _, client):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
        try:
            await ask(client, user("x"), tools=[tool], max_tokens=2)
        except BadRequestError as error:
            assert "with these tools" in str(error)
        assert service.status()["failed"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_who_leaves_while_its_answers_are_checked(tiny, monkeypatch, stream):
    """It got none of them, or those that were streamed, and no others are in the record."""
    checked = threading.Event()

    def slow(self, text):
        if checked.is_set():
            time.sleep(1)
        checked.set()

    monkeypatch.setattr(AnswerFormat, "__call__", slow)
    async with in_session(tiny) as (service, session, client):
        async def read():
            answer = await ask(client, user("x"), tools=[], n=3, max_tokens=3, stream=stream,
                               response_format={"type": "json_object"})
            return [chunk async for chunk in answer] if stream else answer

        reading = asyncio.create_task(read())
        await asyncio.to_thread(checked.wait, 20)
        await asyncio.sleep(0.2)
        reading.cancel()
        await asyncio.wait([reading])
        await eventually(lambda: service.counts["cancelled"], 5)
        assert len(session.turns) + session.cancelled == 3 and len(session.turns) == (1 if stream else 0)
        assert service.rows == 0 and not session.open
