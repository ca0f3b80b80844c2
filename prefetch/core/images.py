"""Describe how decoded images become results: the form that `Executor.resizer` takes.

A resize is two passes of weighted sums: rows of the image are blended first, then columns. Weights have 14
bits, and what lies between the passes 6 bits below one level. All sums are of integers, so that results are
the same on every processor, to the bit.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


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
