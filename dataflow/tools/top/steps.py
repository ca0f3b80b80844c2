"""The last pages of a process, and what the steps between them say holds a training up.

The last half minute of steps goes through `telemetry.timing`, as records of `dataflow doctor` do: there is
one answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dataflow.stats import numbers_of, numbers_since
from dataflow.telemetry.status.reading import boot_id
from dataflow.telemetry.status.record import (
    PARTS as PARTS_OF_STEPS,
    LoaderRecord,
    ScheduleRecord,
    TrainingRecord,
)
from dataflow.telemetry.timing.diagnosis import diagnose
from dataflow.telemetry.timing.records import LoaderTimes, StepRecord, StepTimes, times_of
from dataflow.telemetry.timing.shares import PARTS, Part, shares_of

MOST_PAGES = 30
"""Readings, about a second each, that the answer of what holds a training up is about."""
_RATES_OVER = 5
"""Readings that rates are of."""
_TASKS_OVER = 10
"""Readings in which tasks of threads end that take seconds."""

Key = tuple[str, int, int]
"""Host, process id and start of a process."""


class StatusHistory(NamedTuple):
    """The last pages of a process, as they were read, the newest last."""

    records: tuple[TrainingRecord, ...]
    seen_s: float
    """The time when the newest was read first, on a clock that only goes forward."""

    @property
    def now(self) -> TrainingRecord:
        """The newest one."""
        return self.records[-1]

    @property
    def last(self) -> TrainingRecord | None:
        """The one before; None: it is the first."""
        return self.records[-2] if len(self.records) > 1 else None

    @property
    def before(self) -> TrainingRecord | None:
        """The one from which rates are counted: some seconds old, so that they do not flicker."""
        return self.records[max(0, len(self.records) - 1 - _RATES_OVER)] if len(self.records) > 1 else None

    @property
    def since(self) -> TrainingRecord | None:
        """The one from which the work of threads counts, told task by task; None: from the first on."""
        return self.records[0] if len(self.records) > _TASKS_OVER else None

    def times_of(self, loader: LoaderRecord) -> LoaderTimes:
        """Return what a loader of the newest page says of itself, as `dataflow doctor` has it."""
        grown, _ = growth(same_loader(self.since, loader), loader)
        is_here, cores = self.now.boot_id == boot_id(), self.now.cores or 1.0
        try:
            return times_of(loader.kind, loader.stats, grown, cores=cores, is_here=is_here)
        except (AttributeError, TypeError, ValueError, LookupError):
            return LoaderTimes("other")  # figures that no loader of this version has


def key_of(record: TrainingRecord) -> Key:
    """Return what names the process of a page."""
    return record.host, record.pid, record.start_ticks


def same_loader(record: TrainingRecord | None, loader: LoaderRecord) -> LoaderRecord | None:
    """Return what a page says of a loader; None: nothing."""
    others = record.loaders if record is not None else ()
    return next((old for old in others if (old.role, old.name) == (loader.role, loader.name)), None)


def numbers_in(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a loader's figures by the names of `flat`, as far as they are numbers."""
    try:
        return {name: value for name, value in numbers_of(stats).items() if math.isfinite(value)}
    except (AttributeError, TypeError):
        return {}  # figures that no loader of this version has


def growth(before: LoaderRecord | None, now: LoaderRecord) -> tuple[dict[str, float], float | None]:
    """Return the numbers of the time between two pages, and its seconds; None: they are not known."""
    old, new = numbers_in(before.stats) if before else {}, numbers_in(now.stats)
    grown = numbers_since(new, old)
    elapsed_s = grown.get("elapsed_s", 0.0)
    is_known = before is not None and elapsed_s > 0 and new.get("batches", 0) >= old.get("batches", 0)
    return grown, elapsed_s if is_known else None


