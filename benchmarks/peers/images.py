"""The one image transform that every contestant runs: decode, random-resized crop to 224, uint8.

libjpeg-turbo through simplejpeg, then OpenCV's bilinear resize of the crop (a view, no copy); torchvision's
crop rule with its default scale and ratio. Both release the GIL. Batches stay HWC in memory and are
delivered as a `[n, 3, 224, 224]` view (channels last), which spares every contestant a transposition.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import cv2
import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray

SIZE = 224
cv2.setNumThreads(0)  # the contestants' own workers are the parallelism


def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """(left, top, width, height) of a random-resized crop: area 8-100 %, aspect 3/4-4/3, ten tries."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def decode_crop_resize(jpeg: bytes | memoryview | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """JPEG bytes -> uint8 [224, 224, 3]."""
    pixels = simplejpeg.decode_jpeg(jpeg)
    left, top, w, h = crop_box(pixels.shape[1], pixels.shape[0])
    return cv2.resize(pixels[top : top + h, left : left + w], (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)


def image_batch(
    images: Sequence[NDArray[np.uint8]], labels: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack HWC images into the delivered form: a [n, 3, 224, 224] uint8 view, and int64 [n] labels."""
    batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return batch, torch.as_tensor(labels, dtype=torch.int64)
