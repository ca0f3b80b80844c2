"""Whether a nested Arrow array can be walked safely, value by value.

Full validation says so, with one exception: beneath nulls, Arrow's own builders fill dictionary codes with 0,
also where the dictionary is empty, and full validation refuses what they wrote.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from sharding.formats.arrow_schema import is_list_view


def check_nested(array: pa.Array) -> None:
    """Raise `pa.ArrowInvalid` where an offset, a dictionary code or a text is broken."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        try:
            array.view(_with_codes(array.type)).validate(full=True)  # all but the dictionaries
        except pa.ArrowNotImplementedError:
            raise error from None
        _check_codes(array)


def _with_codes(kind: pa.DataType) -> pa.DataType:
    """The type with the codes of dictionaries as plain integers."""
    if isinstance(kind, pa.BaseExtensionType):
        return _with_codes(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return kind.index_type
    if pa.types.is_struct(kind):
        return pa.struct([child.with_type(_with_codes(child.type)) for child in kind])
    if pa.types.is_map(kind):
        return pa.map_(_with_codes(kind.key_type), _with_codes(kind.item_type))
    if not pa.types.is_nested(kind) or pa.types.is_run_end_encoded(kind):
        return kind
    child = kind.value_field.with_type(_with_codes(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(child, kind.list_size)
    if is_list_view(kind):
        return (pa.large_list_view if pa.types.is_large_list_view(kind) else pa.list_view)(child)
    return (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(child)


def _check_codes(array: pa.Array) -> None:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        _check_codes(array.storage)
    elif pa.types.is_dictionary(kind):
        array.dictionary.validate(full=True)
        codes = pc.min_max(array.indices).as_py()
        most = max(len(array.dictionary), 1)  # a 0 that nothing masks is an IndexError of `to_pylist`
        if codes["max"] is not None and not 0 <= codes["min"] <= codes["max"] < most:
            raise pa.ArrowInvalid(f"codes {codes['min']} to {codes['max']} of a dictionary of {most} entries")
    elif pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            _check_codes(array.field(i))
    elif pa.types.is_map(kind):
        _check_codes(array.keys)
        _check_codes(array.items)
    elif pa.types.is_nested(kind):
        _check_codes(array.values)


__all__ = ["check_nested"]
