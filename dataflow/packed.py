"""Packed and padded tensors from ragged values: what length-aware batches deliver.

A plan (`sharding.unit_plan`) says which pieces of which samples form each row; here their values become
tensors, without a loop over rows or samples. Values arrive as `Ragged` rows in the order of the pieces, so
a packed row is a run of them: they are laid into the rows through one mask, and segment ids and positions
are counted out along the same mask.
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
    have = values.lengths.numpy()
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
    return Ragged(values.values[torch.from_numpy(source)], torch.from_numpy(offsets))


def packed(values: Ragged, pieces_of_row: NDArray[np.int64], length: int, pad: float = 0) -> PackedRows:
    """Lay pieces into rows.

    Args:
        values: the pieces, row after row, as `cut` gives them.
        pieces_of_row: int64 [rows], how many belong to each row.
        length: elements of a row.
        pad: what fills rows up.
    """
    sizes, rows = values.lengths.numpy(), len(pieces_of_row)
    ends = np.concatenate(([0], np.cumsum(pieces_of_row)))
    before = values.offsets.numpy()[ends]  # elements ahead of each row
    fill = np.diff(before)
    if rows and int(fill.max()) > length:
        raise ValueError(f"a row of {int(fill.max())} elements exceeds length={length}")
    inside = torch.from_numpy(np.arange(length) < fill[:, None])
    segment = np.arange(len(sizes)) - np.repeat(ends[:-1], pieces_of_row) + 1
    place = np.arange(int(sizes.sum()), dtype=np.int32)
    place -= np.repeat(values.offsets.numpy()[:-1], sizes).astype(np.int32)
    tokens = values.values.new_full((rows, length), pad)
    tokens[inside] = values.values
    segment_ids = torch.zeros((rows, length), dtype=torch.int32)
    segment_ids[inside] = torch.from_numpy(np.repeat(segment, sizes).astype(np.int32))
    positions = torch.zeros((rows, length), dtype=torch.int32)
    positions[inside] = torch.from_numpy(place)
    bounds = _bounds(sizes, pieces_of_row, fill, length)
    longest = int(np.diff(bounds).max()) if rows else 0
    return PackedRows(tokens, segment_ids, positions, torch.from_numpy(bounds), longest)


def _bounds(
    sizes: NDArray[np.int64], pieces_of_row: NDArray[np.int64], fill: NDArray[np.int64], length: int
) -> NDArray[np.int32]:
    """Where segments begin in the flat rows; what is left of each row is one more segment."""
    after = np.cumsum(pieces_of_row)
    with_rest = np.insert(sizes, after, length - fill)
    rests = after + np.arange(len(after))
    keep = np.ones(len(with_rest), bool)
    keep[rests[fill == length]] = False
    return np.concatenate(([0], np.cumsum(with_rest[keep]))).astype(np.int32)


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
