"""Whole-file compression: what a name's ending says, and decompression that notices every defect.

A `.gz`, `.tgz` or `.zst` file is a sequence of members (gzip) or frames (zstd), decompressed one after
another. Invariant: either the last one is complete and its checksum holds, or `CorruptShardError` is
raised with the number of decompressed bytes that were good. Output is produced in pieces of bounded
size, so that a decompression bomb meets `limit_bytes` before it meets the end of memory.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from sharding.errors import CorruptShardError
from sharding.urls import file_name

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_ENDINGS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd"}
WINDOW_BYTES = 128 << 20
"""Window of a zstd frame that is decompressed, unless more is asked for: so much memory it takes."""
_MOST_WINDOW_BYTES = 2 << 30
HEAD_BYTES = 4 << 10
"""The bytes that `compression_in` looks at, at most."""
_INPUT_BYTES = 64 << 10
_ZSTD_INPUT_BYTES = 1 << 10  # zstandard gives all a piece expands to: at most 32768 times its size, or 32 MiB
_OUTPUT_BYTES = 1 << 20
_READ_TO_THE_END = 1 << 62
_Feed = Callable[[Any, memoryview], tuple[bytes, memoryview]]
"""Gives stored bytes to a member: what they expand to, and which of them it did not take."""


def compression_of(url: str) -> str | None:
    """Return the ending of the file's name: "gzip", "zstd" or None; handles a `?query` and `::` chains."""
    name = file_name(url).lower()
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)


def compression_in(head: bytes) -> str | None:
    """Return how a file with these first bytes is compressed, whatever its name; None: nobody can tell.

    "gzip", "zstd", "bzip2" or "xz". The three bytes of gzip may stand in any file of numbers, so what follows
    them must be a deflated stream, too.
    """
    if head.startswith((b"BZh", b"\xfd7zXZ\0")):
        is_bzip2 = head[4:10] in (b"1AY&SY", b"\x17rE8P\x90")
        return "xz" if head[0] == 0xFD else "bzip2" if is_bzip2 else None
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50):
        return "zstd"
    if not head.startswith(b"\x1f\x8b\x08") or len(head) < 10:
        return None
    member = zlib.decompressobj(wbits=31)
    try:
        return "gzip" if member.decompress(head[:HEAD_BYTES]) or member.eof else None
    except zlib.error:
        return None


def misnamed(head: bytes, url: str, *, may_be_compressed: bool) -> str | None:
    """Say what is wrong with the name of a compressed file that begins so, with the cure; None: nothing.

    `may_be_compressed`: whether files of its format are read compressed, where their names say so.
    """
    kind, stated, name = compression_in(head), compression_of(url), file_name(url)
    if kind == stated == "gzip":
        twice = compression_in(zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES))
        return f"it is compressed twice: decompress it once (`{kind} -dc < FILE`)" if twice else None
    if kind is None or kind == stated:
        return None
    for ending in _ENDINGS if stated else ():
        if name.lower().endswith(ending):
            name = name[: -len(ending)] + (".tar" if ending == ".tgz" else "")
    ending = next((ending for ending, known in _ENDINGS.items() if known == kind), "")
    if may_be_compressed and ending:
        return f"it looks {kind}-compressed: name it {name}{ending}"
    cure = f"decompress it (`{kind} -dc < FILE`)"
    if may_be_compressed:
        cure += ", or compress it by gzip or zstd instead"
    return f"it looks {kind}-compressed: {cure}"


def decompress(data: memoryview, url: str, *, limit_bytes: int, kind: str | None = None) -> memoryview:
    """Decompress a whole file.

    Args:
        data: the stored bytes.
        url: names the file; its ending names the compression.
        limit_bytes: the most bytes the result may have.
        kind: "gzip", "zlib" or "zstd", whatever the name says; None: what it says.

    Raises:
        CorruptShardError: corrupt, truncated, or larger than the limit (stage "decode"; offset in the
            decompressed bytes).
    """
    source = io.BytesIO(data)  # whose windows were looked at when it was indexed
    out, size = memoryview(bytearray(limit_bytes)), 0
    for piece in _inflated(source.read, url, kind, _MOST_WINDOW_BYTES, stage="decode"):
        end = size + len(piece)
        if end > limit_bytes:
            reason = f"decompresses to more than the {limit_bytes} bytes it had when it was indexed"
            raise CorruptShardError(url, reason, offset=limit_bytes, stage="decode")
        out[size:end] = piece
        size = end
    return out[:size]


def open_decompressed(
    file: BinaryIO,
    url: str,
    *,
    limit_bytes: int | None = None,
    kind: str | None = None,
    window_bytes: int = WINDOW_BYTES,
) -> BinaryIO:
    """A reader of the decompressed bytes of `file`, from its beginning, in little memory; `kind` as above.

    `window_bytes`: the window of a zstd frame, which is kept in memory, at most.

    It seeks forwards by reading on; seeking backwards raises `io.UnsupportedOperation`. Seeking to the
    end verifies the rest of the file. Not thread-safe. Closing it leaves `file` open.

    Raises:
        CorruptShardError: while reading: corrupt, truncated, or larger than `limit_bytes` (stage "index").
    """
    file.seek(0)
    pieces = _inflated(file.read, url, kind, window_bytes, stage="index")
    return cast(BinaryIO, _InflatedReader(pieces, url, limit_bytes))


