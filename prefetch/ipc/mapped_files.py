"""Parts of an object that lie in mapped files: other processes map these files, too, and nothing is copied.

The kernel says which file memory belongs to (/proc/self/maps). That file is opened by its name, and taken
only if it still is the same one, by device and inode; else its memory is copied as any other. A private
mapping shows the file only where no page of it was written to, which /proc/self/pagemap knows.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from prefetch.addresses import memory_at
from prefetch.workers.shared_arena import Buffer

_PAGE = mmap.PAGESIZE
_MOST_PASSED = 64
"""Files beyond these are opened by their name in each process, which may be handed some 250 descriptors."""
_START_BITS = 48
"""A place is the number of a mapping, and a start in it of so many bits."""
_PAGES_READ = 1 << 16


class FileMapping(NamedTuple):
    """A part of a file that this process has mapped."""

    start: int
    end: int
    access: str
    """As in /proc/self/maps: "r--s", "rw-p"."""
    offset: int
    file: tuple[str, int, str]
    """Device, inode and path."""

    def goes_on_with(self, other: FileMapping) -> bool:
        """Return whether another one begins where this one ends, in memory and in the file."""
        ends = self.end, self.offset + self.end - self.start
        return ends == (other.start, other.offset) and self[2:5:2] == other[2:5:2]

    @property
    def flags(self) -> int:
        """To open the file with, for such a mapping of it."""
        return os.O_CLOEXEC | (os.O_RDWR if self.access[1] == "w" and self.access[3] == "s" else os.O_RDONLY)


class MappedFile(NamedTuple):
    """What another process needs to map the same."""

    descriptor: int | None
    """Its number, counted from the last one that was passed; None: it is opened by its path."""
    path: str
    identity: tuple[int, int]
    access: str
    flags: int
    offset: int
    nbytes: int


def file_mappings() -> list[FileMapping]:
    """Return what this process has mapped of files that still have a name, ascending; [] without /proc."""
    found: list[FileMapping] = []
    with (
        contextlib.suppress(OSError),
        open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines,
    ):
        for line in lines:
            addresses, access, offset, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if inode == "0" or access[0] != "r" or not path or path[0].endswith(" (deleted)"):
                continue
            start, end = (int(address, 16) for address in addresses.split("-"))
            one = FileMapping(start, end, access, int(offset, 16), (device, int(inode), path[0]))
            if found and found[-1].goes_on_with(one):  # advice for a part of it splits a mapping
                one = found.pop()._replace(end=end)
            found.append(one)
    return found


def _mapping_at(mappings: Sequence[FileMapping], address: int, nbytes: int) -> FileMapping | None:
    number = bisect_right(mappings, address, key=attrgetter("start")) - 1
    return mappings[number] if number >= 0 and address + nbytes <= mappings[number].end else None


def was_written(address: int, nbytes: int) -> bool:
    """Return whether a page of a private mapping is no longer the file's; True where nobody knows."""
    page, end = address // _PAGE, -(-(address + nbytes) // _PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as entries:
            while page < end:
                data = os.pread(entries.fileno(), 8 * min(end - page, _PAGES_READ), 8 * page)
                bits = np.frombuffer(data, np.uint64) >> np.uint64(61)  # in memory, swapped, the file's
                if not len(bits) or bool(((bits > 1) & (bits & np.uint64(1) == 0)).any()):
                    return True
                page += len(bits)
    except (OSError, ValueError):
        return True
    return False


