"""What `dataflow bench loader` does: emulate accelerators, measure each part alone, say what holds them up.

Phases run one after the other, each in fresh gloo ranks: the whole (load, compute, in step), the loader
without computing, the storage without decoding, the loader from memory with and without decoding, computing
over synthetic data; and if the loader alone stays behind its parts, the loader with four times the memory
limit. If the whole found its data on the disk and not in memory, the data is dropped from memory before the
others.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_all_start_methods
from typing import Any

import torch

from dataflow.dataset import ShardedDataset
from dataflow.limits import memory_limit_bytes
from dataflow.testing import StartMethod, run_ranks
from dataflow.tools.bench.evidence import evict
from dataflow.tools.bench.stages import Phase, RankFigures, Work, run_phase
from dataflow.tools.bench.storage import usable_cores
from dataflow.tools.bench.verdict import Rates, Verdict, verdict_of
from dataflow.tools.terminal.given import Given
from sharding.urls import is_local

_PHASES: tuple[Phase, ...] = ("training", "loader", "storage", "memory", "undecoded", "synthetic")
_KEPT_BYTES = 256 << 20
_FROM_DEVICE = 0.5
_BEHIND = 0.9
_START_S = 120.0
_MORE = 4


@dataclass(frozen=True)
class Emulation:
    """What a user asks for."""

    given: Given
    compute_ms: float
    """A step's computation."""
    ranks: int = 1
    batch_size: int = 64
    """A rank's."""
    memory_limit: int | None = None
    """A rank's; None: the loader's default."""
    seconds: float = 5.0
    """A phase."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.compute_ms <= 0 or self.seconds <= 0:
            raise ValueError(
                f"compute-ms and seconds must be > 0, got {self.compute_ms:g} and {self.seconds:g}"
            )


@dataclass(frozen=True, eq=False)
class Emulated:
    """What `dataflow bench loader` found."""

    asked: Emulation
    memory_limit: int
    """A rank's, in bytes."""
    dataset: str
    phases: Mapping[Phase, Sequence[RankFigures]]
    """Of each rank."""
    evicted: bool
    """Whether the data was dropped from memory before the phases after the first."""
    rates: Rates
    verdict: Verdict

    @property
    def training(self) -> Sequence[RankFigures]:
        """The whole, rank by rank."""
        return self.phases["training"]

    @property
    def utilisation(self) -> float | None:
        """Mean AU of the ranks."""
        known = [one.utilisation for one in self.training if one.utilisation is not None]
        return sum(known) / len(known) if known else None

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "asked": {**asdict(self.asked), "given": self.asked.given.to_json()},
            "memory_limit": self.memory_limit,
            "dataset": self.dataset,
            "machine": {"cores": usable_cores(), "system": platform.platform(), "torch": torch.__version__},
            "accelerator_utilisation": self.utilisation,
            "evicted": self.evicted,
            "rates_samples_per_s": asdict(self.rates),
            "verdict": {**asdict(self.verdict), "gain": self.verdict.gain},
            "phases": {name: [asdict(one) for one in ranks] for name, ranks in self.phases.items()},
        }


def emulate(
    asked: Emulation,
    tell: Callable[[int, int, str], None] = lambda *_: None,
    run: Callable[[Work, int], list[RankFigures]] | None = None,
) -> Emulated:
    """Run all phases; `tell` hears of each before it begins, `run` runs one in all ranks.

    Raises:
        ImportError, ValueError: the dataset cannot be made, or has too few samples.
        ShardReadError: shards that cannot be read.
        MemoryLimitError: the limit does not hold a window and a batch.
    """
    run = run or _in_ranks
    dataset = asked.given.open_shards()  # indexed once, before the ranks open it
    limit = memory_limit_bytes(asked.memory_limit, asked.ranks)
    work = Work(
        "training",
        asked.given,
        asked.batch_size,
        asked.compute_ms / 1e3,
        asked.seconds,
        asked.seed,
        asked.memory_limit,
        min(_KEPT_BYTES, limit),
    )
    phases: dict[Phase, list[RankFigures]] = {}
    evicted = False
    for number, phase in enumerate(_PHASES):
        tell(number, len(_PHASES), phase)
        if evicted:
            evict(_local_shards(dataset))
        phases[phase] = run(replace(work, phase=phase), asked.ranks)
        evicted = evicted or (phase == "training" and _from_device(phases[phase]))
    rates = _rates(phases)
    if rates.loader < _BEHIND * min(rates.storage, rates.decode) and rates.loader < rates.compute:
        tell(len(_PHASES), len(_PHASES) + 1, "more memory")
        if evicted:
            evict(_local_shards(dataset))
        more = replace(work, phase="more memory", memory_limit=_MORE * limit)
        phases["more memory"] = run(more, asked.ranks)
        rates = _rates(phases)
    return Emulated(asked, limit, repr(dataset), phases, evicted, rates, verdict_of(rates))


def _in_ranks(work: Work, ranks: int) -> list[RankFigures]:
    method: StartMethod = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    return run_ranks(
        run_phase, ranks, args=(work,), start_method=method, timeout_s=_START_S * ranks + 20 * work.seconds
    )


def _local_shards(dataset: ShardedDataset) -> list[Any]:
    catalog = dataset.catalog
    shards = [catalog.shard(number) for number in range(catalog.num_shards)]
    return [shard for shard in shards if is_local(shard.url)]


def _from_device(ranks: Sequence[RankFigures]) -> bool:
    """Whether most of what was read came from a disk of this machine."""
    came = sum(one.device_bytes or 0 for one in ranks)
    return came > _FROM_DEVICE * max(1, sum(one.read_bytes for one in ranks))


def _rates(phases: Mapping[Phase, Sequence[RankFigures]]) -> Rates:
    def together(phase: Phase) -> float:
        return max(sum(one.samples_per_s for one in phases[phase]), 1e-9)

    return Rates(
        measured=together("training"),
        compute=together("synthetic"),
        storage=together("storage"),
        decode=together("memory"),
        loader=together("loader"),
        more_memory=together("more memory") if "more memory" in phases else None,
    )
