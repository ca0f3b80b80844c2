"""Batches cross from worker processes in one shared-memory file, without a copy by the receiver.

The file is anonymous (`memfd_create`, so the size of `/dev/shm` does not bound it) and sparse: pages exist
where something was written. It begins with a header, then what the parent sends to every worker
alike, then one *region* a worker. A worker carves slabs from its own region and is the only one who
hands them out: it *grants* a range, which the parent views by its offset. While an array or tensor views
it, the range is *in use*; when the last one has died, the parent sends the offset back with the next task.
So no lock is shared between processes, and a worker that is killed leaves none behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import tempfile
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetch.addresses import HeldMemory, memory_at
from prefetch.memory.arena import GROWS, Arena, rounded_bytes
from prefetch.memory.lifetimes import WeakCallback, only_ours
from prefetch.workers import REGION_BYTES

_PAGE = mmap.PAGESIZE
HEADER_BYTES = 16 * _PAGE
_MIN_REGION_BYTES = 1 << 26

Buffer = NDArray[np.uint8]
Unregister = Callable[[], object]
"""Unlocks a range for CUDA; written in C."""


def page_rounded(nbytes: int) -> int:
    """The next multiple of the page size."""
    return -(-nbytes // _PAGE) * _PAGE


def create_file(nbytes: int) -> int:
    """Descriptor of an anonymous shared-memory file of `nbytes`, all of it holes.

    Without `memfd_create` (an old kernel, or a sandbox that forbids it) it is a file without a name in the
    folder for temporary files, whose free space then bounds it.

    Raises:
        OSError: that folder cannot hold such a file.
    """
    try:
        fd = os.memfd_create("dataflow", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        with tempfile.TemporaryFile(prefix="dataflow-") as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            error.add_note(
                f"shared memory for {nbytes:,} bytes of address space is a sparse file here; if memfd_create "
                f"is forbidden, it lies in {tempfile.gettempdir()}: set TMPDIR to another folder"
            )
        raise
    return fd


def give_pages_back(memory: mmap.mmap, start: int, nbytes: int) -> bool:
    """Take the pages of a range out of the file; they read as zeros.

    False: its file system cannot, and they stay until the file goes.
    """
    try:
        memory.madvise(mmap.MADV_REMOVE, start, nbytes)
    except OSError:
        return False
    return True


def mapped(fd: int, nbytes: int, offset: int = 0) -> mmap.mmap:
    """Map a part of such a file; core dumps leave it out, as they would be of 400 GB through a pipe."""
    memory = mmap.mmap(fd, nbytes, offset=offset)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTDUMP)
    return memory


class Header:
    """Words of int64 that everybody sees. Each has one writer, so no lock is needed."""

    STOP, GENERATION = 0, 1
    WORKERS = 8
    """The first of one word a worker, which it sets when it can answer signals."""

    def __init__(self, fd: int) -> None:
        self.words = np.frombuffer(mmap.mmap(fd, HEADER_BYTES), np.int64)

    def get(self, word: int) -> int:
        """The value of one word."""
        return int(self.words[word])

    def set(self, word: int, value: int) -> None:
        """Write one word."""
        self.words[word] = value


class _RegionSlab:
    """A slab inside a worker's region; unmapped, its pages go and the range waits for its like."""

    def __init__(self, region: Region, start: int, nbytes: int, most: int) -> None:
        self._region, self.start, self.nbytes, self.most = region, start, nbytes, most
        self.address = region.address + start

    def unmap(self) -> None:
        self._region.drop(self)


class Region:
    """A worker's part of the shared file, and the arena over it. Used by that worker's process only.

    Args:
        fd: the shared file.
        offset: where the region begins in the file, in bytes.
        nbytes: its length.
        limit_bytes: free slabs beyond this are given back to the system.
        is_locked: slabs stay, as a device reads the pages that they had when they were page-locked.
    """

    def __init__(
        self, fd: int, offset: int, nbytes: int, limit_bytes: int, *, is_locked: bool = False
    ) -> None:
        self._memory = mapped(fd, nbytes, offset)
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._offset, self._nbytes = offset, nbytes
        self._end = 0
        self._dropped: defaultdict[int, list[int]] = defaultdict(list)
        self.arena = Arena(limit_bytes=limit_bytes, map_slab=self._carve, drops=not is_locked)
        self._leases: dict[int, list[Any]] = {}

    def _carve(self, nbytes: int) -> _RegionSlab:
        most = 2 * nbytes if nbytes >= GROWS and self._end + 4 * nbytes <= self._nbytes else nbytes
        if dropped := self._dropped[most]:
            return _RegionSlab(self, dropped.pop(), nbytes, most)
        if self._end + most > self._nbytes:
            raise MemoryError(
                f"a worker's batches need more than {self._nbytes:,} bytes of shared memory; "
                "lower batch_size or prefetch_factor, or keep fewer batches"
            )
        slab = _RegionSlab(self, self._end, nbytes, most)
        self._end += most
        return slab

    def drop(self, slab: _RegionSlab) -> None:
        """Give a slab's pages back to the system."""
        give_pages_back(self._memory, slab.start, slab.nbytes)
        self._dropped[slab.most].append(slab.start)

    def offset_of(self, address: int) -> int:
        """Return the offset of an address of this region in the file."""
        return address - self.address + self._offset

    def holds(self, address: int) -> bool:
        """Return whether an address lies in it."""
        return 0 <= address - self.address < self._nbytes

    def grant(self, leased: Any, offset: int) -> int:
        """Keep what is leased, or a part of it, until the parent gives it back; its offset in the file."""
        self._leases.setdefault(offset, []).append(leased)
        return offset

    def take_back(self, offset: int) -> None:
        """The parent's last view of what was granted at `offset` has died."""
        leases = self._leases[offset]
        leases.pop()
        if not leases:
            del self._leases[offset]


