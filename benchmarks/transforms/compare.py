"""`python -m benchmarks.transforms.compare`: Python a sample, by numbers of workers, beside other loaders.

All read the same tars with the same function a sample (`kinds`), shuffled, in full batches, by
worker processes; "dataflow, None" is given no number and chooses itself. First each loader must deliver every
sample of a small epoch once. Then each run is a fresh process with one OpenMP thread; repeats are interleaved
(A B C A B C ...), and medians shown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import REPOSITORY
from benchmarks.data import Data, Sizes, read_through
from benchmarks.harness import bare_torch, interleaved, medians, run_child
from benchmarks.memory import Memory
from benchmarks.options import data_option, jpegs_option, json_option, repeats_option
from benchmarks.report import ReportSummary, machine, save_runs, versions
from benchmarks.transforms.kinds import kind
from benchmarks.transforms.loaders import DEFAULT, LOADERS, OURS, TORCH, measured, ours

LIMIT_S = 60.0
"""A run that takes longer is ended and named."""
SMALL = Sizes(images=256, image_shards=4, records=2_560, record_shards=40)
"""What each loader must deliver exactly once. Two workers share it evenly, as WebDataset needs."""
POINT = ("kind", "workers", "loader")
FIGURES = ("builders", "samples_per_s", "first_batch_s", "cpu_s_per_1000")


@dataclass(frozen=True, kw_only=True)
class TransformRun:
    """One run. Either `reason` says why there are no figures, or all of them are there."""

    kind: str
    loader: str
    workers: int | None
    """None: the loader's own choice."""
    samples_per_s: float = 0.0
    first_batch_s: float = 0.0
    """From constructing the loader, its index at hand, to its first batch; imports excluded."""
    cpu_s_per_1000: float = 0.0
    """CPU seconds of all processes for 1,000 samples."""
    held_mb: float = 0.0
    """Above a process that only imports torch, all processes together."""
    builders: str = ""
    """Who built the batches, as far as the loader tells."""
    reason: str = ""

    @property
    def is_peer(self) -> bool:
        return not self.loader.startswith(OURS)


def child(data: Data, run: TransformRun, **job: Any) -> tuple[dict[str, Any], Memory]:
    """Run a fresh process; return what it told, and its peak memory."""
    told = {"root": str(data.root), "sizes": asdict(data.sizes), "kind": run.kind, "loader": run.loader}
    told |= {"jpegs": str(data.jpeg_folder) if data.jpeg_folder else None, "workers": run.workers}
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return run_child(measured, told | job, environment=environment, limit_s=LIMIT_S)


def checked(data: Data, run: TransformRun) -> TransformRun:
    """The run with a reason if the loader delivers other samples than it should, or none."""
    events, _ = child(data, run, is_check=True)
    return replace(run, reason=events.get("reason", ""))


def timed(data: Data, run: TransformRun, seconds: float, bare_mb: float) -> TransformRun:
    """The run with its figures."""
    events, peak = child(data, run, is_check=False, warmup_s=1.0, timed_s=seconds)
    if events.get("reason"):
        return replace(run, reason=events["reason"])
    figures = {name: events[name] for name in FIGURES if name in events}
    return replace(run, held_mb=max(0.0, peak.held_mb - bare_mb), **figures)


def in_turns(
    planned: Sequence[TransformRun], repeats: int, measure: Callable[[TransformRun], TransformRun]
) -> list[TransformRun]:
    """Repeats are interleaved within kind and number of workers."""
    points: dict[tuple[str, int | None], list[TransformRun]] = {}
    for run in planned:
        points.setdefault((run.kind, run.workers), []).append(run)
    return [
        run
        for point in points.values()
        for run in interleaved(point, repeats, lambda run: run if run.reason else measure(run))
    ]


def ratios(run: TransformRun, rows: Sequence[TransformRun]) -> tuple[float | None, float | None]:
    """Our samples/s over the best peer's, and our first batch over torch's, with as many workers.

    Without a number of ours, the peers' best with any number, and torch's quickest first batch.
    """
    peers = [r for r in rows if r.is_peer and r.kind == run.kind and not r.reason]
    if run.workers is not None:
        peers = [r for r in peers if r.workers == run.workers]
    if run.is_peer or run.reason or not peers:
        return None, None
    firsts = [r.first_batch_s for r in peers if r.loader == TORCH]
    rate = run.samples_per_s / max(r.samples_per_s for r in peers)
    return rate, run.first_batch_s / min(firsts) if firsts else None


def verdicts(rows: Sequence[TransformRun]) -> list[ReportSummary]:
    """What the bars say of ours, with processes and by default."""
    found = []
    for run in rows:
        if run.loader in (OURS, DEFAULT):
            point, (rate, first) = f"{run.kind}, {run.workers} workers", ratios(run, rows)
            found.append(ReportSummary(point, "x the best peer", rate, 1.0))
            if run.loader == OURS:
                found.append(ReportSummary(point, "x torch's first batch", first, 1.5, at_most=True))
    return found


