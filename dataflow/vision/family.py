"""Families of models: tokens, sizes of pictures, patches and positions, each as its processor has them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.text.tokenizer import read_regular

_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_MOST_RATIO = 200
"""Most times that a picture may be longer than wide: processors refuse more."""
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}
_PROCESSORS = {"Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"}


class VisionFamily(NamedTuple):
    """The settings of one processor of Qwen's kind."""

    patch: int
    merge: int
    """Patches along each side of the square that is one token."""
    temporal: int
    """Times that a patch holds its pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min_pixels: int
    max_pixels: int
    image_token: str = "<|image_pad|>"
    video_token: str = "<|video_pad|>"

    @property
    def values(self) -> int:
        """Levels of a patch, without repetition."""
        return 3 * self.patch**2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Patches (down, across) of a picture of so many pixels. `ValueError` for one that is too long."""
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise ValueError(
                f"{height} x {width} pixels: one side is more than {_MOST_RATIO} times the other"
            )
        factor = self.patch * self.merge
        rows, columns = (max(0, round(side / factor)) * factor for side in (height, width))
        if rows * columns > self.max_pixels:
            beta = math.sqrt(height * width / self.max_pixels)
            rows, columns = (
                max(factor, math.floor(side / beta / factor) * factor) for side in (height, width)
            )
        elif rows * columns < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * beta / factor) * factor for side in (height, width))
        if not rows * columns:
            raise ValueError(f"{height} x {width} pixels are less than one token; give a larger min_pixels=")
        return rows // self.patch, columns // self.patch

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Tokens of a picture of so many patches."""
        return grid[0] * grid[1] // self.merge**2

    def patches(self, pixels: NDArray[np.uint8], grid: tuple[int, int], out: Tensor) -> None:
        """Resize a picture and cut it into patches.

        Args:
            pixels: [height, width, 3].
            grid: patches down and across.
            out: uint8 [patches, 3 * patch * patch], overwritten.
        """
        size = (grid[0] * self.patch, grid[1] * self.patch)
        picture = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        if picture.shape[2:] != size:
            picture = torch.nn.functional.interpolate(picture, size, mode="bicubic", antialias=True)
        down, across, merge, side = grid[0] // self.merge, grid[1] // self.merge, self.merge, self.patch
        squares = picture.contiguous().view(3, down, merge, side, across, merge, side)
        out.view(down, across, merge, merge, 3, side, side).copy_(squares.permute(1, 4, 2, 5, 0, 3, 6))

    def normalized(self, patches: Tensor) -> Tensor:
        """Return patches as the model takes them: float32, normalised, repeated in time.

        Args:
            patches: uint8 [patches, 3 * patch * patch], on any device.

        Returns:
            float32 [patches, 3 * temporal * patch * patch].
        """
        mean, std = (
            (torch.tensor(values) * (1.0 / (1 / 255)))[:, None].to(patches.device)
            for values in (self.mean, self.std)
        )
        levels = patches.view(len(patches), 3, self.patch**2).to(torch.float32).sub_(mean).div_(std)
        repeated = levels[:, :, None].expand(-1, -1, self.temporal, -1)
        return repeated.reshape(len(patches), self.temporal * self.values)


FAMILIES = {
    "qwen2_5_vl": VisionFamily(14, 2, 2, *_CLIP, 4 * 28**2, 16384 * 28**2),
    "qwen3_vl": VisionFamily(16, 2, 2, *_HALF, 1 << 16, 1 << 24),
    "qwen3_5": VisionFamily(16, 2, 2, *_HALF, 1 << 16, 1 << 24),
}
"""Families by name, with the settings that their models were published with."""


def family_of(name: str, folder: Path, min_pixels: int | None, max_pixels: int | None) -> VisionFamily:
    """The settings of a family's processor: those of `preprocessor_config.json` where the folder has one.

    `ValueError` for a family that is not supported, and for settings that no code here is for.
    """
    if name not in FAMILIES:
        raise ValueError(
            f"family={name!r} is not supported, only {', '.join(FAMILIES)}: call the model's own "
            "processor in a transform of yours"
        )
    family = FAMILIES[name]
    file = folder / "preprocessor_config.json"
    nested = folder / "processor_config.json"
    if file.exists():
        family = _configured(family, json.loads(read_regular(file)), file)
    elif nested.exists() and (config := json.loads(read_regular(nested)).get("image_processor")):
        family = _configured(family, config, nested)
    family = family._replace(
        min_pixels=family.min_pixels if min_pixels is None else min_pixels,
        max_pixels=family.max_pixels if max_pixels is None else max_pixels,
    )
    token_pixels = (family.patch * family.merge) ** 2
    if not 1 <= family.min_pixels <= family.max_pixels or family.max_pixels < token_pixels:
        raise ValueError(
            f"min_pixels={family.min_pixels} and max_pixels={family.max_pixels}: these are pixels, the "
            f"former not more than the latter, and that at least the {token_pixels} of one token"
        )
    return family


def _configured(family: VisionFamily, config: Mapping[str, Any], file: Path) -> VisionFamily:
    """The family with a model's own settings, and the defaults of the processor's class beside."""
    kind = config.get("image_processor_type", "Qwen2VLImageProcessor")
    if kind not in _PROCESSORS:
        raise ValueError(f"{file} is for {kind}, not for one of {', '.join(sorted(_PROCESSORS))}")
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise ValueError(f"{file} says {key}={config[key]!r}; only {value!r} is supported")
    if abs(config.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise ValueError(f"{file} says rescale_factor={config['rescale_factor']!r}; only 1/255 is supported")
    size = config.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    least = config.get("min_pixels") or size.get("shortest_edge")
    most = config.get("max_pixels") or size.get("longest_edge")
    if least is None or most is None:
        raise ValueError(f"{file} says size={size!r}; shortest_edge and longest_edge are wanted")
    return family._replace(
        patch=config.get("patch_size", 14),
        merge=config.get("merge_size", 2),
        temporal=config.get("temporal_patch_size", 2),
        mean=tuple(config.get("image_mean") or _CLIP[0]),
        std=tuple(config.get("image_std") or _CLIP[1]),
        min_pixels=least,
        max_pixels=most,
    )
