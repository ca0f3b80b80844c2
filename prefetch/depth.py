"""How many batches to hold ready: a pure decision with its reason.

The engine asks before it starts each batch. `FixedDepth` is the first form; a controller that reacts to
measured stalls has the same signature: observation in, decision out, no clock, thread or lock inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Observation:
    """What the engine saw when it asks for a decision."""

    delivered_batches: int
    """Batches taken by the consumer so far."""
    starved_s: float
    """Seconds the consumer has waited so far. Near 0: depth suffices."""
    ready_batches: int
    """Batches that wait for the consumer now."""
    batch_bytes: int
    """Output bytes of the next batch."""


@dataclass(frozen=True)
class Decision:
    """A value and why."""

    value: int
    reason: str


DepthPolicy = Callable[[Observation], Decision]


def fixed_depth(batches: int) -> DepthPolicy:
    """Always the same depth."""
    if batches < 1:
        raise ValueError(f"depth must be >= 1 batch, got {batches}")
    return partial(_always, Decision(batches, f"fixed at {batches}"))


def _always(decision: Decision, _seen: Observation) -> Decision:
    return decision
