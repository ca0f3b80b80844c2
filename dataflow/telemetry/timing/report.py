"""The report of `sched.report()` and `dataflow doctor`: verdict, next action, tables; or a trace."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataflow.telemetry.timing.diagnosis import Diagnosis, diagnose, gain_text
from dataflow.telemetry.timing.records import LoaderTimes, StepRecord, StepTimes, TraceEvent
from dataflow.telemetry.timing.shares import PARTS, Part, rank_parts, same_steps, shares_of
from sharding.printable import printable

NAMES: Mapping[Part, str] = {
    "compute": "forward, backward",
    "data": "data wait",
    "network": "exposed communication",
    "straggler": "straggler wait",
    "optimizer": "optimizer",
}


LOOP_NAMES: Mapping[Part, str] = {"compute": "all else", "data": "data wait"}
"""Names for a loop without a schedule."""
_FILE_ORDER = (
    "this training takes its samples in the order of the files, which are mostly sorted by something: say "
    "DataLoader(..., shuffle=True), unless that order is meant (docs/guide/order.md)"
)
_LOOP_NOTE = (
    "no GradSchedule here: all else is computing, communication, waiting for slow ranks and the optimizer "
    "(docs/guide/profiling.md)"
)


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of the times of windows, in seconds."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The shares of one rank's time."""

    rank: int
    host: str
    shares: Mapping[Part, float]
    """Shares of its time, in [0, 1]; "straggler" is its waiting for the slowest rank."""
    window_s: Quantiles
    seconds: Mapping[str, Quantiles]
    """Quantiles of what is measured: data_s, peers_s, compute_s, exposed_s, optimizer_s."""
    h2d_s: float | None
    """Copying to a device: 0 without one; None: not measured (it is in compute)."""
    loader: LoaderTimes


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report of where the time of training steps goes. `str` of it is the text; `to_json` the figures."""

    advice: Diagnosis
    bound: Part
    shares: Mapping[Part, float]
    """Shares of the steps' time, in [0, 1], on the rank that was critical in each window; they add up to
    1."""
    gains: Mapping[Part, float]
    """Times faster, at most, with that part gone."""
    critical_rank: int
    """The rank that most often kept the others waiting."""
    critical_share: float
    """In how many of the windows, in (0, 1]."""
    world_size: int
    windows: int
    """Number of windows looked at."""
    window_s: Quantiles
    microbatches: int
    """A window and rank, the most."""
    in_schedule: bool
    """False: a plain loop over a `DataLoader`. Windows are batches, and "compute" is all but data wait."""
    ranks: tuple[RankReport, ...]
    notes: tuple[str, ...]
    """Notes on what these figures do not tell."""

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
        """Return what was looked at, in a line."""
        what = f"windows of up to {self.microbatches} microbatches" if self.in_schedule else "batches"
        return (
            f"{self.windows} {what} on {len(self.ranks)} of {self.world_size} ranks, "
            f"{self.window_s.p50 * 1e3:,.1f} ms each in the median "
            f"({self.window_s.p10 * 1e3:,.1f} to {self.window_s.p90 * 1e3:,.1f})"
        )

    def is_critical(self, rank: RankReport) -> bool:
        """Return whether this rank of several most often kept the others waiting."""
        return rank.rank == self.critical_rank and len(self.ranks) > 1

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
        """Print the report on a console."""
        console.print(printable(self.advice.verdict), markup=False, style="bold", soft_wrap=True)
        console.print(printable(str(self.advice).partition("\n")[2]), markup=False, soft_wrap=True)
        console.print(self.facts)
        for rows in (self.part_rows, self.rank_rows):
            console.print(_table(rows))
        for line in self.notes:
            console.print(printable(line), markup=False, soft_wrap=True)

    @property
    def part_rows(self) -> list[tuple[str, ...]]:
        """The shares as text, the headings first."""
        rows: list[tuple[str, ...]] = [("where a step's time goes", "share", "with it gone")]
        for part, name in self.names.items():
            gain = self.gains.get(part)
            rows.append((name, f"{self.shares[part]:.1%}", "-" if gain is None else gain_text(gain)))
        return rows

    @property
    def rank_rows(self) -> list[tuple[str, ...]]:
        """Each rank's own view as text, the headings first."""
        rows: list[tuple[str, ...]] = [("rank", "host", "ms", *self.headings, "H2D", "loader")]
        for rank in self.ranks:
            mark = " *" if self.is_critical(rank) else ""
            shares = (f"{rank.shares[part]:.0%}" for part in self.names)
            copying = "-" if rank.h2d_s is None else f"{rank.h2d_s:.0f}"
            milliseconds = f"{rank.window_s.p50 * 1e3:,.1f}"
            rows.append(
                (f"{rank.rank}{mark}", rank.host, milliseconds, *shares, copying, loader_text(rank.loader))
            )
        return rows


