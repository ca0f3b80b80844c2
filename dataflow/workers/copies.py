"""Copies of a dataset for several threads of this process, made as worker processes get theirs."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from dataflow.workers.payload import Packed, pack, unpack
from prefetch.workers.shared_arena import create_file, read_message


def copies(obj: Any, count: int) -> list[Any]:
    """`count` copies. Their arrays and tensors share memory until they are written to.

    Raises whatever pickling raises.
    """
    return copies_of(pack(obj), count)


def copies_of(packed: Packed, count: int) -> list[Any]:
    """`count` copies of what was packed."""
    fd = create_file(packed.nbytes)
    try:
        with mmap.mmap(fd, packed.nbytes) as memory:
            view = np.frombuffer(memory, np.uint8)
            packed.copy_to(view.ctypes.data)
            del view  # else the mapping could not be closed
        layout = packed.meta_offset, len(packed.meta), len(packed.spans)
        return [unpack(read_message(fd, 0, packed.nbytes), *layout) for _ in range(count)]
    finally:
        os.close(fd)
