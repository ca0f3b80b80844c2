"""The bar of an epoch: batches, samples a second, the share of the time spent waiting, and the time left.

A batch costs a clock reading and a comparison. What is shown comes from the loader's `stats()`, which is
asked when the bar is drawn: rates are those of the last seconds, and at the end those of the loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch.utils.data import get_worker_info

from dataflow.progress.bar import REDRAW_S, ProgressBar
from dataflow.tables import number_text
from prefetch.memory.lifetimes import InlineFinalizer

_RECENT_S = 5.0
"""Seconds over which rates are taken, so that they follow a change and do not flicker."""


class EpochPosition(NamedTuple):
    """A place in an epoch where a loop begins."""

    epoch: int
    batches: int
    """Batches of the epoch that come before, on this rank."""
    num_batches: int | None
    """Batches of the whole epoch, on this rank; None: not known, or without end."""


class _Reading(NamedTuple):
    """Figures of a loader at one time."""

    at_s: float
    samples: float | None
    """Samples delivered; None: they are not counted."""
    waited_s: float


class EpochBar:
    """The bar of one loop over a loader.

    Args:
        loader: the loader.
        position: where the loop begins.
        now: seconds on a clock that only goes forward.
        make: makes the bar.
    """

    def __init__(
        self,
        loader: Any,
        position: EpochPosition,
        now: Callable[[], float],
        make: Callable[..., ProgressBar] = ProgressBar,
    ) -> None:
        self._loader, self._position, self._now = ref(loader), position, now
        self._readings: deque[_Reading] = deque([self._read(loader)], maxlen=int(_RECENT_S / REDRAW_S))
        self._first = self._readings[0]
        self._text = ""
        self.num_batches = 0
        """Batches that this loop has handed out."""
        title = loader.progress if isinstance(loader.progress, str) else f"epoch {position.epoch}"
        self._total = position.num_batches
        self._bar = make(
            title,
            total=self._total,
            done=position.batches,
            unit="batch",
            stays=True,
            visible=True,
        )

    def draw(self) -> None:
        """Draw the present state."""
        loader = self._loader()
        if loader is None:
            return
        reading = self._read(loader)
        self._readings.append(reading)
        self._text = rates_text(self._readings[0], reading)
        self._bar.draw(self._done, self._total, self._text)

    def end(self) -> None:
        """Close the bar of a loop that came to its end: it shows the whole loop."""
        loader = self._loader()
        if loader is not None:
            self._text = rates_text(self._first, self._read(loader))
            self._total = self._done or None
        self.close()

    def close(self) -> None:
        """Close the bar where the loop stands. Idempotent."""
        self._bar.show(self._done, self._total, self._text)
        self._bar.close()

    @property
    def _done(self) -> int:
        return self._position.batches + self.num_batches

    def _read(self, loader: Any) -> _Reading:
        stats = loader.stats()
        samples = getattr(stats, "samples", None)
        if samples is None and loader.batch_size is not None:
            samples = stats.batches * loader.batch_size
        return _Reading(self._now(), samples, stats.starved_s)


def rates_text(before: _Reading, after: _Reading) -> str:
    """Samples a second and the share of waiting between two readings: "512 samples/s, waiting 3%"."""
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        return ""
    share = min(1.0, max(0.0, after.waited_s - before.waited_s) / seconds)
    waiting = f"waiting {share:.0%}"
    if before.samples is None or after.samples is None:
        return waiting
    return f"{number_text(max(0.0, after.samples - before.samples) / seconds)} samples/s, {waiting}"


class BatchesWithBar:
    """An iterator over a loader's batches that draws their bar, and all else that the loader's iterator is.

    Args:
        batches: the loader's own iterator.
        begin: makes the bar, when the first batch is asked for: by then the epoch is known.
        now: seconds on a clock that only goes forward.
    """

    def __init__(
        self, batches: Any, begin: Callable[[], EpochBar], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._batches, self._begin, self._now = batches, begin, now
        self._bar: EpochBar | None = None
        self._due = 0.0
        self._finalizer: InlineFinalizer | None = None

    def __iter__(self) -> BatchesWithBar:
        return self

    def __next__(self) -> Any:
        if self._bar is None:
            self._bar = self._begin()
            # A loop that is left by `break` tells nobody: its iterator dies.
            self._finalizer = InlineFinalizer(self, self._bar.close)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._bar.end()
            raise
        except BaseException:
            self._bar.close()
            raise
        self._bar.num_batches += 1
        if self._now() >= self._due:
            self._bar.draw()
            self._due = self._now() + REDRAW_S
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


_BARS: WeakKeyDictionary[Any, ref[EpochBar]] = WeakKeyDictionary()
"""The bar of each loader's newest loop: a traceback that is kept keeps a loop that was left, and its bar."""


def with_bar(
    batches: Any,
    loader: Any,
    position: Callable[[], EpochPosition],
    now: Callable[[], float] = time.monotonic,
    make: Callable[..., ProgressBar] = ProgressBar,
) -> Any:
    """The batches of a loop over a loader, with their bar on rank 0, and as they are elsewhere."""
    from dataflow.topology_exchange import rank_and_world_size

    topology = getattr(loader, "topology", None)  # of shards, and maybe given for a job that nothing tells of
    rank = rank_and_world_size()[0] or (topology.rank if topology is not None else 0)
    if rank != 0 or get_worker_info() is not None:
        return batches

    def begin() -> EpochBar:
        last = _BARS.get(loader)
        if last is not None and (bar := last()) is not None:
            bar.close()
        bar = EpochBar(loader, position(), now, make)
        _BARS[loader] = ref(bar)
        return bar

    return BatchesWithBar(batches, begin, now)
