"""Samples that were made before it is known which batches they are in: gathered, kept, laid into batches.

Builders make the samples of a packing window and gather some at a time
(`dataflow.batch.samples.GatherSamples`, in the place of a `collate_fn`). They are kept by position
(`MeasuredSamples`), sent to the rank that delivers them, and taken by the segment when a batch is made: lists
as one array and its offsets, everything else as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from dataflow.batch.packed import batch_columns
from dataflow.batch.samples import (
    KEPT,
    LEAVE_OUT,
    ONE_FORM,
    Form,
    GatherSamples,
    form_of,
    not_cut,
    ragged,
    unlike_columns,
    unlike_planned,
)
from dataflow.batch.transforms import COSTS
from dataflow.outputs.held_bytes import Ranges, held_bytes
from dataflow.ragged import Ragged
from sharding.errors import SampleError
from sharding.lengths.batching import Batching
from sharding.lengths.units import BatchSegments
from sharding.order.windows import ranges
from sharding.printable import listed
from sharding.spans import Ints

_NO_COST = -1


class Lists(Struct, frozen=True, eq=False):
    """n lists of numbers or of arrays, anywhere in one array, which others may use as well."""

    values: NDArray[Any]
    """[total, ...]"""
    starts: Ints
    """[n]: first element of each."""
    lengths: Ints
    """[n] number of elements of each list."""

    def __reduce__(self) -> tuple[Any, ...]:
        whole = self.gathered()  # nobody else's elements go along
        return Lists, (whole.values, whole.starts, whole.lengths)

    def take(self, rows: Ints) -> Lists:
        """Some of them; a copy of their elements only where they are few of the array's."""
        some = Lists(self.values, self.starts[rows], self.lengths[rows])
        return some if 2 * int(some.lengths.sum()) >= len(self.values) else some.gathered()

    def ragged(
        self,
        rows: Ints,
        begin: Ints | None = None,
        length: Ints | None = None,
        *,
        is_last: bool = False,
    ) -> Ragged:
        """Copy `length[i]` elements of each of some rows, from `begin[i]` on.

        Without these, copy all elements. `is_last`: see `gathered`.
        """
        starts = self.starts[rows] if begin is None else self.starts[rows] + begin
        whole = Lists(self.values, starts, self.lengths[rows] if length is None else length)
        whole = whole.gathered(is_last=is_last)
        offsets = np.append(whole.starts, len(whole.values))
        return Ragged(torch.from_numpy(whole.values), torch.from_numpy(offsets))

    def gathered(self, *, is_last: bool = False) -> Lists:
        """The same, one after the other in an array of their own, of `is_last` maybe the one they have."""
        starts = np.cumsum(self.lengths) - self.lengths
        if is_last and self.lengths.sum() == len(self.values) and (self.starts == starts).all():
            return self
        return Lists(self.values[ranges(self.starts, self.lengths)], starts, self.lengths)

    @classmethod
    def of(cls, rows: Ragged) -> Lists:
        """Wrap the lists of a batch, which are not copied."""
        return cls(rows.values.numpy(), rows.offsets.numpy()[:-1], rows.lengths.numpy())

    @classmethod
    def joined(cls, parts: Sequence[Lists]) -> Lists:
        """Lists of several, one after the other."""
        filled = [part.values for part in parts if len(part.values)]
        if len(forms := {*map(form_of, filled)}) > 1:
            raise ValueError(f"samples of several ranks have arrays of {listed(map(str, forms))}: return one")
        filled = filled or [max((part.values for part in parts), key=np.ndim)]
        ends = np.cumsum([len(part.values) for part in parts])
        starts = [part.starts + end - len(part.values) for part, end in zip(parts, ends, strict=True)]
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate(filled), np.concatenate(starts), lengths)


