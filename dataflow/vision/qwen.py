"""Families of Qwen's kind: a picture is patches of one size, as many as its pixels fill."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.vision.family import CLIP, HALF, PictureFamily, PicturePlan, channels_first, check_steps
from dataflow.vision.resample import resized_patches

_MOST_RATIO = 200
"""Most times that a picture may be longer than wide: processors refuse more."""
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")


@dataclass(frozen=True, kw_only=True)
class VisionFamily(PictureFamily):
    """The settings of one processor of Qwen's kind."""

    patch: int
    merge: int = 2
    """Patches along each side of the square that is one token."""
    temporal: int = 2
    """Times that a patch holds its pixels."""
    mean: tuple[float, ...] = HALF[0]
    std: tuple[float, ...] = HALF[1]
    min_pixels: int
    max_pixels: int

    image_token = "<|image_pad|>"
    run_token = "<|image_pad|>"
    video_token = "<|video_pad|>"
    columns = ("image_grid_thw",)
    has_positions = True

    @property
    def settings(self) -> tuple[Any, ...]:
        """See `PictureFamily`; the tokens are a part of fingerprints."""
        return (*super().settings, self.image_token, self.video_token)

    @property
    def row(self) -> tuple[int, ...]:
        """See `PictureFamily`; without repetition in time."""
        return (3 * self.patch**2,)

    @property
    def normalized_row(self) -> tuple[int, ...]:
        """See `PictureFamily`."""
        return (self.temporal * 3 * self.patch**2,)

    def planned(self, sizes: Sequence[tuple[int, int]]) -> list[PicturePlan]:
        """See `PictureFamily`."""
        plans = []
        for number, size in enumerate(sizes):
            try:
                grid = self.grid(*size)
            except ValueError as error:
                raise ValueError(f"picture {number}: {error}") from error
            patches = grid[0] * grid[1]
            plans.append(PicturePlan(self.image_token, (patches // self.merge**2,), patches, grid))
        return plans

    def fill(self, pixels: NDArray[np.uint8], plan: PicturePlan, out: Tensor) -> None:
        """See `PictureFamily`."""
        size = (plan.size[0] * self.patch, plan.size[1] * self.patch)
        resized_patches(channels_first(pixels), size, self.patch, self.merge, out)

    def beside(self, plans: Sequence[PicturePlan]) -> dict[str, Tensor]:
        """See `PictureFamily`."""
        grids = [(1, *plan.size) for plan in plans]
        return {"image_grid_thw": torch.tensor(grids, dtype=torch.int64).view(-1, 3)}

    def lengths(self, plans: Sequence[PicturePlan]) -> dict[str, int]:
        """See `PictureFamily`."""
        return {"image_grid_thw": len(plans)}

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

    def _shaped(self, levels: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """See `PictureFamily`: patches are repeated in time."""
        rows, area = len(levels), self.patch**2
        return levels.view(rows, 3, 1, area), out.view(rows, 3, self.temporal, area)

    def configured(self, image: Mapping[str, Any], own: Mapping[str, Any], file: Path) -> VisionFamily:
        """See `PictureFamily`; the defaults of the processor's class stand beside."""
        check_steps(image, file, _PROCESSORS, {"resample": 3})
        size = image.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        least = image.get("min_pixels") or size.get("shortest_edge")
        most = image.get("max_pixels") or size.get("longest_edge")
        if least is None or most is None:
            raise ValueError(f"{file} says size={size!r}; shortest_edge and longest_edge are wanted")
        return replace(
            self,
            patch=image.get("patch_size", 14),
            merge=image.get("merge_size", 2),
            temporal=image.get("temporal_patch_size", 2),
            mean=tuple(image.get("image_mean") or CLIP[0]),
            std=tuple(image.get("image_std") or CLIP[1]),
            min_pixels=least,
            max_pixels=most,
        )

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> VisionFamily:
        """See `PictureFamily`."""
        family = replace(
            self,
            min_pixels=self.min_pixels if min_pixels is None else min_pixels,
            max_pixels=self.max_pixels if max_pixels is None else max_pixels,
        )
        token_pixels = (family.patch * family.merge) ** 2
        if not 1 <= family.min_pixels <= family.max_pixels or family.max_pixels < token_pixels:
            raise ValueError(
                f"min_pixels={family.min_pixels} and max_pixels={family.max_pixels}: these are pixels, the "
                f"former not more than the latter, and that at least the {token_pixels} of one token"
            )
        return family


QWEN_FAMILIES = {
    "qwen2_5_vl": VisionFamily(
        patch=14, mean=CLIP[0], std=CLIP[1], min_pixels=4 * 28**2, max_pixels=16384 * 28**2
    ),
    "qwen3_vl": VisionFamily(patch=16, min_pixels=1 << 16, max_pixels=1 << 24),
    "qwen3_5": VisionFamily(patch=16, min_pixels=1 << 16, max_pixels=1 << 24),
}
"""Families by name, with the settings that their models were published with."""