class MappedFiles:
    """The mapped files that an object for other processes lies in. `close` when none will start any more."""

    def __init__(self) -> None:
        self.table: list[MappedFile] = []
        self.fds: list[int] = []
        self._mappings: list[FileMapping] | None = None
        self._numbers: dict[FileMapping, int | None] = {}
        self._opened: dict[tuple[Any, int], tuple[int | None, os.stat_result] | None] = {}

    def place(self, address: int, nbytes: int, keep: Any) -> tuple[Any, int] | None:
        """See `Place`."""
        if self._mappings is None:
            self._mappings = file_mappings()
        mapping = _mapping_at(self._mappings, address, nbytes)
        if mapping is None or (mapping.access[3] == "p" and was_written(address, nbytes)):
            return None
        if mapping not in self._numbers:
            self._numbers[mapping] = self._add(mapping)
        number, start = self._numbers[mapping], address - mapping.start
        if number is None or start + nbytes > self.table[number].nbytes:
            return None
        return keep, number << _START_BITS | start

    def _add(self, mapping: FileMapping) -> int | None:
        key = mapping.file, mapping.flags
        if key not in self._opened:
            self._opened[key] = self._open(mapping)
        if (opened := self._opened[key]) is None:
            return None
        descriptor, status = opened
        nbytes = min(mapping.end - mapping.start, status.st_size - mapping.offset)
        identity, path = (status.st_dev, status.st_ino), mapping.file[2]
        self.table.append(
            MappedFile(descriptor, path, identity, mapping.access, mapping.flags, mapping.offset, nbytes)
        )
        return len(self.table) - 1

    def _open(self, mapping: FileMapping) -> tuple[int | None, os.stat_result] | None:
        """Open the file, if it is there; None: it is not, or may not be opened so."""
        path = mapping.file[2]
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError):
            if not stat.S_ISREG(os.stat(path).st_mode):  # to open a device may do something
                return None
            fd = os.open(path, mapping.flags)
            stack.callback(os.close, fd)
            if not _is_mapped_as(mapping, fd):
                return None
            if len(self.fds) == _MOST_PASSED:
                return None, os.fstat(fd)
            stack.pop_all()
            self.fds.append(fd)
            return len(self.fds) - 1, os.fstat(fd)
        return None

    def close(self) -> None:
        """Close them. Idempotent."""
        fds, self.fds = self.fds, []
        for fd in fds:
            os.close(fd)


def _is_mapped_as(mapping: FileMapping, fd: int) -> bool:
    """Return whether this is the file of a mapping."""
    device, inode, _ = mapping.file
    status, (major, minor) = os.fstat(fd), device.split(":")
    if (status.st_ino, status.st_dev) == (inode, os.makedev(int(major, 16), int(minor, 16))):
        return True
    # Some file systems have other numbers for those who ask for a file's status (overlay, btrfs).
    probe = mmap.mmap(fd, 1, mmap.MAP_SHARED, mmap.PROT_READ)
    same = _mapping_at(file_mappings(), np.frombuffer(probe, np.uint8).ctypes.data, 1)
    return same is not None and same.file[:2] == (device, inode)


class FileViews:
    """The same files in another process, by the descriptors that it was passed, the last one first."""

    def __init__(self, table: Sequence[MappedFile], fds: Sequence[int]) -> None:
        self._table, self._fds = table, fds
        self._views: dict[int, Buffer] = {}

    def view_at(self, place: int, nbytes: int) -> Buffer:
        """See `ViewAt`."""
        number, start = place >> _START_BITS, place & (1 << _START_BITS) - 1
        if number not in self._views:
            self._views[number] = self._mapped(self._table[number])
        return self._views[number][start : start + nbytes]

    def _mapped(self, file: MappedFile) -> Buffer:
        if file.descriptor is not None:
            return _mapped(file, self._fds[~file.descriptor])
        fd = os.open(file.path, file.flags)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != file.identity:
                raise FileNotFoundError(
                    f"{file.path}, which the dataset has mapped, was replaced while worker processes started"
                )
            return _mapped(file, fd)
        finally:
            os.close(fd)


def _mapped(file: MappedFile, fd: int) -> Buffer:
    kind = mmap.MAP_SHARED if file.access[3] == "s" else mmap.MAP_PRIVATE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if file.access[1] == "w" else 0)
    memory = np.frombuffer(mmap.mmap(fd, file.nbytes, kind, protection, offset=file.offset), np.uint8)
    return memory_at(memory.ctypes.data, file.nbytes, memory)  # tensors of read-only memory, as they were
