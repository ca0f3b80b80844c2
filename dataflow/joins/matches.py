"""Match the samples of two datasets by key, and count what it costs to read one beside the other.

Keys are matched once, as Arrow arrays, and kept as a table of sample numbers. Whoever reads a block of the
one dataset reads the blocks of the other that hold its matches; where both are ordered alike these are few,
and consecutive blocks share them. `reads_in_file_order` and `reads_in_windows` count the bytes from the block
tables, before anything is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sharding.catalog.table import BlockTable
from sharding.order.order import Order
from sharding.plan.next_use import NOT_READ, LaneRange, windows_of_blocks
from sharding.spans import Ints

NO_MATCH = -1


def comparable(keys: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Keys in the form in which those of two datasets are compared: int64, or bytes, which text is, too.

    Raises `ValueError` for a type that is no key's.
    """
    if pa.types.is_dictionary(keys.type):
        keys = keys.cast(keys.type.value_type)
    kind = keys.type
    if pa.types.is_integer(kind):
        try:
            return _joined(keys.cast(pa.int64()))
        except pa.ArrowInvalid:
            raise ValueError("integers beyond 2**63 are no keys") from None
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()
    is_bytes = (
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    )
    if not is_text and not is_bytes and kind != pa.binary_view():
        raise ValueError(f"keys must be text, bytes or integers, and are {kind}")
    return _joined(keys.cast(pa.large_string() if is_text else pa.large_binary()).cast(pa.large_binary()))


def _joined(keys: pa.Array | pa.ChunkedArray) -> pa.Array:
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def find_matches(keys: pa.Array, others: pa.Array) -> Ints:
    """Index in `others` of each key, int64 [n]; `NO_MATCH` where there is none. A null matches nothing.

    `others` must hold each key once; see `duplicates`.
    """
    import pyarrow.compute as pc

    index = pc.index_in(keys, value_set=others, skip_nulls=True)
    return np.asarray(index.fill_null(NO_MATCH)).astype(np.int64)


def duplicates(keys: pa.Array) -> tuple[int, Ints]:
    """Return how many keys come more than once, nulls aside, and where the first is, int64 [times]."""
    import pyarrow.compute as pc

    codes = np.asarray(pc.dictionary_encode(keys).indices.fill_null(NO_MATCH))
    repeated = np.flatnonzero(np.bincount(codes[codes != NO_MATCH]) > 1)
    return len(repeated), np.flatnonzero(codes == repeated[0]) if len(repeated) else np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class MatchTable:
    """A table of the sample of another dataset that is the match of each sample of a dataset. Read-only."""

    numbers: NDArray[Any]
    """[samples of the dataset's shards] number of the match in the other's, int32 or int64; `NO_MATCH`:
    it has none."""
    own_blocks: Ints
    """[pairs] blocks of the dataset, ascending ..."""
    other_blocks: Ints
    """... and of the other, which hold matches of its samples."""
    num_blocks: int
    """The number of blocks of the dataset."""
    amplification: float
    """Bytes of the other's blocks that are read in file order over those of all blocks that hold matches."""

    @classmethod
    def between(cls, samples: Ints, matches: Ints, table: BlockTable, other: BlockTable) -> MatchTable:
        """Make the table from numbers of samples with a match, ascending, and of their matches, [n] each."""
        total, most = int(table.num_samples.sum()), int(other.num_samples.sum())
        numbers = np.full(total, NO_MATCH, np.int32 if most < 1 << 31 else np.int64)
        numbers[samples] = matches
        numbers.setflags(write=False)
        own_block, other_block = blocks_of(table, samples), blocks_of(other, matches)
        read, once = reads_in_file_order(own_block, other_block, other.length)
        pairs = _pairs(own_block, other_block)
        return cls(
            numbers=numbers,
            own_blocks=pairs[0],
            other_blocks=pairs[1],
            num_blocks=len(table.num_samples),
            amplification=read / max(1, once),
        )

    def of(self, samples: Ints) -> Ints:
        """The numbers of the matches of some samples, int64 [n]."""
        return self.numbers[samples].astype(np.int64)

    def in_windows(self, order: Order, lanes: LaneRange) -> tuple[Ints, Ints]:
        """Windows of an order of the dataset, read by some lanes, and the other's blocks that each needs."""
        window = windows_of_blocks(order, self.num_blocks, lanes)[self.own_blocks]
        is_read = window != NOT_READ
        return _pairs(window[is_read], self.other_blocks[is_read])

    def windows(self, order: Order, num_blocks: int, lanes: LaneRange) -> Ints:
        """The first window that needs each of the other's blocks, int64 [num_blocks]; or `NOT_READ`."""
        window, other = self.in_windows(order, lanes)
        first = np.full(num_blocks, NOT_READ)
        first[other[::-1]] = window[::-1]  # ascending: the first is written last
        return first


def blocks_of(table: BlockTable, samples: Ints) -> Ints:
    """The block of each sample, int64 [n]."""
    return np.searchsorted(table.first_sample, samples, side="right") - 1


def _pairs(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """Return the different pairs, ascending."""
    changes = np.flatnonzero((np.diff(first, prepend=-1) != 0) | (np.diff(second, prepend=-1) != 0))
    both = np.unique(np.stack((first[changes], second[changes])), axis=1)
    return both[0], both[1]


def reads_in_file_order(blocks: Ints, other: Ints, nbytes: Ints) -> tuple[int, int]:
    """Bytes that are read of another dataset beside one that is read block by block, and bytes of it once.

    One block is carried over from each block to the next, so an order that is alike reads nothing twice.

    Args:
        blocks: [n] the block of each sample, ascending.
        other: [n] that of its match.
        nbytes: [blocks] of the other.
    """
    read = int(nbytes[_pairs(blocks, other)[1]].sum())
    last = np.flatnonzero(np.diff(blocks))
    carried = other[last][other[last] == other[last + 1]]
    return read - int(nbytes[carried].sum()), int(nbytes[np.unique(other)].sum())


def reads_in_windows(order: Order, matches: MatchTable, nbytes: Ints) -> float:
    """Return how often blocks that hold matches are read in an epoch whose windows are read each by itself.

    Args:
        order: the epoch's; any kind but "full", which has no windows.
        matches: of the dataset that is ordered.
        nbytes: [blocks] of the other.
    """
    other = matches.in_windows(order, LaneRange(0, order.num_lanes, shared=False))[1]
    return int(nbytes[other].sum()) / max(1, int(nbytes[np.unique(other)].sum()))


def allowance(amplification: float) -> str:
    """The least `amplification=`, in tenths, that allows so much."""
    return f"{math.ceil(amplification * 10) / 10:g}"
