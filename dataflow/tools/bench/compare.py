"""What `dataflow bench compare` does: torch's DataLoader and this one over the user's own dataset.

Each run is a fresh process that makes the dataset and one loader, takes the first batch, and then counts
samples for some seconds, epoch after epoch; nothing is trained. Runs take turns (A B C A B C ...), so that
a drift of the machine falls on all alike, and medians are compared. Over shards, torch reads a
`ShardedDataset` as the map-style dataset that it also is, sample by sample, fully shuffled; this loader
streams it. Over any other dataset both do the same work with the same number of workers.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import get_all_start_methods
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset

from dataflow.batch.objects import collate_objects
from dataflow.dataset import ShardedDataset
from dataflow.loader import DataLoader
from dataflow.mixture import Mixture
from dataflow.testing import StartMethod, run_ranks
from dataflow.tools.bench.storage import usable_cores
from dataflow.tools.terminal.given import Given, named_function

Whose = Literal["torch", "dataflow"]
_START_S = 300.0
SAME = 0.05
"""Ratios within this share of 1 are called equal."""


@dataclass(frozen=True)
class Contestant:
    """One loader with one setting."""

    whose: Whose
    workers: int | None
    """`num_workers`; None: what dataflow chooses over shards."""

    @property
    def name(self) -> str:
        """Such as "torch, 2 workers"."""
        if self.workers is None:
            return self.whose
        return f"{self.whose}, {self.workers or 'no'} worker{'s' * (self.workers != 1)}"


@dataclass(frozen=True)
class Comparison:
    """What a user asks for."""

    given: Given
    batch_size: int = 64
    workers: Sequence[int] = (0, 2)
    repeats: int = 3
    seconds: float = 3.0
    """A run, after its first batch."""
    collate: str | None = None
    """`package.module:name` of a `collate_fn`; None: each loader's default."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.seconds <= 0 or not self.workers:
            raise ValueError("repeats and worker counts must be >= 1, seconds > 0")


@dataclass(frozen=True)
class Run:
    """What one process measured."""

    samples_per_s: float
    """After the first batch."""
    first_batch_s: float
    """From making the loader to its first batch; workers' start is in it."""
    samples: int
    """Counted, after the first batch."""


@dataclass(frozen=True, eq=False)
class Compared:
    """What `dataflow bench compare` found."""

    asked: Comparison
    dataset: str
    runs: Mapping[Contestant, Sequence[Run]]

    def median(self, contestant: Contestant) -> float:
        """Samples a second."""
        return statistics.median(run.samples_per_s for run in self.runs[contestant])

    def best(self, whose: Whose) -> Contestant:
        """The fastest setting of one loader."""
        return max((one for one in self.runs if one.whose == whose), key=self.median)

    @property
    def ratio(self) -> float:
        """Of the best medians: above 1, dataflow is faster."""
        return self.median(self.best("dataflow")) / self.median(self.best("torch"))

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "asked": {**asdict(self.asked), "given": self.asked.given.to_json()},
            "dataset": self.dataset,
            "machine": {"cores": usable_cores(), "system": platform.platform(), "torch": torch.__version__},
            "ratio": self.ratio,
            "contestants": [
                {
                    "name": one.name,
                    **asdict(one),
                    "median_samples_per_s": self.median(one),
                    "runs": [asdict(run) for run in runs],
                }
                for one, runs in self.runs.items()
            ],
        }


def compare(
    asked: Comparison,
    tell: Callable[[int, int, str], None] = lambda *_: None,
    run: Callable[[Contestant, Comparison], Run] | None = None,
) -> Compared:
    """Run all contestants in turns; `tell` hears of each before it begins, `run` runs one.

    Raises:
        ImportError, ValueError: the dataset cannot be made, or gives no batch.
        Exception: what the dataset raises.
    """
    run = run or _in_a_process
    dataset = asked.given.open()
    contestants = contestants_over(dataset, asked.workers)
    runs: dict[Contestant, list[Run]] = {one: [] for one in contestants}
    for repeat in range(asked.repeats):
        for number, one in enumerate(contestants):
            tell(repeat * len(contestants) + number, asked.repeats * len(contestants), one.name)
            runs[one].append(run(one, asked))
    return Compared(asked, _text(dataset), runs)


