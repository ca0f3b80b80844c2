"""Samples that were made before it is known which batches they are in: gathered, kept, laid into batches.

Builders make the samples of a megabatch and gather some at a time (`dataflow.batch.samples.GatherSamples`,
in the place of a `collate_fn`). They are kept by position (`MeasuredSamples`), sent to the rank that delivers
them, and taken by the segment when a batch is made: lists as one array and its offsets, everything else as it
is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from dataflow.batch.packed import batch_columns
from dataflow.batch.samples import KEPT, unlike_columns, unlike_planned
from dataflow.outputs.held_bytes import Ranges, held_bytes
from dataflow.ragged import Ragged
from sharding.lengths.batching import Batching
from sharding.lengths.units import BatchSegments
from sharding.order.windows import ranges
from sharding.printable import listed


class Lists(Struct, frozen=True, eq=False):
    """n lists of numbers, anywhere in one array, which others may use as well."""

    values: NDArray[Any]
    starts: NDArray[np.int64]
    """[n]: first element of each."""
    lengths: NDArray[np.int64]
    """[n] number of elements of each list."""

    def __reduce__(self) -> tuple[Any, ...]:
        whole = self.gathered()  # nobody else's elements go along
        return Lists, (whole.values, whole.starts, whole.lengths)

    def take(self, rows: NDArray[np.int64]) -> Lists:
        """Some of them; a copy of their elements only where they are few of the array's."""
        return Lists(self.values, self.starts[rows], self.lengths[rows]).compact()

    def ragged(
        self,
        rows: NDArray[np.int64],
        begin: NDArray[np.int64] | None = None,
        length: NDArray[np.int64] | None = None,
    ) -> Ragged:
        """Copy `length[i]` elements of each of some rows, from `begin[i]` on.

        Without these, copy all elements.
        """
        starts = self.starts[rows] if begin is None else self.starts[rows] + begin
        whole = Lists(self.values, starts, self.lengths[rows] if length is None else length).gathered()
        offsets = np.append(whole.starts, len(whole.values))
        return Ragged(torch.from_numpy(whole.values), torch.from_numpy(offsets))

    def gathered(self) -> Lists:
        """The same, one after the other in an array of their own."""
        ends = np.cumsum(self.lengths)
        return Lists(self.values[ranges(self.starts, self.lengths)], ends - self.lengths, self.lengths)

    def compact(self) -> Lists:
        """The same in an array that is at most twice as long as they are."""
        return self if 2 * int(self.lengths.sum()) >= len(self.values) else self.gathered()

    @classmethod
    def of(cls, rows: Ragged) -> Lists:
        """Wrap the lists of a batch, which are not copied."""
        return cls(rows.values.numpy(), rows.offsets.numpy()[:-1], rows.lengths.numpy())

    @classmethod
    def joined(cls, parts: Sequence[Lists]) -> Lists:
        """Lists of several, one after the other."""
        filled = [part.values for part in parts if len(part.values)] or [parts[0].values]
        ends = np.cumsum([len(part.values) for part in parts])
        starts = [part.starts + end - len(part.values) for part, end in zip(parts, ends, strict=True)]
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate(filled), np.concatenate(starts), lengths)


