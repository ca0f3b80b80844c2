"""The loaders that `compare` runs over the tars of a kind, and what is measured of one."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import Data, Sizes
from benchmarks.memory import tree_cpu_s
from benchmarks.peers.measured import consume
from benchmarks.runner import Tell, forever
from benchmarks.transforms.kinds import Kind, kind

DECIDED_S = 3.0
"""So long a loader that chooses its builders has for going over to processes; then it is taken as it is."""


def transformed(sample: dict[str, Any], *, kind: Kind) -> dict[str, Any]:
    return {"x": kind.make(sample[kind.field].numpy(), random.random), "y": sample["cls"]}


def transformed_randomly(sample: dict[str, Any], rng: np.random.Generator, *, kind: Kind) -> dict[str, Any]:
    return {"x": kind.make(sample[kind.field].numpy(), rng.random), "y": sample["cls"]}


def ours(data: Data, kind: Kind, workers: int | None, workers_kind: Any = None) -> Any:
    from dataflow import DataLoader, ShardedDataset

    catalogs = data.converted(f"transforms-{kind.folder.name}", lambda folder: folder.mkdir(parents=True))
    dataset = ShardedDataset(
        kind.files,
        catalog=str(catalogs / "catalog.arrow"),
        decode={kind.field: None, "cls": "int"},
        transform=partial(transformed_randomly if kind.is_random else transformed, kind=kind),
    )
    return DataLoader(
        dataset, kind.batch, shuffle=True, drop_last=True, num_workers=workers, workers=workers_kind
    )


def ours_by_default(data: Data, kind: Kind, workers: int) -> Any:
    """No number given: processes, with threads until they have started."""
    return ours(data, kind, None)


class Records(torch.utils.data.Dataset[Any]):
    """Map-style over the same tars, read at indexed offsets."""

    def __init__(self, kind: Kind) -> None:
        from benchmarks.peers.torch import TarFields

        self._fields, self._make = TarFields(kind.index, kind.field), kind.make

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, i: int) -> Any:
        return self._make(self._fields.read(int(i)), random.random), int(self._fields.labels[int(i)])


def torch_loader(data: Data, kind: Kind, workers: int) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(
        Records(kind), kind.batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True
    )


def webdataset(data: Data, kind: Kind, workers: int) -> Iterable[Any]:
    from benchmarks.peers.webdataset import _loader

    def sample(fields: dict[str, Any]) -> Any:
        return kind.make(fields[kind.field], random.random), int(fields["cls"])

    return _loader(kind.files, workers, kind.batch, 1000, sample, torch.utils.data.default_collate)


def spdl_processes(data: Data, kind: Kind, workers: int) -> Iterable[Any]:
    from benchmarks.peers.spdl import mapped_in_processes

    return mapped_in_processes(Records(kind), kind.batch, workers)


def grain_processes(data: Data, kind: Kind, workers: int) -> Iterable[Any]:
    import grain

    def batched(samples: Any) -> Any:
        return tuple(map(np.stack, zip(*samples, strict=True)))

    class Values(Records):
        def __getitem__(self, i: int) -> Any:
            x, y = super().__getitem__(i)
            return x.numpy(), np.int64(y)

    dataset = grain.MapDataset.source(Values(kind)).shuffle(seed=0).repeat()
    loader = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    loader = loader.batch(kind.batch, drop_remainder=True, batch_fn=batched)
    loader = loader.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))
    return (tuple(map(torch.from_numpy, batch)) for batch in loader)


OURS, DEFAULT, TORCH = "dataflow", "dataflow, None", "torch"
LOADERS: Mapping[str, Callable[[Data, Kind, int], Iterable[Any]]] = {
    OURS: ours,
    DEFAULT: ours_by_default,
    "dataflow, threads": partial(ours, workers_kind="thread"),
    TORCH: torch_loader,
    "WebDataset": webdataset,
    "SPDL": spdl_processes,
    "Grain": grain_processes,
}


LIBRARIES = {
    TORCH: "benchmarks.peers.torch",
    "WebDataset": "benchmarks.peers.webdataset",
    "SPDL": "benchmarks.peers.spdl",
    "Grain": "grain",
}
"""Imported before the clock starts; what is not here is ours."""


def wrong(kind: Kind, batches: Iterable[Any]) -> str:
    """What differs from an epoch in which each sample is delivered once; empty if nothing does."""
    records = Records(kind)
    epoch = itertools.islice(batches, len(records) // kind.batch)
    delivered = ((batch["x"], batch["y"]) if isinstance(batch, Mapping) else batch for batch in epoch)
    pairs = [(x.clone(), y.clone()) for x, y in delivered]  # SPDL's memory is that of later batches
    made = [records[i] for i in range(len(records))]
    shapes = {(tuple(x.shape), x.dtype, tuple(y.shape)) for x, y in pairs}
    wanted = {((kind.batch, *made[0][0].shape), made[0][0].dtype, (kind.batch,))}
    if shapes != wanted:
        return f"batches of {shapes} instead of {wanted}"
    labels = sum(int(y.sum()) for _, y in pairs), sum(y for _, y in made)
    if labels[0] != labels[1]:
        return f"labels add up to {labels[0]} instead of {labels[1]}"
    values = [sum(float(x.double().sum()) for x, _ in samples) for samples in (pairs, made)]
    if not kind.is_random and abs(values[0] - values[1]) > 1e-6 * abs(values[1]):
        return f"values add up to {values[0]} instead of {values[1]}"
    return ""


def measure(tell: Tell, make: Callable[[], Iterable[Any]], job: Mapping[str, Any]) -> None:
    began = time.perf_counter()
    loader = make()
    batches = forever(loader)
    next(batches)
    tell("first", first_batch_s=time.perf_counter() - began)
    stats = getattr(loader, "stats", None)
    if stats and job["loader"] == DEFAULT:
        until = time.perf_counter() + DECIDED_S
        while stats().workers != "process" and time.perf_counter() < until:
            consume(batches, 0.05, 0)
    consume(batches, job["warmup_s"], 0)
    tell("warm")
    cpu_s = tree_cpu_s(os.getpid())
    timed = consume(batches, job["timed_s"], 0)
    cpu_s = tree_cpu_s(os.getpid()) - cpu_s
    tell(
        "timed",
        samples_per_s=timed.samples / timed.elapsed_s,
        cpu_s_per_1000=1e3 * cpu_s / timed.samples,
        builders=f"{stats().num_workers} {stats().workers}" if stats else "",
    )
    consume(batches, 0.3, 0)
    tell("done")


def measured(job: dict[str, Any], tell: Tell) -> None:
    """Tell the figures of a loader, or what it delivers wrongly."""
    data = Data(Path(job["root"]), Sizes(**job["sizes"]), Path(job["jpegs"]) if job["jpegs"] else None)
    make = partial(LOADERS[job["loader"]], data, kind(job["kind"], data), job["workers"])
    import_module(LIBRARIES.get(job["loader"], "benchmarks.peers.ours"))
    tell("imported")
    if job["is_check"]:
        tell("done", reason=wrong(kind(job["kind"], data), make()))
    else:
        measure(tell, make, job)