class MeasuredSamples(Struct, frozen=True, eq=False):
    """Samples that were made, by position."""

    positions: Ints
    """[n] positions, ascending, each once."""
    columns: Mapping[str, Lists | list[Any]]
    """Columns of n samples each."""

    def __len__(self) -> int:
        return len(self.positions)

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any], positions: Ints) -> MeasuredSamples:
        """Keep what `GatherSamples` put together, of the positions of all that it might have got."""
        columns = {
            name: Lists.of(value) if isinstance(value, Ragged) else value
            for name, value in batch.items()
            if name != KEPT
        }
        return cls(positions[batch[KEPT].numpy()], columns)

    def costs(self, names: Sequence[str]) -> Ints:
        """The costs of columns, [n, names], each as `cost_of` says."""
        if not len(self) or COSTS in self.columns:
            costs: Any = self.columns.get(COSTS, ())
            return np.array(costs, np.int64).reshape(len(self), len(names))
        columns = [self.columns.get(name, [_NO_COST] * len(self)) for name in names]
        costs = [c.lengths if isinstance(c, Lists) else [*map(cost_of, c)] for c in columns]
        return np.array(costs, np.int64).reshape(len(names), len(self)).T

    def wrong_costs(self, batching: Batching) -> Iterator[tuple[int, str]]:
        """The row and the reason of each cost that is wrong."""
        names = batching.cost_columns
        for name, costs in zip(names, self.costs(names).T, strict=True):
            reasons = [cost_reason(batching, name, cost) for cost in costs.tolist()]
            yield from ((row, reason) for row, reason in enumerate(reasons) if reason)

    @property
    def nbytes(self) -> int:
        """The bytes that the samples hold, about."""
        list_columns = [column for column in self.columns.values() if isinstance(column, Lists)]
        others = [column for column in self.columns.values() if not isinstance(column, Lists)]
        return sum(lists.values.nbytes for lists in list_columns) + held_bytes(others, Ranges())

    def take(self, rows: Ints) -> MeasuredSamples:
        """Return some of the samples, ascending."""
        return MeasuredSamples(
            self.positions[rows], {name: _taken(c, rows) for name, c in self.columns.items()}
        )

    def without(self, rows: Sequence[int]) -> MeasuredSamples:
        """Return all but some of the samples."""
        return self.take(np.delete(np.arange(len(self)), rows)) if rows else self

    def one(self, row: int) -> dict[str, Any]:
        """Return the values of one sample; of columns of lists, as they are, all of them."""
        return {n: c.values if isinstance(c, Lists) else c[row] for n, c in self.columns.items()}

    def with_lists(self, names: Sequence[str]) -> MeasuredSamples:
        """The same with columns of arrays that are of one form now as `Lists`."""
        columns = [(name, self.columns[name]) for name in names]
        lists = {name: Lists.of(ragged(values)) for name, values in columns if isinstance(values, list)}
        return MeasuredSamples(self.positions, {**self.columns, **lists}) if lists else self

    def has(self, positions: Ints) -> NDArray[np.bool_]:
        """Return which of these positions it has the samples of, bool [n]."""
        rows = np.minimum(np.searchsorted(self.positions, positions), max(0, len(self) - 1))
        return self.positions[rows] == positions if len(self) else np.zeros(len(positions), bool)

    def among(self, positions: Ints) -> MeasuredSamples:
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
        self, batching: Batching, segments: BatchSegments, forms: SampleForms, *, is_last: bool = False
    ) -> dict[str, Any]:
        """One batch of a plan, as `batch_columns` forms it.

        `forms` knows the dtype and shape of columns in which none of its samples has an element. `is_last`:
        the samples are in no other batch, which may have their arrays.
        """
        pieces = segments.segments
        rows = np.searchsorted(self.positions, pieces.position)
        columns: dict[str, Any] = {}
        for name, column in self.columns.items():
            if isinstance(column, Lists):
                cut = (pieces.begin, pieces.length) if name in batching.columns else ()
                columns[name] = forms.given(name, column.ragged(rows, *cut, is_last=is_last))
            else:
                columns[name] = _of_segments(_taken(column, rows))
        return batch_columns(batching, segments, columns)


class MadeToMeasure:
    """Stands for a transform without `measure` whose samples do not fit: makes each, and keeps its lengths.

    Samples are as those of `LengthsAlone`; one that cannot be gathered is as it was made.
    """

    def __init__(
        self, transform: Callable[..., Any] | None, batching: Batching, gather: GatherSamples
    ) -> None:
        self._transform, self._gather = transform, gather
        self._columns, self._costs = batching.columns, batching.cost_columns

    def __call__(self, sample: Any, **draws: np.random.Generator) -> Any:
        """Make a sample, given `rng` where the transform takes it."""
        result = sample if self._transform is None else self._transform(sample, **draws)
        gathered, reason = self._gather.checked(result)
        if reason:
            return result
        lists = {name: np.asarray(gathered[name])[:0].copy() for name in self._gather.lists}
        lists |= {name: np.zeros(len(gathered[name]), np.int8) for name in self._columns}
        return {**lists, COSTS: [cost_of(gathered.get(name, _NO_COST)) for name in self._costs]}


