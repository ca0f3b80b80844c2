"""Lists of byte strings as one value each: how many there are, their lengths, then their bytes.

A list so written is staged, cached and shipped to other processes as byte strings are. All numbers are int64
in native byte order, at any address: count, one length an item, and the items one after the other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import Spans
from sharding.spans import numbers_at

Numbers = NDArray[np.int64]
_NUMBER_BYTES = 8


class ByteLists(Spans, frozen=True):
    """Spans of lists. Their heads are believed: only who has written these may say that they are such."""


def list_heads(counts: Numbers, lengths: Numbers) -> tuple[NDArray[np.uint8], Numbers]:
    """Return the heads that precede the items of n lists.

    Args:
        counts: int64 [n] items of each list.
        lengths: int64 [sum of counts] bytes of each item.

    Returns:
        The heads, uint8 [bytes], and where each begins and the last ends, int64 [n + 1].
    """
    first = np.append(0, np.cumsum(counts))
    starts = np.arange(len(counts) + 1) + first
    head = np.empty(int(starts[-1]), np.int64)
    head[starts[:-1]] = counts
    head[np.arange(len(lengths)) + 1 + np.repeat(np.arange(len(counts)), counts)] = lengths
    return head.view(np.uint8), _NUMBER_BYTES * starts


def list_counts(buffer: NDArray[np.uint8], starts: Numbers) -> Numbers:
    """Return how many items the lists have that begin at `starts`, int64 [n]."""
    return numbers_at(buffer, starts, "=i8")


def list_items(buffer: NDArray[np.uint8], starts: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Locate the items of n lists.

    Args:
        buffer: uint8, what holds the lists.
        starts: int64 [n] where each begins.

    Returns:
        counts int64 [n]; starts and lengths of all items in `buffer`, int64 [sum of counts] each.
    """
    counts = list_counts(buffer, starts)
    first = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(first, counts)
    lengths = numbers_at(buffer, np.repeat(starts, counts) + _NUMBER_BYTES * (1 + within), "=i8")
    before = np.append(0, np.cumsum(lengths))
    begin = starts + _NUMBER_BYTES * (1 + counts) - before[first]
    return counts, np.repeat(begin, counts) + before[:-1], lengths
