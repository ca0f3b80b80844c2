"""The means to build the columns of a chunk with: rows, slots, random numbers, a list of bad samples.

What the stream found for its batches (`sharding.plan.batch_index`) becomes rows of staged windows once a
chunk (`ChunkRows`): values are gathered, random numbers drawn and bad samples named by this one answer.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from dataflow.decode.values import DRAWS, LACKING, Draws
from dataflow.outputs.held_bytes import Ranges
from dataflow.staging.columns import REASONS
from dataflow.staging.rows import WindowPart
from dataflow.staging.window import StagedRows
from prefetch.errors import EngineClosedError, MemoryLimitError, SampleTooLargeError
from prefetch.memory.arena import Arena, rounded_bytes
from prefetch.memory.interrupts import must_go_on
from sharding.blocks import MISSING
from sharding.cached_property import cached_property
from sharding.errors import SampleError, ShardReadError
from sharding.order.permutations import GLOBALS, mix_key, uniform
from sharding.spans import Bytes, Ints

Array = NDArray[Any]
StoredValue = tuple[Bytes, int]
"""The stored bytes of a value, and the row of the chunk that it is of."""


class Cut(Struct, frozen=True):
    """The segments of the values that some columns take, [rows] each; all in elements."""

    columns: Sequence[str]
    """The first is the one that the plan's lengths are of."""
    begin: Ints
    length: Ints
    whole: Ints
    """The whole value's, as the plan knows it."""

    def apply(self, segments: Ints, itemsize: int) -> Ints:
        """Make segments of whole values ([2, rows] addresses and bytes); gives the rows of another length."""
        wrong = np.flatnonzero(segments[1] != self.whole * itemsize)
        segments[0] += self.begin * itemsize
        segments[1] = self.length * itemsize
        segments[1, wrong] = 0
        return wrong


class ChunkRows(Struct, frozen=True, eq=False, dict=True):
    """The rows of a chunk. Found when they are first needed, by whoever builds the chunk."""

    num_rows: int
    locate: Callable[[], Sequence[WindowPart]]
    """Finds the parts; called once."""
    cut: Cut | None = None
    """The segments that are taken of some columns; None: all values come whole."""
    _bytes: dict[tuple[str, int], Ints] = field(default_factory=dict)

    def cut_of(self, column: str) -> Cut | None:
        """The segments that a column's values are cut to; None: they come whole."""
        return self.cut if self.cut is not None and column in self.cut.columns else None

    @cached_property
    def parts(self) -> Sequence[WindowPart]:
        """The rows, window by window."""
        return self.locate()

    def bytes_of(self, column: str, missing_bytes: int = 0) -> Ints:
        """Return the bytes of each row's value, read-only int64 [rows]; missing: `missing_bytes`."""
        known = self._bytes.get((column, missing_bytes))
        if known is None:
            known = self.collected(lambda window: window.spans(column).lengths)
            known[known == MISSING] = missing_bytes
            np.maximum(known, 0, out=known)
            known.setflags(write=False)
            self._bytes[column, missing_bytes] = known
        return known

    def find(self, row: int) -> tuple[StagedRows, int]:
        """The window that a row of the chunk comes from, and its row there."""
        return self.find_all(np.array([row]))[0]

    def find_all(self, rows: Ints) -> list[tuple[StagedRows, int]]:
        """Do as `find` for many rows of the chunk."""
        part_of, window_row = self._by_row
        owners = [self.parts[number].window for number in part_of[rows].tolist()]
        return [*zip(owners, window_row[rows].tolist(), strict=True)]

    @cached_property
    def _by_row(self) -> tuple[Ints, Ints]:
        part_of, window_row = np.empty((2, self.num_rows), np.int64)
        for number, part in enumerate(self.parts):
            part_of[part.chunk_rows], window_row[part.chunk_rows] = number, part.rows
        return part_of, window_row

    def collected(self, of_window: Callable[[StagedRows], Ints]) -> Ints:
        """A number of each row, int64 [rows], of arrays that have it for all rows of a window."""
        if len(self.parts) == 1:
            return of_window(self.parts[0].window)[self.parts[0].rows]
        numbers = np.empty(self.num_rows, np.int64)
        for part in self.parts:
            numbers[part.chunk_rows] = of_window(part.window)[part.rows]
        return numbers

    def array_rows(self, column: str) -> tuple[int, int, Ints]:
        """Return where the rows of an array column lie: base, step and index of a `PlanColumn`."""
        first, *others = self.parts
        if not others:
            values = first.window.array(column).values
            return values.__array_interface__["data"][0], values.strides[0], first.rows
        addresses = np.empty(self.num_rows, np.int64)
        for part in (first, *others):
            values = part.window.array(column).values
            addresses[part.chunk_rows] = part.rows * values.strides[0] + values.__array_interface__["data"][0]
        return 0, 1, addresses

    def truncated(self, row: int, column: str) -> ShardReadError:
        """The error of a value whose bytes are gone."""
        window, window_row = self.find(row)
        return window.truncated(window_row, column)

    def sample_error(self, row: int, reason: str, column: str | None, stage: str = "decode") -> SampleError:
        """An error that names the sample in a row of the chunk, and the column if it is about one."""
        window, window_row = self.find(row)
        return window.sample_error(window_row, reason, column, stage)


