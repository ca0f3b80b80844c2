"""Arrow tables as columns: which Arrow types become arrays, which become spans, and without copying.

Parquet, Arrow IPC and JSON Lines all decode to an Arrow table; this module gives its columns as numpy sees
them. A fixed-width type becomes an array over the Arrow buffer (bits of a bool column are unpacked), a
variable-length one becomes `Spans` over its values buffer, and a struct becomes one column per leaf, named
"struct.leaf" (of a struct of bytes and path one more: the bytes). Lists of byte strings become `Spans` of
lists in one piece (`sharding.byte_lists`), which copies the bytes once. Other nested values become `Spans` of
their JSON text, the one conversion done in Python. Dictionary-encoded strings stay encoded: spans may
overlap, so each row points at its entry of the dictionary and memory stays that of the stored bytes. Chunks
of text, byte strings and lists stay where they are if they lie in the block's own bytes, as those of
uncompressed record batches do.

Missing values: a fixed-width column that has nulls is `Masked`, floats among them are NaN; strings, lists and
nested values get a length that says so. Whether a column *may* have nulls plays no role. Cost: O(rows) numpy
work per column for offsets, nothing for fixed-width columns without nulls; some microseconds a nested value.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.blocks import (
    MISSING,
    NULL_INSIDE,
    PATH_ONLY,
    Block,
    Column,
    Columns,
    ColumnSpec,
    Format,
    Masked,
    Spans,
    spec_text,
)
from sharding.byte_lists import ByteLists, list_heads
from sharding.errors import ShardError
from sharding.formats.arrow.checks import bits_of, check_chunks, check_nested, elements_of, valid_of
from sharding.formats.arrow.json_types import JSON_TEXT
from sharding.formats.arrow.schema import (
    dtype_of,
    element_type,
    has_one_json,
    is_bytes,
    is_list_view,
    is_text,
    named_columns,
    schema_in,
    spec_of,
    specs_of,
    unlike_json,
)
from sharding.spans import Bytes, Ints

_JSON_ROWS = 256
"""Rows that are Python objects at a time, on their way to JSON."""
_LEAST_CHUNK_BYTES = 128 << 10
"""Size of chunks that stay apart, by the first: a smaller one is copied in less time than a look takes."""
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _UnfitValueError(Exception):
    """A value that the type of other shards cannot hold."""


class TabularFormat(Format):
    """A format whose blocks are Arrow tables: their columns can be looked at by expressions."""

    widens = True

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """Decode the wanted columns in the calling thread, without the GIL.

        Raises:
            CorruptShardError: a column is not there, or the block is broken or not what was indexed.
            ShardError: see `columns_of`.
        """
        if columns is not None and not columns:
            return {}
        return columns_of(self.unchecked_table(block, data, columns), columns, block, stored=data)

    def decode_as(self, block: Block, data: memoryview, specs: Mapping[str, ColumnSpec | None]) -> Columns:
        """See `Format.decode_as`; raises as `decode` does, too."""
        columns = list(specs)
        return columns_of(self.unchecked_table(block, data, columns), columns, block, specs, stored=data)

    def unchecked_table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """Decode as `table` does, leaving what is used to `columns_of` to check."""
        return self.table(block, data, columns)

    @abstractmethod
    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """The wanted columns as Arrow has them, structs not flattened. Only their bytes need be in `data`.

        Raises `CorruptShardError` as `decode` does.
        """

    def schema(self, footer: bytes) -> pa.Schema:
        """Columns of a shard, from its footer."""
        return schema_in(footer)

    def matching_groups(
        self, footer: bytes, expression: Any, common: Any = None, schema: pa.Schema | None = None
    ) -> list[int] | None:
        """Row groups that may hold rows for which a pyarrow expression is true; None: any block may.

        Args:
            footer: of the shard.
            expression: what is asked.
            common: another expression, which is true of all rows; None: none is known.
            schema: of all columns that these name; None: the shard's own.
        """
        return None


def columns_of(
    table: pa.Table,
    columns: Sequence[str] | None,
    block: Block,
    specs: Mapping[str, ColumnSpec | None] = MappingProxyType({}),
    *,
    stored: memoryview | None = None,
) -> Columns:
    """Give the table's columns as arrays and spans, mostly views of the table's own buffers.

    Args:
        table: one row per sample; structs are flattened to "struct.leaf".
        columns: names wanted, None for all.
        block: the context that errors name.
        specs: types to which columns are brought, where these are not their own.
        stored: the block's bytes, where chunks may lie in them: spans of several chunks go over these bytes.

    Raises:
        CorruptShardError: a wanted column is not there, or its offsets point outside its buffers.
        ShardError: the column's type cannot be delivered (interval, list of byte strings, ...), a
            value is none of the type that it is brought to, or two columns have a wanted name.
    """
    flat = flattened(table)
    # Without structs, columns have the names that they are stored by.
    known = flat.column_names if flat is table else [column.name for column in named_columns(table.schema)]
    check_columns(columns, known, block)
    names = set(flat.column_names)
    if len(names) < flat.num_columns:  # one is that of two columns, which is an error for who asks for it
        specs_here = specs_of(table.schema)
        for name in known if columns is None else columns:
            if specs_here[name].kind == "unreadable":
                raise ShardError(block.shard.url, specs_here[name].note, block.offset, stage="decode")
    return {
        name: _column(name, flat.column(name), block, specs.get(name), stored)
        if name in names
        else _media_spans(name, flat, block, stored)
        for name in (known if columns is None else columns)
    }


def missing_column(spec: ColumnSpec, num_rows: int, reason: int = MISSING) -> Column:
    """A column of this type without any value; `reason`: what says so of numbers."""
    if spec.kind != "fixed":
        spans = ByteLists if spec.kind == "bytes_list" else Spans
        of_none = np.full(num_rows, MISSING, np.int64)
        return spans(np.empty(0, spec.dtype), np.zeros(num_rows, np.int64), of_none)
    values = np.zeros((num_rows, *spec.shape), spec.dtype)
    if values.dtype.kind == "f":
        values.fill(np.nan)
    return Masked(values, np.full(num_rows, reason, np.int8))


def check_columns(columns: Sequence[str] | None, of_shard: Collection[str], block: Block) -> None:
    """Raise `CorruptShardError` for the first name that the shard does not have."""
    known = {*of_shard} if columns else ()
    for name in columns or ():
        if name not in known:
            raise block.corrupt(f"no column {name!r}; the shard has {', '.join(of_shard) or 'no columns'}")


def flattened(table: pa.Table) -> pa.Table:
    """Structs replaced by one column per leaf, named as by `leaves`."""
    while any(pa.types.is_struct(t) for t in table.schema.types):
        table = table.flatten()
    return table


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    """Join the chunks; widened first, since 32-bit offsets may not reach over all of them.

    Casts and joins follow indices, views and runs without looking where they lead, so each chunk has been
    checked. `unify_dictionaries` would follow even those beneath nulls, which no validation sees.
    """
    if column.num_chunks == 1:
        return column.chunk(0)
    kind = column.type
    if _is_view(kind):
        column = pa.chunked_array([_cleared_views(chunk) for chunk in column.chunks], kind)
    if is_text(kind):
        column = column.cast(pa.large_string())
    elif is_bytes(kind):
        column = column.cast(pa.large_binary())
    elif pa.types.is_list(kind):
        column = column.cast(pa.large_list(kind.value_type))
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def _column(
    name: str,
    column: pa.ChunkedArray,
    block: Block,
    target: ColumnSpec | None = None,
    stored: memoryview | None = None,
) -> Column:
    source = spec_of(column.type)
    spec = target or source
    if source is None or spec is None:
        reason = f"column {name!r} of type {column.type} has no array form; pass columns= without it"
        if pa.types.is_nested(column.type):
            reason = f"{reason} (it holds {unlike_json(column.type)}, which has no JSON form either)"
        raise ShardError(block.shard.url, reason, block.offset, stage="decode")
    array = column
    element = element_type(spec) if spec.kind in ("fixed", "list") and target else None
    try:
        if source.kind == "null" and target:
            return missing_column(target, len(column))
        if spec.kind in ("json", "null_list") and column.type != JSON_TEXT:
            return _json_spans(column)
        check_chunks(column)
        if stored is not None and spec.kind not in ("fixed", "bytes_list"):
            spans = _spans_in(stored, column, spec, element)
            if spans is not None:
                return spans
        array = _one_array(column)
        if spec.kind == "fixed":
            values, lacks = _fixed(array, element)
            # A tensor type and fixed-size lists of lists lie in memory alike.
            values = values.reshape(len(array), *spec.shape)
            return values if lacks is None else Masked(values, lacks)
        return _byte_list_spans(array) if spec.kind == "bytes_list" else _variable_spans(array, spec, element)
    except _UnfitValueError as error:
        reason = (
            f"column {name!r} is {spec_text(source)} here, of which a value is no {spec_text(spec)} ({error})"
        )
        cure = f"as {spec.note} has others; leave it out by columns=, or write it as one type in all shards"
        raise ShardError(block.shard.url, f"{reason}, {cure}", block.offset, stage="decode") from error
    except (pa.ArrowInvalid, pa.ArrowIndexError) as error:
        raise block.corrupt(f"column {name!r} ({array.type}) is broken: {error}") from error


def _variable_spans(array: pa.Array, spec: ColumnSpec, element: pa.DataType | None) -> Spans:
    """Spans of lists or of byte strings, text and JSON text among them."""
    return _list_spans(array, element) if spec.kind == "list" else _byte_spans(array)


def _spans_in(
    stored: memoryview, column: pa.ChunkedArray, spec: ColumnSpec, element: pa.DataType | None
) -> Spans | None:
    """Spans of several chunks over the block's bytes that they lie in; None: join them.

    Record batches that are read as views lie there. To join them would copy their values into fresh pages,
    which takes longer than all else that is done with them. What is decompressed, widened or decoded lies
    elsewhere.
    """
    chunks = column.chunks
    values = chunks[0].buffers()[-1] if len(chunks) > 1 else None
    if values is None or values.size < _LEAST_CHUNK_BYTES:
        return None
    content = np.frombuffer(stored, np.uint8)
    origin, low, high = content.ctypes.data, len(content), 0
    pieces, begins = [], []
    for chunk in chunks:
        spans = _variable_spans(chunk, spec, element)
        begin = spans.buffer.ctypes.data - origin if len(spans.buffer) else low
        end = begin + spans.buffer.nbytes
        if not 0 <= begin <= end <= len(content):
            return None
        low, high = min(low, begin), max(high, end)
        pieces.append(spans)
        begins.append(begin)
    item = pieces[0].buffer.itemsize
    shifts = np.array(begins) - low
    if item > 1 and (shifts % item).any():
        return None
    starts = np.concatenate([spans.starts for spans in pieces])
    starts += np.repeat(shifts // item, [len(spans) for spans in pieces])
    lengths = np.concatenate([spans.lengths for spans in pieces])
    return Spans(content[low:high].view(pieces[0].buffer.dtype), starts, lengths)


def _media_spans(name: str, flat: pa.Table, block: Block, stored: memoryview | None) -> Spans:
    """Spans of the bytes in structs of bytes and path."""
    content, paths = (
        _column(leaf, flat.column(leaf), block, stored=stored) for leaf in (f"{name}.bytes", f"{name}.path")
    )
    assert isinstance(content, Spans)
    assert isinstance(paths, Spans)
    only_path = (content.lengths < 0) & (paths.lengths > 0)
    return Spans(content.buffer, content.starts, np.where(only_path, PATH_ONLY, content.lengths))


Lacks = NDArray[np.int8]


def _fixed(array: pa.Array, element: pa.DataType | None = None) -> tuple[NDArray[Any], Lacks | None]:
    """Values of a fixed-width array, [n, ...], and which are not there (see `Masked`); None: all are.

    `element`: the type to which numbers are brought; None: they have theirs.
    """
    array = _plain(array)
    if element is not None and not pa.types.is_nested(array.type):
        array = _widened(array, element)
    kind, n = array.type, len(array)
    lacks = None
    if pa.types.is_fixed_size_list(kind):
        values, lacks = _fixed_lists(array, element)
    elif n == 0:
        values = np.empty(0, dtype_of(kind) or np.uint8)
    elif pa.types.is_fixed_size_binary(kind):
        width = kind.byte_width
        values = elements_of(array.buffers()[1], np.uint8, n * width, array.offset * width).reshape(n, width)
    elif pa.types.is_boolean(kind):
        values = bits_of(array.buffers()[1], array.offset, n)
    else:
        dtype = dtype_of(kind)
        assert dtype is not None
        values = elements_of(array.buffers()[1], dtype, n, array.offset)
    valid = valid_of(array)
    if valid is None:
        return values, lacks
    if values.dtype.kind == "f":
        values = values.copy()
        values[~valid] = np.nan
    return values, np.where(valid, 0 if lacks is None else lacks, MISSING).astype(np.int8)


def _widened(array: pa.Array, element: pa.DataType) -> pa.Array:
    """Numbers or times as ones of a wider type. Raises `_UnfitValueError` for one that it cannot hold."""
    if pa.types.is_timestamp(element):
        element = pa.timestamp(element.unit, getattr(array.type, "tz", None))
    try:
        return array.cast(element)
    except pa.ArrowInvalid as error:
        raise _UnfitValueError(str(error)) from error


def _fixed_lists(
    array: pa.FixedSizeListArray, element: pa.DataType | None
) -> tuple[NDArray[Any], Lacks | None]:
    n, size = len(array), array.type.list_size
    # `values` ignores the slice that the array is; `flatten()` would drop the lists that are null.
    elements, inside = _fixed(array.values.slice(array.offset * size, n * size), element)
    lacks = None
    if inside is not None and elements.dtype.kind != "f":
        lacks = np.where(inside.reshape(n, size).any(axis=1), NULL_INSIDE, 0).astype(np.int8)
    return elements.reshape(n, size, *elements.shape[1:]), lacks


def _plain(array: pa.Array) -> pa.Array:
    """The array without extension type, dictionary or runs."""
    import pyarrow.compute as pc

    while True:
        kind = array.type
        if isinstance(kind, pa.BaseExtensionType):
            array = array.storage
        elif pa.types.is_dictionary(kind):
            array = array.dictionary_decode()
        elif pa.types.is_run_end_encoded(kind):
            array = pc.run_end_decode(array)
        else:
            return array


def _json_spans(column: pa.ChunkedArray) -> Spans:
    """Spans of the JSON text of each value: nothing vectorised writes JSON, so values pass through Python."""
    # msgspec takes a tenth of the time, and writes the same but for fractions; NaN it takes for null.
    encode, is_one = msgspec.json.encode, has_one_json(column.type)
    texts, lengths = bytearray(), []
    for chunk in column.chunks:
        check_nested(chunk)  # to_pylist follows every offset and decodes every text
        for first in range(0, len(chunk), _JSON_ROWS):
            for value in chunk.slice(first, _JSON_ROWS).to_pylist():
                text = b"" if value is None else encode(value) if is_one else _to_json(value).encode()
                texts += text
                lengths.append(MISSING if value is None else len(text))
    starts = np.concatenate((_ZERO, np.cumsum(np.maximum(np.array(lengths, np.int64), 0))))[:-1]
    return Spans(np.frombuffer(texts, np.uint8), starts, np.array(lengths, np.int64))


def _byte_spans(array: pa.Array) -> Spans:
    """Spans of strings or byte strings over their values buffer, or over that of the dictionary."""
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        return _dictionary_spans(array)
    array = _plain(array)
    n = len(array)
    if pa.types.is_null(array.type) or n == 0:
        return Spans(np.empty(0, np.uint8), np.zeros(n, np.int64), np.full(n, MISSING, np.int64))
    if _is_view(array.type):
        array = _cleared_views(array).cast(pa.large_binary())
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.string())
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    offsets = elements_of(array.buffers()[1], np.int64 if wide else np.int32, n + 1, array.offset).astype(
        np.int64
    )
    lengths = _with_missing(_sizes(offsets), valid_of(array))
    return Spans(elements_of(array.buffers()[2], np.uint8), offsets[:-1], lengths)


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _cleared_views(array: pa.Array) -> pa.Array:
    """The array with empty views beneath nulls: a cast follows those, too, and no validation sees them."""
    valid = valid_of(array)
    if valid is None:
        return array
    bitmap, views, *buffers = array.buffers()
    cleared = np.zeros((array.offset + len(array), 2), np.int64)
    cleared[array.offset :] = elements_of(views, np.int64, 2 * len(array), 2 * array.offset).reshape(-1, 2)
    cleared[array.offset :][~valid] = 0
    buffers = [bitmap, pa.py_buffer(cleared), *buffers]
    return pa.Array.from_buffers(array.type, len(array), buffers, array.null_count, array.offset)


def _dictionary_spans(array: pa.DictionaryArray) -> Spans:
    entries = _byte_spans(array.dictionary)
    indices = array.indices
    valid = valid_of(indices)
    codes, _ = _fixed(indices if valid is None else indices.fill_null(0))
    if not len(entries):  # only nulls, so there is nothing to point at
        return Spans(entries.buffer, np.zeros(len(codes), np.int64), np.full(len(codes), MISSING, np.int64))
    return Spans(entries.buffer, entries.starts[codes], _with_missing(entries.lengths[codes], valid))


def _list_spans(array: pa.Array, element: pa.DataType | None) -> Spans:
    """Spans of lists over the one array of their elements; `element`: see `_fixed`."""
    array = _plain(array)
    kind, n, elements = array.type, len(array), array.values
    width = np.int64 if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind) else np.int32
    if pa.types.is_fixed_size_list(kind):
        starts, lengths = np.arange(n) * kind.list_size, np.full(n, kind.list_size, np.int64)
        elements = elements.slice(array.offset * kind.list_size, n * kind.list_size)
    elif is_list_view(kind):
        starts = elements_of(array.buffers()[1], width, n, array.offset).astype(np.int64)
        lengths = elements_of(array.buffers()[2], width, n, array.offset).astype(np.int64)
    else:
        offsets = elements_of(array.buffers()[1], width, n + 1, array.offset).astype(np.int64) if n else _ZERO
        starts, lengths = offsets[:-1] - offsets[0], _sizes(offsets)
        elements = elements.slice(offsets[0], offsets[-1] - offsets[0])
    lengths = _with_missing(lengths, valid_of(array))
    values, inside = _fixed(elements, element)
    if inside is not None and values.dtype.kind != "f":
        nulls_before = np.append(0, np.cumsum(inside != 0))
        first = np.where(lengths > 0, starts, 0)  # beneath nulls, a list view may begin anywhere
        has_null = nulls_before[first + np.maximum(lengths, 0)] > nulls_before[first]
        lengths = np.where(has_null, NULL_INSIDE, lengths)
    return Spans(values, starts, lengths)


def _byte_list_spans(array: pa.Array) -> ByteLists:
    """Spans of lists of byte strings, or of structs of bytes and path, each list in one piece.

    Items that are null are left out. The bytes are copied once.
    """
    import pyarrow.compute as pc

    array = _plain(array)
    counts = _fixed(pc.list_value_length(array).fill_null(0))[0].astype(np.int64)
    items, missing = _plain(array.flatten()), np.zeros(len(array), bool)
    if pa.types.is_struct(items.type):
        items, paths = (_plain(pc.struct_field(items, leaf)) for leaf in ("bytes", "path"))
        only_path = _byte_spans(items).lengths < 0
        only_path &= _byte_spans(paths).lengths > 0
        missing = _of_lists(only_path, counts) > 0
    if _is_view(items.type):
        items = _cleared_views(items)
    items = items.cast(pa.large_binary())
    if items.null_count:
        counts = _of_lists(_fixed(items.is_valid())[0], counts)
        items = items.drop_null()
    offsets = elements_of(items.buffers()[1], np.int64, len(items) + 1, items.offset) if len(items) else _ZERO
    content = elements_of(items.buffers()[2], np.uint8)
    lists = joined_lists(counts, _sizes(offsets), content, int(offsets[0]))
    lengths = _with_missing(lists.lengths, valid_of(array))
    return ByteLists(lists.buffer, lists.starts, np.where(missing, PATH_ONLY, lengths))


def joined_lists(counts: Ints, lengths: Ints, content: Bytes, first: int = 0) -> ByteLists:
    """Return lists of so many items each, [n], each in one piece: the one copy of their bytes.

    Args:
        counts: int64 [n] items of each list.
        lengths: int64 [sum of counts] bytes of each item.
        content: uint8, the items, one behind the other, list by list.
        first: where the first of them begins.
    """
    import pyarrow.compute as pc

    heads, head_at = list_heads(counts, lengths)
    body_at = first + np.append(0, np.cumsum(lengths))[np.append(0, np.cumsum(counts))]
    parts = [
        pa.Array.from_buffers(pa.large_binary(), len(counts), [None, pa.py_buffer(cuts), pa.py_buffer(data)])
        for cuts, data in ((head_at, heads), (body_at, content))
    ]
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    sizes = np.diff(head_at) + np.diff(body_at)
    buffer = np.frombuffer(joined.buffers()[2], np.uint8) if len(joined) else np.zeros(0, np.uint8)
    return ByteLists(buffer, np.cumsum(sizes) - sizes, sizes)


def _of_lists(items: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the items of each list that are true, given how many there are of each."""
    trues: NDArray[np.int64] = np.diff(np.append(0, np.cumsum(items))[np.append(0, np.cumsum(counts))])
    return trues


_ZERO: NDArray[np.int64] = np.zeros(1, np.int64)


def _sizes(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lengths of the values between offsets. Validation only saw the first and the last of these."""
    lengths = np.diff(offsets)
    if lengths.min(initial=0) < 0:
        raise pa.ArrowInvalid("its offsets fall")  # so that some may point outside of their buffer
    return lengths


def _with_missing(lengths: NDArray[np.int64], valid: NDArray[np.bool_] | None) -> NDArray[np.int64]:
    return lengths if valid is None else np.where(valid, lengths, MISSING)
