"""Packing windows, and the units of delivery that they are cut into.

An epoch's positions are cut into *packing windows* of consecutive positions, each planned on its own from the
lengths of its samples. The plan of a packing window is a list of *units*, each a list of *segments* of
samples: a packed row, or a batch of samples of like length. Packing windows are closed: all segments of a
sample are in units of its own one. So a unit follows from the lengths of one packing window, known before
or measured on the way, and the number of units in all packing windows before counts them.

The first packing windows of an epoch are small and double, so that the first batch waits for few reads. Of an
epoch that has few rows, so much would be left unfilled in them that they are larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sharding.order.permutations import mix_key

FIRST_PACKING_WINDOW_SAMPLES = 1024
"""Samples of the first packing window of an epoch; each next one doubles up to the full size."""
_UNITS = 0x756E6974
"""Purpose of a key: the order of the units in a packing window."""
DEFAULT_PACKING_WINDOW_SAMPLES = 16_384
"""Samples planned together where nobody says; more pack no better in practice and hold more memory."""


@dataclass(frozen=True, kw_only=True)
class LengthStats:
    """The counts of a plan over all packing windows. They count elements of the length column."""

    units: int = 0
    """The number of packed rows, or of batches."""
    segments: int = 0
    """The number of segments of samples in them."""
    tokens: int = 0
    """The number of elements that are delivered."""
    capacity: int = 0
    """Elements that the units have room for, padding included."""
    split: int = 0
    """Samples cut into several segments; all their elements are delivered."""
    truncated: int = 0
    """Samples cut off at the end."""
    truncated_tokens: int = 0
    """The number of elements lost by that."""
    empty: int = 0
    """Samples of length 0, which a packed row cannot hold."""

    cost_max_over_mean: float = 0.0
    """The greatest cost of a rank in a step over the mean of all, on average; 0.0 without `balance=`."""

    @property
    def efficiency(self) -> float:
        """Share of the capacity that holds elements: 1.0 means no padding; 0.0 for an empty plan."""
        return self.tokens / self.capacity if self.capacity else 0.0

    @classmethod
    def total(cls, parts: Iterable[LengthStats]) -> LengthStats:
        """Sum the counts, field by field."""
        terms = list(parts)
        return cls(**{field.name: sum(getattr(term, field.name) for term in terms) for field in fields(cls)})


@dataclass(frozen=True)
class PackingWindowStart:
    """The begin of a packing window."""

    epoch: int
    position: int
    """The first sample of the packing window."""
    unit: int
    """The number of units before it."""

    @classmethod
    def from_json(cls, token: Mapping[str, object], epoch: int) -> PackingWindowStart:
        """Read the start from a state's token; the begin of the epoch where it has none."""
        numbers = [token.get(name) for name in ("first_sample", "units_before")]
        first, unit = (number if type(number) is int and number >= 0 else 0 for number in numbers)
        return cls(epoch, first, unit)

    def to_json(self) -> dict[str, object]:
        """Return what `from_json` takes."""
        return {"first_sample": self.position, "units_before": self.unit}


BEGIN = PackingWindowStart(0, 0, 0)
"""The begin of a run, or of any epoch."""


@dataclass(frozen=True, eq=False)
class Segments:
    """e segments of samples, in order."""

    position: NDArray[np.int64]
    """[e]: the sample; counted in its packing window, or in the epoch."""
    begin: NDArray[np.int64]
    """[e]: first element of the sample that the segment takes."""
    length: NDArray[np.int64]
    """The number of elements that each takes, [e]."""

    def __len__(self) -> int:
        return len(self.position)

    def take(self, rows: NDArray[np.int64] | slice) -> Segments:
        """Take some of the segments."""
        return Segments(self.position[rows], self.begin[rows], self.length[rows])

    def shifted(self, by: int) -> Segments:
        """The same segments of positions that count from elsewhere."""
        return Segments(self.position + by, self.begin, self.length)


_NONE = np.empty(0, np.int64)
NO_SEGMENTS = Segments(_NONE, _NONE, _NONE)
"""An empty sequence of segments."""


