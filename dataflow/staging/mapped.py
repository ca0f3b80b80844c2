"""Windows of local files whose values lie in the stored bytes: mapped, not read.

The page cache holds a local shard's bytes anyway; staging them would copy them a second time. Such a window
maps its blocks, waits for their pages, and notes where each value lies; a batch is then one copy by the
kernel from the page cache to its slot (`prefetch.memory.mapping` says why by the kernel). Only numbers that
must be parsed are copied out when the window is staged, all at once.

For files that a plain `mmap` serves; everything else is staged (`dataflow.staging.reading`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import numpy as np

from dataflow.staging.block_source import BlockSource
from dataflow.staging.columns import ALIGN, StagedOutput, StagedSpans
from dataflow.staging.window import FileParts, NotLocatableError, RowFraction, StagedWindow, WindowSamples
from prefetch.core.copy_table import PlanColumn
from prefetch.core.kernels import kernels
from prefetch.memory.arena import Arena
from prefetch.memory.guards import FileGuard
from prefetch.memory.mapping import MappedShard, will_need
from prefetch.memory.open_files import MOST_OPEN, OpenFile
from sharding.blocks import Spans
from sharding.cached_property import cached_property
from sharding.spans import Bytes, Ints


class WindowOfFiles(StagedWindow):
    """A window of which some blocks, or all, are mapped while it is open."""

    def __init__(self, source: BlockSource, arena: Arena, samples: WindowSamples, rows: Ints) -> None:
        super().__init__(source, arena, samples, rows)
        self._shards: list[MappedShard | None] = [None] * len(samples.blocks)
        """[b] of blocks that are mapped."""

    @cached_property
    def _guards(self) -> set[FileGuard | None]:
        return {shard.guard for shard in self._shards if shard is not None}

    @property
    def may_load(self) -> bool:
        """While all its files are guarded. To be asked inside `FileGuards.loading`."""
        return all(guard is not None and guard.held for guard in self._guards)

    def buffer_of(self, spans: StagedSpans, owners: Ints, column: str) -> tuple[Bytes, Ints]:
        """A copy of values, and the start of each in it: only the kernel may touch mapped pages.

        Where no block is mapped, there is nothing to copy. Raises `ShardReadError` for one whose bytes are
        gone.
        """
        if not any(self._shards):
            return super().buffer_of(spans, owners, column)
        lengths = np.maximum(spans.lengths, 0)
        ends = np.cumsum(lengths)
        nbytes = int(ends[-1]) if len(ends) else 0
        # A slab of the arena, not fresh memory: first touches cost more than the copy.
        buffer = self.arena.lease(nbytes or 1)[:nbytes]
        starts = ends - lengths
        copies = PlanColumn(
            name=column, index=spans.addresses, lengths=lengths, offsets=starts, out=buffer, may_load=False
        )
        lost = np.flatnonzero(kernels().run(len(owners), [copies]))
        if len(lost):
            raise self.truncated(int(owners[lost[0]]), column)
        return buffer, starts

    @contextmanager
    def values_of(self, spans: StagedSpans, owners: Ints, column: str) -> Iterator[tuple[Bytes, Ints]]:
        """See `StagedWindow`: the values where they lie, while all files are guarded; else a copy."""
        with self.source.mappings.loading():
            is_loaded = self.may_load
            if is_loaded:
                yield super().buffer_of(spans, owners, column)
        if not is_loaded:
            yield self.buffer_of(spans, owners, column)

    def verify(self) -> None:
        """Raise `ShardChangedError` if a shard was written in place since it was indexed."""
        for mapped in set(self._shards):
            # While its guard is held, nobody has written to it, and what is mapped is what was compared.
            if mapped is not None and not (mapped.guard and mapped.guard.held):
                mapped.check()

    def _release(self) -> None:
        shards = zip(self._shards, self.samples.blocks, strict=False)
        # Their pages are left to the page cache.
        self.source.mappings.release([(s, b.offset, b.length) for s, b in shards if s is not None])
        self._shards = []


class MappedWindow(WindowOfFiles):
    """A window over mapped blocks.

    Args:
        numbers: [b] numbers of the blocks, in read order.
        rows: as for `StagedWindow`.
        share: how many of the rows are taken; where few are, only their pages are asked for, else all are
            waited for.
        num_readers: threads that map the blocks.

    Raises `NotLocatableError` where the format cannot tell where values lie.
    """

    mapped: ClassVar[bool] = True

    def __init__(
        self,
        source: BlockSource,
        arena: Arena,
        numbers: Ints,
        rows: Ints,
        *,
        share: RowFraction,
        num_readers: int = 1,
    ) -> None:
        located = source.locator.of_blocks(numbers)
        if located is None:
            raise NotLocatableError(f"format {source.format.name} cannot tell where values lie")
        blocks = located.blocks
        super().__init__(source, arena, WindowSamples(source.first_number, blocks), rows)
        self._share, self._whole, self._located = share, share != "few", located
        self._lock = threading.Lock()  # guards _tasks_left
        self._tasks_left = min(num_readers, len(blocks))
        num_rows = self.samples.num_rows
        copied = [output.staged_bytes(num_rows) for output in source.outputs if not output.stays_in_place]
        pages = sum(-(-block.length // ALIGN) * ALIGN for block in blocks)
        self.nbytes = pages + sum(copied) + 16 * num_rows * len(source.columns)

    def reads(self) -> Sequence[Callable[[], None]]:
        """One task a thread: to map a block takes less time than to wake a thread."""
        for output in self.source.outputs:
            if not output.stays_in_place:
                self.staged[output.name] = output.stage(self.samples.num_rows, self.arena)
        tasks, ordinals = self._tasks_left, range(len(self.samples.blocks))
        return [partial(self._map, ordinals[i::tasks]) for i in range(tasks)]

    def _map(self, ordinals: range) -> None:
        part = slice(ordinals.start, ordinals.stop, ordinals.step)
        blocks = self.samples.blocks[part]
        ranges = [(block.shard, block.offset, block.length) for block in blocks]
        self._shards[part] = self.source.mappings.hold(ranges, brings_pages=self._whole)
        if self._whole:
            self.source.traffic.add(sum([b.length for b in blocks]), sum([b.nbytes for b in blocks]))
        with self._lock:
            self._tasks_left -= 1
            is_last = self._tasks_left == 0
        if is_last:
            self._stage_rest()

    def _stage_rest(self) -> None:
        """Stage what the whole window needs at once, in the thread that mapped the last block."""
        rows = np.arange(self.samples.num_rows) if self._share == "all" else self.rows[self.rows >= 0]
        rows = rows if self._whole else np.unique(rows)
        samples = self._located.samples()
        for output in self.source.outputs:
            if output.stays_in_place:
                spans = self.staged[output.name] = self._spans_of(output.sources[0], samples)
                if not self._whole:
                    will_need(spans.addresses[rows], spans.lengths[rows])
        for output in self.source.outputs:
            if not output.stays_in_place:
                self._parse(output, rows, samples)
        if not self._whole:
            lengths = [self._located.column(name, samples)[1][rows] for name in self.source.columns]
            nbytes = sum(int(np.maximum(column, 0).sum()) for column in lengths)
            self.source.traffic.add(nbytes, nbytes)

    def _parse(self, output: StagedOutput, rows: Ints, samples: Ints) -> None:
        """Parse the numbers of the rows; those of whole blocks only once, where they can be remembered."""
        staged, column = self.array(output.name), output.sources[0]
        parsed = None
        if self._whole:  # else few rows of many blocks
            parsed = self.source.locator.parsed(output.name, staged.values)
        if parsed is not None:
            is_known = parsed.known(self._located.numbers)
            np.take(parsed.values, samples, axis=0, out=staged.values, mode="clip")
            if is_known.all():
                return
            rows = np.flatnonzero(np.repeat(~is_known, self._located.counts))
        spans = self._spans_of(column, samples).of(rows)
        buffer, starts = spans.addresses[:0].view(np.uint8), spans.addresses
        if output.takes_bytes:
            buffer, starts = self.buffer_of(spans, rows, column)
        staged.values[rows], bad = staged.parsed(Spans(buffer, starts, spans.lengths))
        staged.bad.update((int(rows[index]), reason) for index, reason in bad)
        if parsed is not None:
            parsed.values[samples[rows]] = staged.values[rows]
            has_bad = np.zeros(len(self._located.numbers), np.bool_)
            has_bad[np.array([self.samples.find(row)[0] for row in staged.bad], np.int64)] = True
            parsed.note_known(self._located.numbers[~has_bad])  # bad rows are to be found anew

    def _spans_of(self, name: str, samples: Ints) -> StagedSpans:
        """Return where the values of a column lie in the mappings."""
        if name == "__url__":
            num_rows = self.samples.num_rows
            spans = StagedSpans(np.zeros(num_rows, np.int64), np.full(num_rows, -1, np.int64))
            for ordinal in range(len(self.samples.blocks)):
                spans.put(self.samples.rows_of(ordinal).start, [self._constant(ordinal, name)])
            return spans
        addresses, lengths = self._located.column(name, samples)
        bases = np.array([mapped.address for mapped in self._shards if mapped is not None], np.int64)
        addresses += np.repeat(bases, self._located.counts)
        return StagedSpans(addresses, lengths)

    @cached_property
    def _files(self) -> tuple[list[OpenFile], Ints, Ints]:
        """Its files, which are all guarded; which of them has each block; and where each is mapped."""
        shards = [shard for shard in self._shards if shard is not None and shard.open_file is not None]
        numbers = {shard: number for number, shard in enumerate(dict.fromkeys(shards))}
        files = [shard.open_file for shard in numbers if shard.open_file is not None]
        bases = np.array([shard.address for shard in numbers], np.int64)
        return files, np.array([numbers[shard] for shard in shards], np.int64), bases

    def in_files(self, column: str, rows: Ints) -> FileParts | None:
        """See `StagedRows.in_files`: while all its files are guarded, which keeps them open."""
        spans = self.staged[column]
        if column == "__url__" or not isinstance(spans, StagedSpans) or not self.may_load:
            return None
        files, file_of_block, bases = self._files
        of_rows = file_of_block[self.samples.ordinals(rows)]
        used, numbers = np.unique(of_rows, return_inverse=True)
        if len(used) > MOST_OPEN:
            return None
        return FileParts(
            [files[number] for number in used.tolist()], numbers, spans.addresses[rows] - bases[of_rows]
        )
