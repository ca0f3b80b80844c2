"""The bars, and whether a run reached them.

A bar is a ratio measured in one run with the peer beside it, where that peer runs here; else a figure.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.runs import Run
from benchmarks.peers.workloads import LIMIT, ONE_THREAD, OURS, Workload
from benchmarks.report import ReportSummary


class _Rows:
    """Looks up medians; None wherever a contestant has no figures."""

    def __init__(self, workload: Workload, medians: Sequence[Run]) -> None:
        self.workload = workload
        self._rows = {
            (r.contestant, r.consumer): r for r in medians if r.workload == workload.name and not r.reason
        }

    def value(self, name: str, figure: str = "samples_per_s", consumer: str = "plain") -> float | None:
        row = self._rows.get((name, consumer))
        return None if row is None else getattr(row, figure)

    def verdict(
        self, bar: str, measured: float | None, wanted: float, *, at_most: bool = False
    ) -> ReportSummary:
        return ReportSummary(self.workload.name, bar, measured, wanted, at_most)

    def against(self, bar: str, other: float | None, wanted: float) -> ReportSummary:
        """Our plain rate over another one."""
        return self.verdict(bar, _ratio(self.value(OURS), other), wanted)

    def first_batch(self, wanted_s: float) -> ReportSummary:
        """The time to our first batch, with the catalog at hand."""
        measured = self.value(OURS, "first_batch_s")
        return self.verdict("s to the first batch", measured, wanted_s, at_most=True)

    def stall_share(self) -> float | None:
        """Our stall share under the burning consumer, where the pipeline alone is 1.3x faster than it."""
        alone, burn_s = self.value(OURS, "batch_s"), self.value(OURS, "burn_s", "burn")
        if alone is None or burn_s is None or alone * 1.3 > burn_s:
            return None
        return self.value(OURS, "stall_share", "burn")

    def best_peer(self, consumer: str = "plain") -> float | None:
        rates = [self.value(c.name, consumer=consumer) for c in self.workload.contestants if c.is_peer]
        return max((rate for rate in rates if rate is not None), default=None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


MEMORY_LIMIT_MB = 512.0
"""What `ours` is given; the bar allows 150 MB more over the bare `import torch` process."""


def verdicts(workload: Workload, medians: Sequence[Run]) -> list[ReportSummary]:
    """Hold the medians of one run to the workload's bars, its own first, then those of all."""
    rows = _Rows(workload, medians)
    return _OWN[workload.name](rows) + _for_all(rows)


def _w1(rows: _Rows) -> list[ReportSummary]:
    burning = _ratio(rows.value(OURS, consumer="burn"), rows.best_peer("burn"))
    memory = _ratio(rows.value(OURS, "held_mb"), rows.value("torch", "held_mb"))
    return [
        rows.against("of the decode + crop + resize limit", rows.value(LIMIT), 0.97),
        rows.against("x torchdata.nodes", rows.value("torchdata.nodes"), 1.05),
        rows.against("x the best peer", rows.best_peer(), 1.0),
        rows.verdict("x the best peer, consumer burning 20 ms", burning, 1.0),
        rows.verdict("x torch's memory", memory, 0.5, at_most=True),
        rows.first_batch(0.120),
    ]


def _w1_raw(rows: _Rows) -> list[ReportSummary]:
    return [
        rows.against("of the memcpy limit", rows.value(LIMIT), 0.85),
        rows.against("x torch, loose files", rows.value("torch"), 1.5),
        rows.against("x the best peer", rows.best_peer(), 1.0),
        rows.first_batch(0.050),
    ]


def _w2(rows: _Rows) -> list[ReportSummary]:
    return [
        rows.against("of one thread's gather", rows.value(ONE_THREAD), 1.2),
        rows.against("x torch, hand-written and mapped", rows.value("torch"), 2.0),
        rows.against("x the best peer", rows.best_peer(), 1.0),
        rows.first_batch(0.050),
    ]


def _w3(rows: _Rows) -> list[ReportSummary]:
    return [
        rows.against("of the row-group limit", rows.value(LIMIT), 0.85),
        rows.verdict("row groups mixed in a batch", rows.value(OURS, "row_groups_per_batch"), 8),
        rows.against("x Grain", rows.value("Grain"), 1.2),
        rows.against("x the best peer", rows.best_peer(), 1.0),
        rows.first_batch(0.120),
    ]


def _w4(rows: _Rows) -> list[ReportSummary]:
    return [
        rows.against("of one thread's gather", rows.value(ONE_THREAD), 1.4),
        rows.against("x torch, hand-written and mapped", rows.value("torch"), 2.0),
        rows.against("x FFCV, its own format", rows.value("FFCV"), 3.0),
        rows.against("x the best peer", rows.best_peer(), 1.0),
        rows.first_batch(0.050),
    ]


_OWN = {"W1": _w1, "W1-raw": _w1_raw, "W2": _w2, "W3": _w3, "W4": _w4}


def _for_all(rows: _Rows) -> list[ReportSummary]:
    return [
        rows.verdict("stall share, burning consumer", rows.stall_share(), 0.02, at_most=True),
        rows.verdict("MB over bare torch", rows.value(OURS, "held_mb"), MEMORY_LIMIT_MB + 150, at_most=True),
    ]
