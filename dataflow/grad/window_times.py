"""Where the time of each window went on one rank, kept for a report.

Phases and waits come from the ledger. What of SYNC the backward pass did not hide comes from DDP's own log:
its clock reads when the first bucket left, when the backward pass had computed everything, and when the last
bucket was back. Always on: a few clock reads a window. On CUDA DDP must wait for events to read its log, so
there only every twentieth window is looked at.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from dataflow.grad.phases import Phase, PhaseLedger
from dataflow.grad.step_info import StepInfo
from dataflow.grad.wrapped import Ddp, Wrapped

WINDOWS, SPANS = 2000, 20_000
"""Kept of a long run."""
_CUDA_EVERY = 20


@dataclass(frozen=True)
class WindowTimes:
    """One window on one rank; the seconds add up to the time since the window before."""

    window: int
    """Its number since the run began."""
    microbatches: int
    """Forward passes of this rank, replays included."""
    data_s: float
    """Waiting for the loader. Near 0: it keeps up."""
    peers_s: float
    """Waiting for the other ranks' counts. Near 0, since they are asked for early."""
    compute_s: float
    """Forward and backward passes, and whatever the loop does besides."""
    exposed_s: float | None
    """Gradients on their way after the backward pass had nothing left to compute; waiting for slower ranks is
    in it. Near 0: hidden. None: not measured (then it is in `compute_s`)."""
    optimizer_s: float
    """From the end of the backward pass to the end of `step`."""

    @property
    def total_s(self) -> float:
        """Of the window."""
        return self.data_s + self.peers_s + self.compute_s + (self.exposed_s or 0.0) + self.optimizer_s

    @property
    def own_s(self) -> float:
        """Until this rank had its gradients: who takes longest keeps the others waiting."""
        return self.data_s + self.compute_s


@dataclass(frozen=True)
class Span:
    """What a rank was doing from one time to another, in seconds since 1970."""

    lane: str
    """"window", "phase" or "wait"."""
    name: str
    began_s: float
    ended_s: float


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
