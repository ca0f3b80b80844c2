"""Rows of memory gathered into a slot, each kind in one call that holds no lock of the interpreter."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.decode.outputs import Output
from prefetch.memory.addresses import memory_at

Array = NDArray[Any]
Take = Callable[[int, int, Array], None]
"""Writes rows [start, stop) as they are stored."""
_TILE_BYTES = 1 << 20
"""Widening goes through a scratch tile of this size, so that it stays in the L2 cache."""
_of_thread = threading.local()


def take_rows(values: Array, rows: NDArray[np.int64], out: Array) -> None:
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


def widen(output: Output, take: Take, out: Array) -> None:
    """Gather rows as they are stored, tile by tile, and convert each tile while it is in the cache."""
    tile = max(1, _TILE_BYTES // output.source_row_bytes)
    scratch = _scratch(min(tile, len(out)) * output.source_row_bytes)
    for start in range(0, len(out), tile):
        stop = min(start + tile, len(out))
        stored = scratch[: (stop - start) * output.source_row_bytes]
        take(start, stop, stored)
        np.copyto(out[start:stop], stored.view(output.source_dtype).reshape(stop - start, *output.shape))


def _scratch(nbytes: int) -> NDArray[np.uint8]:
    """Memory of this thread that lasts until it asks again."""
    known: NDArray[np.uint8] | None = getattr(_of_thread, "scratch", None)
    if known is None or len(known) < nbytes:
        known = _of_thread.scratch = np.empty(max(nbytes, _TILE_BYTES), np.uint8)
    return known[:nbytes]


def gather(view: Tensor, places: Tensor, start: int, stop: int, out: Array) -> None:
    """Rows [start, stop) of `places`, of the rows of a view."""
    rows = out.reshape(-1).view(np.uint8).reshape(stop - start, -1)
    torch.index_select(view, 0, places[start:stop], out=torch.from_numpy(rows))


def load(pieces: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copy spans of memory ([n, 2] address and bytes), one after the other, in one call without the GIL."""
    if len(pieces):
        base, ends = int(pieces[:, 0].min()), pieces.sum(axis=1)
        memory, starts = torch.from_numpy(memory_at(base, int(ends.max()) - base)), pieces[:, 0] - base
        spans = zip(starts.tolist(), (ends - base).tolist(), strict=True)
        torch.cat([memory[start:end] for start, end in spans], out=torch.from_numpy(out))
