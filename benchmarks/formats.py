"""`python -m benchmarks.formats`: files of peers as their writers left them, beside the owner's reader.

W4 (records of 3,072 bytes and a class, 256 a batch) and W2 (2,049 tokens a sample, 16 a batch), shuffled,
from MDS, LitData, TFRecord and ArrayRecord; none is compressed. Three contestants each: ours, the owner's
reader, and ours from plain tars of the same samples. Owners' readers are `StreamingDataLoader` of Streaming
with 2 workers and of LitData with none, tf.data with AUTOTUNE and `parse_example` over batches, and Grain
with 16 threads: the best settings of two cores. `--sweep` tries others in short runs, and takes the fastest.
Each run is a process of its own, in turns, from the page cache; medians are shown.

In its first run each reads an epoch of a small dataset, whose samples must be those that the owner gives.
Then ours reads an epoch over HTTP, 50 ms before each answer; no owner's reader takes URLs of HTTP. Needs
mosaicml-streaming, litdata, tensorflow-cpu, grain and array-record.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import REPOSITORY
from benchmarks.data import Data, Sizes, read_through
from benchmarks.harness import interleaved, medians, run_child
from benchmarks.memory import tree_cpu_s
from benchmarks.options import data_option, json_option, repeats_option
from benchmarks.remote.slow_server import free_port, serving
from benchmarks.report import ReportSummary, save_runs
from benchmarks.runner import Tell, forever

OWNERS = {
    ("mds", "W4"): "mosaic:w4",
    ("mds", "W2"): "mosaic:w2",
    ("litdata", "W4"): "litdata:w4",
    ("litdata", "W2"): "litdata:w2",
    ("tfrecord", "W4"): "tf:w4",
    ("tfrecord", "W2"): "tf:w2",
    ("array_record", "W4"): "grain:w4_plain",
    ("array_record", "W2"): "grain:w2_plain",
}
"""The functions of owners' readers below `benchmarks.peers`."""
FORMATS = ("mds", "litdata", "tfrecord", "array_record")
WORKLOADS = ("W4", "W2")
SETTINGS = {"mds": (2, 0, 3), "litdata": (0, 2, 3), "tfrecord": (0,), "array_record": (16, 0, 2)}
"""Numbers of workers or threads of an owner's reader, the best first; tf.data chooses for itself."""
OURS, OWNER, TAR = "ours", "owner", "tar"
TIMES_OWNER = {"tfrecord": 1.5}
"""Times the owner's rate on W4 that ours shall have; of the others 3."""
SHARE_OF_TAR = 0.6
SIZES = Sizes(records=100_096, record_shards=20, tokens=2049 * 24_576)
SMALL = Sizes(records=2_048, record_shards=4, tokens=2049 * 1_024)
"""Whole batches of W2 and W4, also where windows do not overlap, as LitData's do."""
STORE = {"latency-ms": 50.0}
WARM_S, TIMED_S, TRIED_S, REMOTE_S = 1.0, 1.5, 0.5, 8.0
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class FormatRun:
    """One run. Either `reason` says why there are no figures, or all of them are there."""

    format: str
    workload: str
    by: str
    """Ours, the owner, or ours from tars."""
    over: str = "files"
    workers: int = 0
    samples_per_s: float = 0.0
    cpu_us: float = 0.0
    """CPU time of all processes for a sample."""
    first_batch_s: float = 0.0
    """From constructing the loader, its index at hand, to its first batch; imports excluded."""
    digest: str = ""
    """Of the samples of an epoch of the small dataset, in any order."""
    reason: str = ""


@dataclass(frozen=True)
class Folders:
    """Where the data lies."""

    root: str

    def data(self) -> Data:
        """What is timed."""
        return Data(Path(self.root) / "formats", SIZES)

    def small(self) -> Data:
        """What is compared."""
        return Data(Path(self.root) / "formats-small", SMALL)


def built(data: Data, run: FormatRun, server: str = "") -> Iterable[Any]:
    """The loader of a contestant."""
    if run.by == OWNER:
        module, function = OWNERS[run.format, run.workload].split(":")
        made: Iterable[Any] = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)(
            data, run.workers
        )
        return made
    from benchmarks.peer_files import loader

    return loader(data, run.format, run.workload, server)


def prepared(root: str, name: str) -> None:
    """Write all files of a format, unless they are there."""
    for data in (Folders(root).data(), Folders(root).small()):
        for workload in WORKLOADS:
            data.make(workload)
            if name == TAR:
                if workload == "W2":
                    from benchmarks.peer_files import token_tars

                    token_tars(data)
                continue
            module, function = OWNERS[name, workload].split(":")
            getattr(importlib.import_module(f"benchmarks.peers.{module}"), f"prepare_{function}")(data)


