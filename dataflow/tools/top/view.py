"""The state of trainings: rates between two readings, what holds them up, and their last decisions.

Pure functions of records, but for `Follower`, which keeps the readings before. A rate is the difference of
two pages of a process. What holds a training up is what `dataflow doctor` would say of the same seconds
(`steps`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dataflow.telemetry.status.reading import boot_id
from dataflow.telemetry.status.record import LoaderRecord, StatusDecision, TrainingRecord
from dataflow.telemetry.timing.records import LoaderTimes
from dataflow.tools.top.sources import FigureSource, Reading
from dataflow.tools.top.steps import (
    MOST_PAGES,
    Key,
    RecentSteps,
    StatusHistory,
    growth,
    key_of,
    numbers_in,
    same_loader,
)

_DECISIONS = 8
_QUIET_S = 12.0
"""Seconds without a batch that are worth a word, where batches come more often: pages may be 5 s apart."""


@dataclass(frozen=True, kw_only=True)
class LoaderRow:
    """A loader on one rank. Rates are of the time between the last two pages; None: not known."""

    rank: int
    host: str
    name: str
    role: str
    state: str
    epoch: int | None
    batch: int
    batches: int | None
    """Batches of the loop."""
    samples_per_s: float | None
    batches_per_s: float | None
    waiting: float | None
    """Share of the time that training waited for it, in [0, 1]."""
    ready: int
    depth: int
    """Batches that are ready, and those kept ready or in work."""
    read_bytes_per_s: float | None
    delivered_bytes_per_s: float | None
    read_busy: float | None
    build_busy: float | None
    """Shares of the time that those who read, and who decode and transform, were busy."""
    cache_hits: float | None
    """Share of the reads that a cache answered; None: there is none."""
    memory_bytes: int
    memory_limit: int
    faults: int
    """Retries, time-outs, throttling and wrong checksums since it was made."""
    skipped: int
    error: str


@dataclass(frozen=True, kw_only=True)
class DecisionRow:
    """A decision, by some ranks."""

    at: float
    """Seconds since 1970."""
    ranks: tuple[int, ...]
    of: str
    """The loader or schedule."""
    what: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class TrainingView:
    """A training: the ranks whose pages were read."""

    program: str
    job: str
    hosts: tuple[str, ...]
    ranks: int
    world_size: int
    state: str
    """"running", "quiet" (no batch for some time), "ended" or "died"."""
    state_text: str
    began_at: float
    samples_per_s: float | None
    """Samples a second of all ranks that were read, in training."""
    batches_per_s: float | None
    """Batches, where samples are not counted."""
    verdict: str
    """The part that holds it up, in words; "": not measured yet."""
    where: str
    """The part that does: "store", "decoding and transforms", "hand-over", "training" and others."""
    action: str
    gain: float | None
    """Times faster at most."""
    shares: Mapping[str, float]
    """Shares of the steps' time, by part."""
    loaders: tuple[LoaderRow, ...]
    decisions: tuple[DecisionRow, ...]

    @property
    def is_over(self) -> bool:
        """Return whether no process of it runs."""
        return self.state in ("ended", "died")


@dataclass(frozen=True, kw_only=True)
class TopView:
    """All trainings of a source at one time."""

    at: float
    trainings: tuple[TrainingView, ...]
    notes: tuple[str, ...] = ()
    fault: str = ""
    """The reason why the last reading failed; the trainings are as they were before."""

    @property
    def runs(self) -> bool:
        """Return whether a training runs."""
        return any(not training.is_over for training in self.trainings)

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return asdict(self)


