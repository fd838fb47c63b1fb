"""The hooks between a policy's text and an environment, without a policy."""

import asyncio
import json
from dataclasses import replace

import pytest

from grpolab.env.action_format import MCP, TEXT, ActionFormat, describe_tool, told, tool_call, tool_calls, tool_text
from grpolab.env.protocol import InvalidAction, ServerError, SessionLost, StepResult


def nested(levels):
    value = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def test_the_text_format_is_a_text_both_ways():
    assert TEXT.action("calc: 1") == {"text": "calc: 1"}
    assert TEXT.texts(StepResult({"text": "84"})) == ["84"]
    with pytest.raises(ValueError, match=r"keys \['message'\].*to_text"):
        TEXT.texts(StepResult({"message": "84"}))


def test_the_hooks_of_ones_own():
    own = replace(TEXT, to_action=lambda text: {"number": int(text)}, to_text=lambda seen: seen["metadata"]["said"])
    assert own.action("12") == {"number": 12}
    assert own.texts(StepResult({"x": 1}, metadata={"said": "higher"})) == ["higher"]  # the metadata is put back
    with pytest.raises(InvalidAction, match="invalid literal"):
        own.action("twelve")
    with pytest.raises(ValueError, match="needs a string"):
        replace(TEXT, to_text=lambda seen: 3).texts(StepResult({}))


@pytest.mark.parametrize("action", [[], "text", None, {"x": float("nan")}, {"x": "\ud800"}, nested(65)], ids=range(6))
def test_what_cannot_be_sent_is_no_action(action):
    """OpenEnv's server ends the session over half a surrogate pair, so it must not get there."""
    with pytest.raises(InvalidAction):
        replace(TEXT, to_action=lambda text: action).action("")
    assert replace(TEXT, to_action=lambda text: nested(64)).action("") == nested(64)


@pytest.mark.parametrize("options, says", [
    ({"on_invalid": "ignore"}, "tell, penalise, abstain"), ({"on_invalid": "penalise"}, "needs one"),
    ({"penalty": -1.0}, "'penalise'"), ({"on_invalid": "abstain", "penalty": 0.0}, "'penalise'"),
])
def test_a_rule_that_says_too_little_or_too_much_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        ActionFormat(**options)


@pytest.mark.parametrize("text, name, arguments", [
    ('{"name": "add", "arguments": {"a": 2, "b": 3}}', "add", {"a": 2, "b": 3}),
    ('I add. {"name": "add", "arguments": {"a": 2}} and then', "add", {"a": 2}),
    ('<tool_call>\n{"name": "now"}\n</tool_call>', "now", {}),
])
def test_a_tool_call_in_a_text(text, name, arguments):
    assert tool_call(text) == {"type": "call_tool", "tool_name": name, "arguments": arguments}


@pytest.mark.parametrize("text", [
    "", "add 2 and 3", "{", '{"name": "add"', '{"name": 3}', '{"arguments": {}}', '{"name": "add", "arguments": [1]}', "[1]",
    '{"a":' * 5000, '{"name": "x", "arguments": {"n": ' + "9" * 5000 + "}}", '"name"',
], ids=range(11))
def test_no_tool_call_in_a_text(text):
    with pytest.raises(InvalidAction, match="write one tool call"):
        tool_call(text)


RESULT = {"content": [{"type": "text", "text": "5"}], "structured_content": {"result": 5}, "data": 5, "is_error": False}


@pytest.mark.parametrize("observation, text", [
    ({"metadata": {"question": "What is 2 + 3?"}}, "What is 2 + 3?"),
    ({"board": [1, 2], "turn": "yours", "hint": None}, '{"board": [1, 2], "turn": "yours"}'),
    ({"tool_name": "add", "result": RESULT, "error": None}, "5"),
    ({"tool_name": "add", "result": RESULT | {"content": [{"type": "text", "text": "a"}, {"type": "image"}]}}, "a\n[image]"),
    ({"tool_name": "add", "result": RESULT | {"is_error": True}}, "error: 5"),
    ({"tool_name": "add", "result": None, "error": {"error_type": "tool_not_found", "message": "no such"}}, "error: no such"),
    ({"tool_name": "add", "result": {"sum": 5}}, '{"sum": 5}'),
    ({"tool_name": "add", "result": "five"}, "five"),
])
def test_the_text_of_a_tools_observation(observation, text):
    assert tool_text(observation) == text


def test_a_tool_on_one_line():
    schema = {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}
    add = {"name": "add", "description": "The\n sum.", "inputSchema": schema}
    assert describe_tool(add) == "add(a: integer, b?: any): The sum."
    assert describe_tool({"name": "now", "input_schema": {}, "description": None}) == "now()"


def test_calls_are_counted_by_the_environment_or_by_the_tools_that_answered():
    said = [StepResult({}, metadata={"calls": 1}), StepResult({}, metadata={"calls": 3})]
    assert TEXT.measure(said) == {"calls": 3} and TEXT.measure([]) == {"calls": 0}
    assert TEXT.measure([StepResult({}, metadata={"calls": ["a list"]})]) == {"calls": 0}
    answered = [StepResult({"tool_name": "add"}), StepResult({"tool_name": "y", "result": {"is_error": True}}),
                StepResult({"tool_name": "x", "error": {"message": "no"}}), StepResult({})]
    assert tool_calls(answered) == {"calls": 1} == MCP.measure(answered)


class FailingSlot:
    def __init__(self, fault):
        self.fault = fault

    async def step(self, action):
        raise self.fault


@pytest.mark.parametrize("fault, why, ended", [
    (InvalidAction("number: not an int"), "number: not an int", False),
    (SessionLost("Unable to serialize unknown type: <class 'ValueError'> (SESSION_ERROR)"),
     "a value that the environment does not accept", True),
])
def test_what_says_that_an_action_was_malformed(fault, why, ended):
    with pytest.raises(InvalidAction) as malformed:
        asyncio.run(TEXT.act(FailingSlot(fault), "x"))
    assert (str(malformed.value), isinstance(malformed.value.__cause__, SessionLost)) == (why, ended)


@pytest.mark.parametrize("fault", [ServerError("boom", "EXECUTION_ERROR"), SessionLost("gone"), TypeError("a bug")], ids=repr)
def test_other_failures_are_not_taken_for_a_malformed_action(fault):
    with pytest.raises(type(fault)):
        asyncio.run(TEXT.act(FailingSlot(fault), "x"))


def test_what_the_policy_is_told_is_bounded():
    assert len(told("x" * 10**6)) < 600 and told("x" * 10**6).endswith("...")
    assert len(json.dumps(tool_text({"tool_name": "a", "error": {"message": "x" * 10**6}}))) < 600