class RecentSteps:
    """The steps of a training's ranks in the last readings, and what `telemetry.timing` says of them."""

    def __init__(self) -> None:
        self._rows: deque[tuple[StepTimes, ...]] = deque(maxlen=MOST_PAGES)
        self._ranks: list[Key] = []
        self._records: list[StepRecord] = []
        self._since: dict[Key, float] = {}
        self.longest_s = 0.0
        """Seconds of the longest step, on average of a reading."""

    def add(self, processes: Sequence[StatusHistory]) -> None:
        """Take the steps between the last two pages of all ranks, once each of them has written a new one."""
        fresh = {key_of(pages.now): pages for pages in processes if pages.last is not None}
        if not fresh or any(self._since.get(key) == pages.now.written_at for key, pages in fresh.items()):
            return
        self._since = {key: pages.now.written_at for key, pages in fresh.items()}
        stepped = {key: step for key, pages in fresh.items() if (step := _steps_of(pages)) is not None}
        if not stepped:
            return
        in_schedule = any(record.in_schedule for record in stepped.values())
        stepped = {key: record for key, record in stepped.items() if record.in_schedule == in_schedule}
        if self._ranks != list(stepped):
            self._rows.clear()
        self._ranks, self._records = list(stepped), list(stepped.values())
        row = tuple(times for record in self._records for times in record.windows)
        self._rows.append(row)
        self.longest_s = max(times.total_s / times.microbatches for times in row)

    def answer(self) -> dict[str, Any]:
        """Return the fields of a `TrainingView` that tell what holds it up."""
        if not self._rows:
            return {"verdict": "", "where": "", "action": "", "gain": None, "shares": {}}
        shares = shares_of(self._rows)
        diagnosis = diagnose(shares, self._records)
        in_schedule = self._records[0].in_schedule
        parts: Sequence[Part] = PARTS if in_schedule else ("data", "compute")
        gain = diagnosis.gain if diagnosis.gain is not None and math.isfinite(diagnosis.gain) else None
        return {
            "verdict": diagnosis.verdict,
            "where": diagnosis.where,
            "action": diagnosis.action,
            "gain": gain,
            "shares": {part: shares.share(part) for part in parts},
        }


def _steps_of(pages: StatusHistory) -> StepRecord | None:
    """Return the record of a rank between its last two pages, as one step; None where none has ended."""
    assert pages.last is not None
    old_schedules = {record.loader: record for record in pages.last.schedules}
    for schedule in pages.now.schedules:
        before = old_schedules.get(schedule.loader)
        if before is not None and schedule.windows > before.windows:
            match = next((record for record in pages.now.loaders if record.name == schedule.loader), None)
            return _record(pages, match, _schedule_steps(before, schedule), schedule)
    measured = []
    for loader in pages.now.loaders:
        grown, elapsed_s = growth(same_loader(pages.last, loader), loader)
        if elapsed_s is not None and (batches := int(grown.get("batches", 0))):
            waited_s = min(elapsed_s, grown.get("starved_s", 0.0))
            measured.append((loader.role == "train", batches, elapsed_s, waited_s, loader))
    if not measured:
        return None
    _, batches, elapsed_s, waited_s, loader = max(measured, key=lambda row: row[:2])
    steps = StepTimes(window=1, microbatches=batches, data_s=waited_s, compute_s=elapsed_s - waited_s)
    return _record(pages, loader, steps)


def _schedule_steps(before: ScheduleRecord, now: ScheduleRecord) -> StepTimes:
    seconds: dict[str, Any] = {
        f"{part}_s": max(0.0, now.seconds.get(part, 0.0) - before.seconds.get(part, 0.0))
        for part in PARTS_OF_STEPS
    }
    if not now.seconds.get("exposed"):
        seconds["exposed_s"] = None  # not told from computing
    return StepTimes(window=1, microbatches=max(1, now.microbatches - before.microbatches), **seconds)


def _record(
    pages: StatusHistory,
    loader: LoaderRecord | None,
    steps: StepTimes,
    schedule: ScheduleRecord | None = None,
) -> StepRecord:
    now = pages.now
    return StepRecord(
        rank=now.rank,
        world_size=now.world_size,
        host=now.host,
        model=schedule.model if schedule else "",
        strategy=schedule.strategy if schedule else "",
        loader=LoaderTimes("other") if loader is None else pages.times_of(loader),
        windows=(steps,),
        in_schedule=schedule is not None,
    )
