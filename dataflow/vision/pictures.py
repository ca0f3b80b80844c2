"""Encoded pictures of a sample: where they lie in it, their size from the header, and their pixels.

Pixels are those of Pillow's `convert("RGB")` for JPEG, for PNG with 8 bits and for WebP, bit for bit, as
tests compare. CMYK JPEG and colour PNG with 16 bits differ by rounding; gray PNG with 16 bits is scaled,
where Pillow clips. Of animations the first frame counts; transparency is dropped.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.image import Image, MissingImageSupportError, of_own_size
from sharding.errors import SampleError

_MEMBER = re.compile(r"(\d+)\.(?:jpe?g|png|webp)", re.IGNORECASE)
_PNG_METADATA = (b"eXIf", b"iTXtXML:com", b"iTXtRaw profile", b"tEXtRaw profile", b"zTXtRaw profile")
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
        try:
            self._stored_size = of_own_size(_SPEC, data).height_width
        except SampleError as error:
            raise ValueError(error.reason) from error
        self._orientation = orientation(data) if upright else 1

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


def orientation(data: NDArray[np.uint8]) -> int:
    """The orientation of a JPEG, PNG or WebP by EXIF or XMP, 1 to 8; 1 where there is none that is valid."""
    if not _has_metadata(data.data):
        return 1
    try:
        with pillow().open(io.BytesIO(data.data), formats=("JPEG", "PNG", "WEBP")) as image:
            value = image.getexif().get(_ORIENTATION, 1)
    except (OSError, SyntaxError, ValueError, struct.error):
        return 1  # what is damaged shows when it is decoded
    return value if value in range(1, 9) else 1


def _has_metadata(data: memoryview) -> bool:
    """Return whether a file may have an orientation: it is slow to open, and a PNG is decoded for it."""
    head = bytes(data[:16])
    if head[:2] == b"\xff\xd8":  # parts up to the pixels (DA); E1 has EXIF or XMP
        offset = 2
        while offset + 4 <= len(data) and data[offset] == 0xFF and data[offset + 1] not in (0xDA, 0xE1):
            offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
        return bytes(data[offset : offset + 2]) == b"\xff\xe1"
    if head[:4] == b"\x89PNG":
        offset = 8
        while offset + 8 <= len(data) and not bytes(data[offset + 4 : offset + 25]).startswith(_PNG_METADATA):
            offset += 12 + int.from_bytes(data[offset : offset + 4], "big")
        return offset + 8 <= len(data)
    return head[12:] == b"VP8X"


def pillow() -> ModuleType:
    """Pillow's `Image`; `MissingImageSupportError` where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingImageSupportError(
            f"the pictures of chats need another package ({error}): pip install 'dataflow-loader[image]'"
        ) from error
    return Image


def pixels_of(pictures: Sequence[Picture]) -> Iterator[NDArray[np.uint8]]:
    """The pixels of each picture. `ValueError` names the one that is damaged."""
    for number, picture in enumerate(pictures):
        try:
            yield picture.pixels()
        except ValueError as error:
            raise ValueError(f"picture {number}: {error}") from error


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
