"""The page of `dataflow top --web`: one document without anything from elsewhere, and its policy.

Whatever is shown is set as text, never as HTML: names come from datasets. Script and style are allowed by
their hashes alone.
"""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark;
  --back: #fff; --card: #f6f7f9; --ink: #1c2128; --dim: #57606a; --line: #d8dee4;
  --data: #b35900; --compute: #1a7f4b; --network: #0b63c5; --straggler: #8b3fb5; --optimizer: #57606a;
  --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root {
  --back: #0f1318; --card: #171d24; --ink: #e6edf3; --dim: #9aa6b2; --line: #2c3540;
  --data: #f0a04b; --compute: #4cc38a; --network: #6cb0ff; --straggler: #c792ea;
  --optimizer: #9aa6b2; --bad: #ff8a80 } }
* { box-sizing: border-box }
body { margin: 0; padding: 1rem; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums }
header { display: flex; gap: 1rem; justify-content: space-between; align-items: baseline; min-height: 1.8rem }
h1 { font-size: 1.1rem; margin: 0 } h2 { font-size: 1rem; margin: 0; overflow-wrap: anywhere }
main, header, footer { max-width: 75rem; margin: 0 auto }
.dim { color: var(--dim) } .bad { color: var(--bad) }
#fault { min-height: 1.45em; margin: .2rem 0 }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem;
  margin: 0 0 1rem }
.over { opacity: .7 }
.where { display: inline-block; font-weight: 650; font-size: 1.25rem; margin: .3rem 0 0; min-height: 1.8rem }
.verdict { margin: 0; min-height: 1.45em }
.next { margin: .1rem 0 .6rem; min-height: 2.9em; color: var(--dim) }
.parts { display: flex; height: 14px; border-radius: 7px; overflow: hidden; background: var(--line) }
.parts div { height: 100%; width: 0 }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .3rem 0 .6rem; min-height: 1.45em;
  font-size: .85rem }
.legend span::before { content: ""; display: inline-block; width: .7em; height: .7em; border-radius: 2px;
  margin-right: .4em; background: var(--colour) }
