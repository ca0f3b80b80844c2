"""`python -m benchmarks.transforms.at_work`: how many builders are at work, and how evenly batches come.

A transform only waits, as for a server, so that any number of builders fits on few cores: where each has work
all the time, a loader gives (builders / wait) samples/s. The consumer takes batches as fast as they come.
Each run is a fresh process. Python's garbage collector is off while it is timed: a full collection stops all
threads for 0.3 s on a slow machine, whatever the loader does.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import REPOSITORY
from benchmarks.harness import interleaved, medians, run_child
from benchmarks.options import data_option, json_option, repeats_option
from benchmarks.report import ReportSummary, machine, save_runs, versions
from benchmarks.runner import Tell, forever

SAMPLES, SHARD_SAMPLES, VALUE_BYTES = 80_000, 1_000, 300
LIMIT_S = 120.0
AT_WORK, LONGEST_GAP = 0.9, 2.0


@dataclass(frozen=True, kw_only=True)
class WaitRun:
    """One run."""

    builders: str
    """Their kind, number, milliseconds of waiting a sample, and batch size, such as "thread 16 5 32"."""
    samples_per_s: float = 0.0
    possible_per_s: float = 0.0
    """Samples/s if all builders did nothing but wait, all the time."""
    at_work: float = 0.0
    """Share of the builders that had a batch to build, on the mean."""
    longest_gap: float = 0.0
    """The longest time between two batches, over the mean."""
    late_gap: float = 0.0
    """The same of the 99th percentile."""
    reason: str = ""
    """Why there are no figures."""


def written(folder: Path) -> Path:
    """The folder with the shards in it."""
    from dataflow import ShardWriter

    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with ShardWriter(str(folder / "s-%03d.tar"), max_count=SHARD_SAMPLES, overwrite=True) as out:
            for i in range(SAMPLES):
                out.write({"__key__": f"{i:06d}", "bin": bytes(VALUE_BYTES), "cls": i % 10})
        (folder / "done").touch()
    return folder


def measured(job: dict[str, Any], tell: Tell) -> None:
    """Tell the figures of one loader."""
    from dataflow import DataLoader, ShardedDataset

    kind, number, wait_ms, batch = job["builders"].split()
    wait_s = float(wait_ms) / 1e3

    def waits(sample: Any) -> Any:
        time.sleep(wait_s)
        return {"y": sample["cls"]}

    waits.releases_gil = True  # type: ignore[attr-defined]
    dataset = ShardedDataset(f"{job['folder']}/s-*.tar", transform=waits)
    loader = DataLoader(dataset, int(batch), shuffle=True, num_workers=int(number), workers=kind)
    batches = forever(loader)
    next(batches)
    tell("first")
    _times(batches, job["warmup_s"])
    tell("warm")
    gc.collect()
    gc.freeze()
    gc.disable()
    before = loader.stats()
    times = _times(batches, job["timed_s"])
    stats = loader.stats().since(before)
    gaps = np.diff(times)
    tell(
        "timed",
        samples_per_s=int(batch) * len(gaps) / float(gaps.sum()),
        possible_per_s=int(number) / wait_s,
        at_work=stats.build.busy_s / stats.elapsed_s / int(number),
        longest_gap=float(gaps.max() / gaps.mean()),
        late_gap=float(np.quantile(gaps, 0.99) / gaps.mean()),
    )
    loader.close()
    tell("done")


def _times(batches: Iterator[Any], seconds: float) -> list[float]:
    """Times at which batches came."""
    times = [time.perf_counter()]
    while times[-1] - times[0] < seconds:
        next(batches)
        times.append(time.perf_counter())
    return times


def verdicts(rows: list[WaitRun]) -> list[ReportSummary]:
    """What the bars say."""
    found = []
    for row in rows:
        found.append(ReportSummary(row.builders, "of the builders at work", row.at_work, AT_WORK))
        found.append(
            ReportSummary(row.builders, "x the mean gap", row.longest_gap, LONGEST_GAP, at_most=True)
        )
    return found


@click.command()
@click.option(
    "--builders",
    default="thread 4 5 32,thread 16 5 32,thread 64 20 32,thread 64 5 32,process 4 100 8",
    show_default=True,
    help="Kind, number, milliseconds of waiting a sample, batch size; several by commas.",
)
@repeats_option
@click.option("--seconds", type=float, default=4.0, show_default=True, help="Timed seconds a run.")
@data_option
@json_option
def main(builders: str, repeats: int, seconds: float, root: Path | None, output: Path | None) -> None:
    """Measure how many builders are at work, and how evenly batches come, where a transform waits."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(machine(), versions())
    folder = written((root or REPOSITORY / ".bench-data").resolve() / "waits")

    def measure(run: WaitRun) -> WaitRun:
        job = {"builders": run.builders, "folder": str(folder), "warmup_s": 1.5, "timed_s": seconds}
        events, _ = run_child(measured, job, limit_s=LIMIT_S)
        names = ("samples_per_s", "possible_per_s", "at_work", "longest_gap", "late_gap")
        return WaitRun(builders=run.builders, **{name: events[name] for name in names})

    runs = [*interleaved([WaitRun(builders=one) for one in builders.split(",")], repeats, measure)]
    rows = medians(runs, "builders")
    table = Table()
    for heading in ("builders", "samples/s", "possible", "at work", "longest gap", "99 %"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row.builders,
            f"{row.samples_per_s:,.0f}",
            f"{row.possible_per_s:,.0f}",
            f"{row.at_work:.2f}",
            f"{row.longest_gap:.1f} x",
            f"{row.late_gap:.1f} x",
        )
    console.print(table)
    if output:
        save_runs(output, verdicts(rows), rows, runs)


if __name__ == "__main__":
    main()
