"""The medians of the hand-over benchmark, its tables, and the bars they are held to.

A bar is a ratio to torch's DataLoader with the same dataset and number of workers, measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.handover.loaders import LOADERS, OURS, TORCH
from benchmarks.report import ReportSummary

Key = tuple[str, str, int, str]
"""Case, loader, workers, variant."""
Rows = Mapping[Key, Mapping[str, float]]
RATE, FIRST, SECOND = "batches_per_s", "first_batch_ms", "second_epoch_ms"
FIGURES: Mapping[str, Sequence[str]] = {
    "large": (RATE, "cpu_ms_per_batch"),
    "large-read": (RATE, "cpu_ms_per_batch"),
    "many": (RATE, "cpu_ms_per_batch"),
    "scalars": (RATE, "cpu_ms_per_batch"),
    "tiny": (RATE, "cpu_ms_per_batch"),
    "startup": (FIRST, "second_loader_ms"),
    "first": ("from_making_ms", "later_loader_ms"),
    "turn": (SECOND, "later_epochs_ms"),
    "descriptors": ("descriptors", "shared_objects"),
    "memory": ("held_mb", "pss_mb"),
    "delay": (RATE, "cpu_ms_per_batch"),
}
"""What each case measures; the first figure is the one that is compared."""
LARGEST_LOSS = 0.05
QUIET_CORES = 0.1
"""Cores that other processes may use before a run counts as disturbed."""


def key_of(run: Mapping[str, Any]) -> Key:
    return run["case"], run["loader"], run["workers"], run["variant"]


def medians(runs: Iterable[Mapping[str, Any]]) -> dict[Key, dict[str, float]]:
    """The median of each figure over the runs of one point, and how many of these runs were disturbed.

    Runs that failed are left out, and disturbed ones too where a point has others.
    """
    groups: dict[Key, list[Mapping[str, float]]] = {}
    for run in runs:
        if not run["reason"]:
            groups.setdefault(key_of(run), []).append(run["figures"])
    return {key: _median([f for f in group if not disturbed(f)] or group) for key, group in groups.items()}


def _median(group: Sequence[Mapping[str, float]]) -> dict[str, float]:
    figures = {name: statistics.median(figures[name] for figures in group) for name in group[0]}
    return figures | {"runs": len(group), "disturbed_runs": sum(map(disturbed, group))}


def disturbed(figures: Mapping[str, float]) -> bool:
    """Whether other processes used more of the machine than a quiet one shows."""
    return figures.get("others_cores", 0.0) > QUIET_CORES


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def verdicts(rows: Rows) -> list[ReportSummary]:
    """Each bar of "Hand-over from worker processes", held to the medians of one run."""

    def value(case: str, loader: str, workers: int = 2, variant: str = "", figure: str = "") -> float | None:
        return rows.get((case, loader, workers, variant), {}).get(figure or FIGURES[case][0])

    def against_torch(case: str, workers: int, variant: str = "", torch_variant: str = "") -> float | None:
        theirs = value(case, TORCH, workers, torch_variant or variant)
        return ratio(value(case, OURS, workers, variant), theirs)

    held = [
        ReportSummary(case, "x torch's batches/s", against_torch(case, 2), wanted)
        for case, wanted in (("large", 2.0), ("many", 3.0), ("scalars", 1.0), ("tiny", 5.0))
    ]
    fork, safe = against_torch("startup", 8, "fork"), against_torch("startup", 8, "default", "spawn")
    held.append(ReportSummary("startup", "x torch, both with fork, 8 workers", fork, 1.2, at_most=True))
    held.append(
        ReportSummary("startup", "x torch with spawn, ours by default, 8 workers", safe, 0.3, at_most=True)
    )
    for workers in (2, 8):
        begun = against_torch("first", workers, "model")
        bar = f"x torch, a model built in between, {workers} workers"
        held.append(ReportSummary("first", bar, begun, 1.5, at_most=True))
        later = ratio(*(value("first", who, workers, "model", "later_loader_ms") for who in (OURS, TORCH)))
        held.append(
            ReportSummary("first", f"x torch, later loaders, {workers} workers", later, 1.2, at_most=True)
        )
    for workers in (2, 8):
        turned = against_torch("turn", workers, "persistent")
        held.append(
            ReportSummary("turn", f"x torch, persistent, {workers} workers", turned, 0.2, at_most=True)
        )
    few, most = value("descriptors", OURS, 2, "50"), value("descriptors", OURS, 2, "200")
    more = None if few is None or most is None else most - few
    held.append(ReportSummary("descriptors", "more for 200 tensors than for 50", more, 0, at_most=True))
    objects = value("descriptors", OURS, 2, "200", "shared_objects")
    held.append(ReportSummary("descriptors", "shared-memory objects", objects, 1, at_most=True))
    for workers in (2, 4, 8):
        bar = f"of throughput lost, {workers} workers"
        held += [ReportSummary("delay", bar, loss(rows, OURS, workers), LARGEST_LOSS, at_most=True)]
    return held


def loss(rows: Rows, loader: str, workers: int) -> float | None:
    """Share of the throughput that delays cost."""
    rates = [rows.get(("delay", loader, workers, v), {}).get(RATE) for v in ("delayed", "plain")]
    kept = ratio(*rates)
    return None if kept is None else 1 - kept


def table(case: str, rows: Rows) -> str:
    """The medians of one case as a Markdown table, each beside torch's with the same workers and variant."""
    if case == "delay":
        return _delay_table(rows)
    first, second = FIGURES[case]
    found = [key for key in rows if key[0] == case]
    if not found:
        return ""
    found.sort(key=lambda key: (key[2], _place(key[1]), key[3]))
    with_variant = any(key[3] for key in found)
    head = ["", "workers", *(["with"] if with_variant else []), _heading(first), "ratio to torch"]
    lines = [f"| {' | '.join([*head, _heading(second)])} |", f"|---|{'--:|' * len(head)}"]
    for key in found:
        _, loader, workers, variant = key
        theirs = rows.get((case, TORCH, workers, variant), {}).get(first)
        beside = ratio(rows[key][first], theirs)
        cells = [loader, str(workers), *([variant] if with_variant else []), _shown(rows[key][first])]
        lines.append(f"| {' | '.join([*cells, _shown(beside), _shown(rows[key].get(second))])} |")
    return "\n".join(lines)


