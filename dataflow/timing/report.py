"""What `sched.report()` returns and `dataflow doctor` prints: verdict, next action, and a table."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dataflow.timing.advice import Advice, advise, gain_text
from dataflow.timing.diagnosis import PARTS, Part, diagnose, rank_parts, same_windows
from dataflow.timing.records import LoaderTimes, RankRecord
from dataflow.timing.window_times import WindowTimes

NAMES: Mapping[Part, str] = {
    "compute": "forward, backward",
    "data": "data wait",
    "network": "exposed communication",
    "straggler": "straggler wait",
    "optimizer": "optimizer",
}


LOOP_NAMES: Mapping[Part, str] = {"compute": "all else", "data": "data wait"}
"""What is known of a loop without a schedule."""
_FILE_ORDER = (
    "this training takes its samples in the order of the files, which are mostly sorted by something: say "
    "DataLoader(..., shuffle=True), unless that order is meant (docs/order.md)"
)
_LOOP_NOTE = (
    "no GradSchedule here: all else is computing, communication, waiting for slow ranks and the optimizer "
    "(docs/profiling.md)"
)


@dataclass(frozen=True)
class Quantiles:
    """Of the windows, in seconds."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class RankReport:
    """Where one rank's time went."""

    rank: int
    host: str
    shares: Mapping[Part, float]
    """Of its time, in [0, 1]; "straggler" is its waiting for the slowest rank."""
    window_s: Quantiles
    seconds: Mapping[str, Quantiles]
    """Of what is measured: data_s, peers_s, compute_s, exposed_s, optimizer_s."""
    h2d_s: float | None
    """Copying to a device: 0 without one; None: not measured (it is in compute)."""
    loader: LoaderTimes


@dataclass(frozen=True)
class Report:
    """Where the time of training steps goes. `str` of it is the text; `to_json` the figures."""

    advice: Advice
    bound: Part
    shares: Mapping[Part, float]
    """Of the steps' time, in [0, 1], on the rank that was critical in each window; they add up to 1."""
    gains: Mapping[Part, float]
    """Times faster, at most, with that part gone."""
    critical_rank: int
    """The rank that most often kept the others waiting."""
    critical_share: float
    """In how many of the windows, in (0, 1]."""
    world_size: int
    windows: int
    """Windows looked at."""
    window_s: Quantiles
    microbatches: int
    """A window and rank, the most."""
    in_schedule: bool
    """False: a plain loop over a `DataLoader`. Windows are batches, and "compute" is all but data wait."""
    ranks: tuple[RankReport, ...]
    notes: tuple[str, ...]
    """What these figures do not tell."""

    @property
    def names(self) -> Mapping[Part, str]:
        """The parts that are told apart, in words."""
        return NAMES if self.in_schedule else LOOP_NAMES

    @property
    def headings(self) -> tuple[str, ...]:
        """Short names of these parts, for columns."""
        return PARTS if self.in_schedule else ("all else", "data")

    @property
    def facts(self) -> str:
        """What was looked at, in a line."""
        what = f"windows of up to {self.microbatches} microbatches" if self.in_schedule else "batches"
        return (
            f"{self.windows} {what} on {len(self.ranks)} of {self.world_size} ranks, "
            f"{self.window_s.p50 * 1e3:,.1f} ms each "
            f"({self.window_s.p10 * 1e3:,.1f} to {self.window_s.p90 * 1e3:,.1f})"
        )

    def is_critical(self, one: RankReport) -> bool:
        """Whether this rank of several most often kept the others waiting."""
        return one.rank == self.critical_rank and len(self.ranks) > 1

    def to_json(self) -> dict[str, Any]:
        """A JSON value; a gain without bound is null."""
        value = asdict(self)
        value["gains"] = {part: g if g < float("inf") else None for part, g in self.gains.items()}
        return value

    def __str__(self) -> str:
        """The text; its tables take at most 100 columns."""
        text = io.StringIO()
        self.show(Console(file=text, width=100))
        return text.getvalue().rstrip()

    def show(self, console: Console) -> None:
        """Print it."""
        console.print(self.advice.verdict, markup=False, style="bold", soft_wrap=True)
        console.print(str(self.advice).partition("\n")[2], markup=False, soft_wrap=True)
        console.print(self.facts)
        console.print(self._part_table())
        console.print(self._rank_table())
        for line in self.notes:
            console.print(line, markup=False, soft_wrap=True)

    def _part_table(self) -> Table:
        table = _table("where a step's time goes", "share", "with it gone")
        for part, name in self.names.items():
            gain = self.gains.get(part)
            table.add_row(name, f"{self.shares[part]:.1%}", "-" if gain is None else gain_text(gain))
        return table

    def _rank_table(self) -> Table:
        table = _table("rank", "host", "ms", *self.headings, "H2D", "loader")
        for one in self.ranks:
            mark = " *" if self.is_critical(one) else ""
            cells = [f"{one.shares[part]:.0%}" for part in self.names]
            table.add_row(
                f"{one.rank}{mark}",
                one.host,
                f"{one.window_s.p50 * 1e3:,.1f}",
                *cells,
                "-" if one.h2d_s is None else f"{one.h2d_s:.0f}",
                loader_text(one.loader),
            )
        return table


