"""Windows of local files whose values are read straight into the batches that deliver them.

Where a column is delivered as the bytes that are stored, gathering it from a staged block would copy it
a second time. Here the order is known before the read: each own chunk of the window gets its slot when
the window is admitted, and one scattering read a block puts every value where its batch has it. What
is decoded later (labels, images) goes to a compact region, without headers and padding. Values of
batches that straddle windows wait in an edge buffer and are copied once.

Everything is planned for the whole window at once, so a block costs one task with a few system calls.
Only for formats that locate values, on files that `preadv` reads; the file's size and modification time
vouch for the index (`prefetch.store`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.decode import Output
from dataflow.staging import NotLocatableError, Source, StagedArray, StagedSpans, StagedWindow
from prefetch.arena import Arena, rounded_bytes
from prefetch.iovec import ScatterPlan, can_scatter, plan_scatter
from sharding.blocks import Spans
from sharding.urls import is_local

_ALIGN = 64
OnReturn = Callable[[int], Callable[[], None]]


def direct_outputs(source: Source) -> tuple[Output, ...]:
    """The outputs that a direct window reads into place: delivered as stored, and wanted once."""
    uses = Counter(name for output in source.outputs for name in output.sources)
    return tuple(
        output
        for output in source.outputs
        if output.kind in ("ragged", "spans")
        and output.dtype == output.source_dtype
        and uses[output.sources[0]] == 1
        and not output.sources[0].startswith("__")
    )


def reads_directly(source: Source) -> bool:
    """Whether windows of this dataset may be direct: local files, values that never overlap."""
    return can_scatter and source.format.name == "tar" and is_local(source.catalog.shard(0).url)


class DirectWindow(StagedWindow):
    """A window that is read by scattering.

    Args:
        numbers: [b] numbers of the blocks to stage, in read order.
        rows: as for `StagedWindow`; rows count over whole blocks.
        wanted: rows that this rank takes; None for all.
    """

    def __init__(
        self,
        source: Source,
        arena: Arena,
        numbers: NDArray[np.int64],
        rows: NDArray[np.int64],
        *,
        wanted: NDArray[np.int64] | None,
        on_return: OnReturn,
    ) -> None:
        found = [source.found(number) for number in numbers.tolist()]
        super().__init__(source, arena, [block for block, _ in found], rows)
        self._direct = direct_outputs(source)
        self._decoded = tuple(o for o in source.outputs if o not in self._direct)
        self._on_return = on_return
        self._wanted = np.arange(self.num_rows) if wanted is None else np.sort(wanted)
        self._starts: dict[str, NDArray[np.int64]] = {}
        self._lengths: dict[str, NDArray[np.int64]] = {}
        self._locate_all([spans for _, spans in found])
        self._chunk_bytes: list[dict[str, int]] = []
        self._edge_rows = self._wanted
        self._targets: dict[str, NDArray[np.int64]] = {}
        self._scatter: ScatterPlan | None = None
        self._lock = threading.Lock()  # guards _blocks_left
        self._blocks_left = len(self.blocks)

    # ---- before admission ---------------------------------------------------------------------------

    def _locate_all(self, found: Sequence[dict[str, Spans] | None]) -> None:
        """Where every value lies: bytes from the start of its shard, and lengths, for all rows."""
        names = self.source.columns
        located = [spans for spans in found if spans is not None]
        if len(located) < len(found):
            raise NotLocatableError(f"format {self.source.format.name} cannot tell where values lie")
        offsets = np.repeat([block.offset for block in self.blocks], np.diff(self.first_row))
        for name in names:
            starts = np.concatenate([spans[name].starts for spans in located])
            self._starts[name] = starts + offsets
            self._lengths[name] = np.concatenate([spans[name].lengths for spans in located])

    def plan(self) -> None:
        """Once the chunks are known: what every slot will take."""
        taken = np.zeros(self.num_rows, bool)
        for chunk in self.chunk_list:
            sizes: dict[str, int] = {}
            if len(chunk.needs) == 1:
                rows = _rows_of(chunk)
                if not taken[rows].any():
                    taken[rows] = True
                    sizes = {o.name: int(self._row_bytes(o, rows).sum()) for o in self._direct}
            self._chunk_bytes.append(sizes)
            chunk.staged_bytes = sum(rounded_bytes(size) for size in sizes.values())
        self._edge_rows = self._wanted[~taken[self._wanted]]
        edges = sum(rounded_bytes(int(self._row_bytes(o, self._edge_rows).sum())) for o in self._direct)
        own = sum(chunk.staged_bytes for chunk in self.chunk_list)
        arrays = sum(rounded_bytes(self.num_rows * o.row_bytes) for o in self._decoded if o.kind == "array")
        tables = 64 * self.num_rows * len(self._lengths)
        self.nbytes = own + edges + rounded_bytes(self._region_bytes()) + arrays + tables

    def _row_bytes(self, output: Output, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if output.kind == "spans":
            return np.full(len(rows), output.row_bytes, np.int64)
        return np.maximum(self._lengths[output.sources[0]][rows], 0)

    def _region_columns(self) -> list[str]:
        names = {name for output in self._decoded for name in output.sources}
        return [name for name in self._lengths if name in names]

    def _region_bytes(self) -> int:
        return sum(int(_aligned(self._lengths[name][self._wanted]).sum()) for name in self._region_columns())

    # ---- at admission ---------------------------------------------------------------------------------

    def reads(self) -> Sequence[Callable[[], None]]:
        """One task a block."""
        direct = {o.sources[0]: self._place_values(o) for o in self._direct}
        self._targets = self._place_region()
        self._scatter = self._plan_reads(direct | self._targets)
        return [partial(self._scatter_block, i) for i in range(len(self.blocks))]

    def _place_values(self, output: Output) -> NDArray[np.int64]:
        """Where each value of a direct column goes: its chunk's slot, or the edge."""
        addresses = np.zeros(self.num_rows, np.int64)
        keep: list[Any] = []
        for chunk, sizes in zip(self.chunk_list, self._chunk_bytes, strict=True):
            if output.name not in sizes:
                continue
            size, rows = sizes[output.name], _rows_of(chunk)
            slot = self.arena.lease(size or 1, self._on_return(rounded_bytes(size)))[:size]
            addresses[rows] = _places(slot, self._row_bytes(output, rows))
            chunk.slots[output.name] = slot
            if self.carried:  # padding may come back to these rows
                keep.append(slot)
        sizes_at_edge = self._row_bytes(output, self._edge_rows)
        edge = self.arena.lease(int(sizes_at_edge.sum()) or 1)
        addresses[self._edge_rows] = _places(edge, sizes_at_edge)
        lengths = self._lengths[output.sources[0]]
        self.staged[output.name] = StagedSpans(addresses, lengths, [*keep, edge])
        return addresses

    def _place_region(self) -> dict[str, NDArray[np.int64]]:
        """Where each value to be decoded goes, and where the decoded ones will."""
        self.region = self.arena.lease(self._region_bytes() or 1)
        at, targets = self.region.ctypes.data, {}
        for name in self._region_columns():
            sizes = _aligned(self._lengths[name][self._wanted])
            addresses = np.zeros(self.num_rows, np.int64)
            addresses[self._wanted] = at + np.cumsum(sizes) - sizes
            targets[name] = addresses
            at += int(sizes.sum())
        for output in self._decoded:
            if output.kind == "array":
                nbytes = self.num_rows * output.row_bytes
                used = self.arena.lease(nbytes or 1)[:nbytes].view(output.dtype)
                self.staged[output.name] = StagedArray(used.reshape(self.num_rows, *output.shape))
            elif output.sources[0] == "__url__":
                spans = StagedSpans(np.zeros(self.num_rows, np.int64), np.full(self.num_rows, -1, np.int64))
                for ordinal in range(len(self.blocks)):
                    spans.put(int(self.first_row[ordinal]), self._urls(ordinal))
                self.staged[output.name] = spans
            else:
                name = output.sources[0]
                self.staged[output.name] = StagedSpans(
                    targets[name], self._lengths[name], [self.region], in_region=True
                )
        return targets

    def _plan_reads(self, targets: dict[str, NDArray[np.int64]]) -> ScatterPlan:
        """The I/O vectors of all blocks: values in file order, whatever their column."""
        rows, names = self._wanted, list(targets)
        starts = np.stack([self._starts[name][rows] for name in names], axis=1)
        lengths = np.stack([self._lengths[name][rows] for name in names], axis=1)
        places = np.stack([targets[name][rows] for name in names], axis=1)
        if len(names) > 1:  # samples follow each other in the file, so sorting within each will do
            by_start = np.argsort(starts, axis=1)
            starts = np.take_along_axis(starts, by_start, 1)
            lengths = np.take_along_axis(lengths, by_start, 1)
            places = np.take_along_axis(places, by_start, 1)
        have = lengths > 0
        per_row = np.concatenate(([0], np.cumsum(have.sum(axis=1))))
        bounds = per_row[np.searchsorted(rows, self.first_row)]
        return plan_scatter(starts[have], lengths[have], places[have], bounds)

    # ---- on reader threads ------------------------------------------------------------------------------

    def _scatter_block(self, ordinal: int) -> None:
        assert self._scatter is not None
        block = self.blocks[ordinal]
        if not self._scatter.is_empty(ordinal):
            self.source.reader.scatter(block.shard, self._scatter, ordinal)
            self.source.traffic.add(block.length, block.nbytes)
        with self._lock:
            self._blocks_left -= 1
            last = self._blocks_left == 0
        if last:
            self._parse()

    def _parse(self) -> None:
        """Numbers of the whole window at once, by the thread that read the last block."""
        assert self.region is not None
        base = self.region.ctypes.data
        for output in self._decoded:
            staged = self.staged[output.name]
            if not isinstance(staged, StagedArray):
                continue
            name, rows = output.sources[0], self._wanted
            assert output.parse is not None
            starts = self._targets[name][rows] - base
            values, bad = output.parse(Spans(self.region, starts, self._lengths[name][rows]))
            staged.values[rows] = values
            staged.bad.update((int(rows[row]), reason) for row, reason in bad)


def _rows_of(chunk: Any) -> NDArray[np.int64]:
    """The rows of a chunk that needs one window only, in order."""
    rows: NDArray[np.int64] = np.concatenate([run.rows for run in chunk.runs()])
    return rows


def _places(slot: NDArray[np.uint8], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Addresses of consecutive values in a slot."""
    return slot.ctypes.data + np.cumsum(sizes) - sizes


def _aligned(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-np.maximum(lengths, 0) // _ALIGN) * _ALIGN
