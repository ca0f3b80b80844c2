"""Windows of joined datasets: a window of the one, and beside it the samples of others that belong to it.

Whoever builds batches sees one window: columns of the others are staged by the rows of the first, as copied
numbers, or as addresses of values that stay in the others' windows. What must be read of another dataset is
found from the table of matches, for the rows that this rank takes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from dataflow.joins.matches import MatchTable, blocks_of
from dataflow.staging.block_source import BlockSource
from dataflow.staging.columns import StagedArray, StagedOutput, StagedSpans
from dataflow.staging.rows import OpenRows, RowReader, WindowPart
from dataflow.staging.window import RowFraction, StagedRows, StagedWindow
from prefetch.memory.arena import Arena
from prefetch.work import Task
from sharding.errors import SampleError
from sharding.spans import Bytes, Ints


@dataclass(frozen=True, kw_only=True)
class MatchSource:
    """A dataset joined to another, whose samples bring its columns along. Implements `SourceBeside`."""

    source: BlockSource
    table: MatchTable = field(compare=False)
    """The table of matches: which of its samples belongs to each of the other's."""
    keeps: bool = False
    """True if its blocks stay in memory once they were read, where only whole ones can be decoded."""

    def shared(self, source: BlockSource, *, keeps: bool) -> MatchSource:
        """See `SourceBeside`."""
        return replace(self, source=source, keeps=keeps)

    def stager(self, arena: Arena, *, num_readers: int = 1, keep_blocks: int = 0) -> MatchStager:
        """See `SourceBeside`."""
        return MatchStager(self, arena, num_readers=num_readers, keep_blocks=keep_blocks)


class MatchRows:
    """The matches of a window's rows, of one other dataset: parts fill rows of the joined window.

    Args:
        opened: where they lie.
        outputs: the columns that they bring along.
    """

    def __init__(self, opened: OpenRows, outputs: Sequence[StagedOutput]) -> None:
        self.opened, self.outputs = opened, outputs
        self.nbytes = opened.nbytes + sum(part.rows.nbytes + _filled(part).nbytes for part in opened.parts)

    def find(self, row: int) -> tuple[StagedRows, int]:
        """The window that holds the match of a row, and its row there."""
        for part in self.opened.parts:
            index = int(np.searchsorted(_filled(part), row))
            if index < len(part.rows) and _filled(part)[index] == row:
                return part.window, int(part.rows[index])
        raise KeyError(row)

    def staged(self, output: StagedOutput, num_rows: int, arena: Arena) -> StagedArray | StagedSpans:
        """A column by rows of the joined window; rows not used have any value."""
        parts = self.opened.parts
        first = parts[0].window.staged[output.name]
        if isinstance(first, StagedSpans):
            i = parts[0].rows[0]
            column = StagedSpans(np.full(num_rows, first.addresses[i]), np.full(num_rows, first.lengths[i]))
            for part in parts:
                have = part.window.spans(output.name)
                column.addresses[part.chunk_rows] = have.addresses[part.rows]
                column.lengths[part.chunk_rows] = have.lengths[part.rows]
                column.keep += have.keep
            return column
        numbers = output.stage(num_rows, arena)
        assert isinstance(numbers, StagedArray)
        for part in parts:
            values = part.window.array(output.name)
            numbers.values[part.chunk_rows] = values.values[part.rows]
            numbers.bad.update((part.chunk_row(row), reason) for row, reason in values.bad_among(part.rows))
        return numbers


