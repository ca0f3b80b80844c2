"""`python -m benchmarks.handover.starts`: how long until the first batch, beside torch with the same method.

Four workers over 200,000 small dicts. Each run is a fresh process: the first loop of a loader, later ones
(the median of five), and the tenth of ten loaders as evaluations make them; with no more memory than that
takes, and with a part of the machine's memory touched, whose page tables a fork copies.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.harness import interleaved, medians, run_child
from benchmarks.options import json_option, repeats_option
from benchmarks.report import ReportSummary, machine, save_runs, versions
from benchmarks.runner import Tell

ITEMS, WORKERS, LOADERS = 200_000, 4, 10
LIMIT_S = 180.0
AT_MOST = 1.1
FIGURES = ("first_ms", "later_ms", "tenth_ms")


@dataclass(frozen=True, kw_only=True)
class StartRun:
    """One run."""

    setup: str
    """Loader, start method and share of the memory that is touched, such as "torch fork 0.5"."""
    first_ms: float = 0.0
    later_ms: float = 0.0
    tenth_ms: float = 0.0
    reason: str = ""
    """Why there are no figures."""


class Dicts:
    """A dataset of small Python objects."""

    def __init__(self) -> None:
        self.items = [{"label": i, "box": [i, i + 1]} for i in range(ITEMS)]

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        return int(self.items[index]["label"])  # type: ignore[call-overload]


def measured(job: dict[str, Any], tell: Tell) -> None:
    """Tell the figures of one setup."""
    kind, method, share = job["setup"].split()
    if kind == "torch":
        from torch.utils.data import DataLoader
    else:
        from dataflow import DataLoader  # type: ignore[assignment]
    touched = np.ones(int(float(share) * psutil.virtual_memory().total) // 8)
    dataset = Dicts()

    def loader() -> Any:
        return DataLoader(dataset, 64, num_workers=WORKERS, multiprocessing_context=method)

    def first_batch_ms(loader: Any) -> float:
        began = time.perf_counter()
        batches = iter(loader)
        next(batches)
        took = 1e3 * (time.perf_counter() - began)
        del batches
        return took

    one = loader()
    first, later = first_batch_ms(one), statistics.median(first_batch_ms(one) for _ in range(5))
    of_loaders = [first_batch_ms(loader()) for _ in range(LOADERS)]
    tell("done", first_ms=first, later_ms=later, tenth_ms=of_loaders[-1], touched_mb=touched.nbytes / 1e6)


@click.command()
@click.option("--methods", default="fork,forkserver,spawn", show_default=True, help="Start methods.")
@click.option("--shares", default="0,0.5", show_default=True, help="Shares of the memory to touch.")
@repeats_option
@json_option
def main(methods: str, shares: str, repeats: int, output: Path | None) -> None:
    """Measure how long the first batch of a loop takes, beside torch with the same start method."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(machine(), versions())

    def measure(run: StartRun) -> StartRun:
        events, _ = run_child(measured, {"setup": run.setup}, limit_s=LIMIT_S)
        if "first_ms" not in events:
            return StartRun(setup=run.setup, reason=str(events.get("reason", "no figures")))
        return StartRun(setup=run.setup, **{name: events[name] for name in FIGURES})

    setups = [f"{method} {share}" for method in methods.split(",") for share in shares.split(",")]
    todo = [StartRun(setup=f"{kind} {setup}") for setup in setups for kind in ("torch", "ours")]
    runs = [*interleaved(todo, repeats, measure)]
    rows = {row.setup: row for row in medians(runs, "setup")}
    table = Table("setup", *FIGURES)
    for row in rows.values():
        table.add_row(row.setup, *(f"{getattr(row, name):,.0f}" for name in FIGURES))
    console.print(table)
    found = []
    for setup in setups:
        torch, ours = rows.get(f"torch {setup}"), rows.get(f"ours {setup}")
        if torch and ours and not (torch.reason or ours.reason):
            for name in FIGURES:
                ratio = getattr(ours, name) / getattr(torch, name)
                found.append(ReportSummary(f"{setup} {name}", "x torch's time", ratio, AT_MOST, at_most=True))
    for verdict in found:
        console.print(verdict.line)
    if output is not None:
        save_runs(output, found, [*rows.values()], runs)


if __name__ == "__main__":
    main()
