"""Time of a training step: compute, gradients on the links, data on the same links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dataflow.tools.estimate.cluster import Cluster, Load
from dataflow.tools.estimate.collectives import all_reduces

_ITERATIONS = 40
_GOOD_SHARE = 0.95
_FEW_UPDATES = 1000
"""Trainings with very large batches that reached their quality took several times as many: BERT with LAMB
8,599 (You et al. 2020), ResNet-50 with batches of 32,768 some 3,500."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of every rank in a window of `accumulate` microbatches.

    Attributes:
        gradient_bytes: of all gradients together, as they are sent.
        microbatch_s: seconds of forward and backward of one microbatch.
        microbatch: samples of one.
        accumulate: microbatches a window.
        sample_bytes: read from the store for one sample.
        backward_share: of `microbatch_s`; the last backward hides communication.
        bucket_bytes: gradients travel in pieces of this size, as they become ready (DDP: 25 MiB).
        gated: no data is read while gradients travel (the I/O gate).
    """

    gradient_bytes: float
    microbatch_s: float
    microbatch: int = 1
    accumulate: int = 1
    sample_bytes: float = 0.0
    backward_share: float = 2 / 3
    bucket_bytes: float = 25 << 20
    gated: bool = False

    def __post_init__(self) -> None:
        if self.gradient_bytes < 0 or self.microbatch_s < 0 or self.sample_bytes < 0:
            raise ValueError("bytes and seconds of a step must be >= 0")
        if self.microbatch < 1 or self.accumulate < 1 or not self.bucket_bytes >= 1:
            raise ValueError("microbatch, accumulate and bucket_bytes of a step must be >= 1")
        if not 0 <= self.backward_share <= 1:
            raise ValueError(f"backward_share must be in [0, 1], got {self.backward_share}")

    @property
    def buckets(self) -> int:
        """Pieces that gradients travel in."""
        return max(1, math.ceil(self.gradient_bytes / self.bucket_bytes))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A window on a cluster. Seconds, bytes a second, samples of all ranks."""

    algorithm: str
    accumulate: int
    window_s: float
    compute_s: float
    """Forward and backward of all microbatches."""
    sync_s: float
    """Seconds of gradients on the links."""
    exposed_s: float
    """Seconds of `sync_s` that no backward hides."""
    data_wait_s: float
    """Seconds that the window is longer because data does not come faster."""
    data_bytes_per_s: float
    """Bytes a second that each node reads, on average."""
    samples_per_s: float
    batch: int
    """Samples of a window, of all ranks."""


def predict(cluster: Cluster, work: StepWork, algorithm: str | None = None) -> Prediction:
    """One algorithm of `all_reduces`, or the fastest.

    Raises `ValueError` for an algorithm that the cluster does not have.
    """
    return _fastest(cluster, work, _loads(cluster, work, algorithm))


def _loads(cluster: Cluster, work: StepWork, algorithm: str | None) -> Mapping[str, Sequence[Load]]:
    """Return what one bucket's all-reduces put on the links, by name."""
    rounds = all_reduces(cluster, work.gradient_bytes / work.buckets)
    if algorithm is not None and algorithm not in rounds:
        raise ValueError(f"no all-reduce {algorithm!r} on this cluster: {', '.join(rounds)}")
    chosen = rounds if algorithm is None else [algorithm]
    return {name: cluster.loads(rounds[name]) for name in chosen}


def _fastest(cluster: Cluster, work: StepWork, loads: Mapping[str, Sequence[Load]]) -> Prediction:
    predictions = (_predict(cluster, work, name, each) for name, each in loads.items())
    return min(predictions, key=lambda prediction: prediction.window_s)


