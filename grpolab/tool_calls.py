"""Tool calls as text: the calls that a policy wrote, in the forms that chat models use, and messages that hold calls.

`parse_calls` is a pure function of a text. What cannot be read as a call stays in the text and is counted; nothing is
repaired or guessed. A call is data: its name is looked up among the tools that there are, and nothing is evaluated.

    hermes    <tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>      Hermes, Qwen, the embedded model
    llama     {"name": "add", "parameters": {"a": 1}}, alone or after <|python_tag|>   Llama 3.1 and later
    mistral   [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                     Mistral
    pythonic  [add(a=1), add(a=2)]                                                     Llama 3.2 and 4, as literals alone
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from grpolab.syntax import parse_python

MAX_CALLS = 32  # of one turn; more are left as text
MAX_DEPTH = 64  # of a JSON value: OpenEnv's server ends a session over one that is nested beyond its own reader's depth


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments, a JSON object."""

    name: str
    arguments: dict = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The same for calls that say the same, however their JSON was written."""
        return json.dumps([self.name, self.arguments], sort_keys=True)


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the assistant: its text without the calls, the calls, and how many places began a call and could not be read
    (they stay in `content`)."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    unparsed: int = 0


def check_json(value: Any) -> None:
    """ValueError for what is no JSON value: nested too deeply, NaN or infinity, half of a surrogate pair, keys that are no
    strings, other types."""
    _check_depth(value)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half of a surrogate pair, which is no character: read it as UTF-8, or replace it "
                         "(text.encode(errors='replace').decode())") from error
    except TypeError as error:
        raise ValueError(str(error)) from error


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): mapped(part, change) for key, part in value.items()}
    return [mapped(part, change) for part in value] if isinstance(value, list | tuple) else value


def _check_depth(value: Any, levels: int = MAX_DEPTH) -> None:
    if isinstance(value, dict | list | tuple):
        if levels == 0:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict) and (others := [key for key in value if not isinstance(key, str)]):
            raise ValueError(f"the key {others[0]!r:.60} of an object is no string")
        for part in value.values() if isinstance(value, dict) else value:
            _check_depth(part, levels - 1)


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict:
    if len(made := dict(pairs)) < len(pairs):
        raise ValueError("an object has a key twice")
    return made


_decoder = json.JSONDecoder(parse_constant=_not_json, object_pairs_hook=_object)


def _value_at(text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `at`, and where it ends; ValueError where there is none."""
    try:
        return _decoder.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def loads(text: str) -> Any:
    """The JSON value that the text is; ValueError where it is none."""
    value, end = _value_at(text.strip())
    if end != len(text.strip()):
        raise ValueError("more than one JSON value")
    return value


