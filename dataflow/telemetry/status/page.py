"""The page of this process: threads that exist write it, at most once a second, as they take batches.

No thread, no socket: whoever takes a batch compares two numbers, and once a second writes what all loaders
and schedules of the process say of themselves. A page is written by one `pwrite`: had it been mapped, whoever
cut the file short would end the training by SIGBUS, and so would a full disk. Nothing that goes wrong here
reaches the training; the first fault is logged. Children that are forked write nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

from dataflow.telemetry.status import OFF
from dataflow.telemetry.status.facts import cores_of, in_one_line, job_of, package_version, program, rank_info
from dataflow.telemetry.status.loaders import LoaderStatus, ScheduleStatus
from dataflow.telemetry.status.reading import (
    SUFFIX,
    boot_id,
    former_pages,
    open_folder,
    page_folders,
    remove_old,
    start_ticks,
)
from dataflow.telemetry.status.record import VERSION, ProcessState, TrainingRecord, to_page

_log = logging.getLogger("dataflow")

PERIOD_S = 1.0
_SHARE = 100
"""Times that the last write took have to pass before the next: writing takes at most 1 % of the time."""
_EVENTS_S = 0.1
"""Seconds that writes at the ends of loops may take in a row, beyond that share."""
_AGAIN_S = 60.0
"""Seconds from a fault to the next try, and the longest time between two writes."""
_PATIENCE_S = 1.0
"""Seconds for which a training waits for its page, at most."""
_MOST_GONE = 16
"""Loaders that are gone, and schedules that were closed, of which the page still tells."""
_RANK_FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node")


class StatusFile:
    """The page of one process. Thread-safe: of several threads one writes, and the others go on.

    Args:
        folders: where the page may lie; the first that can be written to is taken. None: `page_folders`.
    """

    def __init__(self, folders: Callable[[], Sequence[Path]] | None = None) -> None:
        # Loaders over other data than shards import what makes figures now: not for their first batch.
        self.due = 0.0 if "dataflow.stats" in sys.modules else time.monotonic() + PERIOD_S
        """The time of `time.monotonic` from which on a batch has the page written."""
        self._folders = folders or page_folders
        self._folder: Path | None = None
        """The folder that was taken."""
        self._lock = threading.Lock()  # guards writing, and what is on the page
        self._loaders: list[LoaderStatus] = []
        self._schedules: list[ScheduleStatus] = []
        self.endpoint = ""
        """The address where this process serves metrics."""
        self.was_asked_to_serve = False
        """True if what `DATAFLOW_METRICS` says was tried."""
        self._fd = -1
        self._sequence = 0
        self._cost_s = 0.0
        """Seconds that the last write took: of a processor, and for the disk."""
        self._event_time = _EVENTS_S, time.monotonic()
        """Seconds that writes because loops ended may take from now on, and when that was so."""
        self._has_told = False
        self._is_over = False
        self._began_at = time.time()
        self._process: tuple[int, int, str] = os.getpid(), start_ticks(os.getpid()), boot_id()
        # Trainings of one script and rank count on: their pages are found by name, and few are read.
        self._key = key = hashlib.blake2b(
            f"{program()}\0{rank_info().rank}".encode(), digest_size=4
        ).hexdigest()
        pid, ticks, _ = self._process
        self._name = f"{pid}-{ticks}-{key}{SUFFIX}"
        self._at_exit = util.Finalize(None, self.close, exitpriority=5)  # after the loaders' threads

    def add_loader(self, status: LoaderStatus) -> None:
        """Put a loader on the page. It is asked how it fares when the page is written."""
        self._loaders.append(status)

    def add_schedule(self, **about: Any) -> ScheduleStatus:
        """Put a schedule on the page, as a loader. `about`: fields of `ScheduleRecord` that never change."""
        status = ScheduleStatus(self, **about)
        self._schedules.append(status)
        return status

    def name_of(self, status: LoaderStatus) -> str:
        """Return the name of a loader on the page; "": a write hangs, as on a disk that has gone."""
        if not status.name and self._lock.acquire(timeout=_PATIENCE_S):
            try:
                self._name_loaders()
            finally:
                self._lock.release()
        return status.name

    def _name_loaders(self) -> None:
        """Have those without a name get one; what takes another's place counts on. Under the lock."""
        for loader in [loader for loader in self._loaders if not loader.name]:
            try:
                base = loader.wanted_name()
            except Exception:  # as of a dataset whose attributes raise: no training ends for want of a name
                _log.warning("`dataflow top` and metrics do not see a loader", exc_info=True)
                base = ""
            if not base:
                self._loaders.remove(loader)
                continue
            named = [old for old in self._loaders if old.name and old.role == loader.role]
            for old in [old for old in named if old.name == base and not old.is_alive]:
                loader.goes_on_from(old.totals)
                loader.is_continued = True
                self._loaders.remove(old)
                named.remove(old)
            taken = {old.name for old in named}
            loader.name = next(name for name in _numbered(base) if name not in taken)
            if loader.is_named and loader.name != base:
                _log.warning(
                    "two loaders that run in this process have the name %r: the second one is called %r in "
                    "metrics; give each its own: DataLoader(..., name=...)",
                    base,
                    loader.name,
                )
        for old in [old for old in self._loaders if not old.is_alive][:-_MOST_GONE]:
            self._loaders.remove(old)
        for closed in [old for old in self._schedules if old.is_closed][:-_MOST_GONE]:
            self._schedules.remove(closed)

    def event(self) -> None:
        """Write the page as a loop ended, unless many did just now."""
        now = time.monotonic()
        left, before = self._event_time
        left = min(_EVENTS_S, left + (now - before) / _SHARE)
        if left > 0 and self.due < math.inf:
            self.write(now)
            left -= self._cost_s
        self._event_time = left, now

    def write(self, now: float) -> None:
        """Write the page, unless another thread does. `now`: on the clock of `time.monotonic`."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._write(now, "running")
        finally:
            self._lock.release()

    def snapshot(self) -> TrainingRecord:
        """Return what the page would say now."""
        with self._lock:
            return self._record(time.monotonic(), "running")

    def close(self) -> None:
        """Say that the process ends, if it has a page. Idempotent."""
        if self._lock.acquire(timeout=_PATIENCE_S):
            try:
                if self._fd >= 0 and not self._is_over:
                    self._write(time.monotonic(), "ended")
                self._is_over, self.due = True, math.inf
            finally:
                self._lock.release()

    def abandon(self) -> None:
        """Be no page any more: this is a child that was forked."""
        self.due, self._is_over = math.inf, True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, now: float, state: ProcessState) -> None:
        if self._is_over:
            return
        # To wait for a processor meanwhile is no cost of ours; to wait for a disk is.
        self.due, cpu_s, waited_s = now + PERIOD_S, time.thread_time(), 0.0
        try:
            if self._fd < 0:
                self._open()
            self._sequence += 1
            page = to_page(self._record(now, state), self._sequence)
            began = time.monotonic()
            num_written = os.pwrite(self._fd, page, 0)
            waited_s = time.monotonic() - began
            if num_written != len(page):
                raise OSError("the disk is full")
        except Exception as error:
            self.due = now + _AGAIN_S
            self._tell(error)
        self._cost_s = time.thread_time() - cpu_s + waited_s
        if self._sequence > 1:  # the first one imports and looks around
            self.due = max(self.due, now + min(_AGAIN_S, _SHARE * self._cost_s))

    def _tell(self, error: Exception) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "`dataflow top` and metrics do not see this training, whose figures could not be written: %s "
                "(%s=0 turns them off)",
                in_one_line(error),
                OFF,
            )

    def _open(self) -> None:
        """Make the file, in the first folder that allows it."""
        faults = []
        for folder in self._folders():
            try:
                self._fd = self._made_in(folder)
            except OSError as error:
                faults.append(f"{folder}: {error.strerror or error}")
                continue
            remove_old(folder)
            self._folder = folder
            return
        raise OSError("; ".join(faults))

    def _made_in(self, folder: Path) -> int:
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        fd = open_folder(folder)
        try:
            if os.fstat(fd).st_mode & 0o077:
                os.fchmod(fd, 0o700)
            with suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=fd)
            return os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
        finally:
            os.close(fd)

    def _record(self, now: float, state: ProcessState) -> TrainingRecord:
        wall, rank = time.time(), rank_info()
        self._name_loaders()
        for loader in self._loaders:
            loader.ask()
        self._continue_counts()
        (pid, ticks, boot), error = self._process, getattr(sys, "last_value", None)
        records = (loader.record(wall, now) for loader in self._loaders)
        return TrainingRecord(
            version=VERSION,
            pid=pid,
            start_ticks=ticks,
            boot_id=boot,
            host=platform.node(),
            job=job_of(rank, pid),
            **{name: getattr(rank, name) for name in _RANK_FIELDS},
            program=program(),
            dataflow=package_version(),
            cores=cores_of(rank),
            began_at=self._began_at,
            written_at=wall,
            state=state,
            endpoint=self.endpoint,
            error=in_one_line(error) if state == "ended" and error is not None else "",
            loaders=tuple(record for record in records if record is not None),
            schedules=tuple(schedule.record(wall, now) for schedule in self._schedules),
        )

    def _continue_counts(self) -> None:
        """Have counts of what is new go on from those of the training before, if there was one."""
        members: list[LoaderStatus | ScheduleStatus] = [*self._loaders, *self._schedules]
        fresh = [member for member in members if not member.is_continued]
        if not fresh or self._folder is None:
            return
        former = former_pages(self._folder, self._key, besides=self._name)
        for member in fresh:
            member.continue_counts(former)


def _numbered(name: str) -> Iterator[str]:
    """Yield a name, and the names for others of that name."""
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


# ---- the page of this process ---------------------------------------------------------------------------

_page: StatusFile | None = None


def page_of_process() -> StatusFile:
    """Return the page of this process, on which nothing is written before somebody takes a batch."""
    global _page
    if _page is None:
        _page = StatusFile()
    return _page


def schedule_status(**about: Any) -> ScheduleStatus | None:
    """Put a schedule on the page of this process; None where pages are turned off. `about`: as there."""
    if os.environ.get(OFF) == "0":
        return None
    return page_of_process().add_schedule(**about, node=rank_info().node)


def _in_child() -> None:
    global _page
    if _page is not None:
        _page.abandon()
        _page = None


os.register_at_fork(after_in_child=_in_child)
