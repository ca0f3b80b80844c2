"""The plan of rows that are built while later packing windows are still measured: an epoch comes in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition

from dataflow.planning.plan import StreamPlan
from prefetch.errors import EngineClosedError
from sharding.cached_property import cached_property
from sharding.lengths.unit_plan import UnitPlan


class PartsKnown:
    """Lets who plans wait until more of an epoch is known. Thread-safe."""

    def __init__(self) -> None:
        self._changed, self._is_closed = Condition(), False

    def wait_for(self, is_known: Callable[[], bool]) -> None:
        """Wait until that is so. Raises `EngineClosedError` when nobody wants it any more."""
        with self._changed:
            while not (self._is_closed or is_known()):
                self._changed.wait()
            if self._is_closed:
                raise EngineClosedError("the loader was closed while lengths were awaited")

    def tell(self, *, is_closed: bool = False) -> None:
        """More is known, or nobody wants it any more."""
        with self._changed:
            self._is_closed = self._is_closed or is_closed
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True)
class PlanInParts(StreamPlan):
    """The plan of batches of which each part of an epoch is known once it was measured."""

    samples_per_row: int
    """Samples of a unit, about."""
    known: PartsKnown = field(default_factory=PartsKnown)

    @cached_property
    def makes_rows(self) -> bool:
        """See `StreamPlan`."""
        return True

    @property
    def samples_per_batch(self) -> int:
        """See `StreamPlan`."""
        return self.batch_size * self.samples_per_row

    def epoch(self, epoch: int, start: int = 0) -> UnitPlan:
        """The batches of an epoch that are known from a position on: it waits for one, or the end."""
        assert self.planner is not None
        order, end = self.windows_of(epoch), start + self.batch_size * self.world_size
        sequence = self.planner.sequence(order, start)
        self.known.wait_for(lambda: sequence.is_complete or sequence.num_units >= end)
        part = sequence.known_part(start)
        goes_on = part.num_packing_windows < sequence.num_packing_windows
        plan = UnitPlan(
            order,
            part,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            tail="drop" if goes_on else self.tail,
            start=start,
        )
        plan.goes_on = goes_on
        return self.without_passed(plan)
