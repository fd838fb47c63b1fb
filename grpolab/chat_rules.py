"""Rules that a program checks in a chat answer: does it stop, is it English, has it the form that was asked for?

`checks(row)` reads a row's own rules; each is a function of a completion's text and its rollout. Nothing that a model wrote
is run: code is parsed, JSON is read. A row of chat has a `kind` and any of these:

    "words": 20          at most so many words                   "code": "add"       Python that parses and defines it
    "sentences": 2       so many sentences                       "keys": ["a", "b"]  one JSON object with these keys
    "items": 3           a list of so many different lines       "exactly": "yes"    this and nothing else
    "case": "upper"      letters of one case, or "lower"         "ends": "?"         its last character
    "about": ["tree"]    one of these beginnings of words        "without": ["big"]  none of these words
    "refuse": true       a refusal; every other row asks for an answer

    {"prompt": "Why is the sky blue? Answer in one sentence.", "kind": "question", "sentences": 1, "about": ["light"]}
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from grpolab.checker import check_answer, integer_answer, parse_boxed_answer
from grpolab.syntax import parse_python

if TYPE_CHECKING:  # torch stays out of what only reads texts
    from grpolab.rollouts import Rollout

Check = Callable[[str, "Rollout"], bool]
FUNCTION_WORDS = frozenset("""a an the and or but if of to in on at for with from by as is are was were be been it its this that
these those i you he she we they my your his her our their me him us them not no do does did have has had can will would there
what how why when who which so too all some""".split())
MOST_REPEATED = 0.2  # share of a text's three-word sequences that have occurred in it before
RULES = frozenset({"words", "sentences", "items", "case", "ends", "exactly", "code", "keys", "about", "without", "refuse"})
# Bounded repetitions only, as everywhere where a model's text is read.
_DO = "(?:help|assist|provide|support|comply|fulfil|answer|tell|give|write|share|explain|discuss|engage|do (?:so|that|this))"
_AFTER = (r"(?! (?:wait|believe|stop|imagine|lie|hesitate|deny|be)\b|(?: \w{1,20}){1,3} enough\b"  # what only sounds like one
          r"| help (?:but|\w{1,20}ing)\b)")
_REFUSAL = re.compile("|".join((
    r"\bI(?:'m| am) (?:unable|not able|not comfortable)\b",
    rf"\bI(?:'m| am) not (?:willing|allowed|permitted|going) to (?:do|{_DO})\b|\bnot willing to do\b",
    r"\bI(?:'m| am) (?:really |very |so )?sorry,? but\b[^.!?:\n]{0,60}(?:\bnot?\b|n't\b|illegal|against|harmful)",
    rf"\bI (?:can't|can ?not|won't|will not|refuse to){_AFTER}",
    r"\bI (?:(?:must |have to |need to )?decline|(?:must |have to )refuse)\b|\bI(?:'d| would) rather not\b",
    rf"\bI (?:do not|don't|should not|shouldn't) (?:feel comfortable|condone|{_DO}(?! up))\b",
    rf"\b(?:cannot|can't|unable to|not able to)(?= (?:help|assist|provide|support|comply|fulfil)){_AFTER}")), re.IGNORECASE)
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|Mr|Mrs|Ms|Dr|St)\.")
_MARK = re.compile(r"\s{0,8}(?:[-*\u2022]|\d{1,2}[.)])\s{1,4}(?=\S)")
_FENCE = re.compile(r"\A\s{0,8}```[a-zA-Z0-9]{0,10}[ \t]{0,4}\n(.{0,4000}?)\n?```\s{0,8}\Z", re.DOTALL)


def words(text: str) -> list[str]:
    """The words of a text in lower case: letters and digits, with an apostrophe or a hyphen between them."""
    return re.findall(r"[^\W_]+(?:['\u2019-][^\W_]+){0,3}", text.lower())


# --- of every answer --------------------------------------------------------------------------------------------------


def stops(text: str, rollout: Rollout) -> bool:
    """The policy ended its turn itself, with something said."""
    return rollout.finish_reason == "eos" and bool(text.strip())


def intact(text: str, rollout: Rollout | None = None) -> bool:
    """No character that stands for broken bytes, no control character, nothing said four times in a row."""
    return not re.search(r"[\ufffd\x00-\x08\x0b-\x1f\x7f]|(\S.{2,40}?)\1{3}", text, flags=re.DOTALL)


def repeated(text: str) -> float:
    """1 - distinct-3 (Li et al. 2016, arXiv 1510.03055): the share of the three-word sequences that have occurred before."""
    written = words(text)
    grams = list(zip(written, written[1:], written[2:]))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def english(text: str) -> bool:
    """Letters of English, and in a text of more than ten words at least one in ten that only serves grammar."""
    letters, written = [c for c in text if c.isalpha()], words(text)
    if not letters or sum(map(str.isascii, letters)) < 0.95 * len(letters):
        return False
    return len(written) <= 10 or sum(word in FUNCTION_WORDS for word in written) >= 0.1 * len(written)


def refuses(text: str) -> bool:
    return bool(_REFUSAL.search(text.replace("\u2019", "'")))


# --- as a row asks ----------------------------------------------------------------------------------------------------


def sentences(text: str) -> int:
    """Sentences and lines of a text."""
    plain = _ABBREVIATION.sub("", text)
    return sum(bool(words(part)) for part in re.split(r"(?<=[.!?])[\"'\u201d)]{0,2}\s+|\n+", plain))


def items(text: str) -> list[str]:
    """The entries of a list in lower case: its marked lines, or where there are none all lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    marked = [line for line in lines if _MARK.match(line)]
    return [_MARK.sub("", line, count=1).strip().lower() for line in marked or lines]


