"""A page that shows what was in steps: one document without anything from elsewhere, and without script.

Whatever is shown is escaped, and the page's policy allows its own style, and pictures and sound that lie in
it, and nothing else: what samples hold can do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from dataflow.batch.packed import PackedRows
from dataflow.explain.batch import batch_at
from dataflow.ragged import Ragged
from sharding.errors import DataflowError
from sharding.printable import printable

if TYPE_CHECKING:
    from dataflow.explain.run import ExplainedRun
    from sharding.plan.history import StepPlace

MOST_ROWS, MOST_TEXT, MOST_NUMBERS = 256, 2000, 512
"""Rows of a step whose values are shown, characters of a text, and numbers of an array."""
STYLE = """
:root { color-scheme: light dark; --back: #fff; --card: #f6f7f9; --ink: #1c2128; --dim: #57606a;
  --line: #d8dee4; --a: #dbeafe; --b: #fef3c7; --odd: #b3261e }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --card: #171d24; --ink: #e6edf3;
  --dim: #9aa6b2; --line: #2c3540; --a: #1e3a5f; --b: #4a3b12; --odd: #ff8a80 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 80rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums }
h1 { font-size: 1.2rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.dim { color: var(--dim) } .odd { color: var(--odd) }
.rows { display: grid; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); gap: .7rem }
.row { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem;
  overflow: hidden; overflow-wrap: anywhere }
.row h3 { font-size: .85rem; margin: 0 0 .3rem } .row p { margin: .2rem 0 }
.row .dim, pre { font-size: .8rem } img { max-width: 100%; image-rendering: auto; display: block }
pre { white-space: pre-wrap; margin: .2rem 0; max-height: 16rem; overflow: auto }
.p0 { background: var(--a) } .p1 { background: var(--b) }
.p2, .m { color: var(--dim) } .m { font-style: italic }
"""
POLICY = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
)


def page_of(run: ExplainedRun, places: Sequence[StepPlace], table: pa.Table, notes: Sequence[str]) -> str:
    """The page of steps, whose batches are made again for it."""
    body = [f"<p class=odd>{_text(note)}</p>" for note in notes]
    lengths = np.array(table["length"].to_pylist(), float)
    usual = float(np.median(lengths)) if len(lengths) else 0.0
    for number, place in enumerate(places):
        name = "The step" if place.step < 0 else f"Step {place.step:,}"
        body.append(f"<h2>{name}</h2>")
        rows = table.filter(pa.compute.equal(table["step"], place.step)).drop_columns("draws").to_pylist()
        body += _facts(place, rows, len(run.dataset.sources), usual)
        body += _samples(run, place, rows, MOST_ROWS if number == len(places) // 2 or len(places) < 4 else 16)
    title = f"dataflow explain: {len(places):,} step{'s' if len(places) > 1 else ''}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width"><meta name="referrer" content="no-referrer">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    """Text that is shown as it is, whatever it holds."""
    return escape(printable(str(value)[:MOST_TEXT]))


def _facts(
    place: StepPlace, rows: Sequence[Mapping[str, Any]], num_sources: int, usual: float
) -> Iterator[str]:
    """Yield what is to be said of a step: where it was, shares of sources, duplicates, odd lengths."""
    yield (
        f"<p>Epoch {place.epoch:,}, from position {place.position:,}: {len(rows):,} samples or pieces on "
        f"{place.world_size:,} rank{'s' if place.world_size > 1 else ''}</p>"
    )
    if num_sources > 1 and rows:
        counts = Counter(row["source"] for row in rows)
        shares = ", ".join(f"source {one}: {count / len(rows):.1%}" for one, count in sorted(counts.items()))
        yield f"<p class=dim>{shares}</p>"
    times = Counter((row["source"], row["sample"]) for row in rows if row["piece_start"] is None)
    if twice := [f"sample {sample} of source {source}" for (source, sample), n in times.items() if n > 1]:
        yield f"<p class=odd>more than once: {_text(', '.join(twice[:20]))}</p>"
    own = [row for row in rows if usual and not 0.25 <= row["length"] / usual <= 4]
    if own and len(own) < len(rows) / 4:
        named = ", ".join(f"{row['key'] or row['sample']} ({row['length']:,})" for row in own[:20])
        yield f"<p class=odd>bytes unlike the usual {usual:,.0f}: {_text(named)}</p>"


def _samples(
    run: ExplainedRun, place: StepPlace, rows: Sequence[Mapping[str, Any]], most: int
) -> Iterator[str]:
    """Yield the rows of a step, with what the batches made again hold."""
    yield "<div class=rows>"
    shown = 0
    for rank in sorted({row["rank"] for row in rows}):
        own: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["rank"] == rank:
                own.setdefault(row["row"], []).append(row)
        batch, fault = None, ""
        if shown < most:
            try:
                batch = batch_at(run, place, rank)
            except (DataflowError, OSError, ValueError) as error:
                fault = f"<p class=odd>cannot be made again: {_text(error)}</p>"
        for number, pieces in own.items():
            shown += 1
            if shown <= most:
                yield f"<div class=row><h3>rank {rank}, row {number}</h3>{_named(pieces)}{fault}"
                words = words_of(run.dataset.sources[pieces[0]["source"]].transform)
                yield from () if batch is None else _values(batch, number, words)
                yield "</div>"
    yield "</div>"
    if shown > most:
        yield f"<p class=dim>{shown - most:,} more rows are not shown</p>"


def _named(pieces: Sequence[Mapping[str, Any]]) -> str:
    """The samples of a row, by key and place."""
    lines = []
    for piece in pieces[:20]:
        shard = piece["shard"].rpartition("/")[2]
        name = piece["key"] or f"sample {piece['sample']}"
        what = (
            "" if piece["piece_start"] is None else f", {piece['piece_length']} from {piece['piece_start']}"
        )
        again = ", comes a second time" if piece["repeat"] else ""
        where = f"{shard}, byte {piece['offset']:,}{what}{again}"
        lines.append(f"<p><b>{_text(name)}</b> <span class=dim>{_text(where)}</span></p>")
    if len(pieces) > 20:
        lines.append(f"<p class=dim>{len(pieces) - 20} more pieces</p>")
    return "".join(lines)


def _values(batch: Any, row: int, words: TokenWords) -> Iterator[str]:
    """Yield what a batch holds in a row, column by column."""
    columns = batch if isinstance(batch, Mapping) else {"batch": batch}
    for name, column in columns.items():
        try:
            if name == words.column or isinstance(column, PackedRows):
                mask = columns.get(words.mask) if name == words.column else None
                shown = _tokens(column, row, mask, words.decode if name == words.column else _numbers)
            else:
                shown = _value(_at(column, row))
        except (IndexError, KeyError, TypeError):
            continue  # a column that has no such row, as what a batch_transform adds
        yield f"<p class=dim>{_text(name)}</p>{shown}"


def _at(column: Any, row: int) -> Any:
    return next(islice(column.rows(), row, None)) if isinstance(column, Ragged) else column[row]


def _value(value: Any) -> str:
    """One value: a picture, text or numbers."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, np.ndarray):
        if (pixels := _pixels(value)) is not None:
            data = base64.b64encode(png_of(pixels)).decode()
            return f'<img alt="" src="data:image/png;base64,{data}">'
        flat = value.reshape(-1)
        more = f" ... {flat.size:,} in all" if flat.size > MOST_NUMBERS else ""
        kind = f"{value.dtype}{list(value.shape)}"
        return f"<pre>{_text(kind)} {_text(' '.join(map(str, flat[:MOST_NUMBERS].tolist())))}{more}</pre>"
    if isinstance(value, bytes):
        return f"<pre>{len(value):,} bytes {_text(value[:64].hex(' '))}</pre>"
    return f"<pre>{_text(value)}</pre>"


def _pixels(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The uint8 pixels [height, width, 3] of what looks like a picture; None: it does not."""
    if value.ndim != 3 or min(value.shape) < 1 or max(value.shape) > 4096:
        return None
    if value.shape[0] in (1, 3) and min(value.shape[1:]) >= 4:
        value = value.transpose(1, 2, 0)
    if value.shape[2] not in (1, 3) or min(value.shape[:2]) < 4:
        return None
    if value.dtype != np.uint8:  # normalised: from its least to its largest
        if value.dtype.kind != "f" or not np.isfinite(value).all():
            return None
        low, high = float(value.min()), float(value.max())
        value = ((value - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)
    return np.repeat(value, 3, axis=2) if value.shape[2] == 1 else value


def png_of(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG of pixels, uint8 [height, width, 3]."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 6)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _numbers(ids: Sequence[Any]) -> str:
    return " ".join(map(str, ids))


class TokenWords(NamedTuple):
    """The column of tokens, the one of those that are learned, and what makes text of them."""

    column: str = ""
    """The column of tokens; "": none is known."""
    mask: str = ""
    """The column that says which of them are trained."""
    decode: Callable[[Sequence[Any]], str] = _numbers
    """Text of tokens, where the transform has their tokenizer."""


def words_of(transform: Any) -> TokenWords:
    """Return how to tell tokens that a transform makes, as `Tokenize` and `ChatTemplate` do."""
    tokenizer: Any = getattr(getattr(transform, "file", None), "tokenizer", None)
    if not callable(getattr(tokenizer, "decode", None)):
        return TokenWords()
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return TokenWords(str(transform.into), str(getattr(transform, "mask", "")), decode)


def _tokens(column: Any, row: int, mask: Any, decode: Callable[[Sequence[Any]], str]) -> str:
    """The tokens of a row: pieces in two colours, padding and what is not trained dim."""
    values = column.tokens[row] if isinstance(column, PackedRows) else _at(column, row)
    tokens = values.tolist()
    ids = column.segment_ids[row].tolist() if isinstance(column, PackedRows) else [1] * len(tokens)
    trained = [True] * len(tokens) if mask is None else [bool(one) for one in _at(mask, row).tolist()]
    kinds = [(number, is_trained) for number, is_trained in zip(ids, trained, strict=True)]
    parts, begin = [], 0
    for at in range(1, len(tokens) + 1):
        if at == len(tokens) or kinds[at] != kinds[begin]:
            number, is_trained = kinds[begin]
            some = tokens[begin : min(at, begin + MOST_NUMBERS)]
            text = _text(decode(some) if number else _numbers(some))
            kind = f"{f'p{number % 2}' if number else 'p2'}{'' if is_trained else ' m'}"
            parts.append(f'<span class="{kind}">{text}</span>')
            begin = at
    share = f"<p class=dim>{sum(trained) / max(1, len(trained)):.0%} trained</p>" if mask is not None else ""
    return f"<pre>{' '.join(parts)}</pre>{share}"
