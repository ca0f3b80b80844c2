"""`python -m benchmarks.handover.fork_memory`: memory of a training with processes that are forked from it.

Windows of compressed Parquet fill 1 GiB of memory limit, and two builders build. The figures are the
anonymous and shared memory of all processes (PSS) beyond that of the process before: after 100 batches,
beside the limit, and at its peak, beside that of `threads`, which are no process. `evaluation`: workers of
another loader, which are forked in mid-epoch, live on: each page of the arena that is written to afterwards
would be copied, if they had it. `copied`: as if they had. What pyarrow has allocated is copied in either.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks import REPOSITORY
from benchmarks.harness import run_child
from benchmarks.memory import tree_memory
from benchmarks.options import data_option, json_option
from benchmarks.report import ReportSummary, machine, save_figures, versions
from benchmarks.runner import Tell, forever

LIMIT, MORE_MB, FIRST, BATCHES = 1 << 30, 150.0, 100, 300
FILES, ROWS, GROUP, BYTES = 12, 500, 50, 150_000
LIMIT_S = 300.0


def written(folder: Path) -> Path:
    """The folder with the shards in it."""
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(FILES):
            values = np.random.default_rng(number).integers(0, 16, ROWS * BYTES, dtype=np.uint8)
            columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(values), BYTES), "y": range(ROWS)}
            path = folder / f"s-{number:02d}.parquet"
            pq.write_table(pa.table(columns), path, row_group_size=GROUP, compression="zstd")
        (folder / "done").touch()
    return folder


def head_of(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that keeps little, so that memory is the arena's."""
    return {"x": sample["x"][:100], "y": sample["y"]}


def measured(job: dict[str, Any], tell: Tell) -> None:
    """Tell the peak of one setup."""
    from dataflow import DataLoader, ShardedDataset, Shuffle
    from prefetch.memory.arena import Arena

    if job["setup"] == "copied":
        Arena.before_fork = lambda self: []  # type: ignore[method-assign]
    dataset = ShardedDataset(f"{job['folder']}/s-*.parquet", transform=head_of)
    loader = DataLoader(
        dataset,
        32,
        shuffle=Shuffle("window", window_blocks=40),
        num_workers=2,
        memory_limit=LIMIT,
        workers="thread" if job["setup"] == "threads" else None,
    )
    batches, before = forever(loader), tree_memory(os.getpid()).held_mb
    for _ in range(20):
        next(batches)
    if job["setup"] in ("evaluation", "copied"):
        evaluation = iter(DataLoader(range(10_000), 8, num_workers=2))  # type: ignore[arg-type]
        next(evaluation)
    held = []
    for number in range(20, BATCHES):
        next(batches)
        if number % 10 == 9:
            held.append(tree_memory(os.getpid()).held_mb - before)
            if number + 1 == FIRST:
                tell("first", first_mb=held[-1])
    tell("done", peak_mb=max(held))


@click.command()
@data_option
@json_option
def main(root: Path | None, output: Path | None) -> None:
    """Measure the memory of a training and its forked processes beside 1 GiB of arena."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(machine(), versions())
    folder = str(written((root or REPOSITORY / ".bench-data").resolve() / "fork-memory"))
    found, threads = [], 0.0
    for setup in ("threads", "builders", "evaluation", "copied"):
        events, _ = run_child(measured, {"setup": setup, "folder": folder}, limit_s=LIMIT_S)
        threads = threads or events["peak_mb"]
        first, peak = f"MB after {FIRST} batches", f"MB at the peak of {BATCHES}, threads and {MORE_MB:g}"
        found += [
            ReportSummary(setup, first, events["first_mb"], LIMIT / 1e6 + MORE_MB, at_most=True),
            ReportSummary(setup, peak, events["peak_mb"], threads + MORE_MB, at_most=True),
        ]
        for verdict in found[-2:]:
            console.print(verdict.line)
    if output:
        save_figures(output, verdicts=[vars(bar) | {"verdict": bar.says} for bar in found])


if __name__ == "__main__":
    main()
