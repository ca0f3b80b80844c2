"""W5: the tars of W1 (undecoded) and W4 from a slow HTTP store, cold, start included, beside what peers do.

    python -m benchmarks W5                        sweep settings, then interleaved repeats
    python -m benchmarks W5 --no-sweep             each peer with the setting that was its best here

The store is slowstore.py on this machine: 50 ms before each answer, 40 MB/s for each connection. Every
run is a process of its own that reads one epoch, or as much as it delivers in `--seconds`. Ours has its
catalog at hand. Two more runs of ours: with all connections together held to 400 Mbit/s (share of the link),
and with a latency of 500 ms, by which the round trips to the first batch are counted. Requests and bytes are
the server's counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.data import Data, read_through
from benchmarks.harness import run_child
from benchmarks.remote.loaders import Remote, measured
from benchmarks.remote.slow_server import SlowServer, free_port, serving
from benchmarks.report import save_figures

STORE = {"latency-ms": 50.0, "per-conn-mbps": 320.0}
LINK_MBPS = 400.0
LATENCY_MS = 500.0
OURS = "dataflow"
LIMIT_S = 120.0


@dataclass(frozen=True)
class Contestant:
    """One loader with a setting."""

    name: str
    target: str
    workers: int
    choices: tuple[int, ...]


CONTESTANTS = (
    Contestant(OURS, "ours", 0, (0,)),
    Contestant("WebDataset, curl", "webdataset", 8, (2, 4, 8)),
    Contestant("torch, fsspec", "torch_fsspec", 8, (2, 4, 8)),
    Contestant("HF datasets", "hf", 8, (2, 4, 8)),
    Contestant("SPDL", "spdl", 16, (8, 16, 32)),
)
NOT_RUN = {
    "LitData": "over the S3 protocol of the slow store its workers fail",
    "Mosaic": "one batch in the first 5 s or more (9 images/s, 2 workers), errors with more workers",
}
BARS = {"W1": 3.0, "W4": 6.0}
"""Times the best peer."""


@dataclass(frozen=True)
class RemoteRun:
    """One run. Either `reason` says why there are no figures, or all of them are there."""

    workload: str
    contestant: str
    workers: int
    store: dict[str, float]
    samples_per_s: float = 0.0
    mb_per_s: float = 0.0
    """Bytes of bodies that the server sent, over the time."""
    first_batch_s: float = 0.0
    elapsed_s: float = 0.0
    samples: int = 0
    cpu_s: float = 0.0
    planned: dict[str, int] = field(default_factory=dict)
    """Reads that our loader planned, and their bytes; the start of the next epoch is among them."""
    server: dict[str, int] = field(default_factory=dict)
    reason: str = ""


class Session:
    """Data, servers and processes of one command."""

    def __init__(self, data: Data, seconds: float, console: Console) -> None:
        self._data, self._seconds, self._console = data, seconds, console
        self._port = free_port()  # always the same, so that catalogs of its URLs stay true
        self._url = f"http://127.0.0.1:{self._port}"

    def _serving(self, options: dict[str, float]) -> AbstractContextManager[SlowServer]:
        return serving(self._data.root, options | {"port": self._port})

    def prepare(self, workload: str, chosen: Sequence[Contestant]) -> None:
        """Make the data, let each contestant convert or index it, and read all of it into the page cache."""
        self._data.make(workload)
        with self._serving({}):
            for contestant in chosen:
                job = self._job(workload, contestant, prepare_only=True)
                events, _ = run_child(measured, job, limit_s=600)
                if events.get("reason"):
                    self._console.print(f"{workload} {contestant.name}: not prepared: {events['reason']}")
        read_through(self._data.root / workload)

    def _job(self, workload: str, contestant: Contestant, *, prepare_only: bool = False) -> dict[str, Any]:
        return {
            "server": self._url,
            "workload": workload,
            "root": str(self._data.root),
            "target": contestant.target,
            "workers": contestant.workers,
            "at_most_s": self._seconds,
            "prepare_only": prepare_only,
        }

    def run(
        self, workload: str, contestant: Contestant, store: dict[str, float], *, whole: bool = False
    ) -> RemoteRun:
        """One run against a store; `whole`: to the end of the epoch, however long it takes."""
        run = RemoteRun(workload, contestant.name, contestant.workers, store)
        with self._serving(store) as server:
            server.warm_up(f"{workload}/*")
            job = self._job(workload, contestant) | ({"at_most_s": LIMIT_S} if whole else {})
            events, _ = run_child(measured, job, environment={"OMP_NUM_THREADS": "1"}, limit_s=LIMIT_S)
            counted = server.stats()
        if events.get("reason"):
            run = replace(run, reason=events["reason"])
        else:
            seconds = events["elapsed_s"]
            run = replace(
                run,
                samples_per_s=events["samples"] / seconds,
                mb_per_s=counted["bytes"] / 1e6 / seconds,
                first_batch_s=events["first_batch_s"],
                elapsed_s=seconds,
                samples=events["samples"],
                cpu_s=events["cpu_s"],
                planned=events["planned"],
                server={
                    name: counted[name] for name in ("requests", "bytes", "connections", "concurrent_max")
                },
            )
        shown = run.reason or f"{run.samples_per_s:,.0f} samples/s, {run.mb_per_s:,.0f} MB/s"
        self._console.print(f"{workload} {contestant.name} ({contestant.workers}): {shown}")
        return run

    def best(self, workload: str, contestant: Contestant) -> Contestant:
        """The contestant with the setting that gives it the highest rate."""
        tried = [replace(contestant, workers=n) for n in contestant.choices]
        if len(tried) == 1:
            return contestant
        rates = [self.run(workload, c, STORE).samples_per_s for c in tried]
        return tried[rates.index(max(rates))]

    def plan_of(self, workload: str) -> dict[str, int]:
        """Requests and bytes that an epoch of ours needs: each block once."""
        from sharding.catalog.table import Catalog

        catalog = Catalog.load(Remote(self._url, workload, str(self._data.root), "").catalog)
        lengths = catalog.blocks.length[catalog.blocks.num_samples > 0]
        return {"requests": len(lengths), "bytes": int(lengths.sum())}


def median(runs: Sequence[RemoteRun]) -> RemoteRun:
    """The run whose rate is the median."""
    return sorted(runs, key=lambda run: run.samples_per_s)[(len(runs) - 1) // 2]


def verdicts(
    workload: str, medians: Sequence[RemoteRun], capped: RemoteRun, distant: RemoteRun, plan: dict[str, int]
) -> dict[str, tuple[float, float, bool]]:
    """What was measured, the bar, and whether it was reached."""
    by_name = {run.contestant: run for run in medians if not run.reason}
    mine = by_name[OURS]
    best = max(
        (run.samples_per_s for run in medians if run.contestant != OURS and not run.reason), default=0.0
    )
    share = plan["bytes"] / 1e6 / capped.elapsed_s / (LINK_MBPS / 8)  # a whole epoch, its start included
    measured = {
        "x the best peer": (mine.samples_per_s / best if best else 0.0, BARS[workload], True),
        "of a link of 400 Mbit/s": (share, 0.9, True),
        "round trips to the first batch": (distant.first_batch_s * 1e3 // LATENCY_MS, 3.0, False),
        "x the plan's requests": (mine.server["requests"] / mine.planned["requests"], 1.05, False),
        "x the plan's bytes": (mine.server["bytes"] / mine.planned["bytes"], 1.05, False),
    }
    return {
        name: (value, bar, value >= bar if more else value <= bar)
        for name, (value, bar, more) in measured.items()
    }


def main(
    data: Data,
    *,
    console: Console,
    peers: str | None,
    repeats: int,
    sweep: bool,
    seconds: float,
    output: Path | None,
) -> None:
    """Measure, print, and write the results."""
    wanted = None if peers is None else {name.strip().lower() for name in peers.split(";")}
    session = Session(data, seconds, console)
    runs: list[RemoteRun] = []
    told: dict[str, Any] = {}
    for workload in BARS:
        chosen = [c for c in CONTESTANTS if c.name == OURS or wanted is None or c.name.lower() in wanted]
        session.prepare(workload, chosen)
        if sweep:
            chosen = [session.best(workload, c) for c in chosen]
        mine, own = chosen[0], []
        for _ in range(repeats):
            own += [session.run(workload, c, STORE) for c in chosen]
        medians = [median([run for run in own if run.contestant == c.name]) for c in chosen]
        capped = session.run(workload, mine, STORE | {"total-mbps": LINK_MBPS}, whole=True)
        distant = session.run(workload, mine, {"latency-ms": LATENCY_MS})
        plan = session.plan_of(workload)
        held = verdicts(workload, medians, capped, distant, plan)
        _show(console, workload, medians, held)
        runs += [*own, capped, distant]
        told[workload] = {"plan": plan, "verdicts": held, "medians": [asdict(run) for run in medians]}
    if output:
        save_figures(output, not_run=NOT_RUN, workloads=told, runs=[asdict(run) for run in runs])
        console.print(f"written: {output}")


def _show(
    console: Console, workload: str, medians: Sequence[RemoteRun], held: dict[str, tuple[float, float, bool]]
) -> None:
    table = Table(title=f"W5, {workload}", title_justify="left")
    for heading in ("contestant", "workers", "samples/s", "MB/s", "first batch s", "CPU s", "requests"):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    for run in sorted(medians, key=lambda run: -run.samples_per_s):
        figures = (f"{run.samples_per_s:,.0f}", f"{run.mb_per_s:,.0f}", f"{run.first_batch_s:.2f}")
        rest = (f"{run.cpu_s:.1f}", str(run.server.get("requests", "")))
        table.add_row(
            run.contestant, str(run.workers), *(figures + rest if not run.reason else (run.reason,))
        )
    console.print(table)
    for name, (value, bar, reached) in held.items():
        console.print(f"  {value:.3g} {name} (bar: {bar:g}): {'reached' if reached else 'MISSED'}")


__all__ = ["CONTESTANTS", "RemoteRun", "Session", "main", "median", "verdicts"]
