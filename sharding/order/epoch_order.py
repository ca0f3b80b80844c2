"""Define what plans and the stream ask of an epoch's order, of one dataset or of a mixture.

`Windows` tell where positions lie, and what a window consists of; an `EpochOrder` also tells samples. `Order`
and `MixtureWindows` are epoch orders; a full shuffle, whose order has no windows, is cut into some when it is
staged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sharding.order.shuffle import Shuffle
from sharding.spans import Ints


class SourceWindow(NamedTuple):
    """A window as one of the datasets that an order is over has it."""

    source: int
    """The number of the source in a mixture; 0 where there is one dataset."""
    epoch: int | None
    """The source's own epoch, in a mixture."""
    windows: Windows
    """The windows of the source."""
    number: int
    """The number of the window, in these."""


class Windows(Protocol):
    """The protocol of windows: it locates positions, and tells what windows consist of."""

    def window_span(self, window: int) -> tuple[int, int]:
        """First position of the window, and the one after its last."""
        ...

    def window_positions(self, window: int) -> Ints:
        """The position of each index of the window; -1: not in this epoch."""
        ...

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Window and index of each position."""
        ...

    def window_length(self, window: int) -> int:
        """Return the number of samples in the window."""
        ...

    def window_blocks(self, window: int) -> Ints:
        """Blocks of the window in read order: rows of its source's block table."""
        ...

    def window_samples(self, window: int, indices: Ints | None = None) -> tuple[NDArray[np.int32], Ints]:
        """Block ordinal and row in the block of each index, or of those given."""
        ...

    def source_window(self, window: int) -> SourceWindow:
        """The window as its source has it."""
        ...


class EpochOrder(Windows, Protocol):
    """The order of the samples in one epoch. Thread-safe; the same arguments give the same one anywhere."""

    @property
    def seed(self) -> int:
        """Return the seed of the order."""
        ...

    @property
    def epoch(self) -> int:
        """Return the number of the epoch."""
        ...

    @property
    def shuffle(self) -> Shuffle:
        """The shuffle with nothing left open: what a resume must use to get the same order."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples of the epoch: positions lie below."""
        ...

    @property
    def num_lanes(self) -> int:
        """Lanes that positions are dealt to."""
        ...

    @property
    def known_from(self) -> int:
        """The first position whose sample is known; 0 but for some epochs of mixtures."""
        ...

    def samples(self, positions: Ints) -> Ints:
        """The number of the sample at each position; those of a mixture's sources are counted through."""
        ...

    def in_order(self, begin: int = 0) -> Iterator[tuple[Ints, Ints]]:
        """Positions and their sample numbers: all from `begin` on, each once."""
        ...
