"""Encoded pictures of a sample: where they lie in it, their size from the header, and their pixels.

Pixels are those of Pillow's `convert("RGB")` for JPEG, for PNG with 8 bits and for WebP, bit for bit, as
tests compare. CMYK JPEG and PNG with 16 bits differ by the conversion that libjpeg or OpenCV makes. Of
animations the first frame counts; transparency is dropped.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.image import Image, MissingImageSupportError, of_own_size
from sharding.errors import SampleError

_MEMBER = re.compile(r"(\d+)\.(?:jpe?g|png|webp)", re.IGNORECASE)
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_ORIENTATION = 0x0112
_SPEC = Image(dct="exact")


class Picture:
    """One encoded picture.

    Args:
        data: the file's bytes, uint8 [bytes].
        upright: whether it is turned as its EXIF orientation says.

    Raises `ValueError` for what is no picture or too large, and `MissingImageSupportError`.
    """

    def __init__(self, data: NDArray[np.uint8], upright: bool) -> None:
        self._data = data
        self._orientation = orientation(data.data) if upright else 1
        try:
            self._stored_size = of_own_size(_SPEC, data).height_width
        except SampleError as error:
            raise ValueError(error.reason) from error

    @property
    def size(self) -> tuple[int, int]:
        """(height, width), in pixels."""
        height, width = self._stored_size
        return (width, height) if self._orientation >= 5 else (height, width)

    def pixels(self) -> NDArray[np.uint8]:
        """uint8 [height, width, 3]. `ValueError` for damaged data."""
        from dataflow.decode.jpeg import Decoding, decode_pixels

        pixels = decode_pixels(
            self._data, self._stored_size, Decoding(gray=False, fast=False, strict=None)
        ).pixels
        return np.ascontiguousarray(_turned(pixels, self._orientation))


def _turned(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return the picture upright, as Pillow's `exif_transpose` has it."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels


def orientation(data: memoryview) -> int:
    """The EXIF orientation of a JPEG, PNG or WebP, 1 to 8; 1 where there is none, or none that is valid."""
    xmp = b""
    for kind, payload in _metadata(data):
        if kind == "exif":
            try:
                found = _tiff_orientation(payload)
            except struct.error:
                found = None
            if found is not None:
                return found if 1 <= found <= 8 else 1
        else:
            xmp = xmp or payload
    match = _XMP_ORIENTATION.search(xmp)
    found = int(match[1]) if match else 1
    return found if 1 <= found <= 8 else 1


def _metadata(data: memoryview) -> Iterator[tuple[str, bytes]]:
    """EXIF ("exif", TIFF bytes) and XMP ("xmp", XML) of a file, as far as it is whole."""
    head = bytes(data[:12])
    if head[:2] == b"\xff\xd8":
        at = 2
        while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
            length = int.from_bytes(data[at + 2 : at + 4], "big")
            if data[at + 1] == 0xE1:
                payload = bytes(data[at + 4 : at + 2 + length])
                if payload[:6] == b"Exif\0\0":
                    yield "exif", payload[6:]
                elif payload.startswith(_XMP):
                    yield "xmp", payload[len(_XMP) :]
            at += 2 + length
    elif head[:8] == b"\x89PNG\r\n\x1a\n":
        for name, chunk in _chunks(data, 8, ">I4s", lambda length: length + 12):
            if name == b"eXIf":
                yield "exif", _bare(bytes(chunk))
            elif name == b"iTXt" and bytes(chunk[:17]) == b"XML:com.adobe.xmp":
                yield "xmp", bytes(chunk)
    elif head[:4] == b"RIFF" and head[8:] == b"WEBP":
        for name, chunk in _chunks(data, 12, "<4sI", lambda length: length + length % 2 + 8):
            if name == b"EXIF":
                yield "exif", _bare(bytes(chunk))
            elif name == b"XMP ":
                yield "xmp", bytes(chunk)


def _chunks(data: memoryview, at: int, head: str, step: Any) -> Iterator[tuple[bytes, memoryview]]:
    while at + 8 <= len(data):
        first, second = struct.unpack_from(head, data, at)
        kind, length = (first, second) if isinstance(first, bytes) else (second, first)
        yield kind, data[at + 8 : at + 8 + length]
        at += step(length)


def _bare(exif: bytes) -> bytes:
    return exif.removeprefix(b"Exif\0\0")


def _tiff_orientation(tiff: bytes) -> int | None:
    """The orientation in EXIF data; None: it has none. `struct.error` where it is cut off."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return None
    (at,) = struct.unpack_from(order + "I", tiff, 4)
    (entries,) = struct.unpack_from(order + "H", tiff, at)
    for entry in range(at + 2, at + 2 + 12 * entries, 12):
        tag, kind = struct.unpack_from(order + "HH", tiff, entry)
        if tag == _ORIENTATION:
            return int(struct.unpack_from(order + ("H" if kind == 3 else "I"), tiff, entry + 8)[0])
    return None


def pictures_of(sample: Mapping[str, Any], column: str, upright: bool) -> list[Picture]:
    """The pictures of a sample, in order. `ValueError` names the one that is bad.

    They are a list in `column`, or members `0.jpg`, `1.png` ... where the sample has no such column.
    """
    if column in sample:
        values = sample[column]
        names = None
    else:
        names = picture_members(sample)
        values = [sample[name] for name in names]
    if values is None:
        return []
    if not isinstance(values, list | tuple):
        values = [values]
    pictures = []
    for number, value in enumerate(values):
        try:
            pictures.append(Picture(_bytes_of(value), upright))
        except MissingImageSupportError:
            raise
        except ValueError as error:
            raise ValueError(f"picture {names[number] if names else number}: {error}") from error
    return pictures


def picture_members(sample: Mapping[str, Any]) -> list[str]:
    """The names of a sample's columns that are pictures by number, in their order."""
    numbers = {name: int(match[1]) for name in sample if (match := _MEMBER.fullmatch(name))}
    return sorted(numbers, key=lambda name: numbers[name])


def _bytes_of(value: object) -> NDArray[np.uint8]:
    if isinstance(value, Mapping):
        path, value = value.get("path"), value.get("bytes")
        if value is None:
            raise ValueError(
                f"it has no bytes, only the path {path!r}, and nothing is fetched: store the bytes"
            )
    if isinstance(value, Tensor):
        value = value.numpy()
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1:
        return np.ascontiguousarray(value)
    if isinstance(value, np.ndarray) and value.ndim > 1:
        raise ValueError(
            "it is decoded already: give decode={'images': None} (its column), so that the file's bytes come"
        )
    raise ValueError(f"it is {type(value).__name__}, not the bytes of a file")
