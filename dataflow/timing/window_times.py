"""Where the time of each window went on one rank, kept for a report.

Phases and waits come from the ledger. What of SYNC the backward pass did not hide comes from DDP's own log:
its clock reads when the first bucket left, when the backward pass had computed everything, and when the last
bucket was back. Always on: a few clock reads a window. On CUDA DDP must wait for events to read its log, so
there only every twentieth window is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOWS, SPANS = 2000, 20_000
"""Kept of a long run."""


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