class Follower:
    """Follows a source: keeps the pages before, so that each view has rates. Thread-safe.

    Args:
        source: where pages are read.
        now: seconds on a clock that only goes forward.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        source: FigureSource,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._source, self._now, self._wall = source, now, wall
        self._lock = threading.Lock()  # guards what follows
        self._pages: dict[Key, StatusHistory] = {}
        self._steps: dict[str, RecentSteps] = {}
        self._view = TopView(at=0.0, trainings=())
        self._looked_s = -math.inf
        self.reading = Reading(())
        """The newest reading."""

    def view(self, *, at_most_each_s: float = 0.0) -> TopView:
        """Read, and return the view; the one before, if that was made a moment ago or nothing can be read."""
        with self._lock:
            if self._now() - self._looked_s >= at_most_each_s:
                self._view = self._look()
                self._looked_s = self._now()
            return self._view

    @property
    def has_rates(self) -> bool:
        """Return whether there are two pages of each process of the trainings that take batches."""
        running = {training.job for training in self._view.trainings if training.state == "running"}
        alive = [pages for pages in self._pages.values() if pages.now.is_alive and pages.now.job in running]
        return all(len(pages.records) > 1 for pages in alive)

    def nothing(self) -> str:
        """Say why no training runs."""
        return self._source.nothing(self.reading)

    def _look(self) -> TopView:
        self.reading = reading = self._source.read()
        if reading.fault:
            return replace(self._view, at=self._wall(), fault=reading.fault)
        alive = {page.job for page in reading.records if page.is_alive}
        records = [page for page in reading.records if page.job in alive or key_of(page) in self._pages]
        self._pages = {key_of(page): self._with_newest(page) for page in records}
        jobs: dict[str, list[StatusHistory]] = {}
        for pages in self._pages.values():
            jobs.setdefault(pages.now.job, []).append(pages)
        self._steps = {job: self._steps.get(job) or RecentSteps() for job in jobs}
        views = [self._training(job, processes) for job, processes in jobs.items()]
        return TopView(
            at=self._wall(),
            trainings=tuple(sorted(views, key=lambda view: (view.is_over, not view.verdict, view.began_at))),
            notes=tuple(reading.notes),
        )

    def _with_newest(self, record: TrainingRecord) -> StatusHistory:
        old = self._pages.get(key_of(record))
        if old is None:
            return StatusHistory((record,), self._now())
        if record.written_at == old.now.written_at:
            return old._replace(records=(*old.records[:-1], record))
        return StatusHistory((*old.records[1 - MOST_PAGES :], record), self._now())

    def _training(self, job: str, processes: Sequence[StatusHistory]) -> TrainingView:
        processes = sorted(processes, key=lambda pages: pages.now.rank)
        first = processes[0].now
        rows = tuple(row for pages in processes for row in loader_rows(pages))
        self._steps[job].add(processes)
        state, text = self._state(processes)
        return TrainingView(
            program=first.program,
            job=job,
            hosts=tuple(dict.fromkeys(pages.now.host for pages in processes)),
            ranks=len(processes),
            world_size=first.world_size,
            state=state,
            state_text=text,
            began_at=first.began_at,
            samples_per_s=_sum(row.samples_per_s for row in rows if row.role == "train"),
            batches_per_s=_sum(row.batches_per_s for row in rows if row.role == "train"),
            **self._steps[job].answer(),
            loaders=rows,
            decisions=tuple(_decisions(processes)),
        )

    def _state(self, processes: Sequence[StatusHistory]) -> tuple[str, str]:
        gone = [pages.now for pages in processes if not pages.now.is_alive]
        died = [record for record in gone if record.state == "died"]
        if len(gone) == len(processes):
            last = max(gone, key=lambda record: record.written_at)
            state = "died" if died else "ended"
            error = next((record.error for record in gone if record.error), "")
            how = "died without a word (was it killed?)" if died else "ended"
            how += f" with {error}," if error else ""
            ago = duration_text(self._wall() - last.written_at)
            return state, f"{how} {ago} ago; these are its last figures"
        if gone:
            ranks = ", ".join(str(record.rank) for record in gone)
            how = "died" if died else "ended"
            return "running", f"running, but rank {ranks} {how}"
        quiet_s = min(self._now() - pages.seen_s for pages in processes)
        if all(pages.now.boot_id == boot_id() for pages in processes):  # one clock
            last_at = max(pages.now.last_batch_at for pages in processes)
            quiet_s = max(quiet_s, self._wall() - last_at) if last_at else quiet_s
        if quiet_s > max(_QUIET_S, 3 * self._steps[processes[0].now.job].longest_s):
            return "quiet", f"no batch for {duration_text(quiet_s)}: these are its last figures"
        return "running", f"running for {duration_text(self._wall() - processes[0].now.began_at)}"


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def duration_text(seconds: float) -> str:
    """Return a duration for people: "42 s", "12 min", "3 h 20 min"."""
    minutes = max(0.0, seconds) / 60
    if minutes < 2:
        return f"{max(0.0, seconds):.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes // 60:.0f} h {minutes % 60:.0f} min"


# ---- rates ------------------------------------------------------------------------------------------------


def loader_rows(pages: StatusHistory) -> Iterator[LoaderRow]:
    """Yield the loaders of a process that have begun, those that run first."""
    loaders = [loader for loader in pages.now.loaders if loader.began_at and loader.state != "closed"]
    for loader in sorted(loaders, key=lambda record: (record.state != "running", record.role, record.name)):
        yield _row(pages.now.host, same_loader(pages.before, loader), loader, pages.times_of(loader))


def _row(host: str, before: LoaderRecord | None, now: LoaderRecord, times: LoaderTimes) -> LoaderRow:
    grown, elapsed_s = growth(before, now)
    stats = defaultdict(float, numbers_in(now.stats))
    is_shards = now.kind == "LoaderStats"

    if now.state != "running" and not grown.get("batches"):
        elapsed_s = None  # it is not asked for batches

    def per_s(name: str) -> float | None:
        return None if elapsed_s is None else grown.get(name, 0.0) / elapsed_s

    asked = stats["cache.hits"] + stats["cache.misses"]
    held = ("window_bytes", "building_bytes", "ready_bytes", "in_use_bytes")
    faults = ("retries", "throttled", "timeouts", "checksum_failures")
    waited = per_s("starved_s")
    return LoaderRow(
        rank=now.rank,
        host=host,
        name=now.name,
        role=now.role,
        state=now.state,
        epoch=now.epoch,
        batch=now.loop_batches,
        batches=now.loop_length,
        samples_per_s=per_s("samples") if "samples" in now.stats else None,
        batches_per_s=per_s("batches"),
        waiting=None if waited is None else min(1.0, waited),
        ready=int(stats["ready_batches"]),
        depth=int(stats["depth" if is_shards else "ahead_batches"]),
        read_bytes_per_s=per_s("read_bytes") if is_shards else None,
        delivered_bytes_per_s=per_s("delivered_bytes"),
        read_busy=times.read_busy,
        build_busy=times.build_busy,
        cache_hits=stats["cache.hits"] / asked if asked else None,
        memory_bytes=int(sum(stats[f"memory.{name}"] for name in held)),
        memory_limit=int(stats["memory.limit_bytes"]),
        faults=int(sum(stats[f"faults.{name}"] for name in faults)),
        skipped=int(stats["skipped_samples"]),
        error=now.error,
    )


# ---- decisions ------------------------------------------------------------------------------------------


def _decisions(processes: Sequence[StatusHistory]) -> Iterator[DecisionRow]:
    """Yield the last decisions, the newest first, those that ranks have in common once."""
    decisions: dict[tuple[str, str, str, str], tuple[StatusDecision, list[int]]] = {}
    for pages in processes:
        said = [(loader.name, each) for loader in pages.now.loaders for each in loader.decisions]
        said += [
            (f"schedule of {schedule.loader}".removesuffix(" of "), each)
            for schedule in pages.now.schedules
            for each in schedule.decisions
        ]
        for of, each in said:
            key = (of, each.what, str(each.value), each.reason)
            latest, ranks = decisions.get(key, (each, []))
            decisions[key] = max(latest, each, key=lambda decision: decision.at), [*ranks, pages.now.rank]
    rows = sorted(decisions.items(), key=lambda item: item[1][0].at, reverse=True)
    for (of, what, _, reason), (latest, ranks) in rows[:_DECISIONS]:
        value = latest.value if isinstance(latest.value, (int, float, str)) else str(latest.value)
        by = tuple(dict.fromkeys(ranks))
        yield DecisionRow(at=latest.at, ranks=by, of=of, what=what, value=value, reason=reason)
