"""Every rollout of a run on one page: a self-contained HTML file that needs neither a kernel nor a network.

Rollouts by step, group and reward, with search; tokens coloured by log-probability, by its change since, by ratio, advantage or
KL; what an environment wrote set apart; the answers of two checkpoints side by side.
rollouts.html beside this file is the page.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import atomic_write
from grpolab.lab.restore import config_of, longest, restore, with_threads
from grpolab.lab.tokens import DOWN, QUANTITIES, UP
from grpolab.models.load import Policy
from grpolab.rollouts import Rollout
from grpolab.runs.rollout_log import recorded
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, trainer_logps
from grpolab.train.verify import verify_forward

BIGGEST = 4_900_000  # bytes of a page
LONGEST = 4000  # tokens of a rollout that it holds
FRAME = "sandbox='allow-scripts' style='width:100%;height:640px;border:1px solid #8886;box-sizing:border-box;display:block'"


@dataclass(frozen=True)
class Page:
    """A page that was written to `path`; a notebook shows it inside its cell."""

    path: Path
    html: str
    note: str

    def _repr_html_(self):
        inside = escape(self.html, quote=False).replace("'", "&#39;")  # double quotes, of which JSON is full, stay
        file = f"<small>the page {escape(str(Run.shown(self.path)))}, which shows here where the notebook is trusted</small>"
        return f"{file}<iframe srcdoc='{inside}' {FRAME}></iframe>"  # Jupyter takes the frame out where it is not

    def __repr__(self):
        return f"{Run.shown(self.path)}: {self.note}"


def browse(run: Run, path: str | Path | None = None, *, steps: Iterable[int] | None = None, now: Policy | int | None = None,
           reference: Policy | None = None, compare: tuple[Policy | int, Policy | int] | None = None, prompts: int = 12,
           biggest: int = BIGGEST) -> Page:
    """Write the recorded rollouts (of `steps`) as one HTML file, by default rollouts.html in the run's folder.

    `now`, a policy or a number of steps done, adds how probable each token has become since (change, ratio); `reference`
    adds the KL to it. `compare` two of these: their greedy answers to the first so many `prompts`, with the difference marked.
    Where not all fit into `biggest` bytes, whole groups evenly spaced over the steps are shown, and the page says so; of a
    very long rollout it holds the beginning."""
    steps, numbers = None if steps is None else set(steps), 1 + (now is not None) + (reference is not None)
    sizes = [(size_of(line, numbers), len(line["tokens"]), (line["step"], line["group"]))
             for line in run.recorder.lines(steps)]
    if not sizes:
        raise ValueError(f"{run.shown(run.folder)} has no recorded rollouts of these steps: grpo and "
                         "multi_turn_grpo leave them, unless keep='none'")
    picked = {place for *_, place in evenly(sizes, biggest / sum(size for size, *_ in sizes))}
    lines = [line for line in run.recorder.lines(steps) if (line["step"], line["group"]) in picked]
    groups, config = [recorded(line) for line in lines], config_of(run)
    extra = {name: iter(logps_under(_policy_of(run, policy), [r for g in groups for r in g.group], config, longest(groups)))
             for name, policy in (("now", now), ("ref", reference)) if policy is not None}
    pages = [(_beginning(line["prompt"]), rows_of(line, extra)) for line in lines]
    template = files("grpolab.lab").joinpath("rollouts.html").read_text("utf-8").replace("@UP@", UP).replace("@DOWN@", DOWN)
    data = {
        "title": str(run.shown(run.folder)), "up": UP, "down": DOWN, "quantities": QUANTITIES,
        "diff": differing(run, compare, lines[: 4 * prompts], prompts, config) if compare else [],
        "diff_names": [side.name if isinstance(side, Policy) else f"after {side} steps" for side in compare or ()],
    }
    vocabulary, total = run.recorder.vocabulary(), sum(n for _, n, *_ in sizes)
    while True:
        rows = [row | {"p": place} for place, (_, of) in enumerate(pages) for row in of]
        note = f"{len(rows)} rollouts" + ("" if len(rows) == total else f" of {total}, evenly spaced over the steps: the file "
                                          f"stays below {biggest / 1e6:.2g} MB")
        spelt = {i: vocabulary[i] for i in sorted({i for row in rows for i in row["t"]} & vocabulary.keys())}
        html = template.replace("@DATA@", in_script(
            data | {"note": note, "vocabulary": spelt, "prompts": [text for text, _ in pages], "rows": rows}))
        if len(html) <= biggest or len(pages) == 1:
            break
        pages = evenly(pages, 0.9 * biggest / len(html))  # the estimate was too low
    path = Path(path) if path else run.folder / "rollouts.html"
    return Page(atomic_write(path, html), html, note)


def evenly(items: Sequence, share: float) -> list:
    """Such a share of the items, at least one, evenly spaced."""
    count = max(1, int(min(1.0, share) * len(items)))
    return [items[len(items) * k // count] for k in range(count)]


def size_of(line: dict, numbers: int) -> int:
    """About how many bytes of the page a group takes: its texts, its ids, and so many numbers a token."""
    tokens = sum(min(LONGEST, len(t)) for t in line["tokens"])
    texts = [line["prompt"][: 2 * LONGEST], *(text[: 4 * LONGEST] for text in line["completion"])]
    return len(json.dumps(texts)) + (5 + 7 * numbers) * tokens + 200 * len(line["tokens"])


def _beginning(text: str) -> str:
    return text if len(text) <= 2 * LONGEST else f"{text[: 2 * LONGEST]} ... ({len(text)} characters)"


def in_script(data) -> str:
    """JSON that no text inside can end or change: as data of a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def rows_of(line: dict, extra: dict[str, Iterable[list[float]]]) -> list[dict]:
    """A row for each rollout of a group as the page reads it; numbers have three decimals. `extra` gives a list of log-probs
    a rollout."""
    g, rows = recorded(line), []
    for i, r in enumerate(g.group):
        row = {"s": line["step"], "g": line["group"], "i": i, "w": _short(r.reward), "f": r.finish_reason,
               "a": _short(g.advantages[i]), "n": len(r.tokens), "t": r.tokens[:LONGEST],
               "l": [_short(x) for x in r.logps[:LONGEST]], "c": line["completion"][i][: 4 * LONGEST]}
        row |= {} if all(r.mask) else {"m": r.mask[:LONGEST]}
        row |= {"o": {name: _short(values[i]) for name, values in g.parts.items()}} if g.parts else {}
        rows.append(row | {name: [_short(x) for x in next(values)[:LONGEST]] for name, values in extra.items()})
    return rows


