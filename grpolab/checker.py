"""The one checker that SFT evaluation, DPO pairs, GRPO rewards and the environments share. Nothing is evaluated."""

from __future__ import annotations

import re
from collections import deque

# Every repetition is bounded, so a match costs O(1) and a text O(its length), whatever a model writes.
_BOXED = re.compile(r"\\boxed\{[ \t\n]{0,8}([+\-\u2212]?)[ \t]{0,8}([0-9]{1,1000})[ \t\n]{0,8}\}")


def parse_boxed_answer(text: str) -> int | None:
    """The integer in the last well-formed `\\boxed{int}` of `text`, or None. A unicode minus counts as a minus."""
    boxes = deque(_BOXED.finditer(text), maxlen=1)
    if not boxes:
        return None
    sign, digits = boxes[0].groups()
    return int(digits) if sign in ("", "+") else -int(digits)


def integer_answer(answer: object) -> int:
    """The integer that a row's answer is, a number or a text; ValueError for another answer."""
    try:
        return answer if isinstance(answer, int) else int(str(answer))
    except ValueError:
        raise ValueError(f"the answer {answer!r:.40} of a row is no integer, which is all that a box can hold: give "
                         "another reward, e.g. tasks.right_number") from None


def check_answer(text: str, answer: int) -> bool:
    """Whether the last boxed integer of `text` is exactly `answer`."""
    return parse_boxed_answer(text) == answer
