"""A view of trainings as text: what a terminal shows, and the same words for the page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dataflow.tables import bytes_text, number_text
from dataflow.telemetry.timing.diagnosis import gain_text
from dataflow.tools.top.view import DecisionRow, LoaderRow, TopView, TrainingView, duration_text
from sharding.printable import printable_name

HEADINGS = (
    "rank",
    "loader",
    "epoch",
    "batch",
    "samples/s",
    "waiting",
    "ready",
    "read/s",
    "busy: read, build",
    "cached",
    "memory",
    "",
)
"""Headings of `cells_of`."""
_LEFT_OUT = (10, 9, 2, 7, 8)
"""Columns that a terminal leaves out, in this order, until the others have room."""
_NOTES = len(HEADINGS) - 1
"""The last column, which takes several lines where it is long."""
_MOST_ROWS = 24
PART_NAMES = {
    "data": "waiting for data",
    "compute": "training",
    "network": "communication",
    "straggler": "slower ranks",
    "optimizer": "optimizer",
}


def cells_of(row: LoaderRow) -> tuple[str, ...]:
    """Return what is said of a loader, as text under `HEADINGS`; names are made printable."""
    batches = "" if row.batches is None else f"/{row.batches:,}"
    rate = "-"
    if row.samples_per_s is not None:
        rate = number_text(row.samples_per_s)
    elif row.batches_per_s is not None:
        rate = f"{number_text(row.batches_per_s)} batches"
    busy = [share(value) for value in (row.read_busy, row.build_busy)]
    memory = f"{bytes_text(row.memory_bytes)} of {bytes_text(row.memory_limit)}" if row.memory_limit else "-"
    notes = [
        row.role if row.role != "train" else "",
        row.state if row.state != "running" else "",
        f"{row.faults:,} faults" if row.faults else "",
        f"{row.skipped:,} skipped" if row.skipped else "",
        row.error,
    ]
    cells = (
        str(row.rank),
        row.name,
        "-" if row.epoch is None else f"{row.epoch:,}",
        f"{row.batch:,}{batches}",
        rate,
        share(row.waiting),
        f"{row.ready:,} of {row.depth:,}",
        "-" if row.read_bytes_per_s is None else bytes_text(row.read_bytes_per_s),
        "-" if busy == ["-", "-"] else ", ".join(busy),
        share(row.cache_hits),
        memory,
        ", ".join(filter(None, notes)),
    )
    return tuple(map(printable_name, cells))


def share(value: float | None) -> str:
    """Return a share as text: "37%"; "-" where it is not known."""
    return "-" if value is None else f"{value:.0%}"


def title_of(view: TrainingView) -> str:
    """Return which training it is, and its state, in a line."""
    ranks = f"{view.ranks} of {view.world_size} ranks" if view.world_size > 1 else "1 rank"
    hosts = ", ".join(view.hosts[:3]) + (f" and {len(view.hosts) - 3} more" if len(view.hosts) > 3 else "")
    return printable_name(f"{view.program or 'a training'}: {ranks} on {hosts}, {view.state_text}")


def answer_of(view: TrainingView) -> list[str]:
    """Return what holds a training up, and what to do, as lines."""
    if not view.verdict:
        return ["what holds it up shows after two readings in which it takes batches", ""]
    gain = f" ({gain_text(view.gain)})" if view.gain is not None else ""
    return [printable_name(view.verdict), printable_name(f"next: {view.action}{gain}")]


def decision_cells(row: DecisionRow, now: float) -> tuple[str, str, str]:
    """Return when, what of whom, and why, as text."""
    value = f"{row.value:,}" if isinstance(row.value, int) else str(row.value)
    if row.what == "in_flight_limit" and isinstance(row.value, int):
        value = bytes_text(row.value) if row.value else "none"
    ranks = f"rank {', '.join(map(str, row.ranks[:4]))}{', ...' * (len(row.ranks) > 4)}"
    what = f"{row.what.replace('_', ' ')} {value}: {row.of}, {ranks}"
    return f"{duration_text(now - row.at)} ago", printable_name(what), printable_name(row.reason)


def screen_of(view: TopView, width: int) -> RenderableType:
    """Return the view for a terminal of so many columns."""
    return Group(*_parts(view, width))


def _parts(view: TopView, width: int) -> Iterator[RenderableType]:
    if view.fault:
        yield Text(f"{view.fault}; what follows is older", "red")
    for training in view.trainings:
        yield Text(title_of(training), "bold")
        verdict, action = answer_of(training)
        where = f"bottleneck: {training.where}; " if training.where else ""
        style = "bold green" if training.where == "training" else "bold yellow" if training.where else "dim"
        yield Text(f"{where}{verdict}", style)
        yield from [Text(action)] if action else []
        if training.shares:
            parts = (f"{PART_NAMES.get(part, part)} {value:.0%}" for part, value in training.shares.items())
            yield Text(f"a step's time: {', '.join(parts)}", "dim")
        yield _table(training.loaders, width)
        if training.decisions:
            yield _decision_table(training.decisions, view.at)
        yield Text("")
    yield from (Text(printable_name(note), "dim") for note in view.notes)
    yield Text(time.strftime("%H:%M:%S", time.localtime(view.at)), "dim")


def _table(rows: Sequence[LoaderRow], width: int) -> Table:
    shown = rows
    if len(rows) > _MOST_ROWS:  # those that wait most
        shown = sorted(rows, key=lambda row: -(row.waiting or 0.0))[:_MOST_ROWS]
    cells = [cells_of(row) for row in shown]
    widths = [max(map(cell_len, texts)) + 2 for texts in zip(HEADINGS, *cells, strict=True)]
    widths[_NOTES] = min(widths[_NOTES], 20)
    columns = list(range(len(HEADINGS)))
    for number in _LEFT_OUT:
        if sum(widths[each] for each in columns) > width:
            columns.remove(number)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number in columns:
        left = number in (1, _NOTES)
        table.add_column(HEADINGS[number], justify="left" if left else "right", no_wrap=number != _NOTES)
    for texts in cells:
        table.add_row(*(Text(texts[number]) for number in columns))
    if len(shown) < len(rows):
        table.add_row("", Text(f"and {len(rows) - len(shown):,} more that wait less", "dim"))
    return table


def _decision_table(rows: Sequence[DecisionRow], now: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column()
    table.add_column(style="dim")
    for row in rows:
        table.add_row(*map(Text, decision_cells(row, now)))
    return table
