"""Whether an answer is what its request's `response_format` asks for: JSON, or JSON of a schema (draft 2020-12).

The check fetches nothing and takes at most `SECONDS`, whatever schema a client sends. `grammar` is what a service that
constrains what is sampled (`ServiceOptions.constrained`) lets through; the check stays, since a grammar cannot say all that a
schema can (`oneOf`, a key twice).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from grpolab.tool_calls import END_OF_CALL, check_json, loads

SECONDS = 0.25  # of a check, which holds up the service's other answers
REQUEST_SECONDS, EARNED = 1.0, 0.01  # of all the checks of a request together, and what each adds to them
WHITESPACE = r"( |\n {0,16})?"  # between two parts of JSON
OPENING, CLOSING = '<tool_call>\n{"name": "', "}\n" + END_OF_CALL  # of a call in the form of Hermes
MOST_CHARACTERS, MOST_OBJECTS = 64 * 2**10, 500  # of a schema, which is itself checked once, a millisecond an object
MOST_TYPES = 32  # that a part of a schema names: they are compared with one another
MOST_WRITTEN = 100_000  # characters by which its patterns may grow (`_growth`), some 50 bytes each

# The parts of a pattern: an escape, a set, a repeat, flags x, f and V1, comments and calls of groups, or a character.
_PATTERN = regex.compile(r"(?s)\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|$)|\{(?P<least>\d{0,9}),?\d*\}"
                         r"|(?P<refused>\(\?(?:[\w-]*(?:[xf]|V1)|[#&R\d]|P>))|.")

_until: ContextVar[float] = ContextVar("until")


def _in_time(check: Callable) -> Callable:
    """A keyword's check, which ends at the time that is set."""
    def bounded(*arguments: Any) -> Iterator[ValidationError]:
        if time.monotonic() > _until.get():
            raise TimeoutError
        yield from check(*arguments) or ()

    return bounded


def _pattern(_, pattern: str, instance: Any, __) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not regex.search(pattern, instance, timeout=max(1e-3, _until.get() - time.monotonic())):
        yield ValidationError(f"{instance!r:.60} does not match {pattern!r:.60}")


_Validator = extend(Draft202012Validator, {
    keyword: _in_time(check) for keyword, check in {**Draft202012Validator.VALIDATORS, "pattern": _pattern}.items()})


def _error(schema: Any, value: Any, seconds: float) -> str | None:
    """What is wrong with a value, the first thing."""
    _until.set(time.monotonic() + seconds)
    try:
        error = next(_Validator(schema, registry=REGISTRY).iter_errors(value), None)
    except (TimeoutError, RecursionError):
        return f"it was not checked within {max(seconds, 0):.2g} s: take a simpler schema"
    except (ArithmeticError, AttributeError, TypeError) as error:  # a "multipleOf" beyond floats; a "$ref" to what is no schema
        return f"it cannot be checked: {error}"[:300]
    return error and f"{error.json_path}: {error.message}"[:300]


def _growth(pattern: str) -> int:
    """By how many characters a pattern may grow when it is compiled: `regex` writes out `X{3}` as four X and `(X)+` as two, in
    groups within groups, too. ValueError for what only `regex` knows and takes any time to compile."""
    sizes, last, group = [0], 0, False  # of the groups that are open; of what a repeat would be of, and whether it is a group
    for part in _PATTERN.finditer(pattern):
        text, least = part[0], part["least"]
        if part["refused"]:
            raise ValueError(f"pattern {pattern!r:.60}: this service does not support {text!r}; write it without")
        if text == "(":
            sizes.append(1)
        elif text == ")" and len(sizes) > 1:
            last, group = sizes.pop(), True
            sizes[-1] += last
        elif least is not None or text in "+*?":
            more = last * (int(least or 0) if least is not None else text == "+" and group)
            sizes[-1], last, group = sizes[-1] + more + len(text), last + more, False
        else:
            last, group = len(text), False
            sizes[-1] += last
    return max(0, sum(sizes) - len(pattern))


def _check_parts(schema: Any, lookup: Callable[[str], Any]) -> None:
    """ValueError for a part of a schema that leads elsewhere or cannot be checked in a bounded time."""
    for key, part in schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ():
        try:
            if key in ("$ref", "$dynamicRef") and isinstance(part, str):
                if not part.startswith("#"):
                    raise ValueError(f"{key} {part!r:.60} leads out of the schema; write what it means under $defs")
                lookup(part)
            if key == "patternProperties" or key in ("$id", "$schema") and isinstance(part, str):
                raise ValueError(f"this service does not support {key!r}; leave it out")  # no bound; another validator
            if key == "pattern" and isinstance(part, str):
                regex.compile(part)
        except Unresolvable:
            raise ValueError(f"{key} {part!r:.60} leads nowhere") from None
        except (regex.error, RecursionError) as error:
            raise ValueError(f"pattern {part!r:.60}: {error}") from None
        _check_parts(part, lookup)


