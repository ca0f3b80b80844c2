"""What a user says about length-aware batches: three frozen values, and how each cuts a planning window.

`Packed` fills rows of a fixed length with several documents each, `TokenBudget` makes batches of like
padded size, `Bucketed` batches of a fixed number of samples of like length. See docs/batching.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharding.lengths.buckets import bucket, budget, equal_share_boundaries
from sharding.lengths.packing import Overlong, pack
from sharding.lengths.units import DEFAULT_WINDOW_SAMPLES, NO_PIECES, Pieces, Units

Lengths = str | ArrayLike | Callable[[Any], ArrayLike]
"""Where lengths come from: a column (its values if they are integers, else their lengths), an array with
one entry a sample in file order, or a function of the catalog that gives one."""


@dataclass(frozen=True, kw_only=True)
class BatchedColumns:
    """What every batching says of columns, beside the one whose lengths count."""

    columns: Sequence[str] = ()
    """Those that are cut, packed or padded alike: lists, in each sample as long as that of `column`."""
    whole: Sequence[str] = ()
    """Columns of lists that come whole, once a piece, where others are cut."""
    pad: int | Mapping[str, int] = 0
    """What fills up; for each column by name, 0 for those not named."""
    lengths: Lengths | None = field(default=None, compare=False, repr=False)
    """Where lengths come from; None: `column`."""
    window: int | None = None
    """Consecutive samples of the epoch's order that are planned together; their blocks are held in memory.
    None: 16,384, less where samples are large for the memory limit."""

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
        _check_at_least(self, 1, *_given(self.window))

    def pad_of(self, column: str) -> int:
        """What fills a column up."""
        return self.pad.get(column, 0) if isinstance(self.pad, Mapping) else self.pad


@dataclass(frozen=True)
class Packed(BatchedColumns):
    """Rows of `length` elements, filled with several samples each. The loader's batch_size counts rows."""

    length: int
    """Elements of a row."""
    column: str = ""
    """The column whose lengths count. "": the first of `columns`, or "tokens"."""
    overlong: Overlong = "split"
    """Samples longer than a row: "split" over several rows, "truncate" (what is lost is counted), "error"."""

    def __post_init__(self) -> None:
        self._resolve(self.column)
        _check_at_least(self, 1, "length")
        if self.overlong not in get_args(Overlong):
            raise ValueError(
                f"overlong must be one of {', '.join(get_args(Overlong))}, got {self.overlong!r}"
            )

    sizes_multiple = 1
    """Planning windows may have any size."""
    rows_are_units = True
    """A unit is one row of a batch, not a whole batch."""
    cuts = True
    """A piece need not be a whole sample."""

    def resolved(self, lengths: NDArray[np.integer], window: int = DEFAULT_WINDOW_SAMPLES) -> Packed:
        """The value with a window."""
        return replace(self, window=self.window or window)

    def cut(
        self, lengths: NDArray[np.integer], key: int | None, carried: Pieces = NO_PIECES, last: bool = True
    ) -> Units:
        """See `packing.pack`."""
        return pack(lengths, self.length, self.overlong, key, carried=carried, last=last)

    def to_json(self) -> dict[str, object]:
        """What decides about the units, as JSON types, without `lengths`."""
        return _to_json(self)


