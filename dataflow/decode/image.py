"""Decode encoded images of a batch straight into its rows: what `decode={"jpg": Image(size=224, ...)}` does.

`Image` says what is wanted; `decode_images` does it for n images lying in one buffer. No threads here: the
loader calls it from its own. Per image the GIL is given up in two long calls, decode and resize; the rest
is about 15 us of Python. Pixels depend on bytes, `Image` and draws alone, never on the neighbours in a call.
An image that fails is reported and its row is zero; nothing is raised, so one bad image costs one image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.crop import (
    DRAW_FLIP,
    Draws,
    center_boxes,
    column,
    random_resized_crop_boxes,
    whole_boxes,
)
from sharding.errors import DataflowError, SampleError

Crop = Literal["random_resized", "center", "none"]
Failures = list[tuple[int, Exception]]

_MAX_PIXELS = 178_956_970  # Pillow's limit against decompression bombs: 0.5 GB of RGB
_GROUP = 8  # images split into planes in one call; their pixels (1.2 MB at 224) stay in the L2 cache


class MissingImageSupportError(DataflowError, ImportError):
    """The packages that decode images are not installed."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """Decode images to uint8 tensors, cropped and resized on the way.

    Orientation tags are not applied, as in torchvision and WebDataset. CMYK and gray JPEGs become RGB;
    transparency and the second and later frames are dropped.

    Raises:
        ValueError: a setting is out of range, or settings contradict each other.
    """

    size: int | tuple[int, int] | None = None
    """Height and width of the result; one number for a square. None keeps each image's own size."""
    crop: Crop = "none"
    """"random_resized": a random part, as torchvision's RandomResizedCrop. "center": the middle, as Resize
    and CenterCrop. "none": the whole image, resized to `size` whatever its shape."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Least and greatest share of the area, for "random_resized"."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and greatest width / height, for "random_resized"."""
    flip: float = 0.0
    """Probability of mirroring left to right."""
    mode: Literal["RGB", "L"] = "RGB"
    layout: Literal["CHW", "HWC"] = "CHW"
    interpolation: Literal["bilinear", "area"] = "bilinear"
    """"bilinear" as OpenCV's, without anti-aliasing; "area" averages when shrinking, at 3 times the cost."""
    dct: Literal["fast", "exact"] = "fast"
    """"fast": approximate DCT, and JPEGs whose crop is at least twice `size` are decoded at a half, quarter
    or eighth scale. "exact": the pixels that Pillow and torchvision decode."""
    resize_shorter: int | None = None
    """For "center": length of the shorter side that `size` is cut from; default `max(size) * 256 / 224`."""
    strict: bool = True
    """Whether JPEG data that libjpeg can only partly make sense of is an error."""
    max_pixels: int = _MAX_PIXELS
    """Images larger than this are errors, not decoded (for formats other than JPEG, PNG and WebP: decoded
    first, up to OpenCV's own limit of 2^30)."""

    def __post_init__(self) -> None:
        for field, kinds in (("crop", Crop), *_CHOICES):
            if getattr(self, field) not in get_args(kinds):
                choices = ", ".join(repr(kind) for kind in get_args(kinds))
                raise ValueError(f"Image {field} must be one of {choices}, got {getattr(self, field)!r}")
        self._check_sizes()
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"Image scale must be (low, high) with 0 < low <= high <= 1, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1] < float("inf"):
            raise ValueError(f"Image ratio must be (low, high) with 0 < low <= high, got {self.ratio}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"Image flip is a probability in [0, 1], got {self.flip}")
        if self.max_pixels < 1:
            raise ValueError(f"Image max_pixels must be at least 1, got {self.max_pixels}")

    def _check_sizes(self) -> None:
        if self.size is None:
            if self.crop != "none":
                raise ValueError(f"Image crop={self.crop!r} needs a size, for example size=224")
        elif not isinstance(self.size, int) and (isinstance(self.size, str) or len(self.size) != 2):
            raise ValueError(f"Image size must be a number or (height, width), got {self.size!r}")
        elif min(self.height_width) < 1:
            raise ValueError(f"Image size must be at least 1, got {self.size}")
        if self.resize_shorter is not None:
            if self.crop != "center":
                raise ValueError("Image resize_shorter is for crop='center' only")
            if self.resize_shorter < max(self.height_width):
                raise ValueError(
                    f"Image resize_shorter={self.resize_shorter} is less than size {self.size}: "
                    "the crop would reach over the edge"
                )

    @property
    def height_width(self) -> tuple[int, int]:
        """(height, width) of the result. Raises ValueError where size is None."""
        if self.size is None:
            raise ValueError("Image size is None: every image has its own")
        return (self.size, self.size) if isinstance(self.size, int) else (self.size[0], self.size[1])

    @property
    def channels(self) -> int:
        """3 for RGB, 1 for L."""
        return 1 if self.mode == "L" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one result, in the wanted layout. Raises ValueError where size is None."""
        height, width = self.height_width
        return (self.channels, height, width) if self.layout == "CHW" else (height, width, self.channels)

    @property
    def random(self) -> bool:
        """Whether decoding needs draws."""
        return self.crop == "random_resized" or self.flip > 0

    def boxes(self, sizes: NDArray[np.int64], draws: Draws | None) -> NDArray[np.int64]:
        """Crop boxes int64 [n, 4] (top, left, height, width) for images of sizes [n, 2] (height, width)."""
        heights, widths = sizes[:, 0], sizes[:, 1]
        if self.crop == "random_resized":
            return random_resized_crop_boxes(widths, heights, _required(draws), self.scale, self.ratio)
        if self.crop == "center":
            shorter = self.resize_shorter or round(max(self.height_width) * 256 / 224)
            return center_boxes(widths, heights, self.height_width, shorter)
        return whole_boxes(widths, heights)

    def flips(self, n: int, draws: Draws | None) -> NDArray[np.bool_]:
        """Which of n images to mirror, [n]."""
        return column(_required(draws), DRAW_FLIP) < self.flip if self.flip > 0 else np.zeros(n, bool)


_CHOICES = (
    ("mode", Literal["RGB", "L"]),
    ("layout", Literal["CHW", "HWC"]),
    ("interpolation", Literal["bilinear", "area"]),
    ("dct", Literal["fast", "exact"]),
)


def decode_images(
    spec: Image,
    buffer: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[np.uint8],
    draws: Draws | None,
    *,
    name: Callable[[int], str],
) -> Failures:
    """Decode n images lying in `buffer` into the rows of `out`. Thread-safe; releases the GIL.

    Args:
        spec: what is wanted, with a size.
        buffer: uint8 [bytes]; image i is `buffer[starts[i] : starts[i] + lengths[i]]`.
        starts: int64 [n].
        lengths: int64 [n]; -1 where the sample has no image, which is a failure.
        out: C-contiguous uint8 [n, *spec.shape], overwritten.
        draws: random numbers, see `dataflow.decode.crop.Draws`; None will do where `spec.random` is False.
        name: tells the key of image i, for errors.

    Returns:
        (i, SampleError) for each image that could not be decoded, in order; its row of `out` is zero.

    Raises:
        ValueError: `out` has another shape, dtype or memory layout; draws are missing.
        MissingImageSupportError: the extra `image` is not installed.
    """
    codec, hw = _codec(), spec.height_width
    _check_out(spec, out, len(starts))
    images = [buffer[start : start + max(length, 0)] for start, length in zip(starts, lengths, strict=True)]
    sizes, failed = _sizes(images, name, spec.max_pixels)
    boxes = spec.boxes(sizes, draws).tolist()
    flips = spec.flips(len(images), draws).tolist()
    how = codec.Decoding(
        gray=spec.mode == "L", fast=spec.dct == "fast", area=spec.interpolation == "area", strict=spec.strict
    )
    planar = spec.mode == "RGB" and spec.layout == "CHW"
    scratch = np.empty((min(_GROUP, len(out)) if planar else 0, *hw, 3), np.uint8)
    for first in range(0, len(images), _GROUP):
        rows = out[first : first + _GROUP]
        targets = scratch[: len(rows)] if planar else rows.reshape(len(rows), *hw, spec.channels)
        for i, target in enumerate(targets, first):
            try:
                if i not in failed:
                    codec.decode_into(images[i], sizes[i], boxes[i], flips[i], target, how)
            except Exception as error:
                failed[i] = _failure(error, name(i))
            if i in failed:
                target[:] = 0
        if planar:
            codec.split_channels(targets, rows)
    return sorted(failed.items())


def decode_image(
    spec: Image,
    data: bytes | bytearray | memoryview | NDArray[np.uint8],
    draws: Draws | None = None,
    *,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Decode one image: for map-style access, and for images that keep their own size.

    Args:
        spec: what is wanted.
        data: the encoded bytes.
        draws: [1, DRAWS] or a function of the column; None will do where `spec.random` is False.
        out: C-contiguous uint8, of the shape that the result has; None: a new array.

    Returns:
        uint8 [c, h, w] or [h, w, c]: `out`, or a new array.

    Raises:
        SampleError: the image cannot be decoded; whose it is, the caller adds.
        ValueError: draws are missing.
        MissingImageSupportError: the extra `image` is not installed.
    """
    encoded = np.frombuffer(data, np.uint8)
    starts, lengths = np.zeros(1, np.int64), np.array([len(encoded)])
    if spec.size is None:
        spec = of_own_size(spec, encoded)
    image = np.empty(spec.shape, np.uint8) if out is None else out
    failures = decode_images(spec, encoded, starts, lengths, image[None], draws, name=lambda _: "")
    if failures:
        raise failures[0][1]
    return image


def of_own_size(spec: Image, data: NDArray[np.uint8]) -> Image:
    """`spec` with the size that the header of an encoded image, uint8 [bytes], says.

    Raises `SampleError` for what is no image, or too large, and `MissingImageSupportError`.
    """
    sizes, failed = _sizes([data], lambda _: "", spec.max_pixels)
    if failed:
        raise failed[0]
    return replace(spec, size=(int(sizes[0, 0]), int(sizes[0, 1])))


def _sizes(
    images: list[NDArray[np.uint8]], name: Callable[[int], str], max_pixels: float
) -> tuple[NDArray[np.int64], dict[int, Exception]]:
    codec, sizes, failed = _codec(), np.ones((len(images), 2), np.int64), dict[int, Exception]()
    for i, data in enumerate(images):
        try:
            if not len(data):
                raise ValueError("the image is empty or missing")
            height, width = codec.image_size(data)
            if height < 1 or width < 1:
                raise ValueError(f"its header says {height} x {width} pixels")
            if height * width > max_pixels:
                raise ValueError(f"{height} x {width} pixels are more than max_pixels={max_pixels}")
            sizes[i] = height, width
        except Exception as error:
            failed[i] = _failure(error, name(i))
    return sizes, failed


def _failure(error: Exception, key: str) -> SampleError:
    # A traceback holds its frames' locals: views that would keep the whole buffer alive.
    failure = SampleError("", f"cannot decode the image: {error}", key=key, stage="decode")
    failure.__cause__ = error.with_traceback(None)
    return failure


def _check_out(spec: Image, out: NDArray[np.uint8], n: int) -> None:
    if out.shape != (n, *spec.shape) or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(
            f"out must be C-contiguous uint8 {(n, *spec.shape)}, got {out.dtype} {out.shape} "
            f"with strides {out.strides}"
        )


def _required(draws: Draws | None) -> Draws:
    if draws is None:
        raise ValueError("random crops and flips need draws")
    return draws


def _codec() -> ModuleType:
    try:
        from dataflow.decode import jpeg
    except ImportError as error:
        raise MissingImageSupportError(
            f"decoding images needs another package ({error}): pip install 'dataflow-loader[image]'"
        ) from error
    return jpeg
