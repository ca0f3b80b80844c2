"""Resize pictures with the levels of torch's `interpolate` with antialias, in less than half of its time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from sharding.core.library import address_of, library

_REACH = {"bilinear": 1, "bicubic": 2}
"""Pixels to each side that a filter looks at: the modes that the core has."""


def resized(picture: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Resize uint8 [1, 3, height, width] to `size`."""
    if tuple(picture.shape[2:]) == size:
        return picture
    out = torch.empty((1, 3, *size), dtype=torch.uint8)
    return out if _resize(picture, size, mode, size, 1, out) else _by_torch(picture, size, mode)


def resized_patches(picture: Tensor, size: tuple[int, int], side: int, merge: int, out: Tensor) -> None:
    """Resize a picture by the bicubic filter and cut it into square patches.

    Args:
        picture: uint8 [1, 3, height, width].
        size: its new height and width, multiples of `side * merge`.
        side: pixels along each side of a patch.
        merge: patches along each side of a square of them; those of a square follow one another.
        out: uint8 [patches, 3 * side * side], contiguous, overwritten.
    """
    if _resize(picture, size, "bicubic", (side, side), merge, out):
        return
    if tuple(picture.shape[2:]) != size:
        picture = _by_torch(picture, size, "bicubic")
    down, across = size[0] // side // merge, size[1] // side // merge
    line = np.dtype((np.void, side))  # so many bytes are moved at a time
    squares = picture.contiguous().numpy().view(line).reshape(3, down, merge, side, across, merge)
    patches = out.numpy().view(line).reshape(down, across, merge, merge, 3, side)
    np.copyto(patches, squares.transpose(1, 4, 2, 5, 0, 3))


def _by_torch(picture: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    return interpolate(picture, size, mode=mode, antialias=True)


def _resize(
    picture: Tensor, size: tuple[int, int], mode: str, patch: tuple[int, int], merge: int, out: Tensor
) -> bool:
    """Return whether the core has done it: it takes pixels of three bytes in a row, and needs AVX2."""
    _, plane, row, pixel = picture.stride()
    if mode not in _REACH or (plane, pixel) != (1, 3):
        return False
    assert picture.dtype == out.dtype == torch.uint8
    assert out.is_contiguous()
    assert out.numel() == 3 * size[0] * size[1]
    of_picture = picture.data_ptr(), *picture.shape[2:], row
    job = np.array([*of_picture, *size, _REACH[mode], *patch, merge, out.data_ptr()], np.int64)
    status = library().core_patches(address_of(job))
    if status < 0:
        raise MemoryError(f"there is no memory for resizing a picture to {size[0]} x {size[1]} pixels")
    return not status
