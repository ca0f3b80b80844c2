"""How decoded images become results: the form that `Executor.resizer` takes, and numpy's resizer.

A resize is two passes of weighted sums: rows of the image are blended first, then columns. Weights have 14
bits, and what lies between the passes 6 bits below one level. All sums are of integers, so that numpy's
results are those of `resize.c`, to the bit.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Filter(IntEnum):
    """How pixels are weighed, as in core.h."""

    BILINEAR = 0
    BICUBIC = 1
    AREA = 2
    """The mean of what a pixel of the result covers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageForm:
    """What results are like."""

    height: int
    width: int
    channels: int = 3
    """1 to 4."""
    filter: Filter = Filter.BILINEAR
    antialias: bool = False
    """Whether the filter grows with the pixels of a result that is smaller than its part of the image."""
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
        """Of results."""
        return np.dtype(np.uint8 if self.numbers is None else np.float32)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a result."""
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
    """Whether to mirror left to right."""


class Resizer(Protocol):
    """Makes results of one form. Thread-safe."""

    def __call__(self, pixels: NDArray[np.uint8], crop: CropBox, out: NDArray[np.uint8 | np.float32]) -> None:
        """Resize a part of an image into `out`, C-contiguous, of the form's shape and dtype.

        `pixels`, uint8 [h, w, channels]: only rows may lie apart.
        """
        ...


_WEIGHT_BITS, _BETWEEN_BITS = 14, 6


def resize_by_numpy(
    form: ImageForm, pixels: NDArray[np.uint8], crop: CropBox, out: NDArray[np.uint8 | np.float32]
) -> None:
    """See `Resizer`. Slower than `resize.c`."""
    top, left, bottom, right = crop.within
    rows, row_weights = _taps(form, crop.top, crop.height, (top, bottom), form.height)
    columns, column_weights = _taps(form, crop.left, crop.width, (left, right), form.width)
    if crop.flip:
        columns, column_weights = columns[::-1], column_weights[::-1]
    between = _sums(pixels[:, left:right], rows, row_weights, _WEIGHT_BITS - _BETWEEN_BITS)
    sums = _sums(between.swapaxes(0, 1), columns - left, column_weights, _WEIGHT_BITS + _BETWEEN_BITS)
    levels = np.clip(sums, 0, 255).astype(np.uint8)  # [width, height, channels]
    planar = levels.transpose(2, 1, 0)
    values = planar if form.numbers is None else _numbers(form.numbers, planar)
    np.copyto(out, values if form.planar else values.transpose(1, 2, 0))


def _numbers(numbers: NDArray[np.float32], planar: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.stack([own[levels] for own, levels in zip(numbers, planar, strict=True)])


def _taps(
    form: ImageForm, start: float, length: float, within: tuple[int, int], n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first pixel of each of n results [n], and the weights of it and of those that follow [n, taps]."""
    scale = length / n
    stretch = scale if form.antialias and scale > 1 else 1.0
    centres = start + (np.arange(n) + 0.5) * scale
    if form.filter is Filter.AREA:
        reach = scale / 2
        first, end = np.floor(centres - reach), np.ceil(centres + reach)
    else:
        reach = (1 if form.filter is Filter.BILINEAR else 2) * stretch
        first, end = np.floor(centres - reach + 0.5), np.floor(centres + reach + 0.5)
    first = np.clip(first, within[0], within[1] - 1)
    end = np.minimum(np.maximum(end, first + 1), within[1])
    k = first[:, None] + np.arange(int((end - first).max()))
    if form.filter is Filter.AREA:
        edges = centres[:, None] + np.array([-reach, reach])
        weights = np.minimum(k + 1, edges[:, 1:]) - np.maximum(k, edges[:, :1])
    else:
        weights = _weights(form.filter, np.abs((k - centres[:, None] + 0.5) / stretch))
    weights[k >= end[:, None]] = 0
    # Rounded sums, and not rounded weights: however many there are, they add up to one.
    so_far = np.cumsum(weights, axis=1)
    rounded = np.rint(so_far / so_far[:, -1:] * (1 << _WEIGHT_BITS)).astype(np.int64)
    return first.astype(np.int64), np.diff(rounded, axis=1, prepend=0)


def _weights(kind: Filter, x: NDArray[np.float64]) -> NDArray[np.float64]:
    if kind is Filter.BILINEAR:
        return np.where(x < 1, 1 - x, 0)
    # Keys, "Cubic convolution interpolation for digital image processing" (1981), with a = -0.5
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _sums(
    values: NDArray[np.integer[Any]], first: NDArray[np.int64], weights: NDArray[np.int64], shift: int
) -> NDArray[np.int32]:
    """[n, ...]: sums over the first dimension, of which the last `shift` bits are rounded off."""
    shape = (len(first), *values.shape[1:])
    sums = np.full(shape, 1 << (shift - 1), np.int32)
    for k in range(weights.shape[1]):
        taken = values[np.minimum(first + k, len(values) - 1)]
        sums += taken * weights[:, k].astype(np.int32).reshape(-1, *[1] * (values.ndim - 1))
    return sums >> shift
