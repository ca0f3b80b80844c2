"""Which byte ranges to ask for together: fewer requests, for a bounded share of bytes that nobody wants.

A request costs a latency, and often money, whatever it brings. Ranges that lie near each other in one shard
are read as one as long as what lies between them stays a small part: the bound holds for each request, so it
holds for all together. Pure, O(n log n).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 4 << 20
"""As much as one request brings; larger ranges are asked for in parts of this size."""
GAP_SHARE = 0.25
"""Bytes between wanted ones, per wanted byte: at most 1.25 bytes are read for one."""


def coalesce(
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    most_bytes: int = MOST_BYTES,
    gap_share: float = GAP_SHARE,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Join ranges that may overlap, in any order.

    Args:
        starts: [n] first byte of each range.
        lengths: [n] bytes of each, >= 0; empty ranges cost nothing.
        most_bytes: joined ranges are no longer than this; a single one may be.
        gap_share: unwanted bytes allowed per wanted one, in each joined range.

    Returns:
        ([m] first byte and [m] bytes of each joined range, ascending; [n] which of them holds each range).
    """
    order = np.argsort(starts, kind="stable")
    firsts: list[int] = []
    ends: list[int] = []
    of = np.zeros(len(starts), np.int64)
    wanted = 0
    for at, start, length in zip(
        order.tolist(), starts[order].tolist(), lengths[order].tolist(), strict=True
    ):
        if length == 0:
            of[at] = max(0, len(firsts) - 1)
            continue
        end = start + length
        if firsts:
            joined_end = max(ends[-1], end)
            new = max(0, end - max(start, ends[-1]))
            size = joined_end - firsts[-1]
            if new == 0 or (size <= most_bytes and size <= (1 + gap_share) * (wanted + new)):
                ends[-1], wanted = joined_end, wanted + new
                of[at] = len(firsts) - 1
                continue
        firsts.append(start)
        ends.append(end)
        wanted = length
        of[at] = len(firsts) - 1
    first = np.array(firsts, np.int64)
    return first, np.array(ends, np.int64) - first, of


__all__ = ["GAP_SHARE", "MOST_BYTES", "coalesce"]
