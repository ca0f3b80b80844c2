"""Make 4,000 different JPEGs whose size and entropy are those of photographs, from a seed.

Given a folder of real JPEGs, they are cycled: each copy is cropped by a few pixels, mirrored or brightened
and encoded again at the quality that keeps the source's bytes per pixel. Without one, images are noise with a
1/f spectrum (as photographs have) plus fine texture, encoded at the quality that gives about 98 KB.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MEAN_WIDTH, MEAN_HEIGHT, MEAN_BYTES = 468, 403, 98_000
Pixels = NDArray[np.uint8]


def jpegs(count: int, *, seed: int, folder: Path | None) -> Iterator[bytes]:
    """Yield `count` encoded JPEGs; the same arguments give the same bytes."""
    rng = np.random.default_rng(seed)
    sources = _from_folder(folder) if folder else _synthesised(rng, 64)
    for i in range(count):
        pixels, quality = sources[i % len(sources)]
        yield _encode(_perturbed(pixels, rng), quality)


def _encode(pixels: Pixels, quality: int) -> bytes:
    import simplejpeg

    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=quality, colorsubsampling="420")


def _quality_for(pixels: Pixels, target_bytes: float) -> int:
    """The quality in 20..98 whose size is nearest to the target, by bisection (size grows with quality)."""
    low, high = 20, 98
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if len(_encode(pixels, middle)) < target_bytes else (low, middle)
    return low


def _from_folder(folder: Path) -> list[tuple[Pixels, int]]:
    import simplejpeg

    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise ValueError(f"no .jpg or .jpeg file in {folder}")
    encoded = [file.read_bytes() for file in files]
    scale = MEAN_BYTES / np.mean([len(data) for data in encoded])
    images = [(simplejpeg.decode_jpeg(data), len(data) * scale) for data in encoded]
    return [(pixels, _quality_for(pixels, target)) for pixels, target in images]


def _synthesised(rng: np.random.Generator, count: int) -> list[tuple[Pixels, int]]:
    images = []
    for _ in range(count):
        factor = rng.uniform(0.7, 1.3)
        width, height = round((MEAN_WIDTH + 7) * factor), round((MEAN_HEIGHT + 3) * factor)
        pixels = _noise_image(rng, height, width)
        target = MEAN_BYTES * factor**2 * rng.lognormal(-0.05, 0.3) / 1.03
        images.append((pixels, _quality_for(pixels, target)))
    return images


def _noise_image(rng: np.random.Generator, height: int, width: int) -> Pixels:
    """[height, width, 3] of 1/f noise, sharing most of its luminance across the colours, plus texture."""
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    amplitude = 1 / np.maximum(np.hypot(fy, fx), 1 / max(height, width))
    planes = []
    for _ in range(4):
        phase = rng.normal(size=amplitude.shape) + 1j * rng.normal(size=amplitude.shape)
        plane = np.fft.irfft2(phase * amplitude, s=(height, width))
        planes.append((plane - plane.mean()) / plane.std())
    colour = np.stack([planes[0] + 0.3 * plane for plane in planes[1:]], axis=-1)
    texture = rng.normal(size=(height, width, 1)) * (planes[1] > 0.5)[..., None]
    return np.clip(128 + 48 * colour + 10 * texture, 0, 255).astype(np.uint8)


def _perturbed(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """The image less up to 14 columns and 6 rows, mirrored half of the time, up to 12 levels brighter."""
    top, left = int(rng.integers(0, 4)), int(rng.integers(0, 8))
    bottom, right = int(rng.integers(0, 4)), int(rng.integers(0, 8))
    cut = pixels[top : pixels.shape[0] - bottom, left : pixels.shape[1] - right]
    if rng.random() < 0.5:
        cut = cut[:, ::-1]
    return np.minimum(cut.astype(np.uint16) + int(rng.integers(0, 12)), 255).astype(np.uint8)
