"""The cache's folder: whole blocks or none, whoever is killed; within its limit; nobody else's files."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_kit import exit_code_in_child, forked, limited, on_file_events
from numpy.typing import NDArray

from prefetch.cache import folder as folder_module
from prefetch.cache.claims import Claims
from prefetch.cache.entry import (
    MORE_BYTES,
    DamagedEntryError,
    Entry,
    block_path,
    read_entry,
    shard_hash,
    tag_of,
)
from prefetch.cache.folder import VERSION, CacheFolder, Stored, prepare
from sharding.blocks import Shard

SHARD = Shard("http://x/a.tar", 10_000_000, "etag:1")
NBYTES = 1000
Points = Callable[[str, Callable[[], None]], None]


def entry(number: int, shard: Shard = SHARD) -> Entry:
    return Entry(tag_of(shard), number * NBYTES, NBYTES)


def content(number: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(number).bytes(NBYTES), np.uint8)


STORED = entry(0).stored_bytes


class Uses(dict[int, float]):
    """Block number -> next use; blocks of SHARD are known, and by default needed at their number."""

    times_asked = 0

    def __call__(self, stored: Stored) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        self.times_asked += 1
        numbers = [int(offset) // NBYTES for offset in stored.offsets]
        known = stored.shard_hashes == np.uint64(shard_hash(entry(0).tag))
        return np.array([self.get(n, float(n)) for n in numbers], float), known


@contextmanager
def opened(path: Path, blocks: float = 100, uses: Uses | None = None) -> Iterator[CacheFolder]:
    claims = Claims(prepare(str(path)))
    shard_hashes = np.array([shard_hash(entry(0).tag)], np.uint64)
    folder = CacheFolder(
        str(path),
        int(blocks * STORED),
        claims=claims,
        shard_hashes=shard_hashes,
        next_use=Uses() if uses is None else uses,
    )
    try:
        yield folder
    finally:
        folder.close()
        claims.close()


def put(folder: CacheFolder, number: int, next_use: float | None = None, shard: Shard = SHARD) -> bool:
    use = float(number) if next_use is None else next_use
    return folder.publish(entry(number, shard), content(number), lambda: use)


def has(path: Path, number: int, shard: Shard = SHARD) -> bool:
    out = np.zeros(NBYTES, np.uint8)
    found = read_entry(str(path / VERSION), entry(number, shard), out) is not None
    assert not found or out.tobytes() == content(number).tobytes()
    return found


def files(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if not p.is_dir()}


def bytes_in_blocks(path: Path) -> int:
    return sum(p.stat().st_size for p in (path / VERSION / "blocks").rglob("*") if p.is_file())


def total(path: Path) -> int:
    return int.from_bytes((path / VERSION / "total").read_bytes(), "little")


# ---- keeping -----------------------------------------------------------------------------------------------


def test_a_block_is_read_as_it_was_put_also_by_another_process(tmp_path: Path) -> None:
    def assert_there() -> None:
        assert has(tmp_path, 3)

    with opened(tmp_path) as folder:
        assert not has(tmp_path, 3)
        assert put(folder, 3)
        assert has(tmp_path, 3)
        assert exit_code_in_child(assert_there) == 0
        assert total(tmp_path) == bytes_in_blocks(tmp_path) == STORED
    with opened(tmp_path):
        assert has(tmp_path, 3)


def test_another_version_of_a_shard_is_another_block(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        put(folder, 1)
        for other in (
            Shard(SHARD.url, SHARD.size, "etag:2"),
            Shard(SHARD.url, SHARD.size + 1, SHARD.version),
            Shard("http://x/b.tar", SHARD.size, SHARD.version),
        ):
            assert not has(tmp_path, 1, other)


@pytest.mark.parametrize("place", [0, NBYTES - 1, NBYTES, NBYTES + 20, STORED - 1])
def test_any_changed_byte_is_noticed(tmp_path: Path, place: int) -> None:
    with opened(tmp_path) as folder:
        put(folder, 1)
        [path] = (tmp_path / VERSION / "blocks").rglob("*-*")
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedEntryError):
            has(tmp_path, 1)
        folder.remove_damaged(entry(1))
        assert not has(tmp_path, 1)
        assert total(tmp_path) == 0


@pytest.mark.parametrize("nbytes", [0, 10, NBYTES, STORED - 1, STORED + 1])
def test_any_other_length_is_noticed(tmp_path: Path, nbytes: int) -> None:
    with opened(tmp_path) as folder:
        put(folder, 1)
        [path] = (tmp_path / VERSION / "blocks").rglob("*-*")
        path.write_bytes((path.read_bytes() + b"x")[:nbytes])
        with pytest.raises(DamagedEntryError):
            has(tmp_path, 1)


def test_a_block_under_another_blocks_name_is_noticed(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        put(folder, 1)
        put(folder, 2)
        one, two = sorted((tmp_path / VERSION / "blocks").rglob("*-*"), key=lambda p: p.name)
        os.replace(two, one)
        with pytest.raises(DamagedEntryError):
            has(tmp_path, 1)


# ---- the limit ---------------------------------------------------------------------------------------------


def test_what_is_needed_latest_makes_room(tmp_path: Path) -> None:
    with opened(tmp_path, blocks=3, uses=Uses({1: 10.0, 2: 30.0, 3: 20.0})) as folder:
        assert put(folder, 1)
        assert put(folder, 2)
        assert put(folder, 3)
        assert put(folder, 4, next_use=25.0)
        assert [has(tmp_path, n) for n in (1, 2, 3, 4)] == [True, False, True, True]
        assert not put(folder, 5, next_use=99.0)
        assert (folder.evicted, folder.evicted_bytes) == (1, STORED)
        assert total(tmp_path) == bytes_in_blocks(tmp_path) == 3 * STORED


def test_a_limit_lower_than_the_last_one_is_kept_to_at_once(tmp_path: Path) -> None:
    with opened(tmp_path, blocks=5) as folder:
        for number in range(1, 6):
            assert put(folder, number)
    with opened(tmp_path, blocks=3) as folder:
        assert total(tmp_path) == bytes_in_blocks(tmp_path) == 3 * STORED
        assert [has(tmp_path, n) for n in range(1, 6)] == [True] * 3 + [False] * 2
        assert folder.evicted == 2


def test_the_limit_holds_for_all_processes_together(tmp_path: Path) -> None:
    with opened(tmp_path, blocks=4.5) as one, opened(tmp_path, blocks=4.5) as two:
        for number in range(20, 0, -2):
            assert put(one, number)
            assert put(two, number - 1)
            assert bytes_in_blocks(tmp_path) <= 4.5 * STORED
        assert [has(tmp_path, n) for n in (1, 2, 3, 4, 5)] == [True] * 4 + [False]


def test_many_threads_keep_to_the_limit(tmp_path: Path) -> None:
    with opened(tmp_path, blocks=5) as folder:
        threads = [
            threading.Thread(target=lambda k=k: [put(folder, 100 - 8 * i - k) for i in range(10)])
            for k in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert total(tmp_path) == bytes_in_blocks(tmp_path) <= 5 * STORED


@pytest.mark.parametrize("has_total", [True, False])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_block_that_is_finished_while_the_folder_is_counted_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool, has_total: bool
) -> None:
    begun, counted = threading.Event(), threading.Event()
    write, stored = folder_module._write_all, CacheFolder._stored

    def write_later(descriptor: int, data: memoryview) -> None:
        begun.set()
        assert counted.wait(20)
        write(descriptor, data)

    def finish_meanwhile(self: CacheFolder) -> Stored:
        found = None if is_listed else stored(self)
        counted.set()
        writer.join(20)
        return stored(self) if found is None else found

    with opened(tmp_path, blocks=2) as folder:
        assert put(folder, 9)
        monkeypatch.setattr(folder_module, "_write_all", write_later)
        writer = threading.Thread(target=put, args=(folder, 8))
        writer.start()
        assert begun.wait(20)
        monkeypatch.setattr(CacheFolder, "_stored", finish_meanwhile)
        if not has_total:
            (tmp_path / VERSION / "total").unlink()
        assert put(folder, 1)
        assert total(tmp_path) == bytes_in_blocks(tmp_path) == 2 * STORED


OTHER = Shard("http://x/other.tar", 10_000_000, "etag:1")


def test_blocks_of_a_loader_that_ended_go_first_and_of_one_that_runs_stay(tmp_path: Path) -> None:
    shard_hashes = np.array([shard_hash(entry(0, OTHER).tag)], np.uint64)
    claims = Claims(prepare(str(tmp_path)))
    other = CacheFolder(str(tmp_path), 2 * STORED, claims=claims, shard_hashes=shard_hashes, next_use=Uses())
    with opened(tmp_path, blocks=2) as folder:
        assert put(other, 1, shard=OTHER)
        assert put(folder, 2)
        assert not put(folder, 3)  # 2 is needed sooner, and the other stays
        assert put(folder, 1)
        assert has(tmp_path, 1, OTHER)
        other.close()
        assert put(folder, 3)
        assert not has(tmp_path, 1, OTHER)
    claims.close()


def test_room_is_not_looked_for_again_and_again(tmp_path: Path) -> None:
    uses = Uses()
    with opened(tmp_path, blocks=640, uses=uses) as folder:
        (tmp_path / VERSION / "total").write_bytes((640 * STORED).to_bytes(8, "little"))
        assert put(folder, 1)  # there was room: the total was wrong
        assert uses.times_asked == 1
        rest = np.zeros(639 * STORED - MORE_BYTES, np.uint8)
        assert folder.publish(Entry(tag_of(SHARD), 0, rest.nbytes), rest, lambda: 0.0)
        assert total(tmp_path) == 640 * STORED
        assert [put(folder, n, next_use=50.0) for n in range(2, 12)] == [False] * 10
        assert uses.times_asked == 2
        assert [put(folder, n, next_use=50.0) for n in range(2, 12)] == [False] * 10
        assert uses.times_asked == 3  # as much was passed as room is made for at a time


# ---- being killed ------------------------------------------------------------------------------------------


def is_part(path: object) -> bool:
    return f"/live/{entry(0).name}." in str(path)


def at_create(stop: Callable[[], None]) -> None:
    created = []

    def act(event: str, arguments: tuple[Any, ...]) -> None:
        if created:
            stop()
        if event == "open" and is_part(arguments[0]):
            created.append(True)

    on_file_events(act)


def at_half(stop: Callable[[], None]) -> None:
    def act(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            os.truncate(arguments[0], STORED // 2)
            stop()

    on_file_events(act)


def before_rename(stop: Callable[[], None]) -> None:
    def act(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and os.path.isdir(os.path.dirname(arguments[1])):
            stop()

    on_file_events(act)


def at_removal(stop: Callable[[], None]) -> None:
    removed = []

    def act(event: str, arguments: tuple[Any, ...]) -> None:
        if removed:
            stop()
        if event == "os.remove" and "/blocks/" in arguments[0]:
            removed.append(True)

    on_file_events(act)


def after_rename(stop: Callable[[], None]) -> None:
    """`put` ends before anything else is done to files."""


@pytest.mark.parametrize(
    ("point", "kept"),
    [(at_create, 2), (at_half, 2), (before_rename, 2), (after_rename, 3), (at_removal, 1)],
)
def test_a_process_killed_at_any_instant_leaves_nothing_in_the_way(
    tmp_path: Path, point: Callable[[Callable[[], None]], None], kept: int
) -> None:
    limit = 2 if point is at_removal else 3
    with opened(tmp_path, blocks=limit) as folder:
        put(folder, 1)
        put(folder, 2)

    def publish(stop: Callable[[], None]) -> None:
        with opened(tmp_path, blocks=limit) as folder:
            point(stop)
            put(folder, 0)
            if point is after_rename:
                stop()

    with forked(publish) as child:
        child.reached()
        child.kill()
    assert total(tmp_path) >= bytes_in_blocks(tmp_path)
    with opened(tmp_path, blocks=limit) as folder:
        assert sum(has(tmp_path, n) for n in (0, 1, 2)) == kept
        assert list((tmp_path / VERSION / "live").iterdir()) == []
        assert len(list((tmp_path / VERSION / "users").iterdir())) == 1
        assert put(folder, 0, next_use=-1.0)
        assert has(tmp_path, 0)
        assert put(folder, 5, next_use=-1.0)
        assert total(tmp_path) == bytes_in_blocks(tmp_path) <= limit * STORED


def test_claims_of_killed_processes_are_swept_and_no_others(tmp_path: Path) -> None:
    def fetch(stop: Callable[[], None]) -> None:
        assert Claims(prepare(str(tmp_path))).take(entry(1).name, patience_s=0)
        stop()

    live = tmp_path / VERSION / "live"
    with forked(fetch) as child:
        child.reached()
        with opened(tmp_path):
            assert [path.name for path in live.iterdir()] == [entry(1).name]
        child.kill()
    with opened(tmp_path):
        assert list(live.iterdir()) == []


def test_what_is_being_written_is_not_swept_away(tmp_path: Path) -> None:
    def another_begins(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            with opened(tmp_path):
                pass

    def write() -> None:
        with opened(tmp_path) as folder:
            on_file_events(another_begins)
            assert put(folder, 1)

    assert exit_code_in_child(write) == 0
    assert has(tmp_path, 1)


# ---- other people's files ----------------------------------------------------------------------------------


def test_nothing_is_removed_that_no_cache_wrote(tmp_path: Path) -> None:
    prepare(str(tmp_path))
    inside = tmp_path / VERSION
    outside = tmp_path / "mine.tar"
    name = f"{entry(9).name}"
    foreign = [
        outside,
        tmp_path / name,
        inside / "notes.txt",
        inside / "blocks" / name,
        inside / "blocks" / "zz" / name,
        inside / "blocks" / "00" / "photo.jpg",
        inside / "blocks" / "00" / (name + ".bak"),
        inside / "live" / "hello",
        inside / "live" / name,
        inside / "users" / "hello",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"precious" * 100)
    link = Path(block_path(str(inside), entry(8).name))
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    with opened(tmp_path, blocks=2) as folder:
        for number in range(7, 0, -1):
            assert put(folder, number)
        assert has(tmp_path, 1)
        assert folder.evicted == 5
    assert all(path.read_bytes() == b"precious" * 100 for path in foreign)
    assert link.is_symlink()


def test_a_block_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        put(folder, 1)
        with limited(resource.RLIMIT_FSIZE, NBYTES // 2), pytest.raises(OSError, match="File too large"):
            put(folder, 2)
        assert list((tmp_path / VERSION / "live").iterdir()) == []
        assert total(tmp_path) == STORED
        assert not has(tmp_path, 2)


def test_a_lost_total_is_counted_again(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        put(folder, 1)
        for number, damage in ((2, b""), (4, b"123")):
            (tmp_path / VERSION / "total").write_bytes(damage)
            put(folder, number)
            os.unlink(tmp_path / VERSION / "total")
            put(folder, number + 1)
            assert total(tmp_path) == bytes_in_blocks(tmp_path)
