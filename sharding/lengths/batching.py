"""Define length-aware batches: three frozen values of the user's, each of which cuts a megabatch.

`Packed` fills rows of a fixed length with several documents each, `TokenBudget` makes batches of like
padded size, `Bucketed` batches of a fixed number of samples of like length. See docs/guide/batching.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from sharding.lengths.cutting import Overlong
    from sharding.lengths.units import Segments, Units


_ROWS = 256
"""Rows of a megabatch of which one is half full on average: 0.998 of them holds elements."""
Lengths = str | ArrayLike | Callable[[Any], ArrayLike] | Mapping[str, Any]
"""The lengths of samples: a column (its values if they are integers, else their lengths), an array with one
entry a sample in file order, or a function of the catalog that gives one. Of a mixture, a column or a
function holds for all sources; else one of these a source, as a list or by dataset. A mapping from names of
columns gives those of several: of the first column, and of the columns that count as costs."""
Costs = Callable[[Mapping[str, NDArray[np.int64]]], NDArray[np.integer]]
"""Column -> lengths of segments, int64 [n]; returns what each costs, whole numbers >= 0, [n]."""
_PROBE = np.arange(64, dtype=np.int64) ** 2


@dataclass(frozen=True, kw_only=True)
class BatchedColumns:
    """The settings of columns that every batching has, beside the one whose lengths count, and its own."""

    kind: ClassVar[str]
    """The name of the kind in a state."""
    columns: Sequence[str] = ()
    """The columns that are cut, packed or padded alike: lists, in each sample as long as that of `column`."""
    whole: Sequence[str] = ()
    """Columns of lists that come whole, once a segment, where others are cut."""
    pad: int | Mapping[str, int] = 0
    """The value that fills up; for each column by name, 0 for those not named."""
    lengths: Lengths | None = field(default=None, compare=False, repr=False)
    """The lengths of samples; None: those of `column`."""
    lengths_key: str = field(default="", compare=False)
    """Names the lengths of samples that a transform makes, so that they are kept for later runs: change it
    when the transform changes. A transform with a `fingerprint` needs none."""
    window: int | None = None
    """Samples of a megabatch: consecutive ones of the epoch's order that are planned together, and whose
    blocks are held in memory. None: 16,384, less where samples are large for the memory limit, or where
    lengths are measured, which is done again for all of them where a run goes on inside a megabatch."""
    balance: str | Costs | None = None
    """What a row or batch costs, so that ranks take those of like cost in the same step: a column, whose
    lengths count (of integers, they are the costs), or a function from the lengths of segments, by column, to
    the costs of these. It gets the columns that are cut, those in `whole`, and those of a `budget`."""
    balance_group: int = 64
    """Rows or batches of like cost that follow one another: those of all ranks in a step, or a multiple."""

    def _resolve(self, column: str) -> None:
        """Let `column` lead `columns`, and check the names. Idempotent."""
        for name in ("columns", "whole"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a list of names, got {getattr(self, name)!r}")
        if twice := [name for name in self.columns if list(self.columns).count(name) > 1]:
            raise ValueError(f"columns names {twice[0]!r} twice")
        lead = column or next(iter(self.columns), "tokens")
        columns = (lead, *(name for name in self.columns if name != lead))
        for field_, value in (("column", lead), ("columns", columns), ("whole", tuple(self.whole))):
            object.__setattr__(self, field_, value)
        if both := [name for name in self.whole if name in columns]:
            raise ValueError(f"column {both[0]!r} is in columns and in whole")
        padded = self.pad if isinstance(self.pad, Mapping) else {}
        if strange := [name for name in padded if name not in columns]:
            raise ValueError(f"pad names {strange[0]!r}, which is not in columns={list(columns)}")
        if not isinstance(self.lengths_key, str) or len(self.lengths_key) > 128:
            raise ValueError(f"lengths_key must be at most 128 characters, got {self.lengths_key!r}")
        if self.lengths_key and self.lengths is not None:
            raise ValueError("lengths= says how long samples are: leave lengths_key out")
        if self.window is not None:
            _check_at_least(self, 1, "window")
        _check_at_least(self, 1, "balance_group")
        if not (self.balance is None or isinstance(self.balance, str) or callable(self.balance)):
            raise ValueError(f"balance must be a column or a function of lengths, got {self.balance!r}")
        if (
            isinstance(self.lengths, Mapping)
            and self.lengths
            and all(isinstance(n, str) for n in self.lengths)
        ):
            names = [lead, *self.cost_columns]
            if strange := [name for name in self.lengths if name not in names]:
                raise ValueError(f"lengths names {strange[0]!r}, but only {names} count")

    @property
    def most_costs(self) -> Mapping[str, int]:
        """Return what a unit may cost at most, for columns by name."""
        return {}

    @property
    def cost_columns(self) -> tuple[str, ...]:
        """Return the columns that are not cut, and whose lengths are costs; those with a budget first."""
        own = self.whole if callable(self.balance) else (self.balance or "",)
        names = dict.fromkeys((*self.most_costs, *own))
        return tuple(name for name in names if name and name not in self.columns)

    def lengths_of(self, column: str) -> Any:
        """Return what `lengths` says of a column; None: nothing."""
        if (
            isinstance(self.lengths, Mapping)
            and self.lengths
            and all(isinstance(n, str) for n in self.lengths)
        ):
            return self.lengths.get(column)
        return self.lengths if column == self.columns[0] else None

    def planned(
        self, lengths: NDArray[np.integer], costs: NDArray[np.integer] | None, key: int | None, before: int
    ) -> Units:
        """The units of one megabatch, as `cut`, balanced; `costs` [n, k] are of the `cost_columns`.

        So many units of the epoch are `before` these.
        """
        if costs is not None and self.most_costs:
            from sharding.lengths.costs import check_budget

            check_budget(costs, [*self.most_costs.items()])
            units = self._cut_within(lengths, costs.astype(np.int64), key)
        else:
            units = self.cut(lengths, key)
        if self.balance is None:
            return units
        from sharding.lengths.costs import balanced, unit_sums

        of_unit = unit_sums(self._segment_costs(units.segments, costs), units.first)
        num_whole = len(units) - (len(lengths) % self.sizes_multiple > 0)  # a short one stays the last
        order = balanced(of_unit[:num_whole], before, self.balance_group)
        order = np.append(order, np.arange(num_whole, len(units)))
        return units.balanced(order, of_unit)

    def _cut_within(self, lengths: NDArray[np.integer], costs: NDArray[np.int64], key: int | None) -> Units:
        """As `cut`, with no unit above `most_costs`."""
        raise NotImplementedError

    def _segment_costs(self, segments: Segments, costs: NDArray[np.integer] | None) -> NDArray[np.integer]:
        """What each segment costs, [e]. `ValueError` where a function returns no whole numbers >= 0."""
        found = dict.fromkeys(self.columns, segments.length)
        for at, name in enumerate(self.cost_columns):
            assert costs is not None
            found[name] = costs[segments.position, at].astype(np.int64)
        if isinstance(self.balance, str):
            return found[self.balance]
        return self._called(found)

    def _called(self, lengths: Mapping[str, NDArray[np.int64]]) -> NDArray[np.integer]:
        assert callable(self.balance)
        made, size = np.asarray(self.balance(lengths)), len(lengths[self.columns[0]])
        if made.shape != (size,) or made.dtype.kind not in "iu" or (made < 0).any():
            raise ValueError(
                f"balance= must return {size} integers >= 0, a cost for each segment, and returned "
                f"{made.dtype} of shape {made.shape}"
            )
        return made

    def _balance_mark(self) -> str:
        """Name a column, or a function by its `fingerprint`, else by what it returns, for a state."""
        if isinstance(self.balance, str):
            return self.balance
        if mark := str(getattr(self.balance, "fingerprint", "") or ""):
            return f"function {mark}"
        names = [*self.columns, *self.cost_columns]
        data = self._called({name: _PROBE + at for at, name in enumerate(names)}).astype("<i8").tobytes()
        return f"function {hashlib.blake2b(data, digest_size=8).hexdigest()}"

    def pad_of(self, column: str) -> int:
        """Return the value that fills a column up."""
        return self.pad.get(column, 0) if isinstance(self.pad, Mapping) else self.pad

    @property
    def rows_are_units(self) -> bool:
        """Return whether a unit is one row of a batch, not a whole batch."""
        return False

    @property
    def cuts(self) -> bool:
        """Return whether a segment need not be a whole sample."""
        return False

    @property
    def sizes_multiple(self) -> int:
        """All megabatches but the last have a multiple of this many samples."""
        return 1

    @property
    def refused_beyond(self) -> int | None:
        """Elements beyond which a sample fits nowhere and is an error; None: it is cut, or any fits."""
        return None

    def with_window(self, window: int) -> Self:
        """The value with this `window`, if it has none."""
        return replace(self, window=self.window or window)

    def least_samples(self, lengths: NDArray[np.integer]) -> int:
        """Samples of these lengths that a megabatch needs to leave little unfilled; 1: any number will do."""
        return 1

    def delivered(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return how many elements of samples of these lengths are delivered."""
        return lengths

    def num_segments(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return how many segments samples of these lengths become, whichever units they are in, [n]."""
        return np.ones_like(lengths)

    def cut(self, lengths: NDArray[np.integer], key: int | None) -> Units:
        """The units of one megabatch.

        Args:
            lengths: [n], elements of each sample.
            key: decides the order of the units; None: their first samples do.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, object]:
        """Return the facts that decide about the units, as JSON types, without `lengths`."""
        left_out = (
            "lengths",
            "lengths_key",
            "columns",
            "whole",
            "pad",
            "balance",
            "balance_group",
            "budget",
        )  # a state may be gone on with other columns
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}
        if self.balance is not None:  # states from before it have none
            values |= {"balance": self._balance_mark(), "balance_group": self.balance_group}
        if self.most_costs:
            values["budget"] = dict(self.most_costs)
        return {"kind": self.kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


@dataclass(frozen=True)
class Packed(BatchedColumns):
    """Rows of `length` elements, filled with several samples each. The loader's batch_size counts rows.

    Args:
        length: the number of elements of a row.
        column: the column whose lengths count. "": the first of `columns`, or "tokens".
        overlong: samples longer than a row: "split" over several rows, "truncate" (what is lost is counted),
            "error".
        columns: the columns that are cut and packed alike: lists, in each sample as long as that of `column`.
        whole: columns of lists that come whole, once a segment, where others are cut.
        pad: the value that fills up; or a mapping, for each column by name, 0 for those not named.
        lengths: the lengths of samples, where they are not those of `column`: the name of another column (its
            values if they are integers, else their lengths), an array with one entry a sample in file order,
            or a function of the catalog that gives one. Of a mixture, a column or function for all sources;
            or one of these a source, as a list or by dataset.
        lengths_key: names the lengths of samples that a transform makes, so that later runs know them: change
            it when the transform changes. A transform with a `fingerprint` needs none.
        window: samples of a megabatch: consecutive ones that are planned together, and whose blocks are in
            memory. None: 16,384, less where samples are large for the memory limit, or where lengths are
            measured.
        balance: a column of costs, or a function of lengths: rows of like cost come in the same step on all
            ranks. See `BatchedColumns.balance`.
        balance_group: rows of like cost that follow one another, 64: those of a step, or a multiple.
        budget: column -> most of its elements in a row, {"pixel_values": 32768}; a sample alone above it is
            an error.

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> dataset = ShardedDataset("tokens/*.parquet")
        >>> with DataLoader(dataset, batch_size=2, batching=Packed(12, "tokens")) as loader:
        ...     next(iter(loader))["tokens"].tokens.shape  # a `PackedRows`
        torch.Size([2, 12])
    """

    length: int
    column: str = ""
    overlong: Overlong = "split"
    _: KW_ONLY
    budget: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from sharding.lengths.cutting import Overlong

        if not isinstance(self.budget, Mapping) or any(
            type(most) is not int or most < 1 for most in self.budget.values()
        ):
            raise ValueError(f"budget must map columns to integers >= 1, got {self.budget!r}")
        self._resolve(self.column)
        if cut := [name for name in self.budget if name in self.columns]:
            raise ValueError(f"budget names {cut[0]!r}, which is in columns: a row has length={self.length}")
        _check_at_least(self, 1, "length")
        if self.overlong not in get_args(Overlong):
            raise ValueError(
                f"overlong must be one of {', '.join(get_args(Overlong))}, got {self.overlong!r}"
            )

    kind = "packed"
    rows_are_units = True
    cuts = True

    def least_samples(self, lengths: NDArray[np.integer]) -> int:
        """See `BatchedColumns`. Whole numbers alone: all machines agree."""
        elements = int(self.delivered(lengths).sum(dtype=np.int64))
        return -(-_ROWS * self.length * len(lengths) // max(1, elements))

    @property
    def refused_beyond(self) -> int | None:
        """See `BatchedColumns`."""
        return self.length if self.overlong == "error" else None

    def delivered(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """See `BatchedColumns`."""
        return np.minimum(lengths, self.length) if self.overlong == "truncate" else lengths

    def num_segments(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """See `BatchedColumns`; samples of length 0 are in no row."""
        segments: NDArray[np.integer] = -(-self.delivered(lengths).astype(np.int64) // self.length)
        return segments

    def cut(self, lengths: NDArray[np.integer], key: int | None) -> Units:
        """See `cutting.pack`."""
        from sharding.lengths.cutting import pack

        return pack(lengths, self.length, self.overlong, key)

    @property
    def most_costs(self) -> Mapping[str, int]:
        """See `BatchedColumns`."""
        return self.budget

    def _cut_within(self, lengths: NDArray[np.integer], costs: NDArray[np.int64], key: int | None) -> Units:
        """See `BatchedColumns`."""
        from sharding.lengths.cutting import pack

        most = [*self.budget.values()]
        return pack(lengths, self.length, self.overlong, key, costs[:, : len(most)], most)


@dataclass(frozen=True)
class TokenBudget(BatchedColumns):
    """Batches of as many samples of like length as fit `max_tokens`, padding included.

    Args:
        max_tokens: most elements of a padded batch: samples x padded length.
        column: the column whose lengths count. "": the first of `columns`, or "tokens".
        max_samples: most samples of a batch.
        multiple: padded lengths are rounded up to a multiple of this; 8 suits tensor cores.
        overlong: samples that do not fit alone: "error", or "truncate" (what is lost is counted).
        columns: the columns that are padded alike: lists, in each sample as long as that of `column`.
        whole: columns of lists that come whole; see `Packed`.
        pad: the value that fills up; or a mapping, for each column by name, 0 for those not named.
        lengths: the lengths of samples, where they are not those of `column`; see `Packed`.
        lengths_key: names the lengths of samples that a transform makes, so that later runs know them; see
            `Packed`.
        window: samples that are planned together, 16,384 where None; see `Packed`.
        balance: a column of costs, or a function of lengths; see `Packed`.
        balance_group: batches of like cost that follow one another; see `Packed`.

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> dataset = ShardedDataset("tokens/*.parquet")
        >>> with DataLoader(dataset, batching=TokenBudget(16, "tokens")) as loader:
        ...     all(batch["tokens"].tokens.numel() <= 16 for batch in loader)  # of `PaddedRows`
        True
    """

    max_tokens: int
    column: str = ""
    max_samples: int | None = None
    multiple: int = 1
    _: KW_ONLY
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
        self._resolve(self.column)
        _check_at_least(self, 1, "max_tokens", "multiple")
        if self.max_samples is not None:
            _check_at_least(self, 1, "max_samples")
        if self.multiple > self.max_tokens:
            raise ValueError(f"multiple={self.multiple} exceeds max_tokens={self.max_tokens}")
        if self.overlong not in ("truncate", "error"):
            raise ValueError(f"overlong must be truncate or error, got {self.overlong!r}")

    kind = "token_budget"

    @property
    def cuts(self) -> bool:
        """See `BatchedColumns`."""
        return self.overlong == "truncate"

    @property
    def refused_beyond(self) -> int | None:
        """See `BatchedColumns`."""
        return self.max_tokens // self.multiple * self.multiple if self.overlong == "error" else None

    def delivered(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """See `BatchedColumns`."""
        longest: NDArray[np.integer] = np.minimum(lengths, self.max_tokens // self.multiple * self.multiple)
        return longest

    def cut(self, lengths: NDArray[np.integer], key: int | None) -> Units:
        """See `cutting.budget`."""
        from sharding.lengths.cutting import budget

        return budget(lengths, self.max_tokens, self.max_samples, self.multiple, self.cuts, key)


@dataclass(frozen=True)
class Bucketed(BatchedColumns):
    """Batches of `batch_size` samples whose lengths lie in one bucket.

    Args:
        batch_size: samples of a batch, and of one rank.
        column: the column whose lengths count. "": the first of `columns`, or "tokens".
        boundaries: greatest length of each bucket but the last, ascending; or a number of buckets, which then
            get about the same number of elements of each megabatch.
        multiple: padded lengths are rounded up to a multiple of this; 8 suits tensor cores.
        columns: the columns that are padded alike: lists, in each sample as long as that of `column`.
        whole: columns of lists that come whole; see `Packed`.
        pad: the value that fills up; or a mapping, for each column by name, 0 for those not named.
        lengths: the lengths of samples, where they are not those of `column`; see `Packed`.
        lengths_key: names the lengths of samples that a transform makes, so that later runs know them; see
            `Packed`.
        window: samples that are planned together, 16,384 where None; see `Packed`.
        balance: a column of costs, or a function of lengths; see `Packed`.
        balance_group: batches of like cost that follow one another; see `Packed`.

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> dataset = ShardedDataset("tokens/*.parquet")
        >>> with DataLoader(dataset, batching=Bucketed(2, "tokens", boundaries=(4, 8))) as loader:
        ...     sorted(sorted(batch["tokens"].lengths.tolist()) for batch in loader)
        [[1, 2], [3, 4], [5, 6], [7, 8]]
    """

    batch_size: int
    column: str = ""
    boundaries: int | tuple[int, ...] = 16
    multiple: int = 1

    def __post_init__(self) -> None:
        self._resolve(self.column)
        _check_at_least(self, 1, "batch_size", "multiple")
        if isinstance(self.boundaries, int):
            _check_at_least(self, 1, "boundaries")
            return
        bounds = tuple(self.boundaries)
        if any(type(b) is not int or b < 0 for b in bounds) or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"boundaries must be ascending integers >= 0, got {self.boundaries!r}")
        object.__setattr__(self, "boundaries", bounds)

    kind = "bucketed"

    @property
    def sizes_multiple(self) -> int:
        """Whole batches, so that only the last megabatch has a short one."""
        return self.batch_size

    def cut(self, lengths: NDArray[np.integer], key: int | None) -> Units:
        """See `cutting.bucket`; a number of buckets is resolved by the lengths of the megabatch."""
        from sharding.lengths.cutting import bucket, equal_share_boundaries

        bounds = self.boundaries
        if isinstance(bounds, int):
            bounds = tuple(equal_share_boundaries(lengths, bounds).tolist())
        return bucket(lengths, self.batch_size, np.array(bounds, np.int64), self.multiple, key)


Batching = Packed | TokenBudget | Bucketed


def _check_at_least(batching: object, least: int, *names: str) -> None:
    for name in names:
        number = getattr(batching, name)
        if type(number) is not int or number < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {number!r}")
