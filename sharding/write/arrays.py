"""Rows' values as Arrow arrays that say what was given: no value is cast, rounded or taken for another.

A column has the narrowest type that holds each of its values, as readers bring the types of unlike shards
together. Values of several types (1 beside 1.5) become one array only where each stays what it is.
"""

from __future__ import annotations

from array import array as plain_array
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.arrow_arrays import (
    bool_array,
    bytes_array,
    number_array,
    text_array,
    valid_of,
)
from sharding.blocks import common_dtype
from sharding.formats.arrow.json_arrays import list_array
from sharding.formats.arrow.schema import dtype_of, is_bytes, is_list, is_text
from sharding.write.values import DEEPEST, ENDLESS, NESTED, column_of, has_an_end, plain_value

_NONE = type(None)
_ENDLESS_TYPES: dict[Any, Set[type]] = {None: frozenset(), list: frozenset({list, tuple}), dict: NESTED}
"""By what values lie in: types of those that may have no end. A dict's in a list shows in its fields."""


def array_of(
    values: Sequence[Any], kind: pa.DataType | None = None, *, rounds: bool = False, within: Any = None
) -> pa.Array:
    """Return values, None among them, as an Arrow array.

    Args:
        values: Python's, numpy's and torch's, and lists, tuples and dicts of them.
        kind: the type of the array; None: the narrowest that holds all.
        rounds: whether numbers may be rounded to `kind`, which the user named.
        within: `list` or `dict`, if these values lie in such.

    Raises:
        TypeError: a value is none of the type, or two have no type in common.
        ValueError: a number does not fit the type, or a value holds itself.
        OverflowError: no array has so many items.
    """
    types: set[Any] = set(map(type, values))
    if not types <= _BUILDERS.keys():
        values = [value if type(value) in _BUILDERS else _known(value) for value in values]
        types = set(map(type, values))
    if types & _ENDLESS_TYPES[within] and not all(has_an_end(v, DEEPEST - 1) for v in values):
        raise ValueError(f"a value {ENDLESS}")
    if types == {np.ndarray}:
        types = set(map(attrgetter("dtype", "ndim"), values))
    elif np.ndarray in types:
        types = set(map(_layout, values))
    types.discard(_NONE)
    if len(types) <= 1:
        first = next((value for value in values if value is not None), None)
        build: Callable[[Any], pa.Array] = _BUILDERS.get(type(first), _by_arrow)
        return as_kind(build(values), kind, rounds=rounds)
    groups: dict[Any, list[int]] = {}
    for number, value in enumerate(values):
        groups.setdefault(_layout(value), []).append(number)
    arrays = [array_of([values[number] for number in rows]) for rows in groups.values()]
    if kind is None:
        kind = arrays[0].type
        for array in arrays:
            kind = common_type(kind, array.type)
    joined = pa.concat_arrays([as_kind(array, kind, rounds=rounds) for array in arrays])
    return joined.take(number_array(np.argsort(np.concatenate(list(groups.values())))))


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the narrowest type of values of both. `TypeError`: they mean unlike things."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if _is_number(one) and _is_number(other):
        number: Any = common_dtype({str(dtype_of(kind)) for kind in (one, other)})
        return pa.from_numpy_dtype(np.dtype(number))
    for is_kind, large in ((is_text, pa.large_string()), (is_bytes, pa.large_binary())):
        if is_kind(one) and is_kind(other):
            return large
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        scale = max(one.scale, other.scale)
        digits = max(one.precision - one.scale, other.precision - other.scale) + scale
        if digits <= pa.decimal256(1).bit_width:
            return (pa.decimal128 if digits <= 38 else pa.decimal256)(digits, scale)
    if is_list(one) and is_list(other):
        return pa.list_(common_type(one.value_type, other.value_type))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            fields[field.name] = common_type(fields.get(field.name, pa.null()), field.type)
        return pa.struct(fields)
    raise TypeError(f"{one} and {other} have no type in common")


