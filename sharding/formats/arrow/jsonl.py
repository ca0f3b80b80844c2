"""JSON Lines: a block is a run of whole lines; a compressed file is one block.

Line ends cannot be known without looking at every byte, so indexing reads the whole file once, a block at
a time, and parses it on the way: that finds the broken lines before training does, and the one schema
that fits all lines. Integers and floats of one column become float64, fields of objects become columns
"object.field", a field that some lines lack is missing there. Strings stay strings, even if they look like
dates. The schema travels with every block, so all blocks of a shard decode to the same types.

Indexing takes bounded memory, whatever the file holds: lines of at most `max_line_bytes`, at most
`max_columns` keys, and pieces of which the table is known to be small. Text that fits the schema found so far
is parsed by it, and must hold no other key; what does not fit is cut in two until its own keys can be few
only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from sharding.blocks import Block, Shard, ShardScan
from sharding.compression import compression_of, decompress, open_decompressed
from sharding.errors import CorruptShardError
from sharding.formats.arrow.columns import TabularFormat, check_columns, flattened
from sharding.formats.arrow.json_limits import MAX_DEPTH, num_places, too_deep
from sharding.formats.arrow.schema import (
    BROKEN,
    NUMBER_BYTES,
    columns_of_kind,
    decoded_bytes,
    is_text,
    leaves,
    schema_in,
    specs_of,
)

_LARGEST_PARSE_BYTES = 1 << 30
_FEWER_KEYS = 'write keys that are data as values: {"key": ..., "value": ...}'
_MAX_QUOTED_BYTES = 1 << 20
"""Of a line whose fault Python's parser words; it takes 25 bytes for each."""
Buffer = bytes | memoryview


