"""The chat template, in one place: messages -> token ids and the mask of the tokens that the policy writes.

CHAT_TEMPLATE serves tokenizers that bring none (the embedded model, any base model); a pretrained chat model keeps its
own. SFT, rollouts and evaluation all go through `prompt_ids` and `encode_chat`, so what is trained is what is sampled.
Text is data: a message that spells "<|im_end|>" says those characters and ends nothing (`grpolab.markers`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from grpolab.markers import Markers, markers_of
from grpolab.tool_calls import ToolCall, call_of, check_json, form_of, mapped, tools_of

CHAT_TEMPLATE = (  # tools as signatures, a line each, f(string a, integer b): what it does; calls in the form of Hermes
    "{% for tool in tools or [] %}{{ 'Tools: ' if loop.first }}{{ tool['function']['name'] + '(' }}"
    "{% for name, schema in tool['function']['parameters']['properties'].items() %}"
    "{{ (schema['enum'] or ([schema['type']] if schema['type'] is string else schema['type'])"
    " or (schema['anyOf'] or []) | map(attribute='type') | select | list or ['any']) | join('|') }}"
    "{{ ' ' + name + ('' if loop.last else ', ') }}{% endfor %}"
    "{{ '): ' + tool['function']['description'] + '\n' }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n' + call['function'] | tojson + '\n</tool_call>' }}{% endfor %}{{ eos_token + '\n' }}"
    "{% else %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)

LONG_TEXT = 2000  # characters: about a millisecond of tokenising; longer texts are tokenised off the event loop
tokenising = ThreadPoolExecutor(1, "grpolab-tokenise")  # there; one: a tokenizer is not made for several threads

# {"role": "system" | "user" | "assistant" | "tool", "content": text}; an assistant's may hold "tool_calls", OpenAI's or TRL's
Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One tokenised conversation: mask is 1 on every assistant turn and its end token, 0 elsewhere."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]


def user(content: str) -> list[Message]:
    """A conversation of one user turn."""
    return [{"role": "user", "content": content}]


def _apply(tokenizer, messages: Sequence[Message], reply: bool, tools: Sequence[dict] = ()) -> str:
    template = None if tokenizer.chat_template else CHAT_TEMPLATE
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, chat_template=template, tokenize=False, add_generation_prompt=reply
        )
    except (TemplateError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        # Most templates say themselves what they want, as a conversation without a system turn; others fail at what is in it,
        # as at the schema of a tool whose "enum" is no list.
        about = f"{[m['role'] for m in messages]!s:.200}{' with these tools' if tools else ''}"
        raise ValueError(f"the chat template refuses a conversation of {about}: {error}") from error


_TOOL = {"type": "function", "function": {"name": "f", "description": "§", "parameters": {"type": "object", "properties": {}}}}
_CALL = {"role": "assistant", "content": "",
         "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "f", "arguments": {}}}]}
_RESULT = {"role": "tool", "content": "§", "name": "f", "tool_call_id": "call12345"}
_ROLES = ["user"], ["system", "user"], ["user", "assistant", "user"], ["user", "assistant", "tool", "tool"]


def _markers(tokenizer) -> Markers:
    def skeletons(conversations, tools=()):
        for messages in conversations:
            with suppress(ValueError):  # a template that knows no system turn, or no tools
                yield _apply(tokenizer, messages, True, tools)

    plain = [[{"role": role, "content": "§"} for role in roles] for roles in _ROLES]
    return markers_of(tokenizer, str(tokenizer.chat_template or CHAT_TEMPLATE), lambda: skeletons(plain),
                      lambda: skeletons([[*user("§"), _CALL, _RESULT]], [_TOOL]))


def call_form(tokenizer) -> str:
    """The form in which this tokenizer's chat template writes calls (`tool_calls.FORMS`); ValueError for a template that does
    not write the tools that it is given, so that the policy would not know of them, or in no known form."""
    return _call_form(tokenizer, str(tokenizer.chat_template or CHAT_TEMPLATE))


@lru_cache(maxsize=8)
def _call_form(tokenizer, template: str) -> str:
    before = _apply(tokenizer, user("§"), True, [_TOOL])
    if before == _apply(tokenizer, user("§"), True):
        raise ValueError("the chat template of this tokenizer does not write tools, so the policy would not know of them: set "
                         "tokenizer.chat_template to one that does (grpolab.chat.CHAT_TEMPLATE)")
    call = ToolCall("f", {"a": "b"})
    function = {"name": call.name, "arguments": call.arguments}
    answer = _CALL | {"tool_calls": [_CALL["tool_calls"][0] | {"function": function}]}
    turn = _apply(tokenizer, [*user("§"), answer], False, [_TOOL])
    turn = turn[len(os.path.commonprefix([turn, before])) :]
    return form_of(turn.partition(tokenizer.eos_token or "\0")[0], [call])


_MORE_KEYS = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}


def _checked(message: Message) -> Message:
    """A message as templates take it: arguments of calls as objects, "developer" as system. ValueError for what is none."""
    role, calls, content = message.get("role"), message.get("tool_calls") or [], message.get("content")
    content = "" if content is None and calls else content
    if (not isinstance(role, str) or not re.fullmatch(r"[\w-]+", role) or not isinstance(content, str)
            or not isinstance(calls, list | tuple) or not set(message) <= {"role", "content"} | _MORE_KEYS.get(role, set())):
        raise ValueError("a message is a role (one word) and a content (text); an assistant's may hold tool_calls, a tool's a "
                         f"tool_call_id and a name: got {str(message)[:80]!r}")
    check_json(content)
    more = {"tool_calls": [_checked_call(call) for call in calls]} if calls else {}
    ids = {k: v for k, v in message.items() if k in ("tool_call_id", "name")}
    return {"role": "system" if role == "developer" else role, "content": content} | ids | more


def _checked_call(call: Any) -> dict:
    function = call.get("function") if isinstance(call, Mapping) else None
    read = call_of(function if function is not None else call)
    id = {"id": str(call["id"])} if call.get("id") is not None else {}
    return id | {"type": "function", "function": {"name": read.name, "arguments": read.arguments}}


def _hidden(message: Message, markers: Markers) -> Message:
    """The message with stand-ins for the control tokens that it spells. An assistant's own text may write calls."""
    own = {"content": markers.hide(message["content"], calls=message["role"] == "assistant")}
    return message | {k: mapped(v, markers.hide) for k, v in message.items() if k not in ("role", "content")} | own


