"""Agents that call tools at the endpoint: OpenAI's schema both ways, and what is kept is what was sampled."""

import copy
import json

import openai
import pytest
from loop_helpers import rows_of
from test_sessions import in_session
from test_tool_calls import CALL, GOOD, ROOM
from test_tools import call, turns_of

from grpolab.chat import encode_chat, prompt_ids, user
from grpolab.decode.audit import audit
from grpolab.serve.service import serve_policy
from grpolab.train.sft import SFTConfig, sft
from grpolab.train.tools import Tools

NAMES = ("Ann", "Bob", "Eve", "Tom")


def example(tokenizer, name):
    call = {"function": {"name": "room", "arguments": {"name": name}}}
    return encode_chat(tokenizer, [*user(f"Where is {name}?"), {"role": "assistant", "content": "", "tool_calls": [call]},
                                   {"role": "tool", "content": "12"}, {"role": "assistant", "content": "12"}], [ROOM])


@pytest.fixture
def caller(taught_once):
    """A policy that learned to call `room` for these names, and then to say what it was told."""
    def teach(policy):
        shown = [example(policy.tokenizer, name) for name in NAMES]
        assert rows_of(sft(policy, shown, SFTConfig(steps=160, batch_size=4, lr=2e-3)))[-1]["loss"] < 0.02

    return taught_once("caller_of_room", teach)


async def ask(client, messages, **options):
    return await client.chat.completions.create(model="tiny", messages=messages, **{
        "tools": [ROOM], "max_tokens": 100, "temperature": 0.3, "extra_body": {"return_token_ids": True}} | options)


async def test_a_loop_over_a_tool_is_one_rollout_of_exact_ids(caller):
    """Also where the agent gives other ids to its calls and writes their JSON anew."""
    async with in_session(caller) as (service, session, client):
        messages, replies = user("Where is Bob?"), []
        for turn in range(3):
            replies.append(await ask(client, messages))
            message = replies[-1].choices[0].message
            if turn == 0:
                assert replies[0].choices[0].finish_reason == "tool_calls" and message.content is None
                assert json.loads(message.tool_calls[0].function.arguments) == {"name": "Bob"}
                call = {"id": "mine", "type": "function", "function": {"name": "room", "arguments": '{ "name":"Bob" }'}}
                messages += [{"role": "assistant", "content": "", "tool_calls": [call]},
                             {"role": "tool", "tool_call_id": "mine", "content": "12"}]
            else:
                messages += [message.model_dump(include={"role", "content"}), *user("Where is Bob?")]
        assert replies[1].choices[0].message.content == "12"
        ids, mask = list(replies[0].prompt_token_ids), [0] * len(replies[0].prompt_token_ids)
        assert ids == prompt_ids(caller.tokenizer, "Where is Bob?", [ROOM])
        for reply in replies:
            assert list(reply.prompt_token_ids[: len(ids)]) == ids  # it begins with what was sampled
            sampled = reply.choices[0].token_ids
            mask += [0] * (len(reply.prompt_token_ids) - len(ids)) + [1] * len(sampled)
            ids = list(reply.prompt_token_ids) + sampled
        rollout = service.rollout(session)
        assert list(rollout.prompt + rollout.tokens) == ids
        assert [0] * len(rollout.prompt) + list(rollout.mask) == mask
    assert audit(caller, [rollout], temperature=0.3).max_error < 1e-4


async def test_other_tools_are_another_conversation(caller):
    async with in_session(caller) as (service, session, client):
        reply = await ask(client, user("Where is Bob?"))
        messages = [*user("Where is Bob?"), reply.choices[0].message.model_dump(exclude_none=True),
                    {"role": "tool", "tool_call_id": reply.choices[0].message.tool_calls[0].id, "content": "12"}]
        other = copy.deepcopy(ROOM)
        other["function"]["description"] = "Another."
        await ask(client, messages, tools=[other])
        assert len(service.rollouts(session)) == 2