def _check_size(text: str) -> None:
    if len(text) > MOST_CHARACTERS or text.count("{") > MOST_OBJECTS:
        raise ValueError(f"the schema has {len(text)} characters and {text.count('{')} objects; this service takes "
                         f"{MOST_CHARACTERS} and {MOST_OBJECTS}")


@lru_cache(64)
def _checked(text: str) -> Any:
    """A schema of its JSON; ValueError for one that cannot be checked."""
    _check_size(text)
    regex.purge()  # it keeps 500 patterns, of any size
    objects: list[dict] = []
    schema = json.loads(text, object_hook=lambda part: objects.append(part) or part)
    if any(isinstance(part.get("type"), list) and len(part["type"]) > MOST_TYPES for part in objects):
        raise ValueError(f"the schema is none: a type is a name, or a list of at most {MOST_TYPES}")
    if sum(_growth(part["pattern"]) for part in objects if isinstance(part.get("pattern"), str)) > MOST_WRITTEN:
        raise ValueError(f"pattern: repeats are written out, and this service takes {MOST_WRITTEN} characters of them in a "
                         "schema; repeat less, or bound a length by maxLength")
    if error := next(Draft202012Validator(Draft202012Validator.META_SCHEMA, registry=REGISTRY).iter_errors(schema), None):
        raise ValueError(f"the schema is none: {error.json_path}: {error.message}"[:300])
    _check_parts(schema, REGISTRY.resolver_with_root(DRAFT202012.create_resource(schema)).lookup)
    return schema


@dataclass
class AnswerFormat:
    """Called with an answer's text, it gives what is wrong with it, or None. One belongs to one request, of however many
    answers."""

    schema: Any
    left: float = REQUEST_SECONDS

    def __call__(self, text: str) -> str | None:
        began = time.monotonic()
        try:
            return _error(self.schema, loads(text), min(SECONDS, self.left))
        except ValueError as error:
            return f"not JSON: {error}"[:300]
        finally:
            self.left = min(REQUEST_SECONDS, self.left + EARNED) - (time.monotonic() - began)


def answer_check(wanted: Any) -> AnswerFormat | None:
    """None for a format that asks for nothing. ValueError for what is no `response_format`, and for a schema that cannot be
    checked."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    about = wanted.get("json_schema") if kind == "json_schema" else {"schema": {"type": "object"}}
    if kind not in ("text", "json_object", "json_schema") or not isinstance(about, dict) or "schema" not in about:
        raise ValueError('it is {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
                         '{"name": ..., "schema": {...}}}')
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    others = [key for part, keys in ((wanted, known), (about, {"name", "description", "schema", "strict"}))
              for key in part if key not in keys and part[key] is not None]
    if others:
        raise ValueError(f"this service does not support {min(others)!r:.60} here; leave it out")
    check_json(about["schema"])
    schema = _checked(json.dumps(about["schema"]))
    return None if kind == "text" else AnswerFormat(schema)


def _json_rule(schema: Any) -> str:
    """JSON of a schema, compact or indented, without endless space; of `oneOf` any."""
    schema = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
    return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}})


def grammar(answer: AnswerFormat | None, tools: Sequence[dict], begun: bool, named: bool, most_calls: int) -> str:
    """What the rest of a turn may be, in llguidance's form of Lark: an answer in its format, or calls of the tools in the form
    of Hermes. `begun` says that the first one's OPENING is there, and `named` that its name and what stands before its
    arguments is there too. ValueError for parameters that cannot be checked."""
    functions = [tool["function"] for tool in tools]
    schemas = [json.dumps(function["parameters"]) for function in functions]
    _check_size("".join(schemas))
    rules = [f"answer: {_json_rule(answer.schema)}"] if answer else []
    for i, (function, schema) in enumerate(zip(functions, schemas)):
        rules += [f"arguments{i}: {_json_rule(_checked(schema))}", f'rest{i}: arguments{i} {json.dumps(CLOSING)}',
                  f"""named{i}: {json.dumps(f'{function["name"]}", "arguments": ')} rest{i}"""]
    if functions:
        any_of = " | ".join(f"named{i}" for i in range(len(functions)))
        rules += [f"named: {any_of}", f"call: {json.dumps(OPENING)} named"]
    first = "call" if not begun else "rest0" if named else "named"
    calls = [f"{first} call{{0,{most_calls - 1}}}" if most_calls > 1 else first] if functions else []
    start = calls if begun else ["answer", *calls]
    return "\n".join([f"start: {' | '.join(start)}", *rules])
