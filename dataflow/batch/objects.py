"""Columns of Python objects, which a function makes of the bytes of each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.batch.columns import ChunkColumns, ChunkRows
from dataflow.batch.output import BuiltColumn, Output, split_list


@dataclass(frozen=True, kw_only=True)
class ObjectOutput(Output):
    """A list of objects a batch; a stacked tensor where all are arrays of one shape."""

    kind: ClassVar[str] = "objects"
    is_decoded: ClassVar[bool] = True

    convert: Callable[[bytes], Any]
    """The bytes of one value -> a Python object."""

    def description(self) -> str:
        """Kind, dtype and function."""
        return f"{super().description()} {getattr(self.convert, '__name__', '')}".rstrip()

    def batch_bytes(self, rows: ChunkRows) -> int:
        """0: objects live outside the arena."""
        return 0

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        """Objects made one by one, when their batch is asked for."""
        stored, convert = columns.stored_values(self.name), self.convert

        def values(sizes: Sequence[int]) -> Iterator[Any]:
            for batch in split_list(stored, sizes):
                yield collate_objects(
                    [
                        columns.decoded(self.name, value, lambda data, row: convert(data.tobytes()))
                        for value in batch
                    ]
                )

        columns.note_missing(self.name)
        return BuiltColumn(split=values)


def collate_objects(values: list[Any]) -> Any:
    """Arrays of one shape are stacked; everything else stays a list (arrays as tensors, if all can be)."""
    first = values[0] if values else None
    if isinstance(first, np.ndarray):
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        tensors = [tensor for array in arrays if (tensor := _tensor_of(array)) is not None]
        if len(tensors) < len(values):
            return values
        return tensors if any(t.shape != tensors[0].shape for t in tensors) else torch.stack(tensors)
    if isinstance(first, Tensor) and all(
        isinstance(v, Tensor) and v.shape == first.shape and v.dtype == first.dtype for v in values
    ):
        return torch.stack(values)
    return values


def _tensor_of(array: NDArray[Any]) -> Tensor | None:
    """The array as a tensor in native byte order; None where torch has no such type (text, dates)."""
    native = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])  # keeps 0-d arrays 0-d
    try:
        return torch.from_numpy(native)
    except TypeError:
        return None
