"""What the C library keeps of freed memory, given back to the system before it is much against a limit.

glibc keeps freed blocks of up to 32 MB in per-thread heaps: batches that one thread makes and another frees
leave holes there that add up to several times what is in use (50 MB of tensors held 360 MB of the system's).
`malloc_trim` gives whole free pages back; the next use of such a page costs a page fault, so it is called
only where free memory is a good part of a limit. Elsewhere than on glibc 2.33 or newer nothing is done.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any


class _Mallinfo(ctypes.Structure):
    _names_ = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names_.split(" ")]


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return None
    library.mallinfo2.restype = _Mallinfo
    library.malloc_trim.argtypes = (ctypes.c_size_t,)
    return library


def trim_heap(most_bytes: int = 0) -> None:
    """Give freed memory back to the system, if the C library keeps more than `most_bytes` of it."""
    library = _libc()
    if library is not None and library.mallinfo2().fordblks > most_bytes:
        library.malloc_trim(0)


class HeapKeeper:
    """Looks after the heap whenever so much was made on it that it may have grown. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._share = limit_bytes // 2
        self._lock = threading.Lock()  # guards _made
        self._made = 0

    def made(self, nbytes: int) -> None:
        """So many bytes more were made, that will be freed some time."""
        with self._lock:
            self._made += nbytes
            if self._made < self._share:
                return
            self._made = 0
        trim_heap(self._share)
