"""`dataflow demo`: the whole project once, on this machine, with data that every machine has.

The standard library's source text becomes shards; two ranks train a small transformer on it; the training
is interrupted and resumed, and must give the losses of an uninterrupted run, bit for bit. How other loaders
do over the same data is another question, which `dataflow bench compare` answers.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from dataflow.testing import run_ranks
from dataflow.tools.demo import train as train_module
from dataflow.tools.demo.data import LENGTH, Corpus, TarPass, read_tars, write_corpus
from dataflow.tools.demo.settings import DemoSettings
from dataflow.tools.demo.train import Training, TrainingResult, train
from dataflow.tools.terminal.report import Part, Sentence, Table, machine, show

_LARGEST = 5
_SMALL_SHARE = 0.05
"""Waiting below this share is no bottleneck."""


@dataclass(frozen=True, kw_only=True)
class DemoFigures:
    """The measurements of the demo. Trainings are those of rank 0."""

    settings: DemoSettings
    corpus: Corpus
    tars: TarPass
    whole: TrainingResult
    interrupted: TrainingResult
    resumed: TrainingResult
    seconds: float

    @property
    def identical(self) -> bool:
        """Return whether interrupted and resumed gave the losses of the uninterrupted one, bit for bit."""
        return self.interrupted.losses + self.resumed.losses == self.whole.losses

    def to_json(self) -> dict[str, Any]:
        """A JSON value; what the command writes with `--json`."""
        runs = {name: getattr(self, name).to_json() for name in ("whole", "interrupted", "resumed")}
        return {
            "identical": self.identical,
            "settings": {**asdict(self.settings), "folder": self.corpus.folder},
            "corpus": asdict(self.corpus),
            "tars": {
                "modules": len(self.tars.modules),
                "bytes": self.tars.num_bytes,
                "seconds": self.tars.seconds,
            },
            "runs": runs,
            "seconds": self.seconds,
            "machine": {**machine(), "python": platform.python_version(), "torch": torch.__version__},
        }


def run_demo(settings: DemoSettings) -> DemoFigures:
    """Do all of it and print as it goes. `identical` of the figures says whether resuming was exact."""
    began = perf_counter()
    with _folder(settings) as folder:
        corpus = write_corpus(folder, settings.max_modules)
        tars = read_tars(folder)
        show([_heading("Python's standard library as shards"), *_corpus(corpus, tars)])

        show([_heading(f"Training on {settings.num_ranks} ranks, interrupted and resumed")])
        training = Training(
            title="uninterrupted",
            folder=str(folder),
            steps=settings.steps,
            batch_size=settings.batch_size,
            seed=settings.seed,
        )
        whole = _on_all_ranks(training, settings)
        half = settings.steps // 2
        interrupted = _on_all_ranks(replace(training, title="first half", stop=half), settings)
        state = json.dumps(interrupted.loader_state)
        show(
            [
                _said(f"all processes ended; the loader's state is JSON, {len(state)} bytes:"),
                _said(state, "dim"),
            ]
        )
        resumed = _on_all_ranks(replace(training, title="resumed", resume=True), settings)
        show([losses_text(whole.losses, interrupted.losses + resumed.losses, half)])
        figures = DemoFigures(
            settings=settings,
            corpus=corpus,
            tars=tars,
            whole=whole,
            interrupted=interrupted,
            resumed=resumed,
            seconds=perf_counter() - began,
        )
    show([_training_table(whole), _said(waiting_text(whole)), *_end(figures, folder)])
    return figures


@contextmanager
def _folder(settings: DemoSettings) -> Iterator[Path]:
    if settings.folder is not None:
        settings.folder.mkdir(parents=True, exist_ok=True)
        yield settings.folder.absolute()
    elif settings.keep:
        yield Path(tempfile.mkdtemp(prefix="dataflow-demo-"))
    else:
        with tempfile.TemporaryDirectory(prefix="dataflow-demo-") as folder:
            yield Path(folder)


def _on_all_ranks(training: Training, settings: DemoSettings) -> TrainingResult:
    """Train in fresh processes; rank 0's result."""
    timeout_s = 600 + 10 * training.steps
    return run_ranks(
        train, settings.num_ranks, args=(training,), start_method="forkserver", timeout_s=timeout_s
    )[0]


