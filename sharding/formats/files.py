"""Loose files: each is a shard, a block and a sample, delivered under its ending as a column.

Nothing is read to index them: a listing tells names and sizes (`dataflow.sources.loose`). The footer of a
shard (little-endian) has what its sample is besides bytes: the number of its class (i4; -1: none), the
characters at the end of its URL that are its name below the folder that was listed (u4), and how many files
that listing left out (u4; of the first shard only). `cls` is the number of the class, `__key__` the name
without its ending. Where a manifest has further columns, the index of the block is the file's row of it
(`rows_of`).

One file a sample costs one request a sample, and a row of the catalog (about 230 bytes); in return the order
mixes single samples, and nobody has to pack them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from sharding.blocks import (
    MISSING,
    Block,
    Column,
    Columns,
    ColumnSpec,
    Format,
    Masked,
    Shard,
    ShardScan,
    Spans,
)
from sharding.urls import file_name

CLASS_COLUMN, KEY_COLUMN = "cls", "__key__"
NO_CLASS = -1
_FACTS = struct.Struct("<iII")
_ONE = np.zeros(1, np.int64)
_NOTHING = Spans(np.empty(0, np.uint8), _ONE, np.full(1, MISSING, np.int64))
_DTYPES = (
    "bool",
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
    "float32",
    "float64",
)
"""Types of numbers in rows of manifests; the code of a value is its type's place here."""
_LISTED = 32
"""Added to the code of a value that is a list of such numbers; text is a list of bytes."""


class FilesFormat(Format):
    """The `Format` of single files. Thread-safe, stateless.

    Args:
        classes: tells how they are numbered, where that is not by the folder's own sorted names.
    """

    name = "files"
    has_keys = True
    columns_are_extensions = True
    if_changed = "loose files are listed when the dataset is opened: open it again"

    def __init__(self, *, classes: str = "") -> None:
        self.classes = classes

    def options(self) -> dict[str, str | int]:
        """Return what tells how classes are numbered."""
        return {"classes": self.classes} if self.classes else {}

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Index one file that no listing told of: it has no class, and its name is its key."""
        name = file_name(shard.url)
        size = np.array([shard.size], np.int64)
        return ShardScan(
            offset=_ONE,
            length=size,
            nbytes=size,
            num_samples=_ONE + 1,
            schema=schema_of({ending_of(name): (shard.size, shard.size)}, ()),
            footer=_FACTS.pack(NO_CLASS, len(name), 0),
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the block is not the whole file, or its name is longer than its URL."""
        number, name_length, _ = _FACTS.unpack(block.footer)
        if number < NO_CLASS or not 0 < name_length <= len(block.shard.url):
            raise ValueError(f"class {number}, and a name of {name_length} characters")
        if (block.num_samples, block.offset, block.length) != (1, 0, block.shard.size):
            raise ValueError(f"{block.num_samples} samples in {block.length} bytes of a file")
        for ext in _row_of(block).values():
            _value(ext)

    def shard_name(self, url: str, footer: bytes | memoryview) -> str:
        """Return the file's path below the folder: class folders have files of the same names."""
        return url[-_FACTS.unpack(footer)[1] :] if len(footer) == _FACTS.size else file_name(url)

    def num_passed_over(self, footer: bytes) -> int:
        """Files that the listing left out: hidden ones, of other kinds, or beside folders of classes."""
        return int(_FACTS.unpack(footer)[2])

    def value_bytes(self, block: Block, column: str) -> NDArray[np.int64] | None:
        """Bytes of the file, where its ending is the column or one of the alternatives."""
        if column in (CLASS_COLUMN, KEY_COLUMN) or column in _row_of(block):
            return None
        is_there = ending_of(block.shard.url) in self.alternatives(column)
        return np.array([block.length if is_there else MISSING], np.int64)

    def num_missing(self, block: Block, column: str) -> int | None:
        """Return whether the sample lacks the column."""
        if (ext := _row_of(block).get(column)) is not None:
            return int(ext.code < 0)
        if column == CLASS_COLUMN:
            return int(_FACTS.unpack(block.footer)[0] == NO_CLASS)
        return None if column == KEY_COLUMN else super().num_missing(block, column)

    def known_values(self, block: Block, column: str) -> list[Any]:
        """The number of its class, or what the manifest says of it."""
        if (ext := _row_of(block).get(column)) is None:
            number = _FACTS.unpack(block.footer)[0]
            return [None if number == NO_CLASS else number]
        value = _value(ext)
        if ext.code < 0 or isinstance(value, Masked):
            return [None]
        if not isinstance(value, Spans):
            return list(value.tolist())
        return [value.buffer.tobytes() if value.buffer.dtype == np.uint8 else value.buffer.tolist()]

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """The file as a span of `data`, its class as int64, its key as text, and its row of a manifest.

        Endings that it lacks are missing.
        """
        if len(data) != block.length:
            raise block.corrupt(f"truncated: {len(data)} of {block.length} bytes")
        ending, number = ending_of(block.shard.url), _FACTS.unpack(block.footer)[0]
        row = _row_of(block)
        if columns is None:
            columns = [ending, *row] if number == NO_CLASS else [ending, CLASS_COLUMN, *row]
        values: Columns = {}
        for column in columns:
            if column in row:
                values[column] = _value(row[column])
            elif column == CLASS_COLUMN and number != NO_CLASS:
                values[column] = np.array([number], np.int64)
            elif column == KEY_COLUMN:
                values[column] = _span(self.keys(block, data)[0].encode())
            elif ending == column or ending in self.alternatives(column):
                values[column] = _span(data)
            else:
                values[column] = _NOTHING
        return values

    def keys(self, block: Block, data: memoryview) -> list[str]:
        """The file's name below the folder, without its ending."""
        return [key_of(self.shard_name(block.shard.url, block.footer))]

    def sample_offsets(self, block: Block, data: memoryview | None) -> NDArray[np.int64] | None:
        """A file is its sample."""
        return _ONE


