"""The data of the examples: a file of tokens, and a WebDataset tar of JPEGs.

Each function writes a file unless it is there, on one rank while the others wait, and returns its path.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from dataflow import ShardWriter

END = 0
"""The token after each text."""


def token_file(folder: Path, texts: Sequence[Path]) -> Path:
    """`folder/tokens.bin`: the bytes of text files, one a token. None given: Python's standard library."""

    def write(path: Path) -> None:
        files = texts or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        path.write_bytes(b"".join(file.read_bytes() + bytes([END]) for file in files))

    return written_once(folder / "tokens.bin", write)


def image_tar(folder: Path, jpegs: Path | None) -> Path:
    """`folder/images.tar`: JPEGs and their classes, as `0001.jpg` and `0001.cls`.

    With a folder of JPEGs, those below it; a class is a folder with JPEGs in it, numbered in sorted order.
    Without one, 512 made-up pictures of four classes.
    """

    def write(path: Path) -> None:
        pictures = drawn(512) if jpegs is None else found(jpegs)
        with ShardWriter(str(path.with_name("%d.tar")), overwrite=True) as shards:
            for number, (picture, label) in enumerate(pictures):
                shards.write({"__key__": f"{number:06d}", "jpg": picture, "cls": label})
        path.with_name("0.tar").replace(path)

    return written_once(folder / "images.tar", write)


def found(folder: Path) -> Iterator[tuple[bytes, int]]:
    """Each JPEG below a folder, and the number of the folder it is in."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    classes = sorted({path.parent for path in paths})
    return ((path.read_bytes(), classes.index(path.parent)) for path in paths)


def drawn(count: int, size: int = 48) -> Iterator[tuple[bytes, int]]:
    """Noisy stripes in four directions."""
    from simplejpeg import encode_jpeg

    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size]
    directions = (x, y, x + y, x - y)
    for number in range(count):
        label = number % 4
        stripes = np.sin(directions[label] / rng.uniform(1.5, 3) + rng.uniform(0, 6))[..., None]
        pixels = 128 + 60 * stripes * rng.uniform(0.3, 1, 3) + rng.normal(0, 25, (size, size, 3))
        yield encode_jpeg(np.ascontiguousarray(pixels.clip(0, 255).astype(np.uint8))), label


def written_once(path: Path, write: Callable[[Path], None]) -> Path:
    """`path`, written by rank 0 if nobody has; every rank must call this."""
    if dist.get_rank() == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    dist.barrier()
    return path
