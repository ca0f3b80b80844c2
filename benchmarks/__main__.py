"""`python -m benchmarks`: make the data, run the contestants side by side, say which bars were reached."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

from benchmarks import REPOSITORY
from benchmarks.data import Data, read_through
from benchmarks.harness import bare_torch, interleaved, medians
from benchmarks.memory import Memory
from benchmarks.options import data_option, jpegs_option, json_option
from benchmarks.peers.bars import verdicts
from benchmarks.peers.measured import Job
from benchmarks.peers.runs import POINT, Run, run_job, to_run
from benchmarks.peers.tables import show_rows, show_verdicts, write_json
from benchmarks.peers.workloads import LIMIT, OURS, WORKLOADS, Contestant, Workload
from benchmarks.remote import w5
from benchmarks.report import machine, versions

NAMES = [workload.name for workload in WORKLOADS]
REMOTE = "W5"
DISTURBED = 0.1
"""Cores that other processes may use before a run counts as disturbed."""
LIMIT_S = 180.0
"""A run that takes longer is ended and named."""


class Session:
    """What all runs of one command share."""

    def __init__(self, data: Data, job: Job, bare: Memory, console: Console) -> None:
        self._data, self._job, self._bare, self._console = data, job, bare, console

    def run(
        self, workload: Workload, contestant: Contestant, *, burn_s: float = 0.0, timed_s: float = 0.0
    ) -> Run:
        job = self._for(workload, contestant)
        job = replace(job, burn_s=burn_s, timed_s=timed_s or job.timed_s)
        outcome = run_job(job, contestant.environment, limit_s=LIMIT_S)
        return to_run(job, contestant.name, contestant.omp_threads, outcome, self._bare)

    def _for(self, workload: Workload, contestant: Contestant) -> Job:
        return replace(
            self._job, workload=workload.name, target=contestant.target, workers=contestant.workers
        )

    def prepared(self, workload: Workload, contestants: Sequence[Contestant]) -> None:
        """Make the data, let each contestant convert or index it, and read all of it into the page cache."""
        self._data.make(workload.name)
        for contestant in contestants:
            job = replace(self._for(workload, contestant), prepare_only=True)
            events, _ = run_job(job, contestant.environment, limit_s=900)
            if events.get("reason"):
                self._console.print(f"{workload.name} {contestant.name}: not prepared: {events['reason']}")
        read_through(self._data.root / workload.name)

    def at_its_best(self, workload: Workload, contestant: Contestant) -> Contestant:
        """The contestant with the setting that gives it the highest rate in a short run."""
        tried = contestant.settings
        if len(tried) == 1:
            return tried[0]
        rates = [self.run(workload, c, timed_s=2.0).samples_per_s for c in tried]
        best = tried[rates.index(max(rates))]
        shown = ", ".join(f"{_setting(c)}: {rate:,.0f}" for c, rate in zip(tried, rates, strict=True))
        self._console.print(f"{workload.name} {contestant.name}, samples/s by setting: {shown}")
        return best

    def told(self, run: Run) -> Run:
        """Print a run, and give it back."""
        shown = f"not run: {run.reason}" if run.reason else f"{run.samples_per_s:,.0f} samples/s"
        self._console.print(
            f"{run.workload} {run.contestant} ({run.workers} workers, {run.consumer}): {shown}"
        )
        return run


def _setting(contestant: Contestant) -> str:
    omp = "" if contestant.omp_threads == 1 else f", OMP {contestant.omp_threads or 'unset'}"
    return f"{contestant.workers} workers{omp}"


def measure(
    session: Session, workload: Workload, chosen: Sequence[Contestant], consumers: Sequence[str], repeats: int
) -> list[Run]:
    """All runs of one workload: first with the plain consumer, whose batch times the burning one needs."""
    by_name = {c.name: c for c in chosen}

    def plain(name: str) -> Run:
        return session.told(session.run(workload, by_name[name]))

    runs = list(interleaved(list(by_name), repeats, plain))
    if "burn" not in consumers:
        return runs
    alone = {run.contestant: run.batch_s for run in medians(runs, *POINT) if not run.reason}

    def burning(name: str) -> Run:
        burn_s = workload.burn_s or 1.5 * alone[name]
        return session.told(session.run(workload, by_name[name], burn_s=burn_s))

    names = [name for name in alone if not name.startswith(LIMIT)]
    return [*runs, *interleaved(names, repeats, burning)]


def select(workload: Workload, peers: str | None) -> list[Contestant]:
    """The limit, ours, and the peers named (all by default)."""
    wanted = None if peers is None else {name.strip().lower() for name in peers.split(",")}
    return [c for c in workload.contestants if not c.is_peer or wanted is None or c.name.lower() in wanted]


def _split(allowed: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    def convert(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in allowed]:
            raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(allowed)}")
        return names

    return convert


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*NAMES, REMOTE]), metavar="[WORKLOAD]...")
@click.option(
    "--quick", is_flag=True, help="Short runs, one repeat, no search for the best workers: a smoke run."
)
@click.option("--peers", help="Comma-separated contestants to run beside ours and the limit; all by default.")
@click.option(
    "--consumer", "consumers", default="plain,burn", show_default=True, callback=_split(["plain", "burn"])
)
@click.option("--repeats", type=click.IntRange(1), help="Interleaved repeats; 3, or 1 with --quick.")
@click.option("--seconds", type=float, help="Timed seconds a run; 5, or 1 with --quick.")
@click.option("--sweep/--no-sweep", default=None, help="Search each peer's best number of workers first.")
@data_option
@jpegs_option
@json_option
@click.option("--cores", help="Comma-separated cores to run on; all by default.")
@click.option("--list", "list_only", is_flag=True, help="List workloads and contestants, and stop.")
def main(
    names: tuple[str, ...],
    quick: bool,
    peers: str | None,
    consumers: list[str],
    repeats: int | None,
    seconds: float | None,
    sweep: bool | None,
    root: Path | None,
    jpegs: Path | None,
    output: Path | None,
    cores: str | None,
    list_only: bool,
) -> None:
    """Measure WORKLOADs (default: W1 to W4) against peers and the physical limit, on the same bytes.

    All in one run; W5, a remote store, runs alone.
    """
    workloads = [w for w in WORKLOADS if not names or w.name in names]
    console = Console(width=None if sys.stdout.isatty() else 110)
    if list_only:
        for workload in workloads:
            console.print(f"{workload.name}: {', '.join(c.name for c in workload.contestants)}")
        return
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    repeats = repeats or (1 if quick else 3)
    data = Data(
        (root or REPOSITORY / ".bench-data").resolve(), jpeg_folder=jpegs.resolve() if jpegs else None
    )
    job = Job(
        workload="",
        target="",
        workers=0,
        root=str(data.root),
        sizes=asdict(data.sizes),
        jpegs=str(data.jpeg_folder) if jpegs else None,
        warmup_s=0.5 if quick else 2.0,
        timed_s=seconds or (1.0 if quick else 5.0),
        watched_s=0.5 if quick else 1.5,
    )
    if REMOTE in names:
        if len(names) > 1:
            raise click.UsageError(f"{REMOTE} runs alone")
        w5.main(
            data,
            console=console,
            peers=peers,
            repeats=repeats,
            sweep=sweep if sweep is not None else not quick,
            seconds=seconds or (2.0 if quick else 10.0),
            output=output,
        )
        return
    bare = bare_torch()
    session = Session(data, job, bare, console)
    console.print(machine() | {"bare_torch": asdict(bare)}, versions())
    runs: list[Run] = []
    for workload in workloads:
        chosen = select(workload, peers)
        session.prepared(workload, chosen)
        if sweep if sweep is not None else not quick:
            chosen = [session.at_its_best(workload, c) for c in chosen]
        runs += measure(session, workload, chosen, consumers, repeats)
        show_rows(console, workload, medians(runs, *POINT))
    if disturbed := sum(run.others_cpu_s_per_s > DISTURBED for run in runs):
        console.print(
            f"DISTURBED: in {disturbed} of {len(runs)} runs other processes used > {DISTURBED} cores"
        )
    rows = medians(runs, *POINT)
    held = [verdict for workload in workloads for verdict in verdicts(workload, rows)]
    show_verdicts(console, held)
    if output:
        shared = {"repeats": repeats, "quick": quick, "consumers": consumers, "job": asdict(job)}
        arguments = shared | {"bare_torch": asdict(bare), "peers": peers, "ours": OURS}
        write_json(output, arguments, runs, rows, held, workloads)
        console.print(f"written: {output}")


if __name__ == "__main__":
    main()
