"""The loaders and schedules on the page of a process: what they count, and what the page says of them.

Their loops call them: that is cheap, and raises nothing. They hold loaders weakly.
"""

from __future__ import annotations

import logging
import platform
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

from msgspec import Struct

from dataflow.live.facts import counts_of, in_one_line, program, totals_of
from dataflow.live.record import (
    PARTS,
    LiveDecision,
    LoaderRecord,
    Role,
    ScheduleRecord,
    State,
    TrainingRecord,
)
from dataflow.live.unwatched import Unwatched

_log = logging.getLogger("dataflow")

_MOST_DECISIONS = 16
_SKIPPED_SHOWN = 10
"""Samples left out that the page names."""
_ENDLESS = 1 << 40
"""Batches that no loop has."""
_DECIDED = ("workers", "depth", "in_flight_limit", "window_blocks", "start", "mode")
"""Figures that are decided on: beside each stands its reason."""
_REASONS = {"in_flight_limit": "in_flight_reason", "window_blocks": "window_reason"}


class WatchingPage(Protocol):
    """The page that is written when that is due."""

    due: float

    def write(self, now: float) -> None:
        """Write it. `now`: on the clock of `time.monotonic`."""

    def event(self) -> None:
        """Write it as something has happened, unless it was written just now."""


class LoaderFigures(Struct, frozen=True, kw_only=True):
    """The figures that a loader says of itself when its page is written."""

    kind: str
    stats: dict[str, Any]
    ranks: tuple[int, int, int, int]
    """Rank, world size, local rank, node."""
    loop_length: int | None
    """Batches of the loop begun last; None: not known."""

    @classmethod
    def of(cls, stats: Any, ranks: tuple[int, int, int, int], loop_length: int | None) -> Self:
        """Return the figures of a loader's `stats()`; a loop of very many batches has no length."""
        figures = stats.to_json()
        if "skipped" in figures:
            figures["skipped"] = figures["skipped"][-_SKIPPED_SHOWN:]
        length = loop_length if loop_length is not None and loop_length < _ENDLESS else None
        return cls(kind=type(stats).__name__, stats=figures, ranks=ranks, loop_length=length)


class WatchedLoader(Protocol):
    """A loader that says how it fares."""

    def live_figures(self) -> LoaderFigures:
        """Return the figures now. Cheap; any thread."""


class DecisionLog:
    """The last decisions among the figures that were looked at."""

    def __init__(self) -> None:
        self._last: deque[LiveDecision] = deque(maxlen=_MOST_DECISIONS)
        self._values: dict[str, Any] = {}

    def look(self, figures: Mapping[str, Any], at: float) -> tuple[LiveDecision, ...]:
        """Return the decisions, those included that `figures` show: `depth` has its reason in `depth_reason`.

        `at`: seconds since 1970.
        """
        for what in _DECIDED:
            reason = figures.get(_REASONS.get(what, f"{what}_reason"))
            if reason and figures[what] != self._values.get(what):
                value = self._values[what] = figures[what]
                self._last.append(LiveDecision(at=at, what=what, value=value, reason=in_one_line(reason)))
        return tuple(self._last)


def _before(gone: Sequence[TrainingRecord]) -> list[TrainingRecord]:
    """Return the trainings of this script on this machine, the oldest first."""
    own = platform.node(), program()
    return sorted((one for one in gone if (one.host, one.program) == own), key=lambda one: one.written_at)


