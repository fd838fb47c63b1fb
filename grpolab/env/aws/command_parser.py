"""A command line taken apart before anything else sees it: quotes as in a shell and nothing else that a shell does, the
global options, and `--query` with a bound on what it may make."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from typing import Any

import jmespath

from grpolab.env.aws.clients import check_region

OUTPUTS = ("json", "text", "table")
MAX_CHARACTERS = 16_384  # of one command; the longest policy that AWS takes is shorter
QUERY_COMMAS = 12

# Characters that XML 1.0 cannot hold. Some of AWS's services answer in XML, so with one of them in the account nobody could
# read the answers, the grader no more than the policy.
_UNWRITABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SHELL_SYNTAX = {"|": "pipes", "&": "background jobs", ";": "several commands", "<": "redirections", ">": "redirections",
                 "(": "subshells", ")": "subshells", "`": "command substitution", "$": "variables"}
_QUOTED = re.compile(r"""'[^']*'|\\.|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)  # group 1 is what stands in "..."


class CommandRefused(Exception):
    """The command is not carried out; the text says why, and what to write instead."""


def split(line: str) -> list[str]:
    """The words of a line, quoted as in a POSIX shell; a backslash at the end of a line continues it.

    Raises CommandRefused for what only a shell would understand (pipes, variables, redirections), for control characters, for
    quotes that do not end and for more than MAX_CHARACTERS.
    """
    if len(line) > MAX_CHARACTERS:
        raise CommandRefused(f"the command has {len(line)} characters; at most {MAX_CHARACTERS} are read")
    line = re.sub(r"\\\r?\n", "", line.strip())
    if match := re.search("[\0-\x08\n-\x1f\x7f\ud800-\udfff]", line):
        raise CommandRefused(f"character {match.start()} is {match[0]!r}: write one line of text, without control characters")
    bare = _QUOTED.sub(lambda part: re.sub("[^$`]", "", part[1] or ""), line)  # in "..." a shell reads $ and `
    for c in bare:
        if c in _SHELL_SYNTAX:
            raise CommandRefused(f"{_SHELL_SYNTAX[c]} ({c}) are not available: there is no shell; write one aws command, and "
                                 "such characters between single quotes")
    try:
        return shlex.split(line)
    except ValueError as error:
        raise CommandRefused(str(error)) from error


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


def compile_query(text: str) -> Any:
    """The JMESPath expression, or ValueError with what is wrong with it. With each comma an expression can double what it
    makes, as `[@,@]|[@,@]|...` does: at most QUERY_COMMAS."""
    if text.count(",") > QUERY_COMMAS:
        raise ValueError(f"--query has more than {QUERY_COMMAS} commas; ask for less")
    try:
        return jmespath.compile(text)
    except Exception as error:  # noqa: BLE001  its lexer raises more than its own errors
        raise ValueError(f"Bad value for --query {text:.100}: {error}") from error
