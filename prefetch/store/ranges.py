"""Byte ranges of shards: which to ask for together, and those that are on their way.

A request costs a latency, and often money, whatever it brings: fewer requests, for a bounded share of bytes
that nobody wants. Ranges that lie near each other in one shard are read as one as long as what lies between
them stays a small part: the bound holds for each request, so it holds for all together. O(n log n).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefetch.retries import CutBodyError
from sharding.blocks import Block, Columns, ColumnSpec, Shard, Spans
from sharding.spans import numbers_at

Awaited = Future[None]
"""Done when the consumer waits for what is being read."""

MOST_BYTES = 4 << 20
"""The bytes that one request brings, at most; larger ranges are asked for in parts of this size."""
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
    wanted_bytes = 0
    for index, start, length in zip(
        order.tolist(), starts[order].tolist(), lengths[order].tolist(), strict=True
    ):
        if length == 0:
            of[index] = max(0, len(firsts) - 1)
            continue
        end = start + length
        if firsts:
            joined_end = max(ends[-1], end)
            new = max(0, end - max(start, ends[-1]))
            size = joined_end - firsts[-1]
            if new == 0 or (size <= most_bytes and size <= (1 + gap_share) * (wanted_bytes + new)):
                ends[-1], wanted_bytes = joined_end, wanted_bytes + new
                of[index] = len(firsts) - 1
                continue
        firsts.append(start)
        ends.append(end)
        wanted_bytes = length
        of[index] = len(firsts) - 1
    first = np.array(firsts, np.int64)
    return first, np.array(ends, np.int64) - first, of


def read_located(
    block: Block,
    spans: Mapping[str, Spans],
    schema: Mapping[str, ColumnSpec],
    read_into: Callable[[Shard, int, NDArray[np.uint8]], object],
    rows: NDArray[np.int64] | None = None,
) -> Columns:
    """Read columns whose values' places in a block are known: these bytes alone, few requests for all.

    Args:
        block: the block.
        spans: by column, where its values lie, as `Format.locate` gives them.
        schema: of the columns; of others than numbers, spans are returned.
        read_into: fills an array with a shard's bytes from an offset on.
        rows: of the block, [n]; None: all.
    """
    parts = [
        part if rows is None else Spans(part.buffer, part.starts[rows], part.lengths[rows])
        for part in spans.values()
    ]
    starts = np.concatenate([part.starts for part in parts])
    firsts, sizes, of = coalesce(starts, np.concatenate([np.maximum(part.lengths, 0) for part in parts]))
    buffer, targets = np.empty(int(sizes.sum()), np.uint8), np.cumsum(sizes) - sizes
    for first, size, target in zip(firsts.tolist(), sizes.tolist(), targets.tolist(), strict=True):
        read_into(block.shard, block.offset + first, buffer[target : target + size])
    moved = starts + (targets - firsts)[of] if len(firsts) else np.zeros_like(starts)
    columns: Columns = {}
    ends = np.cumsum([len(part) for part in parts])[:-1]
    for name, part, places in zip(spans, parts, np.split(moved, ends), strict=True):
        spec = schema.get(name)
        columns[name] = (
            numbers_at(buffer, places, spec.dtype, spec.shape)
            if spec is not None and spec.kind == "fixed"
            else Spans(buffer, places, part.lengths)
        )
    return columns


@dataclass(eq=False)
class RangePart:
    """A piece of a range: the bytes [position, end) of the destination are still to come."""

    begin: int
    position: int
    end: int
    heard_s: float
    """The time when its last byte came, or it was asked."""

    @property
    def left(self) -> int:
        """Return the number of bytes still to come."""
        return self.end - self.position

    def check_whole(self) -> None:
        """Raise `CutBodyError` if bytes are still to come."""
        if self.left:
            raise CutBodyError(f"the body ended {self.left} bytes too early")


@dataclass(eq=False, kw_only=True)
class RangeRead:
    """One read on its way."""

    shard: Shard
    offset: int
    out: NDArray[np.uint8]
    awaited: Awaited | None
    began_s: float
    parts: list[RangePart] = field(default_factory=list)
    failures: int = 0
    """In a row, without a byte between them."""
    stalls: int = 0
    """The number of these requests that had no byte for too long."""
    reason: str = ""
    """Why the last attempt failed."""
    left_then: int = 0
    """Bytes that were still to come then."""
    last_byte_s: float = field(init=False)
    """The time when an attempt that failed had brought a byte, or the read began."""

    def __post_init__(self) -> None:
        self.last_byte_s = self.began_s

    @property
    def left(self) -> int:
        """Return the number of bytes still to come."""
        return sum(part.left for part in self.parts)
