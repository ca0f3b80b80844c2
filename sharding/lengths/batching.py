"""Define length-aware batches: three frozen values of the user's, each of which cuts a packing window.

`Packed` fills rows of a fixed length with several documents each, `TokenBudget` makes batches of like
padded size, `Bucketed` batches of a fixed number of samples of like length. See docs/guide/batching.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from sharding.lengths.cutting import Overlong
    from sharding.lengths.units import PackingWindow


_ROWS = 256
"""Rows of a packing window of which one is half full on average: 0.998 of them holds elements."""
_GROUPS = 16
"""Groups of balanced rows in a packing window: some of the rows at its two ends are in none."""
Lengths = str | ArrayLike | Callable[[Any], ArrayLike] | Mapping[str, Any]
"""The lengths of samples: a column (its values if they are integers, else their lengths), an array with one
entry a sample in file order, or a function of the catalog that gives one. Of a mixture, a column or a
function holds for all sources; else one of these a source, as a list or by dataset. A mapping from names of
columns gives those of several: of the first column, and of the columns that count as costs."""
Costs = Callable[[Mapping[str, NDArray[np.int64]]], NDArray[np.integer]]
"""Column -> lengths of segments, int64 [n]; returns what each costs, whole numbers >= 0, [n]."""
_ANY = 1 << 62
PLANNED = "sharding.lengths.costs:planned"
BALANCE_MARK = "sharding.lengths.costs:balance_mark"
MAX_OVER_MEAN = "sharding.lengths.costs:cost_max_over_mean"
"""Plans by costs, what a state knows of them, and how even they are: outside the core."""


@dataclass(frozen=True, kw_only=True)
class BatchedColumns:
    """The settings of columns that every batching has, beside the one whose lengths count, and its own."""

    kind: ClassVar[str]
    """The name of the kind in a state."""
    rows_are_units: ClassVar[bool] = False
    """True if a unit is one row of a batch, not a whole batch."""
    columns: Sequence[str] = ()
    """The columns that are cut, packed or padded alike: lists, in each sample as long as that of `column`."""
    whole: Sequence[str] | Mapping[str, Any] = ()
    """Columns of lists, or of arrays [n, ...], that come whole, once a segment. A mapping says of each
    whether samples may lack it."""
    pad: int | Mapping[str, int] = 0
    """The value that fills up; for each column by name, 0 for those not named."""
    lengths: Lengths | None = field(default=None, compare=False, repr=False)
    """The lengths of samples; None: those of `column`."""
    lengths_key: str = field(default="", compare=False)
    """Names the lengths of samples that a transform makes, so that they are kept for later runs: change it
    when the transform changes. A transform with a `fingerprint` needs none."""
    window: int | None = None
    """Samples of a packing window: consecutive ones of the epoch's order that are planned together, and whose
    blocks are held in memory. None: 16,384, less where samples are large for the memory limit, or where
    lengths are measured, which is done again for all of them where a run goes on inside a packing window."""
    balance: str | Costs | None = None
    """The cost of a row or batch, so that ranks take those of like cost in the same step: a column, whose
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
        whole = dict(self.whole) if isinstance(self.whole, Mapping) else tuple(self.whole)
        for field_, value in (("column", lead), ("columns", columns), ("whole", whole)):
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
            _check_positive(self, "window")
        _check_positive(self, "balance_group")
        if not (self.balance is None or isinstance(self.balance, str) or callable(self.balance)):
            raise ValueError(f"balance must be a column or a function of lengths, got {self.balance!r}")
        if strange := [name for name in self.told if name not in (lead, *self.cost_columns)]:
            raise ValueError(f"lengths names {strange[0]!r}: only {[lead, *self.cost_columns]} count")

    @property
    def told(self) -> Mapping[str, Any]:
        """Return what `lengths` says, by column."""
        value = self.lengths
        is_by_column = isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value)
        return cast("Mapping[str, Any]", value) if is_by_column else {self.columns[0]: value}

    @property
    def most_costs(self) -> Mapping[str, int]:
        """Return the most that columns may cost in a unit."""
        return getattr(self, "budget", {})

    @property
    def cost_columns(self) -> tuple[str, ...]:
        """Return the columns that are not cut, and whose lengths are costs; those with a budget first."""
        balanced = self.whole if callable(self.balance) else [self.balance] if self.balance else []
        return tuple(dict.fromkeys(n for n in (*self.most_costs, *balanced) if n not in self.columns))

    def planned(self, sizes: NDArray[np.integer], key: int | None, before: int) -> PackingWindow:
        """The units of one packing window, balanced and within a budget, else as `cut`; `before` are as many.

        `sizes`: of each sample its length, [n]; with `cost_columns`, [n, 1 + costs].
        """
        if self.balance is None and not self.cost_columns:
            return self.cut(sizes, key)
        return resolve_name(PLANNED)(self, sizes, key, before)  # type: ignore[no-any-return]

    def pad_of(self, column: str) -> int:
        """Return the value that fills a column up."""
        return self.pad.get(column, 0) if isinstance(self.pad, Mapping) else self.pad

    @property
    def cuts(self) -> bool:
        """Return whether a segment need not be a whole sample."""
        return False

    @property
    def sizes_multiple(self) -> int:
        """All packing windows but the last have a multiple of this many samples."""
        return 1

    @property
    def longest(self) -> int | None:
        """Elements beyond which a sample is cut, or refused; None: any fits."""
        return None

    @property
    def refused_beyond(self) -> int | None:
        """Elements beyond which a sample fits nowhere and is an error; None: it is cut, or any fits."""
        return self.longest if getattr(self, "overlong", "error") == "error" else None

    @property
    def most(self) -> Sequence[int]:
        """Return beyond which length, and costs, a sample fits nowhere and is an error, [1 + costs]."""
        costs = (self.most_costs.get(name, _ANY) for name in self.cost_columns)
        return [_ANY if self.refused_beyond is None else self.refused_beyond, *costs]

    def with_window(self, window: int) -> Self:
        """The value with this `window`, if it has none."""
        return replace(self, window=self.window or window)

    def least_samples(self, lengths: NDArray[np.integer]) -> int:
        """Samples of these lengths that a packing window needs to be filled well; 1: any number will do."""
        return 1

    def delivered(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return how many elements of samples of these lengths are delivered."""
        return lengths

    def num_segments(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return how many segments samples of these lengths become, whichever units they are in, [n]."""
        return np.ones_like(lengths)

    def cut(self, lengths: NDArray[np.integer], key: int | None) -> PackingWindow:
        """The units of one packing window.

        Args:
            lengths: [n], elements of each sample.
            key: decides the order of the units; None: their first samples do.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, object]:
        """Return the facts that decide about the units, as JSON types, without `lengths`."""
        # A state may be gone on with other columns.
        left_out = "lengths", "lengths_key", "columns", "whole", "pad", "balance", "balance_group", "budget"
        values = {fact.name: getattr(self, fact.name) for fact in fields(self) if fact.name not in left_out}
        if self.balance is not None:  # states from before it have none
            values |= {"balance": resolve_name(BALANCE_MARK)(self), "balance_group": self.balance_group}
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
        whole: columns of lists, or of arrays [n, ...], that come whole, once a segment: one `Ragged` each. As
            a mapping, `{"pixel_values": Optional()}` lets samples of a transform lack one, which then has no
            element; its default (such as zeros of [0, 1176]) says of which dtype and shape.
        pad: the value that fills up; or a mapping, for each column by name, 0 for those not named.
        lengths: the lengths of samples, where they are not those of `column`: the name of another column (its
            values if they are integers, else their lengths), an array with one entry a sample in file order,
            or a function of the catalog that gives one. Of a mixture, a column or function for all sources;
            or one of these a source, as a list or by dataset.
        lengths_key: names the lengths of samples that a transform makes, so that later runs know them: change
            it when the transform changes. A transform with a `fingerprint` needs none.
        window: samples of a packing window: consecutive ones, planned together, with their blocks in memory.
            None: 16,384, less where samples are large for the memory limit, or where lengths are measured.
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
    budget: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        from sharding.lengths.cutting import Overlong

        if not all(type(most) is int and most > 0 for most in {**self.budget}.values()):
            raise ValueError(f"budget must map columns to integers >= 1, got {self.budget!r}")
        self._resolve(self.column)
        if cut := [name for name in self.budget if name in self.columns]:
            raise ValueError(f"budget names {cut[0]!r}, which is in columns: a row has length={self.length}")
        _check_positive(self, "length")
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
        rows = _ROWS if self.balance is None else max(_ROWS, _GROUPS * self.balance_group)
        return -(-rows * self.length * len(lengths) // max(1, elements))

    @property
    def longest(self) -> int:
        """See `BatchedColumns`."""
        return self.length

    def delivered(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """See `BatchedColumns`."""
        return np.minimum(lengths, self.length) if self.overlong == "truncate" else lengths

    def num_segments(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """See `BatchedColumns`; samples of length 0 are in no row."""
        segments: NDArray[np.integer] = -(-self.delivered(lengths).astype(np.int64) // self.length)
        return segments

    def cut(self, lengths: NDArray[np.integer], key: int | None) -> PackingWindow:
        """See `cutting.pack`."""
        from sharding.lengths.cutting import pack

        return pack(lengths, self.length, self.overlong, key)


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
        _check_positive(self, "max_tokens", "multiple")
        if self.max_samples is not None:
            _check_positive(self, "max_samples")
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
    def longest(self) -> int:
        """See `BatchedColumns`."""
        return self.max_tokens // self.multiple * self.multiple

    def delivered(self, lengths: NDArray[np.integer]) -> NDArray[np.integer]:
        """See `BatchedColumns`."""
        longest: NDArray[np.integer] = np.minimum(lengths, self.longest)
        return longest

    def cut(self, lengths: NDArray[np.integer], key: int | None) -> PackingWindow:
        """See `cutting.budget`."""
        from sharding.lengths.cutting import budget

        return budget(lengths, self.max_tokens, self.max_samples, self.multiple, self.cuts, key)


@dataclass(frozen=True)
class Bucketed(BatchedColumns):
    """Batches of `batch_size` samples of one bucket of lengths, or of what a packing window leaves of some.

    Args:
        batch_size: samples of a batch, and of one rank.
        column: the column whose lengths count. "": the first of `columns`, or "tokens".
        boundaries: greatest length of each bucket but the last, ascending; or a number of buckets, which then
            get about the same number of elements of each packing window.
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
        _check_positive(self, "batch_size", "multiple")
        if isinstance(self.boundaries, int):
            _check_positive(self, "boundaries")
            return
        bounds = tuple(self.boundaries)
        if any(type(b) is not int or b < 0 for b in bounds) or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"boundaries must be ascending integers >= 0, got {self.boundaries!r}")
        object.__setattr__(self, "boundaries", bounds)

    kind = "bucketed"

    @property
    def sizes_multiple(self) -> int:
        """Whole batches, so that only the last packing window has a short one."""
        return self.batch_size

    def cut(self, lengths: NDArray[np.integer], key: int | None) -> PackingWindow:
        """See `cutting.bucket`; a number of buckets is resolved by the lengths of the packing window."""
        from sharding.lengths.cutting import bucket, equal_share_boundaries

        bounds = self.boundaries
        if isinstance(bounds, int):
            bounds = tuple(equal_share_boundaries(lengths, bounds).tolist())
        return bucket(lengths, self.batch_size, np.array(bounds, np.int64), self.multiple, key)


Batching = Packed | TokenBudget | Bucketed


def _check_positive(batching: object, *names: str) -> None:
    for name in names:
        number = getattr(batching, name)
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {number!r}")
