"""A column of a chunk, split into one value a batch: views, no copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.outputs import Output
from dataflow.ragged import Ragged


@dataclass
class Built:
    """One output column of a chunk."""

    split: Callable[[Sequence[int]], Iterable[Any]]
    """Batch sizes -> one value a batch; of Python objects each is made when it is asked for."""
    parts: list[Callable[[], None]] = field(default_factory=list)
    """What is left to do first; parts may run in parallel."""
    ahead: Callable[[int], int] | None = None
    """Size of the next batch -> bytes of slots that its value will take: to be asked before each value."""

    def whole(self, size: int) -> Any:
        """The value of one batch of all rows."""
        for part in self.parts:
            part()
        if self.ahead is not None:
            self.ahead(size)
        return next(iter(self.split([size])))


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
) -> Iterator[Any]:
    """One ragged pair (or padded tensor) a batch; offsets count from the batch's own first value."""
    counts = lengths // values.element_size()
    ends = np.concatenate(([0], np.cumsum(counts)))
    row = 0
    for size in sizes:
        own = ends[row : row + size + 1]
        pair = Ragged(values[int(own[0]) : int(own[-1])], torch.from_numpy(own - own[0]))
        yield pair.padded(output.pad.value, output.pad.length) if output.pad else pair
        row += size
