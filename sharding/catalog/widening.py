"""The one type of a column whose shards have several: the narrowest that changes no value.

Nulls, and lists of them, take what others have. Integers and floats take numpy's common type, times the
finest unit, lists of one length the type of lists of any, and lists of numbers beside other nested values
their JSON. Values that are lists by nature, as in protobuf, are lists where they have other numbers of items.
Where values decide (integers beside float64, int64 beside uint64, times in a finer unit) they are checked
when they are decoded. Bools and numbers, times with and without a zone, dates and times, text and bytes mean
unlike things: they have no common type. Nor do decimals and other numbers or text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sharding.blocks import DECIMAL, ColumnSpec, common_dtype

_UNITS = ("s", "ms", "us", "ns")
_DATES = {"date32[day]": "int32", "date64[ms]": "int64"}
_NULL_BYTES = 4
"""The bytes that indexing counts at least for each null of a list of nulls, which is stored in no bytes."""


def common_spec(specs: Sequence[ColumnSpec]) -> ColumnSpec | None:
    """The type of a column of which each of some shards has one of these; None: they have none in common.

    Sizes, and whether samples may lack it, are of all together.
    """
    typed = [spec for spec in specs if spec.kind not in ("null", "null_list")]
    if {spec.kind for spec in typed} & {"other", "unreadable"}:
        return specs[0] if all(spec.kind == "other" for spec in specs) else None
    of_lists = len(typed) < sum(spec.kind != "null" for spec in specs)
    merged = _common_type(typed, of_lists)
    return None if merged is None else _with_facts(merged, specs)


def _common_type(typed: Sequence[ColumnSpec], of_lists: bool) -> ColumnSpec | None:
    """`of_lists`: whether others are lists of nulls."""
    if not typed:
        return ColumnSpec("json" if of_lists else "text")
    kinds = {spec.kind for spec in typed}
    if len({spec.feature == DECIMAL for spec in typed}) > 1:
        return None
    forms = {(spec.kind, spec.dtype, spec.shape) for spec in typed}
    if all(spec.is_repeated for spec in typed) and len(forms) > 1:
        return _common_list(typed, kinds)
    if kinds == {"list", "json"} and not any(spec.unit for spec in typed):
        return ColumnSpec("json")
    if kinds & {"fixed", "list"}:
        return _common_numbers(typed, kinds, of_lists)
    if len(kinds) > 1 or (of_lists and not kinds & {"json", "bytes_list"}):
        return None
    return typed[0]


def _common_list(typed: Sequence[ColumnSpec], kinds: set[str]) -> ColumnSpec | None:
    """The list of values that are lists by nature, with other numbers of items in some shards."""
    if len({spec.dtype for spec in typed}) > 1 or (kinds & {"fixed", "list"} and kinds - {"fixed", "list"}):
        return None
    return replace(typed[0], kind="list" if kinds & {"fixed", "list"} else "bytes_list", shape=())


def _common_numbers(typed: Sequence[ColumnSpec], kinds: set[str], of_lists: bool) -> ColumnSpec | None:
    shapes = {spec.shape for spec in typed if spec.kind == "fixed"}
    if kinds - {"fixed", "list"} or len(shapes) > 1:
        return None
    element = _common_element({(spec.dtype, spec.unit) for spec in typed})
    if element is None:
        return None
    dtype, unit = element
    if kinds == {"fixed"} and not of_lists:
        return replace(typed[0], dtype=dtype, unit=unit)
    return None if any(len(shape) != 1 for shape in shapes) else ColumnSpec("list", dtype, unit=unit)


def _common_element(elements: Collection[tuple[str, str]]) -> tuple[str, str] | None:
    """Type and unit of numbers that are all of these."""
    units = {unit for _, unit in elements}
    if units == {""}:
        dtype = common_dtype({dtype for dtype, _ in elements})
        return None if dtype is None else (dtype, "")
    if "" in units:
        return None
    if len(units) == 1:
        return next(iter(elements))
    return ("int64", "date64[ms]") if units <= _DATES.keys() else _common_time(units)


def _common_time(units: Collection[str]) -> tuple[str, str] | None:
    """Return the type with the finest unit of timestamps (all zoned, or none), times of day or durations."""
    split = [unit.rstrip("]").partition("[")[::2] for unit in units]
    families = {(name.rstrip("3264"), *inner.split(", ")[1:]) for name, inner in split}
    if len(families) > 1:
        return None
    finest = max(units, key=lambda unit: _UNITS.index(unit.partition("[")[2].rstrip("]").split(", ")[0]))
    return ("int32" if finest.startswith("time32") else "int64"), finest


def _with_facts(merged: ColumnSpec, specs: Sequence[ColumnSpec]) -> ColumnSpec:
    """The type with what is known of values in all shards."""
    ranges = [spec.size_range for spec in specs if spec.kind != "null"]
    known = [size_range for size_range in ranges if size_range is not None]
    both = (min(low for low, _ in known), max(high for _, high in known)) if known else None
    return replace(
        merged,
        size_range=both if len(known) == len(ranges) else None,
        optional=any(spec.optional or spec.kind == "null" for spec in specs),
        items=max(spec.items for spec in specs),
        feature=next((spec.feature for spec in specs if spec.feature), ""),
        is_part=all(spec.is_part for spec in specs),
        is_index=all(spec.is_index for spec in specs),
    )


def is_alike(one: ColumnSpec, other: ColumnSpec) -> bool:
    """Return whether values of the two types are delivered alike."""
    kinds = [(spec.kind, spec.dtype, spec.shape, spec.unit, spec.feature == DECIMAL) for spec in (one, other)]
    return kinds[0] == kinds[1]


def growth_of(
    own: Mapping[str, ColumnSpec], merged: Mapping[str, ColumnSpec], columns: Iterable[str]
) -> tuple[int, float]:
    """Estimate what blocks with columns of their own types grow by, brought to the merged ones.

    Returns the bytes for each sample, and the times that the bytes of the decoded block are added.
    """
    row_bytes, times = 0, 0.0
    for name in columns:
        before, after = own.get(name), merged.get(name)
        if after is None or (before is not None and is_alike(before, after)):
            continue
        from sharding.formats.arrow.schema import NUMBER_BYTES, SPAN_BYTES, fixed_bytes

        row_bytes += fixed_bytes(after) if after.kind == "fixed" else SPAN_BYTES
        if before is None:
            continue
        if before.kind == "list" and after.kind == "json":
            times += NUMBER_BYTES / np.dtype(before.dtype).itemsize
        elif (before.kind, after.kind) == ("bytes", "bytes_list"):
            times += 1
        elif after.kind == "list" and before.kind == "fixed":
            row_bytes += math.prod(before.shape) * np.dtype(after.dtype).itemsize
        elif after.kind == "list":
            stored = _NULL_BYTES if before.kind == "null_list" else np.dtype(before.dtype).itemsize
            times += np.dtype(after.dtype).itemsize / stored
    return row_bytes, times
