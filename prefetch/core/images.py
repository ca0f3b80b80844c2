"""Make results of decoded images: their form, and the part of an image that becomes one.

A resize is two passes of weighted sums: rows of the image are blended first, then columns. Weights have 14
bits, and what lies between the passes 6 bits below one level. All sums are of integers, so that results are
the same on every processor, to the bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from sharding.core.library import address_of, library


class Filter(IntEnum):
    """The weights of pixels, as in core.h."""

    BILINEAR = 0
    BICUBIC = 1
    AREA = 2
    """The mean of what a pixel of the result covers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageForm:
    """The form of results."""

    height: int
    width: int
    channels: int = 3
    """The number of channels, 1 to 4."""
    filter: Filter = Filter.BILINEAR
    antialias: bool = False
    """True if the filter grows with the pixels of a result that is smaller than its part of the image."""
    planar: bool = True
    """Results are [channels, height, width], else [height, width, channels]."""
    numbers: NDArray[np.float32] | None = None
    """[channels, 256]: what becomes of each level. None: results are the levels, uint8."""

    def __post_init__(self) -> None:
        numbers, shape = self.numbers, (self.channels, 256)
        if numbers is not None and (numbers.shape != shape or not numbers.flags.c_contiguous):
            raise ValueError(f"numbers must be C-contiguous {shape}, got {numbers.shape}")

    @property
    def dtype(self) -> np.dtype[np.uint8 | np.float32]:
        """Return the dtype of results."""
        return np.dtype(np.uint8 if self.numbers is None else np.float32)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of a result."""
        height, width, channels = self.height, self.width, self.channels
        return (channels, height, width) if self.planar else (height, width, channels)


@dataclass(frozen=True, slots=True)
class CropBox:
    """The part of an image that becomes a result."""

    top: float
    left: float
    height: float
    width: float
    _: KW_ONLY
    within: tuple[int, int, int, int]
    """Top, left, bottom and right of the pixels that a filter may look at; the part lies in them."""
    flip: bool = False
    """True if to mirror left to right."""


class _Form(ctypes.Structure):
    """The struct `core_form` of core.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("channels", "height", "width", "filter", "antialias", "planar")
        ),
        ("numbers", ctypes.c_void_p),
    )


class _Image(ctypes.Structure):
    """The struct `core_image` of core.h."""

    _fields_ = (
        ("pixels", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("top", "left", "height", "width")),
        *(
            (name, ctypes.c_int64)
            for name in ("least_row", "past_row", "least_column", "past_column", "flip")
        ),
        ("out", ctypes.c_void_p),
    )


class Resizer:
    """Makes results of one form of decoded images. Thread-safe."""

    def __init__(self, form: ImageForm) -> None:
        numbers = form.numbers
        self._resize, self._form = library().core_resize, form
        self._table = _Form(
            form.channels,
            form.height,
            form.width,
            form.filter,
            form.antialias,
            form.planar,
            None if numbers is None else address_of(numbers),
        )

    def __call__(self, pixels: NDArray[np.uint8], crop: CropBox, out: NDArray[np.uint8 | np.float32]) -> None:
        """Resize a part of an image into `out`, C-contiguous, of the form's shape and dtype.

        `pixels`, uint8 [h, w, channels]: only rows may lie apart.
        """
        top, left, bottom, right = crop.within
        image = _Image(
            address_of(pixels),
            pixels.strides[0],
            crop.top,
            crop.left,
            crop.height,
            crop.width,
            top,
            bottom,
            left,
            right,
            crop.flip,
            address_of(out),
        )
        if self._resize(ctypes.byref(image), ctypes.byref(self._table)):
            raise MemoryError(f"no memory to resize to {self._form.shape}")