.data { --colour: var(--data) } .compute { --colour: var(--compute) } .network { --colour: var(--network) }
.straggler { --colour: var(--straggler) } .optimizer { --colour: var(--optimizer) }
.parts div { background: var(--colour) }
figure { margin: 0 0 .6rem }
svg { display: block; width: 100%; height: 64px; border-bottom: 1px solid var(--line) }
polyline { fill: none; stroke: var(--network); stroke-width: 1.5; vector-effect: non-scaling-stroke }
figcaption { font-size: .85rem; min-height: 1.45em; color: var(--dim) }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .85rem }
th { font-weight: 600; color: var(--dim); white-space: nowrap }
th, td { text-align: right; padding: .22rem .45rem; border-bottom: 1px solid var(--line) }
td { min-width: 3.8em; white-space: nowrap }
th:nth-child(2), td:nth-child(2), th:last-child, td:last-child { text-align: left }
td:nth-child(2), td:last-child { max-width: 14em; overflow: hidden; text-overflow: ellipsis }
td:last-child { min-width: 7em }
ul { list-style: none; padding: 0; margin: .7rem 0 0; font-size: .85rem } li { overflow-wrap: anywhere }
footer { font-size: .85rem }
@media (max-width: 44rem) {
  body { padding: .6rem } thead { display: none }
  table, tbody, tr { display: block } tr { padding: .4rem 0; border-bottom: 1px solid var(--line) }
  td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0 }
  td:nth-child(2), td:last-child { text-align: right; max-width: none; white-space: normal }
  td::before { content: attr(data-of); color: var(--dim); text-align: left; white-space: nowrap }
  td:last-child:empty { display: none } .next { min-height: 5.8em }
}
"""

SCRIPT = """
"use strict";
const PERIOD_MS = 1000, PATIENCE_MS = 8000, POINTS = 120;
const main = document.querySelector("main"), sections = new Map();
function make(kind, parent, name) {
  const one = document.createElement(kind);
  if (name) one.className = name;
  parent.append(one);
  return one;
}
function write(one, text) { if (one.textContent !== text) one.textContent = text; }
function fill(parent, kind, texts) {
  while (parent.children.length > texts.length) parent.lastElementChild.remove();
  texts.forEach((text, at) => write(parent.children[at] || make(kind, parent), text));
}
function begin() {
  const at = make("section", main), found = {at, points: []};
  found.title = make("h2", at);
  found.where = make("div", at, "where");
  found.verdict = make("p", at, "verdict");
  found.next = make("p", at, "next");
  found.parts = make("div", at, "parts");
  found.legend = make("div", at, "legend");
  const figure = make("figure", at);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 " + (POINTS - 1) + " 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  found.line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  svg.append(found.line);
  figure.append(svg);
  found.caption = make("figcaption", figure);
  const table = make("table", make("div", at, "scroll"));
  found.head = make("tr", make("thead", table));
  found.body = make("tbody", table);
  found.decisions = make("ul", at);
  return found;
}
function showParts(one, parts) {
  while (one.parts.children.length > parts.length) {
    one.parts.lastElementChild.remove();
    one.legend.lastElementChild.remove();
  }
  parts.forEach(([kind, text, share], at) => {
    const bar = one.parts.children[at] || make("div", one.parts);
    const name = one.legend.children[at] || make("span", one.legend);
    bar.className = name.className = kind;
    bar.style.width = (share * 100).toFixed(1) + "%";
    write(name, text);
  });
}
function showRate(one, training) {
  if (training.rate !== null) one.points.push(training.rate);
  one.points = one.points.slice(-POINTS);
  const most = Math.max(1e-9, ...one.points), first = POINTS - one.points.length;
  one.line.setAttribute("points", one.points.map((rate, at) =>
    (first + at) + "," + (98 - 96 * rate / most).toFixed(1)).join(" "));
  write(one.caption, training.rate_text);
}
function showRows(one, training) {
  fill(one.head, "th", training.headings);
  const rows = one.body.children;
  while (rows.length > training.rows.length) one.body.lastElementChild.remove();
  training.rows.forEach((cells, at) => {
    const row = rows[at] || make("tr", one.body);
    fill(row, "td", cells);
    cells.forEach((text, column) => {
      row.children[column].dataset.of = training.headings[column];
      row.children[column].title = text;
    });
  });
}
function show(view) {
  write(document.getElementById("at"), view.at);
  write(document.getElementById("fault"), view.fault);
  write(document.getElementById("notes"), view.notes);
  const jobs = new Set(view.trainings.map((one) => one.job));
  for (const [job, one] of sections) if (!jobs.has(job)) { one.at.remove(); sections.delete(job); }
  view.trainings.forEach((training) => {
    if (!sections.has(training.job)) sections.set(training.job, begin());
    const one = sections.get(training.job);
    one.at.className = training.is_over ? "over" : "";
    write(one.title, training.title);
    write(one.where, training.where);
    write(one.verdict, training.answer[0] || "");
    write(one.next, training.answer[1] || "");
    showParts(one, training.parts);
    showRate(one, training);
    showRows(one, training);
    fill(one.decisions, "li", training.decisions);
  });
}
async function look() {
  try {
    const answer = await fetch("figures.json", {cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS)});
    if (!answer.ok) throw new Error(answer.status);
    show(await answer.json());
    document.body.dataset.shown = Number(document.body.dataset.shown || 0) + 1;
  } catch (error) {
    write(document.getElementById("fault"), "dataflow top does not answer: what follows is old");
  }
  setTimeout(look, PERIOD_MS);
}
look();
"""

PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dataflow top</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>{STYLE}</style></head>
<body><header><h1>dataflow top</h1><span id="at" class="dim"></span></header>
<main><p id="fault" class="bad" role="status"></p></main>
<footer class="dim"><p id="notes"></p></footer>
<script>{SCRIPT}</script></body></html>
"""


def _hash_of(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


POLICY = (
    f"default-src 'none'; script-src '{_hash_of(SCRIPT)}'; style-src '{_hash_of(STYLE)}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page."""