@pytest.mark.parametrize(("choice", "given"), [
    ("required", '<tool_call>\n{"name": "'),
    ({"type": "function", "function": {"name": "room"}}, '<tool_call>\n{"name": "room", "arguments": '),
])
async def test_a_call_that_is_required_is_begun_for_the_policy(caller, choice, given):
    """What it is given has mask 0: the policy did not write it."""
    async with in_session(caller) as (service, session, client):
        for stream in (False, True):
            if stream:
                answer = await ask(client, user("Where is Eve?"), tool_choice=choice, stream=True)
                chunks = [chunk async for chunk in answer]
                (call,) = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
                assert not any(chunk.choices[0].delta.content for chunk in chunks)
            else:
                (call,) = (await ask(client, user("Where is Eve?"), tool_choice=choice)).choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("room", {"name": "Eve"})
        for rollout in service.rollouts(session):
            assert caller.tokenizer.decode(rollout.prompt).endswith("Assistant: " + given)
            assert given + caller.decode(rollout.tokens) == GOOD.replace("Ann", "Eve") and all(rollout.mask)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_first_ends_the_turn(caller, stream):
    """By a stop, which the record has: nothing that was sampled is left out."""
    async with in_session(caller) as (service, session, client):
        answer = await ask(client, user("Where is Tom?"), parallel_tool_calls=False, stream=stream)
        last = [chunk async for chunk in answer][-1].choices[0] if stream else answer.choices[0]
        (call,) = last.delta.tool_calls if stream else last.message.tool_calls
        assert call.function.name == "room" and last.finish_reason == "tool_calls"
        assert last.grpolab["finish_reason"] == "stop_string" and last.grpolab["unparsed_calls"] == 0
        await ask(client, [*user("Where is Tom?"), {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]},
                           {"role": "tool", "tool_call_id": call.id, "content": "12"}], parallel_tool_calls=False)
        rollout = service.rollout(session)
        sampled = [t for t, m in zip(rollout.tokens, rollout.mask) if m]
        assert caller.decode(sampled) == GOOD.replace("Ann", "Tom") + "12"
        assert sum(t in caller.eos_ids for t in sampled) == 1 and sum(t in caller.eos_ids for t in rollout.tokens) == 2


async def test_a_stream_says_what_the_whole_answer_says(caller):
    async with in_session(caller) as (_, _, client):
        for messages in (user("Where is Tom?"), [*user("Where is Tom?"), {"role": "assistant", "tool_calls": [CALL]},
                                                 {"role": "tool", "tool_call_id": "c1", "content": "12"}]):
            whole = (await ask(client, messages, seed=4)).choices[0]
            chunks = [chunk async for chunk in await ask(client, messages, seed=4, stream=True)]
            deltas = [chunk.choices[0].delta for chunk in chunks]
            calls = [c.function.model_dump() for d in deltas for c in d.tool_calls or []]
            assert "".join(d.content or "" for d in deltas) == (whole.message.content or "")
            assert calls == [c.function.model_dump() for c in whole.message.tool_calls or []]
            assert chunks[-1].choices[0].finish_reason == whole.finish_reason


async def test_calls_that_cannot_be_read_are_text_and_counted(caller):
    async with in_session(caller) as (service, _, client):
        cut = (await ask(client, user("Where is Ann?"), max_tokens=30)).choices[0]
        assert cut.message.content == caller.tokenizer.decode(cut.token_ids) == GOOD[:30]
        assert cut.message.tool_calls is None and cut.finish_reason == "length" and cut.grpolab["unparsed_calls"] == 1
        cut = (await ask(client, user("Where is Ann?"), max_tokens=len(GOOD))).choices[0]
        assert cut.message.tool_calls and cut.finish_reason == "length"  # there might have been more
        none = (await ask(client, user("Where is Ann?"), tool_choice="none")).choices[0]
        assert none.message.content == GOOD and service.status()["unparsed_calls"] == 1


