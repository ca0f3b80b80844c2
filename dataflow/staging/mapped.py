"""Windows of local files whose values lie in the stored bytes: mapped, not read.

The page cache holds a local shard's bytes anyway; staging them would copy them a second time. Such a window
maps its blocks, waits for their pages, and notes where each value lies; a batch is then one copy by the
kernel from the page cache to its slot (`prefetch.memory.mapping` says why by the kernel). Only numbers that
must be parsed are copied out when the window is staged, all at once.

For files that a plain `mmap` serves; everything else is staged (`dataflow.staging.window`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.decode.values import BadRows
from dataflow.staging.columns import StagedArray, StagedOutput, StagedSpans
from dataflow.staging.source import Source
from dataflow.staging.window import NotLocatableError, StagedWindow
from prefetch.memory.arena import Arena
from prefetch.memory.iovec import copy_mapped
from prefetch.memory.leases import Lease
from prefetch.memory.mapping import MappedShard, can_map, will_need
from sharding.blocks import Spans
from sharding.cached_property import cached_property
from sharding.errors import DataflowError


def can_map_windows(source: Source) -> bool:
    """Whether this dataset's windows may be mapped: local files whose values lie in the stored bytes.

    Blocks with checksums are read, because all their bytes must be seen before any is used.
    """
    if source.catalog.checksums is not None:
        return False
    first = int(np.flatnonzero(source.catalog.blocks.num_samples)[0])
    return can_map(source.catalog.shard(0).url) and source.locates(source.catalog.block(first))


class MappedWindow(StagedWindow):
    """A window over mapped blocks.

    Args:
        numbers: [b] numbers of the blocks, in read order.
        rows: as for `StagedWindow`; rows count over whole blocks.
        wanted: rows that this rank takes; None for all.
        whole: whether all pages are waited for; else only those of the rows wanted are asked for.
        num_readers: threads that map the blocks.

    Raises `NotLocatableError` where the format cannot tell where values lie.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        numbers: NDArray[np.int64],
        rows: NDArray[np.int64],
        *,
        wanted: NDArray[np.int64] | None,
        whole: bool = True,
        num_readers: int = 1,
    ) -> None:
        found = [source.found(number) for number in numbers.tolist()]
        located = [spans for _, spans in found if spans is not None]
        if len(located) < len(found):
            raise NotLocatableError(f"format {source.format.name} cannot tell where values lie")
        super().__init__(source, arena, [block for block, _ in found], rows)
        self.mapped = True
        self._wanted, self._whole = wanted, whole
        self._located = located
        self._shards: list[MappedShard | None] = [None] * len(self.blocks)
        first = {block.shard.url: i for i, block in reversed(list(enumerate(self.blocks)))}
        self._checked_by = set(first.values())
        self._lock = threading.Lock()  # guards _tasks_left
        self._tasks_left = min(num_readers, len(self.blocks))

    def _bound(self, num_readers: int) -> int:
        copied = [output for output in self.source.outputs if not output.stays_in_place]
        arrays = sum(output.staged_bytes(self.num_rows) for output in copied)
        return int(self._sizes.sum()) + arrays + 16 * self.num_rows * len(self.source.columns)

    def reads(self) -> Sequence[Callable[[], None]]:
        """One task a thread: to map a block takes less time than to wake a thread."""
        for output in self.source.outputs:
            if not output.stays_in_place:
                self.staged[output.name] = output.stage(self.num_rows, self.arena)
        tasks, ordinals = self._tasks_left, range(len(self.blocks))
        return [partial(self._map, ordinals[i::tasks]) for i in range(tasks)]

    # ---- on reader threads ------------------------------------------------------------------------------

    def _map(self, ordinals: range) -> None:
        for ordinal in ordinals:
            self._map_block(ordinal)
        with self._lock:
            self._tasks_left -= 1
            last = self._tasks_left == 0
        if last:
            self._stage_rest()

    def _map_block(self, ordinal: int) -> None:
        block = self.blocks[ordinal]
        mapped = self.source.mappings.get(block.shard)
        self._shards[ordinal] = mapped
        if ordinal in self._checked_by:
            mapped.check()
        if self._whole:
            self.source.mappings.populate(mapped, block.offset, block.length)
        self.source.traffic.add(block.length, block.nbytes)

    def _stage_rest(self) -> None:
        """What the whole window needs at once, by the thread that mapped the last block."""
        for output in self.source.outputs:
            if output.stays_in_place:
                self.staged[output.name] = self._spans_of(output.sources[0])
        rows = np.arange(self.num_rows) if self._wanted is None else self._wanted
        if not self._whole:
            for staged in self.staged.values():
                if isinstance(staged, StagedSpans):
                    will_need(staged.addresses[rows], staged.lengths[rows])
        for output in self.source.outputs:
            if not output.stays_in_place:
                self._parse(output, rows)

    def _parse(self, output: StagedOutput, rows: NDArray[np.int64]) -> None:
        """Numbers of the rows wanted; those of whole blocks only once, where they can be remembered."""
        staged = self.staged[output.name]
        assert isinstance(staged, StagedArray)
        known = (
            self.source.numbers(output.name, staged) if self._whole else None
        )  # else few rows of many blocks
        if known is not None:
            rows = self._fill(staged, known)
            if not len(rows):
                return
        values, bad = self._parsed(staged, output.sources[0], rows)
        staged.values[rows] = values
        staged.bad.update((int(rows[row]), reason) for row, reason in bad)
        if known is not None:
            self._remember(staged, known)

    def _parsed(
        self, staged: StagedArray, name: str, rows: NDArray[np.int64]
    ) -> tuple[NDArray[Any], BadRows]:
        assert staged.parse is not None
        column = self._spans_of(name)
        buffer, places = self.fetch(column, rows, name)
        return staged.parse(Spans(buffer, places, column.lengths[rows]))

    def _spans_of(self, name: str) -> StagedSpans:
        """Where the values of a column lie in the mappings."""
        if name == "__url__" or not self._located:
            spans = StagedSpans(np.zeros(self.num_rows, np.int64), np.full(self.num_rows, -1, np.int64))
            for ordinal in range(len(self.blocks)):
                spans.put(int(self.first_row[ordinal]), [self._urls(ordinal)])
            return spans
        bases = [
            m.address + b.offset for m, b in zip(self._shards, self.blocks, strict=True) if m is not None
        ]
        starts = np.concatenate([found[name].starts for found in self._located])
        starts += np.repeat(bases, np.diff(self.first_row))
        return StagedSpans(starts, np.concatenate([found[name].lengths for found in self._located]))

    def _fill(self, staged: StagedArray, known: dict[int, NDArray[Any]]) -> NDArray[np.int64]:
        """Take what is known; gives the rows of the blocks that are not."""
        unknown = [np.zeros(0, np.int64)]
        for ordinal, block in enumerate(self.blocks):
            first, last = int(self.first_row[ordinal]), int(self.first_row[ordinal + 1])
            values = known.get(block.first_sample)
            if values is None:
                unknown.append(np.arange(first, last))
            else:
                staged.values[first:last] = values
        return np.concatenate(unknown)

    def _remember(self, staged: StagedArray, known: dict[int, NDArray[Any]]) -> None:
        bad = np.array(sorted(staged.bad), np.int64)
        for ordinal, block in enumerate(self.blocks):
            first, last = int(self.first_row[ordinal]), int(self.first_row[ordinal + 1])
            if not ((bad >= first) & (bad < last)).any():
                known[block.first_sample] = staged.values[first:last].copy()

    # ---- for the builder --------------------------------------------------------------------------------

    @cached_property
    def _leases(self) -> set[Lease | None]:
        return {shard.lease for shard in self._shards if shard is not None}

    @property
    def may_load(self) -> bool:
        """While all its files are leased. To be asked inside `FileLeases.loading`."""
        return all(lease is not None and lease.held for lease in self._leases)

    def copy_values(
        self, spans: StagedSpans, rows: NDArray[np.int64], out: NDArray[np.uint8], column: str
    ) -> None:
        """Copy the values of rows, one after the other, straight from the page cache."""
        done = copy_mapped(spans.pieces[rows], out, spans.uniform_bytes)
        if done < len(rows):
            raise self.truncated(int(rows[done]), column)

    def buffer_of(
        self, spans: StagedSpans, rows: NDArray[np.int64], column: str
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """A private copy of the values: only the kernel may touch mapped pages."""
        return self.fetch(spans, rows, column)

    def verify(self) -> None:
        """Raise `ShardChangedError` if a shard was written in place since it was indexed."""
        seen: set[str] = set()
        for mapped in self._shards:
            if mapped is not None and mapped.shard.url not in seen:
                seen.add(mapped.shard.url)
                mapped.check()

    def close(self) -> None:
        """Leave the pages to the page cache."""
        super().close()
        for mapped, block in zip(self._shards, self.blocks, strict=False):
            if mapped is not None:
                self.source.mappings.leave(mapped, block.offset, block.length)
        self._shards, self._located = [], []

    def _key(self, ordinal: int, in_block: int) -> str:
        block = self.blocks[ordinal]
        if self.source.format.has_keys:
            with suppress(DataflowError):
                data = np.empty(block.length, np.uint8)
                self.source.reader.read_into(block.shard, block.offset, data)
                return self.source.format.keys(block, data.data)[in_block]
        return str(block.first_in_shard + in_block)
