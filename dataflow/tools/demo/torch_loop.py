"""The same samples through torch's own DataLoader: the other side of the demo's comparison.

The dataset is what people write for this by hand: every file mapped into memory, a sample cut out of the
map and widened to int64. It is the fast way: its bytes come from the page cache, with no file opened per
sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MappedTokens(Dataset[Tensor]):
    """Windows of `length` + 1 bytes over token files, as map-style samples: int64 [length + 1]."""

    def __init__(self, paths: Sequence[str], length: int) -> None:
        self.length = length
        self.files = [np.memmap(path, np.uint8, mode="r") for path in paths]
        self.ends = list(accumulate((len(file) - 1) // length for file in self.files))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Tensor:
        number = bisect_right(self.ends, index)
        first = (index - (self.ends[number - 1] if number else 0)) * self.length
        return torch.from_numpy(self.files[number][first : first + self.length + 1].astype(np.int64))


def torch_loader(
    dataset: MappedTokens, batch_size: int, *, seed: int, rank: int, world_size: int, num_workers: int
) -> tuple[DataLoader[Tensor], DistributedSampler[Tensor]]:
    """A loader over this rank's share, shuffled in full, and its sampler."""
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=seed
    )
    loader = DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    return loader, sampler
