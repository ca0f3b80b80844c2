"""Windows of joined datasets: a window of the one, and beside it the samples of others that belong to its rows.

Whoever builds batches sees one window: columns of the others are staged by the rows of the first, as copied
numbers, or as addresses of values that stay in the others' windows. What a window must read of another dataset
is found from the table of partners (`sharding.plan.partners`), for the rows that this rank takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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

_NO_ROWS = np.zeros(0, np.int64)


class PartnerRows:
    """The partners of a window's rows, in a window of their own dataset.

    Args:
        window: holds them.
        used: [n] rows that have a partner here, ascending.
        row: [n] row of the partner in its window.
    """

    def __init__(self, window: StagedWindow, used: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        self.window, self._used, self._row = window, used, row
        self.nbytes = window.nbytes + used.nbytes + row.nbytes

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of its window."""
        return self._row[np.searchsorted(self._used, rows)]

    def staged(self, output: StagedOutput, num_rows: int, arena: Arena) -> StagedArray | StagedSpans:
        """A column of its window by rows of the joined one; those not used have any row's value."""
        have = self.window.staged[output.name]
        if isinstance(have, StagedSpans):
            addresses = np.full(num_rows, have.addresses[self._row[0]])
            lengths = np.full(num_rows, have.lengths[self._row[0]])
            addresses[self._used], lengths[self._used] = have.addresses[self._row], have.lengths[self._row]
            return StagedSpans(addresses, lengths, have.keep)
        column = output.stage(num_rows, arena)
        assert isinstance(column, StagedArray)
        column.values[self._used] = have.values[self._row]
        if have.bad:
            for at in np.flatnonzero(np.isin(self._row, list(have.bad))).tolist():
                column.bad[int(self._used[at])] = have.bad[int(self._row[at])]
        return column


