"""Evaluation: format and exact-match rates with intervals, and the comparison of two policies on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpolab.arithmetic import Problem
from grpolab.chat import prompt_ids
from grpolab.checker import check_answer, parse_boxed_answer
from grpolab.models import Policy
from grpolab.sampler import Sampler
from grpolab.sampling import SamplingParams

Z95 = 1.959964  # the standard normal quantile of a two-sided 95 % interval


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self):
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


def wilson(successes: int, n: int, z: float = Z95) -> Interval:
    """The Wilson score interval of a rate (Wilson 1927, JASA 22, p. 209); n must be at least 1."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is not a rate: evaluate at least one question")
    rate, centre = successes / n, (successes + z * z / 2) / (n + z * z)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Interval(rate, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: Sequence[float], z: float = Z95) -> Interval:
    """Mean with its normal interval over the values, which are independent (one a question, never one a rollout)."""
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval needs at least two questions, got {n}")
    mean = sum(values) / n
    half = z * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Evaluation:
    """Completions of one policy: `texts[q]` are the completions of question q (one when greedy)."""

    problems: tuple[Problem, ...]
    texts: tuple[tuple[str, ...], ...]
    greedy: bool

    def rates(self, check) -> list[float]:
        """For each question, the share of its completions for which check(text, problem) holds."""
        return [sum(check(t, p) for t in texts) / len(texts) for p, texts in zip(self.problems, self.texts)]

    @property
    def format_rates(self) -> list[float]:
        return self.rates(lambda text, _: parse_boxed_answer(text) is not None)

    @property
    def exact_rates(self) -> list[float]:
        return self.rates(lambda text, problem: check_answer(text, problem.answer))

    @property
    def format(self) -> Interval:
        return self._interval(self.format_rates)

    @property
    def exact(self) -> Interval:
        return self._interval(self.exact_rates)

    def _interval(self, rates: list[float]) -> Interval:
        return wilson(round(sum(rates)), len(rates)) if self.greedy else mean_interval(rates)


async def evaluate(
    policy: Policy, problems: Sequence[Problem], *, samples: int = 0, temperature: float = 1.0,
    max_new_tokens: int = 32, seed: int = 0, sampler: Sampler | None = None,
) -> Evaluation:
    """Ask every question: once greedily (`samples=0`), or `samples` times at `temperature`."""
    if not problems:
        raise ValueError("there are no questions to evaluate")
    prompts = [prompt_ids(policy.tokenizer, p.question) for p in problems]
    params = SamplingParams(temperature=temperature, greedy=samples == 0, max_new_tokens=max_new_tokens, seed=seed)
    own = sampler or Sampler(policy)
    try:
        groups = await own.sample(prompts, group_size=samples or 1, params=params)
    finally:
        if sampler is None:
            await own.close()
    texts = tuple(tuple(policy.decode(r.tokens) for r in group) for group in groups)
    return Evaluation(tuple(problems), texts, greedy=samples == 0)


def improvement(before: Evaluation, after: Evaluation) -> Interval:
    """Exact match after minus before on the same questions, with the paired 95 % interval over questions."""
    if before.problems != after.problems:
        raise ValueError("a paired comparison needs the same questions in the same order on both sides")
    return mean_interval([b - a for a, b in zip(before.exact_rates, after.exact_rates)])


def summary(**evaluations: Evaluation):
    """A DataFrame with a row an evaluation: questions, completions each, format and exact match with their intervals."""
    import pandas as pd

    rows = {
        name.replace("_", " "): {
            "questions": len(e.problems),
            "decoding": "greedy" if e.greedy else f"{len(e.texts[0])} samples",
            "format": str(e.format),
            "exact match": str(e.exact),
        }
        for name, e in evaluations.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def side_by_side(before: Evaluation, after: Evaluation, n: int = 6):
    """A DataFrame of the first `n` questions: what each policy answered (✓ where right)."""
    import pandas as pd

    def shown(text, problem):
        return f"{'✓' if check_answer(text, problem.answer) else '✗'} {text.strip()[:80]}"

    rows = zip(before.problems[:n], before.texts, after.texts)
    table = [{"question": p.question, "before": shown(a[0], p), "after": shown(b[0], p)} for p, a, b in rows]
    return pd.DataFrame(table).set_index("question")