def report_of(records: Sequence[StepRecord]) -> Report:
    """The report of one or all ranks. `ValueError` without a window that all of them have."""
    rows = same_steps([record.windows for record in records])
    shares = shares_of(rows)
    return Report(
        advice=diagnose(shares, records),
        bound=shares.bound,
        shares={part: shares.share(part) for part in PARTS},
        gains=dict(shares.gains),
        critical_rank=records[shares.critical].rank,
        critical_share=shares.critical_share,
        world_size=records[0].world_size,
        windows=len(rows),
        window_s=_quantiles([max(step.total_s for step in row) for row in rows]),
        microbatches=max(step.microbatches for row in rows for step in row),
        in_schedule=records[0].in_schedule,
        ranks=tuple(_rank_report(rows, number, record) for number, record in enumerate(records)),
        notes=tuple(_notes(records, rows)),
    )


def _rank_report(rows: Sequence[Sequence[StepTimes]], number: int, record: StepRecord) -> RankReport:
    parts = rank_parts(rows, number)
    total = sum(parts.values()) or 1.0
    steps = [row[number] for row in rows]
    names = ("data_s", "peers_s", "compute_s", "exposed_s", "optimizer_s")
    return RankReport(
        rank=record.rank,
        host=record.host,
        shares={part: value / total for part, value in parts.items()},
        window_s=_quantiles([step.total_s for step in steps]),
        seconds={name: _quantiles([getattr(step, name) or 0.0 for step in steps]) for name in names},
        h2d_s=0.0 if record.device == "cpu" else None,
        loader=record.loader,
    )


def _notes(records: Sequence[StepRecord], rows: Sequence[Sequence[StepTimes]]) -> list[str]:
    notes = _schedule_notes(records, rows) if records[0].in_schedule else [_LOOP_NOTE]
    if any(record.loader.file_order and (record.in_schedule or record.optimizer_steps) for record in records):
        notes.insert(0, _FILE_ORDER)
    if len(rows) < 10:
        notes.append(
            f"{len(rows)} {'windows' if records[0].in_schedule else 'batches'} are few: let it run longer"
        )
    return notes


def _schedule_notes(records: Sequence[StepRecord], rows: Sequence[Sequence[StepTimes]]) -> list[str]:
    notes = []
    world_size = records[0].world_size
    if world_size > len(records):
        ranks = ", ".join(str(record.rank) for record in records)
        notes.append(f"of rank {ranks} only: waiting for slower ranks counts as communication")
    if any(step.exposed_s is None for row in rows for step in row):
        notes.append(
            "communication is not told apart from computing here (it is with DistributedDataParallel)"
        )
    if any(record.device != "cpu" for record in records):
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
    """Return how busy its threads were, or how long it was waited for."""
    if loader.read_busy is not None and loader.build_busy is not None:
        return f"read {loader.read_busy:.0%}, decode {loader.build_busy:.0%}"
    return "-" if loader.stall_share is None else f"waited {loader.stall_share:.0%}"


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in rows[0]:
        table.add_column(name, justify="right" if table.columns else "left")
    for row in rows[1:]:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


# ---- the trace --------------------------------------------------------------------------------------


_LANES = {"window": 0, "phase": 1, "wait": 2}


def trace_of(ranks: Mapping[int, Sequence[TraceEvent]]) -> dict[str, Any]:
    """The ranks' events for chrome://tracing, Perfetto, or HTA beside the profiler's traces: a JSON value.

    A process a rank, a lane for windows, phases and waits. Times are microseconds since the first event of
    all ranks; between machines they are as good as their clocks agree.
    """
    start = min((event.began_s for events in ranks.values() for event in events), default=0.0)
    return {"traceEvents": [*_lane_names(ranks), *_trace_events(ranks, start)], "displayTimeUnit": "ms"}


def write_trace(ranks: Mapping[int, Sequence[TraceEvent]], path: str) -> None:
    """Write the trace of the ranks to a file."""
    with open(path, "w") as file:
        json.dump(trace_of(ranks), file)


def _lane_names(ranks: Mapping[int, Sequence[TraceEvent]]) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for lane, number in _LANES.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}


def _trace_events(ranks: Mapping[int, Sequence[TraceEvent]], start: float) -> Iterator[dict[str, Any]]:
    for rank, events in ranks.items():
        for event in events:
            yield {
                "ph": "X",
                "name": event.name,
                "cat": event.lane,
                "pid": rank,
                "tid": _LANES[event.lane],
                "ts": (event.began_s - start) * 1e6,
                "dur": (event.ended_s - event.began_s) * 1e6,
            }
