"""Loose image files: a folder of class folders as it lies, beside torch over the same files.

    python -m benchmarks.peers.loose_files --jpegs PHOTOS

JPEGs of about 98 kB in 40 class folders become shuffled batches [32, 3, 224, 224] uint8 with their classes.
torch's `DataLoader` reads them through a dataset like torchvision's `ImageFolder`, decoded by Pillow. So does
this loader ("same function": batches in file order are compared), and by its own `Image(size=224)`. In
process, in threads, and with worker processes. The contestants of a case take turns in one process, which
opens a loader for each turn, as one that is open works ahead while others are measured. Medians of samples a
second from the 9th to the 32nd batch, which is in the third epoch, and of CPU milliseconds a sample of that
time, workers included. Files are in the page cache,
torch has one thread for operators, as in its own workers. Two workers on two cores can give the same function
no more than its CPU time allows: 1.5x torch needs a cheaper decoder, which `Image` is. Then what opening a
folder costs: time and memory for each of many empty files.
"""

from __future__ import annotations

import hashlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count as counter, islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import in_own_process
from benchmarks.jpegs import jpegs
from benchmarks.memory import tree_cpu_s
from benchmarks.options import jpegs_option, json_option
from benchmarks.report import save_figures

SIZE, BATCH, CLASSES = 224, 32, 40
SKIPPED, TIMED = 8, 24
"""Batches of a turn."""
CONTESTANTS = ("torch, Pillow", "this loader, same function", "this loader, Image")
KINDS = ("in process", "threads", "processes")


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


def batches(name: str, folder: str, workers: int, *, shuffle: bool, kind: str = KINDS[0]) -> Iterable[Any]:
    """The loader of a contestant, whose batches are pairs of images and classes."""
    workers = 0 if kind == KINDS[0] else workers
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
    how = {"workers": "thread" if kind == KINDS[1] else "process"} if workers else {}
    return DataLoader(dataset, BATCH, shuffle=shuffle, num_workers=workers, **how)


def pairs(loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in loader:
        yield (batch["image"], batch["label"]) if isinstance(batch, dict) else tuple(batch)


def rounds(kind: str, folder: str, workers: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Samples a second and CPU milliseconds a sample, of each contestant's turns."""
    torch.set_num_threads(1)
    names = CONTESTANTS[1:] if kind == KINDS[1] else CONTESTANTS
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, of_name in measured.items():
            of_name.append(midway(batches(name, folder, workers, shuffle=True, kind=kind)))
    return measured


def midway(loader: Any) -> tuple[float, float]:
    """Samples a second and CPU milliseconds a sample, between the first batches and the last."""
    count, began, cpu_s = 0, 0.0, 0.0
    epochs = (labels for _ in counter() for _, labels in pairs(loader))
    for number, labels in enumerate(islice(epochs, SKIPPED + TIMED), 1):
        if number > SKIPPED:
            count += len(labels)
        if number == SKIPPED:
            began, cpu_s = time.perf_counter(), tree_cpu_s(os.getpid())
    took, cpu_s = time.perf_counter() - began, tree_cpu_s(os.getpid()) - cpu_s
    epochs.close()
    if hasattr(loader, "close"):
        loader.close()
    return count / took, 1e3 * cpu_s / count


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
@click.option("--count", default=320, show_default=True, help="Images.")
@click.option("--listed", default=50_000, show_default=True, help="Empty files of the folder to be opened.")
@click.option("--workers", default=2, show_default=True, help="Threads or processes, besides none.")
@click.option("--repeats", default=3, show_default=True, help="Turns of each.")
@json_option
def main(
    jpegs: Path | None, count: int, listed: int, workers: int, repeats: int, output: Path | None
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = write(Path(made, "images"), images_of(count, jpegs))
        digests = [in_own_process(digest, name, folder) for name in CONTESTANTS[:2]]
        is_equal = len({*digests}) == 1
        print("batches in file order are", "equal" if is_equal else "NOT EQUAL")
        rates = {kind: in_own_process(rounds, kind, folder, workers, repeats) for kind in KINDS}
        rows = []
        for kind, of_names in rates.items():
            # torch has no threads: they are held against torch in process.
            torch_rate = median(rates[kind if kind != KINDS[1] else KINDS[0]][CONTESTANTS[0]], 0)
            for name, measured in of_names.items():
                rate, cpu_ms = median(measured, 0), median(measured, 1)
                row = {"by": name, "how": kind if kind == KINDS[0] else f"{workers} {kind}"}
                rows.append({**row, "samples/s": round(rate), "CPU ms": round(cpu_ms, 2)})
                rows[-1]["x torch"] = round(rate / torch_rate, 2)
                print(rows[-1])
        opened = in_own_process(opening, write(Path(made, "empty"), (b"" for _ in range(listed))))
        print(opened)
    if output:
        save_figures(output, rows=rows, equal=is_equal, opening=opened)


def median(measured: Sequence[Sequence[float]], field: int) -> float:
    return statistics.median(one[field] for one in measured)


def images_of(count: int, folder: Path | None) -> Iterator[bytes]:
    return jpegs(count, seed=0, folder=folder)


if __name__ == "__main__":
    main()