class JoinedWindow(StagedWindow):
    """A window whose rows have columns of several datasets.

    Args:
        own: of the dataset whose rows these are.
        partners: of each other dataset.
    """

    def __init__(self, own: StagedWindow, partners: Sequence[PartnerRows]) -> None:
        super().__init__(own.source, own.arena, own.samples, own.rows)
        self._own, self._partners = own, partners
        self._partner_of = {
            output.name: rows for rows in partners for output in rows.window.source.outputs
        }
        self._lock = threading.Lock()  # guards _tasks_left
        self._tasks_left = 0
        outputs = [output for rows in partners for output in rows.window.source.outputs]
        num_rows = self.samples.num_rows
        columns = sum(max(16 * num_rows, output.staged_bytes(num_rows)) for output in outputs)
        self.nbytes = own.nbytes + sum(rows.nbytes for rows in partners) + columns

    @property
    def _windows(self) -> list[StagedWindow]:
        return [self._own, *(rows.window for rows in self._partners)]

    # ---- the engine's window ------------------------------------------------------------------------

    def reads(self) -> Sequence[Callable[[], None]]:
        """Those of all its windows; the last one that ends puts their columns side by side."""
        tasks = [task for window in self._windows for task in window.reads()]
        self._tasks_left = len(tasks)
        return [partial(self._read, task) for task in tasks]

    def _read(self, task: Callable[[], None]) -> None:
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
            for output in rows.window.source.outputs:
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
        for window in self._windows:
            window.close()

    # ---- for the builder --------------------------------------------------------------------------------

    @property
    def may_load(self) -> bool:
        """Whether values of all its windows may be touched where they lie."""
        return all(window.may_load for window in self._windows)

    def buffer_of(
        self, spans: StagedSpans, rows: NDArray[np.int64], column: str
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """See `StagedWindow`."""
        return self._owner(column, rows)[0].buffer_of(*self._of_owner(spans, rows, column))

    @contextmanager
    def values_of(
        self, spans: StagedSpans, rows: NDArray[np.int64], column: str
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        """See `StagedWindow`."""
        with self._owner(column, rows)[0].values_of(*self._of_owner(spans, rows, column)) as values:
            yield values

    def _of_owner(
        self, spans: StagedSpans, rows: NDArray[np.int64], column: str
    ) -> tuple[StagedSpans, NDArray[np.int64], str]:
        window, own_rows = self._owner(column, rows)
        have = window.staged[column]
        assert isinstance(have, StagedSpans)
        return have, own_rows, column

    def _owner(
        self, column: str | None, rows: NDArray[np.int64]
    ) -> tuple[StagedWindow, NDArray[np.int64]]:
        """The window that a column comes from, and the rows in it."""
        partner = self._partner_of.get(column) if column is not None else None
        return (self._own, rows) if partner is None else (partner.window, partner.of(rows))

    # ---- telling where a row came from ----------------------------------------------------------------

    def sample_error(self, row: int, reason: str, column: str | None, stage: str = "decode") -> SampleError:
        """An error that names the sample of the dataset that the column is of."""
        window, rows = self._owner(column, np.array([row]))
        return window.sample_error(int(rows[0]), reason, column, stage)

    def _stored(self, ordinal: int) -> memoryview | None:
        return self._own._stored(ordinal)


class PartnerStager:
    """Finds and stages what windows need of another dataset. Used by one thread at a time."""

    def __init__(self, partner: PartnerSource, arena: Arena, *, num_readers: int) -> None:
        self._partner, self._arena, self._num_readers = partner, arena, num_readers
        self._maps = can_map_windows(partner.source)

    def rows_for(self, used: NDArray[np.int64], samples: NDArray[np.int64]) -> PartnerRows:
        """The partners of some rows of a window, [n] ascending, which are these samples."""
        numbers = self._partner.numbers[samples].astype(np.int64)
        table = self._partner.source.catalog.blocks
        block = blocks_of(table, numbers)
        is_used = np.zeros(len(table.num_samples), np.bool_)
        is_used[block] = True
        blocks = np.flatnonzero(is_used)
        first = np.zeros(len(table.num_samples), np.int64)
        counts = table.num_samples[blocks]
        first[blocks] = np.cumsum(counts) - counts - table.first_sample[blocks]
        row = numbers + first[block]
        few = 2 * len(numbers) < int(counts.sum())
        if few and not self._maps:
            with suppress(NotLocatableError):
                return self._sparse(used, numbers, blocks)
        return PartnerRows(self._whole(blocks, np.unique(row) if few else None), used, row)

    def _sparse(
        self, used: NDArray[np.int64], numbers: NDArray[np.int64], blocks: NDArray[np.int64]
    ) -> PartnerRows:
        """Single values, where the format says where they lie."""
        source = self._partner.source
        table, different = source.catalog.blocks, np.unique(numbers)
        bounds = np.searchsorted(different, table.first_sample[blocks])
        rows_in_block = [
            own - table.first_sample[block]
            for block, own in zip(blocks, np.split(different, bounds[1:]), strict=True)
        ]
        catalog = source.catalog
        window = SparseWindow(
            source,
            self._arena,
            [catalog.block(number) for number in blocks.tolist()],
            _NO_ROWS,
            rows_in_block=rows_in_block,
        )
        return PartnerRows(window, used, np.searchsorted(different, numbers))

    def _whole(self, blocks: NDArray[np.int64], needed: NDArray[np.int64] | None) -> StagedWindow:
        source = self._partner.source
        if self._maps:
            with suppress(NotLocatableError):
                return MappedWindow(
                    source,
                    self._arena,
                    blocks,
                    _NO_ROWS,
                    needed=needed,
                    whole=needed is None,
                    num_readers=self._num_readers,
                )
        every = [source.catalog.block(number) for number in blocks.tolist()]
        return ReadWindow(source, self._arena, every, _NO_ROWS, num_readers=self._num_readers)


def joined(own: StagedWindow, source: Source, stagers: Sequence[PartnerStager]) -> JoinedWindow:
    """A window and the partners of the rows that its indices take."""
    is_used = np.zeros(own.samples.num_rows, np.bool_)
    is_used[own.rows[own.rows >= 0]] = True
    used = np.flatnonzero(is_used)
    samples = own.samples.numbers(used) - source.first_number
    return JoinedWindow(own, [stager.rows_for(used, samples) for stager in stagers])
