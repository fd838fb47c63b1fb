"""Every rollout of a run on one page: a self-contained HTML file that needs neither a kernel nor a network.

Rollouts by step, group and reward, with search; tokens coloured by log-probability, by its change since, or by advantage; what
an environment wrote set apart; the answers of two checkpoints side by side. rollouts.html beside this file is the page.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import atomic_write
from grpolab.lab.restore import config_of, longest, restore
from grpolab.lab.tokens import DOWN, QUANTITIES, UP
from grpolab.models.load import Policy
from grpolab.rollouts import Rollout
from grpolab.runs.rollout_log import recorded
from grpolab.runs.run import Run
from grpolab.train.grpo import GRPOConfig, trainer_logps
from grpolab.train.verify import verify_forward

BIGGEST = 4_900_000  # bytes of a page
LONGEST = 4000  # tokens of a rollout that it holds
COMPARED = 12  # prompts that two policies answer
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


def browse(run: Run, path: str | Path | None = None, *, steps: Iterable[int] | None = None, now: int | None = None,
           compare: tuple[int, int] | None = None) -> Page:
    """Write the recorded rollouts (of `steps`) as one HTML file, by default rollouts.html in the run's folder.

    `now`, a number of steps done, adds how much more or less probable each token is to the policy after them. `compare` shows
    the greedy answers after two numbers of steps, with the difference marked. Where not all fit into BIGGEST bytes, every
    second group is shown, or every third, ..., and the page says so; of a very long rollout it holds the beginning."""
    lines = list(run.recorder.lines(steps))
    if not lines:
        raise ValueError(f"{run.shown(run.folder)} has no recorded rollouts of these steps: grpo and "
                         "multi_turn_grpo leave them, unless keep='none'")
    config, template = config_of(run), files("grpolab.lab").joinpath("rollouts.html").read_text("utf-8")
    template = template.replace("@UP@", UP).replace("@DOWN@", DOWN)
    logps = None
    if now is not None:
        groups = [recorded(line) for line in lines]
        logps = iter(logps_under(restore(run, now).policy, [r for g in groups for r in g.group], config, longest(groups)))
    data = {
        "title": str(run.shown(run.folder)), "up": UP, "down": DOWN, "quantities": QUANTITIES,
        "diff": differing(run, compare, lines, config) if compare else [],
        "diff_names": [f"after {side} steps" for side in compare or ()],
    }
    parts = [(_beginning(line["prompt"]), rows_of(line, logps)) for line in lines]
    room = BIGGEST - len(template) - len(in_script(data)) - 1000
    vocabulary, every = run.recorder.vocabulary(), 1
    while True:
        shown = parts[::every]
        rows = [row | {"p": place} for place, (_, of) in enumerate(shown) for row in of]
        spelt = {i: vocabulary[i] for i in sorted({i for row in rows for i in row["t"]} & vocabulary.keys())}
        content = in_script({"vocabulary": spelt, "prompts": [prompt for prompt, _ in shown], "rows": rows})
        if len(content) <= room or len(shown) == 1:
            break
        every = max(every + 1, every * len(content) // room)
    total = sum(len(of) for _, of in parts)
    note = f"{len(rows)} rollouts" + ("" if every == 1 else f" of {total}, evenly spaced over the steps: the file stays below "
                                      f"{BIGGEST / 1e6:.2g} MB")
    html = template.replace("@DATA@", in_script(data | {"note": note})[:-1] + "," + content[1:])
    path = Path(path) if path else run.folder / "rollouts.html"
    return Page(atomic_write(path, html), html, note)


def _beginning(text: str) -> str:
    return text if len(text) <= 2 * LONGEST else f"{text[: 2 * LONGEST]} ... ({len(text)} characters)"


def in_script(data) -> str:
    """JSON that no text inside can end or change: as data of a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def rows_of(line: dict, logps: Iterator[list[float]] | None = None) -> list[dict]:
    """A row for each rollout of a group as the page reads it; numbers have three decimals. `logps` gives those of one rollout
    after another under another policy."""
    g, rows = recorded(line), []
    for i, r in enumerate(g.group):
        row = {"s": line["step"], "g": line["group"], "i": i, "w": _short(r.reward), "f": r.finish_reason,
               "a": _short(g.advantages[i]), "n": len(r.tokens), "t": r.tokens[:LONGEST],
               "l": [_short(x) for x in r.logps[:LONGEST]], "c": line["completion"][i][: 4 * LONGEST]}
        row |= {} if all(r.mask) else {"m": r.mask[:LONGEST]}
        row |= {"o": {name: _short(values[i]) for name, values in g.parts.items()}} if g.parts else {}
        row |= {"now": [_short(x) for x in next(logps)[:LONGEST]]} if logps else {}
        rows.append(row)
    return rows


def _short(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else round(x, 3)


def logps_under(policy: Policy, rollouts: Sequence[Rollout], config: GRPOConfig, most: int) -> list[list[float]]:
    """Each rollout's log-probs by the trainer's forward of a policy; 0 where an environment wrote. `most`: tokens of the
    longest sequence."""
    with policy.lock:
        verify_forward(policy, config, most)
        return trainer_logps(policy, rollouts, config)


def differing(run: Run, compare: tuple[int, int], lines: Sequence[dict], config: GRPOConfig) -> list[dict]:
    """The greedy answers after two numbers of steps to the first distinct prompts, each as [how, text] pieces: "=", "-" or
    "+"."""
    asked = list({tuple(line["prompt_ids"]): line["prompt"] for line in lines[: 4 * COMPARED]}.items())[:COMPARED]
    params, answers = SamplingParams(greedy=True, max_new_tokens=config.max_new_tokens), []
    for steps in compare:
        policy = restore(run, steps).policy
        with Sampler(policy) as sampler:
            answers.append([policy.decode(g[0].tokens) for g in sampler.sample_sync([ids for ids, _ in asked], params=params)])
    return [{"prompt": prompt, "pieces": pieces(a, b)} for (_, prompt), a, b in zip(asked, *answers)]


def pieces(a: str, b: str) -> list[list[str]]:
    """The pieces of two texts in order: ["=", both], ["-", only the first], ["+", only the second]."""
    out = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        out += [["=", a[i:j]]] if tag == "equal" else [piece for piece in (["-", a[i:j]], ["+", b[k:m]]) if piece[1]]
    return out
