"""What is measured: the contestants of each workload, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

OURS, LIMIT, ONE_THREAD = "dataflow", "limit", "limit, 1 thread"


@dataclass(frozen=True)
class Contestant:
    """One way of loading a workload."""

    name: str
    target: str
    """`module:function` below `benchmarks.peers`."""
    workers: int = 2
    """Used by `--quick` and with `--no-sweep`; otherwise the best of `choices` is taken."""
    choices: tuple[int, ...] = (0, 1, 2, 3)
    omp_threads: int | None = 1
    """`OMP_NUM_THREADS`; None leaves it unset. With more than one, torch's copies in the consumer's process
    are faster on an idle machine and far slower beside a busy process, so the search tries both."""

    @property
    def settings(self) -> list[Contestant]:
        """What the search for the best setting tries."""
        tried = [replace(self, workers=n) for n in self.choices]
        if self.is_peer and 0 in self.choices:
            tried.append(replace(self, workers=0, omp_threads=None))
        return tried

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.omp_threads is None else {"OMP_NUM_THREADS": str(self.omp_threads)}

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


def _limit(name: str, target: str, threads: int) -> Contestant:
    return Contestant(name, f"limits:{target}", threads, (threads,))


def _ours(target: str) -> Contestant:
    # Ours is not tuned: no search, and the environment as a user has it.
    return Contestant(OURS, f"ours:{target}", 0, (0,), omp_threads=None)


NO_ENERGON = "no adapter written"
NO_TF = "no adapter written"
NO_RAY = "no adapter written"

WORKLOADS: Sequence[Workload] = (
    Workload(
        "W1",
        "[64,3,224,224] uint8",
        (
            _limit("limit", "w1", 2),
            _ours("w1"),
            Contestant("torch", "torch:w1"),
            Contestant("StatefulDataLoader", "torch:w1_stateful"),
            Contestant("torchdata.nodes", "torch:w1_nodes"),
            Contestant("WebDataset", "webdataset:w1"),
            Contestant("SPDL", "spdl:w1"),
            Contestant("HF datasets", "hf:w1"),
            Contestant("Mosaic", "mosaic:w1"),
            Contestant("LitData", "litdata:w1"),
            Contestant("Grain", "grain:w1"),
            Contestant("FFCV", "ffcv:w1", 2, (1, 2, 3)),
            Contestant("DALI", "dali:w1", 2, (1, 2, 3)),
            Contestant("tf.data", "tf:w1", 0),
        ),
        {"Energon": NO_ENERGON},
        burn_s=0.020,
    ),
    Workload(
        "W1-raw",
        "ragged bytes",
        (
            _limit("limit", "w1_raw", 2),
            _ours("w1_raw"),
            Contestant("HF datasets", "hf:w1_raw", 0),
            Contestant("torch", "torch:w1_raw", 0),
            Contestant("torchdata.nodes", "torch:w1_raw_nodes"),
            Contestant("WebDataset", "webdataset:w1_raw", 0),
            Contestant("LitData", "litdata:w1_raw", 0),
            Contestant("SPDL", "spdl:w1_raw"),
            Contestant("Mosaic", "mosaic:w1_raw", 0),
            Contestant("FFCV", "ffcv:w1_raw", 2, (1, 2, 3)),
            Contestant("DALI", "dali:w1_raw", 2, (1, 2, 3)),
        ),
        {"tf.data": NO_TF},
    ),
    Workload(
        "W2",
        "[16,2049] int64",
        (
            _limit("limit", "w2", 2),
            _limit(ONE_THREAD, "w2", 1),
            _ours("w2"),
            Contestant("torch", "torch:w2", 0),
            Contestant("torch per sample", "torch:w2_per_sample", 0),
            Contestant("torchdata.nodes", "torch:w2_nodes", 0),
            Contestant("LitData", "litdata:w2", 0),
            Contestant("Mosaic", "mosaic:w2", 0),
            Contestant("HF datasets", "hf:w2", 0),
            Contestant("SPDL", "spdl:w2"),
            Contestant("Grain", "grain:w2", 0),
            Contestant("FFCV", "ffcv:w2", 2, (1, 2, 3)),
        ),
        {"tf.data": NO_TF, "Ray": NO_RAY},
    ),
    Workload(
        "W3",
        "[4096,20] float32, [4096] int64",
        (
            _limit("limit", "w3", 2),
            _ours("w3"),
            Contestant("Grain", "grain:w3"),
            Contestant("SPDL", "spdl:w3"),
            Contestant("HF datasets", "hf:w3", 0),
            Contestant("torch", "torch:w3", 2),
            Contestant("torch in memory", "torch:w3_in_memory", 0),
        ),
        {"tf.data": NO_TF, "Ray": NO_RAY},
    ),
    Workload(
        "W4",
        "[256,3072] uint8",
        (
            _limit("limit", "w4", 2),
            _limit(ONE_THREAD, "w4", 1),
            _limit("limit, strided", "w4_strided", 1),
            _ours("w4"),
            Contestant("torch", "torch:w4", 0),
            Contestant("torchdata.nodes", "torch:w4_nodes", 0),
            Contestant("WebDataset", "webdataset:w4", 2),
            Contestant("HF datasets", "hf:w4", 0),
            Contestant("SPDL", "spdl:w4"),
            Contestant("LitData", "litdata:w4", 0),
            Contestant("Mosaic", "mosaic:w4", 0),
            Contestant("Grain", "grain:w4", 2),
            Contestant("FFCV", "ffcv:w4", 2, (1, 2, 3)),
            Contestant("DALI", "dali:w4", 2, (1, 2, 3)),
        ),
        {"Energon": NO_ENERGON},
    ),
)