class MeasuredSamples(Struct, frozen=True, eq=False):
    """Samples that were made, by position."""

    positions: NDArray[np.int64]
    """[n] positions, ascending, each once."""
    columns: Mapping[str, Lists | list[Any]]
    """Columns of n samples each."""

    def __len__(self) -> int:
        return len(self.positions)

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any], positions: NDArray[np.int64]) -> MeasuredSamples:
        """Keep what `GatherSamples` put together, of the positions of all that it might have got."""
        columns = {
            name: Lists.of(value) if isinstance(value, Ragged) else value
            for name, value in batch.items()
            if name != KEPT
        }
        return cls(positions[batch[KEPT].numpy()], columns)

    @property
    def nbytes(self) -> int:
        """The bytes that the samples hold, about."""
        own = [column for column in self.columns.values() if isinstance(column, Lists)]
        others = [column for column in self.columns.values() if not isinstance(column, Lists)]
        return sum(lists.values.nbytes for lists in own) + held_bytes(others, Ranges())

    def column_of_arrays(self, row: int, *, but: Collection[str]) -> str:
        """Return the first column, but for some, whose value of a row has 2 dimensions or more; "": none."""
        for name, column in self.columns.items():
            value = column.values if isinstance(column, Lists) else column[row]
            if name not in but and isinstance(value, Tensor | np.ndarray) and value.ndim > 1:
                return name
        return ""

    def take(self, rows: NDArray[np.int64]) -> MeasuredSamples:
        """Return some of the samples, ascending."""
        return MeasuredSamples(
            self.positions[rows], {name: _taken(c, rows) for name, c in self.columns.items()}
        )

    def has(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these positions it has the samples of, bool [n]."""
        at = np.minimum(np.searchsorted(self.positions, positions), max(0, len(self) - 1))
        return self.positions[at] == positions if len(self) else np.zeros(len(positions), bool)

    def among(self, positions: NDArray[np.int64]) -> MeasuredSamples:
        """Return the samples of some positions, ascending; some of these may be lacking."""
        return self.take(np.flatnonzero(np.isin(self.positions, positions, assume_unique=True)))

    @classmethod
    def joined(cls, parts: Sequence[MeasuredSamples]) -> MeasuredSamples:
        """All of them by position. `ValueError` where they have not the same columns."""
        parts = [part for part in parts if len(part)] or [*parts[:1]]
        if len(parts) <= 1:
            return parts[0] if parts else NO_SAMPLES
        for part in parts[1:]:
            if part.columns.keys() != parts[0].columns.keys():
                raise ValueError(
                    f"samples have the columns {listed(parts[0].columns)}, and others "
                    f"{listed(part.columns)}: return the same columns for every sample"
                )
        positions = np.concatenate([part.positions for part in parts])
        columns = {name: _joined([part.columns[name] for part in parts]) for name in parts[0].columns}
        whole = cls(positions, columns)
        if (np.diff(positions) > 0).all():
            return whole
        return whole.take(np.argsort(positions))

    def batch(
        self,
        batching: Batching,
        segments: BatchSegments,
    ) -> dict[str, Any]:
        """One batch of a plan, as `batch_columns` forms it."""
        own = segments.segments
        rows = np.searchsorted(self.positions, own.position)
        columns: dict[str, Any] = {}
        for name, column in self.columns.items():
            if isinstance(column, Lists):
                cut = (own.begin, own.length) if name in batching.columns else ()
                columns[name] = column.ragged(rows, *cut)
            else:
                columns[name] = _of_segments(_taken(column, rows))
        return batch_columns(batching, segments, columns)


NO_SAMPLES = MeasuredSamples(np.empty(0, np.int64), {})


def batch_of_made(
    batching: Batching, samples: Mapping[str, Any], kept: NDArray[np.int64], segments: BatchSegments
) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """A batch of samples that were made for it, and which of its segments are there.

    Args:
        batching: what the batch was planned by.
        samples: as `GatherSamples` gives them.
        kept: [samples], a segment of each.
        segments: of the whole batch.
    """
    positions = segments.segments.position
    own = MeasuredSamples.of_batch({**samples, KEPT: torch.from_numpy(kept)}, positions)
    own = own.take(np.argsort(own.positions))
    there: NDArray[np.int64] = np.flatnonzero(own.has(positions))
    segments = segments if len(there) == len(positions) else segments.keep(there)
    return own.batch(batching, segments), there


def length_reason(batching: Batching, sample: Mapping[str, Any], planned: int) -> tuple[str, bool]:
    """Return what is wrong with a sample's lengths, "": nothing; and whether it is not what was planned."""
    lengths = [len(sample[name]) for name in batching.columns]
    if reason := unlike_columns(batching.columns, lengths):
        return reason, False
    is_wrong = lengths[0] != planned
    return unlike_planned(batching.column, lengths[0], planned) if is_wrong else "", is_wrong


def _taken(column: Lists | list[Any], rows: NDArray[np.int64]) -> Any:
    return column.take(rows) if isinstance(column, Lists) else [column[row] for row in rows.tolist()]


def _joined(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], Lists):
        return Lists.joined(columns)
    return [value for column in columns for value in column]


def _of_segments(values: list[Any]) -> Tensor | list[Any]:
    """Numbers as a tensor; all else as it is."""
    if values and all(type(value) in (int, float, bool) for value in values):
        return torch.tensor(values)
    return values