def _predict(cluster: Cluster, work: StepWork, algorithm: str, loads: Sequence[Load]) -> Prediction:
    compute = work.accumulate * work.microbatch_s
    per_node = cluster.num_ranks / cluster.num_nodes
    data = work.accumulate * work.microbatch * work.sample_bytes * per_node
    pieces = work.buckets
    card = _inward(cluster)
    window = compute
    # Data takes from gradients what it needs in a second, which depends on how long the window is: a fixed
    # point, approached from both sides at half speed since each makes the other shorter.
    for _ in range(_ITERATIONS):
        rate = 0.0 if work.gated else min(data / window if window else 0.0, card)
        piece = cluster.loaded_seconds(loads, data_bytes_per_s=rate)
        sync = pieces * piece
        exposed = exposed_seconds(pieces, piece, work.microbatch_s * work.backward_share)
        busy = compute + exposed
        reading = (sync if work.gated else 0.0) + data / card
        window += 0.5 * (max(busy, reading) - window)
    window = max(busy, reading)
    batch = work.accumulate * work.microbatch * cluster.num_ranks
    return Prediction(
        algorithm=algorithm,
        accumulate=work.accumulate,
        window_s=window,
        compute_s=compute,
        sync_s=sync,
        exposed_s=exposed,
        data_wait_s=max(0.0, reading - busy),
        data_bytes_per_s=data / window if window else 0.0,
        samples_per_s=batch / window if window else math.inf,
        batch=batch,
    )


def _inward(cluster: Cluster) -> float:
    """Bytes a second that a node can read while all others read as much."""
    if cluster.uplink is None:
        return cluster.network.bytes_per_s
    return min(cluster.network.bytes_per_s, cluster.uplink.bytes_per_s / cluster.largest_rack)


def exposed_seconds(pieces: int, piece_s: float, backward_s: float) -> float:
    """Return how long after the end of the backward the last piece is there; pieces become ready one by one.

    They come at equal intervals: either all wait behind the first one, or none waits.
    """
    return max(backward_s / pieces + pieces * piece_s, backward_s + piece_s) - backward_s


def best_accumulation(
    cluster: Cluster,
    work: StepWork,
    candidates: Iterable[int],
    *,
    max_batch: int | None = None,
) -> tuple[Prediction, Sequence[Prediction]]:
    """The fewest microbatches that give 95 % of the best samples a second, and all predictions.

    A larger batch than it needs to keep the links out of the way only makes updates fewer. Of batches of more
    than `max_batch` samples none is chosen, unless all are: then the smallest.
    """
    loads = _loads(cluster, work, None)
    predictions = [_fastest(cluster, replace(work, accumulate=k), loads) for k in sorted(set(candidates))]
    if not predictions:
        raise ValueError("no number of microbatches to choose from")
    small = [each for each in predictions if max_batch is None or each.batch <= max_batch]
    small = small or predictions[:1]
    most = max(each.samples_per_s for each in small)
    return next(each for each in small if each.samples_per_s >= _GOOD_SHARE * most), predictions


def batch_doubts(
    best: Prediction, predictions: Sequence[Prediction], *, samples: int = 0, max_batch: int | None = None
) -> list[str]:
    """Why the best batch may be of no use, one sentence each: a model of links knows nothing of training.

    Args:
        best: what `best_accumulation` chose out of `predictions`.
        predictions: all of them.
        samples: of the whole run; 0: not known.
        max_batch: what the user can train with; None: not known.
    """
    doubts = []
    if max_batch is not None and best.batch > max_batch:
        doubts.append(
            f"Unusable: the smallest batch that was tried has {best.batch:,} samples, more than --max-batch "
            f"{max_batch:,}. Fewer ranks or a smaller --microbatch make it smaller."
        )
    fastest = max(predictions, key=lambda each: each.samples_per_s)
    gain = fastest.samples_per_s / best.samples_per_s
    if max_batch is not None and fastest.batch > max_batch and gain > 1 / _GOOD_SHARE:
        doubts.append(
            f"With {fastest.accumulate} microbatches samples come {gain:.2f} times as fast, but their batch "
            f"of {fastest.batch:,} is more than --max-batch {max_batch:,}."
        )
    updates = math.ceil(samples / best.batch)
    if 0 < updates < _FEW_UPDATES:
        doubts.append(
            f"Unusable for most trainings: {samples:,} samples are {updates:,} updates with it. --max-batch "
            f"{max(1, samples // _FEW_UPDATES):,} asks for {_FEW_UPDATES:,}."
        )
    elif max_batch is None and best.accumulate > 1:
        doubts.append(
            f"Whether the model still trains well with a batch of {best.batch:,} is not in these figures: "
            "--max-batch says up to where it does."
        )
    return doubts