def all_facts(
    class_numbers: NDArray[np.int32], name_lengths: NDArray[np.int64], num_left_out: int
) -> NDArray[np.void]:
    """[n] the footers of n files; the first counts what was left out."""
    facts = np.zeros(len(class_numbers), np.dtype([("class", "<i4"), ("name", "<u4"), ("out", "<u4")]))
    facts["class"], facts["name"] = class_numbers, name_lengths
    facts["out"][:1] = num_left_out
    return facts


def rows_of(columns: Mapping[str, Column], num_rows: int) -> Iterator[bytes]:
    """The rows of a manifest, each as the index of its file's block.

    Args:
        columns: name -> [num_rows] numbers without a shape, text, or lists of numbers.
        num_rows: of the manifest.
    """
    parts = {name: _parts(column, num_rows) for name, column in columns.items()}
    encode = msgspec.msgpack.Encoder().encode
    for values in zip(*parts.values(), strict=True):
        yield encode(dict(zip(parts, values, strict=True)))


def _parts(column: Column, num_rows: int) -> Iterator[msgspec.msgpack.Ext]:
    Ext = msgspec.msgpack.Ext  # noqa: N806
    if isinstance(column, Spans):
        code, data = _LISTED + _DTYPES.index(column.buffer.dtype.name), column.buffer.tobytes()
        width = column.buffer.itemsize
        for start, length in zip(
            (width * column.starts).tolist(), (width * column.lengths).tolist(), strict=True
        ):
            yield Ext(code, data[start : start + length]) if length >= 0 else Ext(~code, b"")
        return
    values, lacks = (column.values, column.lacks) if isinstance(column, Masked) else (column, None)
    code, data, width = _DTYPES.index(values.dtype.name), values.tobytes(), values.itemsize
    is_there = [True] * num_rows if lacks is None else (lacks == 0).tolist()
    for start, there in zip(range(0, len(data), width), is_there, strict=True):
        yield Ext(code, data[start : start + width]) if there else Ext(~code, b"")


def _row_of(block: Block) -> dict[str, msgspec.msgpack.Ext]:
    """The row of a manifest that a file has, by column. `ValueError` where it is damaged."""
    if not block.index:
        return {}
    return _decode_row(block.index)


_decode_row = msgspec.msgpack.Decoder(dict[str, msgspec.msgpack.Ext]).decode


def _value(ext: msgspec.msgpack.Ext) -> Column:
    """A value as a column of one row. `ValueError` where it is damaged."""
    code = ext.code if ext.code >= 0 else ~ext.code
    if code % _LISTED >= len(_DTYPES) or code >= 2 * _LISTED:
        raise ValueError(f"a value of the unknown type {code}")
    dtype = np.dtype(_DTYPES[code % _LISTED])
    data, is_there = bytes(ext.data), ext.code >= 0
    if len(data) % dtype.itemsize or (is_there and code < _LISTED and len(data) != dtype.itemsize):
        raise ValueError(f"{len(data)} bytes in place of values of type {dtype}")
    values = np.frombuffer(data, dtype)
    if code >= _LISTED:
        return Spans(values, _ONE, np.array([len(values) if is_there else MISSING], np.int64))
    if is_there:
        return values
    nothing = np.full(1, np.nan if dtype.kind == "f" else 0, dtype)
    return Masked(nothing, np.array([MISSING], np.int8))


def ending_of(url: str) -> str:
    """The column of a file: its last ending, in lower case; "": it has none."""
    stem, dot, ending = url.rpartition("/")[2].rpartition(".")
    return ending.lower() if dot and stem else ""


def key_of(name: str) -> str:
    """A file's name without its ending, folders included."""
    return name.rpartition(".")[0] if ending_of(name) else name


def schema_of(endings: Mapping[str, tuple[int, int]], class_names: Sequence[str]) -> dict[str, ColumnSpec]:
    """The columns of files.

    Args:
        endings: that they have, and the bytes of the shortest and the longest file of each.
        class_names: by number; empty: they have no class.
    """
    schema = {
        ending: ColumnSpec("bytes", size_range=sizes, optional=len(endings) > 1)
        for ending, sizes in endings.items()
    }
    if class_names:
        schema[CLASS_COLUMN] = ColumnSpec("fixed", "int64", feature=class_label(class_names))
    return schema


def class_label(names: Sequence[str]) -> str:
    """The feature of a column of class numbers, as Hugging Face `datasets` writes it."""
    return json.dumps({"names": list(names), "_type": "ClassLabel"})


def _span(data: bytes | memoryview) -> Spans:
    return Spans(np.frombuffer(data, np.uint8), _ONE, np.array([len(data)], np.int64))
