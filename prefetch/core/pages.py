"""Ranges of mapped files as a table, and calls of the C library about pages.

A range is six numbers (`core_range` of core.h): the address of the file's path, zero-terminated; its size
and modification time in nanoseconds, when it was indexed; the address and bytes of the pages, 0 bytes where
none are wanted; and flags.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any


class RangeFlag:
    """The enum `core_range_flag` of core.h. Numbers: arithmetic of an enumeration takes longer."""

    CHECK = 1
    """The file must still be what it was."""
    KEPT = 2
    """Its pages may be there: they are looked for first."""
    AHEAD = 4
    """The disk is asked for all pages before the first is waited for."""


@cache
def memory_calls() -> Any:
    """The C library's `madvise` and `mmap`, called without the interpreter lock."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


@cache
def _quick_calls() -> Any:
    """Return the library for calls of microseconds, which keep the lock: to get it back takes longer."""
    library = ctypes.PyDLL(None, use_errno=True)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return library


def has_pages(address: int, nbytes: int) -> bool:
    """Return whether all pages of a range are there."""
    resident = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    return _quick_calls().mincore(address, nbytes, resident) == 0 and b"\0" not in bytes(resident)
