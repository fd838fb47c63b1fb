"""What is wrong with a run, in plain sentences: the illness, the numbers that show it, and the remedy to try first.

A number shows an illness where it lies outside its range in `METRICS`. Of the runs that benchmarks/illnesses.py records
(tests/recorded_runs.json) every healthy one stays inside and every ill one does not. They are runs of the embedded model: on
another one, a finding is a hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from grpolab.lab.metrics import METRICS, readable

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


def diagnose(what: Run | Sequence[Mapping], *, watched: str | None = None) -> Findings:
    """What is wrong with a Run, or a list or DataFrame of rows; empty where nothing known is.

    A row shows what one step can; several also show what grows over time, and an illness must show in LASTING of WINDOW rows.
    `watched` names a column that is a judge beside the reward, such as a rule that a learned reward only imitates."""
    rows = [{name: float(value) for name, value in row.items() if isinstance(value, int | float) and value == value}
            | {"step": row.get("step", i)} for i, row in enumerate(_rows_of(what))]
    findings = [*(_lasting(rows, *rule) for rule in RULES), _longer(rows), _fallen(rows), _gamed(rows, watched)]
    return Findings(sorted(filter(None, findings), key=lambda f: f.step))


def _rows_of(what) -> Sequence[Mapping]:
    if hasattr(what, "to_dict"):
        return what.to_dict("records")
    if not hasattr(what, "folder"):
        return what
    if not (rows := what.table().to_dict("records")):
        raise ValueError(f"{what.shown(what.folder)} holds no metrics: train into it first")
    return rows


# --- what a single row shows ------------------------------------------------------------------------------------------

RULES = (  # illness, the columns of which one must stray from its range, remedy
    ("groups without a difference", ("uninformative",),
     "easier questions first (a curriculum), a larger group_size, refills, or a reward with steps in between"),
    ("the end is lost", ("truncated",),
     "a reward that asks for the end token (finished_and_correct), SFT on ended examples, or a larger max_new_tokens"),
    ("the entropy is gone", ("entropy",),
     "a smaller lr, a KL penalty (kl_coef=0.01), a higher upper clip (clip_eps=(0.2, 0.28)), or temperature 1"),
    ("the same words again and again", ("repetition",),
     "a reward that repetition does not raise, an earlier checkpoint, a KL penalty, or a smaller lr"),
    ("sampler and trainer disagree", ("diff_abs_mean", "diff_mean", "diff_max"),
     "the same dtype and attention on both sides, no modules that one of them does not see, or sampler_cap=2"),
    ("steps that are too large", ("ratio_max", "ratio", "clip_low", "clip_high", "sampler_kl"),
     "a smaller lr, fewer inner_epochs or minibatches, clip_eps=(0.2, 0.2), or a KL penalty (kl_to='sampler', kl_coef=0.1)"),
    ("tokens are driven out", ("low_logp", "policy_loss"),
     "a smaller lr, objective='ppo' or a dual_clip, and advantages that are not all negative for long completions"),
    ("far from the reference", ("kl",), "a larger kl_coef, a smaller lr, or fewer steps"),
)


def _shown(row: Mapping, columns: Sequence[str]) -> str:
    """Those of a row's numbers that stray, in words; "" where none does or where that is healthy."""
    solved = "uninformative" in columns and row.get("all_right", 0.0) >= row.get("uninformative", 0.0) / 2
    older = "diff_abs_mean" in columns and row.get("staleness", 0.0) > 0  # weights of earlier updates differ by those
    return "" if solved or older else "; ".join(
        f"{c} is {readable(row[c], 3)}, usually {METRICS[c].range} ({METRICS[c].meaning})"
        for c in columns if c in row and METRICS[c].strays(row[c]))


def _lasting(rows: Sequence[dict], illness: str, columns: Sequence[str], remedy: str) -> Finding | None:
    """The finding of a rule where it shows in LASTING of WINDOW rows: since when, and the evidence of the last time. Rows
    without its first column, as a step without a gradient has no entropy, say nothing of it."""
    evidences = [(row["step"], _shown(row, columns)) for row in rows if columns[0] in row]
    ill = [(place, step, evidence) for place, (step, evidence) in enumerate(evidences) if evidence]
    need = min(LASTING, len(evidences)) or LASTING
    lasting = [k for k in range(need - 1, len(ill)) if ill[k][0] - ill[k - need + 1][0] < WINDOW]
    if not lasting:
        return None
    _, step, evidence = ill[lasting[-1]]
    return Finding(illness, ill[lasting[0] - need + 1][1], f"{evidence} (step {step})", remedy)


# --- what several rows show -------------------------------------------------------------------------------------------


def _means(rows: Sequence[dict], name: str, window: int = 5) -> list[tuple[int, float]]:
    """(last step, mean) of each `window` consecutive values."""
    known = [(r["step"], r[name]) for r in rows if name in r]
    return [(known[i][0], sum(v for _, v in known[i - window + 1 : i + 1]) / window) for i in range(window - 1, len(known))]


def _longer(rows: Sequence[dict]) -> Finding | None:
    """Completions grow and more and more of them are cut; those that grow with what they earn, and end, are healthy."""
    cut = dict(_means(rows, "truncated"))
    first, before = (next(iter(_means(rows, name, 2)), (0, 0.0))[1] for name in ("completion_length", "truncated"))
    for step, mean in _means(rows, "completion_length"):
        if mean >= 1.2 * first and cut.get(step, 0.0) >= before + 0.15:
            evidence = (f"completions have {mean:.0f} tokens (at first {first:.0f}), {cut[step]:.0%} of them cut (at first "
                        f"{before:.0%})")
            return Finding("length runs away", step, evidence, "a reward that asks for the end, a price per token past a "
                           "length, aggregation='token' with one denominator, a smaller lr")
    return None


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


def _gamed(rows: Sequence[dict], judge: str | None) -> Finding | None:
    """The trained reward rises while another judge loses two fifths of its best and at least 0.05."""
    rewards, best_step, best = _means(rows, "reward"), 0, float("-inf")
    for step, value in _means(rows, judge, 10) if rewards and judge else ():
        best_step, best = (step, value) if value > best else (best_step, best)
        then, now = (min(rewards, key=lambda m: abs(m[0] - at))[1] for at in (best_step, step))
        if value <= best - max(0.05, 0.4 * best) and now > then:
            evidence = (f"{judge} fell from {best:.2f} (step {best_step}) to {value:.2f} (step {step}) while the reward went "
                        f"from {then:.2f} to {now:.2f}: the reward is being gamed")
            return Finding("reward up while the judge falls", step, evidence,
                           "an earlier checkpoint, a KL penalty, or the judge's own rule as a part of the reward")
    return None
