"""Estimate the bytes that it takes to bring a block's columns to the types of the dataset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from sharding.blocks import ColumnSpec
from sharding.catalog.widening import is_alike

_NULL_BYTES = 4
"""The bytes that indexing counts at least for each null of a list of nulls, which is stored in no bytes."""


class Growth(NamedTuple):
    """The bytes that blocks of shards with one schema grow by."""

    row_bytes: int
    """Bytes for each sample."""
    times: float
    """Times the bytes of the decoded block."""

    def __bool__(self) -> bool:
        return bool(self.row_bytes or self.times)

    @classmethod
    def of(
        cls, own: Mapping[str, ColumnSpec], merged: Mapping[str, ColumnSpec], columns: Iterable[str]
    ) -> Growth:
        """Estimate the growth of blocks with columns of their own types, brought to the merged ones."""
        row_bytes, times = 0, 0.0
        for name in columns:
            before, after = own.get(name), merged.get(name)
            if after is None or (before is not None and is_alike(before, after)):
                continue
            from sharding.formats.arrow.schema import NUMBER_BYTES, SPAN_BYTES, fixed_bytes

            row_bytes += fixed_bytes(after) if after.kind == "fixed" else SPAN_BYTES
            if before is not None and before.kind == "list" and after.kind == "json":
                times += NUMBER_BYTES / np.dtype(before.dtype).itemsize
            elif before is not None and (before.kind, after.kind) == ("bytes", "bytes_list"):
                times += 1
            elif before is not None and after.kind == "list":
                if before.kind == "fixed":
                    row_bytes += math.prod(before.shape) * np.dtype(after.dtype).itemsize
                else:
                    stored = _NULL_BYTES if before.kind == "null_list" else np.dtype(before.dtype).itemsize
                    times += np.dtype(after.dtype).itemsize / stored
        return cls(row_bytes, times)
