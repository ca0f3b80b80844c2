"""Crop boxes of a whole batch at once, from given random numbers: the part of each image that is wanted.

A box is `(top, left, height, width)` in pixels of the encoded image. Everything here is a pure function of
image sizes and draws in [0, 1), so the same sample gets the same crop in any batch, on any rank and after any
restart.
`random_resized_crop_boxes` is torchvision's RandomResizedCrop (Szegedy et al. 2014): up to ten tries of an
area and a log-uniform aspect ratio, then the largest central crop whose ratio is allowed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.values import DRAWS, Draws
from sharding.spans import Ints

ATTEMPTS = 10
DRAW_TOP, DRAW_LEFT, DRAW_FLIP = 2 * ATTEMPTS, 2 * ATTEMPTS + 1, 2 * ATTEMPTS + 2
assert DRAW_FLIP < DRAWS, "two draws for each try, then top, left and flip; the last says where clips begin"


def random_resized_crop_boxes(
    widths: Ints,
    heights: Ints,
    draws: Draws,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Ints:
    """Random crops covering a `scale` share of the area, with aspect ratios (w / h) within `ratio`.

    Args:
        widths: [n] image widths in pixels, at least 1.
        heights: [n] image heights in pixels, at least 1.
        draws: [n, DRAWS] random numbers in [0, 1).
        scale: least and greatest share of the image's area.
        ratio: least and greatest width / height.

    Returns:
        int64 [n, 4]: top, left, height, width of each box, inside its image.
    """
    # All tries of all images at once: for a few images the calls cost, not the numbers.
    h, w = _tries(widths * heights, draws, scale, ratio)
    fits = (w > 0) & (w <= widths[:, None]) & (h > 0) & (h <= heights[:, None])
    rows, first = np.arange(len(widths)), fits.argmax(axis=1)
    h, w = h[rows, first], w[rows, first]
    top, left = _below(draws[:, DRAW_TOP], heights - h + 1), _below(draws[:, DRAW_LEFT], widths - w + 1)
    boxes = np.stack([top, left, h, w], axis=1)
    none = np.flatnonzero(~fits[rows, first])
    if len(none):
        wide, high = widths[none], heights[none]
        h, w = _largest_allowed(wide, high, ratio)
        boxes[none] = np.stack([(high - h) // 2, (wide - w) // 2, h, w], axis=1)
    return boxes


def center_boxes(
    widths: Ints, heights: Ints, size: tuple[int, int], resize_shorter: int
) -> NDArray[np.float64]:
    """The central crops that resizing the shorter side to `resize_shorter` and cutting out `size` would show.

    The crop is taken before the resize, which costs less. It is the same part to a fraction of a pixel, with
    the roundings of torchvision's Resize and CenterCrop.

    Returns:
        float64 [n, 4]: top, left, height, width.
    """
    shorter = np.minimum(widths, heights)
    boxes = np.empty((len(widths), 4))
    for axis, (lengths, target) in enumerate(((heights, size[0]), (widths, size[1]))):
        resized = (resize_shorter * lengths / shorter).astype(np.int64)
        boxes[:, axis] = np.rint((resized - target) / 2) * lengths / resized
        boxes[:, axis + 2] = target * lengths / resized
    return boxes


def _tries(
    areas: Ints, draws: Draws, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Ints, Ints]:
    """Height and width of every try, [n, ATTEMPTS] each."""
    tries = draws[:, : 2 * ATTEMPTS].reshape(-1, ATTEMPTS, 2)
    area = areas[:, None] * _between(tries[:, :, 0], *scale)
    low, high = np.log(ratio)
    aspect = np.exp(_between(tries[:, :, 1], low, high))
    return np.rint(np.sqrt(area / aspect)).astype(np.int64), np.rint(np.sqrt(area * aspect)).astype(np.int64)


def _largest_allowed(widths: Ints, heights: Ints, ratio: tuple[float, float]) -> tuple[Ints, Ints]:
    # At least one pixel: torchvision would make an empty crop of a 1-pixel side under ratios below a half.
    aspect = widths / heights
    tall = np.maximum(np.rint(widths / ratio[0]).astype(np.int64), 1)
    wide = np.maximum(np.rint(heights * ratio[1]).astype(np.int64), 1)
    return np.where(aspect < ratio[0], tall, heights), np.where(aspect > ratio[1], wide, widths)


def _between(u: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    return low + u * (high - low)


def _below(u: NDArray[np.float64], bound: Ints) -> Ints:
    # Never the bound itself: the last number below 1 leaves the product at least half an ulp below it.
    return (u * bound).astype(np.int64)
