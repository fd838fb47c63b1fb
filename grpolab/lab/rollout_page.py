"""The page of `browse`: HTML, style and script with a place for the data. It asks for nothing outside itself (its
Content-Security-Policy forbids it), and every text from a model is shown as text (textContent), never as HTML."""

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
