"""Packed and padded tensors from ragged values: what length-aware batches deliver.

A plan (`sharding.unit_plan`) says which pieces of which samples form each row; here their values become
tensors, without a loop over rows or samples. Values arrive as `Ragged` rows in the order of the pieces, so
a packed row is a run of them, followed by padding: segment ids and positions are counted out by repeating
numbers, and the values are laid in through one mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.ragged import Ragged
from sharding.batching import Batching, Packed
from sharding.unit_plan import BatchPieces


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
    """Of each row, `length[i]` elements from `begin[i]` on; the rows themselves where that is all of them.

    Raises `ValueError` where a row is shorter than the plan says: lengths and data disagree.
    """
    have = np.diff(values.offsets.numpy())
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


def packed(values: Ragged, pieces_of_row: NDArray[np.int64], length: int, pad: float = 0) -> PackedRows:
    """Lay pieces into rows.

    Args:
        values: the pieces, row after row, as `cut` gives them.
        pieces_of_row: int64 [rows], how many belong to each row.
        length: elements of a row.
        pad: what fills rows up.
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
    segment_ids = np.repeat(ordinal, sizes)
    inside = segment_ids > 0
    positions = np.arange(rows * length, dtype=np.int32)
    positions -= np.repeat(bounds[:-1], sizes)
    positions *= inside
    # numpy: torch would wake its thread pool for each of these, in every one of our threads.
    given = values.values.numpy()
    tokens = np.full(rows * length, pad, given.dtype)
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


def padded(values: Ragged, multiple: int = 1, pad: float = 0) -> PaddedRows:
    """Rows side by side, filled up to the longest, rounded up to `multiple`."""
    lengths = values.lengths
    longest = int(lengths.max()) if len(lengths) else 0
    return PaddedRows(values.padded(pad, -(-longest // multiple) * multiple), lengths)


def batch_columns(
    batching: Batching, found: BatchPieces, batch: int, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Give one batch its form: the length column packed or padded, the others one entry a piece.

    Args:
        batching: what the plan was made with.
        found: the pieces of some batches.
        batch: which of them, from 0.
        columns: gathered values, one entry (row of a tensor, of a `Ragged`, item of a list) a piece.

    Returns:
        `columns` with the batching's column replaced by `PackedRows` or `PaddedRows`.
    """
    first, row = int(found.sizes[:batch].sum()), int(found.rows[:batch].sum())
    own = found.pieces.take(slice(first, first + int(found.sizes[batch])))
    values = columns[batching.column]
    if not isinstance(values, Ragged):
        raise ValueError(
            f"column {batching.column!r} must be of variable length to be batched by length, "
            f"got {type(values).__name__}"
        )
    values = cut(values, own.begin, own.length)
    if isinstance(batching, Packed):
        of_row = found.pieces_of_row[row : row + int(found.rows[batch])]
        made: Any = packed(values, of_row, batching.length, batching.pad)
    else:
        made = padded(values, batching.multiple, batching.pad)
    return {**columns, batching.column: made}
