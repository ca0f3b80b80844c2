"""Parts of files that another process of this user has open, read by `pread`.

Whoever has a file open names it by its descriptor and by what the file system calls it. Opened through
`/proc`, it is the same file whatever became of its name; that the descriptor still stands for it is checked,
for it may have been closed, and its number used again. Where that fails, or a file has become shorter,
`StaleFileError` says so, and the one who has the file must send what is in it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefetch.core.kernels import kernels

MOST_OPEN = 128
"""Files that a reader has open at a time."""


class StaleFileError(Exception):
    """A file cannot be read here, or is not what it was; whoever has it open can say more."""


class OpenFile(NamedTuple):
    """A file that a process has open."""

    pid: int
    descriptor: int
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int, status: os.stat_result) -> OpenFile:
        """A file that this process has open; `status`: its own."""
        return cls(os.getpid(), descriptor, status.st_dev, status.st_ino)


class OpenFiles:
    """Files of other processes, open here: at most `MOST_OPEN`, those used last. Used by one thread."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[OpenFile, int] = OrderedDict()

    def read(
        self,
        files: Sequence[OpenFile],
        numbers: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        out: NDArray[np.uint8],
    ) -> None:
        """Read parts of files, one behind the other.

        Args:
            files: at most `MOST_OPEN`.
            numbers: [n] which of `files` has each part.
            offsets: [n] bytes of the file before it.
            lengths: [n] bytes, >= 0.
            out: uint8 [sum of `lengths`], C-contiguous.

        Raises `StaleFileError`.
        """
        descriptors = np.array([self._opened(file) for file in files], np.int64)
        starts = np.cumsum(lengths) - lengths + out.__array_interface__["data"][0]
        parts = np.stack([descriptors[numbers], offsets, lengths, starts], axis=1)
        whole = kernels().read(parts)
        if whole < len(parts):
            raise StaleFileError(
                f"{files[int(numbers[whole])]} ends before byte {offsets[whole] + lengths[whole]}"
            )

    def _opened(self, file: OpenFile) -> int:
        descriptor = self._descriptors.get(file)
        if descriptor is not None:
            self._descriptors.move_to_end(file)
            return descriptor
        try:
            descriptor = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StaleFileError(f"{file}: {error}") from error
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (file.device, file.inode):
            os.close(descriptor)
            raise StaleFileError(f"{file} is another file now")
        self._descriptors[file] = descriptor
        if len(self._descriptors) > MOST_OPEN:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor

    def close(self) -> None:
        """Close all of them. Idempotent."""
        while self._descriptors:
            with suppress(OSError):
                os.close(self._descriptors.popitem()[1])
