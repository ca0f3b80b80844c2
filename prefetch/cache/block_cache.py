"""Blocks of remote shards, from a folder or from the store: each fetched once for a machine.

A block that is not in the folder is claimed first (`prefetch.cache.claims`); whoever has the claim fetches
it, puts it into the folder and gives the claim up, and the others who want it find it there. If the one who
fetches dies, the next one gets the claim. If it was merely stopped, the others fetch for themselves after a
while: a claim saves a request and is never needed for the right bytes.

The cache can fail in any way without failing a read: the first time it cannot be used, is full or has damaged
blocks there is a warning that says so, and what it cannot give comes from the store.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefetch.cache.claims import Claim, Claims
from prefetch.cache.entry import DamagedEntryError, Entry, read_entry, tag_of
from prefetch.cache.folder import VERSION, CacheFolder, Stored, prepare
from prefetch.counts import NO_CACHE, CacheStats
from prefetch.errors import ReaderClosedError
from sharding.blocks import Shard
from sharding.write.file import NO_ROOM, space_at

_PATIENCE_S = 60.0
"""For another process's fetch. It ends with that process; only one that was stopped takes as long."""
_LEAST_BYTES = 32 << 10
"""Smaller ranges are single samples; a file for each would cost more than it saves, unless it is one."""


