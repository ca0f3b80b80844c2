"""Local shards, mapped: the page cache is the staging buffer.

A block that is mapped costs no memory of its own and no copy: its pages are the kernel's. They are brought in
by the executor (`MADV_POPULATE_READ`, which waits for the disk and reports what it cannot read) and copied
straight to their destination by the same one (`prefetch.core`). Only while we hold a guard on the file
(`prefetch.memory.guards`) may the mapping be touched otherwise: a load from a page behind the end of a
truncated file is SIGBUS, which ends the process, while the kernel's copy fails with EFAULT, an error like any
other.

A mapping outlives its descriptor and its name, so a file that is replaced by rename keeps serving the bytes
that were indexed; one that is written in place does not. `check` notices both afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import numpy as np
from numpy.typing import NDArray

from prefetch.core.kernels import kernels
from prefetch.core.pages import RangeFlag, has_pages, memory_calls
from prefetch.memory.guards import FileGuard, FileGuards
from prefetch.memory.open_files import OpenFile
from sharding.blocks import Shard
from sharding.catalog.storage import check_shard, failure_text, local_info
from sharding.errors import ShardChangedError, ShardReadError
from sharding.urls import is_local, local_path

_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it yet."""
_PROCESS_MADVISE = 440
"""System call number on every architecture; glibc before 2.36 has no wrapper."""
_PIDFD_OPEN = 434
_IOV_MAX = 1024
_MAX_SHARDS = 4096
_REMEMBERED = 1 << 16
"""Ranges known to have been read: beyond this many the page cache hardly holds them all."""
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


@cache
def can_map(url: str) -> bool:
    """Return whether shards like this one can be mapped and copied from safely."""
    return is_local(url) and kernels().copies_by_kernel


