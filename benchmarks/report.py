"""Verdicts on bars, and one JSON file that holds everything a row was made from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks import REPOSITORY
from benchmarks.runner import module_name

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


@dataclass(frozen=True)
class ReportSummary:
    """One bar, and whether it was reached in this run."""

    workload: str
    bar: str
    measured: float | None
    wanted: float
    at_most: bool = False

    @property
    def says(self) -> str:
        """'reached', 'short by x %', or why there is no answer."""
        if self.measured is None:
            return "not measured"
        if self.measured <= self.wanted if self.at_most else self.measured >= self.wanted:
            return "reached"
        if not self.wanted:
            return f"short by {self.measured:g}"
        gap = self.measured / self.wanted - 1 if self.at_most else 1 - self.measured / self.wanted
        return f"short by {100 * gap:.1f} %"

    @property
    def line(self) -> str:
        """The bar, what was measured, and whether it was reached."""
        measured = "" if self.measured is None else f"{self.measured:.3g} "
        return f"{self.workload}: {measured}{self.bar}: {self.says}"


def save_runs(
    path: Path, bars: Sequence[ReportSummary], rows: Sequence[Any], runs: Sequence[Any], **told: Any
) -> None:
    """Write bars with what they say, medians and single runs (dataclasses), as `save_figures` does."""
    told["verdicts"] = [asdict(bar) | {"verdict": bar.says} for bar in bars]
    told |= {"medians": [asdict(row) for row in rows], "runs": [asdict(run) for run in runs]}
    save_figures(path, **told)


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
