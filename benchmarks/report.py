"""Tables for people, and one JSON file that holds everything a row was made from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.bars import Verdict
from benchmarks.harness import REPOSITORY, Run
from benchmarks.workloads import Workload

PACKAGES = (
    "array_record",
    "datasets",
    "ffcv",
    "grain",
    "litdata",
    "mosaicml-streaming",
    "msgspec",
    "numpy",
    "nvidia-dali-cuda120",
    "opencv-python-headless",
    "pillow",
    "pyarrow",
    "ray",
    "simplejpeg",
    "spdl",
    "tensorflow-cpu",
    "tokenizers",
    "torch",
    "torchdata",
    "torchtitan",
    "webdataset",
)


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


def show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
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
    verdicts: Sequence[Verdict],
    workloads: Sequence[Workload],
) -> None:
    """Save arguments, every run, the medians and the verdicts."""
    save_figures(
        path,
        arguments=dict(arguments),
        not_run={w.name: dict(w.not_run) for w in workloads},
        verdicts=[asdict(v) | {"verdict": v.says} for v in verdicts],
        medians=[asdict(run) for run in medians],
        runs=[asdict(run) for run in runs],
    )


def save_figures(path: Path, **told: Any) -> None:
    """Write what `origin` tells, then the figures; lists and objects of plain values take a line each."""
    text = json.dumps(origin() | told, indent=1)
    # No string of JSON holds a line break, so whatever this takes out, the values stay.
    text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: re.sub(r"\n *", " ", found[0]), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def origin() -> dict[str, Any]:
    """Where figures come from: the command that makes them, date, commit, machine, versions."""
    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def command() -> str:
    """The command line of this process."""
    return command_line(module_name("__main__"), sys.argv[1:])


def command_line(module: str, arguments: Sequence[str]) -> str:
    """How a module is started; a path of this machine alone is told by its last part only."""
    return shlex.join(["python", "-m", module, *map(_portable, arguments)])


def _portable(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    path = Path(value)
    if path.is_absolute() or ".." in path.parts:
        inside = path.resolve().is_relative_to(REPOSITORY)
        value = str(path.resolve().relative_to(REPOSITORY)) if inside else path.name
    return option + equals + value


def module_name(module: str) -> str:
    """The name by which `python -m` or an import finds a module, also if it is the one that was started."""
    spec = sys.modules[module].__spec__
    return spec.name.removesuffix(".__main__") if spec else module


def machine() -> dict[str, Any]:
    """The processor, its cores as this process may use them, memory and kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown"
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the contestants that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit, with "+changes" when the tree differs from it but for results."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True
        ).stdout.strip()

    return git("rev-parse", "HEAD") + (
        "+changes" if git("status", "--porcelain", "--", ".", ":!benchmarks/results") else ""
    )
