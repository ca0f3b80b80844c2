"""Decode encoded images of a batch straight into its rows: what `decode={"jpg": Image(size=224, ...)}` does.

`Image` says what is wanted; `decode_images` does it for n images lying in one buffer. No threads here: the
loader calls it from its own. Per image the GIL is given up in two long calls, decode and resize (by the
executor of build plans); the rest is about 20 us of Python. Results depend on bytes, `Image` and draws alone,
never on the neighbours in a call. An image that fails is reported and its row is zero; nothing is raised, so
one bad image costs one image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.crop import DRAW_FLIP, center_boxes, random_resized_crop_boxes
from dataflow.decode.values import Draws
from prefetch.core.images import CropBox, Filter, ImageForm, Resizer
from sharding.cached_property import cached_property
from sharding.errors import DataflowError, SampleError
from sharding.spans import Bytes, Ints

Crop = Literal["random_resized", "center", "none"]
Failures = list[tuple[int, Exception]]

_MAX_PIXELS = 178_956_970  # Pillow's limit against decompression bombs: 0.5 GB of RGB

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Deviations of red, green and blue of ImageNet's training images, in [0, 1], which pretrained models
expect."""


class MissingImageSupportError(DataflowError, ImportError):
    """The packages that decode images are not installed."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """Decode images to tensors, cropped, resized and normalised on the way; uint8 without `mean`.

    Orientation tags are not applied, as in torchvision and WebDataset. CMYK and gray JPEGs become RGB;
    transparency and the second and later frames are dropped.

    Args:
        size: height and width of the result; one number for a square. None keeps each image's own size.
        crop: "random_resized": a random part, as torchvision's RandomResizedCrop. "center": the middle, as
            Resize and CenterCrop. "none": the whole image, resized to `size` whatever its shape.
        scale: least and greatest share of the area, for "random_resized".
        ratio: least and greatest width / height, for "random_resized".
        flip: probability of mirroring left to right.
        mode: channels of the result: three colours ("RGB") or one of brightness ("L").
        layout: order of the dimensions of the result: "CHW", as models of torch take them, or "HWC".
        interpolation: "bilinear" looks at 4 pixels and "bicubic" at 16; with `antialias` at all that a pixel
            of the result covers, and some around it. "area" averages those that it covers.
        antialias: resize as Pillow and torchvision do (its `antialias=True`): an image that shrinks is
            smoothed.
        mean: with `std`: results are float32, (level / 255 - mean) / std, a number for each channel.
        std: deviations that go with `mean`, a number for each channel.
        dct: "fast": approximate DCT, and JPEGs whose crop is at least twice `size` are decoded at a half,
            quarter or eighth scale. "exact": the pixels that Pillow and torchvision decode.
        resize_shorter: for "center": length of the shorter side that `size` is cut from; default `max(size) *
            256 / 224`.
        strict: True if JPEG data that libjpeg only warns about is an error. None: yes, but for leftover bytes
            before the end mark and a missing end mark, which are delivered, counted in `stats()`, and warned
            of once.
        max_pixels: images larger than this are errors, not decoded (for formats other than JPEG, PNG and
            WebP: decoded first, up to OpenCV's own limit of 2^30).

    Raises:
        ValueError: a setting is out of range, or settings contradict each other.

    Examples:
        >>> image = Image(size=224, crop="random_resized", flip=0.5)
        >>> dataset = ShardedDataset("images/*.tar", decode={"jpg": image})
        >>> dataset[0]["jpg"].shape
        torch.Size([3, 224, 224])
    """

    output_by: ClassVar[str] = "dataflow.outputs.images:image_output"
    takes_lists: ClassVar[bool] = True

    size: int | tuple[int, int] | None = None
    crop: Crop = "none"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.0
    mode: Literal["RGB", "L"] = "RGB"
    layout: Literal["CHW", "HWC"] = "CHW"
    interpolation: Literal["bilinear", "bicubic", "area"] = "bilinear"
    antialias: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    dct: Literal["fast", "exact"] = "fast"
    resize_shorter: int | None = None
    strict: bool | None = None
    max_pixels: int = _MAX_PIXELS

    def __post_init__(self) -> None:
        for name in ("size", "scale", "ratio", "mean", "std"):  # lists, too: what is frozen has a hash
            if isinstance(value := getattr(self, name), list | np.ndarray):
                object.__setattr__(self, name, tuple(value))
        for field, kinds in (("crop", Crop), *_CHOICES):
            if getattr(self, field) not in get_args(kinds):
                choices = ", ".join(repr(kind) for kind in get_args(kinds))
                raise ValueError(f"Image {field} must be one of {choices}, got {getattr(self, field)!r}")
        self._check_sizes()
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"Image scale must be (low, high) with 0 < low <= high <= 1, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1] < float("inf"):
            raise ValueError(f"Image ratio must be (low, high) with 0 < low <= high, got {self.ratio}")
        if self.antialias and self.interpolation == "area":
            raise ValueError('Image antialias goes with "bilinear" and "bicubic": "area" averages by itself')
        self._check_numbers()
        if not 0 <= self.flip <= 1:
            raise ValueError(f"Image flip is a probability in [0, 1], got {self.flip}")
        if self.max_pixels < 1:
            raise ValueError(f"Image max_pixels must be at least 1, got {self.max_pixels}")

    @classmethod
    def for_training(cls, size: int | tuple[int, int] = 224, **settings: Any) -> Image:
        """Decode as torchvision's reference for ImageNet trains: a random part, mirrored or not, normalised.

        `settings` are those of `Image` and take the place of the preset's.
        """
        return cls(**{**_TORCHVISION, "size": size, "crop": "random_resized", "flip": 0.5, **settings})

    @classmethod
    def for_evaluation(cls, size: int | tuple[int, int] = 224, **settings: Any) -> Image:
        """Decode as torchvision's `ImageClassification` preset: the middle of the resized image, normalised.

        The shorter side is resized to 256 for a `size` of 224, and in this proportion for others, unless
        `resize_shorter` says otherwise. `settings` are those of `Image` and take the place of the preset's.
        """
        return cls(**{**_TORCHVISION, "size": size, "crop": "center", "dct": "exact", **settings})

    def _check_numbers(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise ValueError("Image mean and std go together")
        if self.mean is None or self.std is None:
            return
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(
                f"Image mean and std need {self.channels} numbers with mode={self.mode!r}, "
                f"got {self.mean} and {self.std}"
            )
        if not np.isfinite([*self.mean, *self.std]).all() or min(self.std) <= 0:
            raise ValueError(f"Image mean must be finite and std greater than 0, got {self.mean}, {self.std}")

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

    @cached_property
    def height_width(self) -> tuple[int, int]:
        """(height, width) of the result. Raises ValueError where size is None."""
        if self.size is None:
            raise ValueError("Image size is None: every image has its own")
        return (self.size, self.size) if isinstance(self.size, int) else (self.size[0], self.size[1])

    @property
    def channels(self) -> int:
        """3 for RGB, 1 for L."""
        return 1 if self.mode == "L" else 3

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one result, in the wanted layout. Raises ValueError where size is None."""
        height, width = self.height_width
        return (self.channels, height, width) if self.layout == "CHW" else (height, width, self.channels)

    @property
    def dtype(self) -> str:
        """The dtype of results: "uint8" or "float32"."""
        return "uint8" if self.mean is None else "float32"

    def form(self) -> ImageForm:
        """Return what results are like. Raises ValueError where size is None."""
        height, width = self.height_width
        numbers = None
        if self.mean is not None and self.std is not None:
            levels = np.arange(256, dtype=np.float32) / np.float32(255)
            mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
            numbers = (levels - mean) / std
        return ImageForm(
            height=height,
            width=width,
            channels=self.channels,
            filter=Filter[self.interpolation.upper()],
            antialias=self.antialias,
            planar=self.layout == "CHW",
            numbers=numbers,
        )

    @property
    def random(self) -> bool:
        """Return whether decoding needs draws."""
        return self.crop == "random_resized" or self.flip > 0

    def boxes(self, sizes: Ints, draws: Draws | None) -> Ints | NDArray[np.float64]:
        """Crop boxes [n, 4] (top, left, height, width) for images of sizes [n, 2] (height, width)."""
        heights, widths = sizes[:, 0], sizes[:, 1]
        if self.crop == "random_resized":
            return random_resized_crop_boxes(widths, heights, _required(draws), self.scale, self.ratio)
        if self.crop == "center":
            shorter = self.resize_shorter or round(max(self.height_width) * 256 / 224)
            return center_boxes(widths, heights, self.height_width, shorter)
        whole = np.zeros((len(sizes), 4), np.int64)
        whole[:, 2:] = sizes
        return whole

    def flips(self, n: int, draws: Draws | None) -> NDArray[np.bool_]:
        """Return which of n images to mirror, [n]."""
        return _required(draws)[:, DRAW_FLIP] < self.flip if self.flip > 0 else np.zeros(n, bool)


_CHOICES = (
    ("mode", Literal["RGB", "L"]),
    ("layout", Literal["CHW", "HWC"]),
    ("interpolation", Literal["bilinear", "bicubic", "area"]),
    ("dct", Literal["fast", "exact"]),
)
_TORCHVISION: dict[str, Any] = {"antialias": True, "mean": IMAGENET_MEAN, "std": IMAGENET_STD}


def decode_images(
    spec: Image,
    images: Sequence[Bytes],
    out: Sequence[NDArray[Any]] | NDArray[Any],
    draws: Draws | None,
    *,
    remark: Callable[[int, str], None] = lambda i, text: None,
) -> Failures:
    """Decode n images, each into its place in `out`. Thread-safe; releases the GIL.

    Args:
        spec: what is wanted, with a size.
        images: the encoded bytes of each, [n].
        out: where each goes, overwritten: [n], each C-contiguous `spec.shape` of `spec.dtype`.
        draws: random numbers, see `dataflow.decode.crop.Draws`; None will do where `spec.random` is False.
        remark: is told what is odd about image i, which is decoded all the same.

    Returns:
        (i, SampleError) for each image that could not be decoded, in order; it is zero in `out`. Whose
        it is, the caller adds.

    Raises:
        ValueError: `out` has another shape, dtype or memory layout; draws are missing.
        MissingImageSupportError: the extra `image` is not installed.
    """
    codec, target = _codec(), spec.height_width
    _check_out(spec, out, len(images))
    sizes, failed = _sizes(images, spec.max_pixels)
    boxes: list[list[float]] = spec.boxes(sizes, draws).tolist()
    flips: list[bool] = spec.flips(len(images), draws).tolist()
    how = codec.Decoding(gray=spec.mode == "L", fast=spec.dct == "fast", strict=spec.strict)
    resize = _resizer(spec)
    # A filter looks at the image beside a part that is cut out of its resized image, as in torchvision.
    looks_beside = spec.crop == "center"
    for i, (size, box) in enumerate(zip(sizes.tolist(), boxes, strict=True)):
        try:
            if i not in failed:
                pixels, shrink, odd = codec.decode_part(images[i], size, box, target, how)
                part = (0.0, 0.0, *size) if looks_beside else box
                resize(pixels, _crop_box(box, part, shrink, flip=flips[i]), out[i])
                if odd:
                    remark(i, odd)
        except Exception as error:
            failed[i] = _failure(error)
        if i in failed:
            out[i][...] = 0
    return sorted(failed.items())


def resize_part(
    spec: Image, size: tuple[int, int], draws: Draws | None
) -> Callable[[Bytes, NDArray[Any]], None]:
    """Return a function that resizes pixels, uint8 [height, width, channels] of this size: one part of each.

    The second argument is what it writes: C-contiguous, `spec.shape`. `draws`: [1, DRAWS], of all of them.
    """
    (box,) = spec.boxes(np.array([size], np.int64), draws).tolist()
    within = (0.0, 0.0, *size) if spec.crop == "center" else box
    crop = _crop_box(box, within, 1, flip=bool(spec.flips(1, draws)[0]))
    resize = _resizer(spec)
    return lambda pixels, out: resize(pixels, crop, out)


def _crop_box(box: Sequence[float], within: Sequence[float], shrink: int, *, flip: bool) -> CropBox:
    """A box of an image that was decoded at a part of its size; filters look at what is `within`."""
    top, left, height, width = (value / shrink for value in box)
    first_row, first_column = int(within[0]) // shrink, int(within[1]) // shrink
    past_row, past_column = (-(-int(within[i] + within[i + 2]) // shrink) for i in (0, 1))
    return CropBox(
        top, left, height, width, within=(first_row, first_column, past_row, past_column), flip=flip
    )


def decode_image(
    spec: Image,
    data: bytes | bytearray | memoryview | Bytes,
    draws: Draws | None = None,
    *,
    out: NDArray[Any] | None = None,
    remark: Callable[[int, str], None] = lambda i, text: None,
) -> NDArray[Any]:
    """Decode one image: for map-style access, and for images that keep their own size.

    Args:
        spec: what is wanted.
        data: the encoded bytes.
        draws: [1, DRAWS]; None will do where `spec.random` is False.
        out: C-contiguous, of the shape and dtype that the result has; None: a new array.
        remark: is told what is odd about image 0, this one, which is decoded all the same.

    Returns:
        [c, h, w] or [h, w, c] of `spec.dtype`: `out`, or a new array.

    Raises:
        SampleError: the image cannot be decoded; whose it is, the caller adds.
        ValueError: draws are missing.
        MissingImageSupportError: the extra `image` is not installed.
    """
    encoded = np.frombuffer(data, np.uint8)
    if spec.size is None:
        spec = of_own_size(spec, encoded)
    image = np.empty(spec.shape, spec.dtype) if out is None else out
    failures = decode_images(spec, [encoded], [image], draws, remark=remark)
    if failures:
        raise failures[0][1]
    return image


def of_own_size(spec: Image, data: Bytes) -> Image:
    """`spec` with the size that the header of an encoded image, uint8 [bytes], says.

    Raises `SampleError` for what is no image, or too large, and `MissingImageSupportError`.
    """
    sizes, failed = _sizes([data], spec.max_pixels)
    if failed:
        raise failed[0]
    return replace(spec, size=(int(sizes[0, 0]), int(sizes[0, 1])))


def _sizes(images: Sequence[Bytes], max_pixels: float) -> tuple[Ints, dict[int, Exception]]:
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
            failed[i] = _failure(error)
    return sizes, failed


def _failure(error: Exception) -> SampleError:
    # A traceback holds its frames' locals: views that would keep the whole buffer alive.
    failure = SampleError("", f"cannot decode the image: {error}", stage="decode")
    failure.__cause__ = error.with_traceback(None)
    return failure


def _check_out(spec: Image, out: Sequence[NDArray[Any]] | NDArray[Any], n: int) -> None:
    shape, dtype = spec.shape, spec.dtype
    if len(out) != n:
        raise ValueError(f"out must be C-contiguous {dtype} {shape} for each of {n} images, got {len(out)}")
    for place in out:
        if place.shape != shape or place.dtype != dtype or not place.flags.c_contiguous:
            raise ValueError(
                f"out must be C-contiguous {dtype} {shape} for each image, got {place.dtype} {place.shape} "
                f"with strides {place.strides}"
            )


def _required(draws: Draws | None) -> Draws:
    if draws is None:
        raise ValueError("random crops and flips need draws")
    return draws


@lru_cache(maxsize=64)  # a part of a batch asks for one; images of their own sizes have many
def _resizer(spec: Image) -> Resizer:
    """Return what makes results of pixels."""
    return Resizer(spec.form())


@cache
def _codec() -> ModuleType:
    try:
        from dataflow.decode import jpeg
    except ImportError as error:
        raise MissingImageSupportError(
            f"decoding images needs another package ({error}): pip install 'dataflow-loader[image]'"
        ) from error
    return jpeg
