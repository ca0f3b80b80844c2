"""Reports of commands, as text on a terminal, as JSON and as a page or picture: one writer for all commands.

Commands turn their results into a `Page` of sentences, tables and drawings; nothing here knows what a figure
means. Drawings are made by matplotlib, from the extra `plot`, which is imported only when one is asked for.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from dataflow.limits import machine_memory
from dataflow.tables import bytes_text as bytes_text
from dataflow.tools.terminal.options import ReportFiles, figure_class
from sharding.printable import printable, printable_name

_HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ max-width: 68em; margin: 2em auto }} svg {{ max-width: 100%; height: auto }}</style>
</head><body><h1>{title}</h1>
<pre>{text}</pre>
{drawings}
</body></html>
"""
_HTML_COLUMNS = 110


@dataclass(frozen=True)
class Sentence:
    """A line of its own."""

    text: str
    style: str = ""
    """A style of rich, such as "bold", "dim" or "green"."""
    indent: int = 0
    """Columns on a terminal; lines that are wrapped keep it."""
    whole: bool = False
    """Never wrapped: what is copied, such as a path."""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings."""

    columns: Sequence[str]
    """Headings; (): rows are a name and what is said of it."""
    rows: Sequence[Sequence[str]]
    """Each as long as `columns`, or shorter."""
    left: int = 1
    """Columns, from the first, that are aligned left."""


@dataclass(frozen=True)
class Drawing:
    """A drawing as a figure of matplotlib."""

    width: float
    """Width in inches, as `height`."""
    height: float
    draw: Callable[[Any], None]
    """Draws into an empty `matplotlib.figure.Figure`."""

    def figure(self) -> Any:
        """The drawn figure. `ImportError`, which names the extra, without matplotlib."""
        figure = figure_class()(figsize=(self.width, self.height), layout="constrained")
        self.draw(figure)
        return figure


Part = str | Sentence | Table | Drawing


@dataclass(frozen=True, kw_only=True)
class ReportSummary:
    """The meaning of a report in one sentence, and what to do in another."""

    text: str
    advice: str
    answer: Literal["yes", "no", "unknown"] | None = None
    """To what was asked for by --need; None: nothing was."""
    margin: float | None = None
    """The measured rate over the needed one."""

    def to_json(self) -> dict[str, Any]:
        """Return both sentences as JSON types, and the answer where something was asked."""
        sentences = {"verdict": self.text, "advice": self.advice}
        return sentences | ({"answer": self.answer, "margin": self.margin} if self.answer else {})


_STYLES = {None: "bold", "yes": "bold green", "no": "bold red", "unknown": "bold yellow"}


@dataclass(frozen=True)
class Page:
    """All that a command tells."""

    title: str
    figures: Mapping[str, Any]
    """All figures, as JSON types."""
    parts: Sequence[Part] = field(default=())
    """In order. Drawings are shown on pages and pictures only."""
    _: KW_ONLY
    verdict: ReportSummary | None = None
    rows: Sequence[Mapping[str, Any]] = field(default=())
    """The measurements of the CSV file: a row each, all with the same columns."""

    @property
    def told(self) -> Sequence[Part]:
        """The verdict, what to do, and the parts."""
        if self.verdict is None:
            return self.parts
        return (
            Sentence(self.verdict.text, _STYLES[self.verdict.answer]),
            f"Next: {self.verdict.advice}",
            "",
            *self.parts,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict and all figures."""
        return {**(self.verdict.to_json() if self.verdict else {}), **self.figures}


def publish(page: Page, files: ReportFiles) -> None:
    """Print a page, unless a file is to be printed, and `save` it."""
    try:
        if "-" not in (files.json_path, files.csv_path):
            show(page.told)
    finally:  # also where what reads the text ends first, such as head
        save(page, files.json_path, files.picture, files.csv_path)


def fail_unless_yes(page: Page) -> None:
    """End the command with status 1 if the answer of a page to --need is not yes."""
    if page.verdict is None or page.verdict.answer != "yes":
        raise click.exceptions.Exit(1)


def save(
    page: Page, json_path: str | None = None, picture: str | None = None, csv_path: str | None = None
) -> None:
    """Write the files that are named.

    Args:
        page: what to tell.
        json_path: file for the verdict and the figures; "-" prints them.
        picture: ".html" for the page, another ending of matplotlib's for its drawing.
        csv_path: file for the rows; "-" prints them.
    """
    _write(json_path, lambda: json.dumps(page.to_json(), indent=1) + "\n")
    _write(csv_path, lambda: csv_of(page.rows))
    if picture is not None and picture.endswith(".html"):
        Path(picture).write_text(html_of(page))
    elif picture is not None:
        for part in page.parts:
            if isinstance(part, Drawing):
                figure = part.figure()
                if page.verdict is not None:
                    figure.suptitle(fill(page.verdict.text, int(10 * part.width)), fontsize="medium")
                figure.savefig(picture, dpi=120)


def _write(path: str | None, text: Callable[[], str]) -> None:
    if path == "-":
        print(text(), end="")
    elif path is not None:
        Path(path).write_text(text())


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows under the names of their columns; what is not known is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def show(parts: Sequence[Part], console: Console | None = None) -> None:
    """Print sentences and tables on a console."""
    console = console or Console(highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(printable(part), markup=False)
        elif isinstance(part, Sentence):
            text = Text(printable(part.text), part.style)
            indented = Padding(text, (0, 0, 0, part.indent)) if part.indent else text
            console.print(indented, soft_wrap=part.whole)
        elif isinstance(part, Table):
            console.print(_on_terminal(part))


def _on_terminal(part: Table) -> RichTable:
    dense = len(part.columns) > 8  # 80 columns
    table = RichTable(
        box=None,
        padding=(0, 1 if dense else 2, 0, 0),
        header_style="bold",
        show_header=bool(part.columns),
    )
    if not part.columns:
        table.add_column(style="bold")
        table.add_column()
    for number, name in enumerate(part.columns):
        table.add_column(
            Text(printable_name(name)), justify="left" if number < part.left else "right", no_wrap=dense
        )
    for row in part.rows:
        table.add_row(*(Text(printable_name(cell)) for cell in row))
    return table


def html_of(page: Page) -> str:
    """A page of its own, without links: it can be sent to somebody."""
    console = Console(record=True, file=io.StringIO(), width=_HTML_COLUMNS, highlight=False)
    show([part for part in page.told if not isinstance(part, Drawing)], console)
    return _HTML.format(
        title=escape(page.title),
        text=console.export_html(inline_styles=True, code_format="{code}"),
        drawings="\n".join(_svg(part) for part in page.told if isinstance(part, Drawing)),
    )


def _svg(drawing: Drawing) -> str:
    drawn = io.StringIO()
    drawing.figure().savefig(drawn, format="svg")
    svg = drawn.getvalue()
    return svg[svg.index("<svg") :]


def machine() -> dict[str, Any]:
    """Return what figures are to be read with, as JSON types: cores of this process, memory, the system."""
    return {"cores": usable_cores(), "memory_bytes": machine_memory(), "system": platform.platform()}


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def optional(value: float | None, form: str) -> str:
    """A number by its format, "-" where it is not known."""
    return "-" if value is None else format(value, form)
