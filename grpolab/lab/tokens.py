"""Completions token by token: shaded by one number, with all numbers on hover, the checker's verdict in a column apart.

    groups = score(policy, questions, await sampler.sample(...), finished_and_correct)
    group_view(policy, groups[0], question="What is 28 + 47?", answer=75, advantages=a[0])       # as a cell's last line

Everything is static HTML, so it shows on a page without a kernel. A token takes some 200 bytes: four rollouts a question keep
a notebook small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from IPython.display import HTML

from grpolab.checker import parse_boxed_answer
from grpolab.rollouts import CUT, Rollout

# Half-transparent, so that the theme's own background and text stay: they are seen on white and on black.
UP, DOWN = "86,180,233", "230,110,30"
ENVIRONMENT = "outline:1px dotted rgba(127,127,127,.9);font-style:italic;opacity:.75;"
BREAK = "<wbr>"  # between two tokens a long line may end

QUANTITIES = {  # what may shade a token: (what it is, what the colours mean); a log-probability is never above 0
    "advantage": ("advantage of the rollout", "blue above 0, orange below"),
    "logp": ("log-probability when it was sampled (nats)", "orange the less likely"),
    "delta": ("Δ log-probability, now − when it was sampled (nats)", "blue more likely now, orange less"),
}


def group_view(
    policy, group: Sequence[Rollout], *, by: str = "advantage", question: str = "", answer: int | None = None,
    verdicts: Sequence[str] | None = None, advantages=None, logps=None, scale: float | None = None,
) -> HTML:
    """The completions of a group as a table: reward, verdict, tokens shaded `by` advantage, logp or delta (see QUANTITIES).

    `answer` lets the checker judge each text; `verdicts` (one text a rollout) stand there instead. `advantages`: G numbers;
    `logps`, under the policy as it is now: G rows with a number a token (longer rows are cut). `scale` is the distance from 0
    that gets the full colour (default: the largest one here); give several views the same to compare them. Tokens of the
    environment (mask 0) are outlined and never shaded. Raises ValueError for a quantity that is not there.
    """
    numbers = [_numbers(r, None if advantages is None else advantages[i], None if logps is None else logps[i])
               for i, r in enumerate(group)]
    if any(by not in of for of in numbers):
        raise ValueError(f"by={by!r} is not there: by is 'logp', 'advantage', which needs advantages (a number a rollout), or "
                         "'delta', which needs logps (a number a token)")
    verdicts = [_verdict(policy, r, answer) for r in group] if verdicts is None else verdicts
    rewards = ["–" if r.reward is None else f"{r.reward:.3g}" for r in group]
    shaded = [abs(x) for r, of in zip(group, numbers) for x, m in zip(of[by], r.mask) if m and math.isfinite(x)]
    scale = scale or max(shaded, default=0.0) or 1.0
    table = [[f"<b>{name}</b>" for name in ("reward", "verdict", "completion")]]
    table += [[reward, escape(verdict), _tokens(policy, r, of, by, scale)]
              for reward, verdict, r, of in zip(rewards, verdicts, group, numbers)]
    cell = "<td style='text-align:left;vertical-align:top;padding:2px 8px'>{}</td>".format
    body = "".join(f"<tr>{''.join(map(cell, cells))}</tr>" for cells in table)
    outlined = "; outlined: written by the environment" if any(not all(r.mask) for r in group) else ""
    meaning, colours = QUANTITIES[by]
    legend = f"shaded by {meaning}: {colours}, full colour at a distance of {scale:.2g}{outlined}; hover for the numbers"
    return HTML(
        f"<div style='text-align:left'><b>{escape(question)}</b><table style='margin:0'>{body}</table>"
        f"<small>{escape(legend)}</small></div>"
    )


def by_step(views: Mapping[object, HTML | Sequence[HTML]]) -> HTML:
    """Views by step (or any label), one below the other: `views` maps a step to a view or to a list of them."""
    lists = {str(step): [v] if isinstance(v, HTML) else v for step, v in views.items()}
    html = "".join(f"<h4>step {escape(step)}</h4>{'<br>'.join(v.data for v in of)}" for step, of in lists.items())
    return HTML(f"<div style='text-align:left'>{html}</div>")


def tokens_html(tokenizer, ids: Sequence[int], mask: Sequence[int]) -> str:
    """Tokens side by side, specials and spaces visible; those with mask 1 shaded, those with mask 0 outlined."""
    spans = []
    for i, chosen in zip(ids, mask):
        style = f"background:rgba({UP},.45);" if chosen else ENVIRONMENT
        spans.append(f"<span style='{style}margin:1px'>{escape(visible(tokenizer.decode([i])))}</span>")
    return f"<div style='font-family:monospace;line-height:1.7;text-align:left'>{BREAK.join(spans)}</div>"


def _numbers(rollout: Rollout, advantage, logps) -> dict[str, list[float]]:
    """What is known of each token of a rollout, by the names in QUANTITIES."""
    numbers = {} if advantage is None else {"advantage": [float(advantage)] * len(rollout.tokens)}
    numbers["logp"] = list(rollout.logps)
    if logps is not None:
        numbers["delta"] = [float(now) - then for now, then in zip(logps, rollout.logps)]
        if len(numbers["delta"]) != len(rollout.tokens):
            raise ValueError(f"a rollout of {len(rollout.tokens)} tokens needs as many logps, got {len(logps)}")
    return numbers


def _tokens(policy, rollout: Rollout, numbers: dict, by: str, scale: float) -> str:
    spans = []
    for t, (token, chosen) in enumerate(zip(rollout.tokens, rollout.mask)):
        hover, style = "the environment", ENVIRONMENT
        if chosen:
            hover = " · ".join(f"{name} {values[t]:+.2g}" for name, values in numbers.items())
            style = _shade(numbers[by][t], scale)
        text = visible(policy.tokenizer.decode([token]))
        spans.append(f"<span title='{escape(hover)}' style='{style}'>{escape(text)}</span>")
    return f"<span style='font-family:monospace;line-height:1.5;letter-spacing:1px'>{BREAK.join(spans)}</span>"


def _shade(distance: float, scale: float) -> str:
    """The colour of a token: none below a hundredth of `scale`, up to 0.7 opaque at `scale` or beyond."""
    if math.isnan(distance) or abs(distance) < 0.01 * scale:
        return ""
    return f"background:rgba({UP if distance > 0 else DOWN},{0.2 + 0.5 * min(1.0, abs(distance) / scale):.2f});"


def _verdict(policy, rollout: Rollout, answer: int | None) -> str:
    """What the checker says, and where the policy did not end itself."""
    cut = f"cut ({rollout.finish_reason})" if rollout.finish_reason in CUT else ""
    if answer is None:
        return cut
    number = parse_boxed_answer(policy.decode(rollout.tokens))
    verdict = "✗ no \\boxed{}" if number is None else "✓ right" if number == answer else f"✗ {number}, not {answer}"
    return f"{verdict}, {cut}" if cut else verdict


def visible(text: str) -> str:
    """Text with its spaces and line ends made visible."""
    return text.replace("\n", "↵").replace(" ", "␣")
