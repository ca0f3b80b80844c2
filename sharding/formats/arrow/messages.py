r"""Locate the messages of an Arrow IPC file or stream, from their headers alone.

A message is `0xFFFFFFFF | int32 n | n bytes of flatbuffer Message (padded) | body`; before Arrow 0.15 the
four 0xFF were missing. A *stream* is a schema message, then dictionary and record batches, then an end mark
(n = 0). A *file* is `ARROW1\0\0 | stream | footer | int32 | ARROW1`; its footer repeats the schema and lists
all batches. A stream is walked, reading headers and seeking over bodies. In a file the footer leads: each
batch that it lists must be there, and nothing between them, for a length that was zeroed looks like an end
mark. pyarrow tells no offsets, hence the small flatbuffer reader here (layout: github.com/apache/arrow,
format/Message.fbs and File.fbs).
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import BinaryIO

from sharding.blocks import Shard
from sharding.errors import CorruptShardError

MAGIC = b"ARROW1"
HEAD = MAGIC + b"\0\0"
SCHEMA, DICTIONARY, RECORDS = 1, 2, 3
"""Kinds of message, numbered as in Message.fbs."""

LARGEST = 1 << 42
"""Rows or bytes that no message has; more are a sign of damage."""

_KINDS = (SCHEMA, DICTIONARY, RECORDS)
_TAIL = struct.Struct("<i6s")
"""Length of the footer, and magic."""
_CURE = "allow_unfinished=True reads the whole batches"
_BLOCK = "qi4xq"
"""A batch in a footer: its offset, the bytes of its prefix and header, those of its body."""
_CONTINUATION = b"\xff\xff\xff\xff"
_LARGEST_HEADER = 256 << 20


@dataclass(frozen=True)
class Message:
    """One message: its offset, and what its header says."""

    kind: int
    offset: int
    """Byte of the file at which it begins."""
    length: int
    """Bytes, prefix, header and body."""
    body_length: int
    _: KW_ONLY
    rows: int = 0
    """Rows of a record batch, entries of a dictionary batch."""
    lengths: tuple[int, ...] = ()
    """The length of each array of a record batch, parents before children."""
    null_counts: tuple[int, ...] = ()
    """Nulls in each of these arrays."""
    buffers: tuple[tuple[int, int], ...] = ()
    """Buffers of a record batch: offset in the file, stored length."""
    views: tuple[int, ...] = ()
    """The number of buffers that each array of string or binary views has besides the views."""
    is_compressed: bool = False
    head_sum: int = 0
    """CRC-32 of the header of a record batch, and of what is before it."""
    dictionary: int = 0
    """Id of the dictionary in a dictionary batch."""
    is_delta: bool = False
    """True if a dictionary batch adds to what was there."""


@dataclass(frozen=True)
class Layout:
    """The messages of a file or stream."""

    schema: bytes
    """The message a stream begins with."""
    dictionaries: list[Message]
    batches: list[Message]
    """Record batches, in file order."""
    _: KW_ONLY
    footer: bytes = b""
    """The footer of a file, with its length and magic."""
    unfinished: str = ""
    """The way in which it ends too early, where that is allowed."""


def read_layout(file: BinaryIO, shard: Shard, *, allow_unfinished: bool = False) -> Layout:
    """Find the messages of a file or stream, whichever it is.

    Args:
        file: the shard, seekable.
        shard: named in errors.
        allow_unfinished: take the whole messages of what ends before its end mark or footer.

    Raises:
        CorruptShardError: neither file nor stream, truncated, a header that cannot be read, batches that
            differ from those a footer lists, or bytes behind a stream's end.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(8)
    if head[:4] == b"FEA1":
        raise shard.corrupt("Feather version 1 is not Arrow IPC; write it as version 2", 0)
    if size < 8:
        raise shard.corrupt(f"not Arrow IPC: {size} bytes", 0)
    if head[:6] != MAGIC:
        return _of_stream(file, shard, 0, size, allow_unfinished)
    file.seek(max(0, size - _TAIL.size))
    length, magic = _TAIL.unpack(file.read(_TAIL.size).rjust(_TAIL.size))
    if size < 20 or magic != MAGIC:
        if allow_unfinished:
            return _of_stream(file, shard, len(HEAD), size, allow_unfinished)
        reason = f"truncated: an Arrow file of {size} bytes must end in {MAGIC!r}, not {magic!r}; {_CURE}"
        raise shard.corrupt(reason, max(0, size - len(MAGIC)))
    if not 0 < length <= size - _TAIL.size - len(HEAD):
        reason = f"broken Arrow file: a footer of {length} bytes in a file of {size}"
        raise shard.corrupt(reason, size - _TAIL.size)
    file.seek(size - _TAIL.size - length)
    return _of_file(file, shard, bytes(file.read()), size - _TAIL.size - length)