class _InflatedReader(io.RawIOBase):
    """Forward-only reader over pieces of decompressed bytes."""

    def __init__(self, pieces: Iterator[bytes], url: str, limit_bytes: int | None) -> None:
        self._pieces, self._url, self._limit_bytes = pieces, url, limit_bytes
        self._piece, self._position = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, into: WriteableBuffer, /) -> int:
        target = memoryview(into).cast("B")
        piece = self._take(len(target))
        target[: len(piece)] = piece
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: _READ_TO_THE_END}[whence]
        distance = start + offset - self._position
        if distance < 0 or (whence == io.SEEK_END and offset):
            raise io.UnsupportedOperation("a compressed file is read forwards only")
        while distance > 0 and (piece := self._take(distance)):
            distance -= len(piece)
        return self._position

    def _take(self, num_bytes: int) -> memoryview:
        """The next bytes, at least one unless at the end, at most `num_bytes`."""
        while not self._piece and num_bytes:
            more = next(self._pieces, None)
            if more is None:
                break
            self._piece = memoryview(more)
        piece, self._piece = self._piece[:num_bytes], self._piece[num_bytes:]
        self._position += len(piece)
        if self._limit_bytes is not None and self._position > self._limit_bytes:
            reason = f"decompresses to more than {self._limit_bytes} bytes"
            raise CorruptShardError(self._url, reason, offset=self._limit_bytes, stage="index")
        return piece


def _inflated(
    read: Callable[[int], bytes], url: str, kind: str | None, window_bytes: int, *, stage: str
) -> Iterator[bytes]:
    """The decompressed bytes in pieces: member after member, until the input ends with one complete."""
    kind = kind or compression_of(url)
    if kind is None:
        raise ValueError(f"no compression is known by the ending of {url!r}; known are {', '.join(_ENDINGS)}")
    new_member, feed, failure = _codec(kind, window_bytes)
    good_bytes, num_ended, head = 0, 0, b""
    member: Any = None
    try:
        while stored := read(_INPUT_BYTES):
            data = memoryview(stored)
            while data:
                if member is None:
                    # Files padded to a block size end in zeros, which gzip(1) accepts as well.
                    if kind == "gzip" and num_ended and data[0] == 0:
                        data = memoryview(bytes(data).lstrip(b"\0"))
                        continue
                    member, head = new_member(), bytes(data[:18])
                piece, data = feed(member, data)
                good_bytes += len(piece)
                yield piece
                if member.eof:
                    member, num_ended = None, num_ended + 1
    except failure as error:
        reason = _too_wide(head, window_bytes) if kind == "zstd" else ""
        raise CorruptShardError(
            url, reason or f"corrupt {kind} data: {error}", offset=good_bytes, stage=stage
        ) from error
    if member is not None:
        raise CorruptShardError(url, f"the {kind} data is truncated", offset=good_bytes, stage=stage)


def _too_wide(head: bytes, window_bytes: int) -> str:
    """Say that the window of a frame, which begins so, is larger than the memory for it; "": it is not."""
    import zstandard

    try:
        size = zstandard.get_frame_parameters(head).window_size
    except zstandard.ZstdError:
        return ""
    if size <= window_bytes:
        return ""
    cure = "compress it anew without --long"
    if size <= _MOST_WINDOW_BYTES:
        cure += f", or give format=TarFormat(window_bytes={size}), JsonlFormat(...) for JSON Lines"
    return f"its zstd window is {size:,} bytes, and windows of {window_bytes:,} are read: {cure}"


def _codec(kind: str, window_bytes: int) -> tuple[Callable[[], Any], _Feed, type[Exception]]:
    """Return how to start a member, how to feed it, and how it fails."""
    if kind != "zstd":
        wbits = 31 if kind == "gzip" else 15
        return lambda: zlib.decompressobj(wbits=wbits), _feed_gzip, zlib.error
    try:
        import zstandard
    except ImportError as error:
        raise ImportError("reading .zst files needs `pip install 'dataflow-loader[zstd]'`") from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes)
    return decompressor.decompressobj, _feed_zstd, zstandard.ZstdError


def _feed_gzip(member: Any, data: memoryview) -> tuple[bytes, memoryview]:
    piece = member.decompress(data, _OUTPUT_BYTES)
    # Behind the end of a member, `unconsumed_tail` keeps what it held before.
    return piece, memoryview(member.unused_data if member.eof else member.unconsumed_tail)


def _feed_zstd(member: Any, data: memoryview) -> tuple[bytes, memoryview]:
    pieces, offset, size = [], 0, 0
    while offset < len(data) and size < _OUTPUT_BYTES and not member.eof:
        pieces.append(member.decompress(data[offset : offset + _ZSTD_INPUT_BYTES]))
        size += len(pieces[-1])
        offset = min(offset + _ZSTD_INPUT_BYTES, len(data))
    return b"".join(pieces), data[offset - len(member.unused_data) :]
