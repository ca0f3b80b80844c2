"""Loose files: each is a shard, a block and a sample, delivered under its ending as a column.

Nothing is read to index them: a listing tells names and sizes (`dataflow.sources.loose`). The footer of a
shard (little-endian) has what its sample is besides bytes: the number of its class (i4; -1: none), the
characters at the end of its URL that are its name below the folder that was listed (u4), and how many files
that listing left out (u4; of the first shard only). `cls` is the number of the class, `__key__` the name
without its ending.

One file a sample costs one request a sample, and a row of the catalog (about 230 bytes); in return the order
mixes single samples, and nobody has to pack them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import MISSING, Block, Columns, ColumnSpec, Format, Shard, ShardScan, Spans
from sharding.urls import file_name

CLASS_COLUMN, KEY_COLUMN = "cls", "__key__"
NO_CLASS = -1
_FACTS = struct.Struct("<iII")
_ONE = np.zeros(1, np.int64)
_NOTHING = Spans(np.empty(0, np.uint8), _ONE, np.full(1, MISSING, np.int64))


class FilesFormat(Format):
    """The `Format` of single files. Thread-safe, stateless."""

    name = "files"
    has_keys = True
    columns_are_extensions = True

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
            footer=facts_of(NO_CLASS, len(name)),
        )

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the block is not the whole file, or its name is longer than its URL."""
        number, name_length, _ = _FACTS.unpack(block.footer)
        if number < NO_CLASS or not 0 < name_length <= len(block.shard.url):
            raise ValueError(f"class {number}, and a name of {name_length} characters")
        if (block.num_samples, block.offset, block.length) != (1, 0, block.shard.size):
            raise ValueError(f"{block.num_samples} samples in {block.length} bytes of a file")

    def num_passed_over(self, footer: bytes) -> int:
        """Files that the listing left out: hidden ones, of other kinds, or beside folders of classes."""
        return int(_FACTS.unpack(footer)[2])

    def value_bytes(self, block: Block, column: str) -> NDArray[np.int64] | None:
        """Bytes of the file, where its ending is the column or one of the alternatives."""
        if column in (CLASS_COLUMN, KEY_COLUMN):
            return None
        is_there = ending_of(block.shard.url) in self.alternatives(column)
        return np.array([block.length if is_there else MISSING], np.int64)

    def num_missing(self, block: Block, column: str) -> int | None:
        """Return whether the sample lacks the column."""
        if column == CLASS_COLUMN:
            return int(_FACTS.unpack(block.footer)[0] == NO_CLASS)
        return None if column == KEY_COLUMN else super().num_missing(block, column)

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """The file as a span of `data`, its class as int64, its key as text; endings it lacks are missing."""
        if len(data) != block.length:
            raise block.corrupt(f"truncated: {len(data)} of {block.length} bytes")
        ending, number = ending_of(block.shard.url), _FACTS.unpack(block.footer)[0]
        if columns is None:
            columns = [ending] if number == NO_CLASS else [ending, CLASS_COLUMN]
        values: Columns = {}
        for column in columns:
            if column == CLASS_COLUMN and number != NO_CLASS:
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
        return [key_of(block.shard.url[-_FACTS.unpack(block.footer)[1] :])]

    def sample_offsets(self, block: Block, data: memoryview | None) -> NDArray[np.int64] | None:
        """A file is its sample."""
        return _ONE


def facts_of(class_number: int, name_length: int, num_left_out: int = 0) -> bytes:
    """The footer of a file."""
    return _FACTS.pack(class_number, name_length, num_left_out)


def all_facts(
    class_numbers: NDArray[np.int32], name_lengths: NDArray[np.int64], num_left_out: int
) -> NDArray[np.void]:
    """[n] the footers of n files; the first counts what was left out."""
    facts = np.zeros(len(class_numbers), np.dtype([("class", "<i4"), ("name", "<u4"), ("out", "<u4")]))
    facts["class"], facts["name"] = class_numbers, name_lengths
    facts["out"][:1] = num_left_out
    return facts


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
        schema[CLASS_COLUMN] = ColumnSpec("fixed", "int64", feature=_class_label(class_names))
    return schema


def _class_label(names: Sequence[str]) -> str:
    return json.dumps({"names": list(names), "_type": "ClassLabel"})


def _span(data: bytes | memoryview) -> Spans:
    return Spans(np.frombuffer(data, np.uint8), _ONE, np.array([len(data)], np.int64))
