"""Evaluation: rates with intervals, pass@k, the comparison of two policies on the same questions, prompts with checks."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from IPython import get_ipython
from tqdm import tqdm

from grpolab.arithmetic import Problem
from grpolab.chat import Message, prompt_ids
from grpolab.chat_rules import Check, checks
from grpolab.checker import check_answer, parse_boxed_answer
from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import data_path
from grpolab.models.load import Policy
from grpolab.tasks import read_rows

WAIT = 3.0  # seconds after which an evaluation shows its progress
Z95 = 1.959964  # the standard normal quantile of a two-sided 95 % interval


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self):
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"

    @property
    def points(self) -> str:
        """A difference of two rates, in percentage points."""
        return f"{100 * self.value:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"

    @property
    def verdict(self) -> str:
        """What a difference shows: "ahead" or "behind" where its interval lies on one side of 0, else "no difference seen"."""
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "no difference seen"


def wilson(successes: int, n: int) -> Interval:
    """The Wilson score interval of a rate (Wilson 1927, JASA 22, p. 209); n must be at least 1."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is not a rate: evaluate at least one question")
    rate, z = successes / n, Z95
    centre = (successes + z * z / 2) / (n + z * z)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Interval(rate, min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half)))  # whatever was rounded


def mean_interval(values: Sequence[float], z: float = Z95) -> Interval:
    """Mean with its normal interval over the values, which are independent (one a question, never one a rollout)."""
    return clustered_interval(values, range(len(values)), z)


def clustered_interval(values: Sequence[float], clusters: Sequence[Any], z: float = Z95) -> Interval:
    """Mean with its normal interval where values of one cluster depend on each other, such as tasks of one template: the
    cluster-robust standard error of Liang and Zeger (1986, Biometrika 73, p. 13) with the factor C / (C - 1)."""
    sums, mean = defaultdict(float), sum(values) / max(1, len(values))
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] += value - mean
    if len(sums) < 2:
        raise ValueError(f"an interval needs at least two questions, or clusters of them, got {len(sums)}")
    half = z * math.sqrt(len(sums) / (len(sums) - 1) * sum(s * s for s in sums.values())) / len(values)
    return Interval(mean, mean - half, mean + half)


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131,
           2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042)


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t with 1 to 30 degrees of freedom: for a 95 % interval of the mean of one value more."""
    if not 1 <= freedom <= len(STUDENT):
        raise ValueError(f"the quantiles of Student's t stand here for 1 to {len(STUDENT)} degrees of freedom, got {freedom}")
    return STUDENT[freedom - 1]


def crossed_interval(values: Sequence[Sequence[float]]) -> Interval:
    """Mean of a row for each level of one random factor and a column for each of another, such as the seeds of SFT and of GRPO,
    with one value each. Its variance is that of the rows, of the columns and of the rest, by the mean squares of the two-way
    analysis of variance, where a variance that comes out negative is 0; Student's t has the degrees of freedom of the factor
    with fewer levels."""
    table = np.asarray(values, dtype=float)
    a, b = table.shape
    rows, columns, mean = table.mean(1), table.mean(0), table.mean()
    rest = float(((table - rows[:, None] - columns + mean) ** 2).sum()) / ((a - 1) * (b - 1))
    of_rows, of_columns = b * rows.var(ddof=1), a * columns.var(ddof=1)
    half = student_t(min(a, b) - 1) * math.sqrt((max(of_rows, rest) + max(of_columns, rest) - rest) / (a * b))
    return Interval(float(mean), float(mean - half), float(mean + half))


def share_interval(shares: Sequence[float], clusters: Sequence[Any] | None = None) -> Interval:
    """Mean of shares between 0 and 1 with its normal interval, cut where a share cannot be; `clusters` as in
    clustered_interval, else each share is a question's. Where all are 0 or 1 it is Wilson's if each has a cluster of its own,
    or if all are alike, since the normal one has no width there; then a cluster counts once."""
    clusters = range(len(shares)) if clusters is None else clusters
    of = len(set(clusters))
    if set(shares) <= {0, 1} and (of == len(shares) or len(set(shares)) == 1):
        return wilson(round(sum(shares) / max(1, len(shares)) * of), of)
    mean = clustered_interval(shares, clusters)
    return Interval(mean.value, min(mean.value, max(0.0, mean.low)), max(mean.value, min(1.0, mean.high)))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate of P(one of k samples is right) from n samples of which `correct` are:
    1 - C(n - correct, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} needs at least {k} samples and a count among them, got {correct} right of {n}: sample more")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def calibrate(predicted: Sequence[float], happened: Sequence[bool], bins: int = 6) -> list[tuple[float, Interval]]:
    """Predicted probabilities beside what happened: the cases in order of their prediction, cut into `bins` equal parts; of
    each part the mean prediction, and the rate with its interval."""
    if len(predicted) != len(happened) or not 1 <= bins <= len(predicted):
        raise ValueError(f"{len(predicted)} predictions and {len(happened)} outcomes do not fill {bins} bins")
    cases = sorted(zip(predicted, happened), key=lambda c: c[0])
    parts = [cases[len(cases) * b // bins : len(cases) * (b + 1) // bins] for b in range(bins)]
    return [(sum(p for p, _ in part) / len(part), wilson(sum(h for _, h in part), len(part))) for part in parts]


# --- any prompts, each with a check -----------------------------------------------------------------------------------

Prompt = str | Sequence[Message] | tuple[int, ...]  # text or messages for the chat template, or token ids as they are


@dataclass(frozen=True)
class Checked:
    """What became of (prompt, check) cases: `passed[i][s]` says whether completion s of prompt i, `texts[i][s]`, passed."""

    prompts: tuple[Any, ...]
    texts: tuple[tuple[str, ...], ...]
    passed: tuple[tuple[bool, ...], ...]
    greedy: bool

    @property
    def rates(self) -> list[float]:
        """The share of each prompt's completions that passed."""
        return [sum(p) / len(p) for p in self.passed]

    @property
    def rate(self) -> Interval:
        """The mean rate over prompts."""
        return share_interval(self.rates)

    def pass_at(self, k: int) -> Interval:
        """The chance that one of k samples passes, its interval over prompts."""
        return share_interval([pass_at_k(len(p), sum(p), k) for p in self.passed])