class JoinedWindow(StagedWindow):
    """A window whose rows have columns of several datasets.

    Args:
        own: of the dataset whose rows these are.
        matches: of each other dataset.
    """

    def __init__(self, window: StagedWindow, matches: Sequence[MatchRows]) -> None:
        super().__init__(window.source, window.arena, window.samples, window.rows)
        self._own_window, self._matches = window, matches
        outputs = [(output, rows) for rows in matches for output in rows.outputs]
        self._match_of = {output.name: rows for output, rows in outputs}
        self._match_of |= {output.column: rows for output, rows in outputs if output.column}
        self._lock = threading.Lock()  # guards _tasks_left
        self._tasks_left = 0
        num_rows = self.samples.num_rows
        columns = [max(16 * num_rows, o.staged_bytes(num_rows)) for rows in matches for o in rows.outputs]
        self.nbytes = window.nbytes + sum(rows.nbytes for rows in matches) + sum(columns)

    @property
    def _windows(self) -> list[StagedWindow]:
        return [self._own_window, *(window for rows in self._matches for window in rows.opened.windows)]

    # ---- the engine's window ------------------------------------------------------------------------

    def reads(self) -> Sequence[Task]:
        """Return the reads of all its windows; the last one that ends puts their columns side by side."""
        tasks = [*self._own_window.reads(), *(task for rows in self._matches for task in rows.opened.reads())]
        self._tasks_left = len(tasks)
        return [partial(self._read, task) for task in tasks]

    def _read(self, task: Task) -> None:
        task()
        with self._lock:
            self._tasks_left -= 1
            is_last = self._tasks_left == 0
        if is_last:
            self._put_together()

    def read_matches(self) -> None:
        """Read what it has of other datasets in this thread, where its own window has been read."""
        for rows in self._matches:
            for task in rows.opened.reads():
                task()
        self._put_together()

    def _put_together(self) -> None:
        """Stage the columns of all its windows, which have been read, side by side."""
        self.staged.update(self._own_window.staged)
        for rows in self._matches:
            for output in rows.outputs:
                self.staged[output.name] = rows.staged(output, self.samples.num_rows, self.arena)

    def raise_priority(self) -> None:
        """The training code waits for its reads."""
        for window in self._windows:
            window.raise_priority()

    def verify(self) -> None:
        """See `StagedWindow`."""
        for window in self._windows:
            window.verify()

    def _release(self) -> None:
        self._own_window.close()
        for rows in self._matches:
            rows.opened.close()

    # ---- for the builder --------------------------------------------------------------------------------

    @property
    def may_load(self) -> bool:
        """Return whether values of all its windows may be touched where they lie."""
        return all(window.may_load for window in self._windows)

    def buffer_of(self, spans: StagedSpans, owners: Ints, column: str) -> tuple[Bytes, Ints]:
        """See `StagedWindow`."""
        window, rows = self._owners(owners, column)
        return window.buffer_of(spans, rows, column)

    @contextmanager
    def values_of(self, spans: StagedSpans, owners: Ints, column: str) -> Iterator[tuple[Bytes, Ints]]:
        """See `StagedWindow`."""
        window, rows = self._owners(owners, column)
        with window.values_of(spans, rows, column) as values:
            yield values

    def _owners(self, rows: Ints, column: str) -> tuple[StagedRows, Ints]:
        """Return the window that tells how values of some rows may be touched, and its rows of them.

        Mapped ones are all in one window; what was read is memory like any other.
        """
        match = self._match_of.get(column)
        if match is None:
            return self._own_window, rows
        part = match.opened.parts[0]
        own_rows = part.rows[np.searchsorted(_filled(part), rows)] if part.window.mapped else rows
        return part.window, own_rows

    # ---- telling where a row came from ----------------------------------------------------------------

    def sample_error(self, row: int, reason: str, column: str | None, stage: str = "decode") -> SampleError:
        """An error that names the sample of the dataset that the column is of."""
        match = self._match_of.get(column) if column is not None else None
        window: StagedRows
        window, own_row = (self._own_window, row) if match is None else match.find(row)
        return window.sample_error(own_row, reason, column, stage)

    def name_at_once(self, row: int) -> tuple[str, str]:
        """See `StagedWindow.name_at_once`."""
        return self._own_window.name_at_once(row)

    def _stored(self, ordinal: int) -> memoryview | None:
        return self._own_window._stored(ordinal)


class MatchStager:
    """Finds and opens what windows need of another dataset. Implements `StagerBeside`. Thread-safe.

    Args:
        match: the dataset, and which of its samples belongs to each of the windows'.
        arena: where values lie.
        num_readers: threads that will read a window.
        keep_blocks: of those that can be decoded as a whole only, so many stay for windows to come.
    """

    def __init__(
        self, match: MatchSource, arena: Arena, *, num_readers: int = 1, keep_blocks: int = 0
    ) -> None:
        self._table, self._source = match.table, match.source
        keep_bytes = math.inf if match.keeps else 0
        self._reader = RowReader(
            arena, num_readers=num_readers, keep_bytes=keep_bytes, keep_blocks=keep_blocks
        )

    def rows_for(self, used: Ints, samples: Ints) -> MatchRows:
        """The matches of some rows of a window, [n] ascending, which are these samples."""
        table, numbers = self._source.catalog.blocks, self._table.of(samples)
        block = blocks_of(table, numbers)
        is_used = np.zeros(len(table.num_samples), np.bool_)
        is_used[block] = True
        blocks, ordinal = np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[block]
        few = 2 * len(numbers) < int(table.num_samples[blocks].sum())
        row = numbers - table.first_sample[block]
        share: RowFraction = "few" if few else "many"
        opened = self._reader.open(self._source, blocks, ordinal, row, used, share=share)
        return MatchRows(opened, self._source.outputs)

    @staticmethod
    def joined(window: StagedWindow, rows: Ints, stagers: Sequence[MatchStager]) -> JoinedWindow:
        """See `StagerBeside`."""
        is_used = np.zeros(window.samples.num_rows, np.bool_)
        is_used[rows[rows >= 0]] = True
        used = np.flatnonzero(is_used)
        samples = window.samples.numbers(used) - window.source.first_number
        return JoinedWindow(window, [stager.rows_for(used, samples) for stager in stagers])


def _filled(part: WindowPart) -> Ints:
    """[n] rows of the joined window that a part fills, ascending."""
    assert isinstance(part.chunk_rows, np.ndarray)
    return part.chunk_rows
