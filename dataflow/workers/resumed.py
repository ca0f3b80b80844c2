"""A loaded state of a loader over a map-style or iterable dataset, until an iterator goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dataflow.workers.json_values import decoded, encoded
from dataflow.workers.lane import LaneState

VERSION = 2
_FIELDS = frozenset(
    (
        *("version", "complete", "persistent", "generator", "chain", "batches", "ahead", "base_seed", "turn"),
        *("num_lanes", "next_lane", "sampler", "lanes"),
    )
)


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

    @property
    def is_kept(self) -> bool:
        """Whether a dataset, an iterator or generators that were drawn from have a state here."""
        return any(x is not None for x in (self.state.dataset, self.state.iterator, self.random))

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
        state = LaneState(
            decoded(value["dataset"]), decoded(value["iterator"]), _checked(value, "ended", bool)
        )
        return cls(_count(value, "batches"), _count(value, "since"), state, decoded(value["random"]))


@dataclass
class Resumed:
    """A loaded state, until an iterator goes on from it."""

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
    iterable: bool = False
    """Of a loader over an iterable dataset."""

    def lanes_for(self, num_workers: int) -> int:
        """How many lanes go on with the epoch: another number would draw other random values."""
        begun = num_workers > 0 and self.num_lanes > 0 and not self.complete
        return self.num_lanes if self.lanes or begun else num_workers

    def skips(self, lane: int) -> int:
        """Batches that a lane must fetch again and drop."""
        there = self.lanes.get(lane)
        return there.since if there and self.iterable else 0


def resumed_from(state: Mapping[str, Any], here: Mapping[str, Any]) -> Resumed:
    """What a state says.

    Args:
        state: its fields, without the checksum.
        here: `loader_state.identity` of the loader that it is for.

    Raises:
        ValueError: it is no state of such a loader.
    """
    if state.get("version") != VERSION:
        raise ValueError(f"not a state of this kind of DataLoader (version {VERSION}): {str(state)[:200]}")
    if wrong := _FIELDS.union(here).symmetric_difference(state):
        raise ValueError(f"the state lacks or has too many fields: {', '.join(sorted(map(str, wrong)))}")
    for name, value in here.items():
        # Between epochs nothing stands anywhere in the sampler's order: it may go on over other ranks.
        if state[name] != value and not (name == "sampler_length" and state["complete"]):
            raise ValueError(
                f"the state was taken with {name}={state[name]!r}, and this loader has {name}={value!r}: its "
                "place means other samples here"
            )
    try:
        return _resumed(state)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"the state is damaged: {error!r}") from error


def _resumed(state: Mapping[str, Any]) -> Resumed:
    chain = None
    if state["chain"] is not None:
        chain = torch.Generator()
        chain.set_state(decoded(state["chain"]))
    batches, num_lanes = _count(state, "batches"), _count(state, "num_lanes")
    next_lane, ahead = _count(state, "next_lane"), _checked(state, "ahead", list)
    lanes = _checked(state, "lanes", list)
    if next_lane >= max(1, num_lanes) or len(lanes) not in (0, max(1, num_lanes)):
        raise ValueError(f"the state is damaged: {len(lanes)} of {num_lanes} lanes, lane {next_lane} is next")
    if any(type(number) is not int or number <= batches for number in ahead):
        raise ValueError(f"the state is damaged: batches {ahead} were delivered ahead of {batches}")
    complete, sampler = _checked(state, "complete", bool), _checked(state, "sampler", dict)
    if complete and (batches or next_lane or ahead or sampler):
        raise ValueError("the state is damaged: it is of no epoch, and has a place in one")
    for name in sampler.keys() & {"seed", "epoch"}:
        _count(sampler, name)
    if batches and not sampler and not str(state["sampler_kind"]).endswith(("None", "SequentialSampler")):
        raise ValueError("the state is damaged: it lacks what decided the sampler's order")
    return Resumed(
        batches,
        _count(state, "base_seed"),
        num_lanes,
        next_lane,
        decoded(state["generator"]),
        chain,
        sampler,
        {number: ResumedLane.from_json(value) for number, value in enumerate(lanes)},
        complete,
        _checked(state, "persistent", bool),
        _count(state, "turn"),
        frozenset(ahead),
        state["kind"] == "iterable",
    )


def _checked(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields[name]
    if type(value) is not kind:
        raise ValueError(f"the state is damaged: {name} must be a {kind.__name__}, got {str(value)[:200]}")
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value: int = _checked(fields, name, int)
    if value < 0:
        raise ValueError(f"the state is damaged: {name} must be >= 0, got {value}")
    return value
