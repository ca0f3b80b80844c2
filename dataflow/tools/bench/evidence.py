"""Evidence that reads came from the device: what is known about it, and which word that allows.

"Cold" is said only with evidence from both ends: the reads went around the page cache, or none of the files'
pages was in it (`mincore`) and nothing was read twice; and the kernel counted as many bytes that this process
caused to be fetched from storage (`/proc/self/io`). What lies below a block device (a hypervisor's cache, a
controller's) and what a remote store keeps in memory cannot be seen from here, which is said, too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sharding.blocks import Shard
from sharding.urls import is_local, local_path

Word = Literal["cold", "warm", "mixed", "unknown"]

_RESIDENT_AT_MOST = 0.01
_FROM_DEVICE_AT_LEAST = 0.95
_FROM_DEVICE_WARM = 0.05
_CHUNK_BYTES = 1 << 30
_LOOKED_THROUGH_BYTES = 256 << 30
"""Asking for every page takes about a second per 100 GB."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The facts about where the bytes of some reads came from."""

    read_bytes: int
    device_bytes: int | None
    """Bytes that this process caused to be fetched from storage meanwhile; None: the kernel does not say."""
    resident_share: float | None
    """Share of the files' pages in the page cache before, in [0, 1]; None: not known, or not of interest."""
    direct: bool
    """True if the reads went around the page cache (`O_DIRECT`)."""
    repeated: bool
    """True if some bytes were read more than once."""
    remote: bool


@dataclass(frozen=True)
class Label:
    """A word for how warm the data was, and how that is known."""

    word: Word
    reason: str


def label_of(evidence: Evidence) -> Label:
    """The word that the evidence allows."""
    if evidence.remote:
        return Label(
            "unknown",
            "what the store, and caches on the way to it, hold in memory cannot be seen from here",
        )
    if evidence.device_bytes is None:
        return Label("unknown", "the kernel does not say how many bytes came from a device (/proc/self/io)")
    if not evidence.read_bytes:
        return Label("unknown", "nothing was read")
    share = evidence.device_bytes / evidence.read_bytes
    came = f"{min(share, 1):.0%} of the bytes came from the device"
    if evidence.direct:
        if share >= _FROM_DEVICE_AT_LEAST:
            return Label("cold", f"read around the page cache, and {came}")
        word: Word = "warm" if share <= _FROM_DEVICE_WARM else "mixed"
        return Label(word, f"direct reads, but {came}: the filesystem did not honour O_DIRECT")
    if share <= _FROM_DEVICE_WARM:
        return Label("warm", came)
    if evidence.resident_share is None:
        return Label("unknown", f"{came}, but whether pages were in memory before is not known")
    before = f"{evidence.resident_share:.0%} of the pages were in memory before"
    if evidence.repeated:
        return Label("mixed", f"{came}; some were read more than once, the second time from memory")
    if evidence.resident_share <= _RESIDENT_AT_MOST and share >= _FROM_DEVICE_AT_LEAST:
        return Label("cold", f"{before}, and {came}")
    return Label("mixed", f"{came}; {before}")


def device_bytes(path: str = "/proc/self/io") -> int | None:
    """Bytes that this process has caused to be fetched from storage so far; None where nobody counts."""
    try:
        with open(path) as file:
            match = re.search(r"^read_bytes: (\d+)$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def may_see_pages(path: str, status: os.stat_result) -> bool:
    """Return whether the kernel tells this user which pages of a file are in memory."""
    return status.st_uid == os.geteuid() or os.access(path, os.W_OK)


def resident_share(
    shards: Sequence[Shard], may_see: Callable[[str, os.stat_result], bool] = may_see_pages
) -> float | None:
    """Share of the pages of local shards that the page cache holds, in [0, 1].

    None where it is not known: remote shards, more than 256 GiB, and files that this user may neither write
    nor owns, of which the kernel calls every page resident.
    """
    total = sum(shard.size for shard in shards)
    if not total or total > _LOOKED_THROUGH_BYTES or not all(is_local(shard.url) for shard in shards):
        return None
    pages = resident = 0
    for shard in shards:
        counted = _resident_pages(local_path(shard.url), may_see)
        if counted is None:
            return None
        pages, resident = pages + counted[0], resident + counted[1]
    return resident / max(1, pages)


def _resident_pages(path: str, may_see: Callable[[str, os.stat_result], bool]) -> tuple[int, int] | None:
    """Pages of a file, and those in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    pages = resident = 0
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not may_see(path, status):
                return None
            for start in range(0, status.st_size, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, status.st_size - start)
                with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=start) as mapped:
                    in_memory = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
                    view = np.frombuffer(mapped, np.uint8)
                    address = view.ctypes.data
                    del view  # a mapping that is looked at cannot be closed
                    words = (
                        ctypes.c_void_p(address),
                        ctypes.c_size_t(size),
                        ctypes.c_void_p(in_memory.ctypes.data),
                    )
                    if mincore(*words) != 0:
                        return None
                pages, resident = pages + len(in_memory), resident + int((in_memory & 1).sum())
    except OSError:
        return None
    return pages, resident


def evict(shards: Sequence[Shard]) -> None:
    """Ask the kernel to drop the pages of local shards from its cache. Dirty or mapped ones may stay."""
    for shard in shards:
        if is_local(shard.url):
            descriptor = os.open(local_path(shard.url), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)  # only what is on the device can be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
