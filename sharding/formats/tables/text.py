"""Text whose rows or lines are samples: of CSV and TSV a block is a file, of other text a run of lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from sharding.blocks import Block, Shard, ShardScan
from sharding.errors import CorruptShardError
from sharding.formats.arrow.columns import TabularFormat, check_columns
from sharding.formats.arrow.jsonl import whole_lines
from sharding.formats.arrow.schema import BROKEN, schema_in, specs_of
from sharding.formats.tables.separated import read_separated, separator_of
from sharding.urls import file_name

_SCHEMA = pa.schema([pa.field("text", pa.large_string(), nullable=False)])
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MOST_BYTES = 64 << 20


class TextFormat(TabularFormat):
    r"""Lines of UTF-8 text, a sample each, in the column "text". Thread-safe, stateless.

    Lines end in `\n` or `\r\n`, which are no part of them, the last one also without.

    Args:
        max_line_bytes: bytes of the longest line that indexing accepts.
    """

    name = "text"
    has_empty_samples = False  # the end of a line is a byte of it

    def __init__(self, *, max_line_bytes: int = 16 << 20) -> None:
        if not isinstance(max_line_bytes, int) or max_line_bytes < 1:
            raise ValueError(f"max_line_bytes must be an integer >= 1, got {max_line_bytes!r}")
        self.max_line_bytes = max_line_bytes

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Read the whole file once, in the memory of a block; `CorruptShardError` where it is no text."""
        file.seek(0)
        blocks = []
        for offset, lines in whole_lines(file, shard, block_bytes, self.max_line_bytes, "TextFormat"):
            check_text(shard.url, lines, offset)
            num_lines = lines.count(b"\n") + (not lines.endswith(b"\n"))
            blocks.append((offset, len(lines), len(lines) + 8 * (num_lines + 1), num_lines))
        columns = np.array(blocks, np.int64).reshape(-1, 4).T.copy()
        footer = _SCHEMA.serialize().to_pybytes()
        specs = specs_of(_SCHEMA, null_free=frozenset(_SCHEMA.names))
        return ShardScan(*columns, schema=specs, footer=footer)

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """See `TabularFormat.table`."""
        import pyarrow.compute as pc

        check_columns(columns, _SCHEMA.names, block)
        lines = bytes(data)
        check_text(block.shard.url, lines, block.offset, stage="decode")
        if not lines.endswith(b"\n") and block.offset + block.length < block.shard.size:
            raise block.corrupt("the last line goes on behind it: the file changed since it was indexed")
        lines = lines.removeprefix(b"" if block.offset else _BYTE_ORDER_MARK)
        lines = lines.replace(b"\r\n", b"\n").removesuffix(b"\n")
        texts = pc.split_pattern(pa.array([lines], pa.large_string()), "\n").flatten()
        if len(texts) != block.num_samples:
            raise block.corrupt(f"{len(texts)} lines where {block.num_samples} were indexed")
        return pa.table([texts], _SCHEMA).select(_SCHEMA.names if columns is None else columns)


def check_text(url: str, text: bytes, offset: int = 0, *, stage: str = "index") -> None:
    """Raise `CorruptShardError` where bytes are no UTF-8 text, or have a NUL byte."""
    position = text.find(b"\0")
    reason = "a NUL byte, as text has none; UTF-16 has them"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if position < 0 or error.start < position:
            position, reason = error.start, f"this is no UTF-8 text ({error.reason})"
    if position >= 0:
        raise CorruptShardError(url, f"{reason}: save it as UTF-8", offset + position, stage=stage)


class SeparatedFormat(TabularFormat):
    """A table of text with a header, UTF-8, up to 64 MiB: a row is a sample. Thread-safe, stateless.

    No value changes: integers are int64 or uint64, other numbers float64; dates, numbers with zeros before
    them and integers that no type of 64 bits holds are text.
    """

    name = "csv"

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Read and parse the whole file; `CorruptShardError` where it is too large, or no such table."""
        file.seek(0)
        data = file.read(min(shard.size, _MOST_BYTES))
        ending = _ending(shard.url)
        if shard.size > _MOST_BYTES:
            sign = json.dumps(separator_of(data, ending, ""))
            line = f"for row in csv.DictReader(sys.stdin, delimiter={sign}): print(json.dumps(row))"
            raise shard.corrupt(
                f"is a table of text of more than {_MOST_BYTES >> 20} MiB: write it as JSON Lines, whose "
                f"values are text: python -c $'import csv, json, sys\\n{line}' < {shard.url} > lines.jsonl",
            )
        check_text(shard.url, data)
        table = read_separated(shard.url, data, ending, "", None)
        names = table.column_names
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise shard.corrupt(f"has two columns {twice[0]!r}: rename one")
        schema = table.schema.remove_metadata()
        full = frozenset(name for name in names if not table.column(name).null_count)
        numbers = np.array([[0], [shard.size], [table.nbytes + 1], [table.num_rows]], np.int64)
        columns = numbers[:, : min(1, table.num_rows)]
        specs = specs_of(schema, null_free=full)
        return ShardScan(*columns, schema=specs, footer=schema.serialize().to_pybytes())

    def check(self, block: Block) -> None:
        """Raise `ValueError` where the schema cannot be read."""
        try:
            schema_in(bytes(block.footer))
        except BROKEN as error:
            raise ValueError(f"its schema cannot be read: {error}") from error

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """See `TabularFormat.table`."""
        schema = schema_in(bytes(block.footer))
        check_columns(columns, schema.names, block)
        # A column is read also where none is wanted: it tells the number of rows.
        names = schema.names if columns is None else columns
        known = pa.schema([schema.field(name) for name in names or schema.names[:1]])
        table = read_separated(block.shard.url, bytes(data), _ending(block.shard.url), "", None, known)
        if table.num_rows != block.num_samples:
            raise block.corrupt(f"{table.num_rows} rows where {block.num_samples} were indexed")
        return table.select(names)


def _ending(url: str) -> str:
    return "tsv" if file_name(url).lower().endswith(".tsv") else "csv"
