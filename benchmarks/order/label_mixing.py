"""How well batches of sorted data are mixed, for datasets of 20 MiB to 10 GiB: from the plan alone.

    python -m benchmarks.order.label_mixing --json benchmarks/results/label-mixing.json

Nothing is read or written: a dataset is a table of blocks, sorted by ten labels, with samples of 20 KB. Its
windows are those that a loader chooses without `window_blocks=` and `memory_limit=`. Told is the chi-square
of the labels of a batch by its degrees of freedom, as a mean over all batches of an epoch, and over seeds: 1
for independent draws, the batch size where each batch has one label. *full* is `Shuffle("full")`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import save_figures
from sharding.catalog.table import BlockTable
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.window_size import resolve_windows

MIB = 1 << 20
LABELS, SAMPLE_BYTES = 10, 20_000
SIZES_MIB = (20, 100, 256, 258, 300, 380, 450, 1000, 3000, 10_000)
BLOCKS_MIB = (0.25, 2.0)
BATCHES = (50, 128, 256)
_AT_ONCE = 1 << 20


def table_of(total_mib: int, block_mib: float) -> BlockTable:
    """A dataset of so many MiB in equal blocks."""
    num_blocks = int(total_mib / block_mib)
    lengths = np.full(num_blocks, int(block_mib * MIB))
    zeros = np.zeros(num_blocks, np.int64)
    return BlockTable(
        shard=zeros.astype(np.int32),
        offset=zeros,
        length=lengths,
        nbytes=lengths,
        num_samples=lengths // SAMPLE_BYTES,
        first_sample=zeros,
    )


def dispersion(order: Order, batch_size: int) -> float:
    """The mean over all whole batches of an epoch."""
    total, num_batches = 0.0, order.num_samples // batch_size
    step = _AT_ONCE // batch_size
    for first in range(0, num_batches, step):
        last = min(first + step, num_batches)
        total += _sum_of(order, first, last, batch_size)
    return total / num_batches


def _sum_of(order: Order, first: int, last: int, batch_size: int) -> float:
    samples = order.samples(np.arange(first * batch_size, last * batch_size))
    labels: NDArray[np.int64] = samples * LABELS // order.num_samples
    key = np.repeat(np.arange(last - first), batch_size) * LABELS + labels
    counts = np.bincount(key, minlength=(last - first) * LABELS)
    expected = batch_size / LABELS
    return float(np.square(counts - expected).sum() / expected / (LABELS - 1))


def measure(total_mib: int, block_mib: float, *, num_seeds: int) -> dict[str, Any]:
    """One row: what the windows are, and how well epochs 0 and 1 mix."""
    table = table_of(total_mib, block_mib)
    shuffle, reason = resolve_windows(Shuffle(), [table])
    row: dict[str, Any] = {"mib": total_mib, "block_mib": block_mib, "window": reason}
    for batch_size in BATCHES:
        for name, mixed, epoch in (
            ("epoch_0", shuffle, 0),
            ("epoch_1", shuffle, 1),
            ("full", Shuffle("full"), 1),
        ):
            orders = (Order(table.num_samples, mixed, seed=seed, epoch=epoch) for seed in range(num_seeds))
            row[f"{name}_{batch_size}"] = float(np.mean([dispersion(one, batch_size) for one in orders]))
    return row


def table_text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table for people, in Markdown."""
    lines = ["| MiB | blocks of MiB | batch | epoch 0 | epoch 1 | full |", "|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        for batch in BATCHES:
            figures = " | ".join(f"{row[f'{name}_{batch}']:.2f}" for name in ("epoch_0", "epoch_1", "full"))
            lines.append(f"| {row['mib']:,} | {row['block_mib']} | {batch} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(total, block, num_seeds=arguments.seeds) for block in BLOCKS_MIB for total in SIZES_MIB]
    sys.stdout.write(table_text(rows) + "\n")
    if arguments.json:
        save_figures(arguments.json, rows=rows, seeds=arguments.seeds)


if __name__ == "__main__":
    main()
