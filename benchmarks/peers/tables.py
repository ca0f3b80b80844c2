"""The tables of the workloads, and their file of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.runs import Run
from benchmarks.peers.workloads import Workload
from benchmarks.report import ReportSummary, save_runs


def show_rows(console: Console, workload: Workload, medians: Sequence[Run]) -> None:
    """Print the medians of one workload, the fastest first within each consumer."""
    table = Table(title=f"{workload.name}: {workload.delivers}", title_justify="left")
    table.add_column("contestant")
    for heading in (
        "workers",
        "consumer",
        "samples/s",
        "first batch ms",
        "MB",
        "MB mapped",
        "stall %",
        "cores",
        "others",
    ):
        table.add_column(heading, justify="right")
    for run in sorted(medians, key=lambda r: (r.consumer != "plain", -r.samples_per_s)):
        if run.workload == workload.name and not run.reason:
            table.add_row(*_cells(run))
    console.print(table)
    failed = {run.contestant: run.reason for run in medians if run.workload == workload.name and run.reason}
    for name, reason in (failed | dict(workload.not_run)).items():
        console.print(f"  {name}: not run: {reason}", markup=False, highlight=False)


def _cells(run: Run) -> list[str]:
    return [
        run.contestant,
        str(run.workers),
        f"burn {run.burn_s * 1e3:.3g} ms" if run.burn_s else run.consumer,
        f"{run.samples_per_s:,.0f}",
        f"{run.first_batch_s * 1e3:,.0f}",
        f"{run.held_mb:,.0f}",
        f"{run.pss_mb:,.0f}",
        f"{run.stall_share * 100:.1f}",
        f"{run.cpu_s_per_s:.2f}",
        f"{run.others_cpu_s_per_s:.2f}",
    ]


def show_verdicts(console: Console, verdicts: Sequence[ReportSummary]) -> None:
    """Print each bar with what was measured."""
    table = Table(title="Bars", title_justify="left")
    for heading in ("workload", "measured", "bar", "verdict"):
        table.add_column(heading, justify="right" if heading == "measured" else "left")
    for verdict in verdicts:
        measured = "" if verdict.measured is None else f"{verdict.measured:,.4g}"
        sign = "<=" if verdict.at_most else ">="
        table.add_row(verdict.workload, measured, f"{sign} {verdict.wanted:,.4g} {verdict.bar}", verdict.says)
    console.print(table)


def write_json(
    path: Path,
    arguments: Mapping[str, Any],
    runs: Sequence[Run],
    medians: Sequence[Run],
    verdicts: Sequence[ReportSummary],
    workloads: Sequence[Workload],
) -> None:
    """Save arguments, every run, the medians and the verdicts."""
    save_runs(
        path,
        verdicts,
        medians,
        runs,
        arguments=dict(arguments),
        not_run={w.name: dict(w.not_run) for w in workloads},
    )
