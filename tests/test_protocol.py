import json

import pytest

from grpolab.env import protocol
from grpolab.env.client import Deadlines
from grpolab.env.protocol import (
    CapacityError,
    EnvError,
    FactoryError,
    InvalidAction,
    InvalidRequest,
    ServerError,
    SessionLost,
    StepResult,
    parse_reply,
    parse_request,
    step_result,
)


def data(code, **more):
    return json.dumps({"type": "error", "data": {"message": "m", "code": code, **more}})


@pytest.mark.parametrize("text, kind, expected", [
    ('{"type":"state"}', "state", {}), ('{"type":"close"}', "close", {}), ('{"type":"reset"}', "reset", {}),
    ('{"type":"reset","data":{"seed":7}}', "reset", {"seed": 7}),
    ('{"type":"step","data":{"text":"a"}}', "step", {"text": "a"}),
])
def test_requests_parse(text, kind, expected):
    assert parse_request(text) == (kind, expected)


@pytest.mark.parametrize("text, code, ends", [
    ("{", "INVALID_JSON", False), ("[" * 100_000, "INVALID_JSON", False),
    ('{"type":"step","data":{"a":NaN}}', "INVALID_JSON", False),
    ('{"type":"ping"}', "UNKNOWN_TYPE", False), ("{}", "UNKNOWN_TYPE", False),
    ('{"type":["step"]}', "UNKNOWN_TYPE", False),
    ('{"type":"step","data":{},"request_id":1}', "VALIDATION_ERROR", False),
    ('{"type":"state","data":{}}', "VALIDATION_ERROR", False),
    ('{"type":"step"}', "VALIDATION_ERROR", False), ('{"type":"step","data":[1]}', "VALIDATION_ERROR", False),
    ("[1,2]", "SESSION_ERROR", True), (b"binary", "SESSION_ERROR", True),
])
def test_bad_requests_get_the_code_of_the_wire(text, code, ends):
    with pytest.raises(InvalidRequest) as caught:
        parse_request(text)
    reply = json.loads(caught.value.reply)
    assert reply["type"] == "error" and reply["data"]["code"] == code and caught.value.ends is ends
    if "request_id" in str(text):
        assert [(e["type"], e["loc"]) for e in reply["data"]["errors"]] == [("extra_forbidden", ["request_id"])]


def test_error_frames_become_typed_errors():
    with pytest.raises(CapacityError) as caught:
        parse_reply(data("CAPACITY_REACHED", active_sessions=2, max_sessions=2))
    assert (caught.value.active, caught.value.max_sessions) == (2, 2)
    with pytest.raises(FactoryError):
        parse_reply(data("FACTORY_ERROR"))
    with pytest.raises(SessionLost):
        parse_reply(data("SESSION_ERROR"))
    with pytest.raises(ServerError) as caught:
        parse_reply(data("EXECUTION_ERROR", errors=[{"loc": ["a"]}]))
    assert caught.value.code == "EXECUTION_ERROR"


@pytest.mark.parametrize("text", ["{", "[]", '{"no":1}', '{"type":"observation","data":{"reward":NaN}}',
                                  '{"type":"x","data":3}', '{"type":["x"],"data":{}}', '{"type":"observation","data":[]}',
                                  '{"type":"state","data":{"n":' + "9" * 5000 + "}}", b"\xff{"])
def test_a_reply_that_is_no_reply_loses_the_session(text):
    with pytest.raises(SessionLost):
        parse_reply(text)


@pytest.mark.parametrize("bad", [
    {}, {"observation": [1]}, {"observation": {}, "reward": "1"}, {"observation": {}, "reward": [1]},
    {"observation": {}, "reward": 10**400}, {"observation": {}, "reward": json.loads("1e400")},
    {"observation": {}, "reward": float("nan")}, {"observation": {}, "done": "false"}, {"observation": {}, "metadata": [1]},
])
def test_an_observation_that_is_none_loses_the_session(bad):
    with pytest.raises(SessionLost, match="ws://host/ws") as caught:
        step_result(bad, "ws://host/ws")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("observation", [{"a": 1}, {"metadata": {"own": 1}}, {"metadata": "own"}, {"metadata": None}, {}])
@pytest.mark.parametrize("metadata", [{}, {"calls": 1}])
def test_an_observation_keeps_its_own_field_named_metadata_over_the_wire(observation, metadata):
    kind, sent = parse_reply(protocol.observation(StepResult(observation, 0.5, True, metadata)))
    assert step_result(sent) == StepResult(observation, 0.5, True, metadata)


@pytest.mark.parametrize("data, result", [
    ({"observation": {"a": 1, "metadata": {"m": 2}}, "done": False}, StepResult({"a": 1}, None, False, {"m": 2})),
    ({"observation": {"a": 1}, "reward": 1, "done": True, "metadata": {"m": 2}}, StepResult({"a": 1}, 1.0, True, {"m": 2})),
    ({"observation": {"a": 1, "metadata": {"m": 2}}, "metadata": {"m": 2}}, StepResult({"a": 1}, None, False, {"m": 2})),
    ({"observation": {"metadata": "m"}, "reward": True}, StepResult({"metadata": "m"}, 1.0)),
], ids=["inside", "beside", "twice, as openenv 0.10.0 sends it", "a field of the observation"])
def test_metadata_is_read_from_both_places(data, result):
    assert step_result(data) == result


@pytest.mark.parametrize("more", [
    {"errors": None}, {"errors": 5}, {"errors": "text"}, {"errors": [None, {"loc": 3}, {"msg": []}]}, {"message": None},
    {"message": ["x"]}, {"message": "m" * 10**6}, {"code": ["x"]}, {"code": None}, {"code": {}}, {"active_sessions": "two"},
])
@pytest.mark.parametrize("code", ["EXECUTION_ERROR", "VALIDATION_ERROR", "CAPACITY_REACHED", "FACTORY_ERROR", "STEP_TIMEOUT"])
def test_whatever_an_error_frame_holds_the_error_is_typed_and_names_the_server(code, more):
    with pytest.raises(EnvError) as caught:
        parse_reply(json.dumps({"type": "error", "data": {"message": "m", "code": code, **more}}), "ws://host/ws")
    assert len(str(caught.value)) < 3000
    if not isinstance(caught.value, InvalidAction):
        assert "ws://host/ws" in str(caught.value)
    if isinstance(caught.value, CapacityError):
        assert caught.value.active is None


def test_an_action_that_cannot_be_read_says_why():
    reasons = [{"type": "missing", "loc": ["data", "text"], "msg": "Field required"}, {"loc": [], "msg": "odd"}]
    with pytest.raises(InvalidAction, match="data.text: Field required; : odd") as caught:
        parse_reply(data("VALIDATION_ERROR", errors=reasons))
    assert caught.value.code == "VALIDATION_ERROR"
    assert isinstance(caught.value, ServerError) and isinstance(caught.value, ValueError)
    assert str(InvalidAction("an environment's own words")) == "an environment's own words"


@pytest.mark.parametrize("phase", ["connect", "admit", "reset", "step", "state", "mcp", "episode", "group"])
def test_a_deadline_names_the_field_that_raises_it(phase):
    field = str(protocol.DeadlineExceeded(phase, 1.0)).rpartition("raise Deadlines(")[2].partition("=")[0]
    assert Deadlines(**{field: 2.0}) and (field == phase or phase in ("state", "mcp"))
