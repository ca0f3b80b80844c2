"""`dataflow demo`: the whole project once, on this machine, with data that every machine has.

The standard library's source text becomes shards; two ranks train a small transformer on it; the training
is interrupted and resumed, and must give the losses of an uninterrupted run, bit for bit; then the same
work is done with torch's DataLoader, and the figures are laid side by side. What the figures mean is said
from the figures, whichever way they fall.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_all_start_methods
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from dataflow.testing import StartMethod, run_ranks
from dataflow.tools.demo import report
from dataflow.tools.demo.data import Corpus, TarPass, read_tars, write_corpus
from dataflow.tools.demo.loading import LoadingResult, load_with_dataflow, load_with_torch
from dataflow.tools.demo.train import Run, RunResult, train

_TORCH_WORKERS = (0, 2)
"""Settings of torch's loader that are tried; the faster one is used in the comparison."""


@dataclass(frozen=True)
class Settings:
    """What a user may choose."""

    folder: Path | None = None
    """Where shards and checkpoint go; None: a temporary folder."""
    keep: bool = False
    """Whether to leave a temporary folder behind."""
    num_ranks: int = 2
    steps: int = 200
    batch_size: int = 16
    """Samples a rank and step."""
    seed: int = 0
    max_modules: int | None = None
    """Modules of the standard library to use; None: all (about 11 MB)."""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError(f"steps must be >= 2, to be interrupted half-way, got {self.steps}")
        if self.num_ranks < 1 or self.batch_size < 1:
            raise ValueError(f"ranks and batch size must be >= 1, got {self.num_ranks} and {self.batch_size}")


@dataclass(frozen=True)
class Report:
    """What the demo found. Runs are those of rank 0."""

    settings: Settings
    corpus: Corpus
    tars: TarPass
    whole: RunResult
    interrupted: RunResult
    resumed: RunResult
    torch: RunResult
    torch_workers: int
    loading: tuple[LoadingResult, ...]
    seconds: float

    @property
    def identical(self) -> bool:
        """Whether the interrupted run gave the losses of the uninterrupted one, every bit of each step."""
        return self.interrupted.losses + self.resumed.losses == self.whole.losses

    def to_json(self) -> dict[str, Any]:
        """A JSON value; what the command writes with `--json`."""
        runs = {name: getattr(self, name).to_json() for name in ("whole", "interrupted", "resumed", "torch")}
        settings = {**asdict(self.settings), "folder": self.corpus.folder}
        return {
            "identical": self.identical,
            "settings": settings,
            "corpus": asdict(self.corpus),
            "tars": {
                "modules": len(self.tars.modules),
                "bytes": self.tars.num_bytes,
                "seconds": self.tars.seconds,
            },
            "runs": runs,
            "torch_workers": self.torch_workers,
            "loading": [one.to_json() for one in self.loading],
            "seconds": self.seconds,
            "machine": {
                "cores": os.cpu_count(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
        }


def run_demo(settings: Settings, console: Console | None = None) -> Report:
    """Do all of it and print as it goes. `report.identical` says whether resuming was exact."""
    console = console or Console(highlight=False)
    began = perf_counter()
    with _folder(settings) as folder:
        corpus = write_corpus(folder, settings.max_modules)
        report.show_corpus(console, corpus)
        tars = read_tars(folder)
        report.show_tars(console, corpus, tars)

        report.heading(console, f"Training on {settings.num_ranks} ranks, interrupted and resumed")
        run = Run("uninterrupted", str(folder), settings.steps, settings.batch_size, settings.seed)
        whole = _on_all_ranks(run, settings)
        half = settings.steps // 2
        interrupted = _on_all_ranks(replace(run, title="first half", stop=half), settings)
        report.show_state(console, interrupted)
        resumed = _on_all_ranks(replace(run, title="resumed", resume=True), settings)
        report.show_losses(console, whole.losses, interrupted.losses + resumed.losses, half)

        loading = tuple(_loading_passes(str(folder), settings))
        workers = _best_torch_workers(loading)
        report.heading(console, "The same work with torch's DataLoader")
        by_torch = _on_all_ranks(replace(run, title="torch", torch_workers=workers), settings)
        found = Report(
            settings,
            corpus,
            tars,
            whole,
            interrupted,
            resumed,
            by_torch,
            workers,
            loading,
            perf_counter() - began,
        )
    report.show_comparison(console, found.whole, found.torch, found.torch_workers, found.loading)
    report.show_end(console, found.seconds, corpus.folder if folder.exists() else None)
    return found


@contextmanager
def _folder(settings: Settings) -> Iterator[Path]:
    if settings.folder is not None:
        settings.folder.mkdir(parents=True, exist_ok=True)
        yield settings.folder.absolute()
    elif settings.keep:
        yield Path(tempfile.mkdtemp(prefix="dataflow-demo-"))
    else:
        with tempfile.TemporaryDirectory(prefix="dataflow-demo-") as folder:
            yield Path(folder)


def _on_all_ranks(run: Run, settings: Settings) -> RunResult:
    """Run in fresh processes; rank 0's result."""
    method: StartMethod = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    results = run_ranks(
        train, settings.num_ranks, args=(run,), start_method=method, timeout_s=600 + 10 * run.steps
    )
    return results[0]


def _loading_passes(folder: str, settings: Settings) -> Iterator[LoadingResult]:
    yield load_with_dataflow(folder, settings.batch_size, settings.seed)
    for num_workers in _TORCH_WORKERS:
        yield load_with_torch(folder, settings.batch_size, settings.seed, num_workers)


def _best_torch_workers(loading: tuple[LoadingResult, ...]) -> int:
    by_torch = [one for one in loading if one.torch_workers is not None]
    return max(by_torch, key=lambda one: one.samples_per_s).torch_workers or 0


def save_report(found: Report, path: str | os.PathLike[str]) -> None:
    """Write the report as JSON."""
    Path(path).write_text(json.dumps(found.to_json(), indent=1, default=str) + "\n")
