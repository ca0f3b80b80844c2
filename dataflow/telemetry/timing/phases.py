"""Phases of a training step: COMPUTE, SYNC (gradients travel) or STEP (the optimizer), and for how long.

`GradSchedule` enters the phases; listeners (the gate that holds data traffic back, reports) are told of each
change. SYNC begins with the first bucket that DDP hands to a communication hook, or without a hook with the
last backward pass of a window, and ends when that backward pass has returned. With NCCL that is when the
collectives are enqueued, not when they are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeVar, get_args

T = TypeVar("T")


class Phase(StrEnum):
    """A phase of a training step."""

    COMPUTE = "compute"
    SYNC = "sync"
    STEP = "step"


Listener = Callable[[Phase, float], None]
"""Called with the phase that begins and the clock's time, in the thread that enters it; must not block."""

Wait = Literal["data", "peers"]
WaitListener = Callable[[Wait, float, float], None]
"""Called after a wait with what was waited for, and when it began and ended; must not block."""


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds:
    """Seconds of one window on this rank."""

    compute: float = 0.0
    """Forward and backward passes, and whatever the loop does besides."""
    sync: float = 0.0
    """The time from the first gradient sent until all are there. Near 0: nothing to send, or all hidden."""
    step: float = 0.0
    """Seconds of clipping, optimizer, schedule, averages."""
    data_wait: float = 0.0
    """Waiting for the loader. Near 0: it keeps up."""
    peer_wait: float = 0.0
    """Waiting for the other ranks' counts. Near 0: nobody is much slower."""

    @property
    def total(self) -> float:
        """All of them: what the window took."""
        return self.compute + self.sync + self.step + self.data_wait + self.peer_wait


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """The result of one window; `GradSchedule.step` returns it.

    Examples:
        >>> schedule = GradSchedule(loader, model, optimizer, accumulate=2)
        >>> for batch in schedule:
        ...     schedule.backward(mse_loss(model(batch["x"]), batch["y"]) * schedule.scale())
        ...     if info := schedule.step():
        ...         print(info.step, info.totals["microbatches"])
        1 2.0
        2 2.0
    """

    window: int
    """Number of the window since the run began, from 0."""
    step: int
    """Optimizer steps taken since the run began, this one included if it was taken."""
    skipped: bool
    """The gradient was not finite on some rank; no rank has stepped."""
    grad_norm: float | None
    """Norm of the window's gradient over all ranks, before clipping; None if nothing asked for it."""
    lr: float
    """Learning rate of the first parameter group in this step."""
    totals: Mapping[str, float]
    """Sum of each weight over the window and all ranks; "microbatches" among them."""
    replays: int
    """Passes of this rank with weight zero, for want of data."""
    seconds: PhaseSeconds
    """Seconds of this rank's phases since the window before."""


class PhaseLedger:
    """Adds up seconds per phase. Used by the training thread and the thread of its backward pass, in turn."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._listeners: list[Listener] = []
        self._wait_listeners: list[WaitListener] = []
        self._since = now()
        self._waits: dict[Wait, float] = dict.fromkeys(get_args(Wait), 0.0)
        self._seconds = dict.fromkeys(Phase, 0.0)
        self.phase = Phase.COMPUTE

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` of each change from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def listen_waits(self, listener: WaitListener) -> Callable[[], None]:
        """Tell `listener` of each wait from now on; returns what ends that."""
        self._wait_listeners.append(listener)
        return lambda: self._wait_listeners.remove(listener)

    def enter(self, phase: Phase) -> None:
        """End the present phase; nothing if it is this one."""
        if phase == self.phase:
            return
        now = self._account()
        self.phase = phase
        for listener in self._listeners:
            listener(phase, now)

    def waited(self, wait: Callable[[], T], what: Wait = "data") -> T:
        """Call `wait`, and count its seconds as waiting for `what` instead of the present phase."""
        began = self._account()
        try:
            return wait()
        finally:
            self._since = self.now()
            self._waits[what] += self._since - began
            for listener in self._wait_listeners:
                listener(what, began, self._since)

    def take(self) -> PhaseSeconds:
        """Return what was counted since the last call."""
        self._account()
        seconds, self._seconds = self._seconds, dict.fromkeys(Phase, 0.0)
        waits, self._waits = self._waits, dict.fromkeys(get_args(Wait), 0.0)
        return PhaseSeconds(
            compute=seconds[Phase.COMPUTE],
            sync=seconds[Phase.SYNC],
            step=seconds[Phase.STEP],
            data_wait=waits["data"],
            peer_wait=waits["peers"],
        )

    def _account(self) -> float:
        now = self.now()
        self._seconds[self.phase] += now - self._since
        self._since = now
        return now