def timed(root: str, asked: dict[str, Any], timed_s: float, compares: bool, tell: Tell) -> None:
    """Tell the digest of the small dataset's samples, then rate and CPU time of batches after a warm-up."""
    from benchmarks.peers.measured import consume

    run, figures = FormatRun(**asked), dict[str, Any]()
    if compares:
        figures["digest"] = digest(built(Folders(root).small(), replace(run, workers=0)))
    began = time.perf_counter()
    loader = built(Folders(root).data(), run)
    batches = forever(loader)
    next(batches)
    figures["first_batch_s"] = time.perf_counter() - began
    consume(batches, WARM_S, 0.0)
    used_s = tree_cpu_s(os.getpid())
    tally = consume(batches, timed_s, 0.0)
    figures["cpu_us"] = 1e6 * (tree_cpu_s(os.getpid()) - used_s) / tally.samples
    tell("done", result=figures | {"samples_per_s": tally.samples / tally.elapsed_s})
    with contextlib.suppress(Exception):
        getattr(loader, "close", lambda: None)()


def remote(root: str, asked: dict[str, Any], server: str, tell: Tell) -> None:
    """Tell the rate of an epoch over HTTP, from constructing the loader on, or of its first seconds."""
    import fsspec.implementations.http

    from benchmarks.peers.measured import touch

    assert fsspec.implementations.http
    run, count, first_s = FormatRun(**asked), 0, 0.0
    data = Folders(root).data()
    built(data, run, server)  # its catalog is kept
    used_s, began = tree_cpu_s(os.getpid()), time.perf_counter()
    for batch in built(data, run, server):
        first_s = first_s or time.perf_counter() - began
        count += touch(batch)
        if time.perf_counter() - began > REMOTE_S:
            break
    took_s = time.perf_counter() - began
    cpu_us = 1e6 * (tree_cpu_s(os.getpid()) - used_s) / count
    tell("done", result={"samples_per_s": count / took_s, "first_batch_s": first_s, "cpu_us": cpu_us})


def digest(loader: Iterable[Any]) -> str:
    """A hash of the samples of an epoch, whatever their order and batches."""
    total, count = np.uint64(0), 0
    for batch in loader:
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        rows = [np.ascontiguousarray(part.numpy()).reshape(len(part), -1) for part in parts]
        # Numbers compare as numbers, whatever they are stored as.
        words = np.concatenate([row.astype(np.uint64) for row in rows], axis=1)
        weights = np.random.default_rng(words.shape[1]).integers(1, 1 << 63, words.shape[1], np.uint64)
        sums = (words * (2 * weights + np.uint64(1))).sum(axis=1, dtype=np.uint64)
        sums ^= sums >> np.uint64(29)
        total += (sums * np.uint64(0x9E3779B97F4A7C15)).sum(dtype=np.uint64)
        count += len(words)
    return f"{count} {int(total):016x}"


class Session:
    """The processes of one command."""

    def __init__(self, root: Path, console: Console) -> None:
        self._root, self._console = str(root), console
        self._digests: dict[tuple[str, str, str], str] = {}

    def run(self, run: FormatRun, timed_s: float = TIMED_S, *, compares: bool = True) -> FormatRun:
        """A contestant's figures; the small dataset is read once."""
        known = self._digests.get((run.format, run.workload, run.by), "") if compares else "none"
        done = self._figures(replace(run, digest=known), timed, asdict(run), timed_s, not known)
        if compares:
            self._digests[run.format, run.workload, run.by] = done.digest
        return done

    def remote(self, run: FormatRun, server: str) -> FormatRun:
        """Figures of an epoch from a server."""
        return self._figures(replace(run, over="HTTP"), remote, asdict(run), server)

    def _figures(self, run: FormatRun, function: Any, *arguments: Any) -> FormatRun:
        # What is made of batches here, widening tokens, is not what is measured: it takes one thread.
        environment = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        told, _ = run_child(function, self._root, *arguments, environment=environment, limit_s=LIMIT_S)
        if told.get("reason"):
            return self.told(replace(run, reason=told["reason"]))
        return self.told(replace(run, **told["result"]))

    def told(self, run: FormatRun) -> FormatRun:
        """Print a run, and give it back."""
        shown = run.reason or f"{run.samples_per_s:,.0f} samples/s, {run.cpu_us:.2f} µs CPU"
        workers = f" ({run.workers} workers)" if run.by == OWNER else ""
        name = f"{run.workload} {run.format} {run.by}{workers}, {run.over}"
        self._console.print(f"{name}: {shown}", markup=False, highlight=False)
        return run

    def prepare(self, names: Sequence[str]) -> None:
        """Write what is missing, and read all of it into the page cache."""
        for name in (TAR, *names):
            events, _ = run_child(prepared, self._root, name, limit_s=900)
            if events.get("reason"):
                self._console.print(f"{name}: not prepared: {events['reason']}", markup=False)
        read_through(Path(self._root) / "formats")

    def at_its_best(self, run: FormatRun) -> FormatRun:
        """The setting of an owner's reader that has the highest rate in a short run."""
        tried = [replace(run, workers=number) for number in SETTINGS[run.format]]
        if len(tried) == 1:
            return tried[0]
        rates = [self.run(one, TRIED_S, compares=False).samples_per_s for one in tried]
        return tried[rates.index(max(rates))]


