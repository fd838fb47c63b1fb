"""A command line taken apart before anything else sees it: quotes as a shell reads them, and nothing else that a shell does."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

from grpolab.env.aws.clients import check_region
from grpolab.env.aws.query import compile_query

GLOBALS = ("--region", "--output", "--query")
OUTPUTS = ("json", "text", "table")
MAX_CHARACTERS = 16_384  # of one command; the longest policy that AWS takes is shorter

# What XML 1.0 cannot write, and some of AWS's services answer in XML: with such a character in the account, nobody could read
# the answers that hold it, the grader no more than the policy.
_UNWRITABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_SPECIAL = {"|": "pipes", "&": "background jobs", ";": "several commands", "<": "redirections", ">": "redirections",
            "(": "subshells", ")": "subshells", "`": "command substitution", "$": "variables"}


class Refused(Exception):
    """The command is not carried out; the text says why, and what to write instead."""


def split(line: str) -> list[str]:
    """The words of a line, quoted as in a POSIX shell ('...' literal, "..." with backslashes, \\ before one character).

    Raises Refused for what only a shell would understand (pipes, variables, redirections), for control characters, for
    quotes that do not end and for more than MAX_CHARACTERS.
    """
    if len(line) > MAX_CHARACTERS:
        raise Refused(f"the command has {len(line)} characters; at most {MAX_CHARACTERS} are read")
    words, word, quote, escaped = [], None, "", False
    for at, c in enumerate(line.strip()):
        if (ord(c) < 32 and c != "\t") or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF:
            raise Refused(f"character {at} is {c!r}: write one line of text, without control characters")
        if escaped:
            word = (word or "") + ("" if quote != '"' or c in '"\\$`' else "\\") + c
            escaped = False
        elif c == "\\" and quote != "'":
            escaped = True
        elif quote:
            if quote == '"' and c in "$`":
                raise Refused(f"{_SPECIAL[c]} ({c}) are not available: there is no shell; put it between single quotes")
            if c == quote:
                quote, word = "", word or ""
            else:
                word = (word or "") + c
        elif c in "'\"":
            quote, word = c, word or ""
        elif c in " \t":
            if word is not None:
                words.append(word)
            word = None
        elif c in _SPECIAL:
            raise Refused(f"{_SPECIAL[c]} ({c}) are not available: there is no shell; write one aws command, "
                          "and such characters between single quotes")
        else:
            word = (word or "") + c
    if quote or escaped:
        raise Refused("No closing quotation" if quote else "No escaped character")
    return words if word is None else [*words, word]


def take_globals(words: list[str]) -> tuple[list[str], Namespace]:
    """The words without the global options, and those as a namespace that awscli's handlers read."""
    chosen = Namespace(command="", region=None, output="json", query=None, paginate=True, v2_debug=False, debug=False,
                       endpoint_url=None, profile=None)
    kept, at = [], 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if name == "--no-paginate" and not equals:
            chosen.paginate = False
        elif name in GLOBALS:
            if not equals:
                if at == len(words):
                    raise Refused(f"argument {name}: expected one argument")
                value, at = words[at], at + 1
            setattr(chosen, name[2:], value)
        else:
            kept.append(words[at - 1])
    if chosen.output not in OUTPUTS:
        raise Refused(f"argument --output: {chosen.output:.40} is none of {', '.join(OUTPUTS)}")
    try:
        if chosen.region is not None:
            check_region(chosen.region)
        chosen.query = None if chosen.query is None else compile_query(chosen.query)
    except (ValueError, RecursionError) as fault:
        raise Refused(str(fault)) from fault
    return kept, chosen


def check_writable(value: Any) -> None:
    """Raise Refused for a parameter, or a part of one, with a character that no answer could hold."""
    if isinstance(value, str):
        if found := _UNWRITABLE.search(value):
            raise Refused(f"character {found.start()} of {value[:40]!r} is {found[0]!r}: leave out control characters and the "
                          "like")
    elif isinstance(value, dict):
        for name, part in value.items():
            check_writable(name)
            check_writable(part)
    elif isinstance(value, list):
        for part in value:
            check_writable(part)
