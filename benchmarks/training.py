"""`python -m benchmarks.training`: what a loader costs a training on a GPU.

A vision transformer (bfloat16, SGD) trains on photographs of W1, which each loader decodes, crops at random
and copies to the device; "one batch" is the same training on one batch that lies there: what a perfect loader
would give. What a loader costs a training is what is missing from that rate. Each run is a fresh process;
repeats are interleaved (A B C A B C ...), and medians shown.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.data import Data, Sizes, read_through
from benchmarks.harness import REPOSITORY, run_child
from benchmarks.report import machine, save_figures, versions
from benchmarks.training_child import LOADERS, WITH_WORKERS

LIMIT_S = 90.0
"""A run that takes longer is ended and named."""
PERFECT = "one batch"
MEDIANS = ("samples_per_s", "blocked_share", "cpu_s_per_1000", "first_batch_s")


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run. Either `reason` says why there are no figures, or all of them are there."""

    loader: str
    workers: int | None
    """None: the loader's own choice."""
    samples_per_s: float = 0.0
    blocked_share: float = 0.0
    """Of the time, in the loader's `next`; the device may still be busy with earlier steps."""
    cpu_s_per_1000: float = 0.0
    """CPU seconds of all processes for 1,000 samples, the training included."""
    builders: str = ""
    """Who built the batches, as far as the loader tells."""
    first_batch_s: float = 0.0
    """From constructing the loader, its index at hand, to the end of the first step."""
    reason: str = ""


def measured(run: TrainingRun, job: dict[str, Any]) -> TrainingRun:
    """The run with its figures."""
    told = job | {"loader": run.loader, "workers": run.workers}
    events, _ = run_child("benchmarks.training_child", told, {"OMP_NUM_THREADS": "1"}, limit_s=LIMIT_S)
    if events.get("reason"):
        return replace(run, reason=events["reason"])
    return replace(run, **{name: events[name] for name in ("builders", *MEDIANS)})


def medians(runs: Sequence[TrainingRun]) -> list[TrainingRun]:
    """One row a loader and number of workers."""
    groups: dict[tuple[str, int | None], list[TrainingRun]] = {}
    for run in runs:
        groups.setdefault((run.loader, run.workers), []).append(run)
    return [
        next((run for run in group if run.reason), None)
        or replace(group[0], **{name: statistics.median(getattr(r, name) for r in group) for name in MEDIANS})
        for group in groups.values()
    ]


def show(console: Console, rows: Sequence[TrainingRun]) -> None:
    """A table: the fastest first."""
    perfect = next((run.samples_per_s for run in rows if run.loader == PERFECT), 0.0)
    table = Table(title="Training fed by", title_justify="left")
    for heading in ("loader", "workers", "samples/s", "missing %", "in next %", "CPU s/1000", "first step s"):
        table.add_column(heading, justify="left" if heading == "loader" else "right")
    for run in sorted(rows, key=lambda run: -run.samples_per_s):
        if run.reason:
            console.print(f"  {run.loader}, {run.workers} workers: not measured: {run.reason}", markup=False)
            continue
        table.add_row(
            run.loader + (f" ({run.builders})" if run.builders else ""),
            "" if run.workers is None else str(run.workers),
            f"{run.samples_per_s:,.0f}",
            f"{100 * (1 - run.samples_per_s / perfect):.1f}" if perfect else "",
            f"{100 * run.blocked_share:.1f}",
            f"{run.cpu_s_per_1000:.3g}",
            f"{run.first_batch_s:.2f}",
        )
    console.print(table)


@click.command()
@click.option("--device", default="cuda", show_default=True, help="Where the training runs.")
@click.option("--loaders", default=",".join(LOADERS), show_default=True, help="Which loaders.")
@click.option(
    "--workers", default="", help="Numbers of workers of the others.  [default: half the cores, and all]"
)
@click.option("--batch", type=click.IntRange(1), default=256, show_default=True, help="Images a step.")
@click.option("--width", type=click.IntRange(64), default=384, show_default=True, help="Of the model.")
@click.option("--depth", type=click.IntRange(1), default=12, show_default=True, help="Of the model.")
@click.option("--images", type=click.IntRange(8), default=4_000, show_default=True, help="In the dataset.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Interleaved repeats.")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Timed seconds a run.")
@click.option(
    "--data", "root", type=click.Path(path_type=Path), envvar="DATAFLOW_BENCH_DATA", help="Data folder."
)
@click.option(
    "--jpegs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="JPEGs for the images; by default they are made from noise.",
)
@click.option(
    "--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Where to keep results."
)
def main(
    device: str,
    loaders: str,
    workers: str,
    batch: int,
    width: int,
    depth: int,
    images: int,
    repeats: int,
    seconds: float,
    root: Path | None,
    jpegs: Path | None,
    output: Path | None,
) -> None:
    """Measure what loaders cost a training on a GPU."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    data = Data((root or REPOSITORY / ".bench-data").resolve(), Sizes(images=images), jpegs)
    data.make("W1")
    LOADERS["dataflow"](data, batch, torch.device("cpu")).close()  # the first use indexes the shards
    read_through(data.root / "W1")
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else ""
    console.print(machine(), versions(), gpu)
    cores = len(os.sched_getaffinity(0))
    counts = [int(n) for n in workers.split(",")] if workers else [max(1, cores // 2), cores]
    planned = [
        TrainingRun(loader=name, workers=number)
        for name in re.split(r",(?! )", loaders)
        for number in (counts if name in WITH_WORKERS else [None])
    ]
    job = {"root": str(data.root), "sizes": asdict(data.sizes), "jpegs": str(jpegs) if jpegs else None}
    job |= {"device": device, "batch": batch, "width": width, "depth": depth}
    job |= {"warmup_s": 2.0, "timed_s": seconds}
    runs: list[TrainingRun] = []
    for _ in range(repeats):
        for run in planned:
            runs.append(measured(run, job))
            figures = runs[-1].reason or f"{runs[-1].samples_per_s:,.0f} samples/s"
            console.print(f"{run.loader}, {run.workers} workers: {figures}", markup=False)
    rows = medians(runs)
    show(console, rows)
    if output:
        save_figures(
            output, gpu=gpu, medians=[asdict(row) for row in rows], runs=[asdict(run) for run in runs]
        )


if __name__ == "__main__":
    main()