def _short(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else round(x, 3)


def _policy_of(run: Run, what: Policy | int) -> Policy:
    return what if isinstance(what, Policy) else with_threads(None, lambda: restore(run, what)).policy


def logps_under(policy: Policy, rollouts: Sequence[Rollout], config: GRPOConfig, most: int) -> list[list[float]]:
    """Each rollout's log-probs by the trainer's forward of a policy; 0 where an environment wrote."""
    with policy.lock:
        verify_forward(policy, config, most)
        return trainer_logps(policy, rollouts, config)


def differing(run: Run, compare, lines: Sequence[dict], prompts: int, config: GRPOConfig) -> list[dict]:
    """The greedy answers of two policies to the first distinct prompts, each as [how, text] pieces: "=", "-" or "+"."""
    asked = list({tuple(line["prompt_ids"]): line["prompt"] for line in lines}.items())[:prompts]
    params, answers = SamplingParams(greedy=True, max_new_tokens=config.max_new_tokens), []
    for side in compare:
        policy = _policy_of(run, side)
        with Sampler(policy) as sampler:
            answers.append([policy.decode(g[0].tokens) for g in sampler.sample_sync([ids for ids, _ in asked], params=params)])
    return [{"prompt": prompt, "pieces": pieces(a, b)} for (_, prompt), a, b in zip(asked, *answers)]


def pieces(a: str, b: str) -> list[list[str]]:
    """The pieces of two texts in order: ["=", both], ["-", only the first], ["+", only the second]."""
    out = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        out += [["=", a[i:j]]] if tag == "equal" else [piece for piece in (["-", a[i:j]], ["+", b[k:m]]) if piece[1]]
    return out
