"""Observers of the loops over a loader: both engines of `DataLoader` tell one, if there is one.

`LoaderObserver.begin` is told of each loop, and what it returns of the loop's batches and its end.
That object belongs to the loop alone and dies with it: a loop that is left by `break` tells nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

Role = Literal["train", "validation"]
DATA_STALL = "DATAFLOW_HEADSPACE"
"""The environment variable by which `dataflow doctor --headspace` asks for batches from memory, after so many
steps."""
REPLAYED = "dataflow.telemetry.timing.loops:replayed"
"""The function that gives these."""
WATCHERS = "dataflow.telemetry.watchers:observe"
"""The function that has a loader watched: `(loader, owner, name, role)` -> its line on the page, or None."""


class EpochPosition(NamedTuple):
    """A place in an epoch where a loop begins."""

    epoch: int
    batches: int
    """Batches of the epoch that come before, on this rank."""
    num_batches: int | None
    """Batches of the whole epoch, on this rank; None: not known, or without end."""


class LoopObserver(Protocol):
    """Watches one loop. Its calls are cheap, and raise nothing.

    `asked_s`: when the training asked for what it gets now, on the clock of `time.perf_counter`.
    """

    def batch(self, asked_s: float) -> None:
        """Note that a batch is handed out."""

    def end(self, asked_s: float, error: BaseException | None = None) -> None:
        """Note that the loop has ended, or failed."""


class LoaderObserver(Protocol):
    """Watches a loader."""

    def begin(self, owner: Any, epoch: int, position: Callable[[], EpochPosition]) -> LoopObserver | None:
        """Note that a loop begins; None: it need not be told of its batches.

        Args:
            owner: what serves the loop, with `stats()`; the loader may be gone.
            epoch: which epoch it runs.
            position: says where in it.
        """


class ObserverGroup:
    """Several observers of one loader, or of one loop."""

    def __init__(self, observers: Sequence[Any]) -> None:
        self._observers = observers

    def begin(self, owner: Any, epoch: int, position: Callable[[], EpochPosition]) -> LoopObserver:
        """See `LoaderObserver`."""
        loops = [observer.begin(owner, epoch, position) for observer in self._observers]
        return ObserverGroup([loop for loop in loops if loop is not None])

    def batch(self, asked_s: float) -> None:
        """See `LoopObserver`."""
        for observer in self._observers:
            observer.batch(asked_s)

    def end(self, asked_s: float, error: BaseException | None = None) -> None:
        """See `LoopObserver`."""
        for observer in self._observers:
            observer.end(asked_s, error)