@dataclass(frozen=True, eq=False)
class PackingWindow:
    """The units of one packing window."""

    segments: Segments
    """In unit order; positions count from the packing window's first."""
    first: NDArray[np.int64]
    """[units + 1]: unit u has the segments `first[u]` up to `first[u + 1]`."""
    stats: LengthStats
    costs: NDArray[np.int64] | None = None
    """The cost of each unit, [units]; None: they are not balanced."""

    def __len__(self) -> int:
        return len(self.first) - 1


@dataclass(frozen=True, eq=False)
class BatchSegments:
    """The contents of consecutive batches."""

    segments: Segments
    """Batch after batch, row after row."""
    sizes: NDArray[np.int64]
    """[batches]: segments of each batch."""
    rows: NDArray[np.int64]
    """[batches]: units of each batch."""
    segments_of_row: NDArray[np.int64]
    """[sum of rows]: segments of each unit."""

    @classmethod
    def of(
        cls, segments: Segments, rows: NDArray[np.int64], segments_of_row: NDArray[np.int64]
    ) -> BatchSegments:
        """Batches of so many rows each, of so many segments each."""
        ends = np.concatenate(([0], np.cumsum(segments_of_row)))
        bounds = ends[np.concatenate(([0], np.cumsum(rows)))]
        return cls(segments, np.diff(bounds), rows, segments_of_row)

    def one(self, batch: int) -> BatchSegments:
        """A batch alone, counted from 0."""
        first, row = int(self.sizes[:batch].sum()), int(self.rows[:batch].sum())
        batches = slice(batch, batch + 1)
        segments = self.segments.take(slice(first, first + int(self.sizes[batch])))
        of_row = self.segments_of_row[row : row + int(self.rows[batch])]
        return BatchSegments(segments, self.sizes[batches], self.rows[batches], of_row)

    def keep(self, segments: NDArray[np.int64]) -> BatchSegments:
        """Only some segments of one batch, ascending; its rows stay, if need be empty."""
        num_rows = len(self.segments_of_row)
        row = np.repeat(np.arange(num_rows), self.segments_of_row)[segments]
        of_row = np.bincount(row, minlength=num_rows).astype(np.int64)
        return BatchSegments(self.segments.take(segments), np.array([len(segments)]), self.rows, of_row)


def lengths_in(sizes: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the lengths among those of samples, [n], or with costs, [n, 1 + costs]."""
    return sizes if sizes.ndim == 1 else sizes[:, 0]


def joined(parts: list[Segments]) -> Segments:
    """Segments one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = [(p.position, p.begin, p.length) for p in parts or [NO_SEGMENTS]]
    return Segments(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def packing_window_bounds(
    num_samples: int, size: int, multiple: int = 1, least: int = 1
) -> NDArray[np.int64]:
    """First position of every packing window, and `num_samples` at the end, int64 [packing windows + 1].

    Sizes are multiples of `multiple`, but for the last one. The first is `least`, where `size` allows that.
    """
    next_size, start, bounds = min(size, max(FIRST_PACKING_WINDOW_SAMPLES, least)), 0, list[int]()
    while next_size < size and start < num_samples:
        bounds.append(start)
        start, next_size = start + -(-next_size // multiple) * multiple, next_size * 2
    steady = np.arange(start, max(num_samples, start), -(-size // multiple) * multiple)
    return np.concatenate((bounds, steady, [num_samples])).astype(np.int64)


def units_key(seed: int, epoch: int, shuffled: bool) -> Callable[[int], int | None]:
    """Packing window -> what decides the order of its units; None: their first samples do."""
    return partial(mix_key, seed, epoch, _UNITS) if shuffled else lambda packing_window: None


def stable_order(key: NDArray[np.int64]) -> NDArray[np.int64]:
    """The stable order of keys >= 0, as `argsort`, in less time.

    Keys of sixteen bits (rows of a packing window, lengths within one) sort by radix, an eighth of the time;
    of larger ones, numpy sorts integers faster than it argsorts. The number of keys times the largest one
    must fit 63 bits.
    """
    if key.max(initial=0) < 1 << 16:
        return np.argsort(key.astype(np.uint16), kind="stable")
    n = max(1, len(key))
    packed = key * n + np.arange(len(key))
    packed.sort()
    return packed % n
