"""A page that shows what was in steps: one document without anything from elsewhere, and without script.

Whatever is shown is escaped, and the page's policy allows its own style, and pictures and sound that lie in
it, and nothing else: what samples hold can do nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dataflow.explain.batch import batch_at
from dataflow.tools.explain.neighbours import StepMeasures, compared
from dataflow.tools.explain.stored import StoredFiles
from dataflow.tools.explain.values import PageRoom, TokenWords, text_of, values_of, words_of
from sharding.errors import DataflowError

if TYPE_CHECKING:
    from dataflow.explain.accumulated import NumberedPlace
    from dataflow.explain.run import ExplainedRun
    from sharding.plan.history import StepPlace

MOST_ROWS, MOST_BESIDE, MOST_PIECES = 256, 16, 20
"""Rows of a step whose values are shown, those of one that is told beside it, and pieces of a row."""
STYLE = """
:root { color-scheme: light dark; --back: #fff; --card: #f6f7f9; --ink: #1c2128; --dim: #57606a;
  --line: #d8dee4; --a: #dbeafe; --b: #fef3c7; --odd: #b3261e }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --card: #171d24; --ink: #e6edf3;
  --dim: #9aa6b2; --line: #2c3540; --a: #1e3a5f; --b: #4a3b12; --odd: #ff8a80 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 80rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums }
h1 { font-size: 1.2rem } h2 { font-size: 1.05rem; margin-top: 1.5rem }
.dim { color: var(--dim) } .odd { color: var(--odd) }
.rows { display: grid; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); gap: .7rem }
.row { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem;
  overflow: hidden; overflow-wrap: anywhere }
