"""What one rank knows of its windows: gathered for a report, or saved for `dataflow doctor`.

`dataflow doctor` sets the variable `DATAFLOW_DOCTOR` to a folder; a schedule that finds it saves its record
there after 50, 100, 200, ... windows, at the end of each loop and when it is closed, so that a run that is
killed leaves one too. The time that saving takes is in no window. Loops without a schedule: `doctor.loops`.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dataflow.doctor import VARIABLE
from dataflow.doctor.chrome_trace import write_trace
from dataflow.grad.window_times import Span, WindowRecorder, WindowTimes

if TYPE_CHECKING:
    from dataflow.doctor.report import Report
    from dataflow.grad.agreement import Agreement
    from dataflow.grad.control import Control
    from dataflow.grad.step_info import StepInfo
    from dataflow.grad.strategy import Strategy
    from dataflow.grad.wrapped import Wrapped

FIRST_SAVED = 50
"""Windows after which a record is saved first."""
IN_SCHEDULES: WeakSet[Any] = WeakSet()
"""Loaders of schedules that are recorded: their loops are not watched besides, for saving that takes time."""
_SERIAL = itertools.count()
"""Of schedules made by this process: one file each."""


@dataclass(frozen=True)
class LoaderTimes:
    """What the loader says of itself, since it was made; None where it does not count that."""

    kind: str
    """"shards", "process", "thread", "main" or "other"."""
    stall_share: float | None = None
    """Share of the time that training waited for it, in [0, 1]."""
    read_busy: float | None = None
    """Share of the time that its reading threads were busy. Near 1: reading is the bottleneck."""
    build_busy: float | None = None
    """Share of the time that its threads that decode and gather batches were busy."""
    reason: str = ""
    """What it says about its workers or its depth."""


@dataclass(frozen=True)
class RankRecord:
    """What one rank knows."""

    rank: int
    world_size: int
    host: str
    model: str
    """"plain", "DDP" or "FSDP2"."""
    strategy: str
    device: str
    loader: LoaderTimes
    windows: tuple[WindowTimes, ...]
    spans: tuple[Span, ...] = ()
    mode: str = ""
    """What the controller of the schedule has decided, and why; "" without one."""
    in_schedule: bool = True
    """False: a plain loop. A window is a batch, and computing is all that is not waiting for it."""

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        lists = {"windows": [vars(one) for one in self.windows], "spans": [vars(one) for one in self.spans]}
        return {**vars(self), "loader": vars(self.loader), **lists}  # asdict copies deeply, and takes long

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankRecord:
        """`ValueError` if it is no such value."""
        try:
            rest = dict(value)
            rest["loader"] = LoaderTimes(**value["loader"])
            rest["windows"] = tuple(WindowTimes(**one) for one in value["windows"])
            rest["spans"] = tuple(Span(**one) for one in value["spans"])
            return cls(**rest)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a record of this version: {error}") from None

    def save(self, path: Path) -> None:
        """Write it, whole or not at all. Errors only warn: a training must not end for want of a report."""
        part = path.with_suffix(".part")
        try:
            part.write_text(json.dumps(self.to_json()))
            part.replace(path)
        except OSError as error:
            warnings.warn(f"this rank's times could not be saved for dataflow doctor: {error}", stacklevel=2)


class RankRecords:
    """The record of a running schedule. Used by the training thread."""

    def __init__(
        self,
        recorder: WindowRecorder,
        agreement: Agreement,
        model: Wrapped,
        strategy: Strategy,
        loader: Any,
        control: Control | None = None,
    ) -> None:
        self._recorder, self._agreement, self._loader = recorder, agreement, loader
        self._control = control
        self._about: dict[str, Any] = {
            "rank": agreement.ranks[agreement.rank],
            "world_size": agreement.world_size,
            "host": socket.gethostname(),
            "model": model.kind,
            "strategy": strategy.name,
            "device": next((p.device.type for p in model.inner.parameters()), "cpu"),
        }
        self._ended, self._save_at = 0, FIRST_SAVED
        folder = os.environ.get(VARIABLE)
        self._path: Path | None = None
        if folder:
            self._path = Path(folder) / f"{self._about['rank']:06d}-{next(_SERIAL):03d}.json"
            with suppress(TypeError):  # a list, for instance; nobody watches those
                IN_SCHEDULES.add(loader)

    def window_ended(self, info: StepInfo, microbatches: int) -> float | None:
        """Keep the window, and save at times. Returns seconds of exposed communication; None: unknown."""
        self._recorder.window_ended(info, microbatches)
        self._ended += 1
        if self._path is not None and self._ended == self._save_at:
            self._save_at *= 2
            self.save()
        return self._recorder.windows[-1].exposed_s

    def record(self, *, spans: bool = True) -> RankRecord:
        """So far."""
        kept = tuple(self._recorder.spans) if spans else ()
        loader = loader_times(self._loader)
        windows, mode = tuple(self._recorder.windows), str(self._control.mode) if self._control else ""
        return RankRecord(**self._about, loader=loader, windows=windows, spans=kept, mode=mode)

    def report(self, *, all_ranks: bool, trace: str | None) -> Report:
        """Of this rank, or of all (collective)."""
        from dataflow.doctor.report import report_of

        own = self.record(spans=trace is not None)
        records = self._agreement.gathered(own) if all_ranks else [own]
        if trace is not None and (not all_ranks or self._agreement.rank == 0):
            write_trace({one.rank: one.spans for one in records}, trace)
        return report_of(records)

    def save(self) -> None:
        """Write the record where `dataflow doctor` looks for it, if it asked; without windows, too."""
        if self._path is None:
            return
        self.record().save(self._path)
        self._recorder.forget_time()

    def close(self) -> None:
        """Save, and listen no more."""
        self.save()
        self._recorder.close()


def loader_times(loader: Any) -> LoaderTimes:
    """What a loader's `stats()` say; little of a loader that is not ours."""
    from dataflow.stats import LoaderStats, WorkerStats

    stats = loader.stats() if callable(getattr(loader, "stats", None)) else None
    if isinstance(stats, WorkerStats):
        return LoaderTimes(stats.workers, stats.stall_share, reason=stats.workers_reason)
    if not isinstance(stats, LoaderStats):
        return LoaderTimes("other")
    read, build = (
        stage.busy_s / (stage.threads * stats.elapsed_s) if stage.threads and stats.elapsed_s else None
        for stage in (stats.read, stats.build)
    )
    return LoaderTimes("shards", stats.stall_share, read, build, stats.depth_reason)
