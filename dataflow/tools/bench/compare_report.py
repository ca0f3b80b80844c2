"""What `dataflow bench compare` prints; a loader that loses is said to lose."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from dataflow.tools.bench.compare import SAME, Compared, Contestant


def show(found: Compared, console: Console) -> None:
    """Print the medians and what they say."""
    asked = found.asked
    console.print(found.dataset, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in ("samples/s", "lowest", "highest", "first batch", "of torch's best"):
        table.add_column(name, justify="right")
    best = found.median(found.best("torch"))
    for one, runs in found.runs.items():
        rates = [run.samples_per_s for run in runs]
        first_ms = statistics.median(run.first_batch_s for run in runs) * 1e3
        median = found.median(one)
        cells = [f"{rate:,.0f}" for rate in (median, min(rates), max(rates))]
        table.add_row(one.name, *cells, f"{first_ms:,.0f} ms", f"{median / best:.2f} x")
    console.print(table)
    for line in lines(found):
        console.print(line, markup=False)
    console.print(
        f"{asked.repeats} runs each of {asked.seconds:g} s, in turns, in fresh processes; batches of "
        f"{asked.batch_size}; nothing was trained.",
        style="dim",
    )


def lines(found: Compared) -> Iterator[str]:
    """What the medians say, one sentence each."""
    ours, theirs = found.best("dataflow"), found.best("torch")
    yield _sentence(found, ours, theirs)
    pairs = [
        (one, Contestant("torch", one.workers))
        for one in found.runs
        if one.whose == "dataflow" and one.workers is not None
    ]
    for one, other in pairs:
        if other in found.runs and (one, other) != (ours, theirs) and _slower(found, one, other):
            yield _sentence(found, one, other)
    if _overlap(found, ours, theirs):
        yield "the ranges of the single runs overlap: more --repeats or --seconds would tell more"
    if ours.workers is None:
        yield (
            "torch draws single samples of the ShardedDataset in a full shuffle; dataflow streams its blocks "
            "and mixes them in windows (dataflow inspect tells how well). To compare with a dataset of your "
            "own: package.module:function"
        )


def _sentence(found: Compared, ours: Contestant, theirs: Contestant) -> str:
    ratio = found.median(ours) / found.median(theirs)
    pair = f"{ours.name}: {found.median(ours):,.0f} samples/s; {theirs.name}: {found.median(theirs):,.0f}"
    if ratio < 1 - SAME:
        return f"torch is faster here, {1 / ratio:.2f} x ({pair})"
    if ratio <= 1 + SAME:
        return f"no difference beyond {SAME:.0%} ({pair})"
    return f"dataflow is faster here, {ratio:.2f} x ({pair})"


def _slower(found: Compared, one: Contestant, other: Contestant) -> bool:
    return found.median(one) < (1 - SAME) * found.median(other)


def _overlap(found: Compared, one: Contestant, other: Contestant) -> bool:
    a, b = ([run.samples_per_s for run in found.runs[who]] for who in (one, other))
    return len(a) > 1 and min(a) <= max(b) and min(b) <= max(a)
