"""Tasks as plain rows: a problem is anything with a prompt, and with whatever its reward wants to know.

A row may be a dict, a dataclass or another object with attributes; its prompt, text or messages, is its `prompt`, or else its
`question` or `messages`. Rows come from a JSONL file (`read_rows`), from a table of `datasets` with TRL's columns (iterate
it: it gives dicts), or from the loaders below.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # torch stays out of what only reads rows
    from grpolab.rollouts import Rollout

T = TypeVar("T")
PROMPTS = ("prompt", "question", "messages")  # where a row's prompt may stand, in this order


def has(row: Any, name: str) -> bool:
    return name in row if isinstance(row, Mapping) else hasattr(row, name)


def value_of(row: Any, name: str) -> Any:
    """The entry or attribute `name` of a row; ValueError that names what the row does have."""
    if not has(row, name):
        names = sorted(map(str, row) if isinstance(row, Mapping) else (n for n in dir(row) if not n.startswith("_")))
        raise ValueError(f"the row {str(row)[:120]!r} has no {name!r}; it has {names}")
    return row[name] if isinstance(row, Mapping) else getattr(row, name)


def prompt_of(row: Any) -> str | Sequence[dict]:
    """The prompt of a row: a text, which is one user turn, or messages. ValueError where there is none."""
    name = next((n for n in PROMPTS if has(row, n)), None)
    if name is None:
        raise ValueError(f"a row needs one of {PROMPTS}, but this {type(row).__name__} has none: {str(row)[:120]}")
    prompt = value_of(row, name)
    several = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    turns = several and prompt and all(isinstance(m, Mapping) for m in prompt)
    if not (turns or isinstance(prompt, str) and prompt.strip()):
        raise ValueError(f"the {name!r} of a row is a text or a list of messages, got {str(prompt)[:120]!r}")
    return prompt


def demonstration_of(row: Any) -> list[dict]:
    """The conversation that a row shows, to its last assistant turn: whole `messages`, or a prompt with a `completion` or
    `target`, text or messages. ValueError where there is nothing to imitate."""
    prompt = prompt_of(row)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    name = next((n for n in ("completion", "target") if has(row, n)), None)
    if name is not None:
        answer = value_of(row, name)
        if not (isinstance(answer, str) or isinstance(answer, Sequence) and all(isinstance(m, Mapping) for m in answer)):
            raise ValueError(f"the {name!r} of a row is a text or a list of messages, got {str(answer)[:120]!r}")
        messages += [{"role": "assistant", "content": answer}] if isinstance(answer, str) else list(answer)
    if messages[-1].get("role") != "assistant":
        raise ValueError(f"a demonstration needs a completion, or messages that end with the assistant's: {str(row)[:120]}")
    return messages


def shows_completion(row: Any) -> bool:
    """Whether a row holds something to imitate, and not a prompt alone."""
    try:
        return bool(demonstration_of(row))
    except ValueError:
        return False


def read_rows(path: str | Path, needs: Iterable[str] = ()) -> list[dict]:
    """The rows of a JSONL file, one object a line, each with a prompt and with all of `needs`; errors name the line."""
    def row(value: Any) -> dict:
        if not isinstance(value, dict):
            raise ValueError(f"it is {type(value).__name__}, not an object")
        prompt_of(value)
        for name in needs:
            value_of(value, name)
        return value

    return read_json(path, row)


def read_json(source: str | Path | Iterable, check: Callable[[Any], T] = lambda value: value, what: str = "a row") -> list[T]:
    """The values of a JSONL file, or of any iterable, as `check` returns them; ValueError names the line that it refuses as
    not being `what`."""
    is_file = isinstance(source, str | Path)
    try:
        lines = Path(source).read_text(encoding="utf-8-sig").split("\n") if is_file else source  # strings may hold U+2028
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no UTF-8 text: save it as UTF-8 ({error})") from error
    values = []
    for number, line in enumerate(lines, start=1):
        if is_file and not line.strip():
            continue
        try:
            values.append(check(json.loads(line) if is_file else line))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            where = f"{source}, line" if is_file else "row"
            raise ValueError(f"{where} {number}: not {what} ({reason})") from error
    if not values:
        raise ValueError(f"{source if is_file else 'the source'} holds no rows: write one JSON value a line")
    return values


# --- GSM8K ------------------------------------------------------------------------------------------------------------

# Bounded repetitions: a text costs as much as its length, whatever a model writes.
_NUMBER = re.compile(r"(?:(?<![\w)])\$?[-\u2212])?\$?"
                     r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,10}|[0-9]{1,60})(?:\.[0-9]{1,30})?|(?<![\w.])\.[0-9]{1,30})"
                     r"(?:[eE][-+]?[0-9]{1,3}\b)?")
_FINAL = "####"  # GSM8K's mark before the final answer (arXiv 2110.14168)


def final_number(text: str) -> Decimal | None:
    """The number after the last `####`, or where there is none the last number of `text`; None without one. Thousands'
    commas and a dollar sign are read over; 3-5 ends in 5, and 1e-05, as Python writes it, is one number."""
    _, mark, after = text.rpartition(_FINAL)
    matches = [_NUMBER.match(after.lstrip())] if mark else list(_NUMBER.finditer(text))[-1:]
    if not matches or matches[0] is None:
        return None
    return Decimal(matches[0].group().translate({ord(","): None, ord("$"): None, 0x2212: "-"}))


def gsm8k(path: str | Path) -> list[dict]:
    """Rows of GSM8K's own JSONL (`question`, and an `answer` that ends in `#### number`): prompt, the final number as
    `answer`, and the worked `solution`."""
    rows = []
    for i, row in enumerate(read_rows(path, needs=("question", "answer")), start=1):
        number = final_number(str(row["answer"])) if _FINAL in str(row["answer"]) else None
        if number is None:
            raise ValueError(f"{path}, row {i}: the answer does not end in '#### number': {str(row['answer'])[-80:]!r}")
        rows.append({"prompt": row["question"], "answer": str(number), "solution": row["answer"]})
    return rows


def check_answers(rows: Iterable[Any], source: str | Path = "the rows") -> None:
    """ValueError that names the first row of a file whose `answer` holds no number."""
    for number, row in enumerate(rows, start=1):
        answer = str(value_of(row, "answer"))
        if final_number(answer) is None:
            raise ValueError(f"{source}, row {number}: its answer holds no number: {answer[:80]!r}")


def right_number(text: str, row: Any, rollout: Rollout) -> float:
    """A reward: 1.0 where the final number of a completion that the policy ended itself is the row's `answer`, else 0.0."""
    check_answers([row])
    return float(rollout.finish_reason == "eos" and final_number(text) == final_number(str(value_of(row, "answer"))))


