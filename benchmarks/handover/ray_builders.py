"""What batches that Ray actors build cost the trainer, and what the death of an actor does.

A cluster of two nodes runs on this machine: the trainer's, which has no CPU to give, and one for actors. So
all share its cores, and rates say nothing of other machines; what the trainer's node pays does: processor
time of the training process, and of the Raylet beside it, which moves objects. "images" are JPEGs of W1 that
are decoded and cropped; "records" become floats (256 KB a batch) by a transform in Python that computes
nothing else: what is left is the overhead.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import REPOSITORY
from benchmarks.data import Data, Sizes, read_through
from benchmarks.options import data_option, json_option, repeats_option
from benchmarks.report import machine, save_figures, versions
from benchmarks.transforms.kinds import kind
from benchmarks.transforms.loaders import transformed
from dataflow import DataLoader, Image, ShardedDataset

BATCH = 64
SIZES = Sizes(images=1_600, image_shards=4, records=20_000, record_shards=10)
STORE_BYTES = 200 << 20
FEEDS: dict[str, dict[str, Any]] = {
    "threads": {},
    "processes": {"workers": "process"},
    "actors that read": {"builders": "ray"},
    "actors, shipped": {"builders": "ray", "ship_blocks": True},
}


@dataclass(frozen=True, kw_only=True)
class RayRun:
    """One run of two epochs: actors start in the first, the second is timed."""

    data: str
    feed: str
    start_s: float
    """To the first batch."""
    batches_per_s: float
    trainer_cpu_ms: float
    """A batch, of all threads of the training process."""
    raylet_cpu_ms: float
    """A batch, of the process of Ray that moves objects on the trainer's node."""
    is_exact: bool
    """Whether the batches are, value by value, those that threads built first."""
    killed_s: float = 0.0
    """What an epoch took longer whose first actor was killed after a quarter of the batches."""
    killed_is_exact: bool = False


