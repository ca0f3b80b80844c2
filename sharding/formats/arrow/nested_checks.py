"""Whether a nested Arrow array can be walked safely, value by value.

Full validation says so, with one exception: beneath nulls, Arrow's own builders fill dictionary codes with 0,
also where the dictionary is empty, and full validation refuses what they wrote. Such arrays are checked level
by level.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from sharding.formats.arrow.schema import is_list_view


def check_nested(array: pa.Array) -> None:
    """Raise `pa.ArrowInvalid` where an offset, a dictionary code or a text is broken."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        array.validate()  # lengths of buffers and children
        _check(array)


def _check(array: pa.Array) -> None:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        _check(array.storage)
    elif pa.types.is_dictionary(kind):
        array.dictionary.validate(full=True)
        # A 0 that nothing masks is an IndexError of `to_pylist`.
        check_codes(array.indices, max(len(array.dictionary), 1))
    elif pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            _check(array.field(i))
    elif pa.types.is_fixed_size_list(kind):
        _check(array.values)
    elif pa.types.is_nested(kind) and not pa.types.is_run_end_encoded(kind):
        _check_offsets(array)
        _check(array.values)
    else:
        array.validate(full=True)


def _check_offsets(array: pa.Array) -> None:
    """Those of lists or a map, as of lists of nulls."""
    kind, nothing = array.type, pa.null()
    if is_list_view(kind):
        like = (pa.large_list_view if pa.types.is_large_list_view(kind) else pa.list_view)(nothing)
    else:
        like = (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(nothing)
    own = array.buffers()[: like.num_buffers]
    nulls = pa.nulls(len(array.values))
    pa.Array.from_buffers(like, len(array), own, offset=array.offset, children=[nulls]).validate(full=True)


def check_codes(indices: pa.Array, num_entries: int) -> None:
    """Raise `pa.ArrowInvalid` where a code, nulls aside, is none of so many entries of a dictionary."""
    codes = pc.min_max(indices).as_py()
    if codes["max"] is not None and not 0 <= codes["min"] <= codes["max"] < num_entries:
        raise pa.ArrowInvalid(
            f"codes {codes['min']} to {codes['max']} of a dictionary of {num_entries} entries"
        )


__all__ = ["check_codes", "check_nested"]