def _render(tokenizer, messages: Sequence[Message], *, reply: bool, tools: Sequence[Any] = ()) -> str:
    """The conversation as the template writes it, with stand-ins where a message spells a control token."""
    markers = _markers(tokenizer)
    if tools:
        call_form(tokenizer)
        tools = mapped(tools_of(tools), markers.hide)
    return _apply(tokenizer, [_hidden(_checked(m), markers) for m in messages], reply, tools)


def _encode(tokenizer, rendered: str) -> list[int]:
    return _markers(tokenizer).encode(tokenizer, rendered)


def prompt_ids(tokenizer, messages: str | Sequence[Message], tools: Sequence[dict] = ()) -> list[int]:
    """Token ids of a conversation that waits for the assistant's next turn; a string is one user turn. `tools`, in OpenAI's
    shape, are what the policy may call: ValueError for a chat template that does not write them."""
    messages = user(messages) if isinstance(messages, str) else messages
    return _encode(tokenizer, _render(tokenizer, messages, reply=True, tools=tools))


def observation_ids(tokenizer, content: str | Sequence[str], role: str = "user") -> list[int]:
    """Token ids between the end token of an assistant turn and the next assistant turn, with `content` in between: a user turn,
    or several of `role` "tool" (the results of calls). ValueError for a template that rewrites earlier turns: under it no
    single token sequence stands for the conversation."""
    contents = [content] if isinstance(content, str) else content
    calls = len(contents) if role == "tool" else 0
    between = [_RESULT | {"content": text} if calls else {"role": role, "content": text} for text in contents]
    head = _head_of_an_answer(tokenizer, calls, str(tokenizer.chat_template), tokenizer.eos_token)
    ids = _behind(tokenizer, head, [*_answer(calls), *between])
    if ids is None:
        raise ValueError("the chat template rewrites earlier turns when a new one is added; use one that only appends")
    return ids


def _answer(calls: int) -> list[Message]:
    """A question, and an answer that makes so many calls; 0: an answer of text."""
    answer = _CALL | {"tool_calls": _CALL["tool_calls"] * calls} if calls else {"role": "assistant", "content": "b"}
    return [*user("a"), answer]