@contextmanager
def cluster(actors: int) -> Iterator[Any]:
    """A node for the trainer and one for actors; gives the Raylet of the trainer's."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=actors, object_store_memory=STORE_BYTES)
    variables = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ray.init(address=made.address, log_to_driver=False, runtime_env={"env_vars": variables})
    try:
        yield psutil.Process(made.head_node.all_processes["raylet"][0].process.pid)
    finally:
        ray.shutdown()
        made.shutdown()


def tagged(batch: Any) -> Any:
    """Who built the batch."""
    return {**batch, "by": os.getpid()}


def dataset_of(data: Data, name: str) -> ShardedDataset:
    if name == "images":
        decode = {"jpg": Image(size=224, crop="random_resized"), "cls": "int"}
        return ShardedDataset(data.files("W1"), decode=decode, batch_transform=tagged)
    return ShardedDataset(
        data.files("W4"),
        decode={"bin": None, "cls": "int"},
        transform=partial(transformed, kind=kind("0", data)),
        batch_transform=tagged,
    )


def digest(batch: Any) -> tuple[Any, ...]:
    """What tells two batches apart."""
    values = [np.asarray(batch[name]) for name in sorted(set(batch) - {"by"})]
    return tuple((value.shape, hash(value.tobytes())) for value in values)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def epoch(loader: Any) -> tuple[float, float, int, float]:
    """Seconds to the first batch, of the rest, batches in that, and our processor seconds meanwhile."""
    began_s = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first_s, own_s, count = time.perf_counter(), time.process_time(), 0
    for batch in batches:
        del batch
        count += 1
    return first_s - began_s, time.perf_counter() - first_s, count, time.process_time() - own_s


def killed_epoch(loader: Any) -> tuple[float, list[Any]]:
    """Seconds and batches of an epoch whose first actor is killed on the way."""
    began_s, digests = time.perf_counter(), []
    for number, batch in enumerate(loader):
        if number == len(loader) // 4:
            os.kill(batch["by"], signal.SIGKILL)
        digests.append(digest(batch))
    return time.perf_counter() - began_s, digests


def run(data: Data, name: str, feed: str, count: int, raylet: psutil.Process, whole: list[Any]) -> RayRun:
    """Epochs of one loader: one to start, one timed, one compared, one with a death."""
    options = {"num_workers": count, **FEEDS[feed]}
    with DataLoader(dataset_of(data, name), BATCH, shuffle=True, drop_last=True, **options) as loader:
        start_s = epoch(loader)[0]
        raylet_s = cpu_s(raylet)
        _, seconds, batches, own_s = epoch(loader)
        raylet_s = cpu_s(raylet) - raylet_s
        loader.set_epoch(0)
        began_s = time.perf_counter()
        digests = [digest(batch) for batch in loader]
        plain_s = time.perf_counter() - began_s
        whole = whole or digests
        killed_s, killed = plain_s, digests
        if "builders" in options:
            loader.set_epoch(0)
            killed_s, killed = killed_epoch(loader)
    return RayRun(
        data=name,
        feed=feed,
        start_s=start_s,
        batches_per_s=batches / seconds,
        trainer_cpu_ms=own_s / batches * 1e3,
        raylet_cpu_ms=raylet_s / batches * 1e3,
        is_exact=digests == whole,
        killed_s=killed_s - plain_s,
        killed_is_exact=killed == whole,
    )


def median_of(runs: list[RayRun]) -> RayRun:
    """The median of each figure of repeats."""
    names = ("start_s", "batches_per_s", "trainer_cpu_ms", "raylet_cpu_ms", "killed_s")
    figures = {name: statistics.median(getattr(run, name) for run in runs) for name in names}
    exact = {name: all(getattr(run, name) for run in runs) for name in ("is_exact", "killed_is_exact")}
    return RayRun(data=runs[0].data, feed=runs[0].feed, **figures, **exact)


def show(console: Console, medians: list[RayRun]) -> None:
    """One row a feed and dataset."""
    table = Table(title=f"batches of {BATCH} by Ray actors, beside others", title_justify="left")
    for heading in (
        "data",
        "builders",
        "batches/s",
        "trainer ms",
        "Raylet ms",
        "first s",
        "exact",
        "death s",
    ):
        table.add_column(heading, justify="right")
    for run in medians:
        exact = "yes" if run.is_exact and run.killed_is_exact else "NO"
        death = f"{run.killed_s:+.1f}" if "actors" in run.feed else ""
        costs = (f"{run.trainer_cpu_ms:.2f}", f"{run.raylet_cpu_ms:.2f}", f"{run.start_s:.1f}")
        table.add_row(run.data, run.feed, f"{run.batches_per_s:,.1f}", *costs, exact, death)
    console.print(table)


@click.command()
@click.option("--actors", type=click.IntRange(1), default=2, show_default=True, help="Builders of each kind.")
@repeats_option
@data_option
@json_option
def main(actors: int, repeats: int, root: Path | None, output: Path | None) -> None:
    """Measure what batches cost the training process, by who builds them, and what a killed actor costs."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    data = Data((root or REPOSITORY / ".bench-data" / "ray").resolve(), SIZES)
    for workload in ("W1", "W4"):
        data.make(workload)
        read_through(data.root / workload)
    console.print(machine(), versions())
    runs: list[RayRun] = []
    wholes: dict[str, list[Any]] = {}
    for name in ("images", "records"):
        with DataLoader(dataset_of(data, name), BATCH, shuffle=True, drop_last=True) as loader:
            wholes[name] = [digest(batch) for batch in loader]
    with cluster(actors) as raylet:
        for _ in range(repeats):
            for name in wholes:
                runs.extend(run(data, name, feed, actors, raylet, wholes[name]) for feed in FEEDS)
    groups = {
        (run.data, run.feed): [r for r in runs if (r.data, r.feed) == (run.data, run.feed)] for run in runs
    }
    medians = [median_of(group) for group in groups.values()]
    show(console, medians)
    if output:
        save_figures(
            output,
            arguments={"actors": actors, "repeats": repeats, "batch": BATCH},
            medians=[asdict(run) for run in medians],
            runs=[asdict(run) for run in runs],
        )


if __name__ == "__main__":
    main()
