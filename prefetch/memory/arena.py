"""Reusable page-aligned buffers that come back when the last array or tensor viewing them dies.

A *slab* is one anonymous mapping of a rounded size; a *slot* is its use by one owner. The slot is the
base object of the numpy array made from it, and torch keeps that array alive as long as any view of the
tensor lives; so the death of the slot is the death of the last view, and the callback of a weak reference
returns the slab. It may run in any thread, inside any critical section (garbage collection), and in the
middle of a training loop, where a Ctrl-C that struck in Python code would be lost. Hence it is the `append`
of a deque, and the account is reconciled by whoever asks the arena for something. Freed slabs are reused last
in first out while their pages are warm; before a new slab is mapped, the coldest free ones are unmapped until
all mappings together fit `limit_bytes` (slots alone may exceed it: batches that the user keeps). Once the
arena is closed nobody asks it any more: a leased slab then belongs to its slot, and dies with it.

A forked child gets no slab that nobody views there, and the pages that this process writes to meanwhile are
not copied for it: free ones, and, where builders run no function of the user's here, what is staged for them.

With CUDA each slab is page-locked once, when it is mapped (`register`), and unlocked when unmapped.
Slabs may also come from elsewhere (`map_slab`): worker processes carve theirs from shared memory.

Batches that are not built in slots lie on the heap of the C library. glibc keeps freed blocks of up to 32 MB
in per-thread heaps: batches that one thread makes and another frees leave holes there that add up to several
times what is in use (50 MB of tensors held 360 MB of the system's). `malloc_trim` gives whole free pages
back; the next use of such a page costs a page fault, so it is called only where free memory is a good part of
a limit. Elsewhere than on glibc 2.33 or newer nothing is done.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prefetch.addresses import HeldMemory
from prefetch.memory.lifetimes import WeakCallback
from prefetch.weak_registry import WeakRegistry

GROWS = 16 << 20
"""Slabs of regions from so many bytes on have address space to grow to twice their size."""
_HUGE = 2 << 20
_TRIMS_IN_LIMIT = 8
"""The divisor of the limit: what the C library keeps of freed memory is looked at whenever such a part was
made."""

Register = Callable[[int, int], Callable[[], object]]
"""Page-locks a range for CUDA; gives what unlocks it, written in C: it is called where the last view dies."""


class Slab(Protocol):
    """Memory at a fixed address; free when nobody refers to it, at the latest."""

    nbytes: int
    """Bytes of it that may have been used."""
    most: int
    """Bytes that it may grow to, where it lies."""
    address: int

    def unmap(self) -> None:
        """Give the memory back to the system."""


class _Mapping:
    """A slab that is an anonymous mapping of its own."""

    def __init__(self, nbytes: int, register: Register | None) -> None:
        self.nbytes, self.most, self.is_forked = nbytes, nbytes, True
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE:
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        if register:
            callback = WeakCallback(self)  # it is heard of before the memory goes
            callback.call = register(self.address, nbytes)
            self._callback = callback

    def unmap(self) -> None:
        """Nothing more than to be dropped."""

    def set_forked(self, is_forked: bool) -> None:
        """Say whether children that are forked from now on get it, too."""
        if is_forked != self.is_forked:
            self.memory.madvise(mmap.MADV_DOFORK if is_forked else mmap.MADV_DONTFORK)
            self.is_forked = is_forked


class _Return(weakref.ref[HeldMemory]):
    """A record of a slot, which comes back when the slot dies."""

    __slots__ = ("nbytes", "on_return", "slab")
    nbytes: int
    on_return: Callable[[], None] | None
    slab: Slab | None
    """None: the arena was closed, and has no use for it."""


class Arena:
    """Slabs by size class. Thread-safe. `close` unmaps what is free now and the rest as it comes back.

    Args:
        limit_bytes: of all slabs; slots alone may exceed it.
        register: page-locks slabs.
        map_slab: makes a slab; None: an anonymous mapping.
        hides: what is leased without `on_return` no code of the user's ever sees.
        drops: whether slabs are unmapped that do not fit the limit; else, beyond it, any that is large enough
            is taken before a new one is made.
    """

    def __init__(
        self,
        *,
        limit_bytes: int,
        register: Register | None = None,
        map_slab: Callable[[int], Slab] | None = None,
        hides: bool = False,
        drops: bool = True,
    ) -> None:
        self._hides, self._limit_bytes, self._drops = hides, limit_bytes, drops
        self._map_slab = map_slab or (lambda size: _Mapping(size, register))
        self.is_flexible = False
        """True if leases of `GROWS` or more may have slabs of other sizes: they are charged, and return."""
        self._lock = threading.RLock()  # a finaliser may close us inside `lease`; guards all that follows
        self._free: OrderedDict[int, list[Slab]] = OrderedDict()  # size class -> stack; coldest class first
        self._free_bytes, self._leased_bytes, self._closed = 0, 0, False
        self._returned: deque[_Return] = deque()
        self._give_back: Callable[[_Return], None] = self._returned.append
        self._alive: set[_Return] = set()
        if map_slab is None:
            _arenas.add(self)  # at last: another thread may fork now

    def lease(self, nbytes: int, on_return: Callable[[], None] | None = None) -> NDArray[np.uint8]:
        """Take a writable, page-aligned uint8 array of `nbytes`; its content is arbitrary.

        `on_return` runs when the last view has died and the arena is asked for something: in any thread,
        under its lock.
        """
        return self.lease_at(nbytes, on_return)[0]

    def lease_at(
        self, nbytes: int, on_return: Callable[[], None] | None = None
    ) -> tuple[NDArray[np.uint8], int]:
        """Lease as `lease`, and return the address, too: numpy takes as long to tell it as to lease."""
        size = rounded_bytes(nbytes)
        with self._lock:
            if self._closed:
                raise RuntimeError("the arena is closed")
            if self._returned:
                self._reconcile()
            is_flexible = self.is_flexible and size >= GROWS
            takes_other = self._free_bytes and size >= _HUGE and (on_return or is_flexible or not self._drops)
            stack = self._free.get(size) or (self._other(size, is_flexible) if takes_other else None)
            slab = stack.pop() if stack else None
            if slab:
                self._free_bytes -= slab.nbytes
                slab.nbytes = size = max(size, slab.nbytes)
            self._leased_bytes += size
            is_full = self._free_bytes and self._free_bytes + self._leased_bytes > self._limit_bytes
            cold = self._take_cold() if is_full else ()
        for old in cold:
            old.unmap()
        if slab is None:
            slab = self._map(size)
        slot = HeldMemory(slab, slab.address, nbytes)
        back = _Return(slot, self._give_back)
        back.nbytes, back.on_return, back.slab = size, on_return, slab
        self._alive.add(back)
        if self._closed:  # meanwhile: `close` has not seen this one
            back.slab = None
        return np.asarray(slot), slab.address

    def _other(self, size: int, is_flexible: bool) -> list[Slab]:
        """Free slabs of another class for a batch: pages that are there are worth a quarter more. Locked.

        Flexible: up to twice the size, or one of half of it grows; any, if this is full or two are larger.
        """
        left = self._limit_bytes - self._leased_bytes
        free = [n for n, stack in self._free.items() for _ in stack]
        is_full = (is_flexible or not self._drops) and left - self._free_bytes < size
        is_any = is_full or (is_flexible and sum(n > 2 * size for n in free) > 1)
        most = sys.maxsize if is_any else 2 * size if is_flexible else min(size + size // 4, left)
        near = [n for n in free if size < n <= most]
        grown = [n for n in free if n < size <= self._free[n][-1].most and (is_full or size < 2 * n)]
        return self._free[min(near) if near else max(grown)] if near or grown else []

    def _map(self, size: int) -> Slab:
        try:
            return self._map_slab(size)
        except BaseException:
            with self._lock:
                self._leased_bytes -= size
            raise

    def reconcile(self) -> None:
        """Take back what has died since the account was looked at last. Cheap."""
        if self._returned:
            with self._lock:
                self._reconcile()

    def _reconcile(self) -> None:
        """Sort returned slabs into the free lists. Under the lock."""
        while self._returned:
            back = self._returned.popleft()
            self._alive.discard(back)
            slab, back.slab = back.slab, None
            if slab is not None:
                self._free.setdefault(slab.nbytes, []).append(slab)
                self._free.move_to_end(slab.nbytes)
                self._free_bytes += slab.nbytes
            self._leased_bytes -= back.nbytes
            if back.on_return is not None:
                back.on_return()

    def before_fork(self) -> list[_Mapping]:
        """Leave out of a child that is about to be forked what it cannot view; those slabs."""
        with self._lock:
            self._reconcile()
            hidden = [slab for stack in self._free.values() for slab in stack]
            leased = [back for back in self._alive if back.slab is not None]
        hidden += [back.slab for back in leased if self._hides and back.on_return is None and back.slab]
        left_out = [slab for slab in hidden if isinstance(slab, _Mapping)]
        left_out_ids = {id(slab) for slab in left_out}
        for back in leased:
            if isinstance(slab := back.slab, _Mapping) and id(slab) not in left_out_ids:
                slab.set_forked(True)
        for slab in left_out:
            slab.set_forked(False)
        return left_out

    def resize(self, limit_bytes: int) -> None:
        """Keep free slabs within another limit from now on."""
        with self._lock:
            self._limit_bytes = limit_bytes
            self._reconcile()
            cold = self._take_cold()
        for slab in cold:
            slab.unmap()

    def _take_cold(self) -> list[Slab]:
        """Free slabs beyond the limit; if flexible, but one: the next large lease needs its pages. Locked."""
        cold, spare_bytes = list[Slab](), max(self._free, default=0) if self.is_flexible else 0
        while self._drops and self._free_bytes > max(0, self._limit_bytes - self._leased_bytes + spare_bytes):
            size, stack = next(iter(self._free.items()))
            if not stack:
                del self._free[size]
                continue
            cold.append(stack.pop(0))
            self._free_bytes -= size
        return cold

    @property
    def num_leased(self) -> int:
        """Return the number of slots alive now."""
        with self._lock:
            self._reconcile()
            return len(self._alive)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped: leased and free."""
        with self._lock:
            self._reconcile()
            return self._free_bytes + self._leased_bytes

    def close(self) -> None:
        """Unmap every free slab; leased ones are unmapped as their last view dies. Idempotent."""
        with self._lock:
            self._closed = True
            self._reconcile()
            slabs = [slab for stack in self._free.values() for slab in stack]
            self._free.clear()
            self._free_bytes = 0
            for back in list(self._alive):
                back.slab = None
        for slab in slabs:
            slab.unmap()