class LiveLoader(Unwatched):
    """A loader on the page. Its loops call `begins`, `batch` and `ends`: cheap, and nothing is raised."""

    def __init__(self, page: WatchingPage, owner: WatchedLoader, *, name: str, role: Role) -> None:
        self._page, self.name, self.role = page, name, role
        self._owner = weakref.ref(owner)
        self._state: State = "ready"
        self._began_at = 0.0
        self._loop_began: float | None = None
        self._last_batch: float | None = None
        self._epoch: int | None = None
        self._loop_batches = 0
        self._error = ""
        self._decisions = DecisionLog()
        self._figures: LoaderFigures | None = None
        self._offset: dict[str, float] = {}
        self.is_continued = False
        """True if it was looked for a training before this one."""

    @property
    def is_alive(self) -> bool:
        """Return whether its loader lives."""
        return self._owner() is not None

    @property
    def totals(self) -> dict[str, float]:
        """Return the counts as last seen, with those of the trainings before this one."""
        return totals_of(self._counts, self._offset)

    @property
    def _counts(self) -> dict[str, float]:
        figures = self._figures
        return counts_of(figures.stats) if figures else {}

    def goes_on_from(self, totals: Mapping[str, float]) -> None:
        """Count on from the totals of a loader that was there before, in place of this one."""
        self._offset = totals_of(self._offset, totals)

    def continue_counts(self, gone: Sequence[TrainingRecord]) -> None:
        """Count on from the newest of those that was this loader before: one script, name, role and rank."""
        figures = self._figures
        if figures is None:
            return
        self.is_continued = True
        rank, _, _, node = figures.ranks
        own = (self.name, self.role, rank, node)
        former = [
            one
            for record in _before(gone)
            for one in record.loaders
            if (one.name, one.role, one.rank, one.node) == own
        ]
        if former:
            self.goes_on_from(totals_of(counts_of(former[-1].stats), former[-1].offset))

    def begins(self, epoch: int) -> None:
        """Note that a loop begins; the page says so, if it is there: the first batch may never come."""
        self._began_at = self._began_at or time.time()
        self._loop_began = time.monotonic()
        self._state, self._error = "running", ""
        self._epoch, self._loop_batches = epoch, 0
        if self._last_batch is not None:
            self._page.event()

    def batch(self) -> None:
        """Note that a batch is handed out; write the page if that is due."""
        self._loop_batches += 1
        self._last_batch = now = time.monotonic()
        if now >= self._page.due:
            self._page.write(now)

    def ends(self, error: BaseException | None = None) -> None:
        """Note that a loop has ended, or failed."""
        self._state = "ended" if error is None else "failed"
        self._error = "" if error is None else in_one_line(error)
        self._page.event()

    def closes(self) -> None:
        """Note that the loader is closed."""
        if self._state != "failed":
            self._state = "closed"
        self._page.event()

    def record(self, at: float, clock: float) -> LoaderRecord | None:
        """Return what the page says of it. `at`: seconds since 1970; `clock`: of `time.monotonic`, now."""
        self._figures = figures = self._asked() or self._figures
        if figures is None:
            return None
        last, began = self._last_batch, self._loop_began
        return LoaderRecord(
            name=self.name,
            role=self.role,
            state=self._state if self.is_alive or self._state == "failed" else "closed",
            **dict(zip(("rank", "world_size", "local_rank", "node"), figures.ranks, strict=True)),
            epoch=self._epoch,
            loop_batches=self._loop_batches,
            loop_length=figures.loop_length,
            began_at=self._began_at,
            loop_began_at=0.0 if began is None else at - (clock - began),
            last_batch_at=0.0 if last is None else at - (clock - last),
            kind=figures.kind,
            stats=figures.stats,
            offset=self._offset,
            decisions=self._decisions.look(figures.stats, at),
            error=self._error,
        )

    def _asked(self) -> LoaderFigures | None:
        owner = self._owner()
        if owner is None:
            return None
        try:
            return owner.live_figures()
        except Exception:  # of a loop in another thread, which goes on meanwhile: a second later it may do
            _log.debug("a loader could not say how it fares", exc_info=True)
            return None


class LiveSchedule:
    """A `GradSchedule` on the page; it calls `window` after each window."""

    def __init__(self, page: WatchingPage, **about: Any) -> None:
        self._page, self._about = page, about
        self._offset: dict[str, float] = {}
        self.is_continued = False
        """True if it was looked for a training before this one."""
        self._state: State = "ready"
        self._counts: dict[str, Any] = dict.fromkeys(
            ("windows", "skipped_steps", "microbatches", "replays"), 0
        )
        self._steps = 0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._window_s = 0.0
        self._totals: dict[str, float] = {}
        self._decided: Mapping[str, str] = {}
        self._decisions = DecisionLog()
        self._last_step: float | None = None

    @property
    def is_closed(self) -> bool:
        """Return whether it has ended."""
        return self._state == "closed"

    def window(
        self,
        *,
        seconds: Sequence[float],
        microbatches: int,
        replays: int,
        skipped: bool,
        step: int,
        totals: Mapping[str, float],
        decided: Callable[[], Mapping[str, str]],
    ) -> None:
        """Count a window that has ended.

        Args:
            seconds: that it took, as `PARTS` names them.
            microbatches: forward passes of this rank, replays included.
            replays: those of weight zero.
            skipped: whether its step was left out.
            step: optimizer steps so far.
            totals: weights of this window over all ranks.
            decided: returns what a controller has decided, such as "mode", and its "mode_reason".
        """
        counts = self._counts
        counts["windows"] += 1
        counts["skipped_steps"] += skipped
        counts["microbatches"] += microbatches
        counts["replays"] += replays
        for part, value in zip(PARTS, seconds, strict=True):
            self._seconds[part] += value
        for name, weight in totals.items():
            self._totals[name] = self._totals.get(name, 0.0) + weight
        self._window_s, self._steps, self._state = sum(seconds), step, "running"
        self._last_step = now = time.monotonic()
        if now >= self._page.due:
            self._decided = decided()
            self._page.write(now)

    def continue_counts(self, gone: Sequence[TrainingRecord]) -> None:
        """Count on from the newest of those that was this schedule before: one script, loader and rank."""
        self.is_continued = True
        own = tuple(self._about[name] for name in ("loader", "rank", "node"))
        former = [
            one
            for record in _before(gone)
            for one in record.schedules
            if (one.loader, one.rank, one.node) == own
        ]
        if former:
            self._offset = totals_of(former[-1].counts, former[-1].offset)

    def ends(self) -> None:
        """Note that it is closed."""
        self._state = "closed"
        self._page.event()

    def record(self, at: float, clock: float) -> ScheduleRecord:
        """Return what the page says of it. Arguments as those of `LiveLoader.record`."""
        last = self._last_step
        return ScheduleRecord(
            **self._about,
            **self._counts,
            state=self._state,
            steps=self._steps,
            seconds=dict(self._seconds),
            window_s=self._window_s,
            totals=dict(self._totals),
            last_step_at=0.0 if last is None else at - (clock - last),
            offset=self._offset,
            decisions=self._decisions.look(self._decided, at),
        )