class _GrantEnd(weakref.ref[HeldMemory]):
    """A record of a grant, which comes back when the grant ends."""

    __slots__ = ("nbytes", "offset", "on_end", "worker")
    worker: int
    offset: int
    nbytes: int
    on_end: Callable[[int], None] | None


class _Remains:
    """A range of a closed file that is still used; `calls` give it back with the last grant of it.

    They are written in C: that may die anywhere.
    """

    def __init__(self, file: SharedFile, calls: Sequence[Callable[[], object]]) -> None:
        self._file = file
        self._callbacks = [WeakCallback(self) for _ in calls]
        for callback, call in zip(reversed(self._callbacks), calls, strict=True):  # the last is called first
            callback.call = call

    def close(self) -> None:
        """Let go in a forked child: the pages are the parent's."""
        for callback in self._callbacks:
            callback.call = bool


class SharedFile:
    """The parent's side: the file, its mapping, and which worker's ranges are in use.

    Args:
        num_workers: regions.
        message_bytes: of what every worker gets alike.
        register: page-locks a range for CUDA, once per range used, and gives the unlocking function.
        region_bytes: address space of a region; less where the process may not have so much.

    Not thread-safe, but arrays may die in any thread.
    """

    def __init__(
        self,
        num_workers: int,
        message_bytes: int,
        register: Callable[[int, int], Unregister] | None = None,
        *,
        region_bytes: int = REGION_BYTES,
    ) -> None:
        self.message_offset = HEADER_BYTES
        self.message_bytes = message_bytes
        self._first_region = HEADER_BYTES + page_rounded(message_bytes)
        self._num_workers = num_workers
        self.region_bytes = _allowed_region_bytes(num_workers, region_bytes)
        while True:
            try:
                self._nbytes = self._first_region + num_workers * self.region_bytes
                self._create()
                break
            except OSError:
                if self.region_bytes <= _MIN_REGION_BYTES:
                    raise
                self.region_bytes //= 2
        self._owner = os.getpid()
        self._address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.header = Header(self.fd)
        self._register = register
        self._registered: dict[int, Unregister] = {}
        self._locked = Counter[int]()  # bytes from each offset on that are page-locked
        self._grants: set[_GrantEnd] = set()
        self._ended: deque[_GrantEnd] = deque()
        self._end: Callable[[_GrantEnd], None] = self._ended.append
        self._returned: list[deque[int]] = [deque() for _ in range(num_workers)]
        self._abandoned: set[int] = set()
        """Regions whose worker has died, and whose pages are not given back yet."""
        self._closed = False

    def _create(self) -> None:
        self.fd = create_file(self._nbytes)
        try:
            self.memory = mapped(self.fd, self._nbytes)
        except BaseException as error:
            os.close(self.fd)
            if not isinstance(error, OSError):
                raise
            raise OSError(
                error.errno,
                f"cannot map {self._nbytes:,} bytes of address space for {self._num_workers} workers; "
                "raise the limit on virtual memory (ulimit -v) or use fewer workers",
            ) from error

    def region_offset(self, worker: int) -> int:
        """Return the offset at which a worker's region of `region_bytes` begins in the file."""
        return self._first_region + worker * self.region_bytes

    def write_message(self, offset: int, data: bytes | memoryview) -> None:
        """Fill a part of the message, without mapping its pages here."""
        rest, position = memoryview(data).cast("B"), self.message_offset + offset
        while rest:
            written = os.pwrite(self.fd, rest, position)
            rest, position = rest[written:], position + written

    def write_memory(self, offset: int, address: int, nbytes: int) -> None:
        """Fill a part of the message from memory."""
        if nbytes:
            self.write_message(offset, memory_at(address, nbytes).data)

    def view(
        self, worker: int, offset: int, nbytes: int, on_end: Callable[[int], None] | None = None
    ) -> Buffer:
        """A writable uint8 array over what the worker granted; given back when its last view dies.

        `on_end` hears of its bytes then, when the account is next looked at.
        """
        if self._register is not None and self._locked[offset] < nbytes:
            self._registered.pop(offset, bool)()  # a smaller batch came first in this slab
            self._locked[offset] = whole = rounded_bytes(nbytes)
            self._registered[offset] = self._register(self._address + offset, whole)
        grant = HeldMemory(self, self._address + offset, nbytes)
        end = _GrantEnd(grant, self._end)
        end.worker, end.offset, end.nbytes, end.on_end = worker, offset, nbytes, on_end
        self._grants.add(end)
        return np.asarray(grant)

    def reconcile(self) -> None:
        """Note which grants have ended; see `prefetch.memory.arena`. Any thread may."""
        while self._ended:
            try:
                end = self._ended.popleft()
            except IndexError:  # another thread has taken it
                return
            self._grants.discard(end)
            self._returned[end.worker].append(end.offset)
            if end.on_end is not None:
                end.on_end(end.nbytes)
        if self._abandoned:
            self._drop_abandoned()

    def abandon(self, worker: int) -> None:
        """A worker has died: the pages of its region go when nothing in it is used any more."""
        self._abandoned.add(worker)
        self.reconcile()

    def _drop_abandoned(self) -> None:
        if self._closed or self._register is not None:  # page-locked memory goes when the file is closed
            return
        used = {end.worker for end in list(self._grants)}
        for worker in [*self._abandoned - used]:
            self._abandoned.discard(worker)
            give_pages_back(self.memory, self.region_offset(worker), self.region_bytes)

    def give_back(self, worker: int, offset: int) -> None:
        """Return what was granted without looking at it."""
        self._returned[worker].append(offset)

    def take_returned(self, worker: int) -> list[int]:
        """Offsets to tell the worker about."""
        self.reconcile()
        queue, offsets = self._returned[worker], []
        while queue:
            offsets.append(queue.popleft())
        return offsets

    @property
    def held_bytes(self) -> int:
        """Memory that the file takes now: free slabs, batches in work, what is in use."""
        if self._closed:
            self.reconcile()
            return sum(page_rounded(end.nbytes) for end in self._grants.copy())
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Give back all memory but what is in use, and that as it dies. Idempotent.

        The workers must be gone.
        """
        if self._closed:
            return
        self._closed = True
        if self._owner != os.getpid():
            return
        grants = [
            (end.offset, end.nbytes, grant) for end in list(self._grants) if (grant := end()) is not None
        ]
        offsets = {offset for offset, _, _ in grants}
        for offset in self._registered.keys() - offsets:
            self._registered.pop(offset)()
        ranges, start, gives_back = _page_ranges(grants), 0, True
        for first, last, _ in [*ranges, (self._nbytes, 0, [])]:
            if first > start:
                gives_back = give_pages_back(self.memory, start, first - start)
            start = last
        for first, last, group in ranges:
            inside = [offset for offset in offsets & self._registered.keys() if first <= offset < last]
            calls = [self._registered.pop(offset) for offset in inside]
            if gives_back:
                calls.append(partial(self.memory.madvise, mmap.MADV_REMOVE, first, last - first))
            remains = only_ours(_Remains(self, calls))
            for grant in group:
                grant.owner = remains
        os.close(self.fd)


def _page_ranges(grants: Sequence[tuple[int, int, HeldMemory]]) -> list[tuple[int, int, list[HeldMemory]]]:
    """Ranges of whole pages, ascending, with the grants in each: those that share a page go together."""
    ranges: list[tuple[int, int, list[HeldMemory]]] = []
    for offset, nbytes, grant in sorted(grants, key=itemgetter(0)):
        first, last, group = offset // _PAGE * _PAGE, page_rounded(offset + nbytes), list[HeldMemory]()
        if ranges and first < ranges[-1][1]:
            first, before, group = ranges.pop()
            last = max(last, before)
        group.append(grant)
        ranges.append((first, last, group))
    return ranges


def _allowed_region_bytes(num_workers: int, nbytes: int) -> int:
    """Address space for a region: all of them take at most a quarter of what the process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    while most != resource.RLIM_INFINITY and 4 * num_workers * nbytes > most and nbytes > _MIN_REGION_BYTES:
        nbytes //= 2
    return nbytes


def read_message(fd: int, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """A private, writable view of the message: pages are shared until they are written to."""
    if not nbytes:
        return np.empty(0, np.uint8)
    memory = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY, offset=offset)
    return np.frombuffer(memory, np.uint8)
