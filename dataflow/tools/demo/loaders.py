"""The loaders that the demo compares, over the same token files: dataflow's, and torch's own.

torch's side is what people write for this by hand: every file mapped into memory, a sample cut out of the map
and widened to int64. It is the fast way: its bytes come from the page cache, with no file opened per sample.

Loading alone: one process takes every batch of an epoch and trains nothing. On two cores, training a
transformer leaves any loader idle most of the time; this pass shows what the loaders can do. Both sides
deliver the same samples, which the sum of all tokens shows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader, Dataset, DistributedSampler

from dataflow.loader import DataLoader
from dataflow.tools.demo.data import LENGTH, tokens
from sharding.topology.topology import Topology


class MappedTokens(Dataset[Tensor]):
    """Windows of 129 bytes over the token files, as map-style samples: int64 [LENGTH + 1]."""

    def __init__(self, folder: str | Path) -> None:
        self.files = [
            np.memmap(path, np.uint8, mode="r") for path in sorted(Path(folder).glob("tokens-*.bin"))
        ]
        self.ends = list(accumulate((len(file) - 1) // LENGTH for file in self.files))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Tensor:
        number = bisect_right(self.ends, index)
        first = (index - (self.ends[number - 1] if number else 0)) * LENGTH
        return torch.from_numpy(self.files[number][first : first + LENGTH + 1].astype(np.int64))


def torch_epochs(
    folder: str, batch_size: int, *, seed: int, num_workers: int, rank: int = 0, world_size: int = 1
) -> Iterator[Iterable[Tensor]]:
    """Epochs of torch's loader over a rank's share, shuffled in full; batches are int64 [n, LENGTH + 1]."""
    dataset = MappedTokens(folder)
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=seed
    )
    persistent = num_workers > 0
    loader = TorchDataLoader(
        dataset, batch_size, sampler=sampler, num_workers=num_workers, persistent_workers=persistent
    )
    for epoch in count():
        sampler.set_epoch(epoch)
        yield loader


@dataclass(frozen=True, kw_only=True)
class LoadingResult:
    """One pass with one loader."""

    name: str
    torch_workers: int | None
    """Worker processes of torch's loader; None for dataflow."""
    samples: int
    checksum: int
    """Sum of all tokens delivered."""
    seconds: float
    """From making the loader to the last batch."""
    first_batch_s: float
    """From making the loader to the first batch."""

    @property
    def samples_per_s(self) -> float:
        """Start included."""
        return self.samples / self.seconds

    def to_json(self) -> dict[str, Any]:
        """All fields, and the rate."""
        return {**asdict(self), "samples_per_s": self.samples_per_s}


def load_with_dataflow(folder: str, batch_size: int, seed: int) -> LoadingResult:
    """One epoch through `dataflow.DataLoader`."""
    began = perf_counter()
    with DataLoader(tokens(folder), batch_size, shuffle=True, seed=seed, topology=Topology()) as loader:
        return _pass("dataflow", None, (batch["tokens"] for batch in loader), began)


def load_with_torch(folder: str, batch_size: int, seed: int, num_workers: int) -> LoadingResult:
    """One epoch through torch's loader."""
    began = perf_counter()
    batches = next(torch_epochs(folder, batch_size, seed=seed, num_workers=num_workers))
    return _pass(f"torch, {workers_text(num_workers)}", num_workers, batches, began)


def workers_text(num_workers: int) -> str:
    """A number of workers in words, such as "no workers"."""
    return f"{num_workers or 'no'} worker{'s' * (num_workers != 1)}"


def _pass(name: str, num_workers: int | None, batches: Iterable[Tensor], began: float) -> LoadingResult:
    samples = checksum = 0
    first_batch_s = 0.0
    for batch in batches:
        first_batch_s = first_batch_s or perf_counter() - began
        samples += len(batch)
        checksum += int(batch.sum())
    return LoadingResult(
        name=name,
        torch_workers=num_workers,
        samples=samples,
        checksum=checksum,
        seconds=perf_counter() - began,
        first_batch_s=first_batch_s,
    )