def touch_pages(memory: NDArray[np.uint8]) -> None:
    """Let the kernel give pages to memory that is about to be written, with the interpreter lock released.

    Whoever writes into fresh memory waits for its pages, 2 ms a MiB here: better a thread that waits anyway
    than an event loop. Advice: where the kernel cannot, writing does it.
    """
    page, address = mmap.PAGESIZE, memory.ctypes.data
    start = -(-address // page) * page  # only whole pages: others may be in use
    nbytes = (address + memory.nbytes) // page * page - start
    # Recycled memory has its pages, and looking takes a fifth of asking for them.
    if nbytes > 0 and not has_pages(start, nbytes):
        memory_calls().madvise(start, nbytes, _POPULATE_WRITE)


class MappedShard:
    """A local shard as memory; unmapped when nobody refers to it any more.

    Args:
        shard: what was indexed.
        guards: where to ask for a guard; None: only the kernel may read the memory.

    Raises:
        ShardReadError: missing, forbidden, or shorter than the catalog says.
        ShardChangedError: it is not the file that was indexed.
    """

    def __init__(self, shard: Shard, guards: FileGuards | None = None) -> None:
        self.shard = shard
        self.guard: FileGuard | None = None
        """While it is `held`, the file keeps its length."""
        self.open_file: OpenFile | None = None
        """The guard's, for other processes to read from; it stays open while the guard is held."""
        self._path = local_path(shard.url)
        self._path_memory = ctypes.create_string_buffer(os.fsencode(self._path))
        modified_ns = shard.version.removeprefix("mtime:")
        self._file = (
            ctypes.addressof(self._path_memory),
            shard.size,
            int(modified_ns) if modified_ns.isdecimal() else -1,
        )
        """The file as `prefetch.core.pages` has it; -1: a version that is no time is compared by `check`."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if guards is not None:
                    self.guard = guards.take(descriptor, self)
                status = os.fstat(descriptor)
                if self.guard is not None:
                    self.open_file = OpenFile.of(self.guard.descriptor, status)
                self._compare(status)
                self._memory = _mapped(descriptor, shard.size)
                self.address = np.frombuffer(self._memory, np.uint8).ctypes.data
                """Of the first byte."""
            finally:
                os.close(descriptor)
        except (OSError, ShardChangedError) as error:
            if self.guard is not None:
                self.guard.let_go()
            if isinstance(error, ShardChangedError):
                raise
            raise ShardReadError(shard.url, failure_text(error), 0, stage="read") from error

    def _compare(self, status: os.stat_result) -> None:
        shard = self.shard
        if status.st_size != shard.size or shard.version != f"mtime:{status.st_mtime_ns}":
            changed = check_shard(shard, local_info(status))
            if changed:
                raise ShardChangedError(shard.url, changed, stage="read")

    def check(self) -> None:
        """Raise `ShardChangedError` if the file is no longer the one that was indexed."""
        try:
            self._compare(os.stat(self._path))
        except OSError as error:
            raise ShardReadError(self.shard.url, failure_text(error), 0, stage="read") from error

    def entry(self, offset: int, length: int, flags: int) -> tuple[int, ...]:
        """A range of it, as `prefetch.core.pages` has them."""
        return (*self._file, *self._pages(offset, length), flags)

    def failure(self, status: int, offset: int) -> ShardReadError:
        """Return the error that a range's status stands for, the number of an error."""
        reason = "truncated, or its disk fails" if status == errno.EFAULT else os.strerror(status)
        return ShardReadError(self.shard.url, reason, offset, stage="read")

    def release(self, offset: int, length: int) -> None:
        """Take the pages of a range out of this process; the page cache keeps them while it has room."""
        memory_calls().madvise(*self._pages(offset, length), mmap.MADV_DONTNEED)

    def _pages(self, offset: int, length: int) -> tuple[int, int]:
        before = offset % _PAGE
        return self.address + offset - before, length + before


def _mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    """A file's bytes, without keeping a descriptor; they are unmapped when the object dies.

    Python's own object for a file would keep one. This one is for no file: the file is mapped over its pages.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if memory_calls().mmap(address, nbytes, mmap.PROT_READ, flags, descriptor, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory


class Mappings:
    """The mapped shards of one dataset, and which of their ranges have pages in this process. Thread-safe.

    A shard is mapped once, because mapping stops all threads that touch memory; at most `_MAX_SHARDS` stay
    mapped beyond the windows that use them (the system allows 65,530 mappings). The pages of ranges that
    no window uses stay up to `keep_bytes`, oldest first out: taking them out and in again costs an eighth
    to a quarter of copying them.
    """

    def __init__(self, keep_bytes: int = 0, guards: FileGuards | None = None) -> None:
        self._keep_bytes, self._guards = keep_bytes, guards
        self._lock = threading.Lock()  # guards what follows
        self._shards: OrderedDict[str, MappedShard] = OrderedDict()
        self._read_before: set[tuple[str, int]] = set()
        self._kept_ranges: OrderedDict[tuple[str, int], tuple[MappedShard, int]] = OrderedDict()
        self._kept_bytes = 0
        self._paged: dict[tuple[str, int], int] = {}
        """Bytes of the ranges that have pages in this process."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the ranges whose pages are in this process now: the page cache's, which they share."""
        with self._lock:
            return sum(self._paged.values())

    def loading(self) -> AbstractContextManager[None]:
        """Inside, shards whose guard is held when it is looked at keep their length."""
        return nullcontext() if self._guards is None else self._guards.loading()

    def hold(
        self, ranges: Sequence[tuple[Shard, int, int]], *, brings_pages: bool = True
    ) -> list[MappedShard]:
        """Map the shards of some ranges (shard, offset and length), check them, and wait for the pages.

        `brings_pages`: False leaves the pages to whoever copies. Raises as `MappedShard`, and
        `ShardReadError` for what cannot be read.
        """
        with self._lock:
            known = [self._shards.get(shard.url) for shard, _, _ in ranges]
        mapped = [file or self._map(shard) for file, (shard, _, _) in zip(known, ranges, strict=True)]
        flags = [0] * len(ranges)
        if brings_pages:
            flags = self._record_use([(shard.url, offset) for shard, offset, _ in ranges], ranges)
        # Each file is looked at once, with its first range: that it changed is told before what it lacks.
        first_of = {id(file): number for number, file in reversed([*enumerate(mapped)])}
        for number in first_of.values():
            flags[number] |= RangeFlag.CHECK
        entries = [
            file.entry(offset, length if brings_pages else 0, flag)
            for file, (_, offset, length), flag in zip(mapped, ranges, flags, strict=True)
        ]
        self._bring(mapped, ranges, np.array(entries, np.int64).reshape(-1, 6))
        return mapped

    def _map(self, shard: Shard) -> MappedShard:
        mapped = MappedShard(shard, self._guards)
        with self._lock:
            mapped = self._shards.setdefault(shard.url, mapped)
            if len(self._shards) > _MAX_SHARDS:
                self._shards.popitem(last=False)
        return mapped

    def _record_use(self, keys: list[tuple[str, int]], ranges: Sequence[tuple[Shard, int, int]]) -> list[int]:
        """Ranges are in use now; gives the flags of what is known of each."""
        with self._lock:
            kept_flags = [self._forget(key) for key in keys]
            flags = [
                RangeFlag.KEPT * was_kept + RangeFlag.AHEAD * (key not in self._read_before)
                for key, was_kept in zip(keys, kept_flags, strict=True)
            ]
            self._paged.update((key, length) for key, (_, _, length) in zip(keys, ranges, strict=True))
            if len(self._read_before) < _REMEMBERED:
                self._read_before.update(keys)
        return flags

    def _bring(
        self,
        mapped: Sequence[MappedShard],
        ranges: Sequence[tuple[Shard, int, int]],
        entries: NDArray[np.int64],
    ) -> None:
        """Check files and bring in pages. Raises for the first that fails."""
        status = kernels().bring(entries)
        for number in np.flatnonzero(status).tolist():
            if status[number] == -1:  # a version may be none that is compared so quickly
                mapped[number].check()
                entries[number, -1] &= ~RangeFlag.CHECK
                status[number] = kernels().bring(entries[number : number + 1])[0]
            if status[number]:
                raise mapped[number].failure(int(status[number]), ranges[number][1])

    def release(self, ranges: Sequence[tuple[MappedShard, int, int]]) -> None:
        """No window uses some ranges any more: shard, offset and length of each."""
        gone = []
        with self._lock:
            for mapped, offset, length in ranges:
                key = mapped.shard.url, offset
                self._forget(key)  # windows that overlap release a block one after the other
                self._kept_ranges[key] = mapped, length
                self._kept_bytes += length
                self._paged[key] = length
            while self._kept_bytes > self._keep_bytes:
                key, (shard, nbytes) = self._kept_ranges.popitem(last=False)
                self._kept_bytes -= nbytes
                self._paged.pop(key, None)
                gone.append((shard, key[1], nbytes))
        for shard, start, nbytes in gone:
            shard.release(start, nbytes)

    def _forget(self, key: tuple[str, int]) -> bool:
        """Forget a range; return whether it was kept."""
        kept_range = self._kept_ranges.pop(key, None)
        if kept_range is None:
            return False
        self._kept_bytes -= kept_range[1]
        return True


def will_need(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Ask for the pages of spans of mapped ranges, without waiting: a hint, 1,024 spans a system call."""
    pages, call = np.empty((len(addresses), 2), np.int64), memory_calls().syscall
    pages[:, 0] = addresses // _PAGE * _PAGE
    pages[:, 1] = addresses + np.maximum(lengths, 1) - pages[:, 0]
    descriptor = call(_PIDFD_OPEN, os.getpid(), 0)
    if descriptor < 0:
        return
    try:
        for first in range(0, len(pages), _IOV_MAX):
            count = min(_IOV_MAX, len(pages) - first)
            pointer = ctypes.c_void_p(pages.ctypes.data + first * 16)
            call(_PROCESS_MADVISE, descriptor, pointer, ctypes.c_size_t(count), mmap.MADV_WILLNEED, 0)
    finally:
        os.close(descriptor)
