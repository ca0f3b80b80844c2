"""Cut a packing window into units: packed rows, or batches of samples of like length.

*Packed rows* take segments of documents by best-fit decreasing (Johnson et al. 1974; at most 11/9 of the
optimal number of rows, plus one): longest first, each into the fullest row that still has room. What it does
depends only on how many segments have each length and how many rows have each room left, so it runs on those
two histograms: a step takes all rows of one room at once, fills each with as many segments of one length as
fit (after one, the same row is the fullest again), and moves them to the room that is left. The result is
exactly best-fit decreasing; the steps number a few for each distinct length, not one for each segment. The
smallest sufficient room is found by a bit trick on an integer with one bit a room. Actual segments take their
positions afterwards, in bulk, equal lengths in the order of their positions. A packing window with more than
8,192 distinct lengths has long documents: there they are rounded up to that many classes while packing, which
bounds the steps and costs 1/16,384 of a row a segment on average.

*Batches of like length*, by buckets of length or by a budget of elements with padding, come from sorting the
samples by length and cutting; then they are put in a seeded permutation, so that lengths do not drift within
a packing window, and every one holds all lengths. Samples of one bucket, and of one length, keep the order of
their positions, which the shuffle has mixed. In file order there is no key: units follow their first samples,
and samples of a unit one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sharding.errors import DataflowError
from sharding.lengths.units import LengthStats, PackingWindow, Segments, stable_order
from sharding.order.permutations import seeded_permutation
from sharding.order.windows import ranges

Overlong = Literal["split", "truncate", "error"]

_CLASSES = 8192
"""Distinct lengths packed exactly; where there are more, they are rounded up to that many."""
_WORD = 10
"""Bits of the number of a bit in a word."""
_IN_WORD = (1 << _WORD) - 1
Move = Callable[[Segments, NDArray[np.int64], int], tuple[NDArray[np.int64], int]]
"""Segments, the row of each and the number of rows; returns other rows."""


def pack(
    lengths: NDArray[np.integer], length: int, overlong: Overlong, key: int | None, move: Move | None = None
) -> PackingWindow:
    """Pack the samples of a packing window into rows. The last row to be begun is half full, on average.

    Args:
        lengths: [n], elements of each sample, >= 0.
        length: elements of a row.
        overlong: "split" cuts longer samples into full rows and a rest, "truncate" keeps their beginning,
            "error" raises `DataflowError`.
        key: decides the order of the rows; None: that of their first segments.
        move: moves segments to other rows.

    Returns:
        One unit a row; its segments in order of position. Samples of length 0 are in no row.
    """
    segments, cut = segments_of(lengths, length, overlong)
    row, num_rows = best_fit_rows(segments.length, length)
    if move is not None:
        row, num_rows = move(segments, row, num_rows)
    number = np.empty(num_rows, np.int64)
    number[_by_first_segment(row) if key is None else seeded_permutation(num_rows, key)] = np.arange(num_rows)
    row = number[row]
    first = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=num_rows)))).astype(np.int64)
    packed = LengthStats(
        units=num_rows,
        segments=len(segments),
        tokens=int(segments.length.sum()),
        capacity=num_rows * length,
    )
    return PackingWindow(segments.take(stable_order(row)), first, LengthStats.total([cut, packed]))


def _by_first_segment(row: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows in the order in which segments, which lie in the order of their samples, first name them."""
    return np.argsort(np.unique(row, return_index=True)[1])


