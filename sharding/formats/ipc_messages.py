r"""Where the messages of an Arrow IPC file or stream lie, from their headers alone.

A message is `0xFFFFFFFF | int32 n | n bytes of flatbuffer Message (padded) | body`; before Arrow 0.15 the
four 0xFF were missing. A *stream* is a schema message, then dictionary and record batches, then an optional
end mark (n = 0). A *file* is `ARROW1\0\0 | stream | footer | int32 | ARROW1`, so one walk serves both,
reading headers and seeking over bodies. pyarrow tells no offsets, hence the small flatbuffer reader here
(layout: github.com/apache/arrow, format/Message.fbs).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from sharding.blocks import Shard
from sharding.errors import CorruptShardError

MAGIC = b"ARROW1"
SCHEMA, DICTIONARY, RECORDS = 1, 2, 3
"""Kinds of message, numbered as in Message.fbs."""

LARGEST = 1 << 42
"""Rows or bytes that no message has; more are a sign of damage."""

_KINDS = (SCHEMA, DICTIONARY, RECORDS)
_CONTINUATION = b"\xff\xff\xff\xff"
_LARGEST_HEADER = 256 << 20


@dataclass(frozen=True)
class Message:
    """One message: its place, and what its header says."""

    kind: int
    offset: int
    """Byte of the file at which it begins."""
    length: int
    """Bytes, prefix, header and body."""
    body_length: int
    rows: int = 0
    """Rows of a record batch, entries of a dictionary batch."""
    lengths: tuple[int, ...] = ()
    """Of each array of a record batch, parents before children."""
    null_counts: tuple[int, ...] = ()
    """Nulls in each of these arrays."""
    buffers: tuple[tuple[int, int], ...] = ()
    """Buffers of a record batch: place in the file, stored length."""
    views: tuple[int, ...] = ()
    """How many buffers each array of string or binary views has besides the views."""
    is_compressed: bool = False
    dictionary: int = 0
    """Id of the dictionary in a dictionary batch."""
    is_delta: bool = False
    """Whether a dictionary batch adds to what was there."""


def messages(file: BinaryIO, shard: Shard) -> Iterator[Message]:
    """Walk the messages of a file or stream, whichever it is.

    Raises:
        CorruptShardError: neither file nor stream, truncated, or a header that cannot be read.
    """
    size = file.seek(0, io.SEEK_END)
    at = _first_message(file, size, shard)
    while at < size:
        try:
            message = _message_at(file, at, size)
        except (struct.error, ValueError) as error:
            raise CorruptShardError(shard.url, f"broken Arrow message: {error}", at) from error
        if message is None:
            return
        if message.offset + message.length > size:
            missing = message.offset + message.length - size
            raise CorruptShardError(shard.url, f"truncated: the message lacks {missing} bytes", at)
        yield message
        at += message.length


def _first_message(file: BinaryIO, size: int, shard: Shard) -> int:
    file.seek(0)
    head = file.read(8)
    if head[:4] == b"FEA1":
        raise CorruptShardError(shard.url, "Feather version 1 is not Arrow IPC; write it as version 2", 0)
    if head[:6] != MAGIC:
        if size < 8:
            raise CorruptShardError(shard.url, f"not Arrow IPC: {size} bytes", 0)
        return 0
    file.seek(max(0, size - 6))
    if size < 20 or (tail := file.read(6)) != MAGIC:
        reason = f"truncated: an Arrow file of {size} bytes must end in {MAGIC!r}"
        raise CorruptShardError(
            shard.url, reason if size < 20 else f"{reason}, not {tail!r}", max(0, size - 6)
        )
    return 8


def _message_at(file: BinaryIO, at: int, size: int) -> Message | None:
    """The message at a byte of the file, None for the end mark."""
    file.seek(at)
    prefix = file.read(8)
    skip = 8 if prefix[:4] == _CONTINUATION else 4
    (length,) = struct.unpack_from("<i", prefix, skip - 4)
    if length == 0:
        return None
    if not 0 < length <= min(size - at, _LARGEST_HEADER):
        raise ValueError(f"a header of {length} bytes (not Arrow IPC, or truncated)")
    file.seek(at + skip)
    root = _Table.root(file.read(length))
    kind, body_length = root.number(1, "B"), root.number(3, "q")
    header = root.table(2)
    if kind not in _KINDS or header is None or body_length < 0:
        raise ValueError(f"a message of kind {kind} with a body of {body_length} bytes")
    body = at + skip + length
    place = (kind, at, skip + length + body_length, body_length)
    if kind == DICTIONARY:
        entries = header.table(1)
        return Message(
            *place,
            rows=entries.number(0, "q") if entries else 0,
            dictionary=header.number(0, "q"),
            is_delta=bool(header.number(2, "?")),
        )
    if kind == SCHEMA:
        return Message(*place)
    rows = header.number(0, "q")
    if not 0 <= rows < LARGEST:
        raise ValueError(f"a record batch of {rows} rows")
    buffers = header.structs(2, "qq")
    if any(not 0 <= start <= start + stored <= body_length for start, stored in buffers):
        raise ValueError("a buffer outside its body")
    arrays = header.structs(1, "qq")
    views = tuple(count for (count,) in header.structs(4, "q"))
    if any(not 0 <= length < LARGEST for length, _ in arrays):
        raise ValueError("an array of impossible length")
    if any(not 0 <= count <= len(buffers) for count in views):
        raise ValueError("an array of more buffers than there are")
    return Message(
        *place,
        rows=rows,
        lengths=tuple(length for length, _ in arrays),
        null_counts=tuple(nulls for _, nulls in arrays),
        buffers=tuple((body + start, stored) for start, stored in buffers),
        views=views,
        is_compressed=header.table(3) is not None,
    )


class _Table:
    """A flatbuffer table: fields by their number in the .fbs file, with 0 for those left out."""

    def __init__(self, data: bytes, at: int) -> None:
        (to_vtable,) = struct.unpack_from("<i", data, at)
        self._data, self._at, self._vtable = data, at, at - to_vtable
        if self._vtable < 0:
            raise ValueError("a flatbuffer table outside its header")
        (self._vtable_bytes,) = struct.unpack_from("<H", data, self._vtable)

    @staticmethod
    def root(data: bytes) -> _Table:
        return _Table(data, struct.unpack_from("<I", data, 0)[0])

    def number(self, field: int, code: str) -> int:
        at = self._place(field)
        return 0 if at is None else int(struct.unpack_from(f"<{code}", self._data, at)[0])

    def table(self, field: int) -> _Table | None:
        at = self._target(field)
        return None if at is None else _Table(self._data, at)

    def structs(self, field: int, codes: str) -> list[tuple[int, ...]]:
        at = self._target(field)
        if at is None:
            return []
        (count,) = struct.unpack_from("<I", self._data, at)
        end = at + 4 + count * struct.calcsize(f"<{codes}")
        if end > len(self._data):
            raise ValueError("a flatbuffer vector outside its header")
        return list(struct.iter_unpack(f"<{codes}", self._data[at + 4 : end]))

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry >= self._vtable_bytes:
            return None
        (relative,) = struct.unpack_from("<H", self._data, self._vtable + entry)
        return self._at + relative if relative else None

    def _target(self, field: int) -> int | None:
        at = self._place(field)
        return None if at is None else at + int(struct.unpack_from("<I", self._data, at)[0])