@dataclass(frozen=True)
class TokenBudget(BatchedColumns):
    """Batches of as many samples of like length as fit `max_tokens`, padding included."""

    max_tokens: int
    """Most elements of a padded batch: samples x padded length."""
    column: str = ""
    """The column whose lengths count. "": the first of `columns`, or "tokens"."""
    max_samples: int | None = None
    """Most samples of a batch."""
    multiple: int = 1
    """Padded lengths are rounded up to a multiple of this; 8 suits tensor cores."""
    overlong: Overlong = "error"
    """Samples that do not fit alone: "error", or "truncate" (what is lost is counted)."""

    def __post_init__(self) -> None:
        self._resolve(self.column)
        _check_at_least(self, 1, "max_tokens", "multiple")
        if self.max_samples is not None:
            _check_at_least(self, 1, "max_samples")
        if self.multiple > self.max_tokens:
            raise ValueError(f"multiple={self.multiple} exceeds max_tokens={self.max_tokens}")
        if self.overlong not in ("truncate", "error"):
            raise ValueError(f"overlong must be truncate or error, got {self.overlong!r}")

    sizes_multiple = 1
    """Planning windows may have any size."""
    rows_are_units = False
    """A unit is a whole batch."""

    @property
    def cuts(self) -> bool:
        """A piece need not be a whole sample."""
        return self.overlong == "truncate"

    def resolved(self, lengths: NDArray[np.integer], window: int = DEFAULT_WINDOW_SAMPLES) -> TokenBudget:
        """The value with a window."""
        return replace(self, window=self.window or window)

    def cut(
        self, lengths: NDArray[np.integer], key: int | None, carried: Pieces = NO_PIECES, last: bool = True
    ) -> Units:
        """See `length_batches.budget`; nothing is carried."""
        truncate = self.overlong == "truncate"
        return budget(lengths, self.max_tokens, self.max_samples, self.multiple, truncate, key)

    def to_json(self) -> dict[str, object]:
        """What decides about the units, as JSON types, without `lengths`."""
        return _to_json(self)


@dataclass(frozen=True)
class Bucketed(BatchedColumns):
    """Batches of `batch_size` samples whose lengths lie in one bucket."""

    batch_size: int
    """Samples of a batch, and of one rank."""
    column: str = ""
    """The column whose lengths count. "": the first of `columns`, or "tokens"."""
    boundaries: int | tuple[int, ...] = 16
    """Greatest length of each bucket but the last, ascending; or a number of buckets, which then get about
    the same number of elements each."""
    multiple: int = 1
    """Padded lengths are rounded up to a multiple of this; 8 suits tensor cores."""

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

    rows_are_units = False
    """A unit is a whole batch."""
    cuts = False
    """A piece is a whole sample."""

    @property
    def sizes_multiple(self) -> int:
        """Whole batches, so that only the last planning window has a short one."""
        return self.batch_size

    def resolved(self, lengths: NDArray[np.integer], window: int = DEFAULT_WINDOW_SAMPLES) -> Bucketed:
        """The value with a window, and boundaries chosen."""
        bounds = self.boundaries
        if isinstance(bounds, int):
            bounds = tuple(equal_share_boundaries(lengths, bounds).tolist())
        return replace(self, window=self.window or window, boundaries=bounds)

    def cut(
        self, lengths: NDArray[np.integer], key: int | None, carried: Pieces = NO_PIECES, last: bool = True
    ) -> Units:
        """See `length_batches.bucket`. Needs boundaries: call it on what `resolved` gave. Carries nothing."""
        assert not isinstance(self.boundaries, int)
        boundaries = np.array(self.boundaries, np.int64)
        return bucket(lengths, self.batch_size, boundaries, self.multiple, key)

    def to_json(self) -> dict[str, object]:
        """What decides about the units, as JSON types, without `lengths`."""
        return _to_json(self)


Batching = Packed | TokenBudget | Bucketed

_KINDS: dict[type[Batching], str] = {Packed: "packed", TokenBudget: "token_budget", Bucketed: "bucketed"}


def _to_json(value: Batching) -> dict[str, object]:
    left_out = ("lengths", "columns", "whole", "pad")  # a state may be gone on with other columns
    given = {one.name: getattr(value, one.name) for one in fields(value) if one.name not in left_out}
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}
    return {"kind": _KINDS[type(value)]} | values


def _given(window: int | None) -> tuple[str, ...]:
    return () if window is None else ("window",)


def _check_at_least(value: object, least: int, *names: str) -> None:
    for name in names:
        given = getattr(value, name)
        if type(given) is not int or given < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {given!r}")
