"""What `response_format` asks for, checked without a network and in a bounded time."""

import json
import socket
import time

import pytest

from grpolab.serve import answer_format
from grpolab.serve.answer_format import EARNED, REQUEST_SECONDS, SECONDS, answer_check


def schema_check(schema):
    return answer_check({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


PERSON = {"$defs": {"age": {"type": "integer", "minimum": 0}}, "type": "object", "required": ["name"],
          "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"$ref": "#/$defs/age"}, "$id": True},
          "additionalProperties": False}


@pytest.mark.parametrize(("text", "wrong"), [
    ('{"name": "Ann", "age": 3, "$id": "x"}', None), ('{"name": "ann"}', "does not match"), ('{"name": 5}', "'string'"),
    ('{"name": "Ann", "age": -1}', "$.age: -1 is less"), ("{}", "required"), ('{"name": "Ann", "x": 1}', "unexpected"),
    ("[]", "'object'"), ("", "not JSON"), ('{"name": "Ann"', "not JSON"), ('{"name": "Ann"} {}', "not JSON"),
    ('{"name": NaN}', "not JSON"), ('{"name": "A", "name": "B"}', "twice"), ("[" * 99_999, "not JSON"),
    ("9" * 9999, "not JSON"),
])
def test_an_answer_and_a_schema(text, wrong):
    told = schema_check(PERSON)(text)
    assert told == wrong or wrong in told


def test_any_object_and_anything():
    some_object = answer_check({"type": "json_object"})
    assert some_object('{"a": [1]}') is None and "'object'" in some_object("[1]") and answer_check({"type": "text"}) is None


DOUBLED = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {"type": "integer"}}


@pytest.mark.parametrize(("schema", "text"), [
    ({"$defs": DOUBLED, "$ref": "#/$defs/a0"}, "1"),
    ({"$ref": "#"}, "1"),
    ({"pattern": "(a|aa)+$"}, json.dumps("a" * 60 + "!")),
    ({"allOf": [{"items": {"$ref": "#"}}] * 200}, "[[1, [2]]]"),
], ids=["doubles", "itself", "backtracks", "wide"])
def test_a_check_has_an_end(schema, text):
    check, began = schema_check(schema), time.monotonic()
    assert "not checked within" in check(text)
    assert time.monotonic() - began < 40 * SECONDS


@pytest.mark.parametrize(("schema", "why"), [
    ({"type": 5}, r"\$.type"), (3, "the schema is none"), ({"$ref": "#/nope"}, "leads nowhere"), ({"pattern": "("}, "pattern"),
    ({"pattern": "(" * 9000}, "pattern"), ({"$defs": {"a": {"$ref": "other.json"}}}, "leads out"), ({"$id": "http://a"}, "id"),
    ({"patternProperties": {"^x": {}}}, "patternProperties"), ({"$schema": "http://json-schema.org/draft-07/#"}, "schema"),
    ({"enum": ["x" * 70_000]}, "characters"), ({"anyOf": [{}] * 501}, "objects"), ({"const": float("nan")}, "NaN|range"),
    (json.loads('{"not":' * 99 + "{}" + "}" * 99), "nested"), ({"type": [*range(40), "a"]}, "a type is a name"),
    ({"pattern": "(a{1000}){1000}"}, "written out"), ({"pattern": "(" * 14 + "a" + "b?)+" * 14}, "written out"),
    ({"allOf": [{"pattern": f"a{{3000{i}}}"} for i in range(4)]}, "written out"), ({"pattern": "(?x)(a{1 000})"}, "support"),
    ({"pattern": "(?if)" + r"[\w.]" * 9}, "support"), ({"pattern": "(?<=(?1))(a)"}, "support"),
    ({"pattern": "(((a{9})(?#)+)+)"}, "support"),
])
def test_a_schema_that_cannot_be_checked_is_refused(schema, why):
    with pytest.raises(ValueError, match=why):
        schema_check(schema)


@pytest.mark.parametrize("pattern", [
    "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$", "^[A-Za-z0-9+/]{1024}$",
    r"^[\w.+-]{1,64}@[\w-]{1,63}(\.[a-z]{2,63})+$", r"^\d+ \(?ext\.?\)?$", r"^[(?x!]$", r"^[ACGU]{5000}$", "(,[a-z]+)+" * 10,
    "^(" + "([0-9a-f]{1,4}:){7,7}[0-9a-f]{1,4}|" + "|".join(f"([0-9a-f]{{1,4}}:){{1,{n}}}(:[0-9a-f]{{1,4}}){{1,{8 - n}}}"
                                                       for n in range(1, 8)) + ")$"])
def test_patterns_that_people_write_are_taken(pattern):
    assert "does not match" in schema_check({"pattern": pattern})('"no"')
    assert schema_check({"anyOf": [{"pattern": pattern}] * 3})('"no"')


def test_what_is_null_in_a_format_asks_for_nothing():
    assert answer_check({"type": "text", "json_schema": None}) is None
    assert answer_check({"type": "json_object", "json_schema": None})("{}") is None


@pytest.mark.parametrize("wanted", [5, {}, {"type": "xml"}, *({"type": "json_schema", "json_schema": s} for s in (None, {}))])
def test_what_is_no_format_is_refused(wanted):
    with pytest.raises(ValueError, match="json_object"):
        answer_check(wanted)


@pytest.mark.parametrize("wanted", [
    {"type": "json_object", "more": {}}, {"type": "json_schema", "json_schema": {"schema": {}, "more": 1}}])
def test_what_a_format_does_not_have_is_refused(wanted):
    with pytest.raises(ValueError, match="does not support 'more'"):
        answer_check(wanted)


def test_a_schema_fetches_nothing():
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.3)
        address = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/schema.json"
        for key in ("$ref", "$dynamicRef", "$schema", "$id"):
            with pytest.raises(ValueError):
                schema_check({"properties": {"a": {key: address}}})
        with pytest.raises(TimeoutError):
            elsewhere.accept()


@pytest.mark.parametrize(("schema", "text"), [({"multipleOf": 0.1}, "1e400"), ({"multipleOf": 0.1}, "9" * 400),
                                              ({"multipleOf": 10**320}, "5.5"), ({"$ref": "#/const", "const": "s"}, "1"),
                                              ({"$ref": "#/minimum", "minimum": 3}, "1")])
def test_what_cannot_be_checked_is_no_error_of_the_service(schema, text):
    assert "cannot be checked" in schema_check(schema)(text)


def test_the_answers_of_one_request_are_checked_in_a_bounded_time(monkeypatch):
    """However many there are; those that take no time are all checked."""
    slow, honest, given = schema_check({"$defs": DOUBLED, "$ref": "#/$defs/a0"}), answer_format._error, []
    monkeypatch.setattr(answer_format, "_error", lambda schema, value, seconds: (
        given.append(max(seconds, 0.0)), honest(schema, value, seconds))[1])
    assert all("not checked" in slow("1") for _ in range(40))
    assert len(given) == 40 and 0 < sum(given) < REQUEST_SECONDS + 40 * EARNED + SECONDS
    monkeypatch.undo()
    quick = schema_check(PERSON)
    assert [quick('{"name": "Ann"}') for _ in range(400)] == [None] * 400