def report_of(records: Sequence[RankRecord]) -> Report:
    """The report of one or all ranks. `ValueError` without a window that all of them have."""
    rows = same_windows([one.windows for one in records])
    found = diagnose(rows)
    ranks = tuple(_rank_report(rows, number, one) for number, one in enumerate(records))
    return Report(
        advise(found, records),
        found.bound,
        {part: found.share(part) for part in PARTS},
        dict(found.gains),
        records[found.critical].rank,
        found.critical_share,
        records[0].world_size,
        len(rows),
        _quantiles([max(one.total_s for one in row) for row in rows]),
        max(one.microbatches for row in rows for one in row),
        records[0].in_schedule,
        ranks,
        tuple(_notes(records, rows)),
    )


def _rank_report(rows: Sequence[Sequence[WindowTimes]], number: int, record: RankRecord) -> RankReport:
    parts = rank_parts(rows, number)
    total = sum(parts.values()) or 1.0
    own = [row[number] for row in rows]
    names = ("data_s", "peers_s", "compute_s", "exposed_s", "optimizer_s")
    return RankReport(
        record.rank,
        record.host,
        {part: value / total for part, value in parts.items()},
        _quantiles([one.total_s for one in own]),
        {name: _quantiles([getattr(one, name) or 0.0 for one in own]) for name in names},
        0.0 if record.device == "cpu" else None,
        record.loader,
    )


def _notes(records: Sequence[RankRecord], rows: Sequence[Sequence[WindowTimes]]) -> list[str]:
    notes = _schedule_notes(records, rows) if records[0].in_schedule else [_LOOP_NOTE]
    if any(one.loader.file_order and (one.in_schedule or one.optimizer_steps) for one in records):
        notes.insert(0, _FILE_ORDER)
    if len(rows) < 10:
        notes.append(
            f"{len(rows)} {'windows' if records[0].in_schedule else 'batches'} are few: let it run longer"
        )
    return notes


def _schedule_notes(records: Sequence[RankRecord], rows: Sequence[Sequence[WindowTimes]]) -> list[str]:
    notes = []
    world_size = records[0].world_size
    if world_size > len(records):
        known = ", ".join(str(one.rank) for one in records)
        notes.append(f"of rank {known} only: waiting for slower ranks counts as communication")
    if any(one.exposed_s is None for row in rows for one in row):
        notes.append(
            "communication is not told apart from computing here (it is with DistributedDataParallel)"
        )
    if any(one.device != "cpu" for one in records):
        notes.append(
            f"on {records[0].device} computing is as the host sees it; copies to the device are in it"
        )
    if records[0].mode:
        notes.append(f"controller: {records[0].mode}")
    return notes


def _quantiles(values: Sequence[float]) -> Quantiles:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Quantiles(*(ordered[round(last * share)] for share in (0.1, 0.5, 0.9)))


def loader_text(loader: LoaderTimes) -> str:
    """How busy its threads were, or how long it was waited for."""
    if loader.read_busy is not None and loader.build_busy is not None:
        return f"read {loader.read_busy:.0%}, decode {loader.build_busy:.0%}"
    return "-" if loader.stall_share is None else f"waited {loader.stall_share:.0%}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table
