"""Windows of joined datasets: a window of the one, and beside it the samples of others that belong to it.

Whoever builds batches sees one window: columns of the others are staged by the rows of the first, as copied
numbers, or as addresses of values that stay in the others' windows. What must be read of another dataset is
found from the table of partners (`sharding.plan.partners`), for the rows that this rank takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataflow.staging.columns import StagedArray, StagedOutput, StagedSpans
from dataflow.staging.mapped import MappedWindow, can_map_windows
from dataflow.staging.reading import ReadWindow, SparseWindow
from dataflow.staging.source import PartnerSource, Source
from dataflow.staging.window import NotLocatableError, StagedWindow
from prefetch.memory.arena import Arena
from sharding.errors import SampleError
from sharding.plan.partners import blocks_of

Task = Callable[[], None]
_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class PartnerPart:
    """Partners that one window holds."""

    window: StagedWindow
    used: NDArray[np.int64]
    """[n] rows of the joined window that have their partner here, ascending."""
    row: NDArray[np.int64]
    """[n] row of each partner in its window."""


class PartnerRows:
    """The partners of a window's rows, of one other dataset.

    Args:
        parts: window by window.
        reads: bring these windows into reach.
        nbytes: that they hold, of those that nobody else has credits for.
        release: drops them.
    """

    def __init__(
        self,
        parts: Sequence[PartnerPart],
        *,
        reads: Callable[[], Sequence[Task]],
        nbytes: int,
        release: Callable[[], None],
    ) -> None:
        self.parts, self.reads, self.release = parts, reads, release
        self.outputs = parts[0].window.source.outputs
        self.nbytes = nbytes + sum(part.used.nbytes + part.row.nbytes for part in parts)

    @classmethod
    def of_window(cls, window: StagedWindow, used: NDArray[np.int64], row: NDArray[np.int64]) -> PartnerRows:
        """All in one window that serves nobody else."""
        part = PartnerPart(window, used, row)
        return cls([part], reads=window.reads, nbytes=window.nbytes, release=window.close)

    def find(self, row: int) -> tuple[StagedWindow, int]:
        """The window that holds the partner of a row, and its row there."""
        for part in self.parts:
            at = int(np.searchsorted(part.used, row))
            if at < len(part.used) and part.used[at] == row:
                return part.window, int(part.row[at])
        raise KeyError(row)

    def staged(self, output: StagedOutput, num_rows: int, arena: Arena) -> StagedArray | StagedSpans:
        """A column by rows of the joined window; rows not used have any value."""
        first = self.parts[0].window.staged[output.name]
        if isinstance(first, StagedSpans):
            at = self.parts[0].row[0]
            column = StagedSpans(np.full(num_rows, first.addresses[at]), np.full(num_rows, first.lengths[at]))
            for part in self.parts:
                have = part.window.staged[output.name]
                assert isinstance(have, StagedSpans)
                column.addresses[part.used] = have.addresses[part.row]
                column.lengths[part.used] = have.lengths[part.row]
                column.keep += have.keep
            return column
        numbers = output.stage(num_rows, arena)
        assert isinstance(numbers, StagedArray)
        for part in self.parts:
            values = part.window.staged[output.name]
            assert isinstance(values, StagedArray)
            numbers.values[part.used] = values.values[part.row]
            numbers.bad.update((int(part.used[at]), reason) for at, reason in values.bad_among(part.row))
        return numbers


class JoinedWindow(StagedWindow):
    """A window whose rows have columns of several datasets.

    Args:
        own: of the dataset whose rows these are.
        partners: of each other dataset.
    """

    def __init__(self, own: StagedWindow, partners: Sequence[PartnerRows]) -> None:
        super().__init__(own.source, own.arena, own.samples, own.rows)
        self._own, self._partners = own, partners
        outputs = [(output, rows) for rows in partners for output in rows.outputs]
        self._partner_of = {output.name: rows for output, rows in outputs}
        self._partner_of |= {output.column: rows for output, rows in outputs if output.column}
        self._lock = threading.Lock()  # guards _tasks_left
        self._tasks_left = 0
        num_rows = self.samples.num_rows
        columns = [max(16 * num_rows, o.staged_bytes(num_rows)) for rows in partners for o in rows.outputs]
        self.nbytes = own.nbytes + sum(rows.nbytes for rows in partners) + sum(columns)

    @property
    def _windows(self) -> list[StagedWindow]:
        return [self._own, *(part.window for rows in self._partners for part in rows.parts)]

    # ---- the engine's window ------------------------------------------------------------------------

    def reads(self) -> Sequence[Task]:
        """Those of all its windows; the last one that ends puts their columns side by side."""
        tasks = [*self._own.reads(), *(task for rows in self._partners for task in rows.reads())]
        self._tasks_left = len(tasks)
        return [partial(self._read, task) for task in tasks]

    def _read(self, task: Task) -> None:
        task()
        with self._lock:
            self._tasks_left -= 1
            is_last = self._tasks_left == 0
        if is_last:
            self.put_together()

    def put_together(self) -> None:
        """Stage the columns of all its windows, which have been read, side by side."""
        self.staged.update(self._own.staged)
        for rows in self._partners:
            for output in rows.outputs:
                self.staged[output.name] = rows.staged(output, self.samples.num_rows, self.arena)

    def hurry(self) -> None:
        """The training code waits for its reads."""
        for window in self._windows:
            window.hurry()

    def verify(self) -> None:
        """See `StagedWindow`."""
        for window in self._windows:
            window.verify()

    def _release(self) -> None:
        self._own.close()
        for rows in self._partners:
            rows.release()

    # ---- for the builder --------------------------------------------------------------------------------

    @property
    def may_load(self) -> bool:
        """Whether values of all its windows may be touched where they lie."""
        return all(window.may_load for window in self._windows)

    def buffer_of(
        self,
        spans: StagedSpans,
        rows: NDArray[np.int64],
        column: str,
        owners: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """See `StagedWindow`."""
        window, have, own_rows, owners = self._located(spans, rows, column, owners)
        return window.buffer_of(have, own_rows, column, owners)

    @contextmanager
    def values_of(
        self,
        spans: StagedSpans,
        rows: NDArray[np.int64],
        column: str,
        owners: NDArray[np.int64] | None = None,
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        """See `StagedWindow`."""
        window, have, own_rows, owners = self._located(spans, rows, column, owners)
        with window.values_of(have, own_rows, column, owners) as values:
            yield values

    def _located(
        self, spans: StagedSpans, rows: NDArray[np.int64], column: str, owners: NDArray[np.int64] | None
    ) -> tuple[StagedWindow, StagedSpans, NDArray[np.int64], NDArray[np.int64] | None]:
        """Who tells how the values of some rows may be touched, and what to ask for.

        Mapped ones, which are all in one window, by that; what was read is memory like any other.
        """
        partner = self._partner_of.get(column)
        if partner is None:
            return self._own, spans, rows, owners
        part = partner.parts[0]
        if not part.window.mapped:
            return part.window, spans, rows, owners
        if owners is not None:  # `spans` are not by row
            return part.window, spans, rows, part.row[np.searchsorted(part.used, owners)]
        have = part.window.staged[column]
        assert isinstance(have, StagedSpans)
        return part.window, have, part.row[np.searchsorted(part.used, rows)], None

    # ---- telling where a row came from ----------------------------------------------------------------

    def sample_error(self, row: int, reason: str, column: str | None, stage: str = "decode") -> SampleError:
        """An error that names the sample of the dataset that the column is of."""
        partner = self._partner_of.get(column) if column is not None else None
        window, own_row = (self._own, row) if partner is None else partner.find(row)
        return window.sample_error(own_row, reason, column, stage)

    def name_at_once(self, row: int) -> tuple[str, str]:
        """See `StagedWindow.name_at_once`."""
        return self._own.name_at_once(row)

    def _stored(self, ordinal: int) -> memoryview | None:
        return self._own._stored(ordinal)


class _SharedBlock:
    """A block of another dataset that several windows need. Whoever needs it first reads it."""

    def __init__(self, window: ReadWindow) -> None:
        self.window = window
        self.num_users = 0
        self._reading = threading.Lock()  # held while it is read
        self._is_read = False

    def read(self) -> None:
        """Read it, or wait until another thread has."""
        with self._reading:
            if not self._is_read:
                for task in self.window.reads():
                    task()
                self._is_read = True


class _SharedBlocks:
    """Blocks that can be decoded as a whole only, each read once for all windows that need it meanwhile.

    Args:
        source: of the other dataset.
        arena: where they lie.
        keeps: whether they stay, for all windows to come: they have credits then.
    """

    def __init__(self, source: Source, arena: Arena, *, keeps: bool) -> None:
        self._source, self._arena, self._keeps = source, arena, keeps
        self._lock = threading.Lock()  # guards _blocks and their numbers of users
        self._blocks: dict[int, _SharedBlock] = {}

    def rows_for(
        self, used: NDArray[np.int64], block: NDArray[np.int64], in_block: NDArray[np.int64]
    ) -> PartnerRows:
        """The partners of some rows, [n] ascending, in the block and row of each."""
        numbers, ordinal = np.unique(block, return_inverse=True)
        shared = self._take(numbers.tolist())
        by_block = np.argsort(ordinal, kind="stable")
        cuts = np.cumsum(np.bincount(ordinal))[:-1]
        parts = [
            PartnerPart(one.window, used[own], in_block[own])
            for one, own in zip(shared, np.split(by_block, cuts), strict=True)
        ]
        return PartnerRows(
            parts,
            reads=lambda: [one.read for one in shared],
            nbytes=0 if self._keeps else sum(one.window.nbytes for one in shared),
            release=partial(self._give_back, numbers.tolist()),
        )

    def _take(self, numbers: Sequence[int]) -> list[_SharedBlock]:
        with self._lock:
            for number in numbers:
                if number not in self._blocks:
                    blocks = [self._source.catalog.block(number)]
                    window = ReadWindow(self._source, self._arena, blocks, _NO_ROWS)
                    self._blocks[number] = _SharedBlock(window)
                self._blocks[number].num_users += 1
            return [self._blocks[number] for number in numbers]

    def _give_back(self, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                self._blocks[number].num_users -= 1
            if self._keeps:
                return
            unused = [self._blocks.pop(n).window for n in numbers if not self._blocks[n].num_users]
        for window in unused:
            window.close()


class PartnerStager:
    """Finds and stages what windows need of another dataset. Used by one thread at a time."""

    def __init__(self, partner: PartnerSource, arena: Arena, *, num_readers: int) -> None:
        self._partner, self._arena, self._num_readers = partner, arena, num_readers
        self._maps = can_map_windows(partner.source)
        self._shared = _SharedBlocks(partner.source, arena, keeps=partner.keeps)

    def rows_for(self, used: NDArray[np.int64], samples: NDArray[np.int64]) -> PartnerRows:
        """The partners of some rows of a window, [n] ascending, which are these samples."""
        source = self._partner.source
        table, numbers = source.catalog.blocks, self._partner.table.of(samples)
        block = blocks_of(table, numbers)
        if not source.locates(source.catalog.block(int(block[0]))):
            return self._shared.rows_for(used, block, numbers - table.first_sample[block])
        is_used = np.zeros(len(table.num_samples), np.bool_)
        is_used[block] = True
        blocks = np.flatnonzero(is_used)
        counts, first = table.num_samples[blocks], np.zeros(len(is_used), np.int64)
        first[blocks] = np.cumsum(counts) - counts - table.first_sample[blocks]
        row = numbers + first[block]
        is_sparse = 2 * len(numbers) < int(counts.sum())
        with suppress(NotLocatableError):  # as of shards of which some are compressed
            if self._maps:
                needed = np.unique(row) if is_sparse else None
                return PartnerRows.of_window(self._mapped(blocks, needed), used, row)
            if is_sparse:
                different = np.unique(numbers)
                window = self._sparse(different, blocks)
                return PartnerRows.of_window(window, used, np.searchsorted(different, numbers))
        every = [source.catalog.block(number) for number in blocks.tolist()]
        whole = ReadWindow(source, self._arena, every, _NO_ROWS, num_readers=self._num_readers)
        return PartnerRows.of_window(whole, used, row)

    def _mapped(self, blocks: NDArray[np.int64], needed: NDArray[np.int64] | None) -> MappedWindow:
        return MappedWindow(
            self._partner.source,
            self._arena,
            blocks,
            _NO_ROWS,
            needed=needed,
            whole=needed is None,
            num_readers=self._num_readers,
        )

    def _sparse(self, numbers: NDArray[np.int64], blocks: NDArray[np.int64]) -> SparseWindow:
        """Some samples' values alone."""
        source = self._partner.source
        first = source.catalog.blocks.first_sample[blocks]
        parts = np.split(numbers, np.searchsorted(numbers, first)[1:])
        rows_in_block = [part - start for part, start in zip(parts, first.tolist(), strict=True)]
        every = [source.catalog.block(number) for number in blocks.tolist()]
        return SparseWindow(source, self._arena, every, _NO_ROWS, rows_in_block=rows_in_block)


def joined(own: StagedWindow, source: Source, stagers: Sequence[PartnerStager]) -> JoinedWindow:
    """A window, and the partners of the rows that its indices take."""
    is_used = np.zeros(own.samples.num_rows, np.bool_)
    is_used[own.rows[own.rows >= 0]] = True
    used = np.flatnonzero(is_used)
    samples = own.samples.numbers(used) - source.first_number
    return JoinedWindow(own, [stager.rows_for(used, samples) for stager in stagers])
