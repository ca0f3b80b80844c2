"""Resizing: the compiled core against numpy to the bit, and against plain sums, OpenCV and Pillow."""

from __future__ import annotations

import cv2
import numpy as np
import PIL.Image
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from plain_core import resize

from prefetch.core.images import CropBox, Filter, ImageForm, Resizer


def picture(height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    """A smooth picture with some noise, [h, w, channels]."""
    y, x, c = np.mgrid[0:height, 0:width, 0:channels]
    levels = 128 + 90 * np.sin((x + 2 * y + 40 * c) / 23) + np.random.default_rng(0).normal(0, 9, y.shape)
    return np.clip(levels, 0, 255).astype(np.uint8)


def whole(pixels: NDArray[np.uint8], *, flip: bool = False) -> CropBox:
    height, width, _ = pixels.shape
    return CropBox(0, 0, height, width, within=(0, 0, height, width), flip=flip)


def resized(
    form: ImageForm, pixels: NDArray[np.uint8], crop: CropBox | None = None
) -> NDArray[np.uint8 | np.float32]:
    out = np.full(form.shape, 77, form.dtype)
    Resizer(form)(pixels, whole(pixels) if crop is None else crop, out)
    return out


def most_apart(levels: NDArray[np.uint8 | np.float32], others: NDArray[np.uint8]) -> int:
    return int(np.abs(levels.astype(int) - others).max())


@st.composite
def cases(draw: st.DrawFn) -> tuple[ImageForm, NDArray[np.uint8], CropBox]:
    height, width = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    channels = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Rows lie apart, as those of a part of a larger image do.
    pixels = rng.integers(0, 256, (height, width + 3, channels), np.uint8)[:, :width]
    tall, wide = (draw(st.floats(0.01, 1)) * side for side in (height, width))
    top, left = draw(st.floats(0, 1)) * (height - tall), draw(st.floats(0, 1)) * (width - wide)
    own = int(top), int(left), -int(-(top + tall) // 1), -int(-(left + wide) // 1)
    within = draw(st.sampled_from([own, (0, 0, height, width)]))
    form = ImageForm(
        height=draw(st.integers(1, 40)),
        width=draw(st.integers(1, 40)),
        channels=channels,
        filter=draw(st.sampled_from(Filter)),
        antialias=draw(st.booleans()),
        planar=draw(st.booleans()),
        numbers=draw(st.sampled_from([None, rng.random((channels, 256), np.float32)])),
    )
    return form, pixels, CropBox(top, left, tall, wide, within=within, flip=draw(st.booleans()))


@given(cases())
def test_results_are_those_of_numpy(case: tuple[ImageForm, NDArray[np.uint8], CropBox]) -> None:
    plain = np.full(case[0].shape, 77, case[0].dtype)
    resize(*case, plain)
    assert np.array_equal(resized(*case), plain)


@pytest.mark.parametrize("kind", [Filter.BILINEAR, Filter.BICUBIC])
@pytest.mark.parametrize("size", [(224, 200), (50, 700), (1, 1)])
def test_an_antialiased_resize_is_pillows(kind: Filter, size: tuple[int, int]) -> None:
    pixels = picture(333, 500)
    have = resized(
        ImageForm(height=size[0], width=size[1], filter=kind, antialias=True, planar=False), pixels
    )
    image = PIL.Image.fromarray(pixels).resize(size[::-1], PIL.Image.Resampling[kind.name])
    apart = np.abs(have.astype(int) - np.asarray(image))
    assert apart.mean() < 0.25
    assert apart.max() <= 2


@pytest.mark.parametrize(
    ("kind", "theirs"), [(Filter.BILINEAR, cv2.INTER_LINEAR), (Filter.AREA, cv2.INTER_AREA)]
)
@pytest.mark.parametrize("size", [(224, 200), (500, 700), (7, 3)])
def test_without_antialiasing_a_resize_is_opencvs(kind: Filter, theirs: int, size: tuple[int, int]) -> None:
    pixels = picture(333, 500)
    have = resized(ImageForm(height=size[0], width=size[1], filter=kind, planar=False), pixels)
    assert most_apart(have, cv2.resize(pixels, size[::-1], interpolation=theirs)) <= 1


@pytest.mark.parametrize("kind", Filter)
def test_an_image_of_the_size_that_is_wanted_stays_as_it_is(kind: Filter) -> None:
    pixels = picture(31, 47)
    form = ImageForm(height=31, width=47, filter=kind, antialias=kind is not Filter.AREA)
    assert np.array_equal(resized(form, pixels), pixels.transpose(2, 0, 1))
    assert np.array_equal(resized(form, pixels, whole(pixels, flip=True)), pixels[:, ::-1].transpose(2, 0, 1))


@pytest.mark.parametrize("kind", Filter)
def test_one_level_stays_that_level_however_many_pixels_become_one(kind: Filter) -> None:
    pixels = np.full((1500, 20_000, 3), 201, np.uint8)
    form = ImageForm(height=1, width=2, filter=kind, antialias=kind is not Filter.AREA)
    assert (resized(form, pixels) == 201).all()


def test_levels_become_the_numbers_of_their_channel() -> None:
    pixels = picture(40, 30)
    numbers = np.random.default_rng(1).random((3, 256), np.float32)
    levels = resized(ImageForm(height=9, width=11), pixels)
    have = resized(ImageForm(height=9, width=11, numbers=numbers), pixels)
    for channel in range(3):
        assert np.array_equal(have[channel], numbers[channel][levels[channel].astype(np.uint8)])


def test_numbers_must_be_of_all_channels() -> None:
    with pytest.raises(ValueError, match=r"numbers must be C-contiguous \(3, 256\)"):
        ImageForm(height=9, width=11, numbers=np.zeros((1, 256), np.float32))