async def evaluate_checks(
    policy: Policy, cases: Sequence[tuple[Prompt, Check]], *, samples: int = 0, temperature: float = 1.0,
    max_new_tokens: int = 32, seed: int = 0,
) -> Checked:
    """Ask each prompt, once greedily (`samples=0`) or `samples` times at `temperature`; apply its `check(text, rollout)`."""
    ids = [prompt if not isinstance(prompt, str) and all(isinstance(i, int) for i in prompt)
           else prompt_ids(policy.tokenizer, prompt) for prompt, _ in cases]
    params = SamplingParams(greedy=samples == 0, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    texts, rollouts = await _sample(policy, ids, samples or 1, params)
    passed = tuple(tuple(bool(check(t, r)) for t, r in zip(of, row)) for (_, check), of, row in zip(cases, texts, rollouts))
    return Checked(tuple(prompt for prompt, _ in cases), texts, passed, greedy=samples == 0)


async def _sample(policy: Policy, ids: list[Sequence[int]], group_size: int, params: SamplingParams):
    """The completions of each prompt: their texts, and the rollouts."""
    if not ids:
        raise ValueError("there are no questions to evaluate")
    watched = sys.stderr.isatty() or getattr(get_ipython(), "kernel", None) is not None
    rollouts: list[list] = [[None] * group_size for _ in ids]
    async with Sampler(policy) as sampler:
        with tqdm(total=len(ids) * group_size, desc="evaluating", unit=" completions", delay=WAIT, leave=False,
                  disable=not watched) as bar:
            async for question, sample, rollout in sampler.stream(ids, group_size=group_size, params=params):
                rollouts[question][sample] = rollout
                bar.update()
    return tuple(tuple(policy.decode(r.tokens) for r in of) for of in rollouts), rollouts


# --- questions of arithmetic ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation(Checked):
    """Completions of one policy to `problems`; `passed` says which of them have the right answer in a box."""

    exact, exact_rates = Checked.rate, Checked.rates

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.prompts

    @property
    def format(self) -> Interval:
        return share_interval([sum(parse_boxed_answer(t) is not None for t in of) / len(of) for of in self.texts])


async def evaluate(policy: Policy, problems: Sequence[Problem], **options) -> Evaluation:
    """Ask every question: once greedily, or with `samples=n` n times; `options` are those of `evaluate_checks`."""
    cases = [(p.question, lambda text, rollout, p=p: check_answer(text, p.answer)) for p in problems]
    checked = await evaluate_checks(policy, cases, **options)
    return Evaluation(tuple(problems), checked.texts, checked.passed, checked.greedy)


async def evaluate_plain(policy: Policy, problems: Sequence[Problem], *, max_new_tokens: int = 8, **options) -> Checked:
    """The same questions as plain text to be continued, `28 + 47 =`, without chat and box: what a base model knows in its
    own form. Right is a continuation whose first line is the number and nothing else."""
    cases = []
    for p in problems:
        ids = policy.tokenizer(f"{p.a} {p.op} {p.b} =", add_special_tokens=False)["input_ids"]
        cases.append((tuple(ids), lambda text, rollout, p=p: text.split("\n")[0].strip() == str(p.answer)))
    return await evaluate_checks(policy, cases, max_new_tokens=max_new_tokens, **options)


def improvement(before: Evaluation, after: Evaluation) -> Interval:
    """Exact match after minus before on the same questions, with the paired 95 % interval over questions."""
    if before.problems != after.problems:
        raise ValueError("a paired comparison needs the same questions in the same order on both sides")
    return mean_interval([b - a for a, b in zip(before.exact_rates, after.exact_rates)])


def summary(**evaluations: Evaluation) -> pd.DataFrame:
    """A row an evaluation: questions, completions each, format and exact match with their intervals."""
    rows = {name.replace("_", " "): {
        "questions": len(e.problems), "decoding": "greedy" if e.greedy else f"{len(e.texts[0])} samples",
        "format": str(e.format), "exact match": str(e.exact)} for name, e in evaluations.items()}
    return pd.DataFrame.from_dict(rows, orient="index")


def side_by_side(before: Evaluation, after: Evaluation, n: int = 6) -> pd.DataFrame:
    """The first `n` questions: for each policy the checker's ✓ or ✗, and in a column apart what it answered."""
    if before.problems != after.problems:
        raise ValueError("the two evaluations are of different questions: evaluate both policies on the same ones")
    table = {"question": [p.question for p in before.problems[:n]]}
    for name, e in (("before", before), ("after", after)):
        table |= {f"{name}: right": ["✗✓"[ok] for (ok, *_) in e.passed[:n]],
                  name: [text.strip()[:80] for (text, *_) in e.texts[:n]]}
    return pd.DataFrame(table).set_index("question")


# --- the fixed prompts ------------------------------------------------------------------------------------------------


SUITES = {"arithmetic": ("fixed_prompts.jsonl", 48), "english": ("english/held_out.jsonl", 64)}  # file, longest completion


def fixed_prompts(suite: str = "arithmetic") -> list[dict]:
    """The shipped prompts of a suite ("arithmetic" or "english"), rows as `chat_rules.checks` reads them."""
    if suite not in SUITES:
        raise ValueError(f"there is no suite of fixed prompts {suite!r}: take one of {', '.join(SUITES)}")
    return read_rows(data_path(*SUITES[suite][0].split("/")))


async def evaluate_fixed(
    policy: Policy, prompts: str | Sequence[dict] = "arithmetic", *, max_new_tokens: int | None = None
) -> dict[str, Checked]:
    """Answer the prompts of a suite, or rows like them, greedily. By the name of each check (stop token, no repetition, code,
    refusal, ...; `chat_rules.checks`): what became of the prompts that it applies to."""
    rows = fixed_prompts(prompts) if isinstance(prompts, str) else prompts
    if max_new_tokens is None:
        max_new_tokens = SUITES[prompts][1] if isinstance(prompts, str) else 64
    rules = [checks(row) for row in rows]
    ids = [prompt_ids(policy.tokenizer, row["prompt"]) for row in rows]
    texts, rollouts = await _sample(policy, ids, 1, SamplingParams(greedy=True, max_new_tokens=max_new_tokens))
    cases = defaultdict(list)
    for row, of, written, (rollout,) in zip(rows, rules, texts, rollouts):
        for name, check in of.items():
            cases[name].append((row["prompt"], written, (check(written[0], rollout),)))
    return {name: Checked(*map(tuple, zip(*of)), greedy=True) for name, of in cases.items()}


async def fixed_rates(policy: Policy, suite: str = "arithmetic") -> dict[str, float]:
    """The rates of the fixed prompts by the name of their check, e.g. for a Selection that watches a run."""
    by_check = await evaluate_fixed(policy, suite)
    return {"fixed_" + check.replace(" ", "_"): checked.rate.value for check, checked in by_check.items()}


def suite_table(**suites: dict[str, Checked]) -> pd.DataFrame:
    """A row a check and a column a policy, of what `evaluate_fixed` gave: `suite_table(before=..., after=...)`."""
    columns = {"prompts": {check: len(checked.prompts) for suite in suites.values() for check, checked in suite.items()}}
    if any(len(c.prompts) != columns["prompts"][check] for suite in suites.values() for check, c in suite.items()):
        raise ValueError("the evaluations are of different prompts: answer the same ones with each policy")
    columns |= {name: {check: str(checked.rate) for check, checked in suite.items()} for name, suite in suites.items()}
    return pd.DataFrame(columns)
