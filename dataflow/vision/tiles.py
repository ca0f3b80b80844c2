"""Families that see square tiles of pictures: LLaVA, LLaVA-OneVision, Idefics3, SmolVLM and Gemma3.

Sizes, tokens and pixels are those of their processors in transformers, as tests compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate, pad

from dataflow.vision.family import CLIP, HALF, PictureFamily, PicturePlan, channels_first, check_steps
from dataflow.vision.resample import resized

Size = tuple[int, int]
Settings = Mapping[str, Any]
_MOST_SIDE = 4096
"""Pixels along the longer side after the first resize of Idefics3 and SmolVLM, at most."""


@dataclass(frozen=True)
class TileFamily(PictureFamily):
    """A family whose tiles are square, and each of them one row of `pixel_values`."""

    side: int
    """Pixels along each side of a tile."""
    tokens: int
    """Tokens of a tile."""
    mean: tuple[float, ...] = HALF[0]
    std: tuple[float, ...] = HALF[1]

    mode: ClassVar[str] = "bicubic"
    resample: ClassVar[int] = 3
    """Pillow's number of `mode`."""
    processors: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Settings of the processor that no other code here is for."""

    @property
    def row(self) -> tuple[int, ...]:
        """See `PictureFamily`."""
        return (3, self.side, self.side)

    def configured(self, image: Mapping[str, Any], own: Mapping[str, Any], file: Path) -> TileFamily:
        """See `PictureFamily`."""
        check_steps(image, file, self.processors, {"resample": self.resample, **self.fixed})
        size = image.get("size") or {}
        known = {"mean": image.get("image_mean"), "std": image.get("image_std")}
        statistics: dict[str, Any] = {name: tuple(values) for name, values in known.items() if values}
        return replace(self, **statistics, **self._sizes(image, own, size))

    def _sizes(self, image: Settings, own: Settings, size: Settings) -> dict[str, Any]:
        """The fields that a model's settings name."""
        raise NotImplementedError

    def planned(self, sizes: Sequence[Size]) -> list[PicturePlan]:
        """See `PictureFamily`."""
        return [PicturePlan(self.run_token, (self.tokens,), 1, size) for size in sizes]

    def fill(self, pixels: NDArray[np.uint8], plan: PicturePlan, out: Tensor) -> None:
        """See `PictureFamily`."""
        out.copy_(resized(channels_first(pixels), (self.side, self.side), self.mode))

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> TileFamily:
        """See `PictureFamily`. `RuntimeError` where this torch cannot resize as the family does."""
        super().limited(min_pixels, max_pixels)
        try:
            interpolate(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), (4, 4), mode=self.mode, antialias=True)
        except (NotImplementedError, ValueError) as error:
            raise RuntimeError(
                f"the pictures of this family are resized by mode={self.mode!r}, which torch "
                f"{torch.__version__} does not have: install a newer one, such as 2.13"
            ) from error
        return self