def _of_stream(file: BinaryIO, shard: Shard, start: int, size: int, allow_unfinished: bool) -> Layout:
    """Walk messages from byte `start` on: 0, or 8 in a file that lost its end."""
    position, messages = start, list[Message]()
    while isinstance(message := _message_at(file, shard, position, size), Message):
        messages.append(message)
        position += message.length
    if [m.offset for m in messages if m.kind == SCHEMA] != [start]:
        raise shard.corrupt("not Arrow IPC, or truncated: it lacks its one schema", start)
    unfinished = "it ends without a footer" if start else ""
    if message < 0:
        unfinished = f"its last message lacks {-message} bytes"
        if position == size:
            unfinished = "no end mark stands behind its last message"
        if not allow_unfinished:
            raise shard.corrupt(f"truncated: {unfinished}; {_CURE}", position)
    elif not start and position + message < size:
        reason = f"broken Arrow stream: an end mark, and {size - position - message} bytes behind it"
        raise shard.corrupt(reason, position)
    schema, batches = bytes_of(file, messages[0]), _of(RECORDS, messages)
    return Layout(schema, _of(DICTIONARY, messages), batches, unfinished=unfinished)


def _of_file(file: BinaryIO, shard: Shard, footer: bytes, end: int) -> Layout:
    """The batches that the footer, which begins at byte `end`, lists."""
    try:
        root = _FlatTable.root(footer[: -_TAIL.size])
        listed = {DICTIONARY: root.structs(2, _BLOCK), RECORDS: root.structs(3, _BLOCK)}
        schema = _schema_message(footer, root)
    except (struct.error, ValueError) as error:
        raise shard.corrupt(f"broken Arrow footer: {error}", end) from error
    messages = [_listed(file, shard, kind, block, end) for kind, blocks in listed.items() for block in blocks]
    dictionaries, batches = _of(DICTIONARY, messages), _of(RECORDS, messages)
    messages.sort(key=lambda message: message.offset)
    with suppress(CorruptShardError):  # some writers put other bytes there
        first = _message_at(file, shard, len(HEAD), end)
        if isinstance(first, Message) and first.kind == SCHEMA:
            schema, messages = bytes_of(file, first), [first, *messages]
    _check_neighbours(file, shard, messages, end)
    if batches != _of(RECORDS, messages):
        raise shard.corrupt("broken Arrow file: its footer lists batches out of order", end)
    return Layout(schema, dictionaries, batches, footer=footer)


def _listed(file: BinaryIO, shard: Shard, kind: int, block: tuple[int, ...], end: int) -> Message:
    """The batch that a footer lists."""
    offset, header_length, body_length = block
    message = _message_at(file, shard, offset, end) if len(HEAD) <= offset < end else None
    listed = (kind, header_length + body_length, body_length)
    if isinstance(message, Message) and (message.kind, message.length, message.body_length) == listed:
        return message
    raise shard.corrupt("broken Arrow file: here is no batch that its footer lists", offset)


def _check_neighbours(file: BinaryIO, shard: Shard, messages: Sequence[Message], end: int) -> None:
    """Raise where something lies between a file's messages, or another message behind them."""
    ends = [message.offset + message.length for message in messages]
    gap = next((stop for stop, after in zip(ends, messages[1:], strict=False) if stop != after.offset), None)
    if gap is None and ends and isinstance(_message_at(file, shard, ends[-1], end), Message):
        gap = ends[-1]
    if gap is not None:
        raise shard.corrupt("broken Arrow file: here is what its footer does not list", gap)


def _schema_message(footer: bytes, root: _FlatTable) -> bytes:
    """A file's schema as a message: a flatbuffer table that refers to the schema in the footer behind it."""
    schema = root.target(1)
    if schema is None:
        raise ValueError("it has no schema")
    # Where the table is (16); its vtable of four fields; in the table vtable, header, version and kind.
    head = struct.pack(
        "<I 6H iIhB5x", 16, 12, 12, 8, 10, 4, 0, 12, 32 + schema - 20, root.number(0, "h"), SCHEMA
    )
    padding = bytes(-len(footer) % 8)
    return _CONTINUATION + struct.pack("<i", 32 + len(footer) + len(padding)) + head + footer + padding


