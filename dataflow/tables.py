"""Show values to people: a table of rows as text or HTML, a value on one line, and numbers with units.

Everything here is for `print`, `repr` and notebooks. It reads nothing and never raises.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from sharding.printable import listed, printable

Row = tuple[str, str]
"""The name of a row, and its text."""

_WIDTH = 100


class Shown:
    """A value that `repr` shows on one line, and a notebook as a table.

    Both read nothing and never raise, also where the constructor has failed half-way.
    """

    def _shown(self) -> Iterable[Row]:
        """Yield the facts about the value, the most important first."""
        return ()

    def _line(self) -> Iterable[str]:
        """Yield what stands in the parentheses of `repr`."""
        return (f"{name} {text}" for name, text in self._shown() if text)

    def __repr__(self) -> str:
        return described(self, lambda: one_line(type(self).__name__, self._line()))

    def _repr_html_(self) -> str:
        return described(self, lambda: html_table(type(self).__name__, self._shown()), escape)


def described(value: object, describe: Callable[[], str], to_text: Callable[[str], str] = str) -> str:
    """Call `describe`; where it raises, as on a value whose constructor did, the name of the class."""
    try:
        return describe()
    except Exception:
        return to_text(f"<{type(value).__name__}>")


def text_table(title: str, rows: Iterable[Row]) -> str:
    """Return the title and a line for each row; a text that is longer than a line goes on below itself."""
    entries = list(rows)
    indent = " " * (max((len(name) for name, _ in entries), default=0) + 4)
    lines = [
        textwrap.fill(text, _WIDTH, initial_indent=f"  {name}".ljust(len(indent)), subsequent_indent=indent)
        for name, text in entries
        if text
    ]
    return printable("\n".join([title, *lines]))


def html_table(title: str, rows: Iterable[Row]) -> str:
    """Return the same for a notebook, title and rows escaped."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in rows
        if text
    )
    caption = f'<caption style="text-align:left"><b>{escape(title)}</b></caption>'
    return f"<table>{caption}<tbody>{cells}</tbody></table>"


class ColumnTable:
    """A schema that `print`, `repr` and notebooks show as a table of its columns."""

    def __repr__(self) -> str:
        return described(self, lambda: _text_columns(_schema_rows(self)))

    def _repr_html_(self) -> str:
        return described(self, lambda: _html_columns(_schema_rows(self)), escape)


def _text_columns(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells side by side, the first of them as heads."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    return "\n".join(padded)


def _html_columns(rows: Iterable[Sequence[str]]) -> str:
    """Return the same for a notebook, escaped."""
    head, *others = ([escape(cell) for cell in row] for row in rows)
    lines = ["".join(f'<td style="text-align:left">{cell}</td>' for cell in row) for row in others]
    heads = "".join(f'<th style="text-align:left">{cell}</th>' for cell in head)
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{'</tr><tr>'.join(lines)}</tr></tbody></table>"


def _schema_rows(schema: Any) -> Iterator[Sequence[str]]:
    """Yield heads, and of each column name, type, shape or elements, whether it may be missing, a decoder."""
    from sharding.blocks import spec_text

    yield "column", "type", "shape", "missing", "decode=, such as"
    for name, spec in schema.items():
        low, high = spec.size_range or (None, None)
        sizes = "" if low is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"
        shape = str([*spec.shape]) if spec.shape else sizes
        kind = "see schema.conflicts" if name in schema.conflicts else spec_text(replace(spec, shape=()))
        yield name, kind, shape, "maybe" if spec.optional else "", _decoder_of(name, spec)


def _decoder_of(name: str, spec: Any) -> str:
    """Return what `decode=` may have for a column; "": it is delivered as it is stored."""
    from sharding.formats.extensions import rule_of_extension

    is_bytes = spec.kind in ("bytes", "bytes_list")
    what = rule_of_extension(name) if is_bytes else spec.kind if spec.kind in ("text", "json") else None
    named = {"image": "Image(size=224)", "list": "Pad()", "fixed": ""}
    what = "image" if spec.feature_type == "Image" else what
    rule = named.get(what or spec.kind, f'"{what}"' if what else "")
    if not rule and is_bytes:
        rule = "a function of bytes"
    return f"Optional({rule}{', ' if rule else ''}mask=True)" if spec.optional else rule


def one_line(name: str, parts: Iterable[str]) -> str:
    """Return a value for `repr`: its class, and in parentheses its parts; empty ones are left out."""
    return printable(" ".join(f"{name}({', '.join(part for part in parts if part)})".split()))


def bytes_text(count: float) -> str:
    """Return bytes for people: "117 kB", "1.4 GB"; units are powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def number_text(count: float) -> str:
    """Return a number for people: "12,800", "16.3"."""
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.3g}"


def counted(count: int, noun: str) -> str:
    """Return a number of things: "1 batch", "4 batches"."""
    plural = noun if count == 1 else f"{noun}es" if noun.endswith(("ch", "ss")) else f"{noun}s"
    return f"{count:,} {plural}"


def listed_shortly(names: Iterable[str], most: int = 12) -> str:
    """Return names one after the other, at most so many."""
    every = [*names]
    more = [f"and {len(every) - most:,} more"] if len(every) > most else []
    return listed([*every[:most], *more])


def builders_text(kind: str, number: int) -> str:
    """Return who builds batches, and how many: "4 worker processes"."""
    names = {"process": "worker process", "ray": "Ray actor"}
    return counted(number, names.get(kind, kind)) if number else "this thread"


def with_reason(text: str, reason: str) -> str:
    """Return a decision and the reason for it."""
    return f"{text}: {reason}" if reason else text
