"""Columns of a batch whose rows hold different numbers of elements: one tensor of all, and the offsets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class LateArray:
    """An array [n, ...] of a sample that is computed where its batch lies; `write` is up to the class."""

    def __init__(self, shape: tuple[int, ...], dtype: str, held_bytes: int = 0) -> None:
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(dtype)
        self.late_bytes = max(0, math.prod(shape) * self.dtype.itemsize - held_bytes)
        """The bytes that it takes then, beyond the `held_bytes` of before."""

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        self.write(out := np.empty(self.shape, self.dtype))
        return out

    def write(self, out: NDArray[Any], /) -> None:
        """Compute it into `out`, of its shape and dtype."""
        raise NotImplementedError


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch indexes few of its unsigned types; the bits are the same."""


class Ragged(NamedTuple):
    """n rows of different lengths; row i is `values[offsets[i] : offsets[i + 1]]`.

    A named tuple, so it unpacks (`values, offsets = batch["doc"]`), and torch's `pin_memory` and most
    `to(device)` helpers walk into it. `rows()` gives the rows as views; nothing is copied.

    Examples:
        >>> with DataLoader(ShardedDataset("tokens/*.parquet"), batch_size=4) as loader:
        ...     tokens = next(iter(loader))["tokens"]  # columns of lists come as `Ragged`
        >>> [len(row) for row in tokens.rows()]
        [1, 2, 3, 4]
    """

    values: Tensor
    """The rows one after the other: [total], uint8 for bytes; of lists of images [total, channels, h, w]."""
    offsets: Tensor
    """int64 [n + 1], starting at 0; `offsets[-1] == len(values)`."""

    def row(self, i: int) -> Tensor:
        """Return row i as a view, counted from the end below 0; `IndexError` where there is none."""
        return self.values[int(self.offsets[:-1][i]) : int(self.offsets[1:][i])]

    def rows(self) -> Iterator[Tensor]:
        """Return all rows as views."""
        return iter(self.values.split(self.lengths.tolist()))

    @property
    def lengths(self) -> Tensor:
        """The length of each row, int64 [n]."""
        return torch.diff(self.offsets)

    @classmethod
    def of_rows(cls, rows: Sequence[Tensor]) -> Ragged:
        """Rows of one dtype, put one after the other; a copy. At least one."""
        ends = accumulate(map(len, rows), initial=0)
        return cls(torch.cat([*rows]), torch.tensor([*ends]))

    @classmethod
    def joined(cls, batches: Sequence[Ragged]) -> Ragged:
        """The rows of several, one after the other; a copy."""
        starts = accumulate((len(each.values) for each in batches), initial=0)
        ends = [each.offsets[1:] + start for each, start in zip(batches, starts, strict=False)]
        return cls(torch.cat([each.values for each in batches]), torch.cat([batches[0].offsets[:1], *ends]))

    def padded(self, value: float = 0, length: int | None = None) -> Tensor:
        """The rows as one tensor [n, length, ...], cut or filled up with `value`.

        `length` None: that of the longest row.
        """
        longest = int(self.lengths.max()) if len(self.offsets) > 1 else 0
        width = longest if length is None else length
        out = self.values.new_full((len(self.offsets) - 1, width, *self.values.shape[1:]), value)
        places = torch.arange(width, device=self.offsets.device)
        inside, indices = places < self.lengths[:, None], self.offsets[:-1, None] + places
        bits = _SIGNED.get(self.values.dtype, self.values.dtype)
        out.view(bits)[inside] = self.values.view(bits)[indices[inside]]
        return out
