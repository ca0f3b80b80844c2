"""The steps of a running schedule, by the phases and waits of its ledger: for a report, or saved."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dataflow.telemetry.timing import VARIABLE
from dataflow.telemetry.timing.phases import Phase, PhaseLedger, StepInfo
from dataflow.telemetry.timing.records import IN_SCHEDULES, Recorder, StepRecord, StepTimes

_SERIAL = itertools.count()
"""Number of schedules made by this process: one file each."""


class StepRecorder:
    """Records what each step of one schedule took on this rank. Used by the training thread.

    Args:
        ledger: whose phases and waits are kept.
        loader: the schedule's.
        mode: tells what the controller has decided.
        about: as for `Recorder`.
    """

    def __init__(self, ledger: PhaseLedger, loader: Any, *, mode: Callable[[], str], **about: Any) -> None:
        self._ledger, self._loader, self._mode = ledger, loader, mode
        folder = os.environ.get(VARIABLE)
        self._recorder = Recorder(f"{next(_SERIAL):03d}", loader, folder=folder, now=ledger.now, **about)
        if folder:
            with suppress(TypeError):  # a list, for instance; nobody watches those
                if loader not in IN_SCHEDULES:
                    IN_SCHEDULES.add(loader)
        self._phase = ledger.phase
        self._phase_since = self._step_since = ledger.now()
        self._stop = [ledger.listen(self._phase_changed), ledger.listen_waits(self._waited)]

    def step_ended(self, info: StepInfo, microbatches: int, exposed_s: float | None) -> StepTimes:
        """Keep a step, and save at times. Returns what it took.

        Args:
            info: of the step.
            microbatches: forward passes of this rank.
            exposed_s: seconds of SYNC that no computing hid; None: unknown.
        """
        seconds, now = info.seconds, self._ledger.now()
        self._recorder.keep_event("window", f"window {info.window}", self._step_since, now)
        self._step_since = now
        times = StepTimes(
            window=info.window,
            microbatches=microbatches,
            data_s=seconds.data_wait,
            peers_s=seconds.peer_wait,
            compute_s=seconds.compute + seconds.sync - (exposed_s or 0.0),
            exposed_s=exposed_s,
            optimizer_s=seconds.step,
        )
        if self._recorder.keep_step(times, self._loader):
            self.save()
        return times

    def record(self, *, events: bool) -> StepRecord:
        """Return what was kept so far."""
        return self._recorder.record(self._loader, events=events, mode=self._mode())

    def save(self) -> None:
        """Write the record, if `dataflow doctor` asked for it; the time that takes is in no step."""
        if not self._recorder.saves:
            return
        self._recorder.save(self._loader, mode=self._mode())
        self._ledger.take()
        self._step_since = self._ledger.now()

    def close(self) -> None:
        """Save, and listen no more; what was kept stays. Idempotent."""
        self.save()
        while self._stop:
            self._stop.pop()()

    def _phase_changed(self, phase: Phase, now: float) -> None:
        self._recorder.keep_event("phase", self._phase.value, self._phase_since, now)
        self._phase, self._phase_since = phase, now

    def _waited(self, what: str, began: float, ended: float) -> None:
        self._recorder.keep_event("wait", what, began, ended)
