"""Batches of samples of like length: by buckets of length, or by a budget of elements with padding.

Both sort the samples of a planning window by length and cut; then the batches are put in keyed order, so
that lengths do not drift within a window, and every window holds all lengths. Samples of one bucket, and
of one length, keep the order of their positions, which the shuffle has mixed. In file order there is no key:
batches follow their first samples, and samples of a batch one another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sharding.errors import DataflowError
from sharding.lengths.units import LengthStats, Pieces, Units, ranges, stable_order
from sharding.order.order import keyed_order


def bucket(
    lengths: NDArray[np.integer],
    batch_size: int,
    boundaries: NDArray[np.int64],
    multiple: int,
    key: int | None,
) -> Units:
    """Batches of `batch_size` samples of one bucket.

    What is left over of each bucket, fewer than `batch_size` samples, is put together with that of its
    neighbours, so that a window of n samples has `ceil(n / batch_size)` batches and at most one is short.

    Args:
        lengths: [n].
        batch_size: samples of a batch.
        boundaries: ascending; bucket i holds lengths above `boundaries[i - 1]` and up to `boundaries[i]`.
        multiple: a batch is padded to the longest of its samples, rounded up to this.
        key: decides the order of the batches, None: their first samples do; the short one comes last.
    """
    sizes = lengths.astype(np.int64)
    of = np.searchsorted(boundaries, sizes)
    order = stable_order(of)
    count = np.bincount(of, minlength=len(boundaries) + 1)
    inside = ranges(np.zeros_like(count), count)  # place in the bucket
    over = inside >= (count - count % batch_size)[of[order]]
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
) -> Units:
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
    kept = np.minimum(sizes, longest)
    order = stable_order(int(kept.max(initial=0)) - kept)  # longest first: the first sample tells the padding
    room = max_tokens // np.maximum(_padded(kept[order], multiple), 1)
    room = np.minimum(room, len(order) if max_samples is None else max_samples).tolist()
    first = [0] if room else []
    while first and first[-1] < len(room):  # a step a batch
        first.append(first[-1] + room[first[-1]])
    bounds = np.minimum(np.array(first or [0], np.int64), len(room))
    return _units(sizes, kept, order, bounds, multiple, key, len(bounds) - 1)


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
    kept: NDArray[np.int64],
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    multiple: int,
    key: int | None,
    num_ordered: int,
) -> Units:
    """The batches `order[first[u] : first[u + 1]]`: the first `num_ordered` in their order, then the rest."""
    counts = np.diff(first)
    if key is None:
        order = order[np.lexsort((order, np.repeat(np.arange(len(counts)), counts)))]
    units = np.arange(len(counts))
    first_sample = order[first[:num_ordered]]
    units[:num_ordered] = np.argsort(first_sample) if key is None else keyed_order(num_ordered, key)
    longest = np.maximum.reduceat(kept[order], first[:-1]) if len(order) else counts
    capacity = int((_padded(longest, multiple) * counts).sum())
    order = order[ranges(first[:-1][units], counts[units])]
    pieces = Pieces(order, np.zeros(len(order), np.int64), kept[order])
    cut = sizes > kept
    stats = LengthStats(
        units=len(counts),
        pieces=len(order),
        tokens=int(kept.sum()),
        capacity=capacity,
        truncated=int(np.count_nonzero(cut)),
        truncated_tokens=int((sizes - kept)[cut].sum()),
    )
    return Units(pieces, np.concatenate(([0], np.cumsum(counts[units]))).astype(np.int64), stats)
