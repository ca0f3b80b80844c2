"""Draw what each option of `Image` does, for its page.

    python -m benchmarks.kernels.image_options docs/images

The picture is drawn here: its sun is on the left (mirroring shows), its fence has fine bars (resizing shows)
and its frame is the edge (cropping shows). Needs the extras `image` and `plot`.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click
import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image as Picture, ImageDraw, ImageFont

from dataflow import Image
from dataflow.decode.image import decode_image
from dataflow.decode.values import DRAWS
from sharding.errors import SampleError

Pixels = NDArray[np.uint8]
Panels = list[tuple[str, Pixels | str]]
"""Titles and what is shown."""
HEIGHT, WIDTH = 360, 540
_TITLE, _GAP, _LINE = 18, 10, 14


def scene() -> Pixels:
    """A sunrise over hills, a house and a fence: [HEIGHT, WIDTH, 3]."""
    y = np.linspace(0, 1, HEIGHT)[:, None, None]
    image = np.uint8((1 - y) * (70, 120, 200) + y * (250, 200, 150)) * np.ones((1, WIDTH, 1), np.uint8)
    x = np.arange(WIDTH)
    cv2.circle(image, (150, 120), 48, (255, 236, 120), -1, cv2.LINE_AA)
    for base, height, color in ((210, 40, (90, 130, 110)), (260, 24, (60, 105, 70))):
        top = base - height * np.sin(x / 83 + base)
        ground = np.stack([np.r_[x, WIDTH, 0], np.r_[top, HEIGHT, HEIGHT]], axis=1)
        cv2.fillPoly(image, [ground.astype(np.int32)], color, cv2.LINE_AA)
    cv2.rectangle(image, (330, 150), (470, 270), (190, 70, 60), -1)
    for row in range(150, 270, 10):
        cv2.line(image, (330, row), (470, row), (225, 180, 170), 1)
        for column in range(330 + row // 10 % 2 * 10, 470, 20):
            cv2.line(image, (column, row), (column, row + 10), (225, 180, 170), 1)
    roof = np.array([(310, 150), (400, 80), (490, 150)], np.int32)
    cv2.fillPoly(image, [roof], (80, 50, 60), cv2.LINE_AA)
    cv2.rectangle(image, (375, 190), (425, 232), (250, 235, 150), -1)
    for column in range(0, WIDTH, 5):
        cv2.line(image, (column, 290), (column, HEIGHT), (245, 240, 225), 2)
    cv2.rectangle(image, (0, 306), (WIDTH, 311), (245, 240, 225), -1)
    cv2.rectangle(image, (0, 0), (WIDTH - 1, HEIGHT - 1), (20, 20, 20), 8)
    return image


def shown(spec: Image, data: bytes, draw: int | None = None) -> Pixels | str:
    """What comes of an image, [h, w, 3], or what the error says."""
    draws = None if draw is None else np.random.default_rng(draw).random((1, DRAWS))
    try:
        out = decode_image(spec, data, draws)
    except SampleError as error:
        return error.reason
    out = out if spec.layout == "HWC" else np.moveaxis(out, 0, -1)
    return np.repeat(out, 3, axis=-1) if out.shape[-1] == 1 else out


def figures() -> dict[str, Panels]:
    """The panels of each picture."""
    image = scene()
    data = simplejpeg.encode_jpeg(image, quality=92)
    random: Any = {"size": 128, "crop": "random_resized"}
    planes = decode_image(Image(size=128), data)
    fast, exact = (shown(Image(dct=kind), data) for kind in ("fast", "exact"))
    assert not isinstance(fast, str)
    assert not isinstance(exact, str)
    difference = np.abs(fast.astype(np.int16) - exact) * 40
    part = (slice(60, 210), slice(300, 450))
    cut = data[: len(data) * 6 // 10]
    return {
        "size": [
            ("size=None: as stored, 360 x 540", image),
            ("size=128", shown(Image(size=128), data)),
            ("size=(128, 192)", shown(Image(size=(128, 192)), data)),
        ],
        "crop": [
            ('crop="none"', shown(Image(size=128), data)),
            ('crop="center"', shown(Image(size=128, crop="center"), data)),
            *((f'"random_resized" {i}', shown(Image(**random), data, i)) for i in (1, 2, 4)),
        ],
        "resize-shorter": [
            ("None (here 146)", shown(Image(size=128, crop="center"), data)),
            *(
                (f"resize_shorter={n}", shown(Image(size=128, crop="center", resize_shorter=n), data))
                for n in (128, 192, 256)
            ),
        ],
        "scale": [
            (f"scale={scale} {i}", shown(Image(**random, scale=scale), data, i))
            for scale in ((0.08, 0.15), (0.8, 1.0))
            for i in (1, 2)
        ],
        "ratio": [
            (f"ratio={ratio} {i}", shown(Image(**random, ratio=ratio), data, i))
            for ratio in ((1, 1), (0.3, 3))
            for i in (1, 2)
        ],
        "flip": [(f"flip={p}", shown(Image(size=128, flip=p), data, 1)) for p in (0.0, 1.0)],
        "mode": [
            ('mode="RGB"', shown(Image(size=128), data)),
            ('mode="L"', shown(Image(size=128, mode="L"), data)),
        ],
        "layout": [
            ('"HWC": image', shown(Image(size=128, layout="HWC"), data)),
            *((f'"CHW": image[{c}]', np.repeat(planes[c][..., None], 3, -1)) for c in range(3)),
        ],
        "interpolation": [
            (f'"{kind}", {more}', enlarged(shown(Image(size=90, interpolation=kind, **how), data)))
            for kind, more, how in (
                ("bilinear", 'dct="exact"', {"dct": "exact"}),
                ("bilinear", 'dct="fast"', {"dct": "fast"}),
                ("bilinear", "antialias", {"dct": "exact", "antialias": True}),
                ("bicubic", "antialias", {"dct": "exact", "antialias": True}),
                ("area", 'dct="exact"', {"dct": "exact"}),
            )
        ],
        "dct": [
            ('dct="exact"', exact[part]),
            ('dct="fast"', fast[part]),
            ("difference x 40", np.minimum(difference, 255).astype(np.uint8)[part]),
        ],
        "strict": [
            ("40 % missing, strict=True", shown(Image(size=128), cut)),
            ("40 % missing, strict=False", shown(Image(size=128, strict=False), cut)),
            ("max_pixels=100_000", shown(Image(size=128, max_pixels=100_000), data)),
        ],
    }


def enlarged(pixels: Pixels | str) -> Pixels:
    """Twice as large, each pixel a square."""
    assert not isinstance(pixels, str)
    return pixels.repeat(2, axis=0).repeat(2, axis=1)


def strip(panels: Panels) -> Picture.Image:
    """Panels side by side, each under its title."""
    font = ImageFont.load_default(12)
    sizes = [(144, 128) if isinstance(what, str) else what.shape[1::-1] for _, what in panels]
    titles = [round(font.getlength(title)) for title, _ in panels]
    widths = [max(title, width) for title, (width, _) in zip(titles, sizes, strict=True)]
    size = (sum(widths) + _GAP * (len(panels) - 1), _TITLE + max(height for _, height in sizes))
    out = Picture.new("RGB", size, "white")
    draw, left = ImageDraw.Draw(out), 0
    for (title, what), width in zip(panels, widths, strict=True):
        draw.text((left, 0), title, "black", font)
        if isinstance(what, str):
            lines = ["SampleError:", *textwrap.wrap(what, 20)]
            for number, line in enumerate(lines):
                draw.text((left, _TITLE + number * _LINE), line, "#a02020", font)
        else:
            out.paste(Picture.fromarray(what), (left, _TITLE))
        left += width + _GAP
    return out


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Write image-NAME.png for each option."""
    for name, panels in figures().items():
        strip(panels).save(folder / f"image-{name}.png", optimize=True)


if __name__ == "__main__":
    main()
