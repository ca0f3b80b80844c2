"""Values as Streaming and LitData both store them: pixels of Pillow's images, lists of files."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable

import numpy as np

from sharding.blocks import Spans
from sharding.byte_lists import ByteLists
from sharding.formats.gathering import gathered_lists
from sharding.formats.streaming.offset_table import words_at
from sharding.spans import Bytes, Ints

_PNM = {"L": ("P5", 1), "P": ("P5", 1), "RGB": ("P6", 3), "RGBA": ("P6", 4)}
"""By Pillow's mode: the sign of the PNM file that has the same bytes, but for transparency; bytes a pixel."""
_PIXELS = struct.Struct("<III")
_PNM_HEAD = re.compile(rb"P(4(?=\n\d+ \d+\n)|[56](?=\n\d+ \d+\n255\n))\n(\d+) (\d+)\n")
"""The head of the file that raw pixels are read as."""
_PNG_ROWS = {b"4": (1, 0, 1), b"5": (8, 0, 8), b"6": (8, 2, 24)}
"""By kind of PNM: the depth and the type of color of PNG, and bits of a pixel."""


def png_of(data: bytes) -> bytes:
    """Return pixels that are stored raw as a PNG of them; any other picture stays the bytes it is."""
    head = _PNM_HEAD.match(data)
    if head is None:
        return data
    kind, width, height = head[1], int(head[2]), int(head[3])
    depth, color, bits = _PNG_ROWS[kind]
    first, row_bytes = head.end() + (0 if kind == b"4" else len(b"255\n")), (width * bits + 7) // 8
    if len(data) != first + height * row_bytes:
        return data
    rows = np.frombuffer(data, np.uint8, offset=first).reshape(height, row_bytes)
    rows = ~rows if kind == b"4" else rows  # a bit of PBM is black, of PNG white
    pixels = np.pad(rows, ((0, 0), (1, 0))).tobytes()  # each row begins with its filter: none
    size = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    chunks = ((b"IHDR", size), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def pixels_as_files(buffer: Bytes, starts: Ints, lengths: Ints, corrupt: Callable[[str], Exception]) -> Spans:
    """Return the images that `pil` values are, as files that any decoder of images reads.

    A value is `u32 width | u32 height | u32 m | mode, of m bytes | pixels`. `corrupt`: makes the error of a
    reason.
    """
    files = [
        _pnm(buffer[start : start + length], corrupt)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    sizes = np.array([len(file) for file in files], np.int64)
    return Spans(np.frombuffer(b"".join(files), np.uint8), np.cumsum(sizes) - sizes, sizes)


def _pnm(value: Bytes, corrupt: Callable[[str], Exception]) -> bytes:
    if len(value) < _PIXELS.size:
        raise corrupt("pixels of an image are truncated")
    width, height, mode_bytes = _PIXELS.unpack_from(value.data)
    mode = value[_PIXELS.size : _PIXELS.size + mode_bytes].tobytes().decode(errors="backslashreplace")
    pixels = value[_PIXELS.size + mode_bytes :]
    if mode == "1":  # Pillow's bit of a white pixel is 1, that of PBM 0
        pixels, row_bytes, head = ~pixels, -(-width // 8), f"P4\n{width} {height}\n"
    elif mode in _PNM:
        sign, depth = _PNM[mode]
        row_bytes, head = width * depth, f"{sign}\n{width} {height}\n255\n"
    else:
        known = ", ".join(sorted(("1", *_PNM)))
        raise corrupt(f"an image is pixels of Pillow's mode {mode[:20]!r}; those of modes {known} are read")
    if len(pixels) != row_bytes * height or not len(pixels):
        raise corrupt(f"an image of {width} x {height} pixels of mode {mode} has {len(pixels)} bytes")
    if mode == "RGBA":  # as whoever decodes a file with transparency drops it
        pixels = pixels.reshape(-1, 4)[:, :3]
    return head.encode() + pixels.tobytes()


def byte_lists(
    buffer: Bytes,
    starts: Ints,
    lengths: Ints,
    corrupt: Callable[[str], Exception],
    *,
    before: int = 0,
    of_pixels: bool = False,
) -> ByteLists:
    """Return the lists that values are.

    A value is `before` bytes `| u32 n | u32 sizes[n] | items`. `of_pixels`: items are `pil` values.
    `corrupt`: makes the error of a reason.
    """
    if (lengths < before + 4).any():
        raise corrupt("a list is truncated")
    counts = words_at(buffer, starts + before)[:, 0]
    if (before + 4 + 4 * counts > lengths).any():
        raise corrupt("a list has more items than bytes")
    first = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(first, counts)
    sizes = words_at(buffer, np.repeat(starts + before + 4, counts) + 4 * within)[:, 0]
    ends = np.append(0, np.cumsum(sizes))
    item_bytes = ends[first + counts] - ends[first]
    begins = starts + before + 4 + 4 * counts
    if (begins + item_bytes != starts + lengths).any():
        raise corrupt("the items of a list do not take the bytes that it has")
    items = Spans(buffer, np.repeat(begins - ends[first], counts) + ends[:-1], sizes)
    if of_pixels:
        items = pixels_as_files(buffer, items.starts, items.lengths, corrupt)
    return gathered_lists(counts, items)
