"""What becomes of the next window: this rank's row is sent while the present window computes, then decided.

Where every rank has as many batches in the epoch (each says so when it begins), no weight depends on data and
there is no controller, nothing is sent for windows: every rank knows what the others have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dataflow.grad.adapt.control import Control
from dataflow.grad.agreement import Agreement
from dataflow.grad.lookahead import Share
from dataflow.grad.position import Position
from dataflow.grad.windows import (
    MICROBATCHES,
    Partial,
    Uneven,
    UnevenRanksError,
    WindowPlan,
    merged,
    merged_plan,
    plan_window,
    scales,
    summed,
)

_COLUMNS = (
    "epoch's batches",
    "count",
    "window",
    "step",
    "accumulate",
    "order of collectives",
    "replay",
    "the controller's mode",
)
_BATCHES, _COUNT, _WINDOW, _STEP, _ACCUMULATE, _ORDER, _REPLAY, _DECISION = range(len(_COLUMNS))
"""Of a rank's row; the weights follow, and what a controller tells. `_DECISION`: a checksum of its mode."""
_ALIKE = (_WINDOW, _STEP, _ACCUMULATE, _ORDER, _DECISION)
"""Columns in which ranks that do the same have the same."""


@dataclass
class Window:
    """A window that all ranks have decided on, on this rank."""

    plan: WindowPlan
    share: Share
    totals: dict[str, float]
    """Each weight over all ranks."""
    scales: dict[str, float]
    giver: int | None = None
    """The rank whose batch those replay that have none; None if nobody needs one."""
    scaled: bool = False
    """A loss of it was scaled."""
    ended: bool = False


class Negotiation:
    """Offers this rank's share of a window, and decides with the other ranks' offers.

    Args:
        agreement: with whom.
        weights: names, the same on all ranks.
        constant: no weight depends on data.
        accumulate, uneven, partial: as for `plan_window`.
        replays_allowed: False where a replayed batch would change what other ranks compute.
        control: tells the other ranks of windows that ended, and decides on the mode of the next one.
    """

    def __init__(
        self,
        agreement: Agreement,
        weights: Mapping[str, object],
        *,
        constant: bool,
        accumulate: int,
        uneven: Uneven,
        partial: Partial,
        replays_allowed: bool,
        control: Control | None = None,
    ) -> None:
        self._agreement, self._weights, self._control = agreement, tuple(weights), control
        self._constant = constant and control is None
        self._accumulate, self._uneven, self._partial = accumulate, uneven, partial
        self._replays_allowed = replays_allowed
        self._rows: Callable[[], list[list[float]]] = list
        self.exchanges = 0
        """Times that ranks told each other something about windows."""
        self._promised: int | None = None
        """Batches that every rank has in this epoch; None: unknown, and every window is agreed on."""

    def begin_epoch(self, batches: int, at: Position) -> None:
        """Learn whether all ranks know that they have as many batches (-1: this one does not know)."""
        self._promised = None
        if self._agreement.world_size == 1 or not self._constant:
            return
        rows = self._agreement.offer(self._row(at, batches=batches))()
        self.exchanges += 1
        self._check(rows)
        known = {row[_BATCHES] for row in rows}
        self._promised = batches if len(known) == 1 and batches >= 0 else None

    def offer(self, share: Share, at: Position, *, replay: bool, taken: int, exhausted: bool) -> None:
        """Tell what this rank has for the next window. Waits for nobody.

        `replay`: it has a batch that it can run again. `taken`, `exhausted`: of the epoch's batches.
        """
        row = self._row(at, share, replay)
        if self._promised is not None:
            if taken > self._promised or (exhausted and taken < self._promised):
                raise RuntimeError(
                    f"the loader said {self._promised} batches in this epoch and gave {taken}"
                    f"{'' if exhausted else ' or more'}; the other ranks have relied on that: its len must "
                    "be right, or raise TypeError"
                )
            rows = [row] * self._agreement.world_size
            self._rows = lambda: rows
            return
        self.exchanges += self._agreement.world_size > 1
        self._rows = self._agreement.offer(row)

    def decide(self, share: Share, at: Position, *, equal_forwards: bool) -> Window:
        """Wait for the other ranks' offers, and decide."""
        rows = self._rows()
        self._check(rows)
        told = len(_COLUMNS) + len(self._weights)
        passes = self._control.begin([row[told:] for row in rows], at.window) if self._control else None
        counts = [int(row[_COUNT]) for row in rows]
        plan = plan_window(
            counts,
            accumulate=self._accumulate,
            uneven=self._uneven,
            partial=self._partial,
            equal_forwards=equal_forwards,
        )
        if plan.forwards != plan.counts and not self._replays_allowed:
            raise UnevenRanksError(
                plan.counts, 'SyncBatchNorm would mix a replayed batch into the others: use uneven="min"'
            )
        each = [dict(zip(self._weights, row[len(_COLUMNS) : told], strict=True)) for row in rows]
        if any(plan.left_out) and not plan.empty:
            mine = summed(share.weights[: plan.counts[self._agreement.rank]])
            kept = self._agreement.offer([mine.get(name, 0.0) for name in self._weights])()
            each = [dict(zip(self._weights, row, strict=True)) for row in kept]
        if passes is not None and passes.at_once > 1:
            own = plan.counts[self._agreement.rank]
            share = replace(share, batches=merged(share.batches, own, passes.at_once, passes.join))
            plan = merged_plan(plan, passes.at_once)
        totals = {**summed(each), MICROBATCHES: float(plan.num_microbatches)}
        needs = [r for r, row in enumerate(rows) if plan.forwards[r] and not (plan.counts[r] or row[_REPLAY])]
        giver = next(rank for rank, count in enumerate(plan.counts) if count) if needs else None
        return Window(plan, share, totals, scales(totals, self._agreement.world_size), giver)

    def _row(
        self, at: Position, share: Share | None = None, replay: bool = False, batches: int = -1
    ) -> list[float]:
        own = summed(share.weights) if share is not None else {}
        row = [0.0] * len(_COLUMNS)
        row[_BATCHES], row[_COUNT] = batches, len(share.batches) if share is not None else 0
        row[_WINDOW], row[_STEP], row[_ACCUMULATE] = at.window, at.step, self._accumulate
        row[_ORDER], row[_REPLAY] = at.order, replay
        told: Sequence[float] = ()
        if self._control is not None:
            row[_DECISION], told = self._control.check(), self._control.row()
        return [*row, *(own.get(name, 0.0) for name in self._weights), *told]

    def _check(self, rows: list[list[float]]) -> None:
        for column in _ALIKE:
            self._agreement.same(_COLUMNS[column], [int(row[column]) for row in rows])