class Future(Protocol):
    """Tells when blocks are needed. Thread-safe."""

    def shard_hashes(self) -> NDArray[np.uint64]:
        """Return the hashes of the shards that are read, as in `Stored`."""
        ...

    def of_stored(self, stored: Stored) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return when each block is needed next, and whether it is known."""
        ...

    def of_entry(self, entry: Entry) -> float:
        """Return when a block that was just read is needed again; infinity: not by this machine."""
        ...


class BlockCache:
    """The folder above one loader's stores. Thread-safe. It never raises for its own troubles.

    Args:
        path: the folder.
        limit_bytes: of the blocks in it.
        future: of the blocks.
        patience_s: how long to wait for another process's fetch.
    """

    def __init__(
        self, path: str, limit_bytes: int, future: Future, *, patience_s: float = _PATIENCE_S
    ) -> None:
        self._path, self._future, self._patience_s = path, future, patience_s
        self._root = f"{path}/{VERSION}"
        self._lock = threading.Lock()  # guards what is below
        self._counts = NO_CACHE
        self._warned: set[str] = set()
        self._claims: Claims | None = None
        self._folder: CacheFolder | None = None
        self._closed = False
        try:
            self._claims = Claims(prepare(path))
            self._folder = CacheFolder(
                path,
                limit_bytes,
                claims=self._claims,
                shard_hashes=future.shard_hashes(),
                next_use=future.of_stored,
            )
        except OSError as error:
            self._warn(
                "write",
                f"the cache folder {path} cannot be written ({error.strerror or error}): blocks that are in "
                "it are used, all others come from the store. Give a folder that this user may write",
            )

    def read_into(
        self,
        shard: Shard,
        offset: int,
        out: NDArray[np.uint8],
        fetch: Callable[[], None],
        *,
        checksum: int | None = None,
    ) -> None:
        """Fill `out` with the shard's bytes from `offset`.

        Args:
            shard: as it was indexed.
            offset: first byte in the shard.
            out: [n] contiguous. Holds anything after an error.
            fetch: fills `out` from the store; raises what it raises.
            checksum: CRC-32 of the bytes, if the catalog has it; `fetch` has compared it.

        Raises `ReaderClosedError` if `end` was called while it waited.
        """
        is_small = out.nbytes < min(_LEAST_BYTES, shard.size or 1)
        if is_small or not self._is_versioned(shard):
            fetch()
            self._count(misses=1, miss_bytes=out.nbytes)
            return
        entry = Entry(tag_of(shard), offset, out.nbytes)
        if self._from_folder(entry, out, checksum):
            self._count(hits=1, hit_bytes=out.nbytes)
            return
        with self._claimed(entry) as claim:
            if claim is not None and self._from_folder(entry, out, checksum):
                self._count(hits=1, hit_bytes=out.nbytes, waited=1)
            else:
                fetch()
                self._count(misses=1, miss_bytes=out.nbytes)
                self._publish(entry, out, checksum)

    def stats(self) -> CacheStats:
        """Return the counts so far."""
        folder = self._folder
        with self._lock:
            if folder is None:
                return self._counts
            return self._counts + CacheStats(evicted=folder.evicted, evicted_bytes=folder.evicted_bytes)

    def end(self) -> None:
        """End waits for other processes, now and later. Any thread; does not wait."""
        self._closed = True
        if self._claims is not None:
            self._claims.end()

    def close(self) -> None:
        """Let go of the folder, when no thread reads any more. Idempotent."""
        folder, claims, self._claims = self._folder, self._claims, None
        if folder is not None:
            folder.close()
        if claims is not None:
            claims.close()

    # ---- the folder ---------------------------------------------------------------------------------

    def _from_folder(self, entry: Entry, out: NDArray[np.uint8], checksum: int | None) -> bool:
        try:
            actual = read_entry(self._root, entry, out)
            if actual is not None and checksum is not None and actual != checksum:
                raise DamagedEntryError(entry.name)
        except DamagedEntryError:
            self._count(errors=1)
            self._warn(
                "damaged",
                f"a block in the cache folder {self._path} is damaged ({entry.name}); it is fetched again. "
                "If that happens often, look at the disk",
            )
            with suppress(OSError):
                if self._folder is not None:
                    self._folder.remove_damaged(entry)
            return False
        except OSError as error:
            self._count(errors=1)
            self._warn("read", f"the cache folder {self._path} cannot be read: {error.strerror or error}")
            return False
        return actual is not None

    @contextmanager
    def _claimed(self, entry: Entry) -> Iterator[Claim | None]:
        """The claim to fetch a block; None: fetch it without."""
        claim = None
        with ExitStack() as stack:
            if self._keeps:  # else who waited would have to fetch it all the same
                try:
                    assert self._claims is not None
                    taken = self._claims.taken(entry.name, patience_s=self._patience_s)
                    claim = stack.enter_context(taken)
                except OSError as error:
                    self._cannot_write(error)
            if self._closed:
                raise ReaderClosedError("the loader was closed while another process fetched a block")
            yield claim

    def _publish(self, entry: Entry, data: NDArray[np.uint8], checksum: int | None) -> None:
        if not self._keeps:
            return
        assert self._folder is not None
        try:
            if self._folder.publish(entry, data, lambda: self._future.of_entry(entry), checksum):
                self._count(stored_bytes=data.nbytes)
            else:
                self._count(passed=1)
        except OSError as error:
            self._cannot_write(error, needed=f", {data.nbytes:,} were needed")

    @property
    def _keeps(self) -> bool:
        """Return whether blocks are added to the folder."""
        return self._folder is not None and "write" not in self._warned

    def _cannot_write(self, error: OSError, *, needed: str = "") -> None:
        """Only read blocks of the folder from now on."""
        self._count(errors=1)
        cure, reason = "See that this user may write there", error.strerror or str(error)
        if error.errno in NO_ROOM:
            cure = "Free some space, or give Cache a lower limit"
            reason += f"; {space_at(os.path.join(self._path, ''))}{needed}"
        self._warn(
            "write",
            f"the cache folder {self._path} takes no more blocks ({reason}); those in it are whole and used, "
            f"all others come from the store. {cure}",
        )

    def _is_versioned(self, shard: Shard) -> bool:
        if not shard.version:
            self._warn(
                "version",
                f"{shard.url} has neither etag nor modification time, so that a change would not be noticed: "
                "such shards are not cached",
            )
        return bool(shard.version)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts += CacheStats(**more)

    def _warn(self, kind: str, text: str) -> None:
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            warnings.warn(text, RuntimeWarning, stacklevel=4)
