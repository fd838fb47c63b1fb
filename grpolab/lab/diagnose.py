"""What ails a run, in plain sentences: the illness, the numbers that show it, and the remedy to try first.

The bounds lie between the healthy and the ill among the runs that benchmarks/illnesses.py records (tests/recorded_runs.json)
and those that tests/test_diagnose.py makes ill on purpose: every healthy one stays below, every ill one passes. What stands
beside a bound is where the two kinds lie. They are runs of the embedded model: on another one, a finding is a hint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from grpolab.lab.metrics import readable

if TYPE_CHECKING:  # torch stays out of a dashboard
    from grpolab.runs.run import Run

LASTING, WINDOW = 3, 5  # an illness of several rows shows in so many of so many consecutive ones, where there are so many


@dataclass(frozen=True)
class Finding:
    """An illness, since which step it shows, its evidence and the remedy to try."""

    illness: str
    step: int
    evidence: str
    remedy: str

    def __str__(self):
        return f"{self.illness} (from step {self.step}): {self.evidence}. Try: {self.remedy}."


class Findings(tuple):
    """A tuple of Finding that is shown as a text, a finding a line (in a notebook one that wraps between words)."""

    def __repr__(self):
        return "\n".join(map(str, self)) or "nothing found: none of the known illnesses shows"

    def _repr_html_(self):
        return "".join(f"<div style='text-align:left'>{escape(line)}</div>" for line in repr(self).splitlines())


@dataclass(frozen=True)
class Rule:
    """An illness that a single row shows: `shows(row)` is its evidence, or None. Rows without the number that it `needs`, as a
    step without a gradient has no entropy, say nothing of it."""

    illness: str
    needs: str
    shows: Callable[[Mapping], str | None]
    remedy: str


# What stands beside a bound is where the healthy and the ill of the recorded runs lie.


def _equal_groups(row) -> str | None:
    equal, right = row["uninformative"], row.get("all_right", 0.0)
    if equal >= 0.8 and right < equal / 2:  # all right is the end of the lesson, not an illness
        return f"in {equal:.0%} of the groups all rewards are equal, and {right:.0%} are all right: no difference, no gradient"


def _no_end(row) -> str | None:
    if row["truncated"] >= 0.3:  # healthy: at most 0.03; ill: up to 1
        return f"{row['truncated']:.0%} of the completions were cut before they ended"


def _no_entropy(row) -> str | None:
    if row["entropy"] < 0.01:  # healthy: at least 0.016, on four questions learnt by heart; ill: 0.002
        return f"the entropy is {readable(row['entropy'], 2)} nats a token: the rollouts of a group are all but the same"


def _drift(row) -> str | None:
    mean, largest = row["logp_diff"], row.get("logp_diff_max", 0.0)
    older = row.get("staleness", 0.0) > 0  # rollouts of older weights differ by the updates since: no illness
    if not older and (mean > 0.02 or largest > 2.0):  # healthy: at most 0.0016 and 1.5, in bfloat16; ill: at least 0.037, 4.7
        return (f"sampler and trainer differ by {readable(mean, 2)} nats a token on average, {readable(largest, 2)} at most "
                "(in fp32: 10⁻⁶ and 10⁻⁴)")


def _clipped(row) -> str | None:
    share, ratio, shown = row.get("clip_low", 0.0) + row.get("clip_high", 0.0), row["ratio_max"], []
    if ratio >= 10:  # healthy: at most 6.3; ill: up to 132
        shown.append(f"within one step a token's probability changed by a factor of {ratio:.0f}")
    if share >= 0.1:  # healthy: at most 0.03; ill: up to 0.17
        shown.append(f"{share:.0%} of the tokens are clipped, and what the step asks of them is thrown away")
    return "; ".join(shown) or None


def _kl(row) -> str | None:
    if row["kl"] >= 0.3:  # healthy: at most 0.07; ill: 3 and more
        return f"the KL to the reference is {readable(row['kl'], 2)} nats a token"


RULES = (
    Rule("groups without a difference", "uninformative", _equal_groups,
         "easier questions first (a curriculum), a larger group_size, refills, or a reward with steps in between"),
    Rule("the end is lost", "truncated", _no_end,
         "a reward that asks for the end token (finished_and_correct), SFT on ended examples, or a larger max_new_tokens"),
    Rule("the entropy is gone", "entropy", _no_entropy,
         "a smaller lr, a KL penalty (kl_coef=0.01), a higher upper clip (clip_eps=(0.2, 0.28)), or temperature 1"),
    Rule("sampler and trainer disagree", "logp_diff", _drift,
         "the same dtype and attention on both sides, no modules that one of them does not see, or sampler_cap=2"),
    Rule("steps that are too large", "ratio_max", _clipped,
         "a smaller lr, fewer inner_epochs or minibatches, clip_eps=(0.2, 0.2)"),
    Rule("far from the reference", "kl", _kl, "a larger kl_coef, a smaller lr, or fewer steps"),
)


def diagnose(what: Run | Mapping | Sequence[Mapping], *, held_out: Sequence[tuple[int, object]] = (),
             watched: str | None = None) -> Findings:
    """What ails a row, a list of rows, a DataFrame of them, or a Run; empty where nothing known does.

    A row shows what one step can; several also show what grows over time, and an illness must show in LASTING of WINDOW steps.
    `held_out` are (step, rate or Interval) of evaluations; `watched` names a column that is a judge beside the reward, such
    as a rule that a learned reward only imitates."""
    rows = [{name: float(value) for name, value in row.items() if isinstance(value, int | float) and value == value}
            | {"step": row.get("step", i)} for i, row in enumerate(_rows_of(what))]
    points = [(step, float(getattr(value, "value", value))) for step, value in held_out]
    found = [*(_lasting(rule, rows) for rule in RULES), _longer(rows), _fallen(rows),
             _hacked(rows, points, "the held-out rate"),
             _hacked(rows, _means(rows, watched, 10) if watched else [], watched)]
    return Findings(sorted(filter(None, found), key=lambda f: f.step))


def _rows_of(what) -> Sequence[Mapping]:
    if isinstance(what, Mapping):
        return [what]
    if hasattr(what, "to_dict"):
        return what.to_dict("records")
    if not hasattr(what, "folder"):
        return what
    from grpolab.lab.restore import rows_of  # here, since it brings torch along

    if not (rows := rows_of(what)):
        raise ValueError(f"{what.shown(what.folder)} holds no metrics: train into it first")
    return rows


def _lasting(rule: Rule, rows: Sequence[dict]) -> Finding | None:
    """The rule's finding where it shows in LASTING of WINDOW rows: since when, and the evidence of the last time."""
    evidences = [(row["step"], rule.shows(row)) for row in rows if rule.needs in row]
    ill = [(place, step, evidence) for place, (step, evidence) in enumerate(evidences) if evidence]
    need = min(LASTING, len(evidences)) or LASTING
    lasting = [k for k in range(need - 1, len(ill)) if ill[k][0] - ill[k - need + 1][0] < WINDOW]
    if not lasting:
        return None
    _, step, evidence = ill[lasting[-1]]
    return Finding(rule.illness, ill[lasting[0] - need + 1][1], f"{evidence} (step {step})", rule.remedy)


