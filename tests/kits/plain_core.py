"""What the compiled core does, in numpy and plain loops: the oracle of its tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dataflow.decode import image
from dataflow.stream import decisions
from prefetch.addresses import memory_at
from prefetch.core.copy_table import PlanColumn
from prefetch.core.images import CropBox, Filter, ImageForm
from prefetch.core.kernels import Kernels
from sharding.order.permutations import seeded_permutations


def copied(column: PlanColumn) -> NDArray[np.uint8]:
    """The bytes of `out` once the column was copied, row by row."""
    assert column.out is not None
    out = column.out.reshape(-1).view(np.uint8).copy()
    for row, index in enumerate(column.index.tolist()):
        nbytes = column.each if column.lengths is None else int(column.lengths[row])
        value = memory_at(column.base + column.step * index, nbytes)
        if column.widen:
            value = value.copy().view(column.widen).astype(np.int64).view(np.uint8)
        at = row * column.row_bytes if column.offsets is None else int(column.offsets[row])
        out[at : at + len(value)] = value
    return out


def run(num_rows: int, columns: Sequence[PlanColumn]) -> NDArray[np.uint8]:
    """What `Executor.run` does, where all values can be read."""
    for column in columns:
        assert column.out is not None
        column.out.reshape(-1).view(np.uint8)[:] = copied(column)
    return np.zeros(num_rows, np.uint8)


def interleave(columns: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
    np.stack(columns, axis=-1, out=out)


def use_plain_core(patch: pytest.MonkeyPatch) -> None:
    """From now on loaders of this process do without compiled code, but for looking at files."""
    patch.setattr(decisions, "_are_copies", lambda _: False)  # they are plans of whole chunks then
    patch.setattr(Kernels, "run", lambda _, num_rows, columns: run(num_rows, columns))
    patch.setattr(Kernels, "interleave", lambda _, columns, out: interleave(columns, out))
    patch.setattr(image, "_resizer", lambda spec: partial(resize, spec.form()))
    patch.setattr(Kernels, "seeded_permutations", staticmethod(seeded_permutations))


# ---- images ------------------------------------------------------------------------------------------------

_WEIGHT_BITS, _BETWEEN_BITS = 14, 6


def resize(
    form: ImageForm, pixels: NDArray[np.uint8], crop: CropBox, out: NDArray[np.uint8 | np.float32]
) -> None:
    """What `Resizer` does."""
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
