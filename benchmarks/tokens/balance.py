"""How evenly do ranks get pictures, what does that cost? `python -m benchmarks.tokens.balance --help`.

Chats are made: 30 % text alone, 50 % with one picture, 15 % with two to eight, 5 % with six to 24 pages; a
token of a picture is four patches, as in Qwen's models. Those longer than a row are left out. A step is a
row a rank. A rank's cost is its patches; "max/mean" is the greatest of a step over the mean, on average over
the steps that have any, and "waits" the share of the encoder's time in which ranks stand still. Figures are
means over orders of several seeds. Nothing is read or made: these are the plans alone.

- first fit: eight open rows in the order of the epoch, all given out when a chat fits none. It is the rule of
  Grain's packing, as torchtitan uses it; its package is not run.
- `Packed`, and the same with `balance=`, `budget=` and smaller windows, by the planner of the loader.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import ReportSummary, save_figures
from sharding.lengths.batching import Packed
from sharding.lengths.unit_plan import UnitPlanner, UnitSequence
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle

LENGTH, RANKS, PLANNED = 8192, (8, 64), 16_384
PATCHES_A_TOKEN = 4
MOST_MAX_OVER_MEAN = {8: 1.02, 64: 1.06}
MOST_FILL_LOST, MOST_PLAN_MS = 0.001, 60
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class PlanFigures:
    """One rule on the mix."""

    rule: str
    filled: float
    """Share of the places that hold tokens."""
    max_over_mean: dict[int, float]
    """By the number of ranks."""
    waits: dict[int, float]
    mixed_steps: dict[int, float]
    """Share of the steps in which some ranks have pictures, and some none."""
    most_patches: int
    """Of a row."""
    plan_ms: float | None
    """Processor time to plan 16,384 chats, median."""


def chats(num: int, seed: int) -> Numbers:
    """Tokens and patches of chats, [n, 2]."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, num, p=[0.3, 0.5, 0.15, 0.05])
    several, pages = rng.integers(2, 9, num), rng.integers(6, 25, num)
    pictures = np.select([kind == 0, kind == 1, kind == 2], [0, 1, several], pages)
    text = np.clip(rng.lognormal(5.3, 0.9, num), 10, 6000).astype(np.int64)
    sizes = np.clip(rng.lognormal(12.4, 0.9, int(pictures.sum())), 56 * 56, 28 * 28 * 1280)
    own = np.maximum(1, sizes / (28 * 28)).astype(np.int64) * PATCHES_A_TOKEN
    patches = np.bincount(np.repeat(np.arange(num), pictures), own, num).astype(np.int64)
    made = np.stack([text + patches // PATCHES_A_TOKEN, patches], axis=1)
    return made[made[:, 0] <= LENGTH]


def order_of(num: int, seed: int) -> Order:
    return Order([num], Shuffle("full"), seed=seed, epoch=0)


def first_fit(sizes: Numbers, open_rows: int = 8) -> Iterator[tuple[int, int]]:
    """Tokens and patches of each row."""
    rows = list[list[int]]()
    for tokens, patches in sizes.tolist():
        row = next((row for row in rows if row[0] + tokens <= LENGTH), None)
        if row is None:
            if len(rows) == open_rows:
                yield from ((one[0], one[1]) for one in rows)
                rows = []
            rows.append(row := [0, 0])
        row[0] += tokens
        row[1] += patches
    yield from ((one[0], one[1]) for one in rows)


def planned(sizes: Numbers, batching: Packed, seed: int) -> tuple[Numbers, UnitSequence]:
    """Patches of each row, in the order in which ranks take them, and the plan."""
    order = order_of(len(sizes), seed)
    lengths = sizes if batching.cost_columns else sizes[:, 0]
    sequence = UnitPlanner(batching, lengths=lengths).sequence(order)
    segments, of_row = sequence.take(np.arange(sequence.num_units))
    samples = order.samples(np.arange(len(sizes)))[segments.position]
    patches = np.add.reduceat(sizes[samples, 1], np.cumsum(of_row) - of_row)
    return patches, sequence


def plan_ms(sizes: Numbers, batching: Packed, repeats: int) -> float:
    """Processor time to plan one packing window, median."""
    own, took = sizes[:PLANNED], list[float]()
    for _ in range(repeats):
        start = time.process_time()
        batching.planned(own if batching.cost_columns else own[:, 0], 1, 0)
        took.append(1000 * (time.process_time() - start))
    return statistics.median(took)


def figures(rule: str, patches: list[Numbers], filled: list[float], plan: float | None) -> PlanFigures:
    """Of the rows of several orders."""
    even, waits, mixed = {}, {}, {}
    for ranks in RANKS:
        steps = [own[: len(own) // ranks * ranks].reshape(-1, ranks) for own in patches]
        paid = [own[own.any(axis=1)] for own in steps]
        even[ranks] = statistics.mean(float((own.max(1) / own.mean(1)).mean()) for own in paid)
        waits[ranks] = statistics.mean(1 - float(own.mean(1).sum() / own.max(1).sum()) for own in steps)
        mixed[ranks] = statistics.mean(float(((own == 0).any(1) & own.any(1)).mean()) for own in steps)
    most = max(int(own.max()) for own in patches)
    return PlanFigures(rule, statistics.mean(filled), even, waits, mixed, most, plan)


@click.command()
@click.option("--chats", "num", type=click.IntRange(1000), default=40_000, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Orders, for means.")
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Of timed plans.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(num: int, seeds: int, repeats: int, output: Path | None) -> None:
    """Plan the rows of made chats by several rules."""
    sizes, rows = chats(num, seed=0), list[PlanFigures]()
    mean = int(sizes[:, 1].sum() / sizes[:, 0].sum() * LENGTH)
    tight = max(int(sizes[:, 1].max()), mean * 115 // 100)
    given = [sizes[order_of(len(sizes), seed).samples(np.arange(len(sizes)))] for seed in range(seeds)]
    fit = [np.array([*first_fit(own)], np.int64) for own in given]
    filled = [float(own[:, 0].sum() / (len(own) * LENGTH)) for own in fit]
    rows.append(figures("first fit, 8 open rows", [own[:, 1] for own in fit], filled, None))
    for rule, batching in {
        "Packed": Packed(LENGTH),
        "balance": Packed(LENGTH, balance="patches"),
        "balance, budget 32,768": Packed(LENGTH, balance="patches", budget={"patches": 32_768}),
        f"balance, budget {tight:,}": Packed(LENGTH, balance="patches", budget={"patches": tight}),
        "balance, window 4,096": Packed(LENGTH, balance="patches", window=4096),
        "balance, window 1,024": Packed(LENGTH, balance="patches", window=1024),
        "balance, window 1,024, groups of 8": Packed(LENGTH, balance="patches", window=1024, balance_group=8),
    }.items():
        plans = [planned(sizes, batching, seed) for seed in range(seeds)]
        filled = [sequence.stats.efficiency for _, sequence in plans]
        own = figures(rule, [one for one, _ in plans], filled, plan_ms(sizes, batching, repeats))
        rows.append(own)
    for row in rows:
        even = ", ".join(
            f"{ranks} ranks: {row.max_over_mean[ranks]:.3f}, waits {row.waits[ranks]:.1%}, "
            f"mixed {row.mixed_steps[ranks]:.1%}"
            for ranks in RANKS
        )
        took = "" if row.plan_ms is None else f", {row.plan_ms:.1f} ms"
        print(f"{row.rule:36} {row.filled:.4f} full; {even}; at most {row.most_patches:,} patches{took}")
    by_rule = {row.rule: row for row in rows}
    own, plain = by_rule["balance"], by_rule["Packed"]
    bars = [
        *(
            ReportSummary("balance", f"max/mean of {r} ranks", own.max_over_mean[r], most, at_most=True)
            for r, most in MOST_MAX_OVER_MEAN.items()
        ),
        ReportSummary("balance", "fill lost", plain.filled - own.filled, MOST_FILL_LOST, at_most=True),
        ReportSummary("balance", "ms to plan 16,384", own.plan_ms, MOST_PLAN_MS, at_most=True),
    ]
    for bar in bars:
        print(f"{bar.bar}: {bar.says}")
    if output:
        mix = {"chats": len(sizes), "tokens": int(sizes[:, 0].sum()), "patches": int(sizes[:, 1].sum())}
        save_figures(
            output,
            mix=mix,
            rows=[asdict(row) for row in rows],
            bars=[asdict(bar) for bar in bars],
        )


if __name__ == "__main__":
    main()
