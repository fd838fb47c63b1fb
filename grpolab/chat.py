"""The chat template, in one place: messages -> token ids and the mask of the tokens that the policy writes.

CHAT_TEMPLATE serves tokenizers that bring none (the embedded model, any base model); a pretrained chat model keeps its
own. SFT, rollouts and evaluation all go through `prompt_ids` and `encode_chat`, so what is trained is what is sampled.
Text is data: a message that spells "<|im_end|>" says those characters and ends nothing (`grpolab.markers`). Where a template
marks its turns with plain words on a tokenizer that has no tokens for them, nothing can tell the two apart: that is warned of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import torch
from jinja2 import TemplateError

from grpolab.markers import Markers, markers_of

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)

LONG_TEXT = 2000  # characters: about a millisecond of tokenising; longer texts are tokenised off the event loop
tokenising = ThreadPoolExecutor(1, "grpolab-tokenise")  # there; one: a tokenizer is not made for several threads

Message = dict[str, str]  # {"role": "user" | "assistant" | "system", "content": text}


@dataclass(frozen=True)
class Example:
    """One tokenised conversation: mask is 1 on every assistant turn and its end token, 0 elsewhere."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]


def user(content: str) -> list[Message]:
    """A conversation of one user turn."""
    return [{"role": "user", "content": content}]


def _apply(tokenizer, messages: Sequence[Message], reply: bool) -> str:
    template = None if tokenizer.chat_template else CHAT_TEMPLATE
    try:
        return tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=reply
        )
    except TemplateError as error:  # most say themselves what they want, as a conversation without a system turn
        raise ValueError(f"the chat template refuses a conversation of {[m['role'] for m in messages]}: {error}") from error


def _markers(tokenizer) -> Markers:
    def skeletons():
        for roles in (["user"], ["system", "user"], ["user", "assistant", "user"]):
            with suppress(ValueError):  # a template that knows no system turn
                yield _apply(tokenizer, [{"role": role, "content": "§"} for role in roles], True)

    return markers_of(tokenizer, str(tokenizer.chat_template or CHAT_TEMPLATE), skeletons)


def _render(tokenizer, messages: Sequence[Message], *, reply: bool) -> str:
    """The conversation as the template writes it, with stand-ins where a message spells a control token."""
    markers = _markers(tokenizer)
    for m in messages:
        if set(m) != {"role", "content"} or not isinstance(m["content"], str) or not re.fullmatch(r"[\w-]+", str(m["role"])):
            raise ValueError(f"a message is a role (one word) and a content (text), got {str(m)[:80]!r}")
        _check_text(m["content"])
    said = [m | {"content": markers.hide(m["content"])} for m in messages]
    plain = [m | {"content": "a" if m["content"].strip() else m["content"]} for m in messages]
    rendered = _apply(tokenizer, said, reply)
    if markers.count(rendered) > markers.count(_apply(tokenizer, plain, reply)):
        raise ValueError(f"the chat template makes control tokens of what a message says: {str(messages)[:200]}")
    return rendered


def _check_text(text: str) -> None:
    """ValueError for half a surrogate pair, which is no character, so no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a message holds {text[error.start]!r} at position {error.start}, half of a surrogate pair, which is "
                         "no character: read the text as UTF-8, or replace it (text.encode(errors='replace').decode())"
                         ) from error


def _encode(tokenizer, rendered: str) -> list[int]:
    return _markers(tokenizer).encode(tokenizer, rendered)


def prompt_ids(tokenizer, messages: str | Sequence[Message]) -> list[int]:
    """Token ids of a conversation that waits for the assistant's next turn; a string is one user turn."""
    messages = user(messages) if isinstance(messages, str) else messages
    return _encode(tokenizer, _render(tokenizer, messages, reply=True))


def observation_ids(tokenizer, content: str) -> list[int]:
    """Token ids between the end token of an assistant turn and the next assistant turn, with `content` said in between.

    Said as a user turn, and tokenised on its own, so that nothing the policy wrote is tokenised again. Raises ValueError
    for a template that rewrites earlier turns: under it no single token sequence stands for the conversation.
    """
    said = [*user("a"), {"role": "assistant", "content": "b"}, *user(content)]
    ids = rest_ids(tokenizer, said, answered=2, ended=True)
    if ids is None:
        raise ValueError("the chat template rewrites earlier turns when a new one is added; use one that only appends")
    return ids


@lru_cache(maxsize=4)
def longest_token(tokenizer) -> int:
    """Characters of the longest token: none stands for more (of bytes, there are at least as many as of characters)."""
    return max(map(len, tokenizer.get_vocab()))