.row h3 { font-size: .85rem; margin: 0 0 .3rem } .row p { margin: .2rem 0 }
.row .dim, pre { font-size: .8rem }
img, audio, video { max-width: 100%; display: block; margin: .2rem 0 }
pre { white-space: pre-wrap; margin: .2rem 0; max-height: 16rem; overflow: auto }
.p0 { background: var(--a) } .p1 { background: var(--b) }
.p2, .m { color: var(--dim) } .m { font-style: italic }
.whole { position: relative; width: fit-content; max-width: 100% } .whole img { margin: 0 }
svg { position: absolute; inset: 0; width: 100%; height: 100% }
rect { fill: none; stroke: #ff2d95; stroke-width: 2px }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem }
th, td { text-align: right; padding: .15rem .6rem; border-bottom: 1px solid var(--line) }
th:first-child { text-align: left; font-weight: normal } td.odd { font-weight: bold }
"""
POLICY = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
)


def page_of(
    run: ExplainedRun,
    places: Sequence[NumberedPlace],
    table: pa.Table,
    notes: Sequence[str],
    asked: int | None = None,
) -> str:
    """The page of steps, whose batches are made again for it.

    `asked`: the number of the step that is shown whole, while those beside it unfold. None: there are none.
    """
    steps, measures, room = list[str](), list[StepMeasures](), PageRoom()
    lengths = np.array(table["length"].to_pylist(), float)
    usual = float(np.median(lengths)) if len(lengths) else 0.0
    for numbered, part in zip(places, _rows_of(places, table), strict=True):
        place, rows, name = numbered.place, part.to_pylist(), numbered.name.capitalize()
        measures.append(StepMeasures(name, rows, len(run.dataset.sources)))
        is_asked = asked in (None, numbered.number)
        most = MOST_ROWS if is_asked else MOST_BESIDE
        samples = [*_samples(run, place, rows, most, room, measures[-1])]
        fold = ("<div>", "</div>") if is_asked else ("<details><summary>its samples</summary>", "</details>")
        steps += [f"<h2>{name}</h2>", *_facts(place, rows, usual), fold[0], *samples, fold[1]]
    title = f"dataflow explain: {len(places):,} step{'s' if len(places) > 1 else ''}"
    body = [*(f"<p class=odd>{text_of(note)}</p>" for note in notes), *compared(measures), *steps]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width"><meta name="referrer" content="no-referrer">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _rows_of(places: Sequence[NumberedPlace], table: pa.Table) -> Iterator[pa.Table]:
    """Yield the rows of each step, or microbatch of one."""
    for numbered in places:
        is_own = pa.compute.equal(table["step"], numbered.number)
        is_part = pa.compute.equal(table["microbatch"], numbered.microbatch or 0)
        yield table.filter(pa.compute.and_(is_own, is_part))


def _facts(place: StepPlace, rows: Sequence[Mapping[str, Any]], usual: float) -> Iterator[str]:
    """Yield what is to be said of a step: where it was, duplicates, odd lengths."""
    yield (
        f"<p>Epoch {place.epoch:,}, from position {place.position:,}: {len(rows):,} samples or pieces on "
        f"{place.world_size:,} rank{'s' if place.world_size > 1 else ''}</p>"
    )
    times = Counter((row["source"], row["sample"]) for row in rows if row["piece_start"] is None)
    if twice := [f"sample {sample} of source {source}" for (source, sample), n in times.items() if n > 1]:
        yield f"<p class=odd>more than once: {text_of(', '.join(twice[:20]))}</p>"
    outliers = [row for row in rows if usual and not 0.25 <= row["length"] / usual <= 4]
    if outliers and len(outliers) < len(rows) / 4:
        named = ", ".join(f"{row['key'] or row['sample']} ({row['length']:,})" for row in outliers[:20])
        yield f"<p class=odd>bytes unlike the usual {usual:,.0f}: {text_of(named)}</p>"


def _samples(
    run: ExplainedRun,
    place: StepPlace,
    rows: Sequence[Mapping[str, Any]],
    most: int,
    room: PageRoom,
    measures: StepMeasures,
) -> Iterator[str]:
    """Yield the rows of a step, with what the batches made again hold, which is measured."""
    yield "<div class=rows>"
    shown = 0
    for rank in sorted({row["rank"] for row in rows}):
        rank_rows: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["rank"] == rank:
                rank_rows.setdefault(row["row"], []).append(row)
        batch, files, fault = None, dict[int, StoredFiles](), ""
        if shown < most:
            shown_pieces = [piece for pieces in [*rank_rows.values()][: most - shown] for piece in pieces]
            try:
                batch = batch_at(run, place, rank)
                for number in {piece["source"] for piece in shown_pieces}:
                    pieces = [piece for piece in shown_pieces if piece["source"] == number]
                    files[number] = StoredFiles(run.dataset.sources[number], pieces)
            except (DataflowError, OSError, ValueError) as error:
                batch, fault = None, f"<p class=odd>cannot be made again: {text_of(error)}</p>"
            else:
                words = (words_of(run.dataset.sources[number].transform) for number in files)
                measures.add(batch, next((tokens for tokens in words if tokens.column), TokenWords()))
        for number, pieces in rank_rows.items():
            shown += 1
            if shown <= most:
                yield f"<div class=row><h3>rank {rank}, row {number}</h3>{_named(pieces)}{fault}"
                yield from () if batch is None else _contents(run, batch, number, pieces, files, room)
                yield "</div>"
    yield "</div>"
    if shown > most:
        yield f"<p class=dim>{shown - most:,} more rows are not shown</p>"


def _contents(
    run: ExplainedRun,
    batch: Any,
    number: int,
    pieces: Sequence[Mapping[str, Any]],
    files: Mapping[int, StoredFiles],
    room: PageRoom,
) -> Iterator[str]:
    """Yield what a batch holds in a row, and what that was made of."""
    first = pieces[0]
    words = words_of(run.dataset.sources[first["source"]].transform)
    yield from values_of(batch, number, words, room, files[first["source"]].rates(first["sample"]))
    yield from (files[piece["source"]].shown(piece, room) for piece in pieces[:MOST_PIECES])


def _named(pieces: Sequence[Mapping[str, Any]]) -> str:
    """The samples of a row, by key and place."""
    lines = []
    for piece in pieces[:MOST_PIECES]:
        shard = piece["shard"].rpartition("/")[2]
        name = piece["key"] or f"sample {piece['sample']}"
        what = (
            "" if piece["piece_start"] is None else f", {piece['piece_length']} from {piece['piece_start']}"
        )
        again = ", comes a second time" if piece["repeat"] else ""
        where = f"{shard}, byte {piece['offset']:,}{what}{again}"
        lines.append(f"<p><b>{text_of(name)}</b> <span class=dim>{text_of(where)}</span></p>")
    if len(pieces) > MOST_PIECES:
        lines.append(f"<p class=dim>{len(pieces) - MOST_PIECES} more pieces</p>")
    return "".join(lines)
