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
    """`module:function` below `benchmarks`."""
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
            Contestant("torch", "peers_torch:w1"),
            Contestant("StatefulDataLoader", "peers_torch:w1_stateful"),
            Contestant("torchdata.nodes", "peers_torch:w1_nodes"),
            Contestant("WebDataset", "peers_webdataset:w1"),
            Contestant("SPDL", "peers_spdl:w1"),
            Contestant("HF datasets", "peers_hf:w1"),
            Contestant("Mosaic", "peers_mosaic:w1"),
            Contestant("LitData", "peers_litdata:w1"),
            Contestant("Grain", "peers_grain:w1"),
            Contestant("FFCV", "peers_ffcv:w1", 2, (1, 2, 3)),
            Contestant("DALI", "peers_dali:w1", 2, (1, 2, 3)),
            Contestant("tf.data", "peers_tf:w1", 0),
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
            Contestant("HF datasets", "peers_hf:w1_raw", 0),
            Contestant("torch", "peers_torch:w1_raw", 0),
            Contestant("torchdata.nodes", "peers_torch:w1_raw_nodes"),
            Contestant("WebDataset", "peers_webdataset:w1_raw", 0),
            Contestant("LitData", "peers_litdata:w1_raw", 0),
            Contestant("SPDL", "peers_spdl:w1_raw"),
            Contestant("Mosaic", "peers_mosaic:w1_raw", 0),
            Contestant("FFCV", "peers_ffcv:w1_raw", 2, (1, 2, 3)),
            Contestant("DALI", "peers_dali:w1_raw", 2, (1, 2, 3)),
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
            Contestant("torch", "peers_torch:w2", 0),
            Contestant("torch per sample", "peers_torch:w2_per_sample", 0),
            Contestant("torchdata.nodes", "peers_torch:w2_nodes", 0),
            Contestant("LitData", "peers_litdata:w2", 0),
            Contestant("Mosaic", "peers_mosaic:w2", 0),
            Contestant("HF datasets", "peers_hf:w2", 0),
            Contestant("SPDL", "peers_spdl:w2"),
            Contestant("Grain", "peers_grain:w2", 0),
            Contestant("FFCV", "peers_ffcv:w2", 2, (1, 2, 3)),
        ),
        {"tf.data": NO_TF, "Ray": NO_RAY},
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
            Contestant("torch", "peers_torch:w4", 0),
            Contestant("torchdata.nodes", "peers_torch:w4_nodes", 0),
            Contestant("WebDataset", "peers_webdataset:w4", 2),
            Contestant("HF datasets", "peers_hf:w4", 0),
            Contestant("SPDL", "peers_spdl:w4"),
            Contestant("LitData", "peers_litdata:w4", 0),
            Contestant("Mosaic", "peers_mosaic:w4", 0),
            Contestant("Grain", "peers_grain:w4", 2),
            Contestant("FFCV", "peers_ffcv:w4", 2, (1, 2, 3)),
            Contestant("DALI", "peers_dali:w4", 2, (1, 2, 3)),
        ),
        {"Energon": NO_ENERGON},
    ),
)
