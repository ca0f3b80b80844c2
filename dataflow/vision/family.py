"""Families of Qwen's kind: tokens, sizes of pictures and patches, as their processors have them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_MOST_RATIO = 200
"""Most times that a picture may be longer than wide: processors refuse more."""
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")


class PicturePlan(NamedTuple):
    """One picture of a sample, before its pixels are there."""

    text: str
    """The text in place of the picture's token."""
    runs: tuple[int, ...]
    """The times that each `run_token` in `text` is repeated."""
    rows: int
    """Its rows of `pixel_values`."""
    size: tuple[int, int]
    """(height, width): in pixels, of Qwen's kind in patches."""


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
    def run_token(self) -> str:
        """The token that is repeated for a picture."""
        return self.image_token

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of pictures beside `pixel_values`."""
        return ("image_grid_thw",)

    @property
    def has_positions(self) -> bool:
        """Return whether tokens have positions in three dimensions."""
        return True

    @property
    def settings(self) -> tuple[Any, ...]:
        """All that decides about its samples."""
        return tuple(self)

    @property
    def values(self) -> int:
        """Levels of a patch, without repetition."""
        return 3 * self.patch**2

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row of levels."""
        return (self.values,)

    @property
    def normalized_row(self) -> tuple[int, ...]:
        """The shape of a row that is normalised."""
        return (self.temporal * self.values,)

    def planned(self, sizes: Sequence[tuple[int, int]]) -> list[PicturePlan]:
        """A plan for each picture of a sample, of these heights and widths. `ValueError` for one too long."""
        plans = []
        for number, size in enumerate(sizes):
            try:
                grid = self.grid(*size)
            except ValueError as error:
                raise ValueError(f"picture {number}: {error}") from error
            tokens, patches = self.num_tokens(grid), grid[0] * grid[1]
            plans.append(PicturePlan(self.image_token, (tokens,), patches, grid))
        return plans

    def fill(self, pixels: NDArray[np.uint8], plan: PicturePlan, out: Tensor) -> None:
        """Write a picture's patches, uint8 [rows, values]."""
        self.patches(pixels, plan.size, out)

    def beside(self, plans: Sequence[PicturePlan]) -> dict[str, Tensor]:
        """The columns of pictures beside `pixel_values`."""
        grids = [(1, *plan.size) for plan in plans]
        return {"image_grid_thw": torch.tensor(grids, dtype=torch.int64).view(-1, 3)}

    def lengths(self, plans: Sequence[PicturePlan]) -> dict[str, int]:
        """The lengths of these columns."""
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
        line = np.dtype((np.void, side))  # so many bytes are moved at a time
        squares = picture.contiguous().numpy().view(line).reshape(3, down, merge, side, across, merge)
        patches = out.numpy().view(line).reshape(down, across, merge, merge, 3, side)
        np.copyto(patches, squares.transpose(1, 4, 2, 5, 0, 3))

    def normalized(self, patches: Tensor, out: Tensor | None = None) -> Tensor:
        """Return patches as the model takes them: float32, normalised, repeated in time.

        Args:
            patches: uint8 [patches, 3 * patch * patch], on any device.
            out: where they go.

        Returns:
            float32 [patches, 3 * temporal * patch * patch].
        """
        shape = (len(patches), 3, self.temporal, self.patch**2)
        if out is None:
            out = torch.empty(shape, device=patches.device)
        for own, part in blocks(patches.view(len(patches), 3, 1, shape[-1]), out.view(shape)):
            part.copy_(standardized(own, self.mean, self.std))
        return out.view(len(patches), self.temporal * self.values)

    def configured(self, image: Mapping[str, Any], own: Mapping[str, Any], file: Path) -> VisionFamily:
        """The family with a model's own settings, and the defaults of the processor's class beside."""
        check_steps(image, file, _PROCESSORS, {"resample": 3})
        size = image.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        least = image.get("min_pixels") or size.get("shortest_edge")
        most = image.get("max_pixels") or size.get("longest_edge")
        if least is None or most is None:
            raise ValueError(f"{file} says size={size!r}; shortest_edge and longest_edge are wanted")
        return self._replace(
            patch=image.get("patch_size", 14),
            merge=image.get("merge_size", 2),
            temporal=image.get("temporal_patch_size", 2),
            mean=tuple(image.get("image_mean") or CLIP[0]),
            std=tuple(image.get("image_std") or CLIP[1]),
            min_pixels=least,
            max_pixels=most,
        )

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> VisionFamily:
        """The family with other bounds of a picture's pixels. `ValueError` for bounds that are none."""
        family = self._replace(
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


_BLOCK = 1 << 18
"""Elements that stay in a core's cache from one step to the next."""


def blocks(levels: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of both, a few at a time on a CPU."""
    rows = max(1, _BLOCK * len(levels) // max(1, levels.numel())) if levels.is_cpu else max(1, len(levels))
    return zip(levels.split(rows), out.split(rows), strict=True)


def standardized(levels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Levels, uint8 [rows, 3, x, y], as processors of pictures normalise them: float32."""
    shifts, scales = (
        (torch.tensor(values) * (1.0 / (1 / 255)))[:, None, None].to(levels.device) for values in (mean, std)
    )
    return levels.to(torch.float32).sub_(shifts).div_(scales)


def check_steps(image: Mapping[str, Any], file: Path, kinds: Sequence[str], fixed: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a processor of pictures, as a file describes it, that no code here is for.

    Args:
        image: its settings.
        file: where they come from.
        kinds: the classes that are supported.
        fixed: settings that must be so where they are given; a tuple: one of these values.
    """
    kind = image.get("image_processor_type", kinds[0])
    if kind not in kinds:
        raise ValueError(f"{file} is for {kind}, not for one of {', '.join(sorted(kinds))}")
    for key, value in {**_FIXED, **fixed}.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if image.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{file} says {key}={image[key]!r}; only {allowed[0]!r} is supported")
    if abs(image.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise ValueError(f"{file} says rescale_factor={image['rescale_factor']!r}; only 1/255 is supported")


QWEN_FAMILIES = {
    "qwen2_5_vl": VisionFamily(14, 2, 2, *CLIP, 4 * 28**2, 16384 * 28**2),
    "qwen3_vl": VisionFamily(16, 2, 2, *HALF, 1 << 16, 1 << 24),
    "qwen3_5": VisionFamily(16, 2, 2, *HALF, 1 << 16, 1 << 24),
}
"""Families by name, with the settings that their models were published with."""
