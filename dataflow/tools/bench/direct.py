"""Local reads around the page cache, by `preadv` into aligned memory: what the device does, as fio asks it.

Descriptors are opened once, as a loader of few large shards would; of very many shards, once a read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sharding.blocks import Shard
from sharding.catalog.storage import failure_text
from sharding.errors import ShardReadError
from sharding.urls import local_path

ALIGNMENT = 4096
"""Of offsets, lengths and memory: what every device accepts."""
_KEPT_OPEN = 256


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """[nbytes] at a page's beginning, its pages touched.

    In ordinary pages, as fio's: into one huge page a device may be asked in fewer pieces, and be faster.
    """
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    buffer.fill(0)
    return buffer


class DirectReader:
    """Reads local shards with `O_DIRECT`. Thread-safe; a context manager, which owns the descriptors.

    Raises:
        ShardReadError: a shard is missing or forbidden, or its filesystem has no direct reads.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._opened = ExitStack()
        self._descriptors: dict[str, int] = {}
        with self._opened:
            for shard in shards[:_KEPT_OPEN]:
                descriptor = _open(shard)
                self._opened.callback(os.close, descriptor)
                self._descriptors[shard.url] = descriptor
            self._opened = self._opened.pop_all()

    def read_into(self, shard: Shard, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out`, [n] aligned as are n and `offset`, from the shard; its end may be short of that."""
        descriptor = self._descriptors.get(shard.url)
        try:
            if descriptor is None:
                got = _read_once(shard, offset, out)
            else:
                got = os.preadv(descriptor, [out.data], offset)
        except ShardReadError:
            raise
        except OSError as error:
            raise ShardReadError(shard.url, failure_text(error), offset, stage="read") from error
        if got < len(out) and got < shard.size - offset:
            reason = f"wanted {out.nbytes} bytes, got {got}"
            raise ShardReadError(shard.url, reason, offset, stage="read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


def _read_once(shard: Shard, offset: int, out: NDArray[np.uint8]) -> int:
    descriptor = _open(shard)
    try:
        return os.preadv(descriptor, [out.data], offset)
    finally:
        os.close(descriptor)


def _open(shard: Shard) -> int:
    try:
        flag = os.O_DIRECT
    except AttributeError:
        raise ShardReadError(shard.url, "this system has no direct reads; use --read buffered") from None
    try:
        return os.open(local_path(shard.url), os.O_RDONLY | os.O_CLOEXEC | flag)
    except PermissionError as error:
        raise ShardReadError(shard.url, failure_text(error), stage="read") from error
    except OSError as error:
        reason = f"cannot be read around the page cache ({error}); use --read buffered"
        raise ShardReadError(shard.url, reason, stage="read") from error
