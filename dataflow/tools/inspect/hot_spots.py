"""Hot spots: the shard, folder or host that is read most at one time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class HotSpot:
    """The reads that one shard (folder, host) has at the worst moment."""

    label: int
    """The label of the shard, folder or host."""
    most: int
    """Reads of it in the worst run."""
    share: float
    """Reads of it in a run on average. `most` far above it: one server works, others wait."""
    ahead: int
    """The number of reads in a run."""

    @property
    def ratio(self) -> float:
        """`most` over the share, or over 1 where that is less. 1: nobody could do better."""
        return self.most / max(1.0, self.share)


def hot_spot(labels: ArrayLike, ahead: int) -> HotSpot:
    """The label that is most above its share in any `ahead` consecutive reads.

    Args:
        labels: [reads] integers >= 0: the shard, folder or host of each read, in order of need, such as
            `shard[order.table.read_block]` for the reads of all nodes together.
        ahead: reads in flight or read ahead, such as a window's blocks; all of them if there are fewer.

    O(reads log reads). Raises `ValueError` without reads, or for ahead < 1.
    """
    label = np.asarray(labels).astype(np.int64)
    if not len(label) or ahead < 1:
        raise ValueError(f"there must be reads, and ahead >= 1, got {len(label)} and {ahead}")
    num_reads, run = len(label), min(len(label), ahead)
    by_label = np.argsort(label, kind="stable")
    label = label[by_label]
    # Reads of all labels on one axis, label after label, too far apart for runs of two labels to touch: how
    # many reads a run has that begins at a read is then one binary search, for all reads at once.
    at = label * (num_reads + run) + by_label
    most = np.searchsorted(at, at + run) - np.arange(num_reads)
    share = np.bincount(label)[label] * (run / num_reads)
    worst = int(np.argmax(most - share))
    return HotSpot(int(label[worst]), int(most[worst]), float(share[worst]), run)