def as_kind(array: pa.Array, kind: pa.DataType | None, *, rounds: bool = False) -> pa.Array:
    """Return an array as one of another type that holds the same values. Raises as `array_of` does."""
    origin = array.type
    if kind is None or kind == origin:
        return array
    if pa.types.is_null(origin):
        return pa.nulls(len(array), kind)
    if pa.types.is_dictionary(kind):
        coded = as_kind(array, kind.value_type, rounds=rounds).dictionary_encode()
        return pa.DictionaryArray.from_arrays(coded.indices.cast(kind.index_type), coded.dictionary)
    if isinstance(kind, pa.BaseExtensionType):
        return kind.wrap_array(as_kind(array, kind.storage_type, rounds=rounds))
    if is_list(origin) and (is_list(kind) or pa.types.is_fixed_size_list(kind)):
        items = as_kind(array.flatten(), kind.value_type, rounds=rounds)
        lengths = array.value_lengths().fill_null(0).to_numpy()
        return list_array(lengths, array.is_valid().to_numpy(zero_copy_only=False), items).cast(kind)
    if pa.types.is_struct(origin) and pa.types.is_struct(kind):
        if more := {field.name for field in origin} - {field.name for field in kind}:
            raise TypeError(f"{kind} has no field {min(more)!r}")
        children = [
            as_kind(array.field(field.name), field.type, rounds=rounds)
            if origin.get_field_index(field.name) >= 0
            else pa.nulls(len(array), field.type)
            for field in kind
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    if _is_number(origin) and _is_number(kind):
        return _as_number(array, kind, rounds)
    alike = (is_text, is_bytes, pa.types.is_decimal, pa.types.is_timestamp, pa.types.is_duration)
    fits = any(is_kind(origin) and is_kind(kind) for is_kind in (*alike, pa.types.is_time, pa.types.is_date))
    fits |= is_bytes(origin) and pa.types.is_fixed_size_binary(kind)
    if pa.types.is_integer(origin) and pa.types.is_decimal(kind):
        return array.cast(pa.decimal256(76, kind.scale)).cast(kind)
    if not fits or (getattr(origin, "tz", None) is None) != (getattr(kind, "tz", None) is None):
        raise TypeError(f"{origin} is no {kind}")
    return array.cast(kind)


def _as_number(array: pa.Array, kind: pa.DataType, rounds: bool) -> pa.Array:
    if pa.types.is_floating(array.type) and not pa.types.is_floating(kind) and not rounds:
        raise TypeError(f"{array.type} is no {kind}")
    numbers = array.cast(kind)  # no integer is rounded or cut here
    if pa.types.is_floating(array.type) and pa.types.is_floating(kind):
        values = array.drop_null().to_numpy(zero_copy_only=False)
        casts = numbers.drop_null().to_numpy(zero_copy_only=False).astype(values.dtype)
        lost = np.isinf(casts) & ~np.isinf(values) if rounds else (casts != values) & (values == values)
        if lost.any():
            raise ValueError(f"{values[lost][0].item()!r} ({array.type}) does not fit {kind}")
    return numbers


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _layout(value: Any) -> Any:
    """The kind of values of one array: the type, and of numpy's arrays dtype and dimensions."""
    return (value.dtype, value.ndim) if type(value) is np.ndarray else type(value)


def _known(value: Any) -> Any:
    """A value of a type that `_BUILDERS` has, or that Arrow knows."""
    value = plain_value(value)
    if isinstance(value, (set, frozenset)):
        raise TypeError("a set has no order: give a sorted list")
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    return dict(value) if isinstance(value, Mapping) else value


# ---- arrays of values of one type -----------------------------------------------------------------------


def _by_arrow(values: Any) -> pa.Array:
    if len({getattr(value, "tzinfo", None) is None for value in values if value is not None}) > 1:
        raise TypeError("times with and without a time zone have no type in common")
    try:
        return pa.array(values)
    except pa.ArrowException as error:
        kind = next(type(value).__name__ for value in values if value is not None)
        raise TypeError(f"no Arrow type holds a value of type {kind} ({error})") from error


def _ints(values: Sequence[Any]) -> pa.Array:
    try:
        return _numbers("q")(values)
    except OverflowError:
        low, high = (pick(value for value in values if value is not None) for pick in (min, max))
        if low < 0 or high >> 64:
            raise TypeError(f"integers from {low} to {high} fit no type of 64 bits") from None
        return pa.array(values, pa.uint64())


def _plain(kind: pa.DataType, by_hand: Callable[[Any], pa.Array]) -> Callable[[Sequence[Any]], pa.Array]:
    # `pa.array` looks for pandas, whose import takes a second.
    def build(values: Sequence[Any]) -> pa.Array:
        with suppress(OverflowError, TypeError):  # more than one array holds: Arrow makes several; or None
            return by_hand(values)
        return pa.array(values, kind)

    return build


def _numbers(char: str) -> Callable[[Sequence[Any]], pa.Array]:
    kind = pa.from_numpy_dtype(np.dtype(char))  # whose characters are those of `array`
    return _plain(kind, lambda values: number_array(np.frombuffer(plain_array(char, values), char)))


def _lists(values: Sequence[Any]) -> pa.Array:
    valid = valid_of(values)
    there = values if valid is None else [value or () for value in values]
    lengths = np.fromiter(map(len, there), np.int64, len(values))
    return list_array(lengths, valid, array_of(list(chain.from_iterable(there)), within=list))


def _arrays(values: Sequence[NDArray[Any] | None]) -> pa.Array:
    """Lists as deep as arrays of one dtype have dimensions."""
    there = [value for value in values if value is not None]
    if not there[0].ndim:
        return array_of([None if value is None else value[()] for value in values])
    if there[0].ndim == 1:
        shapes, flat = np.fromiter(map(len, there), np.int64, len(there))[:, None], np.concatenate(there)
    else:
        shapes, flat = np.array([v.shape for v in there]), np.concatenate([v.reshape(-1) for v in there])
    flat = flat.astype(flat.dtype.newbyteorder("="), copy=False)
    if flat.dtype.kind in "iuf" and flat.dtype.itemsize <= 8:
        items = number_array(flat)
    elif flat.dtype.kind == "b":
        items = bool_array(flat)
    else:
        items = array_of(flat.tolist()) if flat.dtype.hasobject else _by_arrow(flat)
    for depth in range(shapes.shape[1] - 1, 0, -1):
        lengths = np.repeat(shapes[:, depth], shapes[:, :depth].prod(axis=1))
        items = list_array(lengths, None, items)
    valid = None if len(there) == len(values) else np.array([value is not None for value in values])
    lengths = np.zeros(len(values), np.int64)
    lengths[slice(None) if valid is None else valid] = shapes[:, 0]
    return list_array(lengths, valid, items)


def _structs(values: Sequence[dict[str, Any] | None]) -> pa.Array:
    names = list(dict.fromkeys(chain.from_iterable(filter(None, values))))
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError("a dict needs fields, and their names are text")
    children = [array_of(column_of(values, name), within=dict) for name in names]
    mask = None if (valid := valid_of(values)) is None else bool_array(~valid)
    return pa.StructArray.from_arrays(children, names, mask=mask)


_BUILDERS: dict[type, Callable[[Sequence[Any]], pa.Array]] = {
    _NONE: lambda values: pa.nulls(len(values)),
    int: _ints,
    float: _numbers("d"),
    bool: _plain(pa.bool_(), lambda values: bool_array(np.frombuffer(plain_array("b", values), np.bool_))),
    str: _plain(pa.string(), lambda values: text_array(values, pa.string())),
    bytes: _plain(pa.binary(), lambda values: bytes_array(values, pa.binary())),
    list: _lists,
    tuple: _lists,
    np.ndarray: _arrays,
    dict: _structs,
    **{np.dtype(char).type: _numbers(char) for char in "bhiBHILf"},
}
