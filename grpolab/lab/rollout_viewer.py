"""Every rollout of a run on one page: a self-contained HTML file that needs neither a kernel nor a network.

Rollouts by step, group and reward, with search; tokens coloured by log-probability, by its change since, by ratio, advantage or
KL; what an environment wrote set apart; the answers of two checkpoints side by side.
"""

from __future__ import annotations

import difflib
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from html import escape
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


class Page:
    """A page that was written to `path`; a notebook shows it inside its cell."""

    def __init__(self, path: Path, html: str, note: str):
        self.path, self.html, self.note = path, html, note

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
    wanted = None if steps is None else set(steps)
    numbers = [(line["step"], line["group"], size_of(line)) for line in run.recorder.lines(wanted, tell=warnings.warn)]
    if not numbers:
        raise ValueError(f"{run.shown(run.folder)} has no recorded rollouts of these steps: grpo and "
                         "multi_turn_grpo leave them, unless keep='none'")
    numbers_a_token = 1 + (now is not None) + (reference is not None)
    room = max(biggest / 2, biggest - 20_000 - 1000 * prompts * (compare is not None))
    share = min(1.0, room / (numbers_a_token * sum(size for *_, size in numbers)))
    picked = {number[:2] for number in evenly(numbers, share)}
    lines = [line for line in run.recorder.lines(wanted) if (line["step"], line["group"]) in picked]
    flat, config = [r for line in lines for r in recorded(line).group], config_of(run)
    extra = {}
    for name, policy in (("now", now), ("ref", reference)):
        if policy is not None:
            extra[name] = logps_under(_policy_of(run, policy), flat, config, longest([[recorded(line) for line in lines]]))
    rows, total = rows_of(lines, extra), sum(len(line["tokens"]) for line in run.recorder.lines(wanted))
    diff = differing(run, compare, lines[: 4 * prompts], prompts, config) if compare else []
    vocabulary, names = run.recorder.vocabulary(), [_name_of(run, side) for side in compare or ()]
    while True:
        note = f"{len(rows)} rollouts" + ("" if len(rows) == total else f" of {total}, evenly spaced over the steps: the file "
                                          f"stays below {biggest / 1e6:.2g} MB")
        data = {
            "title": str(run.shown(run.folder)), "note": note, "up": UP, "down": DOWN,
            "vocabulary": {i: vocabulary[i] for i in sorted({i for row in rows for i in row["t"]}) if i in vocabulary},
            "quantities": {name: [about, neutral, colours] for name, (about, neutral, colours) in QUANTITIES.items()},
            "prompts": [_beginning(line["prompt"]) for line in lines], "rows": rows, "diff": diff, "diff_names": names,
        }
        html = PAGE.replace("@UP@", UP).replace("@DOWN@", DOWN).replace("@DATA@", in_script(data))
        if len(html) <= biggest or len(rows) == 1:
            break
        places = evenly(range(len(lines)), 0.9 * biggest / len(html))  # the estimate was too low
        if len(places) < len(lines):
            place = {old: new for new, old in enumerate(places)}
            rows, lines = [row | {"p": place[row["p"]]} for row in rows if row["p"] in place], [lines[p] for p in places]
        else:  # one group, and too large
            rows = rows[: len(rows) // 2]
    path = Path(path) if path else run.folder / "rollouts.html"
    return Page(atomic_write(path, html), html, note)


def evenly(items: Sequence, share: float) -> list:
    """Such a share of the items, at least one, evenly spaced."""
    count = max(1, int(share * len(items)))
    return [items[len(items) * k // count] for k in range(count)]


def size_of(line: dict) -> int:
    """About how many bytes of the page a group takes: its texts, and two numbers a token."""
    lengths = [min(LONGEST, len(t)) for t in line["tokens"]]
    texts = [line["prompt"][: 2 * LONGEST], *(text[: 4 * LONGEST] for text in line["completion"])]
    return len(json.dumps(texts)) + sum(8 * n + 150 for n in lengths)


def _beginning(text: str) -> str:
    return text if len(text) <= 2 * LONGEST else f"{text[: 2 * LONGEST]} ... ({len(text)} characters)"


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
                   "a": _short(g.advantages[i]), "n": len(r.tokens), "t": r.tokens[:LONGEST],
                   "l": [_short(x) for x in r.logps[:LONGEST]], "c": line["completion"][i][: 4 * LONGEST]}
            row |= {} if all(r.mask) else {"m": r.mask[:LONGEST]}
            row |= {"o": {name: _short(values[i]) for name, values in g.parts.items()}} if g.parts else {}
            row |= {name: [_short(x) for x in values[at][:LONGEST]] for name, values in extra.items()}
            rows.append(row)
            at += 1
    return rows


def _short(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else round(x, 3)


def _policy_of(run: Run, what: Policy | int) -> Policy:
    return what if isinstance(what, Policy) else with_threads(None, lambda: restore(run, what)).policy


def _name_of(run: Run, what: Policy | int) -> str:
    return what.name if isinstance(what, Policy) else f"after {what} steps"


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


# The page with a place for the data. It asks for nothing outside itself (its Content-Security-Policy forbids it), and every
# text from a model is shown as text (textContent), never as HTML.
PAGE = r"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rollouts</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1b1b; --soft: #666; --line: #ddd; --box: #f6f6f6; }
@media (prefers-color-scheme: dark) { :root { --bg: #161616; --fg: #eaeaea; --soft: #a0a0a0; --line: #3a3a3a; --box: #222; } }
body { background: var(--bg); color: var(--fg); font: 14px/1.45 system-ui, sans-serif; margin: 0; }
header { position: sticky; top: 0; background: var(--bg); border-bottom: 1px solid var(--line); padding: 8px 14px; }
h1 { font-size: 15px; margin: 0 0 6px; } h1 span { font-weight: normal; color: var(--soft); }
header label { margin-right: 12px; white-space: nowrap; color: var(--soft); }
input, select, button { font: inherit; color: var(--fg); background: var(--box); border: 1px solid var(--line);
  border-radius: 4px; padding: 2px 6px; }
#legend { color: var(--soft); font-size: 12px; margin-top: 4px; }
main { padding: 6px 14px 40px; } article { border-bottom: 1px solid var(--line); padding: 8px 0; }
.facts { color: var(--soft); font-size: 12px; } .facts b { color: var(--fg); }
.prompt { white-space: pre-wrap; color: var(--soft); }
.tokens { font-family: ui-monospace, monospace; line-height: 1.8; overflow-wrap: anywhere; }
.tokens span { border-radius: 2px; padding: 1px 0; margin-right: 1px; }
.hit { outline: 2px solid #e6c200; }
.env { outline: 1px dotted #888; font-style: italic; opacity: .75; } mark { background: #e6c200; color: #000; }
.gone { background: rgba(@DOWN@,.35); text-decoration: line-through; } .new { background: rgba(@UP@,.4); }
</style></head><body>
<header><h1 id="title"></h1>
<label>search <input id="search" placeholder="in prompt or completion" size="22"></label>
<label>step <select id="step"></select></label><label>group <select id="group"></select></label>
<label>reward <select id="reward"></select></label><label>ended <select id="end"></select></label>
<label>sort <select id="sort"><option value="s">step</option><option value="w">reward, high first</option>
<option value="-w">reward, low first</option><option value="n">length, long first</option></select></label>
<label>colour <select id="by"></select></label>
<label id="difflabel"><input type="checkbox" id="diff"> compare checkpoints</label>
<div id="legend"></div></header>
<main id="list"></main>
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const D = JSON.parse(document.getElementById("data").textContent), at = id => document.getElementById(id), PAGE = 60;
const make = (tag, text, cls) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls; return e; };
const option = (select, value, text) => { const o = make("option", text); o.value = value; select.append(o); };
const distinct = f => [...new Set(D.rows.map(f))].sort((a, b) => typeof a === "number" ? a - b : a < b ? -1 : 1);
at("title").append(D.title + " "); at("title").append(make("span", D.note)); document.title = D.title;
for (const [id, f, name] of [["step", r => r.s], ["group", r => r.g], ["reward", r => r.w === null ? "none" : r.w],
                             ["end", r => r.f]]) {
  option(at(id), "", "all"); for (const v of distinct(f)) option(at(id), v, v); }
const first = D.rows[0], has = {logp: true, advantage: true, delta: "now" in first, ratio: "now" in first, kl: "ref" in first};
for (const q of Object.keys(D.quantities)) if (has[q]) option(at("by"), q, q);
at("by").value = "logp"; if (!D.diff.length) at("difflabel").hidden = true;
function values(r, by) {
  return r.t.map((_, i) => { const l = r.l[i], now = r.now ? r.now[i] : l;
    if (by === "advantage") return r.a; if (by === "logp") return l; if (l === null || now === null) return null;
    if (by === "delta") return now - l;
    if (by === "ratio") return Math.exp(now - l); if (r.ref[i] === null) return null;
    const g = r.ref[i] - now; return Math.exp(g) - 1 - g; }); }
function shade(x, neutral, scale, by) {
  if (x === null) return ""; const d = (x - neutral) * (by === "kl" ? -1 : 1); if (!d || !isFinite(d)) return "";
  return `rgba(${d > 0 ? D.up : D.down},${(0.1 + 0.6 * Math.min(1, Math.abs(d) / scale)).toFixed(2)})`; }
const seen = text => text.replace(/\n/g, "\u21b5").replace(/ /g, "\u2423");
const spelt = id => D.vocabulary[id] ?? `[${id}]`;
function hits(r, needle) {
  const found = new Set(); if (!needle) return found; let text = ""; const from = [];
  for (const id of r.t) { from.push(text.length); text += spelt(id).toLowerCase(); }
  for (let k = text.indexOf(needle), i = 0; k >= 0; k = text.indexOf(needle, k + 1)) {
    while (i + 1 < from.length && from[i + 1] <= k) i++;
    for (let j = i; j < from.length && from[j] < k + needle.length; j++) found.add(j); }
  return found; }
function tokens(r, by, scale, needle, most) {
  const box = make("div", undefined, "tokens"), v = values(r, by), neutral = D.quantities[by][1], found = hits(r, needle);
  const numbers = Object.keys(D.quantities).filter(q => has[q]).map(q => [q, values(r, q)]);
  r.t.slice(0, most).forEach((id, i) => { const text = spelt(id), span = make("span", seen(text), found.has(i) ? "hit" : "");
    if (r.m && !r.m[i]) { span.classList.add("env"); span.title = text + " \u00b7 the environment"; }
    else { span.style.background = shade(v[i], neutral, scale, by);
      span.title = [text, ...numbers.map(([q, of]) => `${q} ${of[i] === null ? "\u2013" : of[i].toFixed(3)}`)]
        .join(" \u00b7 "); }
    box.append(span); });
  if (r.t.length > most) { const all = make("button", `show all ${r.t.length} tokens`); box.append(" ", all);
    all.onclick = () => box.replaceWith(tokens(r, by, scale, needle, Infinity)); }
  else if (r.n > r.t.length) box.append(` \u2026 and ${r.n - r.t.length} more tokens, which are on the record alone`);
  return box; }
function article(r, by, scale, needle) {
  const a = make("article"), facts = make("div", undefined, "facts"), other = Object.entries(r.o || {});
  facts.append(make("b", `step ${r.s} \u00b7 group ${r.g} \u00b7 rollout ${r.i}`),
    ` reward ${r.w ?? "none"} \u00b7 advantage ${r.a} \u00b7 ${r.n} tokens, ${r.f}` +
    other.map(([k, x]) => ` \u00b7 ${k} ${x}`).join("") + " ");
  const only = make("button", "this group"); only.onclick = () => { at("step").value = r.s; at("group").value = r.g; draw(); };
  facts.append(only); const prompt = make("div", undefined, "prompt"), text = D.prompts[r.p];
  const k = needle ? text.toLowerCase().indexOf(needle) : -1;
  if (k < 0) prompt.textContent = text;
  else prompt.append(text.slice(0, k), make("mark", text.slice(k, k + needle.length)), text.slice(k + needle.length));
  a.append(facts, prompt, tokens(r, by, scale, needle, 500));
  if (r.t.some(id => spelt(id).includes("\ufffd"))) a.append(make("div", r.c, "prompt"));  // characters of several tokens
  return a; }
let shown = PAGE;
function matching() {
  const needle = at("search").value.toLowerCase(), is = (id, v) => at(id).value === "" || at(id).value === String(v ?? "none");
  let rows = D.rows.filter(r => is("step", r.s) && is("group", r.g) && is("reward", r.w) && is("end", r.f) &&
    (!needle || r.c.toLowerCase().includes(needle) || D.prompts[r.p].toLowerCase().includes(needle)));
  const sort = at("sort").value, low = r => r.w ?? -Infinity;
  if (sort === "w") rows = [...rows].sort((a, b) => low(b) - low(a));
  if (sort === "-w") rows = [...rows].sort((a, b) => low(a) - low(b));
  if (sort === "n") rows = [...rows].sort((a, b) => b.n - a.n); return [rows, needle]; }
function draw() {
  const list = at("list"); list.replaceChildren(); if (at("diff").checked) return compare(list);
  const [rows, needle] = matching(), by = at("by").value, [about, neutral, colours] = D.quantities[by];
  const some = rows.slice(0, shown), counts = (r, x, i) => x !== null && isFinite(x) && (!r.m || r.m[i]);
  const far = some.flatMap(r => values(r, by).filter((x, i) => counts(r, x, i)).map(x => Math.abs(x - neutral)));
  const scale = far.sort((a, b) => a - b)[Math.floor(far.length * 0.98)] || 1;
  at("legend").textContent = `${rows.length} of ${D.rows.length} rollouts \u00b7 coloured by ${about}: ${colours}, ` +
    `full colour at a distance of ${scale.toPrecision(2)} \u00b7 outlined: of the environment \u00b7 hover for the numbers`;
  for (const r of some) list.append(article(r, by, scale, needle));
  if (rows.length > shown) { const more = make("button", `show ${Math.min(PAGE, rows.length - shown)} more`);
    more.onclick = () => { shown += PAGE; draw(); }; list.append(more); } }
function compare(list) {
  at("legend").textContent = `greedy answers: ${D.diff_names[0]} (struck out where only there) and ${D.diff_names[1]} (blue)`;
  const needle = at("search").value.toLowerCase();
  for (const d of D.diff) { if (!(d.prompt + "\n" + d.pieces.map(p => p[1]).join("")).toLowerCase().includes(needle)) continue;
    const a = make("article"), line = make("div", undefined, "tokens");
    for (const [how, text] of d.pieces) line.append(make("span", seen(text), how === "-" ? "gone" : how === "+" ? "new" : ""));
    a.append(make("div", d.prompt, "prompt"), line); list.append(a); } }
for (const id of ["search", "step", "group", "reward", "end", "sort", "by", "diff"])
  at(id).addEventListener("input", () => { shown = PAGE; draw(); });
draw();
</script></body></html>
"""
