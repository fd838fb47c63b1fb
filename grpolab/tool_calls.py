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
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_CALLS = 32  # of one turn; more are left as text


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


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_not_json)


def _value_at(text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `at`, and where it ends; ValueError where there is none."""
    try:
        return _decoder.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _loads(text: str) -> Any:
    """The JSON value that the text is; ValueError where it is none."""
    value, end = _value_at(text.strip())
    if end != len(text.strip()):
        raise ValueError("more than one JSON value")
    return value


def call_of(value: Any) -> ToolCall:
    """The call that a JSON object says, {"name": ..., "arguments": {...}} (or "parameters", or arguments as a JSON text, as
    OpenAI has them); ValueError for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError('a call is {"name": "...", "arguments": {...}}')
    arguments = next((value[key] for key in ("arguments", "parameters") if value.get(key) is not None), {})
    arguments = _loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {value['name']!r:.60} are a JSON object, got {str(arguments)[:60]!r}")
    return ToolCall(value["name"], arguments)


_BEGIN, _END = re.compile(r"<tool_call>\s{0,80}"), re.compile(r"\s{0,80}</tool_call>")


def _hermes(text: str) -> ParsedTurn:
    pieces, calls, unparsed, at = [], [], 0, 0
    while begin := _BEGIN.search(text, at):
        try:
            value, end = _value_at(text, begin.end())
            closed = _END.match(text, end)
            if closed is None or len(calls) == MAX_CALLS:
                raise ValueError("it is not closed, or one too many")
            calls.append(call_of(value))
            pieces.append(text[at : begin.start()])
            at = closed.end()
        except ValueError:
            unparsed += 1
            pieces.append(text[at : begin.end()])
            at = begin.end()
    content = "".join([*pieces, text[at:]])
    return ParsedTurn(content.rstrip() if calls else content, tuple(calls), unparsed)


def _whole(text: str, mark: str, read) -> ParsedTurn:
    """A turn in which everything after `mark` is calls; without the mark, one that is nothing but calls."""
    bare = text.lstrip()[:1] in ("{", "[") and not text.startswith(mark)  # the mark may stand inside of a string
    before, found, after = ("", "", text) if bare else text.partition(mark)
    body = after if found else text
    try:
        calls = tuple(read(body.strip()))
        if not 1 <= len(calls) <= MAX_CALLS:
            raise ValueError("no call, or too many")
        return ParsedTurn(before.rstrip() if found else "", calls)
    except ValueError:
        return ParsedTurn(text, (), int(bool(found)))


_BETWEEN = re.compile(r"[;\s]*")


def _json_calls(body: str) -> list[ToolCall]:
    if not body.startswith(("{", "[")):
        raise ValueError("no JSON")
    if body.startswith("["):
        values = _loads(body)
    else:  # several are joined by semicolons, each of which may stand inside a string, too
        values, at = [], 0
        while at < len(body):
            value, at = _value_at(body, at)
            values.append(value)
            at = _BETWEEN.match(body, at).end()
    return [call_of(value) for value in values]


def _pythonic_calls(body: str) -> list[ToolCall]:
    """[f(a=1), g(b="x")]: names and literal keyword arguments, read by `ast` and not evaluated."""
    try:
        body = body.removesuffix("<|python_end|>")
        tree = ast.parse(body if len(body) <= 4000 else "", mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("no list of calls")
        calls = []
        for node in tree.elts:
            if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
                raise ValueError("a call is name(argument=literal, ...)")
            arguments = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
            calls.append(ToolCall(ast.unparse(node.func), _loads(json.dumps(arguments))))
        return calls
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"no list of calls: {error}") from None


def _written(call: ToolCall, arguments: str = "arguments") -> str:
    return json.dumps({"name": call.name, arguments: call.arguments}, ensure_ascii=False)


@dataclass(frozen=True)
class Form:
    """One way to write calls: what begins them, how they are read and written; with `bare`, a turn that is nothing but calls
    may leave the beginning out."""

    mark: str
    read: Callable[[str], ParsedTurn]
    write: Callable[[Sequence[ToolCall]], str]
    bare: bool = False


FORMS = {
    "hermes": Form("<tool_call>", _hermes, lambda calls: "".join(f"<tool_call>\n{_written(c)}\n</tool_call>" for c in calls)),
    "llama": Form("<|python_tag|>", lambda text: _whole(text, "<|python_tag|>", _json_calls),
                  lambda calls: "; ".join(_written(c, "parameters") for c in calls), bare=True),
    "mistral": Form("[TOOL_CALLS]", lambda text: _whole(text, "[TOOL_CALLS]", _json_calls) if "[TOOL_CALLS]" in text else
                    ParsedTurn(text), lambda calls: f"[TOOL_CALLS][{', '.join(map(_written, calls))}]"),
    "pythonic": Form("<|python_start|>", lambda text: _whole(text, "<|python_start|>", _pythonic_calls),
                     lambda calls: f"[{', '.join(map(_call_in_python, calls))}]", bare=True),
}


def _call_in_python(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def form(name: str) -> Form:
    if name not in FORMS:
        raise ValueError(f"form={name!r}: tool calls are written in one of {', '.join(FORMS)}")
    return FORMS[name]


def parse_calls(text: str, name: str = "hermes") -> ParsedTurn:
    """The calls of a turn's text, without its end token, in one of FORMS."""
    return form(name).read(text)


def write_calls(calls: Sequence[ToolCall], name: str = "hermes") -> str:
    """A turn that is nothing but these calls."""
    return form(name).write(calls)


def certain(text: str, name: str) -> int:
    """How many characters of a turn that is still growing belong to its content, whatever follows."""
    mark, bare = form(name).mark, form(name).bare
    if bare and text.lstrip()[:1] in ("", "{", "["):
        return 0
    at = text.find(mark)
    if at < 0:
        at = len(text) - next(n for n in range(min(len(mark) - 1, len(text)), -1, -1) if mark.startswith(text[len(text) - n :]))
    return len(text[:at].rstrip())


def form_of(template: str) -> str:
    """The form that a chat template writes calls in, read off its markers; ValueError where it shows none of them."""
    marks = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_start|>": "pythonic", "<|python_tag|>": "llama",
             '"parameters": ': "llama"}
    for mark, name in marks.items():
        if mark in template:
            return name
    raise ValueError(f"the chat template writes tool calls in none of the known forms ({', '.join(FORMS)}); say which it is")


def tools_of(tools: Sequence[Any]) -> list[dict]:
    """Tools in OpenAI's shape, {"type": "function", "function": {"name", "description", "parameters"}}; ValueError for one that
    is not, or a name that stands twice."""
    checked = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not re.fullmatch(r"[\w.-]{1,64}", str(function.get("name", ""))):
            raise ValueError('a tool is {"type": "function", "function": {"name": ..., "parameters": {...}}}, its name '
                             f"of at most 64 letters, digits, _, . and -, got {str(tool)[:120]!r}")
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, Mapping) or not isinstance(schema.get("properties", {}), Mapping):
            raise ValueError(f"the parameters of the tool {function['name']!r} are a JSON schema of an object, got "
                             f"{str(schema)[:120]!r}")
        checked.append({"type": "function", "function": {
            "name": function["name"], "description": str(function.get("description") or ""), "parameters": dict(schema)}})
    names = [tool["function"]["name"] for tool in checked]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tools are called {doubled!r}: a call names one")
    return checked