def call_of(value: Any) -> ToolCall:
    """The call that a JSON object says, {"name": ..., "arguments": {...}} (or "parameters", or arguments as a JSON text, as
    OpenAI has them, where an empty one says that there are none); ValueError for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError('a call is {"name": "...", "arguments": {...}}')
    arguments = next((value[key] for key in ("arguments", "parameters") if value.get(key) is not None), {})
    try:
        if isinstance(arguments, str):
            arguments = loads(arguments) if arguments.strip() else {}
        check_json([value["name"], arguments])
    except ValueError as error:
        raise ValueError(f"the arguments of {value['name']!r:.60} are no JSON object: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {value['name']!r:.60} are a JSON object, got {str(arguments)[:60]!r}")
    return ToolCall(value["name"], arguments)


END_OF_CALL = "</tool_call>"  # of the form hermes
_BEGIN, _END = re.compile(r"<tool_call>\s{0,80}"), re.compile(r"\s{0,80}" + END_OF_CALL)


def _hermes(text: str) -> ParsedTurn:
    pieces, calls, unparsed, at = [], [], 0, 0
    while begin := _BEGIN.search(text, at):
        if len(calls) + unparsed >= MAX_CALLS:  # a text of nothing but beginnings costs no more than this
            unparsed += text.count("<tool_call>", at)
            break
        try:
            value, end = _value_at(text, begin.end())
            closed = _END.match(text, end)
            if closed is None:
                raise ValueError("it is not closed")
            calls.append(call_of(value))
            pieces.append(text[at : begin.start()])
            at = closed.end()
        except ValueError:
            unparsed += 1
            pieces.append(text[at : begin.end()])
            at = begin.end()
    content = "".join([*pieces, text[at:]])
    return ParsedTurn(content.rstrip() if calls else content, tuple(calls), unparsed)


def _whole(text: str, form: Form) -> ParsedTurn:
    """A turn in which everything after the mark is calls; or, where the form is `bare`, one that is nothing but calls."""
    before, mark, body = text.partition(form.mark)
    bare = form.bare and text.lstrip()[:1] in ("{", "[")
    for content, calls in [("", text)] * bare + [(before, body)] * bool(mark):  # bare first: the mark may stand in a string
        with suppress(ValueError):
            return ParsedTurn(content.rstrip(), form.read(calls.strip()))
    return ParsedTurn(text, (), int(bool(mark) or bare and _MEANT.search(text) is not None))


_MEANT = re.compile(r'\A\s*\[\s*[\w.-]+\(|\A(?=.*"name").*"(parameters|arguments)"', re.DOTALL)  # as calls, though it is none
_BETWEEN = re.compile(r"[;\s]*")


def _json_calls(body: str) -> tuple[ToolCall, ...]:
    """The calls of a JSON list, or of objects joined by semicolons; ValueError for anything else."""
    values, at = (loads(body), len(body)) if body.startswith("[") else ([], 0)
    while at < len(body):  # a semicolon may stand inside a string, too
        value, at = _value_at(body, at)
        values.append(value)
        at = _BETWEEN.match(body, at).end()
    if not 1 <= len(values) <= MAX_CALLS:
        raise ValueError("no call, or too many")
    if not all(isinstance(value, dict) and {"arguments", "parameters"} & set(value) for value in values):
        raise ValueError("an object with a name alone may be an answer")
    return tuple(map(call_of, values))


MAX_PYTHON = 100_000  # characters that Python's parser is given


def _pythonic_calls(body: str) -> tuple[ToolCall, ...]:
    """[f(a=1), g(b="x")]: names and literal keyword arguments, read by `ast` and not evaluated."""
    try:
        body = body.removesuffix("<|python_end|>")
        tree = parse_python(body if len(body) <= MAX_PYTHON else "", mode="eval").body
        whole = ast.get_source_segment(body, tree) == body and isinstance(tree, ast.List)  # not in parentheses
        if not whole or any(t.type == tokenize.COMMENT for t in tokenize.generate_tokens(io.StringIO(body).readline)):
            raise ValueError("no list of calls alone")
        if not 1 <= len(tree.elts) <= MAX_CALLS:
            raise ValueError("no call, or too many")
        return tuple(map(_pythonic_call, tree.elts))
    except (SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError) as error:
        raise ValueError(f"no list of calls: {error}") from None


def _pythonic_call(node: ast.expr) -> ToolCall:
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("a call is name(argument=literal, ...)")
    arguments = _object([(k.arg, ast.literal_eval(k.value)) for k in node.keywords])
    check_json(arguments)
    return call_of({"name": name, "arguments": loads(json.dumps(arguments))})


def _in_python(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def _written(call: ToolCall, arguments: str = "arguments") -> str:
    return json.dumps({"name": call.name, arguments: call.arguments}, ensure_ascii=False)


@dataclass(frozen=True)
class Form:
    """One form: what begins calls, how they are written and read. With `bare`, a turn that is nothing but calls may leave the
    beginning out."""

    mark: str
    write: Callable[[Sequence[ToolCall]], str]
    bare: bool = False
    read: Callable[[str], tuple[ToolCall, ...]] = _json_calls


FORMS = {
    "hermes": Form("<tool_call>", lambda calls: "".join(f"<tool_call>\n{_written(c)}\n{END_OF_CALL}" for c in calls)),
    "llama": Form("<|python_tag|>", lambda calls: "; ".join(_written(c, "parameters") for c in calls), bare=True),
    "mistral": Form("[TOOL_CALLS]", lambda calls: f"[TOOL_CALLS][{', '.join(map(_written, calls))}]"),
    "pythonic": Form("<|python_start|>", lambda calls: f"[{', '.join(map(_in_python, calls))}]", bare=True,
                     read=_pythonic_calls),
}


def form(name: str) -> Form:
    if name not in FORMS:
        raise ValueError(f"form={name!r}: tool calls are written in one of {', '.join(FORMS)}")
    return FORMS[name]


def _thought(text: str) -> int:
    """How many characters of a turn are the thinking that it begins with (<think> ... </think>), in which nothing is called."""
    if not text.lstrip().startswith("<think>"):
        return 0
    end = text.find("</think>")
    return end + len("</think>") if end >= 0 else len(text)


def parse_calls(text: str, name: str = "hermes") -> ParsedTurn:
    """The calls of a turn's text, without its end token, in one of FORMS. Thinking that the turn begins with is text."""
    thought, how = _thought(text), form(name)
    turn = _hermes(text[thought:]) if name == "hermes" else _whole(text[thought:], how)
    return replace(turn, content=text[:thought] + turn.content)


def write_calls(calls: Sequence[ToolCall], name: str = "hermes") -> str:
    """A turn that is nothing but these calls."""
    return form(name).write(calls)


def certain(text: str, name: str) -> int:
    """How many characters of a turn that is still growing belong to its content, whatever follows."""
    thought, how = _thought(text), form(name)
    rest = text[thought:]
    if how.bare and rest.lstrip()[:1] in ("", "{", "["):
        return len(text[:thought].rstrip())
    at, mark = rest.find(how.mark), how.mark
    if at < 0:
        at = len(rest) - next(n for n in range(min(len(mark) - 1, len(rest)), -1, -1) if mark.startswith(rest[len(rest) - n :]))
    return len(text[: thought + at].rstrip())


def form_of(turn: str, calls: Sequence[ToolCall]) -> str:
    """The form in which a turn says these calls; ValueError where it is none of FORMS."""
    for name in FORMS:
        if parse_calls(turn, name).calls == tuple(calls):
            return name
    raise ValueError(f"the chat template writes tool calls in none of the known forms ({', '.join(FORMS)}), but as "
                     f"{turn.strip()[:120]!r}")


def tools_of(tools: Sequence[Any]) -> list[dict]:
    """Tools in OpenAI's shape, {"type": "function", "function": {"name", "description", "parameters"}}; ValueError for one that
    is not, or a name that stands twice."""
    checked: dict[str, dict] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name):
            raise ValueError('a tool is {"type": "function", "function": {"name": ..., "parameters": {...}}}, its name '
                             f"of at most 64 letters, digits, _, . and -, got {str(tool)[:120]!r}")
        if name in checked:
            raise ValueError(f"two tools are called {name!r}: a call names one")
        try:
            schema = {"type": "object", "properties": {}} | dict(function.get("parameters") or {})
            about = str(function.get("description") or "")
            check_json([about, schema])
            if not isinstance(schema["properties"], Mapping):
                raise ValueError("its properties are no object")
        except (ValueError, TypeError) as error:
            raise ValueError(f"the parameters of the tool {name!r} are a JSON schema of an object: {error}") from error
        checked[name] = {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
    return list(checked.values())
