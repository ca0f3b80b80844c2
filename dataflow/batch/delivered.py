"""Delivered batches with their place in the stream, their sums, and jobs of those that are copies alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefetch.core.copy_table import COLUMN_ALIGN
from sharding.errors import SampleError
from sharding.spans import Ints

UNTRAINED = "no token of it is to be learned"
"""A remark about a sample; all others are about images."""


class SampleWarning(NamedTuple):
    """An oddity of values of a batch that are delivered all the same."""

    kind: str
    num_values: int
    first: str
    """The position of the first one: shard, key and column; "" where that was said before."""


class Delivered(NamedTuple):
    """One batch with its place in the stream."""

    epoch: int
    number: int
    """Batch of the epoch's plan, from 0 at the plan's start."""
    batch: Any
    num_samples: int
    skipped: tuple[SampleError, ...] = ()
    """Samples left out of it; where these are all, `num_samples` is 0 and nobody has seen the batch."""
    in_place: bool = False
    """An earlier batch, in place of one of which nothing was left."""
    remarks: tuple[SampleWarning, ...] = ()


BatchSum = tuple[int, int, int]
"""Rows of batches (samples, or pieces of them), and two sums modulo 2**64 over them."""
NO_SUM: BatchSum = (0, 0, 0)
_NONE_NOTED = np.zeros((3, 0), np.uint64)


class BatchSums:
    """The sums of a session's batches, from when their rows are located until an account takes them.

    They are noted for many batches at once, in any order and also twice, and taken for many in their order:
    next to nothing is done for one batch. Thread-safe. `epoch`, `start`: of the session's first batch.
    """

    def __init__(self, epoch: int = 0, start: int = 0) -> None:
        self._begin, self._lock = (epoch, start), threading.Lock()
        self._noted = {epoch: (start, _NONE_NOTED)}
        """The first batch of each epoch that was not taken, and rows and sums [3, batches] from it on."""

    def note(self, epoch: int, first: int, sums: NDArray[np.uint64]) -> None:
        """Keep the sums [3, batches] of an epoch's batches from `first` on; not of those that were taken."""
        with self._lock:
            begin, noted = self._noted.get(epoch, (0, _NONE_NOTED))
            past, end = max(0, begin - first), max(0, first + sums.shape[1] - begin)
            lacking = max(0, end - noted.shape[1])
            noted = np.concatenate([noted, np.zeros((3, lacking), np.uint64)], 1) if lacking else noted
            noted[:, first + past - begin : end] = sums[:, past:]
            self._noted[epoch] = begin, noted

    def take(self, epoch: int, first: int, end: int) -> tuple[BatchSum, BatchSum]:
        """Take the sum over batches [first, end - 1), and that of the last, by number in the session."""
        if epoch == self._begin[0]:
            first, end = first + self._begin[1], end + self._begin[1]
        with self._lock:
            begin, noted = self._noted.get(epoch, (0, _NONE_NOTED))
            self._noted = {later: of for later, of in self._noted.items() if later > epoch}
            self._noted[epoch] = max(begin, end), noted[:, max(0, end - begin) :]
        taken = noted[:, max(0, first - begin) : max(0, end - begin)]
        return tuple(taken[:, :-1].sum(axis=1).tolist()), tuple(taken[:, -1:].sum(axis=1).tolist())

    def take_next(self) -> NDArray[np.uint64]:
        """Take the sum [3, 1] of the first batch that was noted, where numbers leave gaps."""
        with self._lock:
            epoch, (begin, noted) = min(one for one in self._noted.items() if one[1][1][0].any())
            at = int((noted[0] > 0).argmax()) + 1
            self._noted[epoch] = begin + at, noted[:, at:]
            return noted[:, at - 1 : at]


class LazyBatches:
    """Batches that are made when they are asked for, once, by whoever takes them."""

    def __init__(self, num_batches: int, batches: Iterator[Delivered]) -> None:
        self._num_batches, self._batches = num_batches, batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Delivered]:
        return self._batches


def job_ends(sizes: Ints, batches_per_job: int) -> Ints:
    """Batches [batches] of so many rows in jobs of so many batches: [jobs] the row after the last of each."""
    ends = np.cumsum(sizes)
    return np.append(ends[batches_per_job - 1 : -1 : batches_per_job], ends[-1:])


def largest_job(ends: Ints, row_sizes: Sequence[int | Ints]) -> int:
    """Bytes of a slot that holds any of the jobs, given the bytes of each column's rows."""
    first = np.append(0, ends[:-1])
    totals = np.full(len(ends), COLUMN_ALIGN * len(row_sizes))
    for sizes in row_sizes:
        if isinstance(sizes, int):
            totals += sizes * (ends - first)
        else:
            before = np.append(0, np.cumsum(sizes))
            totals += before[ends] - before[first]
    return int(totals.max(initial=0))