def segments_of(
    lengths: NDArray[np.integer], length: int, overlong: Overlong
) -> tuple[Segments, LengthStats]:
    """The segments of at most `length` elements that samples become, by position, and what was cut."""
    sizes = lengths.astype(np.int64)
    over = sizes > length
    num_over, empty = int(np.count_nonzero(over)), int(np.count_nonzero(sizes == 0))
    if num_over and overlong == "error":
        raise DataflowError(
            f"a sample of {int(sizes.max())} elements does not fit rows of length={length}; "
            'pass overlong="split" to cut such samples into several rows, or "truncate"'
        )
    if overlong == "truncate":
        samples = np.flatnonzero(sizes)
        lost = int((sizes - length)[over].sum())
        cut = Segments(samples, np.zeros(len(samples), np.int64), np.minimum(sizes[samples], length))
        return cut, LengthStats(truncated=num_over, truncated_tokens=lost, empty=empty)
    count = -(-sizes // length)
    begin = ranges(np.zeros_like(count), count) * length
    position = np.repeat(np.arange(len(sizes)), count)
    rest = np.minimum(sizes[position] - begin, length)
    return Segments(position, begin, rest), LengthStats(split=num_over, empty=empty)


def best_fit_rows(lengths: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], int]:
    """The row of each segment under best-fit decreasing, int64 [n], and the number of rows.

    Args:
        lengths: [n], each in [1, length].
        length: elements of a row.
    """
    counts = np.bincount(lengths, minlength=1)
    grain = 1 if np.count_nonzero(counts) <= _CLASSES else -(-length // _CLASSES)
    classes = lengths
    if grain > 1:  # the longest segments may be rounded up beyond a row: they take all of one anyway
        classes = np.minimum(-(-lengths // grain), length // grain)
        counts = np.bincount(classes)
    placements, num_rows = best_fit(counts, length // grain)
    first, rows, each = placements.T
    row = np.repeat(ranges(first, rows), np.repeat(each, rows))
    out = np.empty(len(classes), np.int64)
    out[stable_order(length // grain - classes)] = row
    return out, num_rows


def best_fit(counts: NDArray[np.integer], length: int) -> tuple[NDArray[np.int64], int]:
    """Best-fit decreasing on histograms.

    Args:
        counts: `counts[size]` segments have that size; sizes above `length` may not occur, nor size 0.
        length: room of an empty row.

    Returns:
        Placements int64 [p, 3] and the number of rows. Segments taken in descending order of size, the next
        `rows * each` go to rows `first` up to `first + rows`, `each` to a row: columns (first, rows, each).
    """
    free = _FreeRows(length)
    placements: list[tuple[int, int, int]] = []
    num_rows = 0
    sizes = np.flatnonzero(counts)[::-1]
    for size, left in zip(sizes.tolist(), counts[sizes].tolist(), strict=True):
        while left:
            room, first, rows = free.tightest(size)
            each = room // size
            if not rows:
                first, rows = num_rows, -(-left // each)
                num_rows += rows
            full = min(rows, left // each)
            left -= full * each
            if full:
                placements.append((first, full, each))
                free.add(room - each * size, first, full)
            if full < rows and left:  # one more row gets what is left, which does not fill it
                placements.append((first + full, 1, left))
                free.add(room - left * size, first + full, 1)
                full, left = full + 1, 0
            if full < rows:
                free.add(room, first + full, rows - full)
    return np.array(placements, np.int64).reshape(-1, 3), num_rows


class _FreeRows:
    """Rows by the room they have left, in ranges of row numbers; the smallest sufficient room is found fast.

    A bit for each room says whether there are such rows: in words of 1,024 bits, and one bit for each word
    in a summary, so that the integers stay short however long rows are.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._words, self._summary = [0] * ((length >> _WORD) + 1), 0

    def add(self, room: int, first: int, rows: int) -> None:
        """Keep rows; those without room are full, and forgotten."""
        if not room:
            return
        if row_ranges := self._ranges.get(room):
            row_ranges.append((first, rows))
            return
        self._ranges[room] = [(first, rows)]
        self._words[room >> _WORD] |= 1 << (room & _IN_WORD)
        self._summary |= 1 << (room >> _WORD)

    def tightest(self, size: int) -> tuple[int, int, int]:
        """Take a range of rows with the least room of at least `size`: (room, first, rows).

        (length, 0, 0) where none has that much: a new row is needed.
        """
        word = size >> _WORD
        bits = self._words[word] >> (size & _IN_WORD) << (size & _IN_WORD)
        if not bits:
            above = self._summary >> (word + 1)
            if not above:
                return self._length, 0, 0
            word += (above & -above).bit_length()
            bits = self._words[word]
        room = (word << _WORD) + (bits & -bits).bit_length() - 1
        row_ranges = self._ranges[room]
        first, rows = row_ranges.pop()
        if not row_ranges:
            self._words[word] ^= 1 << (room & _IN_WORD)
            if not self._words[word]:
                self._summary ^= 1 << word
        return room, first, rows


# ---- batches of like length -----------------------------------------------------------------------------


def bucket(
    lengths: NDArray[np.integer],
    batch_size: int,
    boundaries: NDArray[np.int64],
    multiple: int,
    key: int | None,
) -> PackingWindow:
    """Batches of `batch_size` samples of one bucket.

    What is left over of each bucket, fewer than `batch_size` samples, is put together with that of its
    neighbours, so a packing window of n samples has `ceil(n / batch_size)` batches and at most one is short.

    Args:
        lengths: [n].
        batch_size: samples of a batch.
        boundaries: ascending; bucket i holds lengths above `boundaries[i - 1]` and up to `boundaries[i]`.
        multiple: a batch is padded to the longest of its samples, rounded up to this.
        key: decides the order of the batches, None: their first samples do; the short one comes last.
    """
    sizes = lengths.astype(np.int64)
    bucket_of = np.searchsorted(boundaries, sizes)
    order = stable_order(bucket_of)
    count = np.bincount(bucket_of, minlength=len(boundaries) + 1)
    position = ranges(np.zeros_like(count), count)  # in the bucket
    over = position >= (count - count % batch_size)[bucket_of[order]]
    order = np.concatenate((order[~over], order[over]))
    first = np.append(np.arange(0, len(order), batch_size), len(order))
    num_whole = len(order) // batch_size
    return _units(sizes, sizes, order, first, multiple, key, num_whole)


def budget(
    lengths: NDArray[np.integer],
    max_tokens: int,
    max_samples: int | None,
    multiple: int,
    truncate: bool,
    key: int | None,
) -> PackingWindow:
    """Batches of as many samples as keep samples x padded length within `max_tokens`.

    Args:
        lengths: [n].
        max_tokens: most elements of a padded batch.
        max_samples: most samples of a batch; None: no such bound.
        multiple: the padded length is the longest sample's, rounded up to this.
        truncate: samples that do not fit alone are cut to what fits; else they are a `DataflowError`.
        key: decides the order of the batches; None: their first samples do.
    """
    sizes = lengths.astype(np.int64)
    longest = max_tokens // multiple * multiple
    if len(sizes) and int(sizes.max()) > longest and not truncate:
        raise DataflowError(
            f"a sample of {int(sizes.max())} elements does not fit a batch of max_tokens={max_tokens}; "
            'raise it, or pass overlong="truncate" to cut such samples off'
        )
    elements = np.minimum(sizes, longest)
    # Longest first: a batch's first sample tells its padding.
    order = stable_order(int(elements.max(initial=0)) - elements)
    room = max_tokens // np.maximum(_padded(elements[order], multiple), 1)
    room = np.minimum(room, len(order) if max_samples is None else max_samples).tolist()
    first = [0] if room else []
    while first and first[-1] < len(room):  # a step a batch
        first.append(first[-1] + room[first[-1]])
    bounds = np.minimum(np.array(first or [0], np.int64), len(room))
    return _units(sizes, elements, order, bounds, multiple, key, len(bounds) - 1)


def equal_share_boundaries(lengths: NDArray[np.integer], num_buckets: int) -> NDArray[np.int64]:
    """Boundaries of buckets with about the same sum of lengths each, int64 [<= num_buckets - 1], ascending.

    Like quantiles of the samples, but by elements: with 16 buckets on a log-normal distribution 0.76 of the
    padded batches hold elements, against 0.47 by samples, whose last bucket has to hold the whole tail.
    """
    ordered = np.sort(lengths)
    so_far = np.cumsum(ordered, dtype=np.int64)
    if not len(ordered) or num_buckets < 2:
        return np.empty(0, np.int64)
    shares = [int(so_far[-1]) * i // num_buckets for i in range(1, num_buckets)]  # exact: no 64-bit overflow
    return np.unique(ordered[np.searchsorted(so_far, shares)]).astype(np.int64)


def _padded(lengths: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    return -(-lengths // multiple) * multiple


def _units(
    sizes: NDArray[np.int64],
    elements: NDArray[np.int64],
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    multiple: int,
    key: int | None,
    num_ordered: int,
) -> PackingWindow:
    """The batches `order[first[u] : first[u + 1]]`: the first `num_ordered` in their order, then the rest."""
    counts = np.diff(first)
    if key is None:
        order = order[np.lexsort((order, np.repeat(np.arange(len(counts)), counts)))]
    units = np.arange(len(counts))
    first_sample = order[first[:num_ordered]]
    units[:num_ordered] = np.argsort(first_sample) if key is None else seeded_permutation(num_ordered, key)
    longest = np.maximum.reduceat(elements[order], first[:-1]) if len(order) else counts
    capacity = int((_padded(longest, multiple) * counts).sum())
    order = order[ranges(first[:-1][units], counts[units])]
    segments = Segments(order, np.zeros(len(order), np.int64), elements[order])
    cut = sizes > elements
    stats = LengthStats(
        units=len(counts),
        segments=len(order),
        tokens=int(elements.sum()),
        capacity=capacity,
        truncated=int(np.count_nonzero(cut)),
        truncated_tokens=int((sizes - elements)[cut].sum()),
    )
    return PackingWindow(segments, np.concatenate(([0], np.cumsum(counts[units]))).astype(np.int64), stats)