class JsonlFormat(TabularFormat):
    """One JSON object a line, UTF-8; blank lines are skipped. Thread-safe, stateless.

    Args:
        max_line_bytes: bytes of the longest line that indexing accepts; it takes up to 20 times the memory.
        max_columns: columns that indexing accepts, keys inside lists of objects included.
    """

    name = "jsonl"
    has_empty_samples = False
    max_places = 16 << 20
    """Values of a table, those that are missing included; each takes 8 to 12 bytes while lines are parsed."""
    max_run_places = 128 << 20
    """The same of a whole run, which is read in one piece: more than 1 GB from 2 MiB of text."""

    def __init__(self, *, max_line_bytes: int = 16 << 20, max_columns: int = 10_000) -> None:
        for name, value in (("max_line_bytes", max_line_bytes), ("max_columns", max_columns)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.max_line_bytes, self.max_columns = max_line_bytes, max_columns

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Read and parse the whole file once, in the memory of a block. An empty file has no samples.

        Raises:
            CorruptShardError: a line is not a JSON object, is nested more than 100 levels deep or longer than
                `max_line_bytes`, there are more than `max_columns` keys, or a field's types have nothing in
                common; offsets count bytes of the decompressed file.
        """
        compressed = compression_of(shard.url) is not None
        if compressed:
            file = open_decompressed(file, shard.url)
        else:
            file.seek(0)
        runs: list[_LineRun] = []
        inference = _SchemaInference(shard, self)
        null_free: frozenset[str] | None = None
        for offset, lines in _whole_lines(file, shard, block_bytes, self.max_line_bytes):
            run = _LineRun(offset, len(lines))
            for table in inference.tables(lines, offset):
                flat = flattened(table)
                run.rows += table.num_rows
                run.nbytes += table.nbytes
                if lists := list(filter(pa.types.is_list, flat.schema.types)):
                    run.objects, run.exponents = lines.count(b"{"), _num_exponents(lines)
                    run.text_bytes += _text_bytes(flat)
                    run.has_null_lists |= any(pa.types.is_null(kind.value_type) for kind in lists)
                if table.num_rows:
                    complete = _without_nulls(flat)
                    null_free = complete if null_free is None else null_free & complete
            runs.append(run)
        schema = pa.schema([field.with_type(_settled(field.type)) for field in inference.schema])
        specs = specs_of(schema, shard.url, null_free=null_free or frozenset())
        nested = columns_of_kind(specs, "json")
        absent_bytes = sum(_absent_bytes(field.type) for name, field in leaves(schema) if name in nested)
        blocks = [
            (
                r.offset,
                r.length,
                max(r.length, r.nbytes)
                + sum(decoded_bytes(specs, r.rows))
                + (r.grown_bytes(absent_bytes) if r.objects and (nested or r.has_null_lists) else 0),
                r.rows,
            )
            for r in runs
        ]
        if compressed:
            blocks = [(0, shard.size, sum(b[2] for b in blocks), sum(b[3] for b in blocks))]
        table = np.array([block for block in blocks if block[3]], np.int64).reshape(-1, 4)
        offset, length, nbytes, rows = np.ascontiguousarray(table.T)
        return ShardScan(offset, length, nbytes, rows, schema=specs, footer=schema.serialize().to_pybytes())

    def check(self, block: Block) -> None:
        """Raise `ValueError` where so many lines do not fit the block, or its schema cannot be read."""
        if 2 * block.num_samples > block.nbytes + 1:
            raise ValueError(f"{block.num_samples} lines in {block.nbytes} bytes")
        try:
            schema_in(bytes(block.footer))
        except BROKEN as error:
            raise ValueError(f"its schema cannot be read: {error}") from error

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """The wanted columns as Arrow has them, structs not flattened; raises as `decode` does."""
        schema = schema_in(bytes(block.footer))
        check_columns(columns, [name for name, _ in leaves(schema)], block)
        if compression_of(block.shard.url) is not None:
            data = decompress(data, block.shard.url, limit_bytes=block.nbytes)
        if columns is not None:
            schema = _projected(schema, columns)
        _check_depth(data, block.shard, block.offset, "decode")
        try:
            table = _parse(data, schema)
        except BROKEN as error:
            raise _at_line(data, block.shard, block.offset, "decode", error) from error
        if table.num_rows != block.num_samples:
            raise block.corrupt(f"{table.num_rows} samples where {block.num_samples} were indexed")
        return table


@dataclass
class _LineRun:
    """What indexing keeps of a run of lines."""

    offset: int
    length: int
    _: KW_ONLY
    rows: int = 0
    nbytes: int = 0
    """Bytes of the parsed table."""
    objects: int = 0
    """How many it holds, where there are lists: in these, an object has a null for each key that it lacks."""
    text_bytes: int = 0
    """Of text columns beside lists: it is in no other."""
    exponents: int = 0
    """How many numbers may have one, where there are lists."""
    has_null_lists: bool = False
    """Whether a list holds nulls only: in another run it may hold numbers."""

    def grown_bytes(self, absent_bytes: int) -> int:
        """Bytes of the JSON text of nested columns, at most, where an object without keys takes so many more.

        That text was in the lines, and what people write at most doubles: "1," becomes "1.0,", and "null,"
        the 8 bytes of a NaN, where a list holds nothing else. But "1e15," becomes "1000000000000000.0,".
        """
        written = 2 * (self.length - self.text_bytes) + NUMBER_BYTES * self.exponents
        return written + self.objects * absent_bytes


@dataclass
class _SchemaInference:
    """Parses a file a run of lines at a time, and finds the one schema of all.

    pyarrow keeps a place for every key in every row, so a table is parsed only if rows x keys is known to be
    small before: by the schema so far, which no other key may join, or by the text itself, with a key for
    each colon and an element for every two bytes. Else the lines are cut in two.
    """

    shard: Shard
    limits: JsonlFormat
    _: KW_ONLY
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    outside: int = 0
    """Keys of the schema that have a value a line."""
    inside: int = 0
    """Keys that have a value an element of a list."""
    places: int = 0
    """Of the run so far."""

    def tables(self, lines: bytes, offset: int) -> Iterator[pa.Table]:
        """The lines, which begin at a byte of the file, as tables: as many as their size makes necessary."""
        _check_depth(lines, self.shard, offset, "index")
        self.places = 0
        for table in self._tables(lines, offset):
            self.places += table.num_rows * self.outside
            if self.places > self.limits.max_run_places:
                reason = f"{self.outside} keys, and short lines that lack most of them, take too much memory"
                raise CorruptShardError(
                    self.shard.url, f"{reason}; {_FEWER_KEYS}; or a smaller block_bytes=", offset
                )
            yield table

    def _tables(self, lines: bytes, offset: int) -> Iterator[pa.Table]:
        rows, elements = lines.count(b"\n") + 1, len(lines) // 2 + 1  # an element takes two bytes
        misfit: Exception | None = None
        if len(self.schema) and rows * self.outside + elements * self.inside <= self.limits.max_places:
            try:
                table = _parse(lines, self.schema, unexpected="error")
            except BROKEN as error:
                misfit = error
            else:
                yield table
                return
        middle = _middle(lines)
        new = lines.count(b":")
        fits = rows * (self.outside + new) + elements * (self.inside + new) <= self.limits.max_places
        if middle and not fits:
            yield from self._tables(lines[:middle], offset)
            yield from self._tables(lines[middle:], offset + middle)
        else:
            if not fits:
                self._check_line(lines, offset)
            table = _inferred(lines, self.shard, offset)
            self._widen(table.schema, lines, offset, misfit)
            yield table

    def _widen(self, inferred: pa.Schema, lines: bytes, offset: int, misfit: Exception | None) -> None:
        """Take in the schema of lines that did not fit; `misfit` says how."""
        if any(_depth_of(column.type) >= MAX_DEPTH for column in inferred):  # a line is the first level
            _check_depth(lines, self.shard, offset, "index", exact=True)
        untimed = pa.schema([field.with_type(_untimed(field.type)) for field in inferred])
        try:
            wider = pa.unify_schemas([self.schema, untimed], promote_options="permissive")
        except pa.ArrowException as error:
            reason = f"the lines from here on differ in type from those before: {error}"
            at = offset + (_start_of(lines, misfit) or 0)
            raise CorruptShardError(self.shard.url, reason, at) from error
        if not wider.equals(self.schema):
            self.schema = wider
            self.outside, self.inside = _num_keys(wider)
            self._check_columns(self.outside + self.inside, offset)

    def _check_line(self, line: bytes, offset: int) -> None:
        """Raise where one line alone has too many keys, or too many elements that may each have them all."""
        keys, places = num_places(line, self.limits.max_columns)
        self._check_columns(keys, offset)
        if places > self.limits.max_places:
            reason = f"this line's lists of objects have {places} places for {keys} keys, most of them empty"
            raise CorruptShardError(self.shard.url, f"{reason}; {_FEWER_KEYS}", offset)

    def _check_columns(self, num_keys: int, offset: int) -> None:
        if num_keys > self.limits.max_columns:
            reason = (
                f"with the lines from here on there are more than {self.limits.max_columns} different keys"
            )
            more = "or accept more with format=JsonlFormat(max_columns=...)"
            raise CorruptShardError(self.shard.url, f"{reason}; {_FEWER_KEYS}; {more}", offset)


def _whole_lines(
    file: BinaryIO, shard: Shard, block_bytes: int, max_line_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """(offset, lines) over the whole file: as many whole lines as `block_bytes` hold, at least one."""
    offset, text = 0, b""
    # A line longer than a block is read in doubling steps, to search and copy it O(1) times.
    while more := _read(file, _step(len(text), block_bytes, max_line_bytes)):
        text += more
        if end := text.rfind(b"\n") + 1:
            yield offset, text[:end]
            offset += end
            text = text[end:]
        elif len(text) > max(block_bytes, max_line_bytes):
            reason = f"this line is longer than {max_line_bytes} bytes"
            more_text = "accept longer ones with format=JsonlFormat(max_line_bytes=...)"
            raise CorruptShardError(shard.url, f"{reason}; {more_text}", offset)
    if text:
        yield offset, text


def _step(size: int, block_bytes: int, max_line_bytes: int) -> int:
    """How many bytes to read behind so many that hold no whole line."""
    return block_bytes - size if size < block_bytes else max(1, min(size, max_line_bytes + 1 - size))


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    """That many bytes, fewer only at the end; decompressing readers give less at a time."""
    pieces = []
    while num_bytes and (piece := file.read(num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _parse(data: Buffer, schema: pa.Schema | None, unexpected: str = "ignore") -> pa.Table:
    """A table by this schema, or by what the text holds; `unexpected`: what of keys that the schema lacks."""
    size = memoryview(data).nbytes
    options = pj.ReadOptions(use_threads=False, block_size=min(max(size, 1), _LARGEST_PARSE_BYTES))
    fields = "infer" if schema is None else unexpected
    parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=fields)
    return pj.read_json(pa.BufferReader(pa.py_buffer(data)), read_options=options, parse_options=parsing)


def _inferred(lines: bytes, shard: Shard, offset: int) -> pa.Table:
    try:
        return _parse(lines, None)
    except BROKEN as error:
        raise _at_line(lines, shard, offset, "index", error) from error


def _middle(lines: bytes) -> int:
    """Where the line begins that is nearest to the middle, or 0 where there is one line only."""
    half = len(lines) // 2
    before = lines.rfind(b"\n", 0, half) + 1
    behind = lines.find(b"\n", half, len(lines) - 1) + 1
    return before if before and (not behind or half - before < behind - half) else behind


def _check_depth(data: Buffer, shard: Shard, offset: int, stage: str, *, exact: bool = False) -> None:
    at = too_deep(data, exact=exact)
    if at is not None:
        reason = f"this line holds values more than {MAX_DEPTH} levels deep; write those as a string of JSON"
        raise CorruptShardError(shard.url, reason, offset + at, stage=stage)


def _depth_of(kind: pa.DataType) -> int:
    """Levels of a type; not by recursion, of which Python has too little."""
    depth, level = 0, [kind]
    while level := [one for one in level if pa.types.is_nested(one)]:
        depth += 1
        level = [one.field(i).type for one in level for i in range(one.num_fields)]
    return depth


def _num_keys(fields: Iterable[pa.Field], in_list: bool = False) -> tuple[int, int]:
    """How many keys lie outside of lists, and how many within."""
    outside, inside = 0, 0
    for one in fields:
        kind, within = one.type, in_list
        while pa.types.is_list(kind):
            kind, within = kind.value_type, True
        below = _num_keys(kind, within) if pa.types.is_struct(kind) else (0, 0)
        outside += below[0] + (not in_list)
        inside += below[1] + in_list
    return outside, inside


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


def _text_bytes(flat: pa.Table) -> int:
    texts = (column for column in flat.columns if is_text(column.type))
    return sum(pc.sum(pc.binary_length(text)).as_py() or 0 for text in texts)


def _num_exponents(lines: bytes) -> int:
    """How often an "e" follows a digit: in each number with an exponent, and seldom in texts."""
    raw = np.frombuffer(lines, np.uint8)
    after_digit = raw[:-1] - np.uint8(ord("0")) < 10  # what is less wraps around
    return int(np.count_nonzero(after_digit & (raw[1:] | 0x20 == ord("e"))))


def _absent_bytes(kind: pa.DataType) -> int:
    """Bytes of the JSON text of all keys inside a type, were each null."""
    children = [kind.field(i) for i in range(kind.num_fields)]
    names = sum(len(json.dumps(child.name, ensure_ascii=False).encode()) for child in children)
    nulls = len(":null,") * len(children)
    own = names + nulls if pa.types.is_struct(kind) else 0
    return own + sum(_absent_bytes(child.type) for child in children)


def _without_nulls(flat: pa.Table) -> frozenset[str]:
    # By position: two columns may have one name, which `specs_of` refuses.
    columns = zip(flat.column_names, flat.columns, strict=True)
    return frozenset(name for name, column in columns if not column.null_count)


def _projected(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """The top-level fields in which the wanted columns lie; pyarrow skips the values of all others."""
    return pa.schema([f for f in schema if any(c == f.name or c.startswith(f"{f.name}.") for c in columns)])


def _at_line(data: Buffer, shard: Shard, offset: int, stage: str, error: Exception) -> CorruptShardError:
    """The error naming the line at fault, found by a slow second pass."""
    at = 0
    for line in bytes(data).splitlines(keepends=True):
        if line.strip() and len(line) <= _MAX_QUOTED_BYTES and (fault := _fault_of(line)):
            return CorruptShardError(shard.url, fault, offset + at, stage=stage)
        at += len(line)
    if (start := _start_of(data, error)) is not None:
        return CorruptShardError(shard.url, f"this line does not fit: {error}", offset + start, stage=stage)
    return CorruptShardError(shard.url, f"these lines cannot be parsed: {error}", offset, stage=stage)


def _start_of(data: Buffer, error: Exception | None) -> int | None:
    """Where the line begins whose row an error of pyarrow names."""
    row = re.search(r"in row (\d+)", str(error))
    at, num_rows = 0, 0
    for line in bytes(data).splitlines(keepends=True) if row else ():
        if line.strip():
            if row and num_rows == int(row[1]):
                return at
            num_rows += 1
        at += len(line)
    return None


def _fault_of(line: bytes) -> str | None:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        return f"this line is not JSON: {error}"
    except RecursionError:
        return "this line is not JSON, and opens brackets without end"
    return None if isinstance(value, dict) else "this line is not a JSON object"
