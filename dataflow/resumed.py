"""A loaded state of a loader over a map-style or iterable dataset, until an iterator goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dataflow.json_values import decoded, encoded
from dataflow.lane import LaneState

VERSION = 1


@dataclass
class ResumedLane:
    """Where a lane stands."""

    batches: int = 0
    """Delivered in this epoch."""
    since: int = 0
    """Of those, delivered after `state` was taken."""
    state: LaneState = field(default_factory=LaneState)
    random: Any = None
    """State of the worker's global generators after the last batch, if the batches draw from them."""
    at_end: tuple[LaneState | None, Any] | None = None
    """State and generators when the iterable had ended: what the next epoch begins with."""

    def to_json(self) -> dict[str, Any]:
        """As part of a state."""
        return {
            "batches": self.batches,
            "since": self.since,
            "dataset": encoded(self.state.dataset),
            "iterator": encoded(self.state.iterator),
            "ended": self.state.ended,
            "random": encoded(self.random),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ResumedLane:
        """Inverse of `to_json`."""
        state = LaneState(decoded(value["dataset"]), decoded(value["iterator"]), value["ended"])
        return cls(int(value["batches"]), int(value["since"]), state, decoded(value["random"]))


@dataclass
class Resumed:
    """A loaded state, until an iterator goes on from it."""

    kind: str
    batches: int
    base_seed: int
    num_lanes: int
    next_lane: int
    generator: Any
    chain: torch.Generator | None
    sampler: Mapping[str, Any]
    lanes: dict[int, ResumedLane]
    complete: bool = False
    persistent: bool = False
    """Of workers that outlive epochs: nothing is seeded anew."""
    turn: int = 0
    """Epochs that were begun with this base seed before."""
    ahead: frozenset[int] = frozenset()
    """Batches delivered beyond the first `batches`."""

    def skips(self, lane: int) -> int:
        """Batches that a lane must fetch again and drop."""
        there = self.lanes.get(lane)
        return there.since if there and self.kind == "iterable" else 0


def resumed_from(state: Mapping[str, Any], kind: str) -> Resumed | None:
    """What a state says; None: nothing, as an empty one.

    Raises:
        ValueError: this is no state of such a loader.
    """
    if not state:
        return None
    if not isinstance(state, Mapping) or state.get("version") != VERSION or "complete" not in state:
        raise ValueError(f"not a state of this kind of DataLoader (version {VERSION}): {str(state)[:200]}")
    if state["kind"] != kind:
        raise ValueError(
            f"the state is of a loader over a dataset of the {state['kind']} kind, this one's is {kind}"
        )
    chain = None
    if state["chain"] is not None:
        chain = torch.Generator()
        chain.set_state(decoded(state["chain"]))
    return Resumed(
        kind,
        int(state["batches"]),
        int(state["base_seed"]),
        int(state["num_lanes"]),
        int(state["next_lane"]),
        decoded(state["generator"]),
        chain,
        state["sampler"],
        {number: ResumedLane.from_json(value) for number, value in enumerate(state["lanes"])},
        bool(state["complete"]),
        bool(state["persistent"]),
        int(state["turn"]),
        frozenset(state["ahead"]),
    )
