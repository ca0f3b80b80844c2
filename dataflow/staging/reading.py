"""Windows whose bytes are read: whole blocks, or only the values of the rows asked for.

Formats whose values lie in the stored bytes (`Format.locate`) are read into one contiguous region of the
arena and keep only addresses; a batch of fixed-size rows is then one gather over absolute offsets, whichever
shards its samples come from. Blocks of other formats are decoded; local files are mapped for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.staging.block_source import BlockSource
from dataflow.staging.columns import ALIGN, StagedOutput
from dataflow.staging.mapped import WindowOfFiles
from dataflow.staging.window import NotLocatableError, StagedWindow, WindowSamples
from prefetch.addresses import memory_at
from prefetch.memory.arena import Arena, rounded_bytes
from prefetch.memory.mapping import can_map
from prefetch.store.ranges import MOST_BYTES, coalesce
from sharding.blocks import Block, Column, Columns, Masked, Spans
from sharding.errors import CorruptShardError
from sharding.spans import Bytes, Ints
from sharding.urls import is_local

_TASK_BYTES, _MOST_A_TASK, _LEAST_TASKS = 1 << 20, 16, 4
"""Bytes and reads of a task that reads several small files, at most; tasks of a reader, at least."""
_LEAST_MAPPED = 1 << 20
"""Bytes from which on a file of one sample is mapped: to guard, map and unmap one takes 50 microseconds."""


class ReadWindow(WindowOfFiles):
    """A window that reads whole blocks; those of local files that are decoded are mapped where that can be.

    Args:
        numbers: [b] numbers of the blocks to stage, in read order.
        rows: as for `StagedWindow`.
        num_readers: threads that will read.
        keeps_mapped: whether values may stay in mapped files; else such blocks are read.
    """

    holds_blocks = True

    def __init__(
        self,
        source: BlockSource,
        arena: Arena,
        numbers: Ints,
        rows: Ints,
        *,
        num_readers: int = 1,
        keeps_mapped: bool = True,
    ) -> None:
        blocks = source.blocks(numbers)
        super().__init__(source, arena, WindowSamples(source.first_number, blocks), rows)
        self._data: list[memoryview | None] = [None] * len(blocks)
        self._region: Bytes | None = None
        self._num_readers = num_readers
        self._in_region = bool(blocks) and source.locates(numbers)
        self._keeps_blocks = self._in_region or any(output.stays_in_place for output in source.outputs)
        self._decodes_in_place = not self._in_region and (
            not self._keeps_blocks or (keeps_mapped and source.may_map)
        )
        columns = sum(output.staged_bytes(self.samples.num_rows) for output in source.outputs)
        self._clip_rows = np.unique(rows[rows >= 0]) if source.clips else np.zeros(0, np.int64)
        # How much a clip needs, only its file tells: credits are for what it needs on average.
        each = sum(output.clip_bytes or 0 for output in source.clips)
        self.nbytes = columns + self._block_bytes(num_readers) + each * len(self._clip_rows)

    def _block_bytes(self, num_readers: int) -> int:
        """Bytes of stored and decoded blocks that are held at one time, at most."""
        blocks = self.samples.blocks
        if self._in_region:
            return rounded_bytes(sum(_aligned(block.length) for block in blocks))
        sizes = sorted((block.length + block.nbytes for block in blocks), reverse=True)
        return sum(sizes if self._keeps_blocks else sizes[:num_readers])

    def reads(self) -> Sequence[Callable[[], None]]:
        """One task a request: a block, or neighbours of one shard, which together are one range.

        A task reads several small files of this machine, one after the other: to hand over a task takes as
        long as to read one.
        """
        for output in self.source.outputs:
            self.staged[output.name] = output.stage(self.samples.num_rows, self.arena)
        sizes = np.array([_aligned(block.length) for block in self.samples.blocks], np.int64)
        if self._in_region:
            self._region = self.arena.lease(int(sizes.sum()) or 1)
        starts = (np.cumsum(sizes) - sizes).tolist()
        reads = [(blocks, starts[blocks.start]) for blocks in self._requests()]
        size = self._reads_a_task(reads)
        return [partial(self._read_all, reads[i : i + size]) for i in range(0, len(reads), size)]

    def _reads_a_task(self, reads: Sequence[tuple[range, int]]) -> int:
        """Return how many reads are one task: all readers have several, of few bytes and of local files."""
        blocks = self.samples.blocks
        most = min(_MOST_A_TASK, len(reads) // (_LEAST_TASKS * self._num_readers))
        if most < 2 or not all(is_local(block.shard.url) for block in blocks):
            return 1
        if self._decodes_in_place:
            return most
        return max(1, min(most, _TASK_BYTES * len(blocks) // (1 + sum(block.length for block in blocks))))

    def _read_all(self, reads: Sequence[tuple[range, int]]) -> None:
        memory, blocks = self._region, [self.samples.blocks[ordinals.start] for ordinals, _ in reads]
        if memory is None and self._keeps_blocks and len(reads) > 1 and all(map(_is_small_file, blocks)):
            ends = np.cumsum([_aligned(block.length) for block in blocks]).tolist()
            memory = self.arena.lease(ends[-1] or 1)
            reads = [(ordinals, start) for (ordinals, _), start in zip(reads, [0, *ends[:-1]], strict=True)]
        for ordinals, start in reads:
            self._read(ordinals, start, memory)

    def _requests(self) -> list[range]:
        """The blocks of each request.

        Neighbours come together where they lie side by side in the region, too (not where one is filled up to
        the next boundary), have no checksums, and no cache keeps each for itself.
        """
        requests: list[range] = []
        joins = self._in_region and self.source.cache is None
        nbytes = 0
        before: Block | None = None
        for i, block in enumerate(self.samples.blocks):
            nbytes += _aligned(block.length)
            if joins and before is not None and nbytes <= MOST_BYTES and _adjoin(before, block):
                requests[-1] = range(requests[-1].start, i + 1)
            else:
                requests.append(range(i, i + 1))
                nbytes = _aligned(block.length)
            before = block
        return requests

    def _read(self, ordinals: range, start: int, memory: Bytes | None) -> None:
        blocks = self.samples.blocks[ordinals.start : ordinals.stop]
        if self._decodes_in_place and self._decode_in_place(ordinals.start):
            return
        length = sum(block.length for block in blocks)
        data = self.arena.lease(length) if memory is None else memory[start : start + length]
        first = blocks[0]
        self.source.read_into(first.shard, first.offset, data, checksum=first.checksum, awaited=self._awaited)
        for ordinal, block in zip(ordinals, blocks, strict=True):
            begin = block.offset - first.offset
            block_data = data[begin : begin + block.length].data
            self._put(ordinal, block, block_data, self.source.column_reader.decode(block, block_data))

    def _decode_in_place(self, ordinal: int) -> bool:
        """Decode a block of a local file where it lies; it stays mapped while values are views of it.

        False where no guard keeps the file as it is.
        """
        block, source = self.samples.blocks[ordinal], self.source
        if not can_map(block.shard.url) or block.checksum is not None or _is_small_file(block):
            return False
        mapped = source.mappings.hold([(block.shard, block.offset, block.length)])[0]
        stays = False
        try:
            with source.mappings.loading():
                if mapped.guard is None or not mapped.guard.held:
                    return False
                data = memory_at(mapped.address + block.offset, block.length, mapped).data
                columns = source.column_reader.decode(block, data)
                self._put(ordinal, block, None, columns)
                stays = self._keeps_blocks and self._has_views(columns, data)
                return True
        finally:
            if stays:
                self._shards[ordinal] = mapped
            else:
                source.mappings.release([(mapped, block.offset, block.length)])

    def _has_views(self, columns: Columns, data: memoryview) -> bool:
        """Return whether values that a window keeps where they are lie in a block's bytes."""
        stored = np.frombuffer(data, np.uint8)
        names = [name for output in self.source.outputs if output.stays_in_place for name in output.sources]
        staged_columns = [columns[name] for name in names if name in columns]
        return any(np.may_share_memory(_memory_of(column), stored) for column in staged_columns)

    def _put(self, ordinal: int, block: Block, data: memoryview | None, columns: Columns) -> None:
        """Stage what a block was decoded to; `data`: its bytes, where they stay."""
        self._data[ordinal] = data
        for output in self.source.outputs:
            for name in output.sources:
                if name in columns and not output.takes(columns[name]):
                    reason = f"column {name!r} is not what the catalog says; index the shards again"
                    raise CorruptShardError(block.shard.url, reason, block.offset, stage="decode")
        self.source.traffic.add(block.length, block.nbytes)
        self._stage(ordinal, columns)
        if not self._keeps_blocks:
            self._data[ordinal] = None
        if self.source.clips:
            rows = self.samples.rows_of(ordinal)
            clips = slice(*np.searchsorted(self._clip_rows, [rows.start, rows.stop]))
            self.cut_clips(self._clip_rows[clips])

    def _release(self) -> None:
        super()._release()
        self._data = [None] * len(self._data)
        self._region = None

    def _stored(self, ordinal: int) -> memoryview | None:
        data = self._data[ordinal]
        return super()._stored(ordinal) if data is None and self._keeps_blocks else data