def _means(rows: Sequence[dict], name: str, window: int = 5) -> list[tuple[int, float]]:
    """(last step, mean) of each `window` consecutive values."""
    known = [(r["step"], r[name]) for r in rows if name in r]
    return [(known[i][0], sum(v for _, v in known[i - window + 1 : i + 1]) / window) for i in range(window - 1, len(known))]


def _longer(rows: Sequence[dict]) -> Finding | None:
    """Completions grow and more and more of them are cut; those that grow with what they earn, and end, are healthy."""
    length, cut = _means(rows, "completion_length"), dict(_means(rows, "truncated"))
    if not length:
        return None
    first, before = (next(iter(_means(rows, name, 2)), (0, 0.0))[1] for name in ("completion_length", "truncated"))
    grown = next((s for s, mean in length if mean >= 1.2 * first and cut.get(s, 0.0) >= before + 0.15), None)
    if grown is None:
        return None
    now = dict(length)[grown]
    return Finding("length runs away", grown, f"completions have {now:.0f} tokens (at first {first:.0f}), {cut[grown]:.0%} of "
                   f"them cut (at first {before:.0%})", "a reward that asks for the end, a price per token past a length, "
                   "aggregation='token' with one denominator, a smaller lr")


def _fallen(rows: Sequence[dict]) -> Finding | None:
    """The reward loses more than half of its best."""
    best_step, best = 0, float("-inf")
    for step, mean in _means(rows, "reward"):
        best_step, best = (step, mean) if mean > best else (best_step, best)
        if best > 0.05 and mean < best / 2:
            evidence = f"the mean of 5 steps was {best:.2f} at step {best_step} and is {mean:.2f} at step {step}"
            return Finding("the reward has fallen", step, evidence, "the checkpoint before (`bisect` names the step), and from "
                           "there a smaller lr, clipping, a KL penalty")
    return None


def _hacked(rows: Sequence[dict], points: Sequence[tuple[int, float]], judge: str | None) -> Finding | None:
    """The trained reward rises while another judge loses two fifths of its best and at least 0.05."""
    rewards = _means(rows, "reward")
    if not rewards:
        return None
    reward_at = lambda step: min(rewards, key=lambda m: abs(m[0] - step))[1]  # noqa: E731
    at, best = 0, float("-inf")
    for step, value in points:
        at, best = (step, value) if value > best else (at, best)
        if value <= best - max(0.05, 0.4 * best) and reward_at(step) > reward_at(at):
            evidence = (f"{judge} fell from {best:.2f} (step {at}) to {value:.2f} (step {step}) while the reward went from "
                        f"{reward_at(at):.2f} to {reward_at(step):.2f}: the reward is being gamed")
            return Finding("reward up while the judge falls", step, evidence,
                           "an earlier checkpoint, a KL penalty, or the judge's own rule as a part of the reward")
    return None
