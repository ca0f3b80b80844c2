"""Loose image files: a folder of class folders as it lies, beside torch over the same files.

    python -m benchmarks.peers.loose_files --jpegs PHOTOS

JPEGs of about 98 kB in 40 class folders become shuffled batches [64, 3, 224, 224] uint8 with their classes.
torch's `DataLoader` reads them through a dataset like torchvision's `ImageFolder`, decoded by Pillow. So does
this loader ("same function": batches in file order are compared), and by its own `Image(size=224)`. In
process and with workers, each in a fresh process, in turns, medians of samples a second after a first epoch.
Files are in the page cache. Then what opening a folder costs: time and memory for each of many empty files.
"""

from __future__ import annotations

import hashlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import in_own_process
from benchmarks.jpegs import jpegs
from benchmarks.options import jpegs_option, json_option, repeats_option
from benchmarks.report import save_figures

SIZE, BATCH, CLASSES = 224, 64, 40
CONTESTANTS = ("torch, Pillow", "this loader, same function", "this loader, Image")


def by_pillow(data: bytes) -> Tensor:
    """[3, SIZE, SIZE] of an encoded image, as torchvision's ImageFolder and Resize make it."""
    import PIL.Image

    image = PIL.Image.open(io.BytesIO(data)).convert("RGB").resize((SIZE, SIZE))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample whose image is decoded by Pillow."""
    return {**sample, "image": by_pillow(sample["image"].numpy().tobytes())}


class Folder(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Files of class folders, in the order of torchvision's `ImageFolder`."""

    def __init__(self, folder: str) -> None:
        classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.samples = [
            (os.path.join(folder, name, file), number)
            for number, name in enumerate(classes)
            for file in sorted(os.listdir(os.path.join(folder, name)))
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, number = self.samples[index]
        with open(path, "rb") as file:
            return by_pillow(file.read()), number


def batches(name: str, folder: str, workers: int, *, shuffle: bool) -> Iterable[Any]:
    """The loader of a contestant, whose batches are pairs of images and classes."""
    if name.startswith("torch"):
        return torch.utils.data.DataLoader(
            Folder(folder), BATCH, shuffle=shuffle, num_workers=workers, persistent_workers=workers > 0
        )
    from dataflow import DataLoader, Image, ShardedDataset

    own = name.endswith("Image")
    dataset = ShardedDataset(
        folder,
        columns={"image": "jpg", "label": "cls"},
        decode={"image": Image(size=SIZE) if own else None},
        transform=None if own else decoded,
    )
    return DataLoader(dataset, BATCH, shuffle=shuffle, num_workers=workers)


def pairs(loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in loader:
        yield (batch["image"], batch["label"]) if isinstance(batch, dict) else tuple(batch)


def rate(name: str, folder: str, workers: int) -> float:
    """Samples a second of the epochs after the first."""
    loader = batches(name, folder, workers, shuffle=True)
    for _ in pairs(loader):
        pass
    began, count = time.perf_counter(), 0
    for _ in range(2):
        count += sum(len(labels) for _, labels in pairs(loader))
    return count / (time.perf_counter() - began)


def digest(name: str, folder: str) -> str:
    """A hash of all batches in file order."""
    found = hashlib.blake2b(digest_size=8)
    for images, labels in pairs(batches(name, folder, 0, shuffle=False)):
        found.update(images.numpy().tobytes() + labels.numpy().tobytes())
    return found.hexdigest()


def opening(folder: str) -> dict[str, float]:
    """What it costs to open a folder, a file."""
    from dataflow import ShardedDataset

    began = time.process_time()
    dataset = ShardedDataset(folder, decode=None)
    took, count = time.process_time() - began, len(dataset)
    return {"files": count, "us": 1e6 * took / count, "bytes": dataset.catalog.rows.nbytes / count}


def write(folder: Path, contents: Iterable[bytes]) -> str:
    for number, content in enumerate(contents):
        path = folder / f"class {number % CLASSES:03d}" / f"{number:07d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


@click.command(help=__doc__)
@jpegs_option
@click.option("--count", default=2000, show_default=True, help="Images.")
@click.option("--listed", default=200_000, show_default=True, help="Empty files of the folder to be opened.")
@click.option("--workers", default=2, show_default=True, help="Workers, besides none.")
@repeats_option
@json_option
def main(
    jpegs: Path | None, count: int, listed: int, workers: int, repeats: int, output: Path | None
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = write(Path(made, "images"), images_of(count, jpegs))
        digests = [in_own_process(digest, name, folder) for name in CONTESTANTS[:2]]
        print("batches in file order are", "equal" if len({*digests}) == 1 else "NOT EQUAL")
        cases = [(name, number) for number in (0, workers) for name in CONTESTANTS]
        rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
        for _ in range(repeats):
            for name, number in cases:
                rates[name, number].append(in_own_process(rate, name, folder, number))
        rows = []
        for (name, number), measured in rates.items():
            median = statistics.median(measured)
            times = median / statistics.median(rates[CONTESTANTS[0], number])
            rows.append({"by": name, "workers": number, "samples/s": round(median), "x": round(times, 2)})
            print(rows[-1])
        opened = in_own_process(opening, write(Path(made, "empty"), (b"" for _ in range(listed))))
        print(opened)
    if output:
        save_figures(output, rows=rows, equal=len({*digests}) == 1, opening=opened)


def images_of(count: int, folder: Path | None) -> Iterator[bytes]:
    return jpegs(count, seed=0, folder=folder)


if __name__ == "__main__":
    main()
