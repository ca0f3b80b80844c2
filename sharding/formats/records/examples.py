"""`tf.train.Example` and `SequenceExample`: the features of many records as columns.

`parse` finds all features of a block's records at once, in whatever order each record has them.
`FeatureFacts` learns what a feature of a shard holds, which makes its type, and `column` makes a column
of such a type. A `SequenceExample` is its context, which are features as an Example's, and its feature lists,
which are lists over steps.

A list without values is an empty one; a feature without a list is not there. What is given to a name twice
counts as it was given last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from sharding.blocks import MISSING, Column, ColumnSpec, Masked, Spans
from sharding.core.library import address_of, library
from sharding.formats.gathering import gathered_lists
from sharding.formats.records.wire import WireError, numbers_in, unharmed, whole_numbers
from sharding.spans import Bytes, Ints, gathered

BYTES, FLOATS, INTS = 1, 2, 3
_KIND_NAMES = {BYTES: "bytes", FLOATS: "floats", INTS: "integers"}
_DTYPES = {FLOATS: "float32", INTS: "int64"}
MOST_FEATURES = 2_000
"""The names of features in a shard, at most; each takes numpy some microseconds of every block."""
_TOO_MANY_NAMES = -6
_MOST_GUESSED = 1 << 16
"""Features for which room is made before they are counted."""


class TooManyNamesError(ValueError):
    """Names that are data rather than names."""


class Values(NamedTuple):
    """The values of one feature in those of some records that have it."""

    kind: int
    """`BYTES`, `FLOATS` or `INTS`; 0: no value says."""
    record: Ints
    """[k] the records, ascending."""
    counts: Ints
    """[k] values in each."""
    steps: Ints | None
    """[s] values in each step, of a feature list; None: a feature."""
    numbers: NDArray[np.generic]
    """One after the other; of byte strings: none."""
    spans: Ints
    """[v, 2] where byte strings begin, and their lengths; of numbers: none."""


class Entries(NamedTuple):
    """The features of records: names and lists of values, where they lie in the records' bytes."""

    names: list[str]
    record: Ints
    """[f] the record of each feature or feature list, ascending."""
    name: Ints
    """[f] numbers of `names`."""
    is_series: NDArray[np.bool_]
    """[f] which are feature lists."""
    step_of: Ints
    """[g] the feature that each list of values is of; those of a feature list are its steps."""
    list_of: Ints
    """[l] the step of each list; a step has one, or none."""
    kind: Ints
    """[l] the kind of its values."""
    value_of: Ints
    """[v] the list that each span of values is of."""
    start: Ints
    end: Ints
    one_each: bool
    """True if each is no feature list and has one list, which has one span."""


def parse(
    data: Bytes, starts: Ints, ends: Ints, names: Iterable[str] = (), columns: Collection[str] | None = None
) -> Entries:
    """Find the features of records.

    Args:
        data: uint8, what holds the records.
        starts: where each begins, [n].
        ends: where each ends, [n].
        names: names that are known, to begin with.
        columns: names of which values are looked for; None: of all.

    Raises:
        WireError: a record is neither an Example nor a SequenceExample.
        TooManyNamesError: there are more than `MOST_FEATURES` names.
    """
    starts, ends = whole_numbers(starts), whole_numbers(ends)
    known = list(dict.fromkeys([*names, *(columns or ())]))
    keys = [name.encode() for name in known]
    key_bytes = np.frombuffer(b"".join(keys) + b"\0", np.uint8)
    key_sizes = np.array([*map(len, keys)], np.int64)
    table = np.empty((MOST_FEATURES, 3), np.int64)
    table[: len(keys), 0] = address_of(key_bytes) + np.cumsum(key_sizes) - key_sizes
    table[: len(keys), 1] = key_sizes
    table[: len(keys), 2] = [columns is None or name in columns for name in known]
    spans = [address_of(data), len(data), address_of(starts), address_of(ends), len(starts)]
    each = len(keys) if columns is None else len(columns)
    most = np.full(4, 1 + min(_MOST_GUESSED, len(starts) * each))
    while True:
        rows = [np.empty((3, int(count)), np.int64) for count in most]
        out = np.array([[address_of(array), array.shape[1], 0] for array in rows])
        more = [address_of(table), len(keys), MOST_FEATURES, columns is None]
        arguments = np.array([*spans, *more, *out.flat], np.int64)  # `core_examples`
        if (status := library().core_parse(address_of(arguments))) == _TOO_MANY_NAMES:
            raise TooManyNamesError(f"there are more than {MOST_FEATURES} names of features")
        unharmed(status)
        counts = arguments[len(spans) + len(more) :].reshape(4, 3)[:, 2]
        if (counts <= most).all():
            break
        most = counts  # there are more rows than were guessed
    for address, size, _ in table[len(keys) : arguments[len(spans) + 1]].tolist():
        start = address - address_of(data)
        try:
            known.append(data[start : start + size].tobytes().decode())
        except UnicodeDecodeError as error:
            raise WireError("a feature's name is not UTF-8") from error
    (record, name, is_series), (step_of, *_), (list_of, kind, _), (value_of, start, end) = (
        array[:, :count] for array, count in zip(rows, counts.tolist(), strict=True)
    )
    nth = np.arange(len(name))
    one_each = not is_series.any() and all(np.array_equal(row, nth) for row in (step_of, list_of, value_of))
    return Entries(
        known, record, name, is_series == 1, step_of, list_of, kind, value_of, start, end, one_each
    )


