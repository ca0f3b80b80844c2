"""The positions of the values of a source's blocks in their shards, and the numbers that were parsed of them.

Both are remembered from one epoch to the next while those of the whole source fit a fixed size, in arrays by
sample: a window takes its part of them in one step, however many blocks it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sharding.blocks import Block, Format, Spans
from sharding.cached_property import cached_property
from sharding.catalog.table import Catalog
from sharding.order.windows import ranges
from sharding.spans import Ints

_REMEMBERED_BYTES = 64 << 20
_REMEMBERED_BLOCKS = 1 << 16
Located = tuple[Ints, Ints]
"""The first byte of each row's value in its shard, and how many; -1: it has none."""


class ParsedNumbers:
    """The numbers of one column, by sample. Thread-safe: who parses a block at once writes the same."""

    def __init__(self, num_blocks: int, values: NDArray[Any]) -> None:
        self.values = values
        """[samples, ...], of blocks that are known."""
        self._is_known = np.zeros(num_blocks, np.bool_)
        # Whoever sees under it that a block is known sees its numbers, too: writes may be seen in any order.
        self._lock = threading.Lock()  # guards _is_known

    def known(self, blocks: Ints) -> NDArray[np.bool_]:
        """[b] Whether the numbers of each block are there."""
        with self._lock:
            known: NDArray[np.bool_] = self._is_known[blocks]
            return known

    def note_known(self, blocks: Ints) -> None:
        """The numbers of these blocks have been written."""
        with self._lock:
            self._is_known[blocks] = True


class ValueLocator:
    """Finds blocks and where their values lie. Thread-safe: threads that find a block at once find the same.

    Args:
        catalog: of the source.
        codec: tells where values lie.
        columns: whose values are asked for.
    """

    def __init__(self, catalog: Catalog, codec: Format, columns: Sequence[str]) -> None:
        self._catalog, self._codec, self._columns = catalog, codec, columns
        num_samples = catalog.num_samples
        self._is_remembered = (
            16 * num_samples * len(columns) <= _REMEMBERED_BYTES and catalog.num_blocks <= _REMEMBERED_BLOCKS
        )
        self._blocks: dict[int, Block] = {}
        self._parsed: dict[str, ParsedNumbers] = {}
        num_kept = num_samples if self._is_remembered else 0
        # Pages of it are there once they are written.
        self._starts, self._lengths = (
            {column: np.zeros(num_kept, np.int64) for column in columns} for _ in range(2)
        )

    def of_blocks(self, numbers: Ints) -> LocatedBlocks | None:
        """Some blocks, [b] numbers, and where their values lie; None where the format cannot tell."""
        number_list = numbers.tolist()
        if self._is_remembered:
            for number in number_list:
                if number not in self._blocks and not self._remember(number):
                    return None
            return LocatedBlocks([self._blocks[number] for number in number_list], numbers, self._remembered)
        blocks = [self._catalog.block(number) for number in number_list]
        located = [self._codec.locate(block, self._columns) for block in blocks]
        spans = [columns for columns in located if columns is not None]
        if len(spans) < len(blocks):
            return None
        return LocatedBlocks(blocks, numbers, lambda name, _: _side_by_side(blocks, spans, name))

    def _remember(self, number: int) -> bool:
        """Find a block; whether the format can tell where its values lie."""
        block = self._catalog.block(number)
        spans = self._codec.locate(block, self._columns)
        if spans is None:
            return False
        samples = slice(block.first_sample, block.first_sample + block.num_samples)
        for column in self._columns:
            self._starts[column][samples] = spans[column].starts + block.offset
            self._lengths[column][samples] = spans[column].lengths
        self._blocks[number] = block  # at last: from now on its values are located for all threads
        return True

    def parsed(self, column: str, like: NDArray[Any]) -> ParsedNumbers | None:
        """The numbers of a column, whose rows are `like` these; None where all are too many."""
        if self._catalog.num_samples * like[:1].nbytes > _REMEMBERED_BYTES:
            return None
        known = self._parsed.get(column)
        if known is None:
            values = np.zeros((self._catalog.num_samples, *like.shape[1:]), like.dtype)
            known = self._parsed.setdefault(column, ParsedNumbers(self._catalog.num_blocks, values))
        return known

    def _remembered(self, column: str, samples: Ints) -> Located:
        return self._starts[column][samples], self._lengths[column][samples]


def _side_by_side(blocks: Sequence[Block], spans: Sequence[dict[str, Spans]], column: str) -> Located:
    """Return where values of all samples of some blocks lie, given where they lie in each."""
    starts = [columns[column].starts + block.offset for columns, block in zip(spans, blocks, strict=True)]
    lengths, none = [columns[column].lengths for columns in spans], np.zeros(0, np.int64)
    return np.concatenate([none, *starts]), np.concatenate([none, *lengths])


class LocatedBlocks(Struct, frozen=True, dict=True):
    """Some blocks of a source, one after the other, and where their values lie."""

    blocks: list[Block]
    numbers: Ints
    """[b] of the blocks."""
    column: Callable[[str, Ints], Located]
    """The name of a column, and `samples` -> the place of each row's value, new arrays."""

    @cached_property
    def counts(self) -> Ints:
        """[b] number of samples of each."""
        return np.array([block.num_samples for block in self.blocks], np.int64)

    def samples(self) -> Ints:
        """[rows] of each row, its number in the source; made anew, to be dropped when all is staged."""
        first = np.array([block.first_sample for block in self.blocks], np.int64)
        return ranges(first, self.counts)