_LEAST_CUT_BYTES = 256 << 10
"""Shorter values are read whole, with their neighbours, though parts would do."""


class SparseWindow(StagedWindow):
    """A window that reads only the values of the rows asked for: random access and `Shuffle("full")` use it.

    Its own rows are those alone, block by block, each once.

    Args:
        numbers: [b] numbers of the blocks that hold them, in read order.
        rows: [k] the rows asked for, counting the samples of all blocks through; -1 for none.

    Raises `NotLocatableError` where the format cannot tell where values lie.
    """

    def __init__(self, source: BlockSource, arena: Arena, numbers: Ints, rows: Ints) -> None:
        blocks, used_rows = source.blocks(numbers), np.unique(rows[rows >= 0])
        first = np.cumsum([0, *(block.num_samples for block in blocks[:-1])])
        by_block = np.split(used_rows, np.searchsorted(used_rows, first[1:]))
        rows_in_block = [part - start for part, start in zip(by_block, first.tolist(), strict=True)]
        own_rows = np.where(rows < 0, -1, np.searchsorted(used_rows, rows))
        super().__init__(source, arena, WindowSamples(source.first_number, blocks, rows_in_block), own_rows)
        self._region: Bytes | None = None
        self._spans = [self._locate(block, part) for block, part in zip(blocks, rows_in_block, strict=True)]
        self._parts = [
            (output, ordinal, row)
            for output in source.parts
            for ordinal, spans in enumerate(self._spans)
            for row in np.flatnonzero(self._is_long(spans[output.sources[0]])).tolist()
        ]
        self._ranges = [self._joined(self._read_whole(spans)) for spans in self._spans]
        self._sizes = np.array([_aligned(lengths).sum() for _, lengths, _ in self._ranges], np.int64)
        columns = sum(output.staged_bytes(self.samples.num_rows) for output in source.outputs)
        # What is cut of a value is no longer than it; how much it is, only the value tells.
        parts = (self._spans[ordinal][output.sources[0]].lengths[row] for output, ordinal, row in self._parts)
        self.nbytes = rounded_bytes(int(self._sizes.sum())) + columns + sum(map(int, parts))

    @staticmethod
    def _is_long(spans: Spans) -> NDArray[np.bool_]:
        """Return which values are cut where parts will do: a few requests cost more than a short value."""
        return spans.lengths > _LEAST_CUT_BYTES

    def _read_whole(self, spans: dict[str, Spans]) -> dict[str, Spans]:
        """The values that are read whole; others are empty."""
        cut = {output.sources[0] for output in self.source.parts} - self.source.whole_columns
        return {
            name: Spans(s.buffer, s.starts, np.where(self._is_long(s), 0, s.lengths)) if name in cut else s
            for name, s in spans.items()
        }

    def _locate(self, block: Block, rows: Ints) -> dict[str, Spans]:
        """Return where the values of rows of a block lie in its stored bytes."""
        spans = self.source.format.locate(block, self.source.columns)
        if spans is None:
            raise NotLocatableError(f"format {self.source.format.name} cannot tell where values lie")
        return {name: Spans(s.buffer, s.starts[rows], s.lengths[rows]) for name, s in spans.items()}

    def _joined(self, spans: dict[str, Spans]) -> tuple[Ints, Ints, Ints]:
        """First byte and length of the ranges to ask for, and which holds each value, column by column.

        Values that lie near each other are in one range, unless a cache keeps each for itself.
        """
        starts = np.concatenate([s.starts for s in spans.values()] or [np.zeros(0, np.int64)])
        lengths = np.concatenate([s.lengths for s in spans.values()] or [np.zeros(0, np.int64)])
        most_bytes = MOST_BYTES if self.source.cache is None else 0
        return coalesce(starts, np.maximum(lengths, 0), most_bytes=most_bytes)

    def reads(self) -> Sequence[Callable[[], None]]:
        """One task a block, and one for each value of which parts are read."""
        for output in self.source.outputs:
            self.staged[output.name] = output.stage(self.samples.num_rows, self.arena)
        for output in self.source.parts:
            self.spans(output.name).is_cut = np.concatenate(
                [self._is_long(spans[output.sources[0]]) for spans in self._spans] or [np.zeros(0, np.bool_)]
            )
        self._region = self.arena.lease(int(self._sizes.sum()) or 1)
        starts = (np.cumsum(self._sizes) - self._sizes).tolist()
        blocks = [partial(self._read, ordinal, start) for ordinal, start in enumerate(starts)]
        return [*blocks, *(partial(self._cut, *part) for part in self._parts)]

    def _read(self, ordinal: int, start: int) -> None:
        """Read the ranges of a block one after the other into the region, from `start` on, and stage them."""
        block, region = self.samples.blocks[ordinal], self._region
        assert region is not None
        firsts, lengths, range_of = self._ranges[ordinal]
        targets = start + np.cumsum(_aligned(lengths)) - _aligned(lengths)
        for first, length, target in zip(firsts.tolist(), lengths.tolist(), targets.tolist(), strict=True):
            view = region[target : target + length]
            self.source.read_into(block.shard, block.offset + first, view, awaited=self._awaited)
        columns: Columns = {}
        value_bytes = begin = 0
        for name, spans in self._read_whole(self._spans[ordinal]).items():
            ranges = range_of[begin : begin + len(spans)]
            begin += len(spans)
            moved = spans.starts + (targets - firsts)[ranges] if len(firsts) else spans.starts
            columns[name] = Spans(region, np.where(spans.lengths > 0, moved, start), spans.lengths)
            value_bytes += int(np.maximum(spans.lengths, 0).sum())
        self.source.traffic.add(int(lengths.sum()), value_bytes)
        self._stage(ordinal, columns)

    def _cut(self, output: StagedOutput, ordinal: int, row: int) -> None:
        """Read what is needed of a value, and stage it."""
        block, rule, spans = self.samples.blocks[ordinal], output.parts_rule, self._spans[ordinal]
        assert rule is not None
        window_row = int(self.samples.first_row[ordinal]) + row
        column = spans[output.sources[0]]
        first = block.offset + int(column.starts[row])
        read = self.source.reading(block.shard, awaited=self._awaited, first=first)
        draws = self.draws(np.array([window_row])) if rule.random else None
        value = rule.cut(read, int(column.lengths[row]), draws)
        self.source.traffic.add(0, len(value))
        self.spans(output.name).put_cut(window_row, value)

    def _release(self) -> None:
        self._region = None


def _memory_of(column: Column) -> NDArray[Any]:
    if isinstance(column, Masked):
        return column.values
    return column.buffer if isinstance(column, Spans) else column


def _adjoin(before: Block, block: Block) -> bool:
    """Return whether two blocks may be read at once into neighbouring places."""
    same_file = before.shard.url == block.shard.url and before.offset + before.length == block.offset
    checked = before.checksum is not None or block.checksum is not None
    return same_file and not checked and before.length == _aligned(before.length)


def _is_small_file(block: Block) -> bool:
    return block.num_samples == 1 and block.length == block.shard.size < _LEAST_MAPPED


def _aligned(nbytes: Any) -> Any:
    return -(-nbytes // ALIGN) * ALIGN
