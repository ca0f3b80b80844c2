"""Windows of local files whose values are read straight into the batches that deliver them.

Where a column is delivered as the bytes that are stored, gathering it from a staged block would copy it
a second time. Here the order is known before the read: each own chunk of the window gets its slot when
the window is admitted, and one scattering read a block puts every value where its batch has it. What
is decoded later (labels, images) goes to a compact region, without headers and padding. Values of
batches that straddle windows wait in an edge buffer and are copied once.

Only for formats that locate values, on files that `preadv` reads; the file's size and modification time
vouch for the index (`prefetch.store`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.decode import Output
from dataflow.staging import Source, StagedArray, StagedSpans, StagedWindow
from prefetch.arena import Arena, rounded_bytes
from prefetch.iovec import can_scatter
from sharding.blocks import Columns, Spans
from sharding.urls import is_local

_ALIGN = 64


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
    """A window that is read by scattering. `sparse` names the rows of each block that are wanted."""

    def __init__(
        self,
        source: Source,
        arena: Arena,
        blocks: NDArray[np.int64],
        rows: NDArray[np.int64],
        *,
        sparse: Sequence[NDArray[np.int64]],
        on_return: Callable[[int], Callable[[], None]],
    ) -> None:
        super().__init__(source, arena, blocks, rows, sparse=sparse)
        self._direct = direct_outputs(source)
        self._staged_outputs = tuple(o for o in source.outputs if o not in self._direct)
        self._on_return = on_return
        self._lengths = {name: self._whole(name) for name in self._spans[0]}
        self._targets: dict[str, NDArray[np.int64]] = {}
        self._chunk_bytes: list[dict[str, int]] | None = None
        self.nbytes = 0

    def _whole(self, name: str) -> NDArray[np.int64]:
        """Lengths of a column over all rows of the window."""
        return np.concatenate([spans[name].lengths for spans in self._spans])

    def chunks(self) -> Sequence[Any]:
        """The chunks whose last window this is."""
        return self.chunk_list

    def plan(self) -> None:
        """Once the chunks are known: what every slot will take."""
        taken = np.zeros(self.num_rows, bool)
        self._chunk_bytes = []
        for chunk in self.chunk_list:
            sizes: dict[str, int] = {}
            if len(chunk.needs) == 1:
                rows = np.concatenate([run.rows for run in chunk.runs()])
                if len(np.unique(rows)) == len(rows) and not taken[rows].any():
                    taken[rows] = True
                    sizes = {o.name: int(self._row_bytes(o, rows).sum()) for o in self._direct}
            self._chunk_bytes.append(sizes)
            chunk.staged_bytes = sum(rounded_bytes(size) for size in sizes.values())
        self._edge_rows = np.flatnonzero(~taken)
        edges = sum(int(self._row_bytes(o, self._edge_rows).sum()) for o in self._direct)
        own = sum(chunk.staged_bytes for chunk in self.chunk_list)
        arrays = sum(
            rounded_bytes(self.num_rows * o.row_bytes) for o in self._staged_outputs if o.kind == "array"
        )
        tables = 32 * self.num_rows * len(self.source.outputs)
        self.nbytes = own + rounded_bytes(edges) + rounded_bytes(self._region_bytes()) + arrays + tables

    def _row_bytes(self, output: Output, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if output.kind == "spans":
            return np.full(len(rows), output.row_bytes, np.int64)
        return np.maximum(self._lengths[output.sources[0]][rows], 0)

    def _region_columns(self) -> list[str]:
        names = {name for output in self._staged_outputs for name in output.sources}
        return [name for name in self._lengths if name in names]

    def _region_bytes(self) -> int:
        return sum(int(_aligned(self._lengths[name]).sum()) for name in self._region_columns())

    def _prepare(self) -> None:
        assert self._chunk_bytes is not None
        for output in self._direct:
            addresses = np.zeros(self.num_rows, np.int64)
            lengths = self._lengths[output.sources[0]]
            keep: list[Any] = []
            for chunk, sizes in zip(self.chunk_list, self._chunk_bytes, strict=True):
                if output.name not in sizes:
                    continue
                size = sizes[output.name]
                slot = self.arena.lease(size or 1, self._on_return(rounded_bytes(size)))[:size]
                rows = np.concatenate([run.rows for run in chunk.runs()])
                addresses[rows] = _places(slot, self._row_bytes(output, rows))
                chunk.slots[output.name] = slot
                if self.carried:  # padding may come back to these rows
                    keep.append(slot)
            edge_bytes = self._row_bytes(output, self._edge_rows)
            edge = self.arena.lease(int(edge_bytes.sum()) or 1)
            addresses[self._edge_rows] = _places(edge, edge_bytes)
            self.staged[output.name] = StagedSpans(addresses, lengths.copy(), [*keep, edge])
            self._targets[output.sources[0]] = addresses
        self._prepare_region()

    def _prepare_region(self) -> None:
        self.region = self.arena.lease(self._region_bytes() or 1)
        at = self.region.ctypes.data
        for name in self._region_columns():
            sizes = _aligned(self._lengths[name])
            self._targets[name] = at + np.cumsum(sizes) - sizes
            at += int(sizes.sum())
        for output in self._staged_outputs:
            if output.kind == "array":
                nbytes = self.num_rows * output.row_bytes
                used = self.arena.lease(nbytes or 1)[:nbytes].view(output.dtype)
                self.staged[output.name] = StagedArray(used.reshape(self.num_rows, *output.shape))
            else:
                lengths = np.full(self.num_rows, -1, np.int64)
                self.staged[output.name] = StagedSpans(np.zeros(self.num_rows, np.int64), lengths)

    def _read(self, ordinal: int, at: int) -> None:
        block = self.blocks[ordinal]
        rows = slice(int(self.first_row[ordinal]), int(self.first_row[ordinal + 1]))
        spans = self._spans[ordinal]
        starts = np.concatenate([s.starts for s in spans.values()])
        lengths = np.concatenate([s.lengths for s in spans.values()])
        targets = np.concatenate([self._targets[name][rows] for name in spans])
        have = np.flatnonzero(lengths > 0)
        order = have[np.argsort(starts[have], kind="stable")]
        if len(order):
            self.source.reader.scatter(
                block.shard, block.offset + starts[order], lengths[order], targets[order]
            )
        read = int(lengths[order].sum())
        self.source.traffic.add(read, read)
        assert self.region is not None
        base = self.region.ctypes.data
        columns: Columns = {
            name: Spans(self.region, self._targets[name][rows] - base, spans[name].lengths)
            for name in self._region_columns()
        }
        self._stage(ordinal, columns)


def _places(slot: NDArray[np.uint8], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Addresses of consecutive values in a slot."""
    return slot.ctypes.data + np.cumsum(sizes) - sizes


def _aligned(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-np.maximum(lengths, 0) // _ALIGN) * _ALIGN