@dataclass(frozen=True)
class LlavaFamily(TileFamily):
    """LLaVA-1.5: the shorter side fills the square, the middle of the longer is kept."""

    processors = ("CLIPImageProcessor", "CLIPImageProcessorFast")
    fixed = {"do_center_crop": True}  # noqa: RUF012 - as in the class above

    def _sizes(self, image: Settings, own: Settings, size: Settings) -> dict[str, Any]:
        side = size.get("shortest_edge", 224)
        crop = image.get("crop_size") or {}
        if {crop.get("height", side), crop.get("width", side)} != {side}:
            raise ValueError(f"crop_size={crop!r} is not the square of shortest_edge={side}")
        tokens = (side // (own.get("patch_size") or 14)) ** 2 + own.get("num_additional_image_tokens", 0)
        is_default = own.get("vision_feature_select_strategy") == "default"
        return {"side": side, "tokens": tokens - is_default if own else (side // 14) ** 2}

    def fill(self, pixels: NDArray[np.uint8], plan: PicturePlan, out: Tensor) -> None:
        """See `PictureFamily`."""
        height, width = plan.size
        short, long = sorted((height, width))
        longer = int(self.side * long / short)
        size = (self.side, longer) if height <= width else (longer, self.side)
        top, left = (int((side - self.side) / 2.0) for side in size)
        picture = resized(channels_first(pixels), size, self.mode)
        out.copy_(picture[..., top : top + self.side, left : left + self.side])


@dataclass(frozen=True)
class GemmaFamily(TileFamily):
    """Gemma3: the picture is pressed into the square."""

    processors = ("Gemma3ImageProcessor", "Gemma3ImageProcessorFast")
    fixed = {"do_pan_and_scan": (False, None)}  # noqa: RUF012 - as in the class above
    mode = "bilinear"
    resample = 2
    image_token = "<start_of_image>"
    run_token = "<image_soft_token>"
    video_token = "<end_of_image>"

    def _sizes(self, image: Settings, own: Settings, size: Settings) -> dict[str, Any]:
        if size.get("height") != size.get("width"):
            raise ValueError(f"size={dict(size)!r} is no square")
        return {"side": size.get("height", 224), "tokens": own.get("image_seq_length", self.tokens)}

    def planned(self, sizes: Sequence[Size]) -> list[PicturePlan]:
        """See `PictureFamily`."""
        text = f"\n\n{self.image_token}{self.run_token}{self.video_token}\n\n"
        return [PicturePlan(text, (self.tokens,), 1, size) for size in sizes]


@dataclass(frozen=True)
class OnevisionFamily(TileFamily):
    """LLaVA-OneVision: a picture that is alone in its sample is tiled, several are one tile each."""

    pinpoints: tuple[Size, ...] = ()
    """Heights and widths that a picture may be tiled for."""
    most_tiles: int = 9
    """Features beyond those of so many tiles are pooled."""
    less: int = 0
    """Tokens that the model's strategy leaves out."""

    processors = ("LlavaOnevisionImageProcessor", "LlavaOnevisionImageProcessorFast")
    columns = ("image_sizes",)

    def _sizes(self, image: Settings, own: Settings, size: Settings) -> dict[str, Any]:
        if size.get("height") != size.get("width"):
            raise ValueError(f"size={dict(size)!r} is no square")
        points = image.get("image_grid_pinpoints") or self.pinpoints
        return {
            "side": size.get("height", self.side),
            "tokens": own.get("num_image_tokens") or self.tokens,
            "less": int(own.get("vision_feature_select_strategy") == "default"),
            "most_tiles": int(own.get("vision_aspect_ratio", f"anyres_max_{self.most_tiles}").split("_")[-1]),
            "pinpoints": tuple((high, wide) for high, wide in points),
        }

    def planned(self, sizes: Sequence[Size]) -> list[PicturePlan]:
        """See `PictureFamily`."""
        if len(sizes) != 1:
            tokens = self.tokens + 1 - self.less
            return [PicturePlan(self.run_token, (tokens,), 1, size) for size in sizes]
        high, wide = self._best(sizes[0])
        tiles = (high // self.side) * (wide // self.side)
        tokens = self._features(sizes[0], high // self.side, wide // self.side) - self.less
        return [PicturePlan(self.run_token, (tokens,), 1 + tiles, sizes[0])]

    def _best(self, size: Size) -> Size:
        """The size to tile for that keeps most pixels, and of these the one that wastes least."""

        def merit(point: Size) -> tuple[int, int]:
            scale = min(point[1] / size[1], point[0] / size[0])
            pixels = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
            return pixels, pixels - point[0] * point[1]

        return max(self.pinpoints, key=merit)

    def _features(self, size: Size, down: int, across: int) -> int:
        """Tokens of a tiled picture: without padding, pooled where they are many, a newline a row."""
        each = int(math.sqrt(self.tokens))
        (height, width), (rows, columns) = size, (each * down, each * across)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.most_tiles * each**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows + self.tokens

    def fill(self, pixels: NDArray[np.uint8], plan: PicturePlan, out: Tensor) -> None:
        """See `PictureFamily`."""
        picture, square = channels_first(pixels), (self.side, self.side)
        height, width = plan.size
        if plan.rows == 1 and height != width:
            side = max(height, width)
            colour = torch.tensor([int(value * 255) for value in self.mean], dtype=torch.uint8)
            padded = colour[None, :, None, None].expand(1, 3, side, side).clone()
            top, left = (side - height) // 2, (side - width) // 2
            padded[..., top : top + height, left : left + width] = picture
            picture = padded
        out[:1].copy_(resized(picture, square, self.mode))
        if plan.rows == 1:
            return
        high, wide = self._best(plan.size)
        scales = (wide / width, high / height)
        if scales[0] < scales[1]:
            size = (min(math.ceil(height * scales[0]), high), wide)
        else:
            size = (high, min(math.ceil(width * scales[1]), wide))
        top, left = (high - size[0]) // 2, (wide - size[1]) // 2
        margins = (left, wide - size[1] - left, top, high - size[0] - top)
        tiled = pad(resized(picture, size, self.mode), margins)
        tiles = tiled.view(3, high // self.side, self.side, wide // self.side, self.side)
        out[1:].view(high // self.side, wide // self.side, *self.row).copy_(tiles.permute(1, 3, 0, 2, 4))

    def beside(self, plans: Sequence[PicturePlan]) -> dict[str, Tensor]:
        """See `PictureFamily`."""
        return {"image_sizes": torch.tensor([plan.size for plan in plans], dtype=torch.int64).view(-1, 2)}

    def lengths(self, plans: Sequence[PicturePlan]) -> dict[str, int]:
        """See `PictureFamily`."""
        return {"image_sizes": len(plans)}


@dataclass(frozen=True)
class IdeficsFamily(TileFamily):
    """Idefics3 and SmolVLM: a picture is cut into tiles, and seen as a whole after them."""

    longest: int = 1456
    """Pixels of the longer side, before tiles are cut."""

    processors: ClassVar[tuple[str, ...]] = ("Idefics3ImageProcessor", "Idefics3ImageProcessorFast")
    fixed = {"do_image_splitting": True, "do_pad": True}  # noqa: RUF012 - as in the class above
    mode = "lanczos"
    resample = 1
    columns = ("pixel_attention_mask",)

    def _sizes(self, image: Settings, own: Settings, size: Settings) -> dict[str, Any]:
        tile, longest = image.get("max_image_size") or {}, size.get("longest_edge", self.longest)
        if longest > _MOST_SIDE:
            raise ValueError(f"size={dict(size)!r}; a longest_edge of at most {_MOST_SIDE} is supported")
        return {
            "side": tile.get("longest_edge", self.side),
            "tokens": own.get("image_seq_len") or self.tokens,
            "longest": longest,
        }

    def planned(self, sizes: Sequence[Size]) -> list[PicturePlan]:
        """See `PictureFamily`."""
        return [self._planned(size) for size in sizes]

    def _planned(self, size: Size) -> PicturePlan:
        _, (high, wide) = self._steps(size)
        down, across = high // self.side, wide // self.side
        fake, run = "<fake_token_around_image>", self.run_token
        text = f"{fake}<global-img>{run}{fake}"
        if down * across == 1:
            return PicturePlan(text, (self.tokens,), 1, size)
        rows = (
            "".join(f"{fake}<row_{row}_col_{column}>{run}" for column in range(1, across + 1)) + "\n"
            for row in range(1, down + 1)
        )
        tiles = down * across + 1
        return PicturePlan("".join(rows) + "\n" + text, (self.tokens,) * tiles, tiles, size)

    def _steps(self, size: Size) -> tuple[Size, Size]:
        """The sizes that a picture gets one after the other: by its longer side, and in whole tiles."""
        height, width = size
        ratio = width / height
        if width >= height:
            wide = self.longest
            high = int(wide / ratio)
            high += high % 2
        else:
            high = self.longest
            wide = int(high * ratio)
            wide += wide % 2
        high, wide = max(high, 1), max(wide, 1)
        first = (high, wide)
        ratio = wide / high
        if wide >= high:
            wide = math.ceil(wide / self.side) * self.side
            high = math.ceil(int(wide / ratio) / self.side) * self.side
        else:
            high = math.ceil(high / self.side) * self.side
            wide = math.ceil(int(high * ratio) / self.side) * self.side
        return first, (high, wide)

    def fill(self, pixels: NDArray[np.uint8], plan: PicturePlan, out: Tensor) -> None:
        """See `PictureFamily`."""
        first, second = self._steps(plan.size)
        picture = resized(resized(channels_first(pixels), first, self.mode), second, self.mode)
        out[-1:].copy_(resized(picture, (self.side, self.side), self.mode))
        if plan.rows > 1:
            down, across = second[0] // self.side, second[1] // self.side
            tiles = picture.contiguous().view(3, down, self.side, across, self.side)
            out[:-1].view(down, across, *self.row).copy_(tiles.permute(1, 3, 0, 2, 4))

    def beside(self, plans: Sequence[PicturePlan]) -> dict[str, Tensor]:
        """See `PictureFamily`."""
        rows = sum(plan.rows for plan in plans)
        return {"pixel_attention_mask": torch.ones(rows, self.side, self.side, dtype=torch.int64)}

    def lengths(self, plans: Sequence[PicturePlan]) -> dict[str, int]:
        """See `PictureFamily`."""
        return {"pixel_attention_mask": sum(plan.rows for plan in plans)}


@dataclass(frozen=True)
class SmolFamily(IdeficsFamily):
    """SmolVLM, whose processor has a name of its own."""

    processors = ("SmolVLMImageProcessor", "SmolVLMImageProcessorFast", *IdeficsFamily.processors)


_EDGES = range(384, 2305, 384)
TILE_FAMILIES: dict[str, TileFamily] = {
    "llava": LlavaFamily(336, 576, *CLIP),
    "llava_onevision": OnevisionFamily(
        384, 729, *CLIP, tuple((high, wide) for high in _EDGES for wide in _EDGES)
    ),
    "idefics3": IdeficsFamily(364, 169),
    "smolvlm": SmolFamily(384, 81, longest=1536),
    "gemma3": GemmaFamily(896, 256),
}
"""Families by name, with the settings that their models were published with."""
