"""Your dataset as a function, which `dataflow bench` can measure: it takes no argument and returns a dataset.

dataflow bench compare my_data:pictures --workers 2
dataflow bench loader my_data:train_set --compute-ms 20
"""

import zlib
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from dataflow import ShardedDataset, ShardWriter

SAMPLES = 8192


def scaled(sample):
    """Your transform."""
    return {"x": (sample["npy"] - 128) / 64, "y": sample["cls"]}


def train_set() -> ShardedDataset:
    """Return the data as shards, which are written where they are missing."""
    if not Path("data/train-7.tar").exists():
        rng = np.random.default_rng(0)
        Path("data").mkdir(exist_ok=True)
        with ShardWriter("data/train-%d.tar", max_count=SAMPLES // 8, overwrite=True) as shards:
            for i in range(SAMPLES):
                x = rng.integers(256, size=(3, 32, 32), dtype=np.uint8)
                shards.write({"__key__": f"{i:05d}", "npy": x, "cls": i % 10})
    return ShardedDataset("data/train-*.tar", transform=scaled)


class Pictures(Dataset):
    """The dataset that you train on today: any object with `__len__` and `__getitem__`."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.packed = [zlib.compress(rng.bytes(3072)) for _ in range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        pixels = torch.frombuffer(bytearray(zlib.decompress(self.packed[i])), dtype=torch.uint8)
        return pixels.reshape(3, 32, 32) / 255, i % 10


def pictures() -> Dataset:
    """Return what `compare` gives to torch's loader and to this one."""
    return Pictures()


if __name__ == "__main__":
    print(f"{len(train_set()):,} samples in {len(list(Path('data').glob('*.tar')))} shards")