def contestants(names: Sequence[str], workloads: Sequence[str]) -> Iterator[FormatRun]:
    """Who runs: tars once for each workload, then ours and the owner of each format."""
    for workload in workloads:
        yield FormatRun(format=TAR, workload=workload, by=OURS)
        for name in names:
            yield FormatRun(format=name, workload=workload, by=OURS)
            yield FormatRun(format=name, workload=workload, by=OWNER, workers=SETTINGS[name][0])


def verdicts(rows: Sequence[FormatRun]) -> list[ReportSummary]:
    """What the bars say."""
    found = {(row.format, row.workload, row.by, row.over): row for row in rows if not row.reason}

    def ratio(own: FormatRun, name: str, by: str) -> float | None:
        other = found.get((name, own.workload, by, own.over))
        return own.samples_per_s / other.samples_per_s if other else None

    bars = list[ReportSummary]()
    for row in found.values():
        if row.by != OURS or row.format == TAR:
            continue
        what = f"{row.workload} {row.format}" + (f" over {row.over}" if row.over != "files" else "")
        bars.append(ReportSummary(what, "of our rate from tars", ratio(row, TAR, OURS), SHARE_OF_TAR))
        if row.over == "files" and row.workload == "W4":
            wanted = TIMES_OWNER.get(row.format, 3.0)
            bars.append(ReportSummary(what, "x the owner's reader", ratio(row, row.format, OWNER), wanted))
        owner = found.get((row.format, row.workload, OWNER, row.over))
        if owner is not None:
            same = float(owner.digest != row.digest)
            bars.append(ReportSummary(what, "epochs that differ from the owner's", same, 0, at_most=True))
    return bars


def show(console: Console, rows: Sequence[FormatRun]) -> None:
    """A table: one row a contestant."""
    table = Table()
    for heading in ("", "by", "over"):
        table.add_column(heading)
    for heading in ("workers", "samples/s", "CPU µs", "first batch, s"):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = (f"{row.samples_per_s:,.0f}", f"{row.cpu_us:.2f}", f"{row.first_batch_s:.3f}")
        shown = ("", row.reason, "", "") if row.reason else (str(row.workers), *figures)
        table.add_row(f"{row.workload} {row.format}", row.by, row.over, *shown)
    console.print(table)


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(FORMATS), help="A format; all by default.")
@click.option("--workload", "workloads", multiple=True, type=click.Choice(WORKLOADS), help="By default both.")
@click.option("--owners/--no-owners", default=True, help="Run the owners' readers.")
@click.option("--sweep", is_flag=True, help="Search the best setting of each owner's reader first.")
@click.option("--http/--no-http", default=True, help="Read over HTTP, too.")
@repeats_option
@data_option
@json_option
def main(
    only: tuple[str, ...],
    workloads: tuple[str, ...],
    owners: bool,
    sweep: bool,
    http: bool,
    repeats: int,
    root: Path | None,
    output: Path | None,
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    names = only or FORMATS
    folder = (root or REPOSITORY / ".bench-data").resolve()
    session = Session(folder, console)
    session.prepare(names)
    chosen = [run for run in contestants(names, workloads or WORKLOADS) if owners or run.by == OURS]
    if sweep:
        chosen = [session.at_its_best(run) if run.by == OWNER else run for run in chosen]
    runs = list(interleaved(chosen, repeats, session.run))
    if http:
        with serving(Folders(str(folder)).data().root, {**STORE, "port": free_port()}) as server:
            server.warm_up("**/*.*")
            runs += [session.remote(run, server.url) for run in chosen if run.by == OURS]
    rows = medians(runs, "format", "workload", "by", "over")
    show(console, rows)
    bars = verdicts(rows)
    for bar in bars:
        console.print(f"  {bar.line}", markup=False, highlight=False)
    if output:
        save_runs(output, bars, rows, runs)


if __name__ == "__main__":
    main()