_arenas: WeakRegistry[Arena] = WeakRegistry()
_left_out: list[_Mapping] = []
"""In a forked child, for ever: what is not mapped there must not be unmapped when it is something else."""


def _before_fork() -> None:
    for arena in _arenas:
        _left_out.extend(arena.before_fork())


os.register_at_fork(before=_before_fork, after_in_parent=_left_out.clear)


@lru_cache(maxsize=1024)  # asked for every slot, and batches are of few sizes
def rounded_bytes(nbytes: int) -> int:
    """Return the size of a slot of `nbytes`: whole pages; beyond 32 KiB at most an eighth more."""
    step = max(4096, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 4))
    return max(4096, -(-nbytes // step) * step)


class _Mallinfo(ctypes.Structure):
    _names_ = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names_.split(" ")]


_LIBC = ctypes.CDLL(None)
_SAYS_WHAT_IS_KEPT = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}


def trim_heap(most_bytes: int = 0, *, library: Any = _LIBC) -> None:
    """Give freed memory back to the system, if the C library keeps more than `most_bytes` of it."""
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return
    library.mallinfo2.restype = _Mallinfo
    library.malloc_trim.argtypes = (ctypes.c_size_t,)
    if library.mallinfo2().fordblks > most_bytes:
        library.malloc_trim(0)


