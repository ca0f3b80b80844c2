"""JSON Lines: a block is a run of whole lines; a compressed file is one block.

Line ends cannot be known without looking at every byte, so indexing reads the whole file once, a block at
a time, and parses it on the way: that finds the broken lines before training does, and what lines hold at
each key (`json_scan`), from which types follow (`json_types`). The schema travels with every block, so all
blocks of a shard decode to the same types (`json_lines`).

A file that is one JSON array of objects, or `{"data": [...]}`, is one block too, whose lines are its items.

Indexing takes the memory of a block, whatever the file holds, and so does decoding: lines are at most
`max_line_bytes` long, and of keys that most lines lack blocks have few lines.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache, partial
from io import BytesIO
from itertools import pairwise
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.blocks import Block, Columns, ColumnSpec, Shard, ShardScan
from sharding.compression import WINDOW_BYTES, compression_of, decompress, open_decompressed
from sharding.errors import CorruptShardError
from sharding.formats.arrow.columns import TabularFormat, check_columns, columns_of
from sharding.formats.arrow.json_lines import LineError, LineReader, lines_of, starts_of_lines
from sharding.formats.arrow.json_scan import LineScanner, note_doubled
from sharding.formats.arrow.json_types import JSON_TEXT, UNREADABLE, SchemaInferrer, problem_of
from sharding.formats.arrow.schema import BROKEN, decoded_bytes, leaves, schema_in, specs_of
from sharding.redaction import identity_of

_ARRAY = {b"array": b""}
"""Metadata of the schema of a file that is one array."""
_STARTS_ARRAY = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\[|(\{)\s*"data"\s*:\s*\[)')
_MOST_ARRAY_BYTES = 64 << 20


class JsonlFormat(TabularFormat):
    """One JSON object a line, UTF-8; blank lines are skipped. Thread-safe, stateless.

    Args:
        max_line_bytes: bytes of the longest line that indexing accepts; it takes up to 20 times the memory.
        max_columns: columns that indexing accepts: each takes some hundred bytes in every shard.
        window_bytes: window of a zstd frame that indexing accepts, up to 2 GiB: reading it takes so much.
    """

    name = "jsonl"
    has_empty_samples = False
    max_cells = 8 << 20
    """Lines times columns of a block, at most: values that are missing take as much as others."""

    def __init__(
        self, *, max_line_bytes: int = 16 << 20, max_columns: int = 50_000, window_bytes: int = WINDOW_BYTES
    ) -> None:
        for name, value in (("max_line_bytes", max_line_bytes), ("max_columns", max_columns)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.max_line_bytes, self.max_columns = max_line_bytes, max_columns
        self.window_bytes = window_bytes

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        """Read and parse the whole file once, in the memory of a block. An empty file has no samples.

        Raises:
            CorruptShardError: a line is not a JSON object, is nested too deeply for Python or longer than
                `max_line_bytes`, or there are more than `max_columns` keys; offsets count bytes of the
                decompressed file.
        """
        is_whole = compression_of(shard.url) is not None
        array, array_bytes = _lines_of_array(self._opened(file, shard), shard.url, warns=True)
        file = self._opened(file, shard) if array is None else BytesIO(array)
        is_whole = is_whole or array is not None
        max_line_bytes = self.max_line_bytes if array is None else len(array)
        scanner, runs = LineScanner(self.max_columns), list[tuple[int, int, int, int]]()
        try:
            for offset, lines in whole_lines(file, shard, block_bytes, max_line_bytes, "JsonlFormat"):
                runs.append((offset, len(lines), *scanner.scan(lines, offset)))
        except LineError as fault:
            raise shard.corrupt(fault.reason, fault.at) from fault
        if scanner.doubled is not None:
            line, key = scanner.doubled
            warnings.warn(
                f"{identity_of(shard.url)}, line {line}: key {key!r} is there twice in an object: "
                "the last counts, as for json.loads",
                stacklevel=2,
            )
        fields = [child.field(key, key) for key, child in scanner.root.children.items()]
        schema = pa.schema(fields, None if array is None else _ARRAY)
        specs = specs_of(schema, null_free=_null_free(scanner.root, sum(rows for _, _, rows, _ in runs)))
        if not is_whole:
            runs = self._cut(file, runs, scanner.num_keys)
        blocks = [
            (offset, length, length + 8 * elements + sum(decoded_bytes(specs, rows)), rows)
            for offset, length, rows, elements in runs
        ]
        if is_whole:
            nbytes = array_bytes + sum(b[2] for b in blocks)
            blocks = [(0, shard.size, nbytes, sum(b[3] for b in blocks))]
        table = np.array([block for block in blocks if block[3]], np.int64).reshape(-1, 4)
        offset, length, nbytes, rows = np.ascontiguousarray(table.T)
        return ShardScan(offset, length, nbytes, rows, schema=specs, footer=schema.serialize().to_pybytes())

    def _cut(
        self, file: BinaryIO, runs: list[tuple[int, int, int, int]], num_keys: int
    ) -> list[tuple[int, int, int, int]]:
        """The runs, those cut into several whose lines are too many for so many keys."""
        most = max(1, self.max_cells // max(1, num_keys))
        cut = []
        for offset, length, rows, elements in runs:
            if rows <= most:
                cut.append((offset, length, rows, elements))
                continue
            file.seek(offset)
            text = _read(file, length)
            ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
            for start, end in pairwise([0, *ends[most - 1 : -1 : most].tolist(), length]):
                num_lines = len(lines_of(text[start:end]))
                cut.append((offset + start, end - start, num_lines, min(elements, end - start)))
        return cut

    def check(self, block: Block) -> None:
        """Raise `ValueError` where so many lines do not fit the block, or its schema cannot be read."""
        if 2 * block.num_samples > block.nbytes + 1:
            raise ValueError(f"{block.num_samples} lines in {block.nbytes} bytes")
        try:
            schema_in(bytes(block.footer))
        except BROKEN as error:
            raise ValueError(f"its schema cannot be read: {error}") from error

    def sample_offsets(self, block: Block, data: memoryview | None) -> NDArray[np.int64] | None:
        """Return where the lines begin that are not blank."""
        if data is None or _is_array(bytes(block.footer)):
            return None
        if compression_of(block.shard.url) is not None:
            data = decompress(data, block.shard.url, limit_bytes=block.nbytes)
        starts: NDArray[np.int64] = block.offset + starts_of_lines(bytes(data))
        return starts

    def decode_as(self, block: Block, data: memoryview, specs: Mapping[str, ColumnSpec | None]) -> Columns:
        """See `Format.decode_as`; lists of numbers that are nested in other shards stay their own text."""
        texts = frozenset(name for name, spec in specs.items() if spec is not None and spec.kind == "json")
        return columns_of(self._table(block, data, list(specs), texts), list(specs), block, specs)

    def table(self, block: Block, data: memoryview, columns: Sequence[str] | None) -> pa.Table:
        """The wanted columns as Arrow has them, structs not flattened; raises as `decode` does."""
        return self._table(block, data, columns, frozenset())

    def _table(
        self, block: Block, data: memoryview, columns: Sequence[str] | None, texts: frozenset[str]
    ) -> pa.Table:
        """`texts`: columns that are kept as text, whatever they are here."""
        footer = bytes(block.footer)
        fields = dict(leaves(schema_in(footer)))
        check_columns(columns, fields, block)
        for name in fields if columns is None else columns:
            if fields[name].type == UNREADABLE:
                raise block.shard.corrupt(problem_of(fields[name]), stage="decode")
        if compression_of(block.shard.url) is not None:
            data = decompress(data, block.shard.url, limit_bytes=block.nbytes)
        if _is_array(footer):
            data = memoryview(_lines_of_array(BytesIO(data), block.shard.url)[0] or b"")
        try:
            reader = _reader(footer, None if columns is None else tuple(columns), texts)
            table, num_rows = reader.read(data)
        except LineError as fault:
            raise block.shard.corrupt(fault.reason, block.offset + fault.at, stage="decode") from fault
        if num_rows != block.num_samples:
            raise block.corrupt(f"{num_rows} samples where {block.num_samples} were indexed")
        return table

    def _opened(self, file: BinaryIO, shard: Shard) -> BinaryIO:
        """The file from its beginning, decompressed."""
        file.seek(0)
        if compression_of(shard.url) is None:
            return file
        return open_decompressed(file, shard.url, window_bytes=self.window_bytes)


@lru_cache(maxsize=64)
def _is_array(footer: bytes) -> bool:
    return bool(schema_in(footer).metadata == _ARRAY)


def _lines_of_array(file: BinaryIO, url: str, *, warns: bool = False) -> tuple[bytes | None, int]:
    """The items of a file that is one array of objects, a line each, and its bytes; None: it is none.

    `warns`: of keys that are there twice.
    """
    text = _read(file, 4096)
    match = _STARTS_ARRAY.match(text)
    if match is None:
        return None, 0
    text += _read(file, _MOST_ARRAY_BYTES + 1 - len(text))
    may_be_lines = match[1] is not None  # which begin with an object, too
    if len(text) > _MOST_ARRAY_BYTES and not may_be_lines:
        reason = f"is one JSON array of more than {_MOST_ARRAY_BYTES >> 20} MiB"
        raise CorruptShardError(url, f"{reason}: write it as lines: jq -c '.[]' {url} > lines.jsonl")
    doubled: list[str] = []
    try:
        value = json.loads(text, object_pairs_hook=partial(note_doubled, doubled) if warns else None)
    except (ValueError, RecursionError) as error:
        if may_be_lines:
            return None, 0
        raise CorruptShardError(url, f"is one JSON array, and is damaged: {error}") from error
    items = value if isinstance(value, list) else value["data"]
    odd = next((number for number, item in enumerate(items) if not isinstance(item, dict)), None)
    if may_be_lines and (odd is not None or len(value) > 1):
        return None, 0
    if odd is not None:
        raise CorruptShardError(url, f"is one JSON array whose item {odd} is no object, as samples are")
    if doubled:
        message = f"{identity_of(url)}: key {doubled[0]!r} is there twice in an object of its array"
        warnings.warn(f"{message}: the last counts, as for json.loads", stacklevel=3)
    return b"".join(json.dumps(item).encode() + b"\n" for item in items), len(text)


@lru_cache(maxsize=64)
def _reader(footer: bytes, columns: tuple[str, ...] | None, texts: frozenset[str]) -> LineReader:
    """Return the reader of the wanted columns; msgspec compiles it once."""
    fields = list(schema_in(footer))
    if columns is not None:
        fields = _projected(fields, {*columns}, texts, "")
    return LineReader(pa.schema(fields))


def _projected(fields: Sequence[pa.Field], columns: Set[str], texts: Set[str], prefix: str) -> list[pa.Field]:
    """The fields in which the wanted columns lie, of structs the wanted parts only."""
    projection = []
    for field in fields:
        name = prefix + field.name
        if pa.types.is_struct(field.type):
            inner = _projected(list(field.type), columns, texts, f"{name}.")
            projection += [field.with_type(pa.struct(inner))] if inner else []
        elif name in columns:
            projection.append(field.with_type(JSON_TEXT) if name in texts else field)
    return projection


def _null_free(seen: SchemaInferrer, num_rows: int, prefix: str = "") -> frozenset[str]:
    """The columns that no line lacks."""
    names: set[str] = set()
    for key, child in seen.children.items():
        if child.is_object:
            names |= _null_free(child, num_rows, f"{prefix}{key}.")
        elif child.present == num_rows:
            names.add(prefix + key)
    return frozenset(names)


def whole_lines(
    file: BinaryIO, shard: Shard, block_bytes: int, max_line_bytes: int, codec: str
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
            more_text = f"accept longer ones with format={codec}(max_line_bytes=...)"
            raise shard.corrupt(f"{reason}; {more_text}", offset)
    if text:
        yield offset, text


def _step(size: int, block_bytes: int, max_line_bytes: int) -> int:
    """Return how many bytes to read behind so many that hold no whole line."""
    return block_bytes - size if size < block_bytes else max(1, min(size, max_line_bytes + 1 - size))


def _read(file: BinaryIO, num_bytes: int) -> bytes:
    """Read that many bytes, fewer only at the end; decompressing readers give less at a time."""
    pieces = []
    while num_bytes and (piece := file.read(num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)