# ---- telling --------------------------------------------------------------------------------------------


def _heading(text: str) -> Sentence:
    return Sentence(f"\n{text}", "bold")


def _said(text: str, style: str = "") -> Sentence:
    return Sentence(text, style, indent=2)


def _corpus(corpus: Corpus, tars: TarPass) -> Iterator[Part]:
    """Yield what was written, whether every byte came back, and the largest modules."""
    yield _said(
        f"{corpus.num_modules:,} modules, {corpus.num_bytes / 1e6:.1f} MB of source text: "
        f"{corpus.token_shards} files of byte tokens and {corpus.tar_shards} WebDataset tars, "
        f"written and indexed in {corpus.seconds:.1f} s"
    )
    same = tars.num_bytes == corpus.num_bytes and len(tars.modules) == corpus.num_modules
    yield _said(
        f"read back from the tars: {len(tars.modules):,} samples (txt, json), "
        f"{tars.num_bytes / 1e6:.1f} MB in {tars.seconds:.2f} s, "
        + ("every byte there" if same else "NOT the bytes that were written"),
        "" if same else "red",
    )
    largest = sorted(tars.modules, key=lambda one: -one["bytes"])[:_LARGEST]
    rows = [(f"  {one['name']}", f"{one['bytes'] / 1e3:,.0f}", f"{one['lines']:,}") for one in largest]
    yield Table(("  largest modules", "kB", "lines"), rows)


def losses_text(whole: Sequence[float], pieces: Sequence[float], half: int) -> Sentence:
    """Say whether the interrupted training is the uninterrupted one; if not, the first step that differs."""
    pairs = enumerate(zip_longest(whole, pieces), 1)
    step = next((step for step, (one, other) in pairs if one != other), None)
    if step is None:
        return _said(
            f"identical: {len(whole)} losses of the run that was interrupted after step {half} and resumed "
            "in new processes equal those of the uninterrupted one, bit for bit",
            "green",
        )
    one, other = (losses[step - 1] if step <= len(losses) else "none" for losses in (whole, pieces))
    return _said(f"different: step {step} has loss {one} uninterrupted and {other} resumed", "red")


def _training_table(result: TrainingResult) -> Table:
    rate = result.samples_per_s
    rows = (
        ("samples/s", f"{rate:,.0f}, {rate * LENGTH / 1e6:.3f} MB/s of text"),
        ("waiting for data", f"{result.waiting_share:.2%} of the time"),
        ("first batch", f"after {result.first_batch_s * 1e3:,.0f} ms"),
        ("memory of rank 0", f"{result.peak_bytes / 1e6:,.0f} MB at its peak"),
        ("  of it the loader", f"{result.loader_peak_bytes / 1e6:,.0f} MB"),
    )
    return Table((), [(f"  {name}", text) for name, text in rows])


def waiting_text(result: TrainingResult) -> str:
    """Return whether the loader kept up."""
    if result.waiting_share < _SMALL_SHARE:
        return "the model is the limit: no loader could make this training faster"
    return f"the loader made the training wait for {result.waiting_share:.0%} of its time"


def _end(figures: DemoFigures, folder: Path) -> Iterator[Sentence]:
    """Yield how long it took, and where things are."""
    where = f"  done in {figures.seconds:.0f} s; the training loop is {train_module.__file__}"
    yield Sentence(where, whole=True)
    if folder.exists():
        yield Sentence(f"  shards and checkpoint are in {figures.corpus.folder}", whole=True)
