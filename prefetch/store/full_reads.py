"""A range of an open file, all of it: one system call may bring less than it was asked for."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray


def read_fully(descriptor: int, offset: int, out: NDArray[np.uint8]) -> int:
    """Fill `out` from an offset; the bytes read, fewer than `out` holds only where the file ends.

    Raises `OSError` as the system does. Releases the GIL.
    """
    view, done = out.data, 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done
