"""The bar of an epoch: batches, samples a second, the share of the time spent waiting, and the time left.

A batch costs a clock reading and a comparison. What is shown comes from the loader's `stats()`, which is
asked when the bar is drawn: rates are those of the last seconds, and at the end those of the loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import ref

from dataflow.progress.bar import REDRAW_S, ProgressBar
from dataflow.progress.observer import EpochPosition
from dataflow.stats import LoaderStats, WorkerStats
from dataflow.tables import number_text
from dataflow.telemetry.status.facts import ranks_of
from dataflow.topology_exchange import rank_and_world_size
from prefetch.memory.lifetimes import InlineFinalizer

Stats = LoaderStats | WorkerStats
_RECENT_S = 5.0
"""Seconds over which rates are taken, so that they follow a change and do not flicker."""


class LoaderBar:
    """Shows a bar of each loop over a loader, on rank 0; see `LoaderObserver`.

    Args:
        progress: its title, or True.
        batch_size: samples of a batch, where the loader's figures have none; None: not known.
        now: seconds on a clock that only goes forward.
        make: makes the bar.
    """

    def __init__(
        self,
        progress: bool | str,
        batch_size: int | None,
        now: Callable[[], float] = time.monotonic,
        make: Callable[..., ProgressBar] = ProgressBar,
    ) -> None:
        self._title = progress if isinstance(progress, str) else ""
        self.batch_size, self.now, self._make = batch_size, now, make
        self._newest: ref[EpochBar] | None = None
        """The bar of the newest loop: a traceback that is kept keeps a loop that was left, and its bar."""

    def begin(self, owner: Any, epoch: int, position: Callable[[], EpochPosition]) -> BarLoop | None:
        """See `LoaderObserver`."""
        if rank_and_world_size()[0] or ranks_of(owner)[0]:  # maybe given, for a job that nothing tells of
            return None
        if self._newest is not None and (last := self._newest()) is not None:
            last.close()
        begins, title = position(), self._title or f"epoch {epoch}"
        bar = self._make(
            title, total=begins.num_batches, done=begins.batches, unit="batch", stays=True, visible=True
        )
        shown = EpochBar(self, owner, begins, bar)
        self._newest = ref(shown)
        return BarLoop(self, shown)


class EpochBar:
    """The bar of one loop over a loader.

    Args:
        settings: those of all loops.
        owner: what serves the loop.
        position: where the loop begins.
        bar: the bar.
    """

    def __init__(self, settings: LoaderBar, owner: Any, position: EpochPosition, bar: ProgressBar) -> None:
        self._batch_size, self._owner, self._bar = settings.batch_size, ref(owner), bar
        self._first, self._text = owner.stats(), ""
        self._snapshots = deque([self._first], maxlen=int(_RECENT_S / REDRAW_S))
        self._total, self.done = position.num_batches, position.batches

    def draw(self) -> None:
        """Draw the present state."""
        if (owner := self._owner()) is not None:
            self._snapshots.append(owner.stats())
            self._text = rates_text(self._snapshots[-1], self._snapshots[0], self._batch_size)
        self._bar.draw(self.done, self._total, self._text)

    def end(self) -> None:
        """Close the bar of a loop that came to its end: it shows the whole loop."""
        if (owner := self._owner()) is not None:
            self._text = rates_text(owner.stats(), self._first, self._batch_size)
        self._total = self.done or None
        self.close()

    def close(self) -> None:
        """Close the bar where the loop stands. Idempotent."""
        self._bar.show(self.done, self._total, self._text)
        self._bar.close()


class BarLoop:
    """One loop that has a bar; see `LoopObserver`."""

    def __init__(self, settings: LoaderBar, bar: EpochBar) -> None:
        self._bar, self._now, self._due = bar, settings.now, 0.0
        self._left = InlineFinalizer(self, bar.close)

    def batch(self, asked_s: float) -> None:
        """Note that a batch is handed out, and draw, if that is due."""
        self._bar.done += 1
        if self._now() >= self._due:
            self._bar.draw()
            self._due = self._now() + REDRAW_S

    def end(self, asked_s: float, error: BaseException | None = None) -> None:
        """Close the bar."""
        self._left.cancel()
        if error is None:
            self._bar.end()
        else:
            self._bar.close()


def rates_text(now: Any, before: Any, batch_size: int | None) -> str:
    """Samples a second and the share of waiting between two snapshots: "512 samples/s, waiting 3%"."""
    stats: Stats = now.since(before)
    if stats.elapsed_s <= 0:
        return ""
    waiting = f"waiting {min(1.0, stats.stall_share):.0%}"
    if isinstance(stats, LoaderStats):
        return f"{number_text(stats.samples_per_s)} samples/s, {waiting}"
    if batch_size is None:
        return waiting
    return f"{number_text(stats.batches_per_s * batch_size)} samples/s, {waiting}"
