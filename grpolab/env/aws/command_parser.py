"""A command line taken apart before anything else sees it: quotes as a shell reads them, and nothing else that a shell does."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from typing import Any

from grpolab.env.aws.clients import check_region
from grpolab.env.aws.query import compile_query

OUTPUTS = ("json", "text", "table")
MAX_CHARACTERS = 16_384  # of one command; the longest policy that AWS takes is shorter

# What XML 1.0 cannot write, and some of AWS's services answer in XML: with such a character in the account, nobody could read
# the answers that hold it, the grader no more than the policy.
_UNWRITABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_SHELL_SYNTAX = {"|": "pipes", "&": "background jobs", ";": "several commands", "<": "redirections", ">": "redirections",
                 "(": "subshells", ")": "subshells", "`": "command substitution", "$": "variables"}
# '...', "...", a character after a backslash, what is between those, and quotes that do not end.
_PARTS = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^'"\\]+|.""", re.DOTALL)


class CommandRefused(Exception):
    """The command is not carried out; the text says why, and what to write instead."""


def split(line: str) -> list[str]:
    """The words of a line, quoted as in a POSIX shell; a backslash at the end of a line continues it.

    Raises CommandRefused for what only a shell would understand (pipes, variables, redirections), for control characters, for
    quotes that do not end and for more than MAX_CHARACTERS.
    """
    if len(line) > MAX_CHARACTERS:
        raise CommandRefused(f"the command has {len(line)} characters; at most {MAX_CHARACTERS} are read")
    line = "".join(_checked_part(part) for part in _PARTS.findall(line.strip().replace("\\\r\n", "\\\n")))
    if match := re.search("[\0-\x08\n-\x1f\x7f\ud800-\udfff]", line):
        raise CommandRefused(f"character {match.start()} is {match[0]!r}: write one line of text, without control characters")
    try:
        return shlex.split(line)
    except ValueError as error:
        raise CommandRefused(str(error)) from error


def _checked_part(part: str) -> str:
    """A part of a line as shlex reads it like a shell: without the line breaks that a backslash takes away, and in "..."
    without the backslash before $ and `. Raises CommandRefused for syntax of a shell."""
    if part.startswith("'"):
        return part
    for c in re.sub(r"\\.", "", part, flags=re.DOTALL):
        if c in ("$`" if part.startswith('"') else _SHELL_SYNTAX):
            raise CommandRefused(f"{_SHELL_SYNTAX[c]} ({c}) are not available: there is no shell; write one aws command, "
                                 "and such characters between single quotes")
    if part.startswith('"'):
        part = re.sub(r"\\(.)", lambda escape: escape[1] if escape[1] in "$`" else escape[0], part)
    return re.sub(r"\\(\n|.)", lambda escape: "" if escape[1] == "\n" else escape[0], part)


class RefusingParser(ArgumentParser):
    """A parser of options by their full names, made to raise instead of to print and exit."""

    def error(self, message: str) -> None:
        raise CommandRefused(message)


def parse_global_options(words: list[str]) -> tuple[list[str], Namespace]:
    """The words without the global options, and those as a namespace that awscli's handlers read."""
    parser = RefusingParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--region")
    parser.add_argument("--output", choices=OUTPUTS, default="json")
    parser.add_argument("--query")
    parser.add_argument("--no-paginate", dest="paginate", action="store_false")
    others = Namespace(command="", color="off", v2_debug=False, debug=False, endpoint_url=None, profile=None)
    options, words = parser.parse_known_args(words, others)
    try:
        if options.region is not None:
            check_region(options.region)
        options.query = None if options.query is None else compile_query(options.query)
    except (ValueError, RecursionError) as error:
        raise CommandRefused(str(error)) from error
    return words, options


def check_writable(value: Any) -> None:
    """Raise CommandRefused for a parameter, or a part of one, with a character that no answer could hold."""
    if isinstance(value, str) and (match := _UNWRITABLE.search(value)):
        raise CommandRefused(f"character {match.start()} of {value[:40]!r} is {match[0]!r}: leave out control characters and "
                             "the like")
    for part in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_writable(part)