def contestants_over(dataset: Any, workers: Sequence[int]) -> list[Contestant]:
    """Who runs: over shards, dataflow chooses its own threads; `ValueError` for what torch cannot read."""
    if isinstance(dataset, Mixture):
        raise ValueError("torch's DataLoader cannot read a Mixture: compare its datasets one by one")
    by_torch = [Contestant("torch", number) for number in workers]
    if isinstance(dataset, ShardedDataset):
        return [Contestant("dataflow", None), *by_torch]
    return [one for other in by_torch for one in (Contestant("dataflow", other.workers), other)]


def _text(dataset: Any) -> str:
    return repr(dataset) if isinstance(dataset, ShardedDataset) else type(dataset).__name__


def _in_a_process(contestant: Contestant, asked: Comparison) -> Run:
    timeout_s = _START_S + 10 * asked.seconds
    method: StartMethod = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    return run_ranks(
        measure, 1, args=(contestant, asked), backend=None, timeout_s=timeout_s, start_method=method
    )[0]


def measure(contestant: Contestant, asked: Comparison, clock: Callable[[], float] = time.perf_counter) -> Run:
    """One run, in this process."""
    dataset = asked.given.open()
    torch.manual_seed(asked.seed)
    began = clock()
    loader = make_loader(contestant, dataset, asked)
    try:
        batches = _endless(loader)
        size_of(next(batches), asked.batch_size)
        first = now = clock()
        samples = 0
        for batch in batches:
            samples += size_of(batch, asked.batch_size)
            now = clock()
            if now - first >= asked.seconds:
                break
    finally:
        if isinstance(loader, DataLoader):
            loader.close()
    return Run(samples / max(now - first, 1e-9), first - began, samples)


def make_loader(contestant: Contestant, dataset: Any, asked: Comparison) -> Any:
    """The loader of a contestant, as its documentation advises: workers stay from epoch to epoch."""
    kind: Any = TorchDataLoader if contestant.whose == "torch" else DataLoader
    sharded = isinstance(dataset, ShardedDataset)
    workers = contestant.workers or 0
    arguments: dict[str, Any] = {"batch_size": asked.batch_size}
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):
        arguments["shuffle"] = True
    if asked.collate is not None:
        arguments["collate_fn"] = named_function(asked.collate)
    elif sharded and contestant.whose == "torch":
        # torch's default cannot stack values of different lengths; what can be stacked is, as in ours.
        arguments["collate_fn"] = _collate_samples
    if contestant.workers is not None:
        arguments |= {"num_workers": workers, "persistent_workers": workers > 0}
    return kind(dataset, **arguments)


def _collate_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples as a map-style dataset gives them -> columns: stacked where shapes are equal, else lists.

    For torch's own DataLoader, whose default cannot collate values of different lengths.
    """
    columns: dict[str, Any] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        numbers = all(isinstance(value, int | float) for value in values)
        columns[name] = torch.tensor(values) if numbers else collate_objects(values)
    return columns


def _endless(loader: Any) -> Iterator[Any]:
    for _ in count():
        nothing = True
        for batch in loader:
            nothing = False
            yield batch
        if nothing:
            raise ValueError("the dataset gives no batch")


def size_of(batch: Any, otherwise: int) -> int:
    """Samples of a batch: the length of its first column; `otherwise` where that is not known."""
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, tuple | list) and batch and isinstance(batch[0], torch.Tensor):
        batch = batch[0]
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    return len(batch) if hasattr(batch, "__len__") else otherwise
