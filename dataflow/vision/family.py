"""A family of models by its processor: the tokens, sizes and levels that pictures become."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
_BLOCK = 1 << 18
"""Elements that stay in a core's cache from one step to the next."""


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


class PictureFamily(ABC):
    """The settings of one processor, a frozen dataclass, and what it makes of pictures."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_token: ClassVar[str] = "<image>"
    """The token that stands for a picture in the template's text."""
    run_token: ClassVar[str] = "<image>"
    """The token that is repeated for a picture."""
    video_token: ClassVar[str] = "<video>"
    columns: ClassVar[tuple[str, ...]] = ()
    """The columns of pictures beside `pixel_values`."""
    has_positions: ClassVar[bool] = False
    """True if tokens have positions in three dimensions."""

    @property
    def settings(self) -> tuple[Any, ...]:
        """All that decides about its samples."""
        return astuple(self)  # type: ignore[call-overload,no-any-return]

    @property
    @abstractmethod
    def row(self) -> tuple[int, ...]:
        """The shape of a row of levels."""

    @property
    def normalized_row(self) -> tuple[int, ...]:
        """The shape of a row that is normalised."""
        return self.row

    @abstractmethod
    def planned(self, sizes: Sequence[tuple[int, int]]) -> list[PicturePlan]:
        """A plan for each picture of a sample, of these heights and widths. `ValueError` for one too long."""

    @abstractmethod
    def fill(self, pixels: NDArray[np.uint8], plan: PicturePlan, out: Tensor) -> None:
        """Write a picture's rows of levels, uint8 [rows, *row]."""

    def beside(self, plans: Sequence[PicturePlan]) -> dict[str, Tensor]:
        """The columns of pictures beside `pixel_values`."""
        return {}

    def lengths(self, plans: Sequence[PicturePlan]) -> dict[str, int]:
        """The lengths of these columns."""
        return {}

    def normalized(self, levels: Tensor, out: Tensor | None = None) -> Tensor:
        """Return levels as the model takes them: float32 [rows, *normalized_row].

        Args:
            levels: uint8 [rows, *row], on any device.
            out: where they go.
        """
        shape = (len(levels), *self.normalized_row)
        if out is None:
            out = torch.empty(shape, device=levels.device)
        shifts, scales = (
            (torch.tensor(values) * (1.0 / (1 / 255)))[:, None, None].to(levels.device)
            for values in (self.mean, self.std)
        )
        source, target = self._shaped(levels, out)
        each = max(1, _BLOCK // math.prod(self.row) if levels.is_cpu else len(levels))
        for rows, part in zip(source.split(each), target.split(each), strict=True):
            part.copy_(rows.to(torch.float32).sub_(shifts).div_(scales))
        return out

    def _shaped(self, levels: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Views [rows, 3, x, y], to the second of which the first may be broadcast."""
        return levels, out

    @abstractmethod
    def configured(self, image: Mapping[str, Any], own: Mapping[str, Any], file: Path) -> PictureFamily:
        """The family with a model's settings: of its processor of images, and of its own."""

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> PictureFamily:
        """The family with other bounds of a picture's pixels. `ValueError` for bounds that are none."""
        if min_pixels is not None or max_pixels is not None:
            raise ValueError("min_pixels= and max_pixels= are of Qwen's families; this one has one size")
        return self


def channels_first(pixels: NDArray[np.uint8]) -> Tensor:
    """A picture [height, width, 3] as [1, 3, height, width], without a copy."""
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


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
