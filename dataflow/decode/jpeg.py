"""Encoded bytes to pixels: libjpeg-turbo (simplejpeg) for JPEG, OpenCV for everything else.

Both release the GIL for the whole of a decode. JPEG is decoded strictly: what libjpeg merely warns about
(premature end, corrupt data) is an error here, because those pixels are wrong. Two warnings are of files
whose pixels are right as a rule, as COCO and ImageNet have some, and only remarked on: bytes left over before
the end mark, which many cameras and editors leave (and some damage does), and a missing end mark. Orientation
tags are not applied. Only JPEG is scaled while decoding, and only by exact halves, which have SIMD code in
libjpeg-turbo.

Measured on 140 ImageNet files (1.07 ms each): OpenCV 0.95x, Pillow 0.81x, pyvips region 0.6x. nvImageCodec's
region decode is 1.25x and exact, but returns wrong pixels for corrupt entropy data without an error.

This module needs the extra `image`; import it where it is used.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import simplejpeg

from sharding.spans import Bytes

if find_spec("cv2") is None:  # it is imported where it is used: that takes as long as decoding 30 images
    raise ImportError("No module named 'cv2'")

Pixels = Bytes

_LEFTOVER = re.compile(r"\d+ extraneous bytes before marker 0xd9$")
_END_MARK = np.array([0xFF, 0xD9], np.uint8)


@dataclass(frozen=True)
class Decoding:
    """The settings by which bytes become pixels."""

    gray: bool
    fast: bool
    """Approximate DCT, and half, quarter or eighth scale where the result is that much smaller."""
    strict: bool | None
    """True if what libjpeg only warns about is an error; None: but for leftover bytes and the end mark."""


def is_jpeg(data: Pixels) -> bool:
    """Return whether the bytes start as a JPEG does."""
    return len(data) > 2 and bool(data[0] == 0xFF and data[1] == 0xD8)


def image_size(data: Pixels) -> tuple[int, int]:
    """(height, width) of an encoded image from its header; about 3 us for JPEG.

    Formats whose header is not known here (other than JPEG, PNG and WebP) are decoded to learn it.

    Raises:
        ValueError: not an image, or its header is damaged.
    """
    if is_jpeg(data):
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        except KeyError as error:  # of a header that ends too early simplejpeg looks up the subsampling -1
            raise ValueError("its JPEG header is damaged or truncated") from error
        return int(height), int(width)
    head = data[:30].tobytes()
    if head[:8] == b"\x89PNG\r\n\x1a\n" and len(head) >= 24:
        width, height = struct.unpack_from(">II", head, 16)
        return height, width
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) == 30:
        return _webp_size(head)
    height, width = _decode_other(data, gray=True).shape[:2]
    return height, width


class Decoded(NamedTuple):
    """The pixels of a decoded JPEG."""

    pixels: Pixels
    """uint8 [h, w, 3], or [h, w, 1] for gray."""
    shrink: int
    """By how much they are fewer along each side than the header says."""
    remark: str
    """An oddity of the file, one of a few texts; "": none."""


def decode_pixels(data: Pixels, size: tuple[int, int], how: Decoding, shrink: int = 1) -> Decoded:
    """Decode one image.

    Args:
        data: the encoded bytes, 1-D.
        size: (height, width) as `image_size` gave it.
        how: colour, speed and strictness.
        shrink: 1, 2, 4 or 8. JPEG only: h and w are size / shrink, rounded up.

    Raises:
        ValueError: the bytes are damaged, truncated, or not what the header says.
    """
    h, w = -(-size[0] // shrink), -(-size[1] // shrink)
    pixels, remark = _decode_other(data, gray=how.gray) if not is_jpeg(data) else None, ""
    if pixels is None:
        decode = partial(
            simplejpeg.decode_jpeg,
            colorspace="GRAY" if how.gray else "RGB",
            fastdct=how.fast,
            min_height=h if shrink > 1 else 0,
            min_width=w if shrink > 1 else 0,
            min_factor=shrink,
        )
        pixels, remark = _decode_jpeg(decode, data, how.strict)
    if pixels.shape != (h, w, 1 if how.gray else 3):
        raise ValueError(f"decoded to {pixels.shape}, its header says {(h, w)}")
    return Decoded(pixels, shrink, remark)


def _decode_jpeg(decode: Callable[..., Pixels], data: Pixels, strict: bool | None) -> tuple[Pixels, str]:
    """The pixels, and what is odd about the file.

    libjpeg tells its first warning. One about the end mark is the last that there can be, so no other hides
    behind it.
    """
    if strict is False:
        return decode(data, strict=False), ""
    try:
        return decode(data, strict=True), ""
    except ValueError as error:
        reason = str(error)  # no more of it: its traceback would keep the image's bytes
    if strict is None and _LEFTOVER.search(reason):
        return decode(data, strict=False), "leftover bytes before the end mark"
    if strict is None and "Premature end" in reason:
        with suppress(ValueError):
            return decode(np.concatenate([data, _END_MARK]), strict=True), "no end mark"
    with suppress(ValueError):
        decode(data, strict=False)
        reason += "; Image(strict=False) delivers what can be made of it"
    raise ValueError(reason)


def decode_part(
    data: Pixels, size: tuple[int, int], box: tuple[float, ...], target: tuple[int, int], how: Decoding
) -> Decoded:
    """Decode an image of which a part becomes a result.

    Args:
        data: the encoded bytes, 1-D.
        size: (height, width) as `image_size` gave it.
        box: the part: top, left, height, width.
        target: (height, width) of the result.
        how: colour, speed and strictness.

    Raises:
        ValueError: as `decode_pixels`.
    """
    shrink = 1
    if how.fast and is_jpeg(data):  # the greatest halving that leaves the part as large as the result
        shrink = next((s for s in (8, 4, 2) if box[2] >= s * target[0] and box[3] >= s * target[1]), 1)
    return decode_pixels(data, size, how, shrink)


def _decode_other(data: Pixels, *, gray: bool) -> Pixels:
    import cv2

    color = cv2.IMREAD_GRAYSCALE if gray else cv2.IMREAD_COLOR_RGB
    pixels = cv2.imdecode(data, color | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        raise ValueError("not an image, or damaged or truncated")
    return np.atleast_3d(pixels).astype(np.uint8, copy=False)


def _webp_size(head: bytes) -> tuple[int, int]:
    kind = head[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(head[offset : offset + 3], "little") + 1 for offset in (24, 27))
    elif kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", head, 26))
    return height, width
