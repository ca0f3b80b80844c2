"""How values get from the windows of a chunk into slots, each kind of copy in few calls that hold no lock.

Fixed-size rows are gathered by one `index_select` over a strided view of all memory between them (its rows
may overlap), where that memory may be loaded from; everything else the kernel copies.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.batch.columns import ChunkColumns, ChunkRows, WindowPart
from dataflow.staging.columns import Grid, StagedArray, StagedSpans, lowest_bit
from prefetch.memory.spans import copy_mapped, copy_spans, memory_at

Array = NDArray[Any]
Take = Callable[[int, int, Array], None]
"""Writes rows [start, stop) as they are stored."""
_TILE_BYTES = 1 << 20
"""Widening goes through a scratch tile of this size, so that it stays in the L2 cache."""
_LOADED_BYTES = 32 << 10
"""Values of this size on average are loaded: that costs 1 us a value, the kernel more for its pages."""
_of_thread = threading.local()


def take_staged(columns: ChunkColumns, name: str, out: Array) -> None:
    """Copy the rows of a column that was staged as an array."""
    for part in columns.rows.parts:
        staged = part.window.staged[name]
        assert isinstance(staged, StagedArray)
        fill(columns, part, out, partial(_take_rows, staged.values, part.rows))


def take_rows(columns: ChunkColumns, name: str, stored: np.dtype[Any], out: Array) -> None:
    """Copy values of as many elements as a row of `out` has, converted where its dtype is another.

    Raises `SampleError` for a value of another length, `ShardReadError` for one whose bytes are gone.
    """
    row_bytes = math.prod(out.shape[1:]) * stored.itemsize
    staged = [part.spans(name) for part in columns.rows.parts]
    uniform = all(spans.uniform_bytes == row_bytes for spans in staged)
    if uniform and columns.may_load:
        take: Take = partial(_gather, *_joined_grid(columns.rows, staged, row_bytes))
    else:
        pieces = columns.pieces(name)
        if not uniform and not _replace_missing(columns, name, row_bytes, pieces):
            return
        take = partial(_copy_rows, columns, name, row_bytes, pieces)
    _convert(take, stored, row_bytes, out)


def copy_values(columns: ChunkColumns, name: str, pieces: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copy pieces of the rows' values, [rows, 2] address and bytes, one after the other.

    Raises `ShardReadError` for one whose bytes are gone.
    """
    if columns.may_load and out.nbytes >= _LOADED_BYTES * len(pieces):
        _load(pieces[pieces[:, 1] > 0], out)
    else:
        _copy(columns, name, pieces, out)


