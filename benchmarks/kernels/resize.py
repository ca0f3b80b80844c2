"""How long it takes to resize a decoded image: our core, Pillow, OpenCV and torch, in processor time.

    python -m benchmarks.kernels.resize --json benchmarks/results/resize.json

One image of 403 x 468 pixels, the mean of W1's, becomes 224 x 224 in planes: by four pixels (OpenCV's
`INTER_LINEAR`), by the mean of what a pixel covers (`INTER_AREA`), and anti-aliased (Pillow's and torch's
bilinear and bicubic, torchvision's evaluation). OpenCV's and Pillow's results are then split into planes by
OpenCV. One thread, the ways in turns, medians of microseconds; and how far the levels are from the first that
is named.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks.report import save_figures
from prefetch.core.images import CropBox, Filter, ImageForm, Resizer

HEIGHT, WIDTH, SIZE = 403, 468, 224
Pixels = NDArray[np.uint8]
CASES = {
    "four pixels": (Filter.BILINEAR, False),
    "mean": (Filter.AREA, False),
    "bilinear, anti-aliased": (Filter.BILINEAR, True),
    "bicubic, anti-aliased": (Filter.BICUBIC, True),
}


def picture() -> Pixels:
    """Smooth, with noise: [HEIGHT, WIDTH, 3]."""
    y, x, c = np.mgrid[0:HEIGHT, 0:WIDTH, 0:3]
    noise = np.random.default_rng(0).normal(0, 9, y.shape)
    return np.clip(128 + 90 * np.sin((x + 2 * y + 40 * c) / 23) + noise, 0, 255).astype(np.uint8)


def ours(pixels: Pixels, kind: Filter, *, antialias: bool) -> Callable[[], Pixels]:
    """By the compiled core."""
    form = ImageForm(height=SIZE, width=SIZE, filter=kind, antialias=antialias)
    out, resizer = np.empty(form.shape, np.uint8), Resizer(form)
    crop = CropBox(0, 0, HEIGHT, WIDTH, within=(0, 0, HEIGHT, WIDTH))

    def resize() -> Pixels:
        resizer(pixels, crop, out)
        return out

    return resize


def in_planes(pixels: Pixels) -> Pixels:
    out = np.empty((3, *pixels.shape[:2]), np.uint8)
    cv2.split(pixels, [out[0], out[1], out[2]])
    return out


def theirs(pixels: Pixels, kind: Filter, *, antialias: bool) -> dict[str, Callable[[], Pixels]]:
    """By the libraries that have this filter."""
    size = (SIZE, SIZE)
    if not antialias:
        method = cv2.INTER_AREA if kind is Filter.AREA else cv2.INTER_LINEAR
        return {"OpenCV": lambda: in_planes(cv2.resize(pixels, size, interpolation=method))}
    method = PIL.Image.Resampling[kind.name]
    image, tensor = PIL.Image.fromarray(pixels), torch.from_numpy(pixels).permute(2, 0, 1)[None]
    mode = kind.name.lower()
    return {
        "Pillow": lambda: in_planes(np.asarray(image.resize(size, method))),
        "torch": lambda: functional.interpolate(tensor, size, mode=mode, antialias=True)[0].numpy(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=100, help="of each, in turns (default: 100)")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    pixels, rows = picture(), []
    for case, (kind, antialias) in CASES.items():
        runs = theirs(pixels, kind, antialias=antialias)
        runs["compiled"] = ours(pixels, kind, antialias=antialias)
        took: dict[str, list[float]] = {way: [] for way in runs}
        for _ in range(asked.repeats + 1):  # the first one is to warm up
            for way, resize in runs.items():
                began = time.thread_time()
                resize()
                took[way].append(time.thread_time() - began)
        results = {way: resize().astype(int) for way, resize in runs.items()}
        first = next(iter(results.values()))
        for way, all_s in took.items():
            apart = np.abs(results[way] - first)
            row = {"case": case, "by": way, "us": round(1e6 * statistics.median(all_s[1:]), 1)}
            rows.append(row | {"mean_apart": round(float(apart.mean()), 3), "most_apart": int(apart.max())})
            print(rows[-1])
    if asked.json:
        save_figures(asked.json, rows=rows)


if __name__ == "__main__":
    main()
