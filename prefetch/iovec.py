"""Copy many byte spans in one call that holds no lock of the interpreter.

A ragged batch is gathered from spans that lie anywhere in memory. numpy and torch have no gather
for spans of different lengths, and a Python loop would take the GIL once per sample. The kernel has
one: `process_vm_readv(2)` on our own process copies up to 1,024 spans per system call, at memcpy speed
(measured: 6.4 GB/s for 98 kB spans, 1.1 M spans/s for 3 kB spans, one thread). Where the call is missing
or forbidden (some containers filter it), `memmove` per span does the same, slower.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

_IOV_MAX = 1024


def _load() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    word = ctypes.c_ulong
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, word, ctypes.c_void_p, word, word]
    call.restype = ctypes.c_ssize_t
    return call


_readv = _load()


def copy_spans(addresses: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copy spans of this process's memory, one after the other, into `out`.

    Args:
        addresses: [n] first byte of each span. The caller keeps the memory alive and has checked it.
        lengths: [n] bytes of each span, >= 0; their sum is `len(out)`.
        out: contiguous destination.

    The GIL is released for up to 1,024 spans at a time. Thread-safe for disjoint destinations.
    """
    if int(lengths.sum()) != out.nbytes:
        raise ValueError(f"spans hold {int(lengths.sum())} bytes, the destination {out.nbytes}")
    if _readv is None or not _copy_by_kernel(addresses, lengths, out):
        _copy_by_memmove(addresses, lengths, out)


def _copy_by_kernel(addresses: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.uint8]) -> bool:
    remote = np.empty((len(addresses), 2), np.int64)
    remote[:, 0], remote[:, 1] = addresses, lengths
    ends = np.cumsum(lengths)
    local = np.empty(2, np.int64)
    base, pid, done = out.ctypes.data, os.getpid(), 0
    for first in range(0, len(addresses), _IOV_MAX):
        last = min(first + _IOV_MAX, len(addresses))
        todo = int(ends[last - 1]) - done
        local[0], local[1] = base + done, todo
        got = _readv(pid, local.ctypes.data, 1, remote.ctypes.data + first * 16, last - first, 0)
        if got != todo:
            return False
        done += todo
    return True


def _copy_by_memmove(
    addresses: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    target = out.ctypes.data
    for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target, address, length)
        target += length