class SampleForms:
    """The one dtype and trailing shape that samples have in columns of arrays: those of the first."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Form, NDArray[Any], int | None]] = {}

    def given(self, column: str, rows: Ragged) -> Ragged:
        """The rows; where they have no element, with the dtype and shape that others have."""
        if len(rows.values) or column not in self._known or (empty := self._known[column][1]).ndim == 1:
            return rows
        return Ragged(torch.from_numpy(empty.copy()), rows.offsets)

    def misfits(
        self, samples: MeasuredSamples, gather: GatherSamples, other: Callable[[int], SampleError | None]
    ) -> dict[int, str]:
        """{row: what is wrong with its arrays} of samples that `gather` has gathered.

        `other`: the position of a sample that has it right -> an error that names it, if it can be named.
        """
        wrong: dict[int, str] = {}
        for name, default in gather.optional.items():
            if form := form_of(default):
                self._known.setdefault(name, (form, default[:0], None))
        for name in gather.lists if len(samples) else ():
            column = samples.columns[name]
            if isinstance(column, Lists):  # all of one form
                arrays = [(column.values, np.flatnonzero(column.lengths).tolist() or [0])]
            else:
                arrays = [(value, [row]) for row, value in enumerate(column)]
            for value, rows in arrays:
                if (form := form_of(value)) is None:
                    continue
                if name not in self._known:  # a view would keep all of the batch
                    self._known[name] = form, value[:0].copy(), int(samples.positions[rows[0]])
                known, _, position = self._known[name]
                if form != known:
                    whose = f"{_named(position, other)} {_said(known)}"
                    text = f"column {name!r} has {_said(form)}, but {whose}; {ONE_FORM}"
                    wrong |= {row: text for row in rows if row not in wrong}
        return wrong


def _named(position: int | None, other: Callable[[int], SampleError | None]) -> str:
    """Say who has arrays right; `position`: of that sample, None: it is a default."""
    if position is None:
        return "the default of Optional has"
    error = other(position)
    return f"sample {error.key!r} of {error.shard} has" if error else "samples of other batches have"


def _said(form: Form) -> str:
    dtype, shape = form
    return f"arrays of {dtype} [n, {', '.join(map(str, shape))}]" if shape else "lists of numbers"


NO_SAMPLES = MeasuredSamples(np.empty(0, np.int64), {})


def made_for(
    segments: BatchSegments, gathered: dict[str, Any], samples: list[Any], kept: Ints
) -> MeasuredSamples:
    """Samples that were made for a batch and gathered, and leave the list; `kept`: a segment of each."""
    samples.clear()  # pixels are there once
    batch = {**gathered, KEPT: torch.from_numpy(kept)}
    return MeasuredSamples.of_batch(batch, segments.segments.position)


def batch_of_made(
    batching: Batching, samples: MeasuredSamples, segments: BatchSegments, forms: SampleForms
) -> tuple[dict[str, Any], Ints]:
    """A batch of samples that were made for it, in any order, and which of its segments are there."""
    positions = segments.segments.position
    ordered = samples.take(np.argsort(samples.positions))
    there: Ints = np.flatnonzero(ordered.has(positions))
    segments = segments if len(there) == len(positions) else segments.keep(there)
    return ordered.batch(batching, segments, forms, is_last=True), there


def length_reason(batching: Batching, sample: Mapping[str, Any], planned: Ints) -> tuple[str, bool]:
    """Return what is wrong with a sample's lengths, "": nothing; and whether it is not what was planned.

    That is its length, and its costs, [1 + costs].
    """
    lengths, names = [len(sample[name]) for name in batching.columns], batching.cost_columns
    if reason := unlike_columns(batching.columns, lengths):
        return reason, False
    counts = [lengths[0], *(cost_of(sample.get(name, _NO_COST)) for name in names)]
    for name, num, said in zip((batching.column, *names), counts, planned.tolist(), strict=True):
        if num != said:
            is_wrong = num != _NO_COST
            return unlike_planned(name, num, said) if is_wrong else cost_reason(batching, name, num), is_wrong
    return cut_reason(batching, lengths[0], sample), False


def cost_of(value: Any) -> int:
    """Return what a value of a cost column counts: itself, a whole number, or its length; 0 for None.

    -1 where it is neither.
    """
    if value is None:
        return 0
    if isinstance(value, list | tuple | bytes) or np.ndim(value):
        return len(value)
    try:
        return max(_NO_COST, index(value))
    except TypeError:
        return _NO_COST


def cost_reason(batching: Batching, column: str, cost: int) -> str:
    """Return what is wrong with a sample's cost; "": nothing."""
    if cost == _NO_COST:
        return f"column {column!r} of balance= or budget= has no whole number >= 0, nor a list, in the sample"
    most = batching.most_costs.get(column, cost)
    text = f"column {column!r} counts {cost:,}, above budget={{{column!r}: {most}}}"
    return f"{text}: raise it, make the sample smaller, {LEAVE_OUT}" if cost > most else ""


def cut_reason(batching: Batching, length: int, sample: Mapping[str, Any]) -> str:
    """Return why a sample of such a length is not cut; "": it may be, or fits."""
    if batching.longest is None or length <= batching.longest or batching.refused_beyond is not None:
        return ""
    for name, value in sample.items():
        if name not in batching.columns and getattr(value, "ndim", 0) > 1:
            return f"column {batching.column!r} has {length:,} elements; {not_cut(batching, name)}"
    return ""


def _taken(column: Lists | list[Any], rows: Ints) -> Any:
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
