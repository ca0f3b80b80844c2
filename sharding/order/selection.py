"""Select the samples of a dataset that a view keeps: rows per block, in file order.

A `Selection` says of every block how many samples it keeps, which is what an `Order` is made over: the order
shuffles the kept samples only, and reads only blocks that hold some. Blocks kept whole or not at all cost
nothing more; of the others one bit a sample is kept, so no view of a billion samples is larger than 125 MB.
Selections are values: each operation gives a new one, and positions always count kept samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.spans import Ints

MOST_LISTED = 1 << 28
"""Samples of a block, at most, that are listed one by one: 2 GiB of row numbers."""
MOST_DRAWN = 1 << 33
"""Samples, at most, that are picked or split one by one: some minutes, and 1 GiB of bits a view."""
_NO_BITS = -1


def check_listed(num_samples: int) -> None:
    """Raise `MemoryError` for a block of more samples than may be listed, before anything is reserved."""
    if num_samples > MOST_LISTED:
        raise MemoryError(f"a block of {num_samples:,} samples, and at most {MOST_LISTED:,} are listed")


class Selection:
    """The kept samples of each block. Thread-safe.

    Args:
        total: [blocks] samples of each block, kept or not.
        rows: block -> its kept rows, ascending; None keeps the block whole. Other blocks keep nothing.
    """

    def __init__(self, total: Ints, rows: Mapping[int, Ints | None]) -> None:
        self.total = total
        """[blocks] samples of each block, kept or not."""
        self.num_samples = np.zeros(len(total), np.int64)
        """[blocks] kept samples of each block."""
        self._first_byte = np.full(len(total), _NO_BITS, np.int64)
        pieces, offset = [], 0
        for block, block_rows in sorted(rows.items()):
            size = int(total[block])
            self.num_samples[block] = size if block_rows is None else len(block_rows)
            if block_rows is None or len(block_rows) in (0, size):
                continue
            check_listed(size)
            mask = np.zeros(size, bool)
            mask[block_rows] = True
            pieces.append(np.packbits(mask))
            self._first_byte[block], offset = offset, offset + len(pieces[-1])
        self._bits = np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)
        for array in (self.num_samples, self._first_byte, self._bits):
            array.flags.writeable = False

    @classmethod
    def whole(cls, total: Ints) -> Selection:
        """Select every sample."""
        selection = cls(total, {})
        selection.num_samples = total
        return selection

    def __len__(self) -> int:
        return int(self.start[-1])

    @property
    def is_whole(self) -> bool:
        """Return whether every sample is kept."""
        return bool((self.num_samples == self.total).all())

    @cached_property
    def digest(self) -> str:
        """16 hex digits over what is kept."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.total, self.num_samples):
            digest.update(array.astype("<i8", copy=False).tobytes())
        digest.update(self._bits.tobytes())
        return digest.hexdigest()

    @property
    def lists_rows(self) -> bool:
        """Return whether the n-th kept sample of some block may be another row than its n-th."""
        return bool(len(self._bits))

    @cached_property
    def start(self) -> Ints:
        """[blocks + 1] kept samples before each block."""
        return np.concatenate(([0], np.cumsum(self.num_samples))).astype(np.int64)

    # ---- what is kept --------------------------------------------------------------------------------

    def rows(self, block: int) -> Ints:
        """Kept rows of a block, int64 [n] ascending."""
        check_listed(int(self.num_samples[block]))
        if self._first_byte[block] == _NO_BITS:
            return np.arange(self.num_samples[block])
        first, size = int(self._first_byte[block]), int(self.total[block])
        return np.flatnonzero(np.unpackbits(self._bits[first : first + -(-size // 8)], count=size))

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Block and row in the block of the kept samples at some positions, two int64 [n].

        Positions count the kept samples in file order. Raises `IndexError` outside [0, len).
        """
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < len(self):
            raise IndexError(f"positions must be in [0, {len(self)})")
        blocks = np.searchsorted(self.start, positions, side="right") - 1
        nth = positions - self.start[blocks]
        if not self.lists_rows:
            return blocks, nth
        used, ordinal = np.unique(blocks, return_inverse=True)
        return blocks, self.rows_of(used, ordinal, nth)

    def rows_of(self, blocks: Ints, ordinal: NDArray[np.integer], nth: Ints) -> Ints:
        """Row in its block of the `nth[i]`-th kept sample of `blocks[ordinal[i]]`, int64 [n]."""
        if not self.lists_rows:
            return nth
        parts = [self.rows(block) for block in blocks.tolist()]
        first = np.cumsum([0, *map(len, parts)])
        rows: Ints = np.concatenate([*parts, np.zeros(0, np.int64)])[first[ordinal] + nth]
        return rows

    # ---- smaller selections --------------------------------------------------------------------------

    def between(self, start: int, stop: int) -> Selection:
        """The kept samples at positions [start, stop), 0 <= start and stop <= len."""
        begin = np.maximum(self.start[:-1], start)
        end = np.minimum(self.start[1:], stop)
        rows: dict[int, Ints | None] = {}
        for block in np.flatnonzero(end > begin).tolist():
            first = int(self.start[block])
            all_of_it = self._is_whole(block) and end[block] - begin[block] == self.num_samples[block]
            span = slice(int(begin[block]) - first, int(end[block]) - first)
            if all_of_it:
                rows[block] = None
            elif self._first_byte[block] == _NO_BITS:  # the rows asked for alone are listed
                rows[block] = np.arange(span.start, span.stop)
            else:
                rows[block] = self.rows(block)[span]
        return Selection(self.total, rows)

    def at(self, positions: Ints) -> Selection:
        """The kept samples at these positions, strictly ascending."""
        blocks, row = self.locate(positions)
        used, first = np.unique(blocks, return_index=True)
        rows = np.split(row, first[1:]) if len(used) else []
        return Selection(self.total, dict(zip(used.tolist(), rows, strict=True)))

    def where(self, keep: Callable[[int, Ints], NDArray[np.bool_]]) -> Selection:
        """The kept samples that a function of (block, its kept rows) says True to; called block by block."""
        rows: dict[int, Ints | None] = {}
        for block in np.flatnonzero(self.num_samples).tolist():
            block_rows = self.rows(block)
            mask = keep(block, block_rows)
            if mask.any():
                rows[block] = None if mask.all() and self._is_whole(block) else block_rows[mask]
        return Selection(self.total, rows)

    def of_blocks(self, blocks: NDArray[np.bool_]) -> Selection:
        """The kept samples of some blocks; bool [blocks]."""
        used = np.flatnonzero(blocks & (self.num_samples > 0)).tolist()
        return Selection(self.total, {b: None if self._is_whole(b) else self.rows(b) for b in used})

    def _is_whole(self, block: int) -> bool:
        return bool(self.num_samples[block] == self.total[block])


class SelectedOrder(Order):
    """An order over the samples that a selection keeps.

    Positions and `samples` count kept samples only, rows in `window_samples` those of the stored blocks: what
    whoever stages blocks needs.

    Args:
        selection: what to order.
        shuffle, seed, epoch: see `Order`.
    """

    def __init__(self, selection: Selection, shuffle: Shuffle, *, seed: int, epoch: int) -> None:
        super().__init__(selection.num_samples, shuffle, seed=seed, epoch=epoch)
        self.selection = selection

    def window_samples(self, window: int, indices: Ints | None = None) -> tuple[NDArray[np.int32], Ints]:
        """Block ordinal int32 [k], and row in the stored block int64 [k], of each index or of those given."""
        ordinal, nth = super().window_samples(window, indices)
        return ordinal, self.selection.rows_of(self.window_blocks(window), ordinal, nth)

    def rows_at(self, positions: Ints) -> tuple[Ints, Ints]:
        """Block, and row in the stored block, of the sample at each position, two int64 [n]."""
        return self.selection.locate(super().samples(positions))
