"""Reads through a cache: fetched once by all who want a block, and never failed by the cache itself."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_kit import Child, exit_code_in_child, forked, on_file_events, without_privileges
from numpy.typing import NDArray

from prefetch.cache.block_cache import BlockCache
from prefetch.cache.entry import Entry, shard_hash, tag_of
from prefetch.cache.folder import VERSION, Stored
from prefetch.errors import ReaderClosedError
from sharding.blocks import Shard

SHARD = Shard("http://x/a.tar", 10_000_000, "etag:1")
NBYTES = 40_000
WAIT_S = 20.0


def content(offset: int) -> bytes:
    return np.random.default_rng(offset).bytes(NBYTES)


class Sooner:
    """All blocks are ours; those with lower offsets are needed sooner."""

    def shard_hashes(self) -> NDArray[np.uint64]:
        return np.array([shard_hash(Entry(tag_of(SHARD), 0, 1).tag)], np.uint64)

    def of_stored(self, stored: Stored) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        return stored.offsets.astype(float), np.ones(len(stored.names), bool)

    def of_entry(self, entry: Entry) -> float:
        return float(entry.offset)


Open = Callable[..., BlockCache]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as stack:

        def make(path: Path = tmp_path / "cache", limit: int = 1 << 30) -> BlockCache:
            cache = BlockCache(str(path), limit, Sooner())
            stack.callback(cache.close)
            stack.callback(cache.end)
            return cache

        yield make


class Store:
    """Counts what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.before: Callable[[], None] = lambda: None

    def read(
        self,
        cache: BlockCache,
        offset: int = 0,
        shard: Shard = SHARD,
        nbytes: int = NBYTES,
        checksum: int | None = None,
    ) -> bytes:
        out = np.zeros(nbytes, np.uint8)

        def fetch() -> None:
            self.fetched.append(offset)
            self.before()
            out[:] = np.frombuffer(content(offset)[:nbytes], np.uint8)

        cache.read_into(shard, offset, out, fetch, checksum=checksum)
        return out.tobytes()


def only_block(path: Path) -> Path:
    [block] = (path / VERSION / "blocks").rglob("*-*")
    return block


# ---- once --------------------------------------------------------------------------------------------------


@contextmanager
def another_process_fetches(store: Store, open_cache: Callable[[], BlockCache]) -> Iterator[Child]:
    """A process that is in the middle of fetching the block."""

    def fetch_for_ever(stop: Callable[[], None]) -> None:
        store.before = stop
        store.read(open_cache())

    with forked(fetch_for_ever) as child:
        child.reached()
        yield child


def test_a_block_is_fetched_once(opened: Open) -> None:
    store, cache = Store(), opened()
    for _ in range(3):
        assert store.read(cache) == content(0)
    assert store.read(opened()) == content(0)
    assert store.fetched == [0]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.hit_bytes, stats.miss_bytes) == (2, 1, 2 * NBYTES, NBYTES)
    assert stats.stored_bytes == NBYTES


def test_all_who_want_a_block_at_the_same_time_fetch_it_once(opened: Open) -> None:
    store, caches = Store(), [opened() for _ in range(4)]
    all_want = threading.Barrier(4, timeout=WAIT_S)

    def read(cache: BlockCache) -> bytes:
        all_want.wait()
        return store.read(cache)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, caches)) == [content(0)] * 4
    assert store.fetched == [0]
    assert sum(cache.stats().hits for cache in caches) == 3


def test_what_a_killed_process_fetched_is_fetched_by_the_next_at_once(opened: Open) -> None:
    store, cache = Store(), opened()

    with another_process_fetches(store, opened) as child, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.read, cache)
        child.kill()
        assert waiting.result(WAIT_S) == content(0)
    assert store.fetched == [0]  # by this process
    assert cache.stats().stored_bytes == NBYTES


def test_a_stopped_process_holds_nobody_up_for_ever(opened: Open, tmp_path: Path) -> None:
    store = Store()
    patient = BlockCache(str(tmp_path / "cache"), 1 << 30, Sooner(), patience_s=0.02)

    with another_process_fetches(store, opened):
        assert store.read(patient) == content(0)
    patient.close()


def test_closing_ends_the_wait_for_another_process(opened: Open) -> None:
    cache, store = opened(), Store()

    with another_process_fetches(store, opened), ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.read, cache)
        cache.end()
        with pytest.raises(ReaderClosedError):
            waiting.result(WAIT_S)