# --- reasoning-gym ----------------------------------------------------------------------------------------------------

# Their scorers evaluate what the policy wrote, or generated code, as Python (`eval`, `exec`, sympy's `parse_expr`).
EVALUATING = frozenset({
    "binary_matrix", "codeio", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})


@dataclass(frozen=True)
class GymTask:
    """One task of reasoning-gym: the prompt, its answer, and the data set that scores answers to it."""

    prompt: str
    answer: str | None
    entry: dict = field(repr=False, compare=False, hash=False)
    dataset: Any = field(repr=False, compare=False, hash=False)

    def score(self, text: str) -> float:
        """reasoning-gym's own score, from 0 to 1, of the answer that `gym_answer` reads from a completion."""
        return float(self.dataset.score_answer(gym_answer(text), self.entry))


def gym_answer(text: str) -> str:
    """What a completion answers: what stands in its last `<answer>…</answer>`, else its last non-empty line."""
    inside = re.findall(r"<answer>(.{0,4000}?)</answer>", text, flags=re.DOTALL)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return inside[-1].strip() if inside else lines[-1] if lines else ""


def gym_score(text: str, row: GymTask, rollout: Rollout) -> float:
    """A reward: the task's own score where the policy ended its completion itself, else 0.0."""
    return row.score(text) if rollout.finish_reason == "eos" else 0.0


def _gym(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError("reasoning-gym is not installed: pip install 'grpolab[gym]'") from error


def gym_names() -> list[str]:
    """The data sets of reasoning-gym that `reasoning_gym` makes. ImportError without the extra."""
    return sorted(_gym("reasoning_gym.factory").DATASETS.keys() - EVALUATING)


def reasoning_gym(name: str, *, size: int, seed: int, ask: str = "{question}", **config: Any) -> list[GymTask]:
    """`size` tasks of a data set of reasoning-gym (extra `grpolab[gym]`), the same for the same seed; `config` are the data
    set's own settings (difficulty). `ask` puts the question into a prompt, e.g. "{question}Answer with the number alone.".

    Raises ImportError without the extra, ValueError for a name or setting that the package does not have, and for data
    sets whose scorer would run what the policy writes as Python code (`EVALUATING`).
    """
    if name in EVALUATING:
        raise ValueError(f"the scorer of {name!r} evaluates answers as Python code, and nothing that a policy writes is "
                         "evaluated here: take another data set, or score its entries by a reward of your own")
    if size < 1 or ask.count("{question}") != 1:
        raise ValueError(f"size must be at least 1 and `ask` must hold '{{question}}' once, got size={size}, ask={ask!r}")
    package = _gym("reasoning_gym")
    try:
        dataset = package.create_dataset(name, size=size, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym makes no data set {name!r} with {config or 'its defaults'}: {error}") from error
    before, _, after = ask.partition("{question}")
    return [GymTask(before + e["question"] + after, e["answer"], e, dataset) for e in (dataset[i] for i in range(size))]