def fill(columns: ChunkColumns, part: WindowPart, out: Array, write: Callable[[Array], None]) -> None:
    """Let `write` fill the rows of a part: in place where they follow one another, else through a copy."""
    if isinstance(part.chunk_rows, slice):
        write(out[part.chunk_rows])
        return
    nbytes = len(part.rows) * (out.nbytes // max(1, len(out)))
    own = columns.arena.lease(nbytes or 1)[:nbytes].view(out.dtype).reshape(len(part.rows), *out.shape[1:])
    write(own)
    out[part.chunk_rows] = own


def _joined_grid(rows: ChunkRows, staged: Sequence[StagedSpans], row_bytes: int) -> tuple[Tensor, Tensor]:
    """One view of the memory of all windows, and which of its rows each row of the chunk is.

    Windows lie anywhere, and a call of `index_select` for each would cost more than the copy where a chunk
    takes few rows of many. But if the step is a power of two that divides all windows' own steps and the
    distances between their bases, every address is a number of steps from the lowest: one strided view over
    everything between them, most of which is never touched, serves one call.
    """
    parts = rows.parts
    if len(staged) == 1:
        grid = staged[0].grid
        return grid.view, torch.from_numpy(grid.places[parts[0].rows])
    grids = [spans.grid for spans in staged]
    base = min(grid.base for grid in grids)
    step = lowest_bit(functools.reduce(int.__or__, (g.step | (g.base - base) for g in grids)))
    places = np.empty(rows.num_rows, np.int64)
    for part, grid in zip(parts, grids, strict=True):
        own = grid.places[part.rows] * (grid.step // step)
        places[part.chunk_rows] = own + (grid.base - base) // step
    return Grid.of(base, step, places, row_bytes).view, torch.from_numpy(places)


def _replace_missing(columns: ChunkColumns, name: str, row_bytes: int, pieces: NDArray[np.int64]) -> bool:
    """Let the rows that lack a value, which will be left out, have another's; False if no row has one.

    Raises `SampleError` for a value of another length.
    """
    lengths = np.empty(len(pieces), np.int64)
    for part in columns.rows.parts:
        lengths[part.chunk_rows] = part.spans(name).lengths[part.rows]
    have, wrong = np.flatnonzero(lengths >= 0), np.flatnonzero((lengths >= 0) & (lengths != row_bytes))
    if len(wrong):
        reason = f"holds {lengths[wrong[0]]} bytes where every other sample holds {row_bytes}"
        raise columns.rows.sample_error(int(wrong[0]), reason, name)
    pieces[lengths < 0] = pieces[have[:1]]
    return len(have) > 0


def _copy_rows(
    columns: ChunkColumns,
    name: str,
    row_bytes: int,
    pieces: NDArray[np.int64],
    start: int,
    stop: int,
    out: Array,
) -> None:
    """Copy rows [start, stop), all of one length."""
    _copy(columns, name, pieces[start:stop], out.reshape(-1).view(np.uint8), row_bytes, start)


def _copy(
    columns: ChunkColumns,
    name: str,
    pieces: NDArray[np.int64],
    out: NDArray[np.uint8],
    each: int = -1,
    first_row: int = 0,
) -> None:
    """Copy pieces by the kernel, and raise for the first that is gone."""
    if not any(part.window.mapped for part in columns.rows.parts):
        copy_spans(pieces[:, 0], pieces[:, 1], out)
        return
    copied = copy_mapped(pieces, out, each)
    if copied < len(pieces):
        window, row = columns.rows.find(first_row + copied)
        raise window.truncated(row, name)


def _take_rows(values: Array, rows: NDArray[np.int64], out: Array) -> None:
    """`out[i] = values[rows[i]]`, as raw bits (torch's gather knows no uint32)."""
    n = len(values)
    row_bytes = values.nbytes // n if n else 0
    if not row_bytes:
        return
    unit = math.gcd(row_bytes, 8)
    source = values.reshape(-1).view(f"i{unit}").reshape(n, -1)
    target = out.reshape(-1).view(f"i{unit}").reshape(len(rows), -1)
    if source.shape[1] == 1:
        source, target = source[:, 0], target[:, 0]
    torch.index_select(torch.from_numpy(source), 0, torch.from_numpy(rows), out=torch.from_numpy(target))


def _convert(take: Take, stored: np.dtype[Any], row_bytes: int, out: Array) -> None:
    """Gather rows; of another dtype tile by tile, each converted while it is in the cache."""
    if stored == out.dtype:
        take(0, len(out), out)
        return
    tile = max(1, _TILE_BYTES // row_bytes)
    scratch = _scratch(min(tile, len(out)) * row_bytes)
    for start in range(0, len(out), tile):
        stop = min(start + tile, len(out))
        rows = scratch[: (stop - start) * row_bytes]
        take(start, stop, rows)
        np.copyto(out[start:stop], rows.view(stored).reshape(stop - start, *out.shape[1:]))


def _scratch(nbytes: int) -> NDArray[np.uint8]:
    """Memory of this thread that lasts until it asks again."""
    scratch: NDArray[np.uint8] | None = getattr(_of_thread, "scratch", None)
    if scratch is None or len(scratch) < nbytes:
        scratch = _of_thread.scratch = np.empty(max(nbytes, _TILE_BYTES), np.uint8)
    return scratch[:nbytes]


def _gather(view: Tensor, places: Tensor, start: int, stop: int, out: Array) -> None:
    """Rows [start, stop) of `places`, of the rows of a view."""
    rows = out.reshape(-1).view(np.uint8).reshape(stop - start, -1)
    torch.index_select(view, 0, places[start:stop], out=torch.from_numpy(rows))


def _load(pieces: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copy spans of memory ([n, 2] address and bytes), one after the other, in one call without the GIL."""
    if len(pieces):
        base, ends = int(pieces[:, 0].min()), pieces.sum(axis=1)
        memory, starts = torch.from_numpy(memory_at(base, int(ends.max()) - base)), pieces[:, 0] - base
        spans = zip(starts.tolist(), (ends - base).tolist(), strict=True)
        torch.cat([memory[start:end] for start, end in spans], out=torch.from_numpy(out))