@lru_cache(maxsize=16)
def _head_of_an_answer(tokenizer, calls: int, template: str, end: str) -> str | None:
    """`_head` of `_answer(calls)`, which every turn of an environment follows; `template` and `end` are the tokenizer's, to
    make it anew where they were changed."""
    return _head(tokenizer, _answer(calls), 2)


@lru_cache(maxsize=4)
def longest_token(tokenizer) -> int:
    """Characters of the longest token: none stands for more (of bytes, there are at least as many as of characters)."""
    return max(map(len, tokenizer.get_vocab()))


def text_ids(tokenizer, text: str) -> list[int]:
    """Token ids of a text as it stands, outside of any turn, behind the begin token where the tokenizer sets one. It is data
    like any other: where it spells a control token, it says those characters."""
    check_json(text)
    lead = tokenizer.bos_token_id
    leads = lead is not None and tokenizer.encode("a")[:1] == [lead]
    return [lead] * leads + _encode(tokenizer, _markers(tokenizer).hide(text))


def rest_ids(tokenizer, messages: Sequence[Message], answered: int, ended: bool, tools: Sequence[dict] = ()
             ) -> list[int] | None:
    """Token ids that follow those of the assistant turn messages[answered - 1], up to the next assistant turn; with an end
    token first where that turn was cut and did not write its own (`ended` False). None for a template that rewrites earlier
    turns or does not close them: then the conversation is another sequence."""
    ids = _behind(tokenizer, _head(tokenizer, messages, answered, tools), messages, tools)
    return None if ids is None else [tokenizer.eos_token_id] * (not ended) + ids


def _behind(tokenizer, head: str | None, messages: Sequence[Message], tools: Sequence[dict] = ()) -> list[int] | None:
    """Token ids of what a conversation that waits for its next turn has behind its `_head`; None where it has no such head."""
    whole = _render(tokenizer, messages, reply=True, tools=tools)
    return None if head is None or not whole.startswith(head) else _encode(tokenizer, whole[len(head) :])


def _head(tokenizer, messages: Sequence[Message], answered: int, tools: Sequence[dict] = ()) -> str | None:
    """What the template writes up to the end token of the assistant turn messages[answered - 1]; None where it rewrites what
    was before that turn, or does not close it."""
    end = tokenizer.eos_token
    before = _render(tokenizer, messages[: answered - 1], reply=True, tools=tools)
    after = _render(tokenizer, messages[:answered], reply=False, tools=tools)
    head = after[: after.rfind(end) + len(end)]
    return head if head.startswith(before) and len(head) >= len(before) + len(end) else None


def encode_chat(tokenizer, messages: Sequence[Message], tools: Sequence[dict] = ()) -> Example:
    """A whole conversation as token ids and mask; every assistant turn is supervised, its calls and its end token included.

    Each turn is tokenised on its own, exactly where sampling would cut: the ids before an assistant turn are those that
    `prompt_ids` gives for it. Raises ValueError for a template that rewrites earlier turns, for which no such mask exists.
    """
    end = tokenizer.eos_token
    if end is None:
        raise ValueError("the tokenizer has no end token, so a turn could not end: set tokenizer.eos_token")
    if not any(m.get("role") == "assistant" for m in messages):
        raise ValueError("the conversation has no assistant turn, so there is nothing to learn from it")
    ids: list[int] = []
    mask: list[int] = []
    done = ""  # the text that `ids` stands for
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = _render(tokenizer, messages[:i], reply=True, tools=tools)
        after = _render(tokenizer, messages[: i + 1], reply=False, tools=tools)
        if not (before.startswith(done) and after.startswith(before)):
            raise ValueError("the chat template rewrites earlier turns when a new one is added; train on one turn at a time")
        closed = after.rfind(end) + len(end)
        if closed < len(before) + len(end):
            raise ValueError(f"the chat template does not close an assistant turn with the end token {end!r}")
        for text, chosen in ((before[len(done) :], 0), (after[len(before) : closed], 1)):
            piece = _encode(tokenizer, text)
            ids += piece
            mask += [chosen] * len(piece)
        done = after[:closed]
    return Example(tuple(ids), tuple(mask))
