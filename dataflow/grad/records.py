"""Where the time of each window of a schedule goes: kept for a report, saved for `dataflow doctor`."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from dataflow.grad.adapt.control import Control
from dataflow.grad.agreement import Agreement
from dataflow.grad.strategies.strategy import Strategy
from dataflow.grad.wrapped import Ddp, Wrapped
from dataflow.timing import VARIABLE
from dataflow.timing.chrome_trace import write_trace
from dataflow.timing.phases import Phase, PhaseLedger
from dataflow.timing.records import FIRST_SAVED, IN_SCHEDULES, LoaderTimes, RankRecord, loader_times
from dataflow.timing.report import Report, report_of
from dataflow.timing.step_info import StepInfo
from dataflow.timing.window_times import SPANS, WINDOWS, Span, WindowTimes

_CUDA_EVERY = 20


class WindowRecorder:
    """Keeps the last 2,000 windows and 20,000 spans of one rank. Used by the training thread.

    Args:
        model: whose communication is looked at.
        ledger: whose phases and waits are kept.
        wall: the clock of the spans, comparable between machines.
    """

    def __init__(self, model: Wrapped, ledger: PhaseLedger, wall: Any = time.time) -> None:
        self.windows: deque[WindowTimes] = deque(maxlen=WINDOWS)
        self.spans: deque[Span] = deque(maxlen=SPANS)
        self._ddp = model.ddp if isinstance(model, Ddp) else None
        self._plain = model.ranks is None
        self._iteration = -1
        if self._ddp is not None:
            on_cuda = any(parameter.is_cuda for parameter in model.inner.parameters())
            self._ddp._set_ddp_runtime_logging_sample_rate(_CUDA_EVERY if on_cuda else 1)
        self._offset = wall() - ledger.now()
        self._ledger, self._phase = ledger, ledger.phase
        self._since = self._window_since = ledger.now()
        self._stop = [ledger.listen(self._changed), ledger.listen_waits(self._waited)]

    def window_ended(self, info: StepInfo, microbatches: int) -> None:
        """Keep the window."""
        spent, exposed, now = info.seconds, self._exposed(info.seconds.sync), self._ledger.now()
        self._keep("window", f"window {info.window}", self._window_since, now)
        self._window_since = now
        self.windows.append(
            WindowTimes(
                info.window,
                microbatches,
                spent.data_wait,
                spent.peer_wait,
                spent.compute + spent.sync - (exposed or 0.0),
                exposed,
                spent.step,
            )
        )

    def forget_time(self) -> None:
        """Count nothing since the last window: it was not the training's."""
        self._ledger.take()
        self._window_since = self._ledger.now()

    def close(self) -> None:
        """Listen no more; what was kept stays."""
        while self._stop:
            self._stop.pop()()

    def _exposed(self, sync_s: float) -> float | None:
        if sync_s == 0.0 or self._plain:
            return 0.0
        if self._ddp is None:
            return None
        # DDP fills its log when the next forward pass begins; asked here, the numbers are this window's.
        logger: Any = self._ddp.logger
        logger.set_runtime_stats_and_log()
        log: dict[str, Any] = self._ddp._get_ddp_logging_data()
        iteration, self._iteration = self._iteration, log.get("iteration", -1)
        if self._iteration == iteration or "backward_comm_time" not in log:
            return None
        hidden = log.get("backward_compute_comm_overlap_time", 0)
        exposed_s: float = (log["backward_comm_time"] - hidden) / 1e9
        return min(max(0.0, exposed_s), sync_s)

    def _changed(self, phase: Phase, now: float) -> None:
        self._keep("phase", self._phase.value, self._since, now)
        self._phase, self._since = phase, now

    def _waited(self, what: str, began: float, ended: float) -> None:
        self._keep("wait", what, began, ended)

    def _keep(self, lane: str, name: str, began: float, ended: float) -> None:
        self.spans.append(Span(lane, name, began + self._offset, ended + self._offset))


_SERIAL = itertools.count()
"""Of schedules made by this process: one file each."""


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
        self._loader_times: LoaderTimes | None = None
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
        self._loader_times = loader = loader_times(self._loader, self._loader_times)
        windows, mode = tuple(self._recorder.windows), str(self._control.mode) if self._control else ""
        return RankRecord(**self._about, loader=loader, windows=windows, spans=kept, mode=mode)

    def report(self, *, all_ranks: bool, trace: str | None) -> Report:
        """Of this rank, or of all (collective)."""
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