def text_ids(tokenizer, text: str) -> list[int]:
    """Token ids of a text as it stands, outside of any turn, behind the begin token where the tokenizer sets one. It is data
    like any other: where it spells a control token, it says those characters."""
    _check_text(text)
    lead = tokenizer.bos_token_id
    leads = lead is not None and tokenizer.encode("a")[:1] == [lead]
    return [lead] * leads + _encode(tokenizer, _markers(tokenizer).hide(text))


def rest_ids(tokenizer, messages: Sequence[Message], answered: int, ended: bool) -> list[int] | None:
    """Token ids that follow those of the assistant turn messages[answered - 1], up to the next assistant turn; with an end
    token first where that turn was cut and did not write its own (`ended` False).

    None for a template that rewrites earlier turns or does not close them: then the conversation is another sequence.
    """
    end = tokenizer.eos_token
    before = _render(tokenizer, messages[: answered - 1], reply=True)
    after = _render(tokenizer, messages[:answered], reply=False)
    head = after[: after.rfind(end) + len(end)]
    whole = _render(tokenizer, messages, reply=True)
    if not (head.startswith(before) and len(head) >= len(before) + len(end) and whole.startswith(head)):
        return None
    return [tokenizer.eos_token_id] * (not ended) + _encode(tokenizer, whole[len(head) :])


def encode_chat(tokenizer, messages: Sequence[Message]) -> Example:
    """A whole conversation as token ids and mask; every assistant turn is supervised, its end token included.

    Each turn is tokenised on its own, exactly where sampling would cut: the ids before an assistant turn are those that
    `prompt_ids` gives for it. Raises ValueError for a template that rewrites earlier turns, for which no such mask exists.
    """
    end = tokenizer.eos_token
    if end is None:
        raise ValueError("the tokenizer has no end token, so a turn could not end: set tokenizer.eos_token")
    if not any(m["role"] == "assistant" for m in messages):
        raise ValueError("the conversation has no assistant turn, so there is nothing to learn from it")
    ids: list[int] = []
    mask: list[int] = []
    done = ""  # the text that `ids` stands for

    def append(text: str, chosen: int):
        piece = _encode(tokenizer, text)
        ids.extend(piece)
        mask.extend([chosen] * len(piece))

    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:i], reply=True)
        after = _render(tokenizer, messages[: i + 1], reply=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise ValueError("the chat template rewrites earlier turns when a new one is added; train on one turn at a time")
        turn = after[len(before) :]
        cut = turn.rfind(end) + len(end)
        if cut < len(end):
            raise ValueError(f"the chat template does not close an assistant turn with the end token {end!r}")
        append(before[len(done) :], 0)
        append(turn[:cut], 1)
        done = before + turn[:cut]
    return Example(tuple(ids), tuple(mask))


@dataclass(frozen=True)
class Packed:
    """Right-padded rows for a forward pass; ids, mask, positions: (N, T). attention is (N, 1, T, T), True where a query
    may look, or None where plain causal attention over right-padded rows is enough."""

    ids: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    attention: torch.Tensor | None = None


def pad(examples: Sequence[Example], pad_id: int = 0) -> Packed:
    """One example a row, right-padded: causal attention never looks at what comes after, so no attention mask is needed."""
    return pack(examples, width=1, pad_id=pad_id)


def pack(examples: Sequence[Example], width: int, pad_id: int = 0) -> Packed:
    """Several examples a row, first fit, each seeing only itself at positions of its own (rows of at most `width` tokens;
    a longer example gets a row of its own). Loss and gradient equal those of the unpacked batch."""
    if not examples:
        raise ValueError("cannot batch an empty list of examples")
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in examples:
        n = len(example.ids)
        row = next((r for r, free in enumerate(room) if free >= n), None)
        if row is None:
            rows.append([])
            room.append(max(width, n))
            row = len(rows) - 1
        rows[row].append(example)
        room[row] -= n
    length = max(sum(len(e.ids) for e in row) for row in rows)
    shape = (len(rows), length)
    ids, positions = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.long)
    mask, owner = torch.zeros(shape), torch.full(shape, -1)
    for r, row in enumerate(rows):
        at = 0
        for which, example in enumerate(row):
            span = slice(at, at + len(example.ids))
            ids[r, span] = torch.tensor(example.ids)
            mask[r, span] = torch.tensor(example.mask, dtype=torch.float32)
            mask[r, at] = 0  # the first token of an example follows nothing
            positions[r, span] = torch.arange(len(example.ids))
            owner[r, span] = which
            at += len(example.ids)
        positions[r, at:] = torch.arange(length - at)
    if all(len(row) == 1 for row in rows):
        return Packed(ids, mask, positions)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    attention = (owner[:, :, None] == owner[:, None, :]) & causal
    return Packed(ids, mask, positions, attention[:, None])
