"""A column of a chunk, split into one value a batch: views, no copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode import Output
from dataflow.ragged import Ragged


@dataclass
class Built:
    """One output column of a chunk."""

    split: Callable[[Sequence[int]], Sequence[Any]]
    """Batch sizes -> one value a batch."""
    parts: list[Callable[[], None]] = field(default_factory=list)
    """What is left to do first; parts may run in parallel."""


def split_rows(out: NDArray[Any]) -> Built:
    """One view a batch. numpy slices them: `Tensor.split` would give up the GIL in the middle."""

    def split(sizes: Sequence[int]) -> list[Tensor]:
        ends = list(itertools.accumulate(sizes))
        return [torch.from_numpy(out[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    return Built(split)


def split_list(values: list[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """The values of each batch."""
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size


def split_ragged(
    values: Tensor, lengths: NDArray[np.int64], sizes: Sequence[int], output: Output
) -> list[Any]:
    """One ragged pair (or padded tensor) a batch; offsets count from the batch's own first value."""
    counts = lengths // values.element_size()
    ends = np.concatenate(([0], np.cumsum(counts)))
    batches, row = [], 0
    for size in sizes:
        own = ends[row : row + size + 1]
        pair = Ragged(values[int(own[0]) : int(own[-1])], torch.from_numpy(own - own[0]))
        batches.append(pair.padded(output.pad.value, output.pad.length) if output.pad else pair)
        row += size
    return batches
