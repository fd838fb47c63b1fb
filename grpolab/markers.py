"""Control tokens: which tokens mark turns and ends, and how text is encoded so that it never makes one.

Only a chat template may write a control token; what users, data sets, environments and policies say is text, also where it
spells one. A text without such a spelling is encoded by the tokenizer as always. Else its twin does it: the same tokenizer
with secret spellings for the control tokens. The template's markers are put into those, and the text's stay plain characters.
"""

from __future__ import annotations

import json
import re
import secrets
import warnings
from collections.abc import Iterable
from itertools import groupby
from weakref import WeakKeyDictionary


class Markers:
    """The control tokens of one tokenizer under one chat template: every special token, and every other added token that
    the template writes around a message ("User:" of the embedded model). Added tokens that mark no turn, such as "<think>",
    stay what the tokenizer makes of them.

    text = markers.hide(text)                    for each text, before it enters the template
    ids = markers.encode(tokenizer, rendered)    of what the template made, or of a part of it
    """

    def __init__(self, tokenizer, skeletons: Iterable[str], of_calls: Iterable[str] = ()):
        """`skeletons`: what the template makes of messages that say "§"; `of_calls`: of tools, calls and their results."""
        added = {token.content: (i, token.special) for i, token in tokenizer.added_tokens_decoder.items()}
        special = {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens}
        skeletons = list(skeletons)
        written = {i for text in skeletons for i in tokenizer.encode(text, add_special_tokens=False)}
        around_calls = {i for text in of_calls for i in tokenizer.encode(text, add_special_tokens=False)} - written
        self.ids = special | {text: i for text, (i, is_special) in added.items() if is_special or i in written | around_calls}
        self._calls = {t for t, (i, is_special) in added.items() if i in around_calls and not is_special} - set(special)
        self._pattern = re.compile(_alternation(self.ids) or "(?!)")
        self._nonce = nonce = secrets.token_hex(8)
        self._twin = None
        self._secret = {text: f"<{nonce}-{i}>" for text, i in self.ids.items()}
        self._hidden = {text: f"x{nonce}y{i}x" for text, i in self.ids.items()}
        self._shown = re.compile(f"x{nonce}y([0-9]+)x")
        self._spelling = {str(i): text for text, i in self.ids.items()}
        # Markers that are plain words can be spelled by anybody: the pieces of the template that hold no control token.
        pieces = {piece.strip() for text in skeletons for piece in text.split("§")}
        self.words = sorted(p for p in pieces if len(p) > 1 and not self.count(p))

    def count(self, text: str) -> int:
        """How many control tokens `text` spells."""
        return len(self._pattern.findall(text))

    def hide(self, text: str, calls: bool = False) -> str:
        """`text` with a stand-in for each control token that it spells, but for those of `calls`. Warns where it spells a
        marker of plain words."""
        if word := next((w for w in self.words if w in text), None):
            warnings.warn(f"a message says {word!r}, which this chat template writes as plain words between turns: nothing "
                          "tells the two apart. Use a tokenizer that has tokens of its own for turns", stacklevel=4)
        spared = self._calls if calls else ()
        return self._pattern.sub(lambda m: m[0] if m[0] in spared else self._hidden[m[0]], text)

    def encode(self, tokenizer, rendered: str) -> list[int]:
        """Token ids of a rendered conversation or a part of it: its control tokens are those of the template alone."""
        if self._nonce not in rendered.lower():  # no stand-in
            ids = tokenizer.encode(rendered, add_special_tokens=False)
            unknown = tokenizer.unk_token_id  # also what a character without a token becomes
            control = set(self.ids.values()) - {unknown}
            written = [self.ids[m] for m in self._pattern.findall(rendered)]
            if [i for i in ids if i in control] == [i for i in written if i != unknown]:
                return ids
            # Else a text spells one as the tokenizer's normalizer reads it, in other letters.
        return self._encode_by_twin(tokenizer, rendered)

    def _encode_by_twin(self, tokenizer, rendered: str) -> list[int]:
        if self._nonce in self._shown.sub("", rendered).lower():
            raise ValueError("a message spells a control token, and the chat template changes its letters: remove that text")
        self._twin = self._twin or self._make_twin(tokenizer)
        text = self._pattern.sub(lambda m: self._secret[m[0]], rendered)
        text = self._shown.sub(lambda m: self._spelling[m[1]], text)
        return self._twin.encode(text, add_special_tokens=False).ids

    def _make_twin(self, tokenizer):
        """The tokenizer with the secret spellings; ValueError where it can have none, being written in Python."""
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(f"a text spells a control token, and {type(tokenizer).__name__} cannot encode that as plain "
                             "text: load a fast tokenizer (tokenizer.json), or remove the text")
        content = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
        model, names = content["model"], {i: self._secret[text] for text, i in self.ids.items()}
        unknown = model.get("unk_token")
        names.pop(self.ids.get(unknown), None)  # the model itself names it; without the added token it is plain text
        content["added_tokens"] = [
            token | ({"content": names[token["id"]], "normalized": False} if token["id"] in names else {})
            for token in content["added_tokens"]
            if token["content"] != unknown
        ]
        if isinstance(model["vocab"], dict):
            own = {text for text, i in model["vocab"].items() if i in names}
            model["vocab"] = {names.get(i, text): i for text, i in model["vocab"].items()}
            if own and model.get("merges"):  # none may make or use a control token
                pairs = ((m, m.split(" ") if isinstance(m, str) else m) for m in model["merges"])
                model["merges"] = [m for m, pair in pairs if not own & {*pair, "".join(pair)}]
        else:
            model["vocab"] = [[names.get(i, piece), score] for i, (piece, score) in enumerate(model["vocab"])]
        twin = Tokenizer.from_str(json.dumps(content))
        moved = [i for i, name in names.items() if twin.token_to_id(name) != i]
        if moved:
            raise ValueError(f"a text spells a control token, and this tokenizer's ids {moved} cannot be renamed: remove it")
        return twin


def _alternation(words: Iterable[str]) -> str:
    """A pattern for the longest of `words` at a place; shared beginnings stand once, so that thousands cost little."""
    words = sorted(set(words))
    branches = [re.escape(first) + _alternation([w[1:] for w in group])
                for first, group in groupby((w for w in words if w), key=lambda w: w[0])]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in words else ''}"


_known: WeakKeyDictionary = WeakKeyDictionary()


def markers_of(tokenizer, template: str, skeletons, of_calls) -> Markers:
    """The Markers of a tokenizer under a template, made once, and again when it got another template or further tokens;
    `skeletons()` and `of_calls()` render them where they are needed."""
    special = tuple(tokenizer.all_special_tokens)
    known, free, markers = _known.get(tokenizer, (None, 0, None))
    if known != (template, special) or _token(tokenizer, free) is not None:
        free = max(tokenizer.vocab_size, 1 + max(tokenizer.added_tokens_decoder, default=-1))
        while _token(tokenizer, free) is not None:  # ids with gaps
            free += 1
        markers = Markers(tokenizer, skeletons(), of_calls())
        _known[tokenizer] = (template, special), free, markers
    return markers


def _token(tokenizer, i: int) -> str | None:
    """The token with this id, None where there is none. Asking the tokenizer for its length is slow in some versions."""
    try:
        return tokenizer.convert_ids_to_tokens(i)
    except (IndexError, KeyError):  # one written in Python
        return None
