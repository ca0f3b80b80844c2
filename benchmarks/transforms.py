"""`python -m benchmarks.transforms`: Python a sample, by numbers of workers, beside other loaders.

All read the tars of W4; a transform burns so much Python a sample, in processes (in threads where a name says
so).
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.data import Data, read_through
from benchmarks.harness import REPOSITORY, bare_torch, run_child
from benchmarks.report import machine, save_figures, versions
from benchmarks.transforms_child import LOADERS, ours

LIMIT_S = 120.0
"""A run that takes longer is ended and named."""


@dataclass(frozen=True, kw_only=True)
class TransformRun:
    """One run."""

    loader: str
    workers: int
    cost_ms: float
    samples_per_s: float = 0.0
    first_batch_s: float = 0.0
    cpu_us_per_sample: float = 0.0
    held_mb: float = 0.0
    """Above a process that only imports torch, all processes together."""
    reason: str = ""


def run(
    data: Data, loader: str, workers: int, cost_ms: float, seconds: float, bare_mb: float
) -> TransformRun:
    """One fresh process."""
    job = {
        "root": str(data.root),
        "loader": loader,
        "workers": workers,
        "cost_s": cost_ms / 1e3,
        "warmup_s": 1.5,
        "timed_s": seconds,
    }
    events, peak = run_child("benchmarks.transforms_child", job, {"OMP_NUM_THREADS": "1"}, limit_s=LIMIT_S)
    done = TransformRun(loader=loader, workers=workers, cost_ms=cost_ms)
    if events.get("reason"):
        return replace(done, reason=events["reason"])
    figures = {name: events[name] for name in ("samples_per_s", "first_batch_s", "cpu_us_per_sample")}
    return replace(done, held_mb=max(0.0, peak.held_mb - bare_mb), **figures)


def median_of(runs: Sequence[TransformRun]) -> TransformRun:
    """The median of each figure of repeats."""
    names = ("samples_per_s", "first_batch_s", "cpu_us_per_sample", "held_mb")
    return replace(runs[-1], **{name: statistics.median(getattr(r, name) for r in runs) for name in names})


def show(console: Console, medians: Sequence[TransformRun]) -> None:
    """One row a loader and point."""
    table = Table(title="transforms in Python over the tars of W4", title_justify="left")
    for heading in (
        "ms a sample",
        "workers",
        "loader",
        "samples/s",
        "CPU us a sample",
        "first batch ms",
        "MB",
    ):
        table.add_column(heading, justify="right")
    for run in medians:
        rate = f"{run.samples_per_s:,.0f}" if not run.reason else run.reason
        figures = (f"{run.cpu_us_per_sample:,.0f}", f"{run.first_batch_s * 1e3:,.0f}", f"{run.held_mb:,.0f}")
        table.add_row(f"{run.cost_ms:g}", str(run.workers), run.loader, rate, *figures)
    console.print(table)


@click.command()
@click.option("--costs", default="0.1,0.5,2", show_default=True, help="Milliseconds of Python a sample.")
@click.option("--workers", default="1,2,4", show_default=True, help="Numbers of workers.")
@click.option(
    "--loaders", default=",".join(LOADERS), show_default=False, help="Which loaders; all by default."
)
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True, help="Interleaved repeats.")
@click.option("--seconds", type=float, default=3.0, show_default=True, help="Timed seconds a run.")
@click.option(
    "--data", "root", type=click.Path(path_type=Path), envvar="DATAFLOW_BENCH_DATA", help="Data folder."
)
@click.option(
    "--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Where to keep results."
)
def main(
    costs: str,
    workers: str,
    loaders: str,
    repeats: int,
    seconds: float,
    root: Path | None,
    output: Path | None,
) -> None:
    """Measure samples/s where a transform burns Python, by numbers of worker processes."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    data = Data((root or REPOSITORY / ".bench-data").resolve())
    data.make("W4")
    ours(data, 0, 0.0, "thread").close()  # the first use indexes the shards
    read_through(data.root / "W4")
    bare = bare_torch()
    console.print(machine(), versions())
    chosen = [name for name in LOADERS if name in re.split(r",(?! )", loaders)]
    points = [(float(c), int(w)) for c in costs.split(",") for w in workers.split(",")]
    runs: list[TransformRun] = []
    for cost_ms, count in points:
        for _ in range(repeats):
            for name in chosen:
                runs.append(run(data, name, count, cost_ms, seconds, bare.held_mb))
                console.print(
                    f"{name}, {count} workers, {cost_ms:g} ms: {runs[-1].samples_per_s:,.0f} samples/s"
                )
    groups: dict[tuple[float, int, str], list[TransformRun]] = {}
    for one in runs:
        groups.setdefault((one.cost_ms, one.workers, one.loader), []).append(one)
    medians = [median_of(group) for group in groups.values()]
    show(console, medians)
    if output:
        save_figures(output, runs=[asdict(r) for r in runs], medians=[asdict(r) for r in medians])


if __name__ == "__main__":
    main()
