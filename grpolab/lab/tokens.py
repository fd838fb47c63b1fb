"""Completions token by token: shaded by one number, with all numbers on hover, the checker's verdict in a column apart.

    groups = score(policy, questions, await sampler.sample(...), finished_and_correct)
    group_view(policy, groups[0], question="What is 28 + 47?", answer=75, advantages=a[0])       # as a cell's last line

What training does to the same questions: keep the groups of a few steps in a dictionary, and show them by step.

    kept = {0: groups}
    async for row in grpo(...):
        if row["step"] + 1 in (75, 150):
            kept[row["step"] + 1] = score(policy, questions, await sampler.sample(...), finished_and_correct)
    by_step({step: [group_view(policy, g, answer=q.answer) for q, g in zip(questions, gs)] for step, gs in kept.items()})

Everything is static HTML, so it shows on a page without a kernel. A token takes some 200 bytes: four rollouts a question keep
a notebook small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from grpolab.checker import parse_boxed_answer
from grpolab.rollouts import CUT, Rollout

# Half-transparent, so that the theme's own background and text stay: they are seen on white and on black.
UP, DOWN = "86,180,233", "230,110,30"
ENVIRONMENT = "outline:1px dotted rgba(127,127,127,.9);font-style:italic;opacity:.75;"

# Quantity -> (what it is, its neutral value, what the colours mean). Never below neutral: kl; never above: logp.
QUANTITIES = {
    "advantage": ("advantage of the rollout", 0.0, "blue above 0, orange below"),
    "logp": ("log-probability when it was sampled (nats)", 0.0, "orange the less likely"),
    "delta": ("Δ log-probability, now − when it was sampled (nats)", 0.0, "blue more likely now, orange less"),
    "ratio": ("ratio of the probabilities, now / when it was sampled", 1.0, "blue above 1, orange below"),
    "kl": ("KL to the reference by k3 = r − 1 − ln r, r = reference / policy (nats)", 0.0, "orange the further away"),
}


@dataclass(frozen=True)
class View:
    """Something to look at: HTML where there is a page, text elsewhere."""

    html: str
    text: str

    def _repr_html_(self):
        return self.html

    def __repr__(self):
        return self.text


def token_numbers(rollout: Rollout, *, advantage=None, logps=None, ref_logps=None) -> dict[str, list[float]]:
    """What is known of each token of a rollout, by the names in QUANTITIES.

    `advantage` is the rollout's; `logps` and `ref_logps`, one a token (longer rows are cut), are the log-probabilities of
    its tokens under the policy as it is now, and under the reference. k3: Schulman 2020, joschu.net/blog/kl-approx.html.
    """
    n = len(rollout.tokens)
    numbers = {} if advantage is None else {"advantage": [float(advantage)] * n}
    numbers["logp"] = list(rollout.logps)
    now = numbers["logp"] if logps is None else [float(x) for x in logps[:n]]
    if logps is not None:
        numbers["delta"] = [a - b for a, b in zip(now, rollout.logps)]
        numbers["ratio"] = [_exp(d) for d in numbers["delta"]]
    if ref_logps is not None:
        gaps = [float(r) - p for r, p in zip(ref_logps[:n], now)]
        numbers["kl"] = [_exp(g) - 1 - g for g in gaps]
    short = [name for name, values in numbers.items() if len(values) != n]
    if short:
        raise ValueError(f"a rollout of {n} tokens needs {n} values of {short[0]}, got {len(numbers[short[0]])}")
    return numbers


def group_view(
    policy, group: Sequence[Rollout], *, by: str = "advantage", question: str = "", answer: int | None = None,
    verdicts: Sequence[str] | None = None, advantages=None, logps=None, ref_logps=None, scale: float | None = None,
) -> View:
    """The completions of a group as a table: reward, verdict, tokens shaded `by` one of QUANTITIES.

    `answer` lets the checker judge each text; `verdicts` (one text a rollout) stand there instead. `advantages`: G numbers;
    `logps`, `ref_logps`: G rows with a number a token. `scale` is the distance from the neutral value that gets the full
    colour (default: the largest one here); give several views the same to compare them. Tokens of the environment (mask 0)
    are outlined and never shaded. Raises ValueError for a quantity that is not there.
    """
    if by not in QUANTITIES:
        raise ValueError(f"by must be one of {', '.join(QUANTITIES)}, got {by!r}")
    needs = {"advantage": "advantages", "delta": "logps", "ratio": "logps", "kl": "ref_logps"}.get(by)
    each = {"advantages": advantages, "logps": logps, "ref_logps": ref_logps}
    if needs and each[needs] is None:
        raise ValueError(f"by={by!r} needs {needs}: one {'number' if by == 'advantage' else 'row'} a rollout")
    a, now, ref = ([None] * len(group) if of is None else of for of in each.values())
    rows = [token_numbers(r, advantage=a[i], logps=now[i], ref_logps=ref[i]) for i, r in enumerate(group)]
    verdicts = [_verdict(policy, r, answer) for r in group] if verdicts is None else verdicts
    rewards = ["–" if r.reward is None else f"{r.reward:.3g}" for r in group]
    meaning, neutral, colours = QUANTITIES[by]
    far = [abs(v - neutral) for r, row in zip(group, rows) for v, m in zip(row[by], r.mask) if m and math.isfinite(v)]
    scale = scale or max(far, default=0.0) or 1.0
    table = [[f"<b>{name}</b>" for name in ("reward", "verdict", "completion")]]
    table += [[reward, escape(verdict), _tokens(policy, r, row, by, scale)]
              for reward, verdict, r, row in zip(rewards, verdicts, group, rows)]
    cell = "<td style='text-align:left;vertical-align:top;padding:2px 8px'>{}</td>".format
    body = "".join(f"<tr>{''.join(map(cell, cells))}</tr>" for cells in table)
    outlined = "; outlined: written by the environment" if any(not all(r.mask) for r in group) else ""
    legend = f"shaded by {meaning}: {colours}, full colour at a distance of {scale:.2g}{outlined}; hover for the numbers"
    html = (
        f"<div style='text-align:left'><b>{escape(question)}</b><table style='margin:0'>{body}</table>"
        f"<small>{escape(legend)}</small></div>"
    )
    lines = [f"{reward:>6}  {verdict:24}  {''.join(visible(policy.tokenizer.decode([t])) for t in r.tokens)}"
             for reward, verdict, r in zip(rewards, verdicts, group)]
    return View(html, "\n".join([question, *lines] if question else lines))


def by_step(views: Mapping[object, View | Sequence[View]]) -> View:
    """Views by step (or any label), one below the other: `views` maps a step to a View or to a list of them."""
    lists = {str(step): [v] if isinstance(v, View) else v for step, v in views.items()}
    html = "".join(f"<h4>step {escape(step)}</h4>{'<br>'.join(v.html for v in of)}" for step, of in lists.items())
    text = "\n\n".join(f"step {step}\n" + "\n\n".join(v.text for v in of) for step, of in lists.items())
    return View(f"<div style='text-align:left'>{html}</div>", text)


BREAK = "<wbr>"  # between two tokens a long line may end


def tokens_html(tokenizer, ids: Sequence[int], mask: Sequence[int]) -> str:
    """Tokens side by side, specials and spaces visible; those with mask 1 shaded, those with mask 0 outlined."""
    spans = []
    for i, chosen in zip(ids, mask):
        style = f"background:rgba({UP},.45);" if chosen else ENVIRONMENT
        spans.append(f"<span style='{style}margin:1px'>{escape(visible(tokenizer.decode([i])))}</span>")
    return f"<div style='font-family:monospace;line-height:1.7;text-align:left'>{BREAK.join(spans)}</div>"


def _tokens(policy, rollout: Rollout, numbers: dict, by: str, scale: float) -> str:
    neutral, spans = QUANTITIES[by][1], []
    for t, (token, chosen) in enumerate(zip(rollout.tokens, rollout.mask)):
        text = visible(policy.tokenizer.decode([token]))
        if chosen:
            hover = " · ".join(f"{name} {values[t]:+.2g}" for name, values in numbers.items())
            style = _shade((numbers[by][t] - neutral) * (-1 if by == "kl" else 1), scale)
        else:
            hover, style = "the environment", ENVIRONMENT
        spans.append(f"<span title='{escape(hover)}' style='{style}'>{escape(text)}</span>")
    return f"<span style='font-family:monospace;line-height:1.5;letter-spacing:1px'>{BREAK.join(spans)}</span>"


def _shade(distance: float, scale: float) -> str:
    """The colour of a token: none at the neutral value, up to 0.7 opaque at `scale` or beyond."""
    if not distance or math.isnan(distance):
        return ""
    return f"background:rgba({UP if distance > 0 else DOWN},{0.2 + 0.5 * min(1.0, abs(distance) / scale):.2f});"


def _verdict(policy, rollout: Rollout, answer: int | None) -> str:
    """What the checker says, and where the policy did not end itself."""
    cut = f"cut ({rollout.finish_reason})" if rollout.finish_reason in CUT else ""
    if answer is None:
        return cut
    found = parse_boxed_answer(policy.decode(rollout.tokens))
    verdict = "✗ no \\boxed{}" if found is None else "✓ right" if found == answer else f"✗ {found}, not {answer}"
    return f"{verdict}, {cut}" if cut else verdict


def visible(text: str) -> str:
    """Text with its spaces and line ends made visible."""
    return text.replace("\n", "↵").replace(" ", "␣")


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
