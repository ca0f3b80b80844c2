"""What `GradSchedule.step` tells of a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dataflow.timing.phases import PhaseSeconds


@dataclass(frozen=True)
class StepInfo:
    """What came of one window."""

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
    """Where this rank's time went since the window before."""
