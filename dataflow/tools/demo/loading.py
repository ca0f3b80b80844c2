"""Loading alone: one process takes every batch of an epoch and trains nothing.

On two cores, training a transformer leaves any loader idle most of the time; this pass shows what the
loaders can do. Both sides deliver the same samples, which the sum of all tokens shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from dataflow.loader import DataLoader
from dataflow.tools.demo.data import LENGTH, tokens
from dataflow.tools.demo.torch_loop import MappedTokens, torch_loader
from sharding.topology.topology import Topology


@dataclass(frozen=True)
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
    with DataLoader(
        tokens(folder), batch_size=batch_size, shuffle=True, seed=seed, topology=Topology()
    ) as loader:
        return _pass("dataflow", None, (batch["tokens"] for batch in loader), began)


def load_with_torch(folder: str, batch_size: int, seed: int, num_workers: int) -> LoadingResult:
    """One epoch through torch's loader."""
    began = perf_counter()
    dataset = MappedTokens(sorted(str(p) for p in Path(folder).glob("tokens-*.bin")), LENGTH)
    loader, _ = torch_loader(dataset, batch_size, seed=seed, rank=0, world_size=1, num_workers=num_workers)
    return _pass(f"torch, {workers_text(num_workers)}", num_workers, loader, began)


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
    return LoadingResult(name, num_workers, samples, checksum, perf_counter() - began, first_batch_s)
