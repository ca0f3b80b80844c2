"""Resized pictures have the levels that torch gives them, whatever their sizes, and only they are read."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn.functional import interpolate

from dataflow.vision import resample
from dataflow.vision.resample import resized, resized_patches
from sharding.core.compile import compilers_on_path

SIDES = st.one_of(st.integers(1, 40), st.integers(1, 700))


def picture(height: int, width: int, seed: int, *, extreme: bool = False) -> Tensor:
    """[1, 3, height, width] as decoders leave it: the channels of a pixel side by side."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return torch.from_numpy((levels > 127) * np.uint8(255) if extreme else levels).permute(2, 0, 1)[None]


def core_resizes() -> bool:
    out = torch.empty(1, 3, 1, 1, dtype=torch.uint8)
    return resample._resize(picture(1, 1, 0), (1, 1), "bicubic", (1, 1), 1, out)


needs_avx2 = pytest.mark.skipif(
    not core_resizes(), reason="the core resizes with AVX2, where it is compiled for it"
)


@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="needs AVX2")
@pytest.mark.skipif(not compilers_on_path(), reason="zig compiles without it")
def test_the_core_resizes_where_the_processor_can() -> None:
    assert core_resizes()


def by_torch(own: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    return interpolate(own, size, mode=mode, antialias=True)


@needs_avx2
@settings(max_examples=400, deadline=None)
@given(
    SIDES, SIDES, SIDES, SIDES, st.sampled_from(["bicubic", "bilinear"]), st.booleans(), st.integers(0, 99)
)
def test_levels_are_those_of_torch(
    height: int, width: int, rows: int, columns: int, mode: str, extreme: bool, seed: int
) -> None:
    own = picture(height, width, seed, extreme=extreme)
    out = torch.full((1, 3, rows, columns), 7, dtype=torch.uint8)
    assert resample._resize(own, (rows, columns), mode, (rows, columns), 1, out)
    assert torch.equal(out, by_torch(own, (rows, columns), mode))


@needs_avx2
@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(1080, 1920, (1092, 1932)), (3, 20_000, (5, 2)), (20_000, 3, (2, 5)), (480, 640, (960, 1280))],
)
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_levels_of_large_and_long_pictures_are_those_of_torch(
    height: int, width: int, size: tuple[int, int], mode: str
) -> None:
    own = picture(height, width, 1)
    assert torch.equal(resized(own, size, mode), by_torch(own, size, mode))


def cut(own: Tensor, side: int, merge: int) -> Tensor:
    """Patches [patches, 3 * side * side], one by one."""
    _, _, height, width = own.shape
    squares = side * merge
    return torch.stack(
        [
            own[0, :, y + j : y + j + side, x + i : x + i + side].flatten()
            for y in range(0, height, squares)
            for x in range(0, width, squares)
            for j in range(0, squares, side)
            for i in range(0, squares, side)
        ]
    )


@pytest.mark.parametrize("has_core", [pytest.param(True, marks=needs_avx2), False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_patches_lie_square_by_square(has_core: bool, data: st.DataObject) -> None:
    side, merge = data.draw(st.sampled_from([14, 16, 4, 5])), data.draw(st.integers(1, 3))
    down, across = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    size = (down * merge * side, across * merge * side)
    own = picture(*data.draw(st.sampled_from([size, (37, 61), (90, 31)])), 3)
    if not has_core:
        own = own.contiguous()  # planes: the core does not take these
    out = torch.full((down * across * merge**2, 3 * side**2), 7, dtype=torch.uint8)
    resized_patches(own, size, side, merge, out)
    wanted = own if tuple(own.shape[2:]) == size else by_torch(own, size, "bicubic")
    assert torch.equal(out, cut(wanted, side, merge))


@needs_avx2
@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 5), (7, 3), (30, 41), (3, 300)])
def test_nothing_is_read_behind_a_picture(height: int, width: int) -> None:
    """The page behind it is nobody's: to read there ends the process."""
    page, nbytes = mmap.PAGESIZE, 3 * height * width
    own = -(-nbytes // page) * page
    memory = mmap.mmap(-1, own + page)
    levels = np.frombuffer(memory, np.uint8, nbytes, own - nbytes)
    levels[:] = np.arange(nbytes) % 251
    behind = np.frombuffer(memory, np.uint8, page, own).ctypes.data
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(page), 0) == 0
    one = torch.from_numpy(levels.reshape(height, width, 3)).permute(2, 0, 1)[None]
    for size in ((28, 28), (1, 1), (2 * height, 3 * width)):
        out = torch.empty(1, 3, *size, dtype=torch.uint8)
        assert resample._resize(one, size, "bicubic", size, 1, out)
        assert torch.equal(out, by_torch(one.clone(), size, "bicubic"))


def test_other_modes_and_layouts_are_left_to_torch() -> None:
    own = picture(20, 30, 0)
    assert torch.equal(resized(own.contiguous(), (9, 8), "bicubic"), by_torch(own, (9, 8), "bicubic"))
    out = torch.empty(1, 3, 9, 8, dtype=torch.uint8)
    assert not resample._resize(own, (9, 8), "lanczos", (9, 8), 1, out)
    assert resized(own, (20, 30), "bicubic") is own
