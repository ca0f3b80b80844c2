"""Blocks of shards in a folder of this machine, shared by any number of processes, none of which is needed.

    PATH/dataflow-cache-1/blocks/XX/TAG-OFFSET-LENGTH    one block (`prefetch.cache.entry`)
                          live/                          what is being written; claims
                          users/                         which shards each running loader reads
                          total                          bytes of all blocks, 8 bytes

The names say everything; there is no index that could be damaged or fall behind. A block is written to `live`
and renamed: it is whole or not there, and a power failure shows in the checksum. Every file of ours in `live`
and `users` is locked (`flock`) by its process; what is not locked has no owner and is removed.

`total` is raised before a block is begun and lowered after one is gone, so that a process killed between
leaves it too high, never too low: it is counted anew whenever the limit is reached. Only that, and making
room, needs the lock of the folder. Counting lists the names, so room is made for
many blocks at a time. Only regular files with names of ours are ever removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetch.cache.claims import Claim, Claims
from prefetch.cache.entry import MORE_BYTES, NAME, Entry, block_path, shard_hash, trailer_of
from prefetch.cache.eviction import victims
from prefetch.memory.lifetimes import close_private, open_private
from sharding.write.file import PRIVATE_FILE, private_folder

VERSION = "dataflow-cache-1"
_PART = re.compile(NAME.pattern + r"\.[0-9a-f]{32}")
_USER = re.compile(r"[0-9a-f]{32}")
_SPARE = 64
"""Room is made for this part of the limit at a time."""
_LOCK = "lock"
_LOCK_PATIENCE_S = 10.0
"""Listing the names takes less; who holds the lock longer was stopped."""


@dataclass(frozen=True)
class Stored:
    """The blocks in the folder at one instant."""

    names: list[str]
    shard_hashes: NDArray[np.uint64]
    """[n] of their shards (`shard_hash`)."""
    offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    """The bytes of each on the disk, [n]."""


NextUse = Callable[[Stored], tuple[NDArray[np.float64], NDArray[np.bool_]]]
"""Returns when each block is needed next, [n], and whether we know: False for blocks of other loaders."""


class CacheFolder:
    """The blocks under one path. Thread-safe.

    Args:
        path: is made where it does not exist; may hold other files.
        limit_bytes: of all blocks, whoever wrote them.
        claims: in the folder that `prepare` has made for them.
        shard_hashes: uint64, of the shards that this process reads: others do not drop them while it lives.
        next_use: of blocks in the folder.

    Raises `OSError` where the folder cannot be written.
    """

    def __init__(
        self,
        path: str,
        limit_bytes: int,
        *,
        claims: Claims,
        shard_hashes: NDArray[np.uint64],
        next_use: NextUse,
    ) -> None:
        self._root = os.path.join(path, VERSION)
        self._limit, self._claims, self._next_use = limit_bytes, claims, next_use
        self._mutex = threading.Lock()  # guards the folder's lock among our threads, and what is below
        self._in_vain: tuple[float, int] | None = None  # next use of a block without room; bytes passed since
        self.evicted = self.evicted_bytes = 0
        self._name = uuid.uuid4().hex
        self._user = -1
        with self._locked() as held:
            if held:
                self._sweep()
                self._drop_dead_claims()
                self._user = _create_locked(self._path("users", self._name))
                try:
                    _write_all(self._user, memoryview(shard_hashes.astype("<u8").tobytes()))
                    # Where nothing is added any more, a limit lower than the last one would never be kept to.
                    self._has_room(0, lambda: -1.0)
                except OSError:
                    self.close()
                    raise

    def remove_damaged(self, entry: Entry) -> None:
        """Take out a block that is not what was written. `OSError` where that is refused."""
        with self._locked() as held:
            if held and _removed(block_path(self._root, entry.name)):
                self._set_total(self._total() - entry.stored_bytes)

    def publish(
        self,
        entry: Entry,
        data: NDArray[np.uint8],
        next_use: Callable[[], float],
        checksum: int | None = None,
    ) -> bool:
        """Keep a block; False if everything that is there is needed sooner.

        Args:
            entry: its name.
            data: [nbytes] contiguous.
            next_use: when it is needed after now (infinity: not by us); asked if the folder is full.
            checksum: CRC-32 of the data, if it is known.

        Raises `OSError` if it cannot be written, and then leaves nothing.
        """
        path = self._path("live", f"{entry.name}.{uuid.uuid4().hex}")
        target = block_path(self._root, entry.name)
        with self._locked() as held:
            if os.path.lexists(target):
                return True
            if not held or not self._has_room(entry.stored_bytes, next_use):
                return False
            self._set_total(self._total() + entry.stored_bytes)
            descriptor = _create_locked(path)
        try:
            try:
                _write_all(descriptor, data.data)
                checksum = zlib.crc32(data.data) if checksum is None else checksum
                _write_all(descriptor, memoryview(trailer_of(entry, checksum)))
                try:
                    os.rename(path, target)
                except FileNotFoundError:
                    private_folder(os.path.dirname(target))
                    os.rename(path, target)
            finally:
                close_private(descriptor)
        except OSError:
            with self._locked() as held:
                if _removed(path) and held:
                    self._set_total(self._total() - entry.stored_bytes)
            raise
        return True

    def close(self) -> None:
        """Let others drop what only we need. Idempotent."""
        user, self._user = self._user, -1
        if user >= 0:
            with suppress(OSError):
                os.unlink(self._path("users", self._name))
            close_private(user)

    # ---- under the lock -----------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[Claim | None]:
        """The lock of the folder; None if somebody keeps it."""
        with self._mutex, self._claims.taken(_LOCK, patience_s=_LOCK_PATIENCE_S) as claim:
            yield claim

    def _has_room(self, nbytes: int, next_use: Callable[[], float]) -> bool:
        """Return whether a block fits, after making room if that is worth it."""
        spare = self._limit // _SPARE
        total = self._total()
        if total + nbytes <= self._limit:
            return True
        when = next_use()
        if self._in_vain is not None and when >= self._in_vain[0] and self._in_vain[1] < spare:
            self._in_vain = self._in_vain[0], self._in_vain[1] + nbytes
            return False
        stored, total = self._counted()
        need = total + nbytes - self._limit
        soonest = self._when(stored)
        chosen = victims(soonest, stored.nbytes, newcomer=when, need=need, spare=spare)
        for i in chosen.tolist():
            if _removed(block_path(self._root, stored.names[i])):
                total -= int(stored.nbytes[i])
                self.evicted += 1
                self.evicted_bytes += int(stored.nbytes[i])
        self._set_total(total)
        fits = total + nbytes <= self._limit
        self._in_vain = None if fits else (when, 0)
        return fits

    def _when(self, stored: Stored) -> NDArray[np.float64]:
        """Return when blocks are needed next; those of other loaders that run must stay, of others may go."""
        next_use, is_ours = self._next_use(stored)
        others = np.concatenate([*self._others(), np.zeros(0, np.uint64)])
        return np.where(is_ours, next_use, np.where(np.isin(stored.shard_hashes, others), np.nan, np.inf))

    def _others(self) -> Iterator[NDArray[np.uint64]]:
        """Marks of the shards of each other loader that runs."""
        for item in _files(self._path("users")):
            if item.name == self._name or not _USER.fullmatch(item.name):
                continue
            descriptor = _open_if_owned(item.path)
            if descriptor is None:
                continue
            with open(descriptor, "rb") as file:
                data = file.read()
            yield np.frombuffer(data[: len(data) // 8 * 8], "<u8")

    def _stored(self) -> Stored:
        names, shard_hashes, offsets, nbytes = [], [], [], []
        for fan in _items(self._path("blocks")):
            for item in _files(fan.path) if fan.is_dir(follow_symlinks=False) else ():
                parts = NAME.fullmatch(item.name)
                if parts and os.path.dirname(block_path(self._root, item.name)) == fan.path:
                    names.append(item.name)
                    shard_hashes.append(shard_hash(parts[1]))
                    offsets.append(int(parts[2]))
                    nbytes.append(int(parts[3]) + MORE_BYTES)
        return Stored(
            names, np.array(shard_hashes, np.uint64), np.array(offsets, np.int64), np.array(nbytes, np.int64)
        )

    def _counted(self) -> tuple[Stored, int]:
        """The blocks, and the bytes of these and of what is being written."""
        writing = self._sweep()  # first: what is finished meanwhile is in both then, not in neither
        stored = self._stored()
        unfinished = writing.keys() - {*stored.names} if writing else ()
        return stored, int(stored.nbytes.sum()) + sum(writing[name] for name in unfinished)

    def _sweep(self) -> dict[str, int]:
        """Remove what killed processes left; bytes of blocks that are being written, by name."""
        writing = dict[str, int]()
        for item in _files(self._path("live")):
            parts = _PART.fullmatch(item.name)
            if parts is None:
                continue
            descriptor = _open_if_owned(item.path)
            if descriptor is not None:
                os.close(descriptor)
                writing[item.name.rpartition(".")[0]] = int(parts[3]) + MORE_BYTES
        for item in _files(self._path("users")):
            descriptor = _open_if_owned(item.path) if _USER.fullmatch(item.name) else None
            if descriptor is not None:
                os.close(descriptor)
        return writing

    def _drop_dead_claims(self) -> None:
        for item in _items(self._path("live")):
            if NAME.fullmatch(item.name) and not item.is_file(follow_symlinks=False):
                with self._claims.taken(item.name, patience_s=0):
                    pass

    def _total(self) -> int:
        data = b""
        with suppress(FileNotFoundError), open(self._path("total"), "rb") as file:
            data = file.read()
        if len(data) == 8:
            return int.from_bytes(data, "little")
        return self._counted()[1]

    def _set_total(self, total: int) -> None:
        descriptor = os.open(self._path("total"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            os.pwrite(descriptor, max(0, total).to_bytes(8, "little"), 0)
        finally:
            os.close(descriptor)

    # ---- paths --------------------------------------------------------------------------------------

    def _path(self, *parts: str) -> str:
        return os.path.join(self._root, *parts)


def prepare(path: str) -> str:
    """Make the folders under a path where they are missing, for this user alone; the one for claims.

    `OSError` if refused.
    """
    root = os.path.join(path, VERSION)
    for part in ("blocks", "live", "users"):
        private_folder(os.path.join(root, part))
    return os.path.join(root, "live")


def _create_locked(path: str) -> int:
    """A new file that counts as owned for as long as it is open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = open_private(lambda: os.open(path, flags, PRIVATE_FILE))
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _open_if_owned(path: str) -> int | None:
    """The file, opened, if its process lives; else it is removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor
    os.close(descriptor)
    _removed(path)
    return None


def _removed(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _files(path: str) -> Iterator[os.DirEntry[str]]:
    """Regular files in a folder; none if it is not there."""
    yield from (item for item in _items(path) if item.is_file(follow_symlinks=False))


def _items(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as items:
            return list(items)
    except FileNotFoundError:
        return []


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