def values_of(data: Bytes, entries: Entries, name: str) -> Values:
    """The values of a feature, where `parse` found it.

    Raises:
        WireError: its values are damaged, or of several kinds.
    """
    rows = np.flatnonzero(entries.name == entries.names.index(name)) if name in entries.names else _NONE
    record = entries.record[rows]
    rows = rows[np.append(record[1:] != record[:-1], np.ones(len(rows[:1]), bool))]
    if entries.one_each:
        kind = _only_kind(name, entries.kind[rows])
        numbers, spans, sizes = _values(data, kind, entries.start[rows], entries.end[rows])
        return Values(kind, entries.record[rows], sizes, None, numbers, spans)
    slot = np.full(len(entries.name), -1)
    slot[rows] = np.arange(len(rows))
    of_steps = slot[entries.step_of]
    of_lists = of_steps[entries.list_of]
    of_values = of_lists[entries.value_of]
    mine = np.flatnonzero(of_values >= 0)
    is_series = np.unique(entries.is_series[rows])
    kind = _only_kind(name, entries.kind[of_lists >= 0], has_both=len(is_series) > 1)
    numbers, spans, sizes = _values(data, kind, entries.start[mine], entries.end[mine])
    counts = np.bincount(of_values[mine], sizes, len(rows)).astype(np.int64)
    steps = None
    if is_series.any():
        step = entries.list_of[entries.value_of[mine]]
        steps = np.bincount(step, sizes, len(of_steps)).astype(np.int64)[of_steps >= 0]
    has = entries.is_series[rows]
    has[of_lists[of_lists >= 0]] = True
    return Values(kind, entries.record[rows[has]], counts[has], steps, numbers, spans)


