"""Lists of byte strings in one piece: what is written is read, and Arrow's lists of any type become such."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from formats_kit import arrow_block
from hypothesis import given, settings, strategies as st

from sharding.blocks import MISSING, PATH_ONLY, Spans
from sharding.byte_lists import list_counts, list_heads, list_items
from sharding.errors import CorruptShardError
from sharding.formats.arrow.columns import columns_of
from sharding.formats.arrow.schema import is_media

MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
LISTS = st.lists(st.lists(st.binary(max_size=9), max_size=4), max_size=6)


def lists_of(column: Any) -> list[list[bytes] | int]:
    """The lists of a decoded column; where there is none, the length that says why."""
    assert isinstance(column, Spans)
    have = np.flatnonzero(column.lengths >= 0)
    counts, starts, lengths = list_items(column.buffer, column.starts[have])
    items = [
        column.buffer[start : start + n].tobytes()
        for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(counts, list_counts(column.buffer, column.starts[have]))
    ends = np.cumsum(counts).tolist()
    found: list[list[bytes] | int] = column.lengths.tolist()
    for row, end, count in zip(have.tolist(), ends, counts.tolist(), strict=True):
        found[row] = items[end - count : end]
        last = starts[end - 1] + lengths[end - 1] if count else column.starts[row] + 8
        assert last == column.starts[row] + column.lengths[row]  # the span ends with its last item
    return found


@given(LISTS, st.integers(0, 7))
def test_lists_are_read_as_they_were_written_at_any_address(lists: list[list[bytes]], shift: int) -> None:
    counts = np.array([len(items) for items in lists], np.int64)
    lengths = np.array([len(item) for items in lists for item in items], np.int64)
    heads, offsets = list_heads(counts, lengths)
    pieces = [heads[offsets[i] : offsets[i + 1]].tobytes() + b"".join(items) for i, items in enumerate(lists)]
    buffer = np.frombuffer(bytes(shift) + b"".join(pieces), np.uint8)
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    spans = Spans(buffer, shift + np.cumsum(sizes) - sizes, sizes)
    assert lists_of(spans) == lists


def row_of(value: Any) -> Any:
    """What a stored list is delivered as: bytes, nulls left out; a path without bytes spoils it."""
    if value is None:
        return MISSING
    items = [item if isinstance(item, dict) else {"bytes": item} for item in value if item is not None]
    if any(item["bytes"] is None and item.get("path") for item in items):
        return PATH_ONLY
    return [item["bytes"] for item in items if item["bytes"] is not None]


ITEM_TYPES = [
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.dictionary(pa.int8(), pa.binary()),
    MEDIA,
    pa.struct([("path", pa.large_string()), ("bytes", pa.large_binary())]),
]
LIST_TYPES = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 2)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("item", ITEM_TYPES, ids=str)
@pytest.mark.parametrize("of", LIST_TYPES)
@settings(max_examples=5)
@given(data=st.data())
def test_every_type_of_list_is_what_pyarrow_says(of: Any, item: pa.DataType, data: st.DataObject) -> None:
    kind = of(item)
    one: Any = st.none() | st.binary(max_size=5)
    if is_media(item):
        one |= st.fixed_dictionaries({"bytes": one, "path": st.none() | st.sampled_from(["", "a.jpg"])})
        one = one.map(lambda value: {"bytes": value} if isinstance(value, bytes) else value)
    width = {"min_size": 2, "max_size": 2} if pa.types.is_fixed_size_list(kind) else {"max_size": 3}
    rows = data.draw(st.lists(st.none() | st.lists(one, **width), max_size=7))
    array = pa.array(rows, kind)
    cut = data.draw(st.integers(0, len(rows)))
    for chunks in ([array], [array[:cut], array[cut:]], [array[cut:]]):
        table = pa.table({"x": pa.chunked_array(chunks, kind)})
        found = lists_of(columns_of(table, ["x"], arrow_block(table.num_rows))["x"])
        assert found == [row_of(value) for chunk in chunks for value in chunk.to_pylist()]


def test_offsets_that_fall_are_an_error_that_names_the_column() -> None:
    offsets = pa.array([0, 9, 3], pa.int32()).buffers()[1]
    items = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"x" * 9)])
    lists = pa.Array.from_buffers(
        pa.list_(pa.binary()), 1, [None, pa.array([0, 2], pa.int32()).buffers()[1]], children=[items]
    )
    with pytest.raises(CorruptShardError, match="column 'x'"):
        columns_of(pa.table({"x": lists}), ["x"], arrow_block(1))
