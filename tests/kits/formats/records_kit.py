"""What the tests of TFRecord and ArrayRecord need: what their owners wrote and read, and writers."""

from __future__ import annotations

import gzip
import io
import json
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from formats_kit import rows_of

from sharding.blocks import Columns
from sharding.byte_lists import ByteLists, list_items

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


def fixture(folder: str, name: str, root: Path = FIXTURES) -> bytes:
    """The bytes of a file as its owner wrote it."""
    path = root / folder / name
    return path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())


@cache
def expected(folder: str, what: str, root: Path = FIXTURES) -> list[Any]:
    """The records of a kind as TensorFlow parsed them: values by feature, of feature lists by step."""
    records = json.loads((root / folder / "expected.json").read_text())[what]
    if what == "raw":
        return [bytes.fromhex(record) for record in records]
    return [{name: _plain(values) for name, values in record.items()} for record in records]


def written_anew(folder: str, root: Path) -> None:
    """Have the owners, which must be installed, write the files of a folder anew."""
    script = FIXTURES / "make.py"
    subprocess.run(
        [sys.executable, script, folder, "--to", root], check=True, timeout=120, capture_output=True
    )


def _plain(values: dict[str, Any]) -> list[Any]:
    (kind, listed) = next(iter(values.items()))
    if kind == "steps":
        return [_plain(step) for step in listed]
    if kind == "float":
        return np.array(listed, np.float32).tolist()
    return [bytes.fromhex(one) for one in listed] if kind == "bytes" else listed


def values_in(blocks: list[Columns]) -> list[dict[str, Any]]:
    """The samples of decoded blocks as lists of values by feature, as `expected` has them."""
    rows = list[dict[str, Any]]()
    for columns in blocks:
        lists = {name: _unpacked(one) for name, one in columns.items() if isinstance(one, ByteLists)}
        others = {name: one for name, one in columns.items() if name not in lists}
        for i, row in enumerate(rows_of([others]) if others else [{} for _ in next(iter(lists.values()))]):
            row |= {name: values[i] for name, values in lists.items()}
            there = {name: value for name, value in row.items() if value is not None}
            rows.append(
                {name: value if isinstance(value, list) else [value] for name, value in there.items()}
            )
    return rows


def _unpacked(column: ByteLists) -> list[list[bytes] | None]:
    has = column.lengths >= 0
    counts, starts, lengths = list_items(column.buffer, column.starts[has])
    items = iter([column.buffer[a : a + n].tobytes() for a, n in zip(starts, lengths, strict=True)])
    each = iter([[next(items) for _ in range(count)] for count in counts])
    return [next(each) if there else None for there in has]


class CountingFile(io.BytesIO):
    """Counts what is read."""

    num_bytes = num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        piece = super().read(size)
        self.num_bytes, self.num_reads = self.num_bytes + len(piece), self.num_reads + 1
        return piece


# ---- written field by field -----------------------------------------------------------------------------


def example_of(**features: list[Any]) -> bytes:
    """An Example: bytes, floats or integers by the first of a feature's values; of no value, integers."""
    entries = b""
    for name, values in features.items():
        first = values[0] if values else 0
        kind = 1 if isinstance(first, bytes) else 2 if isinstance(first, float) else 3
        if kind == 1:
            body = b"".join(span(1, value) for value in values)
        else:
            packed = [struct.pack("<f", value) if kind == 2 else varint(value) for value in values]
            body = span(1, b"".join(packed)) if values else b""
        entries += span(1, span(1, name.encode()) + span(2, span(kind, body)))
    return span(1, entries)


def span(number: int, content: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    value, out = value & (1 << 64) - 1, bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def tfrecord_of(records: Iterable[bytes]) -> bytes:
    """A TFRecord file."""
    parts = list[bytes]()
    for record in records:
        head = struct.pack("<Q", len(record))
        parts += [head, _masked(head), record, _masked(record)]
    return b"".join(parts)


def _masked(data: bytes) -> bytes:
    from crc32c import crc32c

    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def array_record_of(records: Sequence[bytes], group: int = 1) -> bytes:
    """An ArrayRecord file without compression and hashes, which nobody verifies; of less than 64 KiB."""
    chunks, at, footers = list[bytes](), 64, [span(1, _fields(1, -(-len(records) // group), len(records)))]
    for first in range(0, len(records), group):
        some = records[first : first + group]
        chunks.append(_chunk(some))
        footers.append(_fields(at, sum(map(len, some)), len(some)))
        at += len(chunks[-1])
    body = bytes(64) + b"".join(chunks) + _chunk(footers)
    assert len(body) <= 1 << 16
    postscript = bytes(24) + _chunk([_fields(at, 0x71930E704FDAE05E)])
    return body.ljust(1 << 16, b"\0") + postscript.ljust(1 << 16, b"\0")


def _chunk(records: Sequence[bytes]) -> bytes:
    sizes, values = b"".join(map(varint, map(len, records))), b"".join(records)
    data = b"\0" + varint(len(sizes)) + sizes + values
    return struct.pack("<QQQQQ", 0, len(data), 0, ord("r") | len(records) << 8, len(values)) + data


def _fields(*numbers: int) -> bytes:
    return b"".join(varint(i << 3) + varint(number) for i, number in enumerate(numbers, 1))