@pytest.mark.parametrize(("wanted", "error"), [
    ({"type": "text"}, "nothing is said"),
    ({"type": "json_object"}, "is not of type 'object'"),
    ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "integer"}}}, None),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"maximum": 11}}}, "greater than the maximum of 11"),
])
async def test_an_answer_is_checked_for_the_format_that_was_asked_for(caller, wanted, error):
    """And told in each way that answers go out; what is sampled is the same."""
    async with in_session(caller) as (service, session, client):
        heard = [*user("Where is Bob?"), {"role": "assistant", "tool_calls": [CALL]},
                 {"role": "tool", "tool_call_id": "c1", "content": "12"}]
        plain = await ask(client, heard)
        for ids in (True, False):
            options = dict(response_format=wanted, extra_body={"return_token_ids": ids})
            whole = (await ask(client, heard, **options)).choices[0]
            streamed = [chunk async for chunk in await ask(client, heard, stream=True, **options)][-1].choices[0]
            assert whole.message.content == "12" == plain.choices[0].message.content
            for told in (getattr(whole, "grpolab", {}), getattr(streamed, "grpolab", {})):
                assert error in ("nothing is said", told.get("format_error")) or error in told["format_error"]
                assert ("format_error" in told) == (error != "nothing is said") and ("logps" in told) == ids
        call = (await ask(client, user("Where is Bob?"), response_format=wanted)).choices[0]  # a call is no answer
        assert call.message.tool_calls and call.grpolab.get("format_error") is None
        assert service.status()["format_errors"] == (4 if error and error != "nothing is said" else 0)


async def test_a_tool_may_ask_the_policy_that_called_it(caller):
    """Nobody waits for the other; what it samples is in the record as a rollout of its own."""
    async with serve_policy(caller) as service:
        session = service.open_session(max_tokens=5)

        def ask_it(question: str) -> str:
            with openai.OpenAI(base_url=session.url, api_key="-", max_retries=0) as client:
                return client.chat.completions.create(model="tiny", messages=user(question)).choices[0].message.content

        tools = Tools([ask_it], lambda run: len(run.calls))
        (told, last), form = await turns_of(tools, caller.tokenizer, call("ask_it", question="Where?"), "12")
        rollout = service.rollout(session)
    assert form.texts(told) == [caller.decode(rollout.tokens) or "(empty)"] and last.reward == 1.0


async def test_what_agents_write_in_their_own_way_is_taken(caller):
    """Ids as Mistral's templates want them, a tool without parameters, arguments that are an empty text."""
    async with in_session(caller) as (_, _, client):
        (call,) = (await ask(client, user("Where is Bob?"))).choices[0].message.tool_calls
        assert len(call.id) == 9 and call.id.isalnum()
        bare = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
        empty = {"id": "x", "type": "function", "function": {"name": "now", "arguments": ""}}
        await ask(client, [*user("x"), {"role": "assistant", "tool_calls": [empty]},
                           {"role": "tool", "tool_call_id": "x", "content": "5"}], tools=[bare], max_tokens=2)


@pytest.mark.parametrize(("options", "why"), [
    (dict(tools=[ROOM | {"function": {"name": 5}}]), "a tool is"),
    (dict(tools=[ROOM | {"function": {"name": "f", "parameters": json.loads('{"a":' * 99 + "1" + "}" * 99)}}]), "nested deep"),
    (dict(messages=[{"role": "user", "content": [{"type": "text"}]}]), "content"),
    (dict(tool_choice="required", tools=openai.NOT_GIVEN), "tool_choice"),
    (dict(tool_choice={"type": "function", "function": {"name": "x"}}), "no tool 'x'"),
    (dict(tools=[ROOM, ROOM]), "two tools"),
    (dict(messages=[{"role": "assistant", "content": None}]), "tool_calls"),
    (dict(messages=[{"role": "user", "content": "x", "tool_calls": [CALL]}]), "tool_calls"),
    (dict(messages=[{"role": "assistant", "tool_calls": [{"id": "c", "type": "function",
                                                          "function": {"name": "f", "arguments": "[1]"}}]}]), "arguments"),
])
async def test_bad_requests_are_refused_by_name(caller, options, why):
    async with in_session(caller) as (_, _, client):
        with pytest.raises(openai.BadRequestError, match=why):
            await ask(client, **{"messages": user("x")} | options)


async def test_a_developer_is_the_system_and_parts_are_one_text(tiny):
    async with in_session(tiny) as (_, _, client):
        asked = [[{"role": "system", "content": "Be brief."}, *user("ab")],
                 [{"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
                  {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]]
        replies = [await ask(client, messages, max_tokens=3, seed=1, tools=[]) for messages in asked]
        assert replies[0].prompt_token_ids == replies[1].prompt_token_ids == prompt_ids(tiny.tokenizer, asked[0])
        assert replies[0].choices[0].token_ids == replies[1].choices[0].token_ids
