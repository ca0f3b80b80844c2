"""`dataflow bench compare` runs torch's DataLoader and this one over the user's own dataset.

Each run is a fresh process that makes the dataset and one loader, takes the first batch, and then counts
samples for some seconds, epoch after epoch; nothing is trained. Runs take turns (A B C A B C ...), so that
a drift of the machine falls on all alike, and medians are compared; a loader that loses is said to lose.
Over shards, torch reads a `ShardedDataset` as the map-style dataset that it also is, sample by sample, fully
shuffled; this loader streams it. Over any other dataset both do the same work with as many workers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset

from dataflow.dataset import ShardedDataset
from dataflow.loader import DataLoader
from dataflow.mixture import Mixture
from dataflow.testing import run_ranks
from dataflow.tools.bench.settings import Comparison, settings_json
from dataflow.tools.terminal.options import named_function
from dataflow.tools.terminal.report import Drawing, Page, Part, Sentence, Table, machine, usable_cores
from dataflow.tools.verdicts.loading import SAME, comparison_text, comparison_verdict

Whose = Literal["torch", "dataflow"]
_START_S = 300.0


@dataclass(frozen=True)
class Contestant:
    """One loader with one setting."""

    whose: Whose
    workers: int | None
    """`num_workers`; None: what dataflow chooses over shards."""

    @property
    def name(self) -> str:
        """Such as "torch, 2 workers"."""
        if self.workers is None:
            return self.whose
        return f"{self.whose}, {self.workers or 'no'} worker{'s' * (self.workers != 1)}"


@dataclass(frozen=True)
class LoaderRun:
    """The measurements of one process."""

    samples_per_s: float
    """Samples a second, after the first batch."""
    first_batch_s: float
    """Seconds from making the loader to its first batch; workers' start is in it."""
    samples: int
    """Counted, after the first batch."""


@dataclass(frozen=True, eq=False)
class ComparisonFigures:
    """The measurements of `dataflow bench compare`."""

    settings: Comparison
    dataset: str
    runs: Mapping[Contestant, Sequence[LoaderRun]]

    def rates(self, contestant: Contestant) -> list[float]:
        """Samples a second of each run."""
        return [run.samples_per_s for run in self.runs[contestant]]

    def median(self, contestant: Contestant) -> float:
        """Return the median of samples a second."""
        return statistics.median(self.rates(contestant))

    def best(self, whose: Whose) -> Contestant:
        """The fastest setting of one loader."""
        return max((contestant for contestant in self.runs if contestant.whose == whose), key=self.median)

    @property
    def ratio(self) -> float:
        """The ratio of the best medians: above 1, dataflow is faster."""
        return self.median(self.best("dataflow")) / self.median(self.best("torch"))

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        contestants = [
            {
                "name": contestant.name,
                **asdict(contestant),
                "median_samples_per_s": self.median(contestant),
                "runs": [asdict(run) for run in runs],
            }
            for contestant, runs in self.runs.items()
        ]
        return {
            "asked": settings_json(self.settings),
            "dataset": self.dataset,
            "machine": {**machine(), "torch": torch.__version__},
            "ratio": self.ratio,
            "contestants": contestants,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of a CSV file for each run."""
        return [
            {"loader": contestant.whose, "workers": contestant.workers, "run": number, **asdict(run)}
            for contestant, runs in self.runs.items()
            for number, run in enumerate(runs)
        ]


# ---- measuring ------------------------------------------------------------------------------------------


def compare(
    settings: Comparison,
    progress: Callable[[int, int, str], None] = lambda *_: None,
    run: Callable[[Contestant, Comparison], LoaderRun] | None = None,
) -> ComparisonFigures:
    """Run all contestants in turns; `progress` hears of each before it begins, `run` runs one.

    Raises:
        ImportError, ValueError: the dataset cannot be made, or gives no batch.
        Exception: what the dataset raises.
    """
    run = run or _in_a_process
    settings = replace(settings, workers=tuple(dict.fromkeys(settings.workers or (0, usable_cores()))))
    dataset = settings.dataset.open()
    contestants = contestants_over(dataset, settings.workers)
    runs: dict[Contestant, list[LoaderRun]] = {contestant: [] for contestant in contestants}
    rounds = [contestant for _ in range(settings.repeats) for contestant in contestants]
    for number, contestant in enumerate(rounds):
        progress(number, len(rounds), contestant.name)
        runs[contestant].append(run(contestant, settings))
    name = repr(dataset) if isinstance(dataset, ShardedDataset) else type(dataset).__name__
    return ComparisonFigures(settings, name, runs)


def contestants_over(dataset: Any, workers: Sequence[int]) -> list[Contestant]:
    """Return who runs. Over shards, dataflow chooses its threads; `ValueError` for what torch cannot read."""
    if isinstance(dataset, Mixture):
        raise ValueError("torch's DataLoader cannot read a Mixture: compare its datasets one by one")
    by_torch = [Contestant("torch", number) for number in workers]
    if isinstance(dataset, ShardedDataset):
        return [Contestant("dataflow", None), *by_torch]
    return [contestant for other in by_torch for contestant in (Contestant("dataflow", other.workers), other)]


def _in_a_process(contestant: Contestant, settings: Comparison) -> LoaderRun:
    timeout_s = _START_S + 10 * settings.seconds
    arguments = (contestant, settings)
    return run_ranks(
        measure, 1, args=arguments, backend=None, timeout_s=timeout_s, start_method="forkserver"
    )[0]


def measure(
    contestant: Contestant, settings: Comparison, clock: Callable[[], float] = time.perf_counter
) -> LoaderRun:
    """One run, in this process."""
    dataset = settings.dataset.open()
    torch.manual_seed(settings.seed)
    began = clock()
    loader = make_loader(contestant, dataset, settings)
    try:
        batches = _endless(loader)
        size_of(next(batches), settings.batch_size)
        first = now = clock()
        samples = 0
        for batch in batches:
            samples += size_of(batch, settings.batch_size)
            now = clock()
            if now - first >= settings.seconds:
                break
    finally:
        if isinstance(loader, DataLoader):
            loader.close()
    return LoaderRun(samples / max(now - first, 1e-9), first - began, samples)


def make_loader(contestant: Contestant, dataset: Any, settings: Comparison) -> Any:
    """The loader of a contestant, as its documentation advises: workers stay from epoch to epoch."""
    kind: Any = TorchDataLoader if contestant.whose == "torch" else DataLoader
    arguments: dict[str, Any] = {"batch_size": settings.batch_size}
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):
        arguments["shuffle"] = True
    if settings.collate is not None:
        arguments["collate_fn"] = named_function(settings.collate)
    elif isinstance(dataset, ShardedDataset) and contestant.whose == "torch":
        arguments["collate_fn"] = _collate_samples
    if contestant.workers is not None:
        arguments |= {"num_workers": contestant.workers, "persistent_workers": contestant.workers > 0}
    return kind(dataset, **arguments)


def _collate_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples as a map-style dataset gives them -> columns: stacked where shapes are equal, else lists.

    For torch's own DataLoader, whose default cannot collate values of different lengths.
    """
    columns: dict[str, Any] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if all(isinstance(value, int | float) for value in values):
            columns[name] = torch.tensor(values)
        else:
            shapes = {value.shape if isinstance(value, torch.Tensor) else None for value in values}
            columns[name] = values if len(shapes) > 1 or None in shapes else torch.stack(values)
    return columns


def _endless(loader: Any) -> Iterator[Any]:
    for _ in count():
        nothing = True
        for batch in loader:
            nothing = False
            yield batch
        if nothing:
            raise ValueError("the dataset gives no batch")


def size_of(batch: Any, otherwise: int) -> int:
    """Samples of a batch: the length of its first column; `otherwise` where that is not known."""
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, tuple | list) and batch and isinstance(batch[0], torch.Tensor):
        batch = batch[0]
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    return len(batch) if hasattr(batch, "__len__") else otherwise