def show(console: Console, rows: Sequence[TransformRun]) -> None:
    """A table a kind: one row a loader and number of workers."""
    for name in dict.fromkeys(run.kind for run in rows):
        title = f"{name} ms of Python a sample" if name[0].isdigit() else name
        table = Table(title=title, title_justify="left")
        for heading in ("workers", "loader", "samples/s", "x best", "CPU s/1000", "first s", "x torch", "MB"):
            table.add_column(heading, justify="left" if heading == "loader" else "right")
        for run in (run for run in rows if run.kind == name):
            table.add_row(*_cells(run, rows))
        console.print(table)
        for run in rows:
            if run.kind == name and run.reason:
                console.print(
                    f"  {run.loader}, {run.workers} workers: not measured: {run.reason}", markup=False
                )


def _cells(run: TransformRun, rows: Sequence[TransformRun]) -> list[str]:
    loader = run.loader + (f" ({run.builders})" if run.loader == DEFAULT else "")
    workers = "None" if run.workers is None else str(run.workers)
    if run.reason:
        return [workers, loader, "none"]
    rate, first = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios(run, rows))
    return [
        workers,
        loader,
        f"{run.samples_per_s:,.0f}",
        rate,
        f"{run.cpu_s_per_1000:.3g}",
        f"{run.first_batch_s:.2f}",
        first,
        f"{run.held_mb:,.0f}",
    ]


def plan(kinds: Sequence[str], workers: Sequence[int], loaders: Sequence[str]) -> list[TransformRun]:
    """Every loader with every number of workers; the one that chooses its own, once."""
    return [
        TransformRun(kind=name, loader=loader, workers=number)
        for name in kinds
        for number in (*workers, None)
        for loader in loaders
        if (loader == DEFAULT) == (number is None)
    ]


@click.command()
@click.option(
    "--kinds", default="0.1,0.5,2,pil,template", show_default=True, help="Milliseconds of Python, or names."
)
@click.option("--workers", default="1,2,3,4", show_default=True, help="Numbers of workers.")
@click.option(
    "--loaders",
    default=",".join(name for name in LOADERS if name != "dataflow, threads"),
    show_default=True,
    help="Which loaders.",
)
@repeats_option
@click.option("--seconds", type=float, default=2.0, show_default=True, help="Timed seconds a run.")
@data_option
@jpegs_option
@json_option
def main(
    kinds: str,
    workers: str,
    loaders: str,
    repeats: int,
    seconds: float,
    root: Path | None,
    jpegs: Path | None,
    output: Path | None,
) -> None:
    """Measure samples/s where a transform is Python, by numbers of worker processes."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    folder = (root or REPOSITORY / ".bench-data").resolve()
    data = Data(folder, jpeg_folder=jpegs)
    small = Data(folder / "transforms-small", SMALL, jpegs)
    console.print(machine(), versions())
    names = re.split(r",(?! )", loaders)
    if unknown := set(names) - LOADERS.keys():
        raise click.BadParameter(f"no such loader: {', '.join(unknown)}", param_hint="--loaders")
    planned = plan(kinds.split(","), [int(number) for number in workers.split(",")], names)
    sources = {name: kind(name, data).folder for name in kinds.split(",")}
    reasons: dict[tuple[Path, str], str] = {}
    for name, source in sources.items():
        for place in (data, small):  # the first use indexes the shards
            ours(place, kind(name, place), 0).close()
        read_through(source)
        for loader in names:
            if (source, loader) not in reasons:
                run = TransformRun(kind=name, loader=loader, workers=2)
                reasons[source, loader] = checked(small, run).reason
    planned = [replace(run, reason=reasons[sources[run.kind], run.loader]) for run in planned]
    bare_mb = bare_torch().held_mb

    def measure(run: TransformRun) -> TransformRun:
        done = timed(data, run, seconds, bare_mb)
        figures = done.reason or f"{done.samples_per_s:,.0f} samples/s"
        console.print(f"{run.kind}, {run.loader}, {run.workers} workers: {figures}", markup=False)
        return done

    runs = in_turns(planned, repeats, measure)
    rows = medians(runs, *POINT)
    show(console, rows)
    bars = verdicts(rows)
    for bar in bars:
        if bar.says != "reached":
            ratio = "" if bar.measured is None else f"{bar.measured:.2f} "
            console.print(f"  {bar.workload}: {ratio}{bar.bar}: {bar.says}")
    console.print(f"{sum(bar.says == 'reached' for bar in bars)} of {len(bars)} bars reached")
    if output:
        save_runs(output, bars, rows, runs)


if __name__ == "__main__":
    main()