def keep_heap(*, library: Any = _LIBC) -> None:
    """Have glibc keep what is freed for the next batch of samples: pages that it gives back cost faults.

    What the environment says of it is heeded.
    """
    if hasattr(library, "mallopt") and not _SAYS_WHAT_IS_KEPT & os.environ.keys():
        for option, nbytes in ((-3, 32 << 20), (-1, 128 << 20)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            library.mallopt(option, nbytes)


class HeapKeeper:
    """Looks after the heap whenever so much was made on it that it may have grown. Thread-safe.

    `trim`: gives freed memory back, where more than so many bytes of it are kept.
    """

    def __init__(self, limit_bytes: int, trim: Callable[[int], None] = trim_heap) -> None:
        self._share, self._trim = limit_bytes // _TRIMS_IN_LIMIT, trim
        self._lock = threading.Lock()  # guards _made_bytes
        self._made_bytes = self._most = 0

    def made(self, nbytes: int) -> None:
        """Record that so many bytes more were made, that will be freed some time."""
        with self._lock:
            self._made_bytes, self._most = self._made_bytes + nbytes, max(nbytes, self._most)
            if self._made_bytes < self._share:
                return
            self._made_bytes = 0
        self._trim(self._share + self._most)  # what is made next needs the pages of what was made last
