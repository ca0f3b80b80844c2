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
from numpy.typing import NDArray

from prefetch.addresses import memory_at

_PAGE = mmap.PAGESIZE
_MOST_PASSED = 64
"""Files beyond these are opened by their name in each process, which may be handed some 250 descriptors."""
_START_BITS = 48
"""A place is the number of a mapping, and a start in it of so many bits."""


class FileMapping(NamedTuple):
    """A part of a file that this process has mapped."""

    start: int
    end: int
    access: str
    """Modes, such as "r--s" and "rw-p"."""
    offset: int
    file: tuple[str, int, str]
    """Device, inode and path."""


class MappedFile(NamedTuple):
    """The facts that another process needs to map the same."""

    mapping: FileMapping
    nbytes: int
    identity: tuple[int, int]
    descriptor: int | None
    """Its number, counted from the last one that was passed; None: it is opened by its path."""


def file_mappings() -> list[FileMapping]:
    """Return what this process has mapped of files that still have a name, ascending; [] without /proc."""
    mappings: list[FileMapping] = []
    with contextlib.suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as lines:
        for line in lines:
            addresses, access, offset, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if inode == "0" or access[0] != "r" or not path or path[0].endswith(" (deleted)"):
                continue
            start, end = (int(address, 16) for address in addresses.split("-"))
            mappings.append(FileMapping(start, end, access, int(offset, 16), (device, int(inode), path[0])))
    return mappings


def mapping_at(mappings: Sequence[FileMapping], address: int, nbytes: int) -> FileMapping | None:
    """Return the one that memory lies in."""
    number = bisect_right(mappings, address, key=attrgetter("start")) - 1
    return mappings[number] if number >= 0 and address + nbytes <= mappings[number].end else None


def was_written(address: int, nbytes: int) -> bool:
    """Return whether a page of a private mapping is no longer the file's; True where nobody knows."""
    first, end = address // _PAGE, -(-(address + nbytes) // _PAGE)
    with contextlib.suppress(OSError):
        entries = np.fromfile("/proc/self/pagemap", np.uint64, end - first, offset=8 * first)
        bits = entries >> np.uint64(61)  # in memory, swapped, the file's
        return len(bits) < end - first or bool(((bits > 1) & (bits & np.uint64(1) == 0)).any())
    return True


class MappedFiles:
    """The mapped files that an object for other processes lies in. `close` when none will start any more."""

    def __init__(self) -> None:
        self.table: list[MappedFile] = []
        self.fds: list[int] = []
        self._mappings: list[FileMapping] | None = None
        self._numbers: dict[FileMapping, int | None] = {}

    def place(self, address: int, nbytes: int, keep: Any) -> tuple[Any, int] | None:
        """Return what keeps the part of a file that lies there, and its number; None: it is to be copied."""
        if self._mappings is None:
            self._mappings = file_mappings()
        mapping = mapping_at(self._mappings, address, nbytes)
        if mapping is None or (mapping.access[3] == "p" and was_written(address, nbytes)):
            return None
        if mapping not in self._numbers:
            self._numbers[mapping] = self._open(mapping)
        number, start = self._numbers[mapping], address - mapping.start
        if number is None or start + nbytes > self.table[number].nbytes:
            return None
        return keep, number << _START_BITS | start

    def _open(self, mapping: FileMapping) -> int | None:
        """Open the file; its number in the table. None: it is not there, or may not be opened so."""
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError):
            if not stat.S_ISREG(os.stat(mapping.file[2]).st_mode):  # to open a device may do something
                return None
            fd = _opened(mapping)
            stack.callback(os.close, fd)
            if not _is_file_of(mapping, fd):
                return None
            status, descriptor = os.fstat(fd), None
            if len(self.fds) < _MOST_PASSED:
                stack.pop_all()
                descriptor = len(self.fds)
                self.fds.append(fd)
            nbytes = min(mapping.end - mapping.start, status.st_size - mapping.offset)
            self.table.append(MappedFile(mapping, nbytes, (status.st_dev, status.st_ino), descriptor))
            return len(self.table) - 1
        return None

    def close(self) -> None:
        """Close them. Idempotent."""
        fds, self.fds = self.fds, []
        for fd in fds:
            os.close(fd)


def _opened(mapping: FileMapping) -> int:
    is_written = mapping.access[1] + mapping.access[3] == "ws"
    return os.open(mapping.file[2], os.O_CLOEXEC | (os.O_RDWR if is_written else os.O_RDONLY))


def _is_file_of(mapping: FileMapping, fd: int) -> bool:
    device, inode, _ = mapping.file
    status, (major, minor) = os.fstat(fd), device.split(":")
    if (status.st_ino, status.st_dev) == (inode, os.makedev(int(major, 16), int(minor, 16))):
        return True
    # Some file systems have other numbers for those who ask for a file's status (overlay, btrfs).
    probe = mmap.mmap(fd, 1, mmap.MAP_SHARED, mmap.PROT_READ)
    same = mapping_at(file_mappings(), np.frombuffer(probe, np.uint8).ctypes.data, 1)
    return same is not None and same.file[:2] == (device, inode)


class FileViews:
    """The same files in another process, by the descriptors that it was passed, the last one first."""

    def __init__(self, table: Sequence[MappedFile], fds: Sequence[int]) -> None:
        self._table, self._fds = table, fds
        self._views: dict[int, NDArray[np.uint8]] = {}

    def view_at(self, place: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the part of a file at a place."""
        number, start = place >> _START_BITS, place & (1 << _START_BITS) - 1
        if number not in self._views:
            self._views[number] = self._mapped(self._table[number])
        return self._views[number][start : start + nbytes]

    def _mapped(self, file: MappedFile) -> NDArray[np.uint8]:
        _, _, access, offset, (_, _, path) = file.mapping
        fd = _opened(file.mapping) if file.descriptor is None else os.dup(self._fds[~file.descriptor])
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != file.identity:
                raise FileNotFoundError(f"{path} is mapped, and was replaced while worker processes started")
            kind = mmap.MAP_SHARED if access[3] == "s" else mmap.MAP_PRIVATE
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if access[1] == "w" else 0)
            memory = np.frombuffer(mmap.mmap(fd, file.nbytes, kind, protection, offset=offset), np.uint8)
        finally:
            os.close(fd)
        return memory_at(
            memory.ctypes.data, file.nbytes, memory
        )  # tensors of what is only read, as they were
