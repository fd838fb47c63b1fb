"""Every rollout of a run on one page: a self-contained HTML file that needs neither a kernel nor a network.

Rollouts by step, group and reward, with search; tokens coloured by log-probability, by its change since, by ratio, advantage or
KL; what an environment wrote set apart; the answers of two checkpoints side by side. The page itself is `page.py`.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from grpolab.decode.sampler import Sampler
from grpolab.decode.sampling import SamplingParams
from grpolab.files import atomic_write
from grpolab.lab.page import PAGE
from grpolab.lab.rebuild import config_of, longest, rebuild, with_threads
from grpolab.lab.record import recorded
from grpolab.lab.run import Run
from grpolab.lab.tokens import DOWN, QUANTITIES, UP
from grpolab.models import Policy
from grpolab.rollouts import Rollout
from grpolab.train.grpo import GRPOConfig, trainer_logps
from grpolab.train.proof import prove

BIGGEST = 4_900_000  # bytes of a page
FRAME = "sandbox='allow-scripts' style='width:100%;height:640px;border:1px solid #8886'"


class Page:
    """A page that was written to `path`; a notebook shows it inside its cell."""

    def __init__(self, path: Path, html: str, note: str):
        self.path, self.html, self.note = path, html, note

    def _repr_html_(self):
        return f"<iframe srcdoc='{escape(self.html, quote=True)}' {FRAME}></iframe>"

    def __repr__(self):
        return f"{Run.shown(self.path)}: {self.note}"


def browse(run: Run, path: str | Path | None = None, *, steps: Iterable[int] | None = None, now: Policy | int | None = None,
           reference: Policy | None = None, compare: tuple[Policy | int, Policy | int] | None = None, prompts: int = 12,
           biggest: int = BIGGEST) -> Page:
    """Write the recorded rollouts (of `steps`) as one HTML file, by default rollouts.html in the run's folder.

    `now`, a policy or a number of steps done, adds how probable each token has become since (change, ratio); `reference`
    adds the KL to it. `compare` two of these: their greedy answers to the first so many `prompts`, with the difference marked.
    Where not all fit into `biggest` bytes, whole groups evenly spaced over the steps are shown, and the page says so."""
    wanted = None if steps is None else set(steps)
    numbers = [(line["step"], line["group"], len(json.dumps(line))) for line in run.recorder.lines(wanted)]
    if not numbers:
        raise ValueError(f"{run.shown(run.folder)} has no recorded rollouts of these steps: it needs keep='all' or a number")
    numbers_a_token = 1 + (now is not None) + (reference is not None)
    room = biggest - 150_000 - 1000 * prompts * (compare is not None)
    share = min(1.0, room / (1.1 * numbers_a_token * sum(size for *_, size in numbers)))
    count = max(1, int(share * len(numbers)))
    picked = {numbers[len(numbers) * k // count][:2] for k in range(count)}
    lines = [line for line in run.recorder.lines(wanted) if (line["step"], line["group"]) in picked]
    groups = [recorded(line) for line in lines]
    flat = [r for g in groups for r in g.group]
    config = config_of(run)
    extra = {}
    for name, policy in (("now", now), ("ref", reference)):
        if policy is not None:
            extra[name] = logps_under(_policy_of(run, policy), flat, config, longest([groups]))
    rows = rows_of(lines, extra)
    shown, total = len(flat), sum(line["of"] for line in run.recorder.lines(wanted) if line["group"] == 0)
    fewer = "" if shown == total else f" of {total}, evenly spaced over the steps: the file stays below {biggest / 1e6:.1f} MB"
    note = f"{shown} rollouts{fewer}"
    data = {
        "title": str(run.shown(run.folder)), "note": note, "vocabulary": run.recorder.vocabulary(), "up": UP, "down": DOWN,
        "quantities": {name: [about, neutral, colours] for name, (about, neutral, colours) in QUANTITIES.items()},
        "prompts": [line["prompt"] for line in lines], "rows": rows,
        "diff": differing(run, compare, lines[: 4 * prompts], prompts, config) if compare else [],
        "diff_names": [_name_of(run, side) for side in compare or ()],
    }  # fmt: skip
    html = PAGE.replace("@UP@", UP).replace("@DOWN@", DOWN).replace("@DATA@", in_script(data))
    path = Path(path) if path else run.folder / "rollouts.html"
    return Page(atomic_write(path, html), html, note)


def in_script(data) -> str:
    """JSON that no text inside can end or change: as data of a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def rows_of(lines: Sequence[dict], extra: dict[str, list[list[float]]]) -> list[dict]:
    """A row a rollout as the page reads it; numbers have three decimals. `extra` holds a list of log-probs a rollout."""
    rows, at = [], 0
    for place, line in enumerate(lines):
        g = recorded(line)
        for i, r in enumerate(g.group):
            row = {"s": line["step"], "g": line["group"], "i": i, "p": place, "w": _short(r.reward), "f": r.finish_reason,
                   "a": _short(g.advantages[i]), "t": r.tokens, "l": [_short(x) for x in r.logps],
                   "c": line["completion"][i]}  # fmt: skip
            row |= {} if all(r.mask) else {"m": r.mask}
            row |= {"o": {name: _short(values[i]) for name, values in g.parts.items()}} if g.parts else {}
            row |= {name: [_short(x) for x in values[at]] for name, values in extra.items()}
            rows.append(row)
            at += 1
    return rows


def _short(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else round(x, 3)


def _policy_of(run: Run, what: Policy | int) -> Policy:
    return what if isinstance(what, Policy) else with_threads(None, lambda: rebuild(run, what)).policy


def _name_of(run: Run, what: Policy | int) -> str:
    return what.name if isinstance(what, Policy) else f"after {what} steps"


def logps_under(policy: Policy, rollouts: Sequence[Rollout], config: GRPOConfig, most: int) -> list[list[float]]:
    """Each rollout's log-probs by the trainer's forward of a policy; 0 where an environment wrote."""
    with policy.lock:
        prove(policy, config, most)
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
