"""Where a run stands: what is counted from step to step, compared between ranks and kept in states."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dataflow.grad.settings import MICROBATCHES
from dataflow.grad.step import StepPlan

_VERSION = 1
_ENTRIES = (
    *("window", "step", "order", "left_out", "totals", "accumulate", "global_batch", "world_size"),
    *("lr", "scale", "loader", "strategy"),
)
"""What every state of a schedule has."""


@dataclass(kw_only=True)
class Position:
    """Equal on all ranks, but for `left_out`."""

    window: int = 0
    """Windows that have ended."""
    step: int = 0
    """Optimizer steps taken."""
    order: int = 0
    """Checksum of every window's passes, syncs and layers: ranks that differ issued other collectives."""
    left_out: int = 0
    """Microbatches of this rank that were not run, because of uneven="min" or partial="drop"."""
    totals: dict[str, float] = field(default_factory=dict)
    """Each weight summed over all windows and ranks."""

    @classmethod
    def start(cls, weights: Iterable[str]) -> Position:
        """Of a run that begins."""
        return cls(totals=dict.fromkeys([*weights, MICROBATCHES], 0.0))

    def step_ended(
        self, plan: StepPlan, totals: Mapping[str, float], *, syncs: bool, skipped: bool, layers: int = 0
    ) -> None:
        """One more window. `layers`: a checksum of those that ran, where their collectives are the ranks'."""
        self.order = zlib.crc32(
            repr((self.window, plan.forwards, syncs, skipped, layers)).encode(), self.order
        )
        self.window += 1
        self.step += not skipped
        for name, total in totals.items():
            self.totals[name] += total

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], weights: Iterable[str]) -> Position:
        """From `to_json()`; `ValueError` if it is something else. Weights that are new begin at 0."""
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ValueError(f"a GradSchedule state of version {_VERSION} is needed, got {state!r:.80}")
        missing = [name for name in _ENTRIES if name not in state]
        strategy = state.get("strategy")
        if not missing and not (isinstance(strategy, Mapping) and {"key", "state"} <= set(strategy)):
            missing = ["key and state of the strategy"]
        if missing:
            raise ValueError(f"the state of a GradSchedule is not whole: it lacks {', '.join(missing)}")
        counts = {name: state[name] for name in ("window", "step", "order", "left_out")}
        return cls(**counts, totals={**cls.start(weights).totals, **state["totals"]})


def check_same_windows(
    state: Mapping[str, Any], *, accumulate: int, global_batch: int | None, strategy: str
) -> None:
    """`ValueError` if the windows of the state and of this run are not the same."""
    here: dict[str, Any] = {"global_batch": global_batch, "strategy": strategy}
    there: dict[str, Any] = {"global_batch": state["global_batch"], "strategy": state["strategy"]["key"]}
    if global_batch is None:  # else it follows the number of ranks
        here["accumulate"], there["accumulate"] = accumulate, state["accumulate"]
    for name, value in here.items():
        if there[name] != value:
            raise ValueError(
                f"the state was taken with {name}={there[name]!r}, this run has {name}={value!r}"
            )
