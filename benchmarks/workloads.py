"""What is measured: the contestants of each workload, and the bars they are held to.

A bar is a ratio measured in one run with the peer beside it, where a peer can run here; else a stated figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import Run

OURS, LIMIT = "dataflow", "limit"


@dataclass(frozen=True)
class Contestant:
    """One way of loading a workload."""

    name: str
    target: str
    """`module:function` below `benchmarks`."""
    workers: int = 2
    """Used by `--quick` and with `--no-sweep`; otherwise the best of `choices` is taken."""
    choices: tuple[int, ...] = (0, 1, 2, 3)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_peer(self) -> bool:
        return self.name != OURS and not self.name.startswith(LIMIT)


@dataclass(frozen=True)
class Workload:
    """One row of the table of bars."""

    name: str
    delivers: str
    contestants: tuple[Contestant, ...]
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Peers of the table that are left out, with the reason."""
    burn_s: float = 0.0
    """CPU seconds the burning consumer takes a batch; 0: 1.5 times the contestant's own plain batch time."""

    def contestant(self, name: str) -> Contestant:
        return next(c for c in self.contestants if c.name == name)


def _limit(name: str, target: str, threads: int) -> Contestant:
    return Contestant(name, f"limits:{target}", threads, (threads,))


def _ours(target: str) -> Contestant:
    return Contestant(OURS, f"ours:{target}", 0, (0,))


NO_DALI = "its wheels are the CUDA builds (425 MB and more)"
NO_FFCV = "no wheel; its source does not build with pip"
NO_ENERGON = "needs Megatron's own shard index; behind WebDataset in every published row"
ABSENT = {"DALI": NO_DALI, "FFCV": NO_FFCV}

WORKLOADS: Sequence[Workload] = (
    Workload(
        "W1",
        "[64,3,224,224] uint8",
        (
            _limit("limit", "w1", 2),
            _ours("w1"),
            Contestant("torch", "peers_torch:w1"),
            Contestant("StatefulDataLoader", "peers_torch:w1_stateful"),
            Contestant("torchdata.nodes", "peers_torch:w1_nodes"),
            Contestant("WebDataset", "peers_webdataset:w1"),
            Contestant("SPDL", "peers_spdl:w1"),
            Contestant("HF datasets", "peers_hf:w1"),
            Contestant("Mosaic", "peers_mosaic:w1"),
            Contestant("LitData", "peers_litdata:w1"),
            Contestant("Grain", "peers_grain:w1"),
            Contestant("tf.data", "peers_tf:w1", 0),
        ),
        ABSENT | {"Energon": NO_ENERGON},
        burn_s=0.020,
    ),
    Workload(
        "W1-raw",
        "ragged bytes",
        (
            _limit("limit", "w1_raw", 2),
            _ours("w1_raw"),
            Contestant("HF datasets", "peers_hf:w1_raw", 0),
            Contestant("torch", "peers_torch:w1_raw", 0),
            Contestant("torchdata.nodes", "peers_torch:w1_raw_nodes"),
            Contestant("WebDataset", "peers_webdataset:w1_raw", 0),
            Contestant("LitData", "peers_litdata:w1_raw", 0),
            Contestant("SPDL", "peers_spdl:w1_raw"),
            Contestant("Mosaic", "peers_mosaic:w1_raw", 0),
        ),
        ABSENT,
    ),
    Workload(
        "W2",
        "[16,2049] int64",
        (
            _limit("limit", "w2", 2),
            _limit("limit, 1 thread", "w2", 1),
            _ours("w2"),
            Contestant("torch", "peers_torch:w2", 0),
            Contestant("torch per sample", "peers_torch:w2_per_sample", 0),
            Contestant("torchdata.nodes", "peers_torch:w2_nodes", 0),
            Contestant("LitData", "peers_litdata:w2", 0),
            Contestant("Mosaic", "peers_mosaic:w2", 0),
            Contestant("HF datasets", "peers_hf:w2", 0),
            Contestant("SPDL", "peers_spdl:w2"),
            Contestant("Grain", "peers_grain:w2", 0),
        ),
        {"FFCV": NO_FFCV},
    ),
    Workload(
        "W3",
        "[4096,20] float32, [4096] int64",
        (
            _limit("limit", "w3", 2),
            _ours("w3"),
            Contestant("Grain", "peers_grain:w3"),
            Contestant("SPDL", "peers_spdl:w3"),
            Contestant("HF datasets", "peers_hf:w3", 0),
            Contestant("torch", "peers_torch:w3", 2),
            Contestant("torch in memory", "peers_torch:w3_in_memory", 0),
        ),
    ),
    Workload(
        "W4",
        "[256,3072] uint8",
        (
            _limit("limit", "w4", 2),
            _limit("limit, 1 thread", "w4", 1),
            _limit("limit, strided", "w4_strided", 1),
            _ours("w4"),
            Contestant("torch", "peers_torch:w4", 0),
            Contestant("torchdata.nodes", "peers_torch:w4_nodes", 0),
            Contestant("WebDataset", "peers_webdataset:w4", 2),
            Contestant("HF datasets", "peers_hf:w4", 0),
            Contestant("SPDL", "peers_spdl:w4"),
            Contestant("LitData", "peers_litdata:w4", 0),
            Contestant("Mosaic", "peers_mosaic:w4", 0),
            Contestant("Grain", "peers_grain:w4", 2),
        ),
        ABSENT | {"Energon": NO_ENERGON},
    ),
)


