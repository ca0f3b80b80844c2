"""The length-aware plans of a run: one for each epoch and place in it, from the lengths of all samples.

Finding an epoch's units takes a pass over its lengths, so those of the last two epochs are kept: the loader
and its stream, which is an epoch ahead at times, ask for the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.lengths.batching import Batching, Bucketed, Packed
from sharding.lengths.unit_plan import UnitPlan, UnitSequence, epoch_lengths
from sharding.lengths.units import DEFAULT_WINDOW_SAMPLES
from sharding.order.order import Order
from sharding.plan.batch_plan import Tail

_KEPT_EPOCHS = 2


class UnitPlanner:
    """Makes the plans of any epoch of one dataset. Thread-safe.

    Args:
        lengths: [num_samples] in file order, as `lengths.resolve_lengths` gives them.
        batching: as the user gives it.
        window: the planning window where that leaves it open.
    """

    def __init__(
        self, lengths: NDArray[np.integer], batching: Batching, window: int = DEFAULT_WINDOW_SAMPLES
    ) -> None:
        self.lengths, self._given = lengths, batching
        self.batching = batching.resolved(lengths, window)
        # Replaced, never changed: two threads may find the same units at the same time, no more.
        self._known: tuple[tuple[object, UnitSequence], ...] = ()

    def plan(
        self, order: Order, *, units_per_batch: int, rank: int, world_size: int, tail: Tail, start: int = 0
    ) -> UnitPlan:
        """See `UnitPlan`; the units of the order's epoch are found if they are not known."""
        return UnitPlan(
            order,
            self.sequence(order),
            units_per_batch=units_per_batch,
            rank=rank,
            world_size=world_size,
            tail=tail,
            start=start,
        )

    def sequence(self, order: Order) -> UnitSequence:
        """The units of an order of the dataset's samples."""
        key = order.seed, order.epoch, order.shuffle
        for known, sequence in self._known:
            if known == key:
                return sequence
        in_order = epoch_lengths(order, self.lengths)
        shuffled = order.shuffle.kind != "none"
        sequence = UnitSequence(in_order, self.batching, order.seed, order.epoch, shuffled)
        self._known = ((key, sequence), *self._known[: _KEPT_EPOCHS - 1])
        return sequence

    @property
    def samples_per_unit(self) -> int:
        """About how many samples a unit has, for sizing; nothing is planned for it."""
        mean = max(1.0, float(self.lengths.mean())) if len(self.lengths) else 1.0
        if isinstance(self.batching, Bucketed):
            return self.batching.batch_size
        if isinstance(self.batching, Packed):
            return max(1, int(self.batching.length / mean))
        return max(
            1, min(int(self.batching.max_tokens / mean), self.batching.max_samples or len(self.lengths))
        )

    def resumed(self, mark: Mapping[str, object]) -> UnitPlanner:
        """The planner of a state with this mark: its planning window is taken where the user gave none."""
        window = mark.get("window")
        if self._given.window is not None or type(window) is not int or window < 1:
            return self
        return self if window == self.batching.window else UnitPlanner(self.lengths, self._given, window)

    @cached_property
    def mark(self) -> dict[str, object]:
        """What must agree for a number of units to mean the same ones, as JSON types: a state keeps it."""
        digest = hashlib.blake2b(self.lengths.astype("<i8").tobytes(), digest_size=8)
        return self.batching.to_json() | {"lengths": digest.hexdigest()}
