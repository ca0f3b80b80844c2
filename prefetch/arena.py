"""Reusable page-aligned buffers that come back when the last array or tensor viewing them dies.

A *slab* is one anonymous mapping of a rounded size; a *lease* is its use by one owner. The lease is the
base object of the numpy array made from it, and torch keeps that array alive as long as any view of the
tensor lives; so the death of the lease is the death of the last view, and a weakref callback returns
the slab. The callback may run in any thread, inside any critical section (garbage collection), hence
it only appends to a deque; `lease` settles the account later. Freed slabs are reused last in first out
while their pages are warm; before a new slab is mapped, the coldest free ones are unmapped until all
mappings together fit `limit_bytes` (leases alone may exceed it: batches that the user keeps).

With CUDA each slab is page-locked once, when it is mapped (`register`), and unlocked when unmapped.
Slabs may also come from elsewhere (`map_slab`): worker processes carve theirs from shared memory.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefetch.addresses import array_interface

_HUGE = 2 << 20


class Slab(Protocol):
    """Memory of a fixed size at a fixed address."""

    nbytes: int
    address: int

    def unmap(self) -> None:
        """Give the memory back to the system."""


class _Mapping:
    """A slab that is an anonymous mapping of its own."""

    def __init__(self, nbytes: int, register: Callable[[int, int], Callable[[], None]] | None) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self._unregister = register(self.address, nbytes) if register else None

    def unmap(self) -> None:
        if self._unregister:
            self._unregister()
        self.memory.close()


class Lease:
    """The use of a slab by one owner; exported to numpy as a writable uint8 array."""

    __slots__ = ("__array_interface__", "__weakref__", "slab")

    def __init__(self, slab: Slab, nbytes: int) -> None:
        self.slab = slab
        self.__array_interface__ = array_interface(slab.address, nbytes)


class Arena:
    """Slabs by size class. Thread-safe. `close` unmaps what is free now and the rest as it comes back."""

    def __init__(
        self,
        *,
        limit_bytes: int,
        register: Callable[[int, int], Callable[[], None]] | None = None,
        map_slab: Callable[[int], Slab] | None = None,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._map_slab = map_slab or (lambda size: _Mapping(size, register))
        self._lock = (
            threading.RLock()
        )  # a finaliser may close us inside `lease`; guards _free, _free_bytes, _leased_bytes, _closed
        self._free: OrderedDict[int, list[Slab]] = OrderedDict()  # size class -> stack; coldest class first
        self._free_bytes = 0
        self._leased_bytes = 0
        self._closed = False
        self._returned: deque[Slab] = deque()
        self._alive: dict[weakref.ref[Lease], tuple[Slab, Callable[[], None] | None]] = {}

    def lease(self, nbytes: int, on_return: Callable[[], None] | None = None) -> NDArray[np.uint8]:
        """Take a writable, page-aligned uint8 array of `nbytes`; its content is arbitrary.

        `on_return` runs when the last view has died: in any thread, inside any lock; it must only
        do what is safe there (append to a deque).
        """
        size = rounded_bytes(nbytes)
        with self._lock:
            if self._closed:
                raise RuntimeError("the arena is closed")
            self._settle()
            stack = self._free.get(size)
            slab = stack.pop() if stack else None
            self._leased_bytes += size
            if slab is not None:
                self._free_bytes -= size
            cold = self._take_cold()
        for old in cold:
            old.unmap()
        if slab is None:
            slab = self._map(size)
        lease = Lease(slab, nbytes)
        self._alive[weakref.ref(lease, self._on_death)] = (slab, on_return)
        return np.asarray(lease)

    def _map(self, size: int) -> Slab:
        try:
            return self._map_slab(size)
        except BaseException:
            with self._lock:
                self._leased_bytes -= size
            raise

    def _on_death(self, ref: weakref.ref[Lease]) -> None:
        slab, on_return = self._alive.pop(ref)
        self._returned.append(slab)
        if self._closed:  # looked at after the append: whatever `close` did not see is unmapped here
            self._unmap_returned()
        if on_return:
            on_return()

    def _unmap_returned(self) -> None:
        with suppress(IndexError):
            while True:
                self._returned.popleft().unmap()  # atomic: one thread takes each slab

    def _settle(self) -> None:
        """Sort returned slabs into the free lists. Under the lock."""
        while self._returned:
            slab = self._returned.popleft()
            self._free.setdefault(slab.nbytes, []).append(slab)
            self._free.move_to_end(slab.nbytes)
            self._free_bytes += slab.nbytes
            self._leased_bytes -= slab.nbytes

    def _take_cold(self) -> list[Slab]:
        """Free slabs that no longer fit the limit, coldest first. Under the lock."""
        cold = []
        while self._free_bytes and self._free_bytes + self._leased_bytes > self._limit_bytes:
            size, stack = next(iter(self._free.items()))
            if not stack:
                del self._free[size]
                continue
            cold.append(stack.pop(0))
            self._free_bytes -= size
        return cold

    @property
    def num_leased(self) -> int:
        """Leases alive now."""
        return len(self._alive)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped: leased and free."""
        if self._closed:
            return sum(slab.nbytes for slab, _ in list(self._alive.values()))
        with self._lock:
            self._settle()
            return self._free_bytes + self._leased_bytes

    def close(self) -> None:
        """Unmap every free slab; leased ones are unmapped as their last view dies. Idempotent."""
        with self._lock:
            self._closed = True
            self._settle()
            slabs = [slab for stack in self._free.values() for slab in stack]
            self._free.clear()
            self._free_bytes = 0
        for slab in slabs:
            slab.unmap()


def rounded_bytes(nbytes: int) -> int:
    """What a lease of `nbytes` takes: whole pages; beyond 32 KiB at most an eighth more than asked for."""
    step = max(4096, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 4))
    return max(4096, -(-nbytes // step) * step)
