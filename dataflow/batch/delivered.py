"""Delivered batches with their place in the stream, and jobs of those that are copies alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

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