def is_little_endian(schema: bytes) -> bool:
    """Return whether numbers are stored so, by the message of the schema."""
    header = _FlatTable.root(schema[8 if schema[:4] == _CONTINUATION else 4 :]).table(2)
    return header is not None and header.number(0, "h") == 0


def bytes_of(file: BinaryIO, message: Message) -> bytes:
    """The stored bytes of a message."""
    file.seek(message.offset)
    return bytes(file.read(message.length))


def _of(kind: int, messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.kind == kind]


def _message_at(file: BinaryIO, shard: Shard, offset: int, end: int) -> Message | int:
    """The message at a byte of the file. Of an end mark the bytes; below 0: how many of a message lack."""
    file.seek(offset)
    prefix = file.read(min(8, end - offset))
    skip = 8 if prefix[:4] == _CONTINUATION else 4
    if len(prefix) < skip:
        return len(prefix) - skip
    length = int(struct.unpack_from("<i", prefix, skip - 4)[0])
    if length == 0:
        return skip
    try:
        if not 0 < length <= _LARGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        if offset + skip + length > end:
            return end - offset - skip - length
        file.seek(offset + skip)
        message = _message(file.read(length), offset, prefix[:skip])
    except (struct.error, ValueError) as error:
        raise shard.corrupt(f"broken Arrow message: {error}", offset) from error
    return message if offset + message.length <= end else end - offset - message.length


def _message(data: bytes, offset: int, prefix: bytes) -> Message:
    """The message whose header these bytes are, behind `prefix` at byte `offset` of the file."""
    skip = len(prefix)
    root = _FlatTable.root(data)
    kind, body_length = root.number(1, "B"), root.number(3, "q")
    header = root.table(2)
    if kind not in _KINDS or header is None or body_length < 0:
        raise ValueError(f"a message of kind {kind} with a body of {body_length} bytes")
    body = offset + skip + len(data)
    head = (kind, offset, skip + len(data) + body_length, body_length)
    if kind == DICTIONARY:
        entries = header.table(1)
        return Message(
            *head,
            rows=entries.number(0, "q") if entries else 0,
            dictionary=header.number(0, "q"),
            is_delta=bool(header.number(2, "?")),
        )
    if kind == SCHEMA:
        return Message(*head)
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
        *head,
        rows=rows,
        lengths=tuple(length for length, _ in arrays),
        null_counts=tuple(nulls for _, nulls in arrays),
        buffers=tuple((body + start, stored) for start, stored in buffers),
        views=views,
        is_compressed=header.table(3) is not None,
        head_sum=zlib.crc32(data, zlib.crc32(prefix)),
    )


class _FlatTable:
    """A flatbuffer table: fields by their number in the .fbs file, with 0 for those left out."""

    def __init__(self, data: bytes, start: int) -> None:
        (to_vtable,) = struct.unpack_from("<i", data, start)
        self._data, self._start, self._vtable = data, start, start - to_vtable
        if self._vtable < 0:
            raise ValueError("a flatbuffer table outside its header")
        (self._vtable_bytes,) = struct.unpack_from("<H", data, self._vtable)

    @staticmethod
    def root(data: bytes) -> _FlatTable:
        return _FlatTable(data, struct.unpack_from("<I", data, 0)[0])

    def number(self, field: int, code: str) -> int:
        position = self._position(field)
        return 0 if position is None else int(struct.unpack_from(f"<{code}", self._data, position)[0])

    def table(self, field: int) -> _FlatTable | None:
        position = self.target(field)
        return None if position is None else _FlatTable(self._data, position)

    def structs(self, field: int, codes: str) -> list[tuple[int, ...]]:
        position = self.target(field)
        if position is None:
            return []
        (count,) = struct.unpack_from("<I", self._data, position)
        end = position + 4 + count * struct.calcsize(f"<{codes}")
        if end > len(self._data):
            raise ValueError("a flatbuffer vector outside its header")
        return list(struct.iter_unpack(f"<{codes}", self._data[position + 4 : end]))

    def _position(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry >= self._vtable_bytes:
            return None
        (relative,) = struct.unpack_from("<H", self._data, self._vtable + entry)
        return self._start + relative if relative else None

    def target(self, field: int) -> int | None:
        position = self._position(field)
        return None if position is None else position + int(struct.unpack_from("<I", self._data, position)[0])
