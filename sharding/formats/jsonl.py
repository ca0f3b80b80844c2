"""JSON Lines: a block is a run of whole lines; a compressed file is one block.

Line ends cannot be known without looking at every byte, so indexing reads the whole file once, a block at
a time, and parses it on the way: that finds the broken lines before training does, and the one schema
that fits all lines. Integers and floats of one column become float64, fields of objects become columns
"object.field", a field that some lines lack is missing there. Strings stay strings, even if they look like
dates. The schema travels with every block, so all blocks of a shard decode to the same types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from sharding.blocks import Block, Columns, Shard, ShardScan, Spans
from sharding.errors import CorruptShardError
from sharding.formats.arrow_columns import check_columns, columns_of, flattened
from sharding.formats.arrow_schema import decoded_bytes, leaves, specs_of
from sharding.formats.compression import compression_of, decompress, open_decompressed
from sharding.formats.json_sizes import Tally, json_columns

# UnicodeDecodeError: pyarrow fails to word its error where the line at fault is not UTF-8.
_BROKEN = (pa.ArrowException, OSError, UnicodeDecodeError)
_LARGEST_PARSE_BYTES = 1 << 30
Buffer = bytes | memoryview


class JsonlFormat:
    """One JSON object a line, UTF-8; blank lines are skipped. Thread-safe, stateless."""

    name = "jsonl"
    suffixes: tuple[str, ...] = (".jsonl", ".ndjson")

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Read and parse the whole file once, in the memory of a block. An empty file has no samples.

        Raises:
            CorruptShardError: a line is not a JSON object, or a field's types have nothing in common;
                offsets count bytes of the decompressed file.
        """
        compressed = compression_of(shard.url) is not None
        if compressed:
            file = open_decompressed(file, shard.url)
        else:
            file.seek(0)
        runs: list[_Run] = []
        schema = pa.schema([])
        for offset, lines in _whole_lines(file, block_bytes):
            table = _inferred(lines, shard, offset)
            schema = _widened(schema, table.schema, shard, offset)
            nbytes = max(len(lines), table.nbytes)
            flat = flattened(table)
            run = _Run(offset, len(lines), table.num_rows, nbytes, _without_nulls(flat), _tally_of(flat))
            runs.append(run)
        schema = pa.schema([field.with_type(_settled(field.type)) for field in schema])
        complete = [run.null_free for run in runs if run.rows] or [frozenset()]
        specs = specs_of(schema, shard.url, null_free=frozenset.intersection(*complete))
        wanted = json_columns(specs)
        nested = {name: field.type for name, field in leaves(schema) if name in wanted}
        blocks = [
            (r.offset, r.length, r.nbytes + sum(decoded_bytes(specs, r.rows)) + r.json_bytes(nested), r.rows)
            for r in runs
        ]
        if compressed:
            blocks = [(0, shard.size, sum(b[2] for b in blocks), sum(b[3] for b in blocks))]
        table = np.array([block for block in blocks if block[3]], np.int64).reshape(-1, 4)
        offset, length, nbytes, rows = np.ascontiguousarray(table.T)
        return ShardScan(offset, length, nbytes, rows, specs, footer=schema.serialize().to_pybytes())

    def locate(self, block: Block, columns: Sequence[str] | None) -> dict[str, Spans] | None:
        """None: values are text that has to be parsed."""
        return None

    def decode(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> Columns:
        """Parse the wanted columns in the calling thread, without the GIL.

        Raises:
            CorruptShardError: a line is broken or does not fit the schema, or a column is not there.
            SampleError, ShardError: see `columns_of`.
        """
        return columns_of(self.table(block, data, columns), columns, block)

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """The wanted columns as Arrow has them, structs not flattened; raises as `decode` does."""
        schema = _schema(bytes(block.footer))
        check_columns(columns, [name for name, _ in leaves(schema)], block)
        if compression_of(block.shard.url) is not None:
            data = decompress(data, block.shard.url, limit_bytes=block.nbytes)
        if columns is not None:
            schema = _projected(schema, columns)
        try:
            table = _parse(data, schema)
        except _BROKEN as error:
            raise _at_line(data, block.shard, block.offset, "decode", error) from error
        if table.num_rows != block.num_samples:
            reason = f"{table.num_rows} samples where {block.num_samples} were indexed"
            raise CorruptShardError(block.shard.url, reason, block.offset, stage="decode")
        return table

    def schema(self, footer: bytes) -> pa.Schema:
        """Columns of a shard, from its footer."""
        return _schema(footer)


@dataclass(frozen=True)
class _Run:
    """What indexing keeps of a run of lines."""

    offset: int
    length: int
    rows: int
    nbytes: int
    """Bytes of the text or of the parsed table, whichever are more."""
    null_free: frozenset[str]
    """Columns, structs flattened, that every line has."""
    tally: Tally
    """What its lists hold."""

    def json_bytes(self, nested: Mapping[str, pa.DataType]) -> int:
        """Bytes of the JSON text of these columns, at most; a field that no line here has is null."""
        return sum(self.tally.json_bytes(kind, (name,)) for name, kind in nested.items())


def _whole_lines(file: BinaryIO, block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(offset, lines) over the whole file: as many whole lines as `block_bytes` hold, at least one."""
    offset, held = 0, b""
    # A line longer than a block is read in doubling steps, to search and copy it O(1) times.
    while more := _read(file, block_bytes - len(held) if len(held) < block_bytes else len(held)):
        held += more
        if end := held.rfind(b"\n") + 1:
            yield offset, held[:end]
            offset += end
            held = held[end:]
    if held:
        yield offset, held


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    """That many bytes, fewer only at the end; decompressing readers give less at a time."""
    pieces = []
    while num_bytes and (piece := file.read(num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _parse(data: Buffer, schema: pa.Schema | None) -> pa.Table:
    size = memoryview(data).nbytes
    options = pj.ReadOptions(use_threads=False, block_size=min(max(size, 1), _LARGEST_PARSE_BYTES))
    fields = "infer" if schema is None else "ignore"
    parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=fields)
    return pj.read_json(pa.BufferReader(pa.py_buffer(data)), read_options=options, parse_options=parsing)


def _inferred(lines: bytes, shard: Shard, offset: int) -> pa.Table:
    try:
        return _parse(lines, None)
    except _BROKEN as error:
        raise _at_line(lines, shard, offset, "index", error) from error


def _widened(schema: pa.Schema, found: pa.Schema, shard: Shard, offset: int) -> pa.Schema:
    """The schema that fits what both fit."""
    found = pa.schema([field.with_type(_untimed(field.type)) for field in found])
    try:
        return pa.unify_schemas([schema, found], promote_options="permissive")
    except pa.ArrowException as error:
        reason = f"the lines from here on differ in type from those before: {error}"
        raise CorruptShardError(shard.url, reason, offset) from error


def _untimed(kind: pa.DataType) -> pa.DataType:
    """Strings where pyarrow saw dates: whether all strings of a column are dates is chance."""
    return pa.string() if pa.types.is_timestamp(kind) else _mapped(kind, _untimed)


def _settled(kind: pa.DataType) -> pa.DataType:
    """Lists that are empty on every line become lists of float64."""
    if pa.types.is_list(kind) and pa.types.is_null(kind.value_type):
        return pa.list_(pa.float64())
    return _mapped(kind, _settled)


def _mapped(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with its children changed."""
    if pa.types.is_list(kind):
        return pa.list_(change(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(change(field.type)) for field in kind])
    return kind


def _tally_of(flat: pa.Table) -> Tally:
    tally = Tally()
    for name, column in zip(flat.column_names, flat.columns, strict=True):
        if pa.types.is_list(column.type):
            for chunk in column.chunks:
                tally.add_array((name,), chunk)
    return tally


def _without_nulls(flat: pa.Table) -> frozenset[str]:
    columns = zip(
        flat.column_names, flat.columns, strict=True
    )  # two may have one name, which `specs_of` refuses
    return frozenset(name for name, column in columns if not column.null_count)


def _projected(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """The top-level fields in which the wanted columns lie; pyarrow skips the values of all others."""
    return pa.schema([f for f in schema if any(c == f.name or c.startswith(f"{f.name}.") for c in columns)])


@lru_cache(maxsize=64)
def _schema(footer: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.BufferReader(footer))


def _at_line(data: Buffer, shard: Shard, offset: int, stage: str, error: Exception) -> CorruptShardError:
    """The error naming the line at fault, found by a slow second pass."""
    row = re.search(r"in row (\d+)", str(error))
    starts = []
    at = 0
    for line in bytes(data).splitlines(keepends=True):
        if line.strip():
            starts.append(at)
            if fault := _fault_of(line):
                return CorruptShardError(shard.url, fault, offset + at, stage=stage)
        at += len(line)
    if row and int(row[1]) < len(starts):
        at = starts[int(row[1])]
        return CorruptShardError(shard.url, f"this line does not fit: {error}", offset + at, stage=stage)
    return CorruptShardError(shard.url, f"these lines cannot be parsed: {error}", offset, stage=stage)


def _fault_of(line: bytes) -> str | None:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        return f"this line is not JSON: {error}"
    return None if isinstance(value, dict) else "this line is not a JSON object"
