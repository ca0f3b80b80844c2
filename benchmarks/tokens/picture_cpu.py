"""CPU seconds from an encoded picture to its patches, beside the model's own processor, one thread each.

    python -m benchmarks.tokens.picture_cpu --json benchmarks/results/picture-cpu.json

Qwen2.5-VL's patches of one JPEG of three sizes: by its processor in transformers, from Pillow's image, in
float32; by this project in uint8, as rows travel, and in float32. The ways in turns, medians. The patches are
the same, bit for bit. Needs transformers and torchvision.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.report import save_figures
from benchmarks.tokens.picture_peers import PIXELS, without_own_operations

SIZES = ((640, 480), (1920, 1080), (4000, 3000))
"""Width and height."""


def jpeg(width: int, height: int) -> bytes:
    """A picture with detail of 20 pixels and noise, as a JPEG of quality 90."""
    rng = np.random.default_rng(width)
    small = Image.fromarray(rng.integers(0, 256, (height // 20, width // 20, 3), np.uint8))
    levels = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    levels += rng.integers(-8, 9, levels.shape, np.int16)
    Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(file := io.BytesIO(), "JPEG", quality=90)
    return file.getvalue()


def ways(data: bytes) -> dict[str, Callable[[], Any]]:
    """Functions that make the patches of a JPEG."""
    from dataflow.vision.families import FAMILIES
    from dataflow.vision.pictures import Picture

    with without_own_operations():
        import transformers

        processor: Any = transformers.Qwen2VLImageProcessor(**PIXELS)
    family = FAMILIES["qwen2_5_vl"].limited(**PIXELS)
    encoded = np.frombuffer(data, np.uint8)

    def by_processor() -> Any:
        return processor(images=Image.open(io.BytesIO(data)), return_tensors="pt")["pixel_values"]

    def in_uint8() -> Any:
        picture = Picture(encoded, upright=False)
        (plan,) = family.planned([picture.size])
        out = torch.empty(plan.rows, *family.row, dtype=torch.uint8)
        family.fill(picture.pixels(), plan, out)
        return out

    return {
        "processor": by_processor,
        "uint8": in_uint8,
        "float32": lambda: family.normalized(in_uint8()),
    }


def main() -> None:
    """Measure each size, and print or write medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for width, height in SIZES:
        makers = ways(jpeg(width, height))
        made = {name: maker() for name, maker in makers.items()}
        assert torch.equal(made["float32"], made["processor"])
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(arguments.repeats):
            for name, maker in makers.items():
                start = time.thread_time()
                maker()
                seconds[name].append(time.thread_time() - start)
        median = {name: statistics.median(times) for name, times in seconds.items()}
        row = {"width": width, "height": height}
        row |= {f"{name}_ms": 1000 * value for name, value in median.items()}
        row |= {f"{name}_of_processor": median[name] / median["processor"] for name in ("uint8", "float32")}
        rows.append(row)
        print({name: round(value, 2) for name, value in row.items()}, flush=True)
    if arguments.json:
        save_figures(arguments.json, rows=rows)


if __name__ == "__main__":
    main()
