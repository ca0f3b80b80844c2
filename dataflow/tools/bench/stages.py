"""One rank's part in each phase of `dataflow bench loader`. Runs in a process of its own.

Steps are those of an emulated accelerator, with its utilisation as MLPerf Storage defines it: AU = total
compute time / total running time. The compute time of a step is given, not measured, so what a timer
overshoots counts against it, as does waiting for other ranks after a step. The first step is left out of both
(its I/O is the pipeline's start), and reported beside them. Rules: MLPerf Storage v2.0, section 4.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, pairwise, repeat
from typing import Any, Literal

import numpy as np
import torch
from torch import distributed

from dataflow.dataset import ShardedDataset
from dataflow.loader import DataLoader
from dataflow.stream.read_ahead import LOCAL_READERS, REMOTE_READERS
from dataflow.telemetry.timing.records import StepTimes
from dataflow.tools.bench.evidence import device_bytes
from dataflow.tools.bench.in_memory import InMemory
from dataflow.tools.bench.settings import BenchDataset
from sharding.order.permutations import spread_order
from sharding.urls import is_local

EmulationPhase = Literal["training", "loader", "storage", "memory", "undecoded", "more memory"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one rank. Picklable."""

    phase: EmulationPhase
    dataset: BenchDataset
    batch_size: int
    compute_s: float
    seconds: float
    seed: int
    memory_limit: int | None
    kept_bytes: int
    """Bytes that a rank may hold of the data in the phases from memory."""


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The measurements of one rank in one phase, after the first step."""

    rank: int
    samples: int
    samples_per_s: float
    read_bytes: int
    """Read from the store in the whole phase, the first step included, but not what was brought into memory
    before it."""
    device_bytes: int | None
    """Bytes of them from this machine's storage devices; None: not known. 0 over a network."""
    cpu_s: float
    """Processor time of this process, and of those that built batches, meanwhile."""
    steps: Steps | None = None
    """None where no steps are made."""
    replayed: Steps | None = None
    """Figures of the training once more, over batches from memory; None in the other phases."""
    stats: dict[str, Any] | None = None
    """The loader's own, at the end."""
    epoch_batches: int | None = None
    """Batches of an epoch; None where the loader makes none."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return {
            **vars(self),
            "steps": self.steps and self.steps.to_json(),
            "replayed": self.replayed and self.replayed.to_json(),
            "utilisation": self.steps and self.steps.utilisation,
        }


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The times of what happened in one rank, in seconds on one clock."""

    began_s: float
    """Before the first batch was asked for."""
    ended_s: float
    """The time when the last step had ended."""
    windows: tuple[StepTimes, ...]
    """Each step but the first. Waiting near the whole: loading does not keep up."""
    compute_s: float
    """The given time of one step's computation."""
    first_batch_s: float
    """Seconds to the first batch."""
    borders: int = 0
    """Epochs that began after the first step."""
    border_s: float = 0.0
    """Seconds in `next` for the first batches of these epochs, beyond what others take. Near `running_s`:
    borders of epochs are what was measured."""

    @property
    def counted(self) -> int:
        """Steps that count: all but the first."""
        return len(self.windows)

    @property
    def waited_s(self) -> float:
        """Seconds in `next` after the first step. Near 0: loading keeps up. Near `running_s`: it does not."""
        return sum(step.data_s for step in self.windows)

    @property
    def computed_s(self) -> float:
        """Measured seconds of computing after the first step: timers overshoot the given ones."""
        return sum(step.compute_s for step in self.windows)

    @property
    def synced_s(self) -> float:
        """Seconds spent waiting for the other ranks after the first step."""
        return sum(step.peers_s for step in self.windows)

    @property
    def running_s(self) -> float:
        """The seconds of the steps that count."""
        return sum(step.total_s for step in self.windows)

    @property
    def utilisation(self) -> float | None:
        """AU in [0, 1]; None if no step counts or nothing is computed."""
        if self.counted < 1 or self.compute_s <= 0 or self.running_s <= 0:
            return None
        return self.counted * self.compute_s / self.running_s

    @property
    def per_s_by_quarter(self) -> list[float]:
        """[4] steps a second in quarters of the steps that count; [] where they are fewer."""
        times_s = [step.total_s for step in self.windows]
        cuts = [len(times_s) * number // 4 for number in range(5)]
        quarters = [times_s[first:last] for first, last in pairwise(cuts)]
        return [len(part) / max(sum(part), 1e-9) for part in quarters] if len(times_s) >= 4 else []

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON types, without the single steps."""
        fields = {name: value for name, value in vars(self).items() if name != "windows"}
        sums = ("computed_s", "synced_s", "waited_s", "running_s")
        more = {"steps_per_s_by_quarter": self.per_s_by_quarter, "count": self.counted + 1}
        return fields | {name: getattr(self, name) for name in sums} | more


def run_steps(
    batches: Iterator[Any],
    *,
    compute_s: float,
    seconds: float,
    compute: Callable[[float], object],
    sync: Callable[[bool], bool],
    on_first: Callable[[], object] = lambda: None,
    begins_epoch: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.perf_counter,
) -> Steps:
    """Take a batch, compute, agree with the other ranks; until a rank has done so for long enough.

    Args:
        batches: endless, or ends in every rank after the same number.
        compute_s: seconds a step computes.
        seconds: how long to go on after the first step; at least one step follows it.
        compute: takes so many seconds; not called for 0.
        sync: told whether this rank has enough; whether any has. Waits for all ranks.
        on_first: called when the first step has ended.
        begins_epoch: whether the batch that came last is the first one of an epoch.
        clock: seconds on a clock that only goes forward.

    Raises:
        ValueError: there was no batch.
    """
    began = now = clock()
    first = first_batch = waited_at_borders = 0.0
    steps = borders = 0
    times: list[tuple[float, float, float]] = []
    for _ in batches:
        delivered, requested = clock(), now
        if compute_s > 0:
            compute(compute_s)
        computed_at = clock()
        # The batch is dropped here, before the next one is asked for, as a training step drops it.
        enough = sync(steps > 0 and computed_at - first >= seconds)
        now = clock()
        steps += 1
        if steps == 1:
            first, first_batch = now, delivered - began
            on_first()
            continue
        times.append((delivered - requested, computed_at - delivered, now - computed_at))
        if begins_epoch():
            borders, waited_at_borders = borders + 1, waited_at_borders + delivered - requested
        if enough:
            break
    if not steps:
        raise ValueError("the dataset gives this rank no batch")
    windows = tuple(
        StepTimes(window=number, microbatches=1, data_s=waited, compute_s=computed, peers_s=synced)
        for number, (waited, computed, synced) in enumerate(times, 1)
    )
    others = steps - 1 - borders
    usual_s = (sum(step.data_s for step in windows) - waited_at_borders) / others if others > 0 else 0.0
    return Steps(
        began_s=began,
        ended_s=now,
        windows=windows,
        compute_s=compute_s,
        first_batch_s=first_batch,
        borders=borders,
        border_s=max(0.0, waited_at_borders - borders * usual_s),
    )


class _ResourceUse:
    """The resources that this process used since all ranks began together."""

    def begin(self) -> None:
        """Wait for all ranks, and count from now on."""
        _any_has_enough(False)
        self._device, self._cpu_s = device_bytes(), time.process_time()

    def end(self) -> tuple[int | None, float]:
        """Bytes fetched from devices, and processor seconds."""
        after = device_bytes()
        came = None if after is None or self._device is None else after - self._device
        return came, time.process_time() - self._cpu_s


def run_phase(work: Work) -> RankFigures:
    """One phase in this rank; all ranks begin together."""
    use = _ResourceUse()
    return _read_blocks(work, use) if work.phase == "storage" else _load(work, use)


def _load(work: Work, use: _ResourceUse) -> RankFigures:
    """Steps over the loader's batches; of a training once more over a batch from memory, with it closed."""
    dataset: ShardedDataset = work.dataset.open_shards()
    if work.phase in ("memory", "undecoded"):
        dataset = InMemory(
            dataset,
            work.kept_bytes,
            at_least=2 * work.batch_size * _world(),
            decode=work.phase == "memory",
        )
    trains = work.phase == "training"
    run = functools.partial(
        run_steps,
        compute_s=work.compute_s if trains else 0.0,
        seconds=work.seconds,
        compute=threading.Event().wait,  # nobody sets it: an accelerator that is busy for so long
        sync=_any_has_enough if trains else bool,
    )
    first: list[int] = []
    with DataLoader(
        dataset, batch_size=work.batch_size, shuffle=True, seed=work.seed, memory_limit=work.memory_limit
    ) as loader:
        epochs = _Epochs(loader)
        batches = iter(epochs)
        use.begin()
        steps = run(
            batches,
            on_first=lambda: first.append(loader.stats().samples),
            begins_epoch=lambda: epochs.begins,
        )
        stats, epoch_batches = loader.stats(), len(loader)
        device, cpu_s = use.end()
        batch = next(batches) if trains else None
    if stats.workers == "process":
        cpu_s += stats.build.cpu_s
    samples = stats.samples - first[0]
    return RankFigures(
        rank=_rank(),
        samples=samples,
        samples_per_s=samples / steps.running_s if steps.running_s > 0 else 0.0,
        read_bytes=stats.read_bytes,
        device_bytes=device,
        cpu_s=cpu_s,
        steps=steps,
        replayed=run(repeat(batch)) if trains else None,
        stats=stats.to_json(),
        epoch_batches=epoch_batches,
    )


class _Epochs:
    """A loader's batches, epoch after epoch."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self.begins = False
        """True if the batch that came last is the first one of an epoch."""

    def __iter__(self) -> Iterator[Any]:
        if not len(self._loader):
            raise ValueError("the dataset gives this rank no batch; lower --batch-size or --ranks")
        for _ in count():
            self.begins = True
            for batch in self._loader:
                yield batch
                del batch  # while the next one is made, nobody has this
                self.begins = False


def _read_blocks(work: Work, use: _ResourceUse) -> RankFigures:
    """Blocks are read and thrown away.

    Ranks share the blocks, in a spread order; as many threads read as the loader has.
    """
    dataset = work.dataset.open_shards()
    numbers = own_blocks(dataset, work.seed, _rank(), _world())
    table, source = dataset.kept_blocks, dataset.source()
    local = is_local(dataset.catalog.shard(0).url)
    threads, positions = LOCAL_READERS if local else REMOTE_READERS, count()
    largest = int(table.length[numbers].max())
    use.begin()
    began = time.perf_counter()

    def read(_: int) -> tuple[int, int]:
        out = np.empty(largest, np.uint8)
        samples = nbytes = 0
        while time.perf_counter() - began < work.seconds:
            number = int(numbers[next(positions) % len(numbers)])
            block = dataset.catalog.block(number)
            source.reader.read_into(block.shard, block.offset, out[: block.length])
            samples, nbytes = samples + int(table.num_samples[number]), nbytes + block.length
        return samples, nbytes

    with ThreadPoolExecutor(threads, thread_name_prefix="dataflow-bench") as pool:
        try:
            counts = list(pool.map(read, range(threads)))
        finally:
            source.reader.close()
    samples, nbytes = (sum(column) for column in zip(*counts, strict=True))
    rate = samples / (time.perf_counter() - began)
    device, cpu_s = use.end()
    return RankFigures(
        rank=_rank(), samples=samples, samples_per_s=rate, read_bytes=nbytes, device_bytes=device, cpu_s=cpu_s
    )


def own_blocks(
    dataset: ShardedDataset, seed: int, rank: int, world_size: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A rank's share of the blocks that hold samples; with fewer blocks than ranks, all of them."""
    numbers = np.flatnonzero(dataset.kept_blocks.num_samples)
    if not len(numbers):
        raise ValueError("the dataset has no samples")
    order = numbers[spread_order(len(numbers), seed)]
    return order[rank::world_size] if len(order) >= world_size else order


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def _world() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _any_has_enough(enough: bool) -> bool:
    """Return whether any rank has; no rank goes on before all have asked, as a step ends for all together."""
    if _world() == 1:
        return enough
    flag = torch.tensor([int(enough)])
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
    return bool(flag.item())
