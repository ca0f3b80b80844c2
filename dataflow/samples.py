"""The samples of a batch: taken out of its columns one by one, left out, and put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode import Output
from dataflow.ragged import Ragged


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


def drop_rows(batch: Mapping[str, Any], keep: NDArray[np.int64]) -> dict[str, Any]:
    """The batch with only the rows `keep`."""
    index = torch.from_numpy(keep)
    kept: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Ragged):
            rows = [value.row(i) for i in keep.tolist()]
            lengths = value.lengths[index]
            offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
            kept[name] = Ragged(torch.cat(rows) if rows else value.values[:0], offsets)
        elif isinstance(value, Tensor):
            kept[name] = value[index]
        else:
            kept[name] = collate_objects([value[i] for i in keep.tolist()])
    return kept


def samples_of(batch: Mapping[str, Any], outputs: Sequence[Output], size: int) -> list[dict[str, Any]]:
    """The samples of a batch, one dict each: scalars as Python numbers, arrays as tensor views."""
    columns = []
    for output in outputs:
        value = batch[output.name]
        if isinstance(value, Ragged):
            columns.append([value.row(i) for i in range(size)])
        elif isinstance(value, Tensor) and value.dim() == 1:
            columns.append(value.tolist())
        else:
            columns.append(list(value))
    names = [output.name for output in outputs]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