def test_a_fetch_that_fails_leaves_the_block_to_the_next(opened: Open) -> None:
    store, cache = Store(), opened()

    def fail() -> None:
        raise ConnectionError("down")

    store.before = fail
    with pytest.raises(ConnectionError):
        store.read(cache)
    store.before = lambda: None
    assert store.read(cache) == content(0)
    assert cache.stats().misses == 1


# ---- what is not kept --------------------------------------------------------------------------------------


def test_a_changed_shard_never_gives_old_bytes(opened: Open) -> None:
    store, cache = Store(), opened()
    store.read(cache)
    store.read(cache, shard=Shard(SHARD.url, SHARD.size, "etag:2"))
    assert store.fetched == [0, 0]


def test_a_shard_of_no_version_is_not_kept(opened: Open) -> None:
    store, cache = Store(), opened()
    with pytest.warns(RuntimeWarning, match="neither etag nor modification time"):
        store.read(cache, shard=Shard(SHARD.url, SHARD.size, ""))
    store.read(cache, shard=Shard(SHARD.url, SHARD.size, ""))
    assert store.fetched == [0, 0]


def test_small_ranges_are_not_kept(opened: Open) -> None:
    store, cache = Store(), opened()
    for _ in range(2):
        store.read(cache, nbytes=1000)
    assert store.fetched == [0, 0]


def test_what_is_needed_later_than_all_that_is_there_is_not_kept(opened: Open) -> None:
    store, cache = Store(), opened(limit=2 * NBYTES + 1000)
    for offset in (0, 1, 2, 0, 1, 2):
        store.read(cache, offset)
    assert store.fetched == [0, 1, 2, 2]
    assert cache.stats().passed == 2


# ---- troubles ----------------------------------------------------------------------------------------------


def test_a_damaged_block_is_fetched_again_and_replaced(opened: Open, tmp_path: Path) -> None:
    store, cache = Store(), opened()
    store.read(cache)
    block = only_block(tmp_path / "cache")
    block.write_bytes(b"?" + block.read_bytes()[1:])
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert store.read(cache) == content(0)
    assert store.read(cache) == content(0)
    assert store.fetched == [0, 0]
    assert cache.stats().errors == 1


def test_a_block_that_is_not_what_was_indexed_is_fetched_again(opened: Open) -> None:
    store, cache = Store(), opened()
    store.read(cache)
    assert store.read(cache, checksum=zlib.crc32(content(0))) == content(0)
    assert store.fetched == [0]
    with pytest.warns(RuntimeWarning, match="is damaged"):
        store.read(cache, checksum=1)
    assert store.fetched == [0, 0]


def test_a_full_disk_is_warned_about_once_and_reading_goes_on(opened: Open, tmp_path: Path) -> None:
    def full(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            raise OSError(ENOSPC, os.strerror(ENOSPC))

    def fill() -> None:
        store, cache = Store(), opened()
        store.read(cache, 0)
        on_file_events(full)
        with pytest.warns(
            RuntimeWarning,
            match=r"takes no more blocks \(No space left on device; [\d,]+ bytes are free, \d[\d,]* were "
            r"needed\).*lower limit",
        ) as caught:
            got = [store.read(cache, offset) for offset in (0, 1, 2, 0, 1, 2)]
        assert got == [content(offset) for offset in (0, 1, 2, 0, 1, 2)]
        assert len(caught) == 1
        assert store.fetched == [0, 1, 2, 1, 2]
        assert cache.stats().errors == 1

    assert exit_code_in_child(fill) == 0
    assert list((tmp_path / "cache" / VERSION / "live").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_warned_about(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match=r"cannot be written \(Not a directory\)"):
        cache = opened(tmp_path / "file" / "cache")
    store = Store()
    assert store.read(cache) == store.read(cache) == content(0)
    assert store.fetched == [0, 0]


def test_a_read_only_folder_serves_what_is_in_it(opened: Open, tmp_path: Path) -> None:
    store = Store()
    store.read(opened(), 0)
    (tmp_path / "cache" / VERSION / "live").chmod(0o500)

    def read_both() -> None:
        without_privileges()
        with pytest.warns(RuntimeWarning, match="Permission denied.*may write"):
            cache = opened()
        assert store.read(cache, 0) == content(0)
        assert store.read(cache, 1) == content(1)
        assert store.fetched == [0, 1]

    assert exit_code_in_child(read_both) == 0


def test_a_block_that_cannot_be_read_is_warned_about(opened: Open, tmp_path: Path) -> None:
    store, cache = Store(), opened()
    store.read(cache)
    block = only_block(tmp_path / "cache")
    block.unlink()
    block.mkdir()
    with pytest.warns(RuntimeWarning, match="cannot be read: Is a directory"):
        assert store.read(cache) == content(0)