# ---- telling --------------------------------------------------------------------------------------------


def page_of(figures: ComparisonFigures) -> Page:
    """The medians and what they say."""
    settings = figures.settings
    columns = ("", "samples/s", "lowest", "highest", "first batch", "of torch's best")
    rows = [_row(figures, contestant) for contestant in figures.runs]
    how = (
        f"{settings.repeats} runs each of {settings.seconds:g} s, in turns, in fresh processes; batches of "
        f"{settings.batch_size}; nothing was trained."
    )
    drawing = Drawing(9, 4.2, lambda figure: _draw(figures, figure))
    lines = sentences(figures)
    parts: Sequence[Part] = (figures.dataset, Table(columns, rows), *lines, Sentence(how, "dim"), drawing)
    values = figures.to_json()
    return Page(
        "dataflow bench compare",
        values,
        parts,
        verdict=comparison_verdict(values),
        rows=figures.rows(),
    )


def _draw(figures: ComparisonFigures, figure: Any) -> None:
    """Draw the runs of each loader, and their median."""
    axes = figure.subplots()
    names = [loader.name for loader in figures.runs]
    axes.barh(names, [figures.median(loader) for loader in figures.runs], color="#9ab8d8", label="median")
    for loader in figures.runs:
        rates = figures.rates(loader)
        axes.plot(rates, [loader.name] * len(rates), "o", color="#20405f", markersize=4)
    axes.invert_yaxis()
    axes.set(title="samples a second, and each run", xlabel="samples/s", xlim=(0, None))


def _row(figures: ComparisonFigures, contestant: Contestant) -> list[str]:
    rates, median = figures.rates(contestant), figures.median(contestant)
    first_ms = statistics.median(run.first_batch_s for run in figures.runs[contestant]) * 1e3
    share = median / figures.median(figures.best("torch"))
    numbers = [f"{rate:,.0f}" for rate in (median, min(rates), max(rates))]
    return [contestant.name, *numbers, f"{first_ms:,.0f} ms", f"{share:.2f} x"]


def sentences(figures: ComparisonFigures) -> Iterator[str]:
    """Yield what the medians say besides the verdict, one sentence each."""
    ours, theirs = figures.best("dataflow"), figures.best("torch")
    for loader in figures.runs:
        other = Contestant("torch", loader.workers)
        if loader.whose == "torch" or other not in figures.runs or (loader, other) == (ours, theirs):
            continue
        if figures.median(loader) < (1 - SAME) * figures.median(other):
            yield comparison_text(loader.name, figures.median(loader), other.name, figures.median(other))
    if ours.workers is None:
        yield (
            "torch draws single samples of the ShardedDataset in a full shuffle; dataflow streams its blocks "
            "and mixes them in windows (dataflow inspect tells how well). To compare with a dataset of your "
            "own: package.module:function"
        )