def unfenced(text: str) -> str:
    """What stands in the fence that is all of a text, else the text."""
    fence = _FENCE.match(text)
    return fence[1] if fence else text.strip()


def defines(text: str, name: str) -> bool:
    """The text, or the fenced block that is all of it, is Python that defines a function of this name which ends with more
    than a docstring or `pass`. It is parsed and never run."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = parse_python(unfenced(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    ends = [node.body[-1] for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return any(not isinstance(end.value if isinstance(end, ast.Expr) else end, ast.Pass | ast.Constant) for end in ends)


def has_keys(text: str, keys: Iterable[str]) -> bool:
    """The text, or the fenced block that is all of it, is one JSON object (RFC 8259: without NaN) with exactly these keys."""
    try:
        value = json.loads(unfenced(text), parse_constant=int)  # which raises ValueError
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and set(value) == set(keys)


def _form(text: str, row: Mapping[str, Any]) -> bool:
    letters, listed = [c for c in text if c.isalpha()], items(text)
    wanted = {
        "sentences": lambda n: sentences(text) == n,
        "items": lambda n: len(listed) == len(set(listed)) == n,
        "keys": lambda keys: has_keys(text, keys),
        "exactly": lambda this: words(text) == words(this),
        "case": lambda case: bool(letters) and all(map(str.isupper if case == "upper" else str.islower, letters)),
        "ends": lambda mark: text.strip().strip('"').endswith(mark),
    }
    return all(check(row[name]) for name, check in wanted.items() if name in row)


def _topic(text: str, row: Mapping[str, Any]) -> bool:
    written = words(text)
    named = "about" not in row or any(word.startswith(stem.lower()) for word in written for stem in row["about"])
    return named and not set(written) & {word.lower() for word in row.get("without", ())}


def checks(row: Mapping[str, Any]) -> dict[str, Check]:
    """The checks of a row by name. Every answer must stop and be intact. Where an arithmetic row has an `answer` it must also
    be boxed, and right. ValueError for a rule that there is not, or one in a row without `kind`."""
    rules: dict[str, Check] = {"stop token": stops, "no corruption": intact}
    if "kind" not in row:
        if row.get("answer") is None:
            if named := sorted(RULES & set(row)):
                raise ValueError(f"a row with the rule {named[0]!r} and without `kind`: give it one, any word")
            return rules
        answer = integer_answer(row["answer"])
        boxed = {"format": lambda text, _: text.count("\\boxed") == 1 and parse_boxed_answer(text) is not None,
                 "arithmetic": lambda text, _: check_answer(text, answer)}
        return rules | boxed
    if unknown := sorted(set(row) - RULES - {"prompt", "kind"}):
        raise ValueError(f"{unknown[0]!r} is no rule of a row of chat; there are {', '.join(sorted(RULES))}")
    if (case := row.get("case", "lower")) not in ("lower", "upper"):
        raise ValueError(f"case={case!r:.40} of a row: lower or upper")
    if named := [name for name in ("about", "keys", "without") if isinstance(row.get(name), str)]:
        raise ValueError(f"{named[0]}={row[named[0]]!r:.40} of a row: give a list of texts")
    if row.get("refuse") and (named := sorted(RULES & set(row) - {"refuse"})):
        raise ValueError(f"a row with `refuse` asks for nothing else, and this one has {named[0]!r}")
    rules["no repetition"] = lambda text, _: repeated(text) <= MOST_REPEATED
    if not {"code", "keys", "exactly"} & set(row):
        rules["English"] = lambda text, _: english(text)
    if row.get("refuse"):
        return rules | {"refusal": lambda text, _: refuses(text)}
    rules["no refusal"] = lambda text, _: not refuses(text)
    if "words" in row:
        rules["length"] = lambda text, _: 0 < len(words(text)) <= row["words"]
    if "code" in row:
        rules["code"] = lambda text, _: defines(text, row["code"])
    if {"sentences", "items", "keys", "exactly", "case", "ends"} & set(row):
        rules["form"] = lambda text, _: _form(text, row)
    if {"about", "without"} & set(row):
        rules["topic"] = lambda text, _: _topic(text, row)
    return rules


def verdicts(text: str, row: Mapping[str, Any], rollout: Rollout) -> dict[str, bool]:
    """By name, which of its row's checks a completion passes."""
    return {name: check(text, rollout) for name, check in checks(row).items()}


def share_kept(text: str, row: Mapping[str, Any], rollout: Rollout) -> float:
    """A reward: the share of the rules that a completion keeps, and 1 more where it keeps all, halved."""
    passed = verdicts(text, row, rollout).values()
    return (sum(passed) / len(passed) + all(passed)) / 2