@dataclass(kw_only=True)
class FeatureFacts:
    """Facts of one feature."""

    kinds: set[int] = field(default_factory=set)
    is_series: bool = False
    num_records: int = 0
    """Records that have it."""
    counts: tuple[int, int] | None = None
    """Least and greatest number of values in these."""
    sizes: tuple[int, int] | None = None
    """Least and greatest length of a byte string."""
    steps: tuple[int, int] | None = None
    """Least and greatest number of values in a step."""
    items: int = 0
    contradiction: str = ""

    def add(self, data: Bytes, entries: Entries, name: str) -> int:
        """Learn from a run of records; returns the bytes of its values as they are decoded."""
        try:
            values = values_of(data, entries, name)
        except _ContradictionError as error:
            self.contradiction = str(error)
            return 0
        if not len(values.record):
            return 0
        has_both = self.num_records > 0 and self.is_series != (values.steps is not None)
        self.kinds |= {values.kind} - {0}
        self.is_series = values.steps is not None
        if len(self.kinds) > 1 or has_both:
            self.contradiction = _contradiction(name, self.kinds, has_both)
        self.num_records += len(values.record)
        self.counts = _widened(self.counts, values.counts)
        self.steps = _widened(self.steps, values.steps)
        if values.kind != BYTES:
            return values.numbers.nbytes
        sizes = values.spans[:, 1]
        self.sizes = _widened(self.sizes, sizes)
        self.items = max(self.items, -(-len(sizes) // len(values.record)))
        return int(sizes.sum()) + 8 * (len(sizes) + len(values.record))

    @property
    def is_list(self) -> bool:
        """Return whether records have different numbers of values, or none; or several byte strings."""
        low, high = self.counts or (0, 0)
        return self.is_series or low != high or high == 0 or (high > 1 and self.kinds == {BYTES})

    def spec(self, num_records: int) -> ColumnSpec:
        """Its type, in a shard of so many records."""
        if self.contradiction:
            return ColumnSpec("unreadable", note=self.contradiction)
        if not self.kinds:
            return ColumnSpec("null", optional=True)
        kind, optional = next(iter(self.kinds)), self.num_records < num_records
        if self.steps not in (None, (1, 1)):
            return ColumnSpec("other", optional=optional, note="feature list of several values a step")
        spec = ColumnSpec("bytes", optional=optional, size_range=self.sizes, is_repeated=not self.is_series)
        if kind == BYTES:
            return (
                replace(spec, kind="bytes_list", size_range=None, items=self.items) if self.is_list else spec
            )
        if self.is_list:
            return replace(spec, kind="list", dtype=_DTYPES[kind], size_range=self.counts)
        _, high = self.counts or (0, 0)
        shape = () if high == 1 else (high,)
        return replace(spec, kind="fixed", dtype=_DTYPES[kind], shape=shape, size_range=None)


def column(data: Bytes, entries: Entries, name: str, spec: ColumnSpec, num_records: int) -> Column:
    """Make a feature's column of a type: as it is in the shard, or that of other shards, which is wider.

    Raises:
        WireError: it holds other values than the type does.
    """
    if spec.kind in ("null", "text", "json"):  # nobody holds a value
        none = np.zeros(num_records, np.int64)
        return Spans(np.zeros(0, np.uint8), none, np.full(num_records, MISSING, np.int64))
    values = values_of(data, entries, name)
    is_number = spec.kind in ("fixed", "list")
    if values.kind and (_DTYPES.get(values.kind) != spec.dtype if is_number else values.kind != BYTES):
        raise WireError(f"feature {name!r} holds {_KIND_NAMES[values.kind]}, which was not so when indexed")
    has = (
        values.counts > 0 if values.steps is None and spec.kind in ("fixed", "bytes") else values.counts >= 0
    )
    record, counts = values.record[has], values.counts[has]
    if spec.kind == "fixed":
        return _fixed(name, values, record, counts, spec, num_records)
    starts, lengths = np.zeros(num_records, np.int64), np.full(num_records, MISSING, np.int64)
    if spec.kind == "bytes":
        _same_counts(name, counts, 1)
        starts[record], lengths[record] = values.spans.T
        return Spans(data, starts, lengths)
    if spec.kind == "list":
        starts[record], lengths[record] = np.cumsum(counts) - counts, counts
        return Spans(values.numbers.astype(spec.dtype, copy=False), starts, lengths)
    lists = gathered_lists(counts, Spans(data, *values.spans.T))
    starts[record], lengths[record] = lists.starts, lists.lengths
    return structs.replace(lists, starts=starts, lengths=lengths)


class _ContradictionError(WireError):
    """Values of several kinds in one feature."""


_NONE: Ints = np.zeros(0, np.int64)


def _contradiction(name: str, kinds: Collection[int], has_both: bool) -> str:
    form, other = (
        ["one list", "a list of steps"] if has_both else [_KIND_NAMES[kind] for kind in sorted(kinds)[:2]]
    )
    return f"feature {name!r} holds {form} in some records and {other} in others"


def _widened(before: tuple[int, int] | None, numbers: Ints | None) -> tuple[int, int] | None:
    """Least and greatest of all numbers so far."""
    if numbers is None or not len(numbers):
        return before
    low, high = before or (int(numbers[0]), int(numbers[0]))
    return min(low, int(numbers.min())), max(high, int(numbers.max()))


def _only_kind(name: str, kinds: Ints, has_both: bool = False) -> int:
    """The kind of all lists of a feature; 0: it has none."""
    if has_both or (kinds != kinds[:1]).any():
        raise _ContradictionError(_contradiction(name, np.unique(kinds).tolist(), has_both))
    return int(kinds[0]) if len(kinds) else 0


def _values(data: Bytes, kind: int, start: Ints, end: Ints) -> tuple[NDArray[np.generic], Ints, Ints]:
    """The numbers in spans, or the spans of byte strings; and how many values are in each."""
    no_spans, sizes = np.zeros((0, 2), np.int64), end - start
    if kind == INTS:
        numbers, counts = numbers_in(data, start, end)
        return numbers, no_spans, counts
    if kind == FLOATS:
        if (sizes % 4).any():
            raise WireError("floats do not fill their list")
        floats = gathered(data, start, sizes).view("<f4").astype(np.float32, copy=False)
        return floats, no_spans, sizes // 4
    return _NONE, np.stack([start, sizes], axis=1), np.ones(len(start), np.int64)


def _same_counts(name: str, counts: Ints, expected: int) -> None:
    if (counts != expected).any():
        other = int(counts[counts != expected][0])
        raise WireError(f"feature {name!r} holds {other} values, where {expected} were indexed")


def _fixed(
    name: str, values: Values, record: Ints, counts: Ints, spec: ColumnSpec, num_records: int
) -> NDArray[np.generic] | Masked:
    """The column of a number, or of as many as `spec` says, of each record."""
    _same_counts(name, counts, spec.shape[0] if spec.shape else 1)
    numbers = values.numbers.astype(spec.dtype, copy=False).reshape(-1, *spec.shape)
    if len(record) == num_records:
        return numbers
    whole = np.zeros((num_records, *spec.shape), spec.dtype)
    if whole.dtype.kind == "f":
        whole.fill(np.nan)
    whole[record] = numbers
    lacks = np.full(num_records, MISSING, np.int8)
    lacks[record] = 0
    return Masked(whole, lacks)