def _delay_table(rows: Rows) -> str:
    found = {key[1:3] for key in rows if key[0] == "delay"}
    lines = ["| | workers | batches/s | with delays | lost |", "|---|--:|--:|--:|--:|"]
    for loader, workers in sorted(found, key=lambda pair: (pair[1], _place(pair[0]))):
        rates = [rows.get(("delay", loader, workers, v), {}).get(RATE) for v in ("plain", "delayed")]
        lost = loss(rows, loader, workers)
        shown = "" if lost is None else f"{100 * lost:.1f} %"
        lines.append(f"| {loader} | {workers} | {_shown(rates[0])} | {_shown(rates[1])} | {shown} |")
    return "\n".join(lines) if found else ""


def _place(loader: str) -> int:
    return list(LOADERS).index(loader)


def _heading(figure: str) -> str:
    return figure.replace("_per_", "/").replace("_", " ")


def _shown(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def verdict_table(held: Sequence[ReportSummary]) -> str:
    """The bars as a Markdown table: reached, or short by how much."""
    lines = ["| case | measured | bar | |", "|---|--:|---|---|"]
    for verdict in held:
        measured = "" if verdict.measured is None else f"{verdict.measured:.3g}"
        sign = "at most" if verdict.at_most else "at least"
        bar = f"{sign} {verdict.wanted:g} {verdict.bar}"
        lines.append(f"| {verdict.workload} | {measured} | {bar} | {verdict.says} |")
    return "\n".join(lines)
