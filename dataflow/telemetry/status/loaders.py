"""The loaders and schedules on the page of a process: what they count, and what the page says of them.

Their loops call them: that is cheap, and raises nothing. They hold loaders weakly, and ask them when the page
is written.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import util
from typing import Any

from dataflow.telemetry.status.facts import counts_of, in_one_line, ranks_of, totals_of
from dataflow.telemetry.status.names import name_of, role_of
from dataflow.telemetry.status.record import (
    COUNTS_OF_SCHEDULES,
    PARTS,
    LoaderRecord,
    Role,
    ScheduleRecord,
    State,
    StatusDecision,
    TrainingRecord,
)
from prefetch.memory.lifetimes import InlineFinalizer

_log = logging.getLogger("dataflow")

_MOST_DECISIONS = 16
_SKIPPED_SHOWN = 10
"""Samples left out that the page names."""
_ENDLESS = 1 << 40
"""Batches that no loop has."""
_DECIDED = ("workers", "depth", "in_flight_limit", "window_blocks", "start", "mode")
"""Figures that are decided on: beside each stands its reason."""
_REASONS = {"in_flight_limit": "in_flight_reason", "window_blocks": "window_reason"}


class DecisionLog:
    """The last decisions among the figures that were looked at."""

    def __init__(self) -> None:
        self._last: deque[StatusDecision] = deque(maxlen=_MOST_DECISIONS)
        self._values: dict[str, Any] = {}

    def look(self, figures: Mapping[str, Any], wall: float) -> tuple[StatusDecision, ...]:
        """Return the decisions, those included that `figures` show: `depth` has its reason in `depth_reason`.

        `wall`: seconds since 1970.
        """
        for what in _DECIDED:
            reason = figures.get(_REASONS.get(what, f"{what}_reason"))
            if reason and figures[what] != self._values.get(what):
                value = self._values[what] = figures[what]
                self._last.append(StatusDecision(at=wall, what=what, value=value, reason=in_one_line(reason)))
        return tuple(self._last)


class LoaderStatus:
    """A loader on the page, which is told of its loops. It has a name once the page was written, or asked.

    Args:
        page: the page.
        owner: what serves the loops, with `stats()`, `loop_length` and, over shards, `ranks` and `dataset`;
            it may die at any time.
        name: that it is given; None: that of its dataset.
        role: that it is given; None: by its name, and by `trains`.
        is_named: whether the user gave the name.
        trains: whether gradients are computed where its first loop begins.
    """

    def __init__(
        self,
        page: Any,
        owner: Any,
        *,
        name: str | None,
        role: Role | None,
        is_named: bool,
        trains: bool,
    ) -> None:
        self.page, self.is_named = page, is_named
        self._given_name, self._role, self._trains = name, role, trains
        self.name = ""
        """Its name, which no other loader of this role on the page has; "": not decided yet."""
        self.role: Role = role or "train"
        self._owner = weakref.ref(owner)
        self.newest = LoopFigures()
        """The figures of the loop that had the last batch, or was begun last."""
        self._began_at = 0.0
        self._decisions = DecisionLog()
        self._fields: dict[str, Any] = {}
        """The fields of the last record that the owner knew."""
        self._offset: dict[str, float] = {}
        if owner.has_counts:  # those of the loader that it is a copy of
            counts = counts_of(owner.stats().to_json())
            self._offset = {name: -value for name, value in counts.items() if value}
        self.is_continued = False
        """True if it was looked for a training before this one."""

    @property
    def is_alive(self) -> bool:
        """Return whether its loader lives."""
        return self._owner() is not None

    @property
    def totals(self) -> dict[str, float]:
        """Return the counts as last seen, with those of the trainings before this one."""
        return totals_of(counts_of(self._fields.get("stats", {})), self._offset)

    def wanted_name(self) -> str:
        """Decide its role, and return the name that it should have; "": its loader is gone."""
        if (owner := self._owner()) is None:
            return ""
        name = self._given_name or name_of(owner.dataset)
        self.role = self._role or role_of(name, trains=self._trains)
        return name

    def goes_on_from(self, totals: Mapping[str, float]) -> None:
        """Count on from the totals of a loader that was there before, in place of this one."""
        self._offset = totals_of(self._offset, totals)

    def continue_counts(self, former: Sequence[TrainingRecord]) -> None:
        """Count on from the first of those that was this loader before: one name, role and rank."""
        if not self._fields:
            return
        self.is_continued = True
        key = (self.name, self.role, self._fields["rank"], self._fields["node"])
        loaders = (item for record in former for item in record.loaders)
        match = next((item for item in loaders if (item.name, item.role, item.rank, item.node) == key), None)
        if match is not None:
            self.goes_on_from(totals_of(counts_of(match.stats), match.offset))

    def begin(self, owner: Any, epoch: int, position: object) -> StatusLoop:
        """Note that a loop begins; the page says so, if it is there: the first batch may never come."""
        self._began_at = self._began_at or time.time()
        last_batch = self.newest.last_batch
        self.newest = LoopFigures(epoch=epoch, began=time.monotonic(), last_batch=last_batch, state="running")
        loop = StatusLoop(self, self.newest)
        if last_batch is not None:
            self.page.event()
        return loop

    def ended(self, figures: LoopFigures, error: BaseException | None = None) -> None:
        """Note that a loop has ended, was left, or failed."""
        if error is not None:
            self.newest = figures
            figures.state, figures.error = "failed", in_one_line(error)
        elif figures.state == "running":
            figures.state = "ended"
        if not util.is_exiting():  # what writing imports would take Ctrl-C out of the exit status
            self.page.event()

    def closes(self) -> None:
        """Note that the loader is closed."""
        if self.newest.state != "failed":
            self.newest.state = "closed"
        self.page.event()

    def record(self, wall: float, clock: float) -> LoaderRecord | None:
        """Return what it was when it was asked last; None: nothing is known.

        Args:
            wall: seconds since 1970.
            clock: the time of `time.monotonic`, now.
        """
        if not self._fields:
            return None
        newest = self.newest
        last, began = newest.last_batch, newest.began
        return LoaderRecord(
            **self._fields,
            name=self.name,
            role=self.role,
            state=newest.state if self.is_alive or newest.state == "failed" else "closed",
            epoch=newest.epoch,
            loop_batches=newest.num_batches,
            began_at=self._began_at,
            loop_began_at=0.0 if began is None else wall - (clock - began),
            last_batch_at=0.0 if last is None else wall - (clock - last),
            offset=self._offset,
            decisions=self._decisions.look(self._fields["stats"], wall),
            error=newest.error,
        )

    def ask(self) -> None:
        """Have its loader say how it fares, if that lives."""
        if (owner := self._owner()) is None:
            return
        try:
            stats, length = owner.stats(), owner.loop_length
            figures, ranks = stats.to_json(), ranks_of(owner)
        except Exception:  # of a loop in another thread, which goes on meanwhile: a second later it may do
            _log.debug("a loader could not say how it fares", exc_info=True)
            return
        if "skipped" in figures:
            figures["skipped"] = figures["skipped"][-_SKIPPED_SHOWN:]
        self._fields = dict(zip(("rank", "world_size", "local_rank", "node"), ranks, strict=True)) | {
            "kind": type(stats).__name__,
            "stats": figures,
            "loop_length": length if length is not None and length < _ENDLESS else None,
        }


@dataclass(slots=True, kw_only=True)
class LoopFigures:
    """The figures of one loop. Times are those of `time.monotonic`."""

    epoch: int | None = None
    began: float | None = None
    last_batch: float | None = None
    """The time of the last batch of this loop or those before; None: there was none."""
    num_batches: int = 0
    state: State = "ready"
    error: str = ""


class StatusLoop:
    """One loop over a loader on the page; see `LoopObserver`."""

    __slots__ = ("__weakref__", "_figures", "_left", "_status")

    def __init__(self, status: LoaderStatus, figures: LoopFigures) -> None:
        self._status, self._figures = status, figures
        self._left = InlineFinalizer(self, partial(status.ended, figures))

    def batch(self, asked_s: float) -> None:
        """Note that a batch is handed out; write the page if that is due."""
        figures, status = self._figures, self._status
        figures.num_batches += 1
        figures.last_batch = now = time.monotonic()
        if status.newest is not figures:
            status.newest = figures
        if now >= status.page.due:
            status.page.write(now)

    def end(self, asked_s: float, error: BaseException | None = None) -> None:
        """Note that it has ended, or failed."""
        self._left.cancel()
        self._status.ended(self._figures, error)


class ScheduleStatus:
    """A `GradSchedule` on the page; it calls `window` after each window."""

    def __init__(self, page: Any, **about: Any) -> None:
        self._page, self._about = page, about
        self._offset: dict[str, float] = {}
        self.is_continued = False
        """True if it was looked for a training before this one."""
        self._state: State = "ready"
        self._counts: dict[str, Any] = dict.fromkeys(COUNTS_OF_SCHEDULES, 0)
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

    def continue_counts(self, former: Sequence[TrainingRecord]) -> None:
        """Count on from the first of those that was this schedule before: one loader and rank."""
        self.is_continued = True
        key = tuple(self._about[name] for name in ("loader", "rank", "node"))
        schedules = (item for record in former for item in record.schedules)
        match = next((item for item in schedules if (item.loader, item.rank, item.node) == key), None)
        if match is not None:
            self._offset = totals_of(match.counts, match.offset)

    def ends(self) -> None:
        """Note that it is closed."""
        self._state = "closed"
        self._page.event()

    def record(self, wall: float, clock: float) -> ScheduleRecord:
        """Return what the page says of it. Arguments as those of `LoaderStatus.record`."""
        last = self._last_step
        return ScheduleRecord(
            **self._about,
            **self._counts,
            state=self._state,
            steps=self._steps,
            seconds=dict(self._seconds),
            window_s=self._window_s,
            totals=dict(self._totals),
            last_step_at=0.0 if last is None else wall - (clock - last),
            offset=self._offset,
            decisions=self._decisions.look(self._decided, wall),
        )
