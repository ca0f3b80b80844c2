"""A builder's function, line and sample at this moment, told from its stack when somebody asks.

Nothing is noted while batches are built, so that this costs nothing.
"""

from __future__ import annotations

from contextlib import suppress
from types import FrameType

from dataflow.batch.builder import BatchBuilder
from dataflow.outputs.columns import ChunkColumns, ChunkRows

_TRANSFORM, _DECODER = BatchBuilder._apply.__code__, ChunkColumns.decoded.__code__


def row_at(frame: FrameType | None) -> tuple[ChunkRows, int] | None:
    """The rows of the chunk that a stack is building, and the one it is at; None: at no single one."""
    while frame is not None:
        names = frame.f_locals if frame.f_code in (_TRANSFORM, _DECODER) else {}
        if frame.f_code is _TRANSFORM:
            return names["self"].rows, int(names["chunk_row"])
        if frame.f_code is _DECODER and names["value"] is not None:
            return names["self"].rows, int(names["value"][1])
        frame = frame.f_back
    return None


def sample_text(rows: ChunkRows, row: int) -> str:
    """Such as ", at sample '0017' of x.tar"; "" where it cannot be told any more."""
    with suppress(Exception):  # the chunk may have ended meanwhile
        window, window_row = rows.find(row)
        key, shard = window.name_at_once(window_row)
        return f", at sample {key!r} of {shard}"
    return ""


def sample_at(frame: FrameType) -> str:
    """`sample_text` of the sample that a stack of this process is at; "": at none."""
    position = row_at(frame)
    return "" if position is None else sample_text(*position)
