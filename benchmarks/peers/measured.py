"""What is measured of a contestant, in a process of its own: it is built, warmed up, timed, then watched.

Phases: build and first batch (timed apart) -> warm-up -> timed -> watched. Memory is sampled by the parent in
the warm-up and the last phase only, because reading the page tables of a loader slows it down.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import Data, Sizes
from benchmarks.memory import machine_cpu_s, tree_cpu_s
from benchmarks.runner import Tell, forever


@dataclass(frozen=True)
class Job:
    """One run of one contestant."""

    workload: str
    target: str
    """`module:function` of this folder; it takes (Data, workers) and returns a re-iterable of batches."""
    workers: int
    root: str
    sizes: dict[str, int]
    jpegs: str | None = None
    burn_s: float = 0.0
    """CPU seconds of Python the consumer spends on each batch; 0 for the plain consumer."""
    warmup_s: float = 1.0
    timed_s: float = 5.0
    watched_s: float = 1.5
    prepare_only: bool = False

    def data(self) -> Data:
        return Data(Path(self.root), Sizes(**self.sizes), Path(self.jpegs) if self.jpegs else None)


@dataclass
class Tally:
    """What a phase delivered."""

    samples: int = 0
    batches: int = 0
    blocked_s: float = 0.0
    elapsed_s: float = 0.0


def measured(fields: dict[str, Any], tell: Tell) -> None:
    """Run all phases of a job, telling each result."""
    job = Job(**fields)
    module_name, function_name = job.target.split(":")
    module = importlib.import_module(f"benchmarks.peers.{module_name}")
    data = job.data()
    if job.prepare_only:
        prepare = getattr(module, f"prepare_{function_name}", None)
        if prepare:
            prepare(data)
        tell("done")
        return
    tell("imported")
    started = time.perf_counter()
    loader = getattr(module, function_name)(data, job.workers)
    batches = forever(loader)
    first = next(batches)
    tell("first", first_batch_s=time.perf_counter() - started, **describe(job.workload, first, batches, data))
    consume(batches, job.warmup_s, job.burn_s)
    tell("warm")
    own_s, all_s = tree_cpu_s(os.getpid()), machine_cpu_s()
    timed = consume(batches, job.timed_s, job.burn_s)
    own_s, all_s = tree_cpu_s(os.getpid()) - own_s, machine_cpu_s() - all_s
    tell("timed", cpu_s=own_s, others_cpu_s=max(0.0, all_s - own_s), **asdict(timed))
    consume(batches, job.watched_s, job.burn_s)
    tell("done")
    with contextlib.suppress(Exception):
        getattr(loader, "close", lambda: None)()


def consume(batches: Iterator[Any], seconds: float, burn_s: float) -> Tally:
    """Take batches until `seconds` have passed; touch each tensor at both ends, then burn."""
    tally, clock = Tally(), time.perf_counter
    started = clock()
    while (now := clock()) - started < seconds:
        batch = next(batches)
        tally.blocked_s += clock() - now
        tally.samples += touch(batch)
        tally.batches += 1
        if burn_s:
            burn(burn_s)
    tally.elapsed_s = clock() - started
    return tally


def burn(seconds: float) -> None:
    """Spend CPU time of this thread in Python, holding the GIL as a training loop's Python part does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def touch(batch: Any) -> int:
    """Read the first and last element of every tensor (or byte string); return the number of samples."""
    if isinstance(batch, int):  # a limit counts without delivering
        return batch
    lengths = []
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            lengths.append(len(leaf))
            _ = leaf[(0,) * leaf.ndim].item(), leaf[(-1,) * leaf.ndim].item()
        elif leaf:
            _ = leaf[0], leaf[-1]
    return min(lengths)  # the labels: ragged values and offsets are longer, whatever the order of columns


def leaves(batch: Any) -> Iterator[Any]:
    """The tensors and byte strings of a batch; a ragged column is its values and offsets."""
    if isinstance(batch, torch.Tensor | bytes | memoryview):
        yield batch
    elif hasattr(batch, "offsets"):
        yield from (batch.values, batch.offsets)
    else:
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from leaves(part)


def describe(workload: str, first: Any, batches: Iterator[Any], data: Data) -> dict[str, Any]:
    """What the first batch holds; for W3, how many row groups the batches mix (mean of 8 later ones)."""
    if isinstance(first, int):
        return {"delivers": "nothing"}
    parts = list(leaves(first))
    shapes = [f"{str(p.dtype)[6:]}{list(p.shape)}" for p in parts if isinstance(p, torch.Tensor)]
    if strings := len(parts) - len(shapes):
        shapes.append(f"{strings} byte strings")
    shown = {"delivers": ", ".join(shapes)}
    if workload != "W3":
        return shown
    mixed = [len(torch.unique(_label(next(batches)) // data.sizes.rows_per_group)) for _ in range(8)]
    return shown | {"row_groups_per_batch": sum(mixed) / len(mixed)}


def _label(batch: Any) -> torch.Tensor:
    return next(leaf for leaf in leaves(batch) if leaf.dtype == torch.int64)
