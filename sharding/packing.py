"""Sequence packing: pieces of documents into rows of a fixed length, best fit, by classes of length.

Best-fit decreasing (Johnson et al. 1974; at most 11/9 of the optimal number of rows, plus one) takes pieces
longest first and puts each into the fullest row that still has room. What it does depends only on how
many pieces have each length and how many rows have each room left, so it runs on those two histograms:
a step takes all rows of one room at once, fills each with as many pieces of one length as fit (after
one piece, the same row is the fullest again), and moves them to the room that is left. The result is exactly
best-fit decreasing; the steps number a few for each distinct length, not one for each piece. The smallest
sufficient room is found by a bit trick on an integer with one bit a room. Actual pieces take their places
afterwards, in bulk, equal lengths in the order of their positions.

Above `_CLASSES` lengths are rounded up to that many classes while packing, which bounds the steps and wastes
at most a 4096th of a row for each piece.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sharding.errors import DataflowError
from sharding.order import keyed_order
from sharding.units import LengthStats, Pieces, Units, ranges

Overlong = Literal["split", "truncate", "error"]

_CLASSES = 4096


def pack(lengths: NDArray[np.integer], length: int, overlong: Overlong, key: int) -> Units:
    """Pack the samples of one planning window into rows.

    Args:
        lengths: [n], elements of each sample, >= 0.
        length: elements of a row.
        overlong: "split" cuts longer samples into full rows and a rest, "truncate" keeps their beginning,
            "error" raises `DataflowError`.
        key: decides the order of the rows.

    Returns:
        One unit a row; its pieces in order of position. Samples of length 0 are in no row.
    """
    pieces, stats = pieces_of(lengths, length, overlong)
    row, num_rows = best_fit_rows(pieces.length, length)
    place = np.empty(num_rows, np.int64)
    place[keyed_order(num_rows, key)] = np.arange(num_rows)
    row = place[row]
    # The piece's number is part of the sort key: there are no ties, so any sort will do.
    keyed = row * max(1, len(row)) + np.arange(len(row))
    keyed.sort()
    order = keyed % max(1, len(row))
    first = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=num_rows)))).astype(np.int64)
    sums = {"units": num_rows, "pieces": len(pieces), "capacity": num_rows * length}
    tokens = int(pieces.length.sum())
    return Units(pieces.take(order), first, LengthStats.total([stats, LengthStats(**sums, tokens=tokens)]))


def pieces_of(lengths: NDArray[np.integer], length: int, overlong: Overlong) -> tuple[Pieces, LengthStats]:
    """The pieces of at most `length` elements that samples become, by position, and what was cut."""
    sizes = lengths.astype(np.int64)
    over = sizes > length
    num_over, empty = int(np.count_nonzero(over)), int(np.count_nonzero(sizes == 0))
    if num_over and overlong == "error":
        raise DataflowError(
            f"a sample of {int(sizes.max())} elements does not fit rows of length={length}; "
            'pass overlong="split" to cut such samples into several rows, or "truncate"'
        )
    if overlong == "truncate":
        kept = np.flatnonzero(sizes)
        lost = int((sizes - length)[over].sum())
        cut = Pieces(kept, np.zeros(len(kept), np.int64), np.minimum(sizes[kept], length))
        return cut, LengthStats(truncated=num_over, truncated_tokens=lost, empty=empty)
    count = -(-sizes // length)
    begin = ranges(np.zeros_like(count), count) * length
    position = np.repeat(np.arange(len(sizes)), count)
    rest = np.minimum(sizes[position] - begin, length)
    return Pieces(position, begin, rest), LengthStats(split=num_over, empty=empty)


def best_fit_rows(lengths: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], int]:
    """The row of each piece under best-fit decreasing, int64 [n], and the number of rows.

    Args:
        lengths: [n], each in [1, length].
        length: elements of a row.
    """
    grain = -(-length // _CLASSES)
    # The longest pieces may be rounded up beyond a row: they take all of one anyway.
    classes = np.minimum(-(-lengths // grain), length // grain)
    placed, num_rows = best_fit(np.bincount(classes, minlength=1), length // grain)
    first, rows, each = placed.T
    row = np.repeat(ranges(first, rows), np.repeat(each, rows))
    keyed = (length // grain - classes) * max(1, len(classes)) + np.arange(len(classes))
    keyed.sort()
    out = np.empty(len(classes), np.int64)
    out[keyed % max(1, len(classes))] = row
    return out, num_rows


def best_fit(counts: NDArray[np.integer], length: int) -> tuple[NDArray[np.int64], int]:
    """Best-fit decreasing on histograms.

    Args:
        counts: `counts[size]` pieces have that size; sizes above `length` may not occur, nor size 0.
        length: room of an empty row.

    Returns:
        Placements int64 [p, 3] and the number of rows. Pieces taken in descending order of size, the next
        `rows * each` go to rows `first` up to `first + rows`, `each` to a row: columns (first, rows, each).
    """
    free: list[list[tuple[int, int]]] = [[] for _ in range(length + 1)]  # by room: (first row, rows)
    rooms = 0  # bit r is set where free[r] is not empty
    placed: list[tuple[int, int, int]] = []
    num_rows = 0
    sizes = np.flatnonzero(counts)[::-1]
    for size, left in zip(sizes.tolist(), counts[sizes].tolist(), strict=True):
        while left:
            enough = rooms >> size
            if enough:
                room = size + (enough & -enough).bit_length() - 1
                first, rows = free[room].pop()
                if not free[room]:
                    rooms ^= 1 << room
            else:
                room, first = length, num_rows
                rows = -(-left // (room // size))
                num_rows += rows
            each = room // size
            full = min(rows, left // each)
            # Rows that are filled, the one that gets what is left, and those that get nothing.
            some = left - full * each if full < rows else 0
            for begin, many, pieces in (
                (first, full, each),
                (first + full, min(1, some), some),
                (first + full + min(1, some), rows - full - min(1, some), 0),
            ):
                rest = room - pieces * size
                if many and pieces:
                    placed.append((begin, many, pieces))
                if many and rest:
                    free[rest].append((begin, many))
                    rooms |= 1 << rest
            left -= full * each + some
    return np.array(placed, np.int64).reshape(-1, 3), num_rows
