"""Packed and padded tensors from ragged values: what length-aware batches deliver.

A plan (`sharding.unit_plan`) says which pieces of which samples form each row; here their values become
tensors, without a loop over rows or samples. Values arrive as `Ragged` rows in the order of the pieces, so
a packed row is a run of them, followed by padding: segment ids and positions are counted out by repeating
numbers, and the values are laid in through one mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.ragged import Ragged
from sharding.batching import Batching, Packed
from sharding.unit_plan import BatchPieces

Allocate = Callable[[int], NDArray[np.uint8]]
"""Bytes -> memory that is aligned to 16 bytes, of any content."""


def _new(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


class PackedRows(NamedTuple):
    """A packed column. A named tuple, so that helpers that move batches to a device walk into it."""

    tokens: Tensor
    """[rows, length], the column's dtype; `pad` behind the last segment of a row."""
    segment_ids: Tensor
    """int32 [rows, length]: 1 for the first segment of a row, 2 for the second ...; 0 for padding."""
    positions: Tensor
    """int32 [rows, length]: place in the segment, from 0; 0 for padding."""
    cu_seqlens: Tensor
    """int32 [segments + 1]: where segments begin in `tokens.reshape(-1)`, for attention kernels that take
    sequences of varying length; the padding of a row counts as one more segment, so the last entry is
    rows x length."""
    max_seqlen: int
    """The longest segment, padding included."""


def cut(values: Ragged, begin: NDArray[np.int64], length: NDArray[np.int64]) -> Ragged:
    """Of each row, `length[i]` elements from `begin[i]` on; a row of just that length is the piece itself.

    Raises `ValueError` where a row is shorter than the plan says: lengths and data disagree.
    """
    have = np.diff(values.offsets.numpy())
    if len(have) == len(length):
        begin = np.where(have == length, 0, begin)
    if len(have) != len(length) or (begin + length > have).any():
        wrong = int(np.argmax(begin + length > have)) if len(have) == len(length) else len(have)
        raise ValueError(
            f"the values of piece {wrong} are shorter than the lengths that were planned with; "
            "lengths= must tell the elements of the column that is packed"
        )
    if not begin.any() and (length == have).all():
        return values
    offsets = np.concatenate(([0], np.cumsum(length)))
    start = values.offsets.numpy()[:-1] + begin - offsets[:-1]
    source = np.repeat(start, length)
    source += np.arange(len(source))
    return Ragged(torch.from_numpy(values.values.numpy()[source]), torch.from_numpy(offsets))


def packed(
    values: Ragged,
    pieces_of_row: NDArray[np.int64],
    length: int,
    pad: float = 0,
    allocate: Allocate = _new,
) -> PackedRows:
    """Lay pieces into rows.

    Args:
        values: the pieces, row after row, as `cut` gives them.
        pieces_of_row: int64 [rows], how many belong to each row.
        length: elements of a row.
        pad: what fills rows up.
        allocate: gives the memory of `tokens`, `segment_ids` and `positions` together.
    """
    sizes, rows = np.diff(values.offsets.numpy()), len(pieces_of_row)
    after = np.cumsum(pieces_of_row)
    fill = np.diff(values.offsets.numpy()[np.concatenate(([0], after))])
    if rows and int(fill.max()) > length:
        raise ValueError(f"a row of {int(fill.max())} elements exceeds length={length}")
    # What is left of a row is one more segment, so that repeating numbers fills all rows without a mask.
    ordinal = np.arange(len(sizes)) - np.repeat(after - pieces_of_row, pieces_of_row) + 1
    sizes, ordinal = np.insert(sizes, after, length - fill), np.insert(ordinal, after, 0)
    sizes, ordinal = sizes[sizes > 0], ordinal[sizes > 0].astype(np.int32)
    bounds = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    # numpy: torch would wake its thread pool for each of these, in every one of our threads.
    given, total = values.values.numpy(), rows * length
    memory = allocate(total * (given.itemsize + 8))
    numbers, tokens = memory[: 8 * total].view(np.int32), memory[8 * total :].view(given.dtype)
    segment_ids, positions = numbers[:total], numbers[total:]
    segment_ids[:] = np.repeat(ordinal, sizes)
    inside = segment_ids > 0
    positions[:] = np.arange(total, dtype=np.int32)
    positions -= np.repeat(bounds[:-1], sizes)
    positions *= inside
    tokens[:] = pad
    tokens[inside] = given
    return PackedRows(
        tokens=torch.from_numpy(tokens.reshape(rows, length)),
        segment_ids=torch.from_numpy(segment_ids.reshape(rows, length)),
        positions=torch.from_numpy(positions.reshape(rows, length)),
        cu_seqlens=torch.from_numpy(bounds),
        max_seqlen=int(sizes.max()) if rows else 0,
    )


class PaddedRows(NamedTuple):
    """A padded column."""

    tokens: Tensor
    """[n, longest rounded up to `multiple`], the column's dtype."""
    lengths: Tensor
    """int64 [n]: elements of each row that are not padding."""


def padded(values: Ragged, multiple: int = 1, pad: float = 0, allocate: Allocate = _new) -> PaddedRows:
    """Rows side by side, filled up to the longest, rounded up to `multiple`."""
    lengths, given = np.diff(values.offsets.numpy()), values.values.numpy()
    width = _rounded(int(lengths.max(initial=0)), multiple)
    tokens = allocate(len(lengths) * width * given.itemsize).view(given.dtype).reshape(len(lengths), width)
    tokens[:] = pad
    tokens[np.arange(width) < lengths[:, None]] = given
    return PaddedRows(torch.from_numpy(tokens), torch.from_numpy(lengths))


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def batch_bytes(batching: Batching, found: BatchPieces, itemsize: int) -> int:
    """What `batch_columns` allocates for one batch alone."""
    if isinstance(batching, Packed):
        return len(found.pieces_of_row) * batching.length * (itemsize + 8)
    longest = int(found.pieces.length.max(initial=0))
    return len(found.pieces) * _rounded(longest, batching.multiple) * itemsize


def batch_columns(
    batching: Batching, found: BatchPieces, columns: Mapping[str, Any], allocate: Allocate = _new
) -> dict[str, Any]:
    """Give one batch its form: the length column packed or padded, the others one entry a piece.

    Args:
        batching: what the plan was made with.
        found: the pieces of the batch.
        columns: gathered values, one entry (row of a tensor, of a `Ragged`, item of a list) a piece: whole
            samples, or, of a `Ragged`, just the piece.
        allocate: gives the memory of the new column.

    Returns:
        `columns` with the batching's column replaced by `PackedRows` or `PaddedRows`.
    """
    values = columns[batching.column]
    if isinstance(values, Tensor) and values.dim() == 2:  # samples of one length
        offsets = torch.from_numpy(np.arange(len(values) + 1) * values.shape[1])
        values = Ragged(values.reshape(-1), offsets)
    if not isinstance(values, Ragged):
        raise ValueError(
            f"column {batching.column!r} must be of variable length to be batched by length, "
            f"got {type(values).__name__}"
        )
    values = cut(values, found.pieces.begin, found.pieces.length)
    if isinstance(batching, Packed):
        made: Any = packed(values, found.pieces_of_row, batching.length, batching.pad, allocate)
    else:
        made = padded(values, batching.multiple, batching.pad, allocate)
    return {**columns, batching.column: made}