class Randomness(Struct, frozen=True):
    """The seed and epoch that random augmentation depends on, beside the sample."""

    seed: int
    epoch: int

    def epoch_of(self, window: StagedRows) -> int:
        """The epoch that counts for samples of a window: a sample may come twice in one of a mixture."""
        return self.epoch if window.source_epoch is None else window.source_epoch

    def draws(self, window: StagedRows, rows: Ints, item: Ints | None = None) -> Draws:
        """[n, DRAWS] of the samples in n rows of a window, each a function of (seed, epoch, sample).

        And of `item`, [n] which image of its sample each is, where samples have several.
        """
        return uniform(self.seed, self.epoch_of(window), window.samples.numbers(rows), DRAWS, item)

    def key(self, window: StagedRows, row: int, *, of_batch: bool) -> int:
        """Return what a sample, or the batch that begins with it, seeds generators with."""
        return mix_key(self.seed, self.epoch_of(window), GLOBALS, window.samples.number(row), of_batch)

    def generator(self, window: StagedRows, row: int) -> np.random.Generator:
        """A sample's own random numbers: Philox keyed by (seed, epoch, sample)."""
        key = [self.seed & (1 << 64) - 1, self.epoch_of(window)]
        return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, window.samples.number(row)]))


class ChunkColumns:
    """The columns of one chunk while they are built. Used by one chunk; parts of it by several threads.

    Args:
        rows: what is built.
        arena: where slots are taken.
        randomness: for images.
        may_load: whether values of all windows may be touched where they lie, until the copies are made.
        closing: set when nobody wants the columns any more.
        sample_bytes: the most that the decoded value of a sample may take.
        on_return: bytes of a slot -> what is called when its last view dies.
    """

    def __init__(
        self,
        rows: ChunkRows,
        arena: Arena,
        randomness: Randomness,
        *,
        may_load: bool,
        closing: threading.Event,
        sample_bytes: int = sys.maxsize,
        on_return: Callable[[int], Callable[[], None]] | None = None,
    ) -> None:
        self.rows, self.randomness, self.sample_bytes = rows, randomness, sample_bytes
        self.arena, self.may_load = arena, may_load
        self._closing, self._on_return = closing, on_return
        self._lock = threading.Lock()  # guards bad
        self.bad: dict[int, SampleError] = {}
        """Row of the chunk -> what is wrong with it."""
        self.remarks: list[tuple[int, str, str]] = []
        """Row, column and what is odd about a value that is delivered all the same."""
        self.leased_bytes = 0
        """Bytes of slots within the chunk's credits."""
        self._zeros: list[Array] = []
        """Values that are copied where no row has one; kept until the copies are made."""
        self.slots = Ranges()
        """All slots: what lies there has credits."""

    # ---- memory -------------------------------------------------------------------------------------------

    def slot(self, nbytes: int) -> Bytes:
        """Memory within the chunk's credits, uint8 [nbytes], given back when its last view dies."""
        self.leased_bytes += rounded_bytes(max(1, nbytes))
        return self.slot_of_batch(nbytes)

    def slot_of_batch(self, nbytes: int) -> Bytes:
        """Memory that a batch has announced by itself, as `slot`."""
        size = max(1, nbytes)
        on_return = self._on_return(rounded_bytes(size)) if self._on_return else None
        slot = self.arena.lease(size, on_return)
        self.slots.add(slot.__array_interface__["data"][0], size)
        return slot[:nbytes]

    # ---- where values lie ---------------------------------------------------------------------------------

    def segments(self, column: str, default: Array | None) -> Ints:
        """Addresses and bytes of every row's value, int64 [2, rows].

        Where it is missing, those of `default`, which must outlive the copies; without one, no bytes.
        """
        addresses = self.rows.collected(lambda window: window.spans(column).addresses)
        if default is not None:
            lengths = self.rows.collected(lambda window: window.spans(column).lengths)
            addresses[lengths == MISSING] = default.ctypes.data
        return np.stack((addresses, self.rows.bytes_of(column, 0 if default is None else default.nbytes)))

    def addresses_of(self, column: str, nbytes: int, default: Array | None) -> Ints:
        """Addresses of every row's value of so many bytes, int64 [rows].

        Rows that lack a value have that of `default`, which must outlive the copies. Without one they will be
        left out, and have another's, or zeros where all lack it. Raises `SampleError` for a value of another
        length.
        """
        addresses = self.rows.collected(lambda window: window.spans(column).addresses)
        if all(part.window.spans(column).uniform_bytes == nbytes for part in self.rows.parts):
            return addresses
        lengths = self.rows.collected(lambda window: window.spans(column).lengths)
        have, wrong = np.flatnonzero(lengths >= 0), np.flatnonzero((lengths >= 0) & (lengths != nbytes))
        if len(wrong):
            reason = f"holds {lengths[wrong[0]]} bytes where every other sample holds {nbytes}"
            raise self.rows.sample_error(int(wrong[0]), reason, column)
        if default is not None:
            instead = default.ctypes.data
        elif len(have):
            instead = addresses[have[0]]
        else:
            self._zeros.append(np.zeros(nbytes, np.uint8))
            instead = self._zeros[-1].ctypes.data
        addresses[lengths < 0] = instead
        return addresses

    def stored_values(self, column: str) -> list[StoredValue | None]:
        """The stored bytes of every row's value; None where the sample has none."""
        stored: list[StoredValue | None] = [None] * self.rows.num_rows
        for part in self.rows.parts:
            spans = part.window.spans(column).of(part.rows)
            buffer, starts = part.window.buffer_of(spans, part.rows, column)
            ends = (starts + spans.lengths).tolist()
            rows = np.arange(self.rows.num_rows)[part.chunk_rows].tolist()
            for row, start, end in zip(rows, starts.tolist(), ends, strict=True):
                if end >= start:
                    stored[row] = buffer[start:end], row
        return stored

    def decoded(self, column: str, value: StoredValue | None, decode: Callable[[Bytes, int], Any]) -> Any:
        """Return what `decode` makes of stored bytes and row.

        None where it is missing or bad, which is noted.
        """
        if value is None:
            return None
        if self._closing.is_set():
            raise closed_error()
        try:
            return decode(*value)
        except BaseException as error:
            if must_go_on(error):
                raise
            self.note_bad(value[1], column, error)
            return None

    # ---- bad samples --------------------------------------------------------------------------------------

    def note_bad(self, row: int, column: str, reason: str | BaseException) -> None:
        """Note what is wrong with a row of the chunk; the first that is noted counts."""
        cause = None if isinstance(reason, str) else reason
        error = self.rows.sample_error(row, _text(reason), column)
        if isinstance(cause, MemoryLimitError):
            error = SampleTooLargeError(*error.args)
        error.__cause__ = cause
        with self._lock:
            self.bad.setdefault(row, error)

    def remark(self, row: int, column: str, text: str) -> None:
        """Note what is odd about a value that is delivered all the same; one of a few texts."""
        with self._lock:
            self.remarks.append((row, column, text))

    def warn_once(self, warned: set[str]) -> None:
        """Warn of what is odd, but for kinds in `warned`, and add those to them."""
        for row, column, kind in self.remarks:
            if kind not in warned:
                warned.add(kind)
                warnings.warn(odd_text(str(self.rows.sample_error(row, kind, column))), stacklevel=6)

    def note_missing(self, column: str, why_lacking: Callable[[], str | None]) -> None:
        """Note the rows without a value; `why_lacking`: what is wrong where it is missing, None: nothing."""
        for part in self.rows.parts:
            spans = part.window.spans(column)
            if not spans.has_missing:
                continue
            lacking = why_lacking()
            lengths = spans.lengths[part.rows]
            for index in np.flatnonzero(lengths < (MISSING if lacking is None else 0)).tolist():
                reason = REASONS[int(lengths[index])]
                self.note_bad(
                    part.chunk_row(index), column, lacking if lacking and reason == LACKING else reason
                )

    def note_lengths(self, column: str, wrong: Ints, have: Ints) -> None:
        """Note the rows whose value is not as long as the plan says; `have`: elements of every row's."""
        cut = self.rows.cut
        assert cut is not None
        lead = cut.columns[0]
        for row in wrong.tolist():
            if column == lead:  # where its length is wrong, its companions' only seem to be
                self.bad.pop(row, None)
            source = "lengths= says" if column == lead else f"{lead!r} holds"
            self.note_bad(row, column, f"holds {have[row]} elements, but {source} {cut.whole[row]}")


def closed_error() -> EngineClosedError:
    """The error of a batch that nobody wants any more."""
    return EngineClosedError("the loader was closed while the batch was built")


def odd_text(first: str) -> str:
    """A warning of an odd value, whose place and kind are given, and of those of its kind that follow."""
    counted = "such images are delivered, and counted in stats().image_warnings"
    return f"{first}: {counted}; they may be damaged, which checksums tell; Image(strict=True) refuses them"


def _text(reason: str | BaseException) -> str:
    if isinstance(reason, SampleError):
        return reason.reason
    if isinstance(reason, MemoryLimitError):
        return str(reason)
    return reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