@dataclass(frozen=True)
class Verdict:
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
        gap = self.measured / self.wanted - 1 if self.at_most else 1 - self.measured / self.wanted
        return f"short by {100 * gap:.1f} %"


class _Rows:
    """Looks up medians; None wherever a contestant has no figures."""

    def __init__(self, workload: Workload, medians: Sequence[Run]) -> None:
        self.workload = workload
        self._rows = {(r.contestant, r.consumer): r for r in medians if r.workload == workload.name and not r.reason}

    def value(self, name: str, figure: str = "samples_per_s", consumer: str = "plain") -> float | None:
        row = self._rows.get((name, consumer))
        return None if row is None else getattr(row, figure)

    def best_peer(self, consumer: str = "plain") -> float | None:
        rates = [
            self.value(c.name, consumer=consumer) for c in self.workload.contestants if c.is_peer
        ]
        return max((rate for rate in rates if rate is not None), default=None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


MEMORY_LIMIT_MB = 512.0
"""What `ours` is given; the bar allows 150 MB more over the bare `import torch` process."""


def verdicts(workload: Workload, medians: Sequence[Run]) -> list[Verdict]:
    """Hold the medians of one run to the workload's bars."""
    rows = _Rows(workload, medians)
    ours, limit = rows.value(OURS), rows.value(LIMIT)

    def against(bar: str, other: float | None, wanted: float) -> Verdict:
        return Verdict(workload.name, bar, _ratio(ours, other), wanted)

    stated = {
        "W1": lambda: [
            against("of the decode + crop + resize limit", limit, 0.95),
            against("x the best peer", rows.best_peer(), 1.1),
            Verdict(
                "W1",
                "x the best peer, consumer burning 20 ms",
                _ratio(rows.value(OURS, consumer="burn"), rows.best_peer("burn")),
                1.0,
            ),
            Verdict(
                "W1",
                "x torch's memory",
                _ratio(rows.value(OURS, "held_mb"), rows.value("torch", "held_mb")),
                0.5,
                at_most=True,
            ),
        ],
        "W1-raw": lambda: [
            Verdict("W1-raw", "samples/s", ours, 60_000),
            against("of the memcpy limit", limit, 0.6),
            against("x WebDataset", rows.value("WebDataset"), 14),
        ],
        "W2": lambda: [
            Verdict("W2", "samples/s", ours, 600_000),
            against("x torch, hand-written and mapped", rows.value("torch"), 1.5),
            against("x LitData", rows.value("LitData"), 10),
            against("x Mosaic", rows.value("Mosaic"), 100),
        ],
        "W3": lambda: [
            against("of the row-group limit", limit, 0.95),
            Verdict("W3", "row groups mixed in a batch", rows.value(OURS, "row_groups_per_batch"), 8),
        ],
        "W4": lambda: [
            Verdict("W4", "samples/s", ours, 900_000),
            against("x WebDataset", rows.value("WebDataset"), 50),
        ],
    }[workload.name]()
    return stated + [
        Verdict(workload.name, "s to the first batch", rows.value(OURS, "first_batch_s"), 0.050, at_most=True),
        Verdict(workload.name, "stall share", rows.value(OURS, "stall_share", "burn"), 0.01, at_most=True),
        Verdict(
            workload.name,
            "MB over bare torch",
            rows.value(OURS, "held_mb"),
            MEMORY_LIMIT_MB + 150,
            at_most=True,
        ),
    ]
