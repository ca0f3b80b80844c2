"""Reading ranges of shards: right bytes, or an error that names the shard and what is wrong."""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import fsspec
import numpy as np
import pytest
from forked_kit import exit_code_in_child, without_privileges
from fsspec import AbstractFileSystem
from hypothesis import HealthCheck, given, settings, strategies as st

from prefetch.counts import ReadStats
from prefetch.errors import ReaderClosedError
from prefetch.retries import RetryPolicy
from prefetch.store.local import read_local
from prefetch.store.reader import StoreReader
from prefetch.store.retrier import Hosts
from sharding.blocks import Shard
from sharding.catalog.storage import open_url, shard_info, shard_of
from sharding.errors import ShardChangedError, ShardError, ShardReadError

CONTENT = bytes(range(256)) * 40


def indexed(url: str) -> Shard:
    """The shard as indexing would record it now."""
    return shard_of(url, shard_info(url, *open_url(url)))


def read(shard: Shard, offset: int = 0, nbytes: int = 10, reader: StoreReader | None = None) -> bytes:
    out = np.full(nbytes, 0xA5, np.uint8)
    (reader or StoreReader()).read_into(shard, offset, out)
    return out.tobytes()


class FakeTime:
    """A clock that only waiting moves, and what was waited for. Says "closed" after `close_after` waits."""

    def __init__(self, *, close_after: int | None = None) -> None:
        self.now_s = 0.0
        self.waits: list[float] = []
        self._close_after = close_after

    def now(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now_s += seconds
        return len(self.waits) == self._close_after


def reader_on(time: FakeTime, **policy: Any) -> StoreReader:
    return StoreReader(policy=RetryPolicy(**policy), now=time.now, wait=time.wait)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "shard 0%.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def memory_url() -> Iterator[str]:
    url = "memory://test_store/shard.bin"
    fsspec.filesystem("memory").pipe_file("/test_store/shard.bin", CONTENT)
    yield url
    fsspec.filesystem("memory").store.pop("/test_store/shard.bin", None)


class FailingFileSystem(AbstractFileSystem):
    """A store with one object that fails as each test wants, and writes down what it is asked."""

    protocol = "failing"
    cachable = False
    failure: Callable[[], None] = staticmethod(lambda: None)
    failure_of_info: Callable[[], None] = staticmethod(lambda: None)
    etag = "one"
    num_infos = 0
    most_bytes = len(CONTENT)
    """That an answer brings."""
    starts: list[int]
    options: list[dict[str, Any]]
    """Of each that was opened."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.options.append(options)

    @classmethod
    def registered(cls) -> type[Self]:
        """A store of one test."""

        class Fresh(cls):  # type: ignore[misc,valid-type]
            starts, options = list[int](), list[dict[str, Any]]()

        fsspec.register_implementation(cls.protocol, Fresh, clobber=True)
        return Fresh

    def info(self, path: str, **kwargs: Any) -> Any:
        type(self).num_infos += 1
        type(self).failure_of_info()
        return {"name": path, "size": len(CONTENT), "type": "file", "ETag": self.etag}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        type(self).failure()
        self.starts.append(start)
        return CONTENT[start:end][: self.most_bytes]


@pytest.fixture
def failing() -> type[FailingFileSystem]:
    return FailingFileSystem.registered()


# ---- the right bytes ---------------------------------------------------------------------------------------


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(offset=st.integers(0, len(CONTENT)), nbytes=st.integers(0, len(CONTENT)))
def test_any_range_is_the_slice_of_the_content(path: Path, memory_url: str, offset: int, nbytes: int) -> None:
    nbytes = min(nbytes, len(CONTENT) - offset)
    for url in (str(path), memory_url):
        assert read(indexed(url), offset, nbytes) == CONTENT[offset : offset + nbytes]


def test_a_local_url_with_its_protocol_is_read_as_a_file(path: Path) -> None:
    reader = StoreReader()
    reader.close()  # nothing remote is read any more
    shard = Shard(f"file://{path}", len(CONTENT), "")
    assert read(shard, 5, reader=reader) == CONTENT[5:15]


def test_only_the_destination_is_written(path: Path) -> None:
    memory = np.full(30, 0xA5, np.uint8)
    StoreReader().read_into(indexed(str(path)), 100, memory[10:20])
    assert memory.tobytes() == b"\xa5" * 10 + CONTENT[100:110] + b"\xa5" * 10


def test_a_read_that_comes_in_pieces_goes_on(path: Path) -> None:
    def in_pieces(descriptor: int, views: list[memoryview], at: int) -> int:
        return os.preadv(descriptor, [views[0][:7]], at)

    out = np.zeros(100, np.uint8)
    read_local(indexed(str(path)), 50, out, read=in_pieces)
    assert out.tobytes() == CONTENT[50:150]


def test_no_descriptor_is_left_open(path: Path) -> None:
    shard, reader = indexed(str(path)), StoreReader()
    before = set(os.listdir("/proc/self/fd"))
    read(shard, reader=reader)
    with pytest.raises(ShardReadError):
        read(shard, len(CONTENT) - 5, 10, reader)
    assert set(os.listdir("/proc/self/fd")) == before


# ---- local failures ----------------------------------------------------------------------------------------


def assert_names_the_place(error: ShardError, shard: Shard, offset: int | None) -> None:
    assert (error.shard, error.offset, error.stage) == (shard.url, offset, "read")


@pytest.mark.parametrize("missing", [1, 10])
def test_a_range_beyond_the_end_is_truncated(path: Path, memory_url: str, missing: int) -> None:
    for url in (str(path), memory_url):
        shard, offset = indexed(url), len(CONTENT) - 10 + missing
        with pytest.raises(ShardReadError, match=f"truncated: wanted 10 bytes, got {10 - missing}") as caught:
            read(shard, offset)
        assert_names_the_place(caught.value, shard, offset)


def test_a_missing_file_is_named_with_its_cause(tmp_path: Path) -> None:
    shard = Shard(str(tmp_path / "none.bin"), 10, "")
    with pytest.raises(ShardReadError, match="no such file") as caught:
        read(shard, 3)
    assert_names_the_place(caught.value, shard, 3)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_directory_is_not_a_shard(tmp_path: Path) -> None:
    with pytest.raises(ShardReadError, match="is a directory"):
        read(Shard(str(tmp_path), 10, ""))


def test_a_forbidden_file_is_named(path: Path) -> None:
    shard = indexed(str(path))
    path.chmod(0)

    def read_in_vain() -> None:
        without_privileges()
        with pytest.raises(ShardReadError, match="permission denied") as caught:
            read(shard)
        assert_names_the_place(caught.value, shard, 0)

    assert exit_code_in_child(read_in_vain) == 0


def test_a_system_failure_while_reading_is_named() -> None:
    with pytest.raises(ShardReadError, match="Input/output error"):
        read(Shard("/proc/self/mem", 0, ""))  # at address 0 lies nothing


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def shrink(path: Path) -> None:
    os.truncate(path, len(CONTENT) // 2)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 1_000_000_007))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(CONTENT)
    touch(other)
    other.replace(path)


@pytest.mark.parametrize("change", [grow, shrink, touch, replace])
def test_a_local_shard_that_is_not_the_indexed_one_is_refused(
    path: Path, change: Callable[[Path], None]
) -> None:
    shard, reader = indexed(str(path)), StoreReader()
    assert read(shard, reader=reader) == CONTENT[:10]
    change(path)
    expected = "its size is" if change in (grow, shrink) else "its modification time is 1000000007"
    with pytest.raises(ShardChangedError, match=expected) as caught:
        read(shard, 20, reader=reader)
    assert_names_the_place(caught.value, shard, 20)


def test_without_a_recorded_version_only_the_size_counts(path: Path) -> None:
    shard = Shard(str(path), len(CONTENT), "")
    touch(path)
    assert read(shard) == CONTENT[:10]


def read_with(action: Callable[[], object], shard: Shard, offset: int = 0) -> bytes:
    """What a read brings during which something happens."""

    def then_act(descriptor: int, views: list[memoryview], at: int) -> int:
        got = os.preadv(descriptor, views, at)
        action()
        return got

    out = np.zeros(10, np.uint8)
    read_local(shard, offset, out, read=then_act)
    return out.tobytes()


def test_a_shard_overwritten_during_the_read_is_noticed(path: Path) -> None:
    shard = indexed(str(path))
    with pytest.raises(ShardChangedError, match="modification time"):
        read_with(lambda: touch(path), shard)


def test_a_shard_renamed_over_during_the_read_gives_the_old_bytes(path: Path) -> None:
    shard = indexed(str(path))
    other = path.with_name("other")
    other.write_bytes(b"new")
    assert read_with(lambda: other.replace(path), shard, 30) == CONTENT[30:40]
    assert path.read_bytes() == b"new"


# ---- other stores ------------------------------------------------------------------------------------------


def test_a_missing_object_is_named() -> None:
    shard = Shard("memory://test_store/none.bin", 100, "")
    with pytest.raises(ShardReadError, match="no such file") as caught:
        read(shard, 3)
    assert_names_the_place(caught.value, shard, 3)


def test_an_object_of_another_size_is_refused(memory_url: str) -> None:
    shard = Shard(memory_url, len(CONTENT) + 1, "")
    with pytest.raises(ShardChangedError, match=f"its size is {len(CONTENT)} bytes") as caught:
        read(shard)
    assert_names_the_place(caught.value, shard, None)


def test_a_store_that_stays_down_is_one_error_within_its_deadline(failing: type[FailingFileSystem]) -> None:
    shard, time = indexed("failing://shard.bin"), FakeTime()
    failure = ConnectionResetError("the peer hung up")

    def fail() -> None:
        raise failure

    failing.failure = staticmethod(fail)
    expected = (
        r"bytes 7 to 16 were given up after \d+ attempts in \d+\.\d s: no byte came within the deadline of "
        r"60 s; the last one: .*ConnectionResetError: the peer hung up"
    )
    with pytest.raises(ShardReadError, match=expected) as caught:
        read(shard, 7, reader=reader_on(time, deadline_s=60))
    assert_names_the_place(caught.value, shard, 7)
    assert caught.value.__cause__ is failure
    assert len(time.waits) > 10
    assert 30 < time.now_s <= 60


def refused() -> None:
    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def test_what_a_read_waits_for_is_told_after_3_s_and_at_growing_intervals(
    failing: type[FailingFileSystem],
) -> None:
    shard, time, lines = indexed("failing://shard.bin"), FakeTime(), list[str]()
    read(shard, reader=reader_on(time))
    reader = StoreReader(hosts=Hosts(), now=time.now, wait=time.wait, say=lines.append)
    read(shard, reader=reader)
    failing.failure = staticmethod(refused)
    with pytest.raises(ShardReadError, match="no byte came within the deadline of 120 s"):
        read(shard, reader=reader)
    said = [
        re.fullmatch(
            r"waiting (\d+) s for a read: a read of failing://shard.bin without a byte for \d+ s, asked "
            r"again for \d+ s more; the last time: cannot be read: ConnectionRefusedError: .* refused",
            line,
        )
        for line in lines
    ]
    assert all(said)
    waited = [int(one[1]) for one in said if one]
    assert len(waited) == 6
    assert all(3 * 2**i <= seconds < 3 * 2**i + 11 for i, seconds in enumerate(waited))
    assert reader.waiting() == ""


def test_a_reader_that_was_told_of_the_host_takes_a_refusal_for_an_outage(
    failing: type[FailingFileSystem],
) -> None:
    shard, hosts = indexed("failing://shard.bin"), Hosts()
    failing.failure_of_info = staticmethod(refused)
    for known, longest_s in ((False, 2.0), (True, 120.0)):
        if known:
            hosts.add("failing://shard.bin")
        time = FakeTime()
        with pytest.raises(ShardReadError):
            read(shard, reader=StoreReader(hosts=hosts, now=time.now, wait=time.wait))
        assert 0.5 * longest_s < time.now_s <= longest_s


def test_a_request_after_an_outage_has_no_more_patience_than_the_first(
    failing: type[FailingFileSystem],
) -> None:
    shard, time, patience = indexed("failing://shard.bin"), FakeTime(), list[float]()

    class Watched(RetryPolicy):
        def stall_timeout_s(self, *observed: Any) -> float:
            patience.append(super().stall_timeout_s(*observed))
            return patience[-1]

    left = [ConnectionResetError(), ConnectionResetError(), TimeoutError(), TimeoutError()]

    def fail() -> None:
        if left:
            raise left.pop(0)

    failing.failure = staticmethod(fail)
    read(shard, reader=StoreReader(policy=Watched(), now=time.now, wait=time.wait))
    assert patience == [2.0, 2.0, 2.0, 4.0, 8.0]


def test_a_store_that_forbids_says_so(failing: type[FailingFileSystem]) -> None:
    shard = indexed("failing://shard.bin")

    def fail() -> None:
        raise PermissionError("token expired")

    failing.failure = staticmethod(fail)
    with pytest.raises(ShardReadError, match=r"permission denied \(token expired\)"):
        read(shard)


@pytest.mark.parametrize("num_failures", [1, 8])
def test_a_store_that_comes_back_is_read_by_the_same_call(
    failing: type[FailingFileSystem], num_failures: int
) -> None:
    time, failures = FakeTime(), [TimeoutError("slow")] * num_failures

    def fail_at_first() -> None:
        if failures:
            raise failures.pop()

    failing.failure = staticmethod(fail_at_first)
    reader = reader_on(time)
    assert read(indexed("failing://shard.bin"), reader=reader) == CONTENT[:10]
    assert len(time.waits) == num_failures
    assert reader.stats() == ReadStats(retries=num_failures, timeouts=num_failures)


def test_what_cannot_get_better_is_not_tried_again(failing: type[FailingFileSystem]) -> None:
    shard, time = indexed("failing://shard.bin"), FakeTime()

    def fail() -> None:
        raise PermissionError("no")

    failing.failure = staticmethod(fail)
    with pytest.raises(ShardReadError, match="permission denied"):
        read(shard, reader=reader_on(time))
    assert time.waits == []


def test_a_body_that_ends_early_is_continued_where_it_ended(failing: type[FailingFileSystem]) -> None:
    shard, reader = indexed("failing://shard.bin"), reader_on(FakeTime())
    failing.most_bytes = 40
    assert read(shard, 5, 100, reader) == CONTENT[5:105]
    assert failing.starts == [5, 45, 85]
    assert reader.stats() == ReadStats(retries=2, resumed=2)


def test_closing_ends_the_wait_before_the_next_attempt(failing: type[FailingFileSystem]) -> None:
    shard, time = indexed("failing://shard.bin"), FakeTime(close_after=2)

    def fail() -> None:
        raise ConnectionRefusedError

    failing.failure = staticmethod(fail)
    with pytest.raises(ReaderClosedError):
        read(shard, reader=reader_on(time))
    assert len(time.waits) == 2


def test_a_closed_reader_reads_nothing_remote(memory_url: str) -> None:
    reader = StoreReader()
    reader.close()
    with pytest.raises(ReaderClosedError):
        read(indexed(memory_url), reader=reader)


# ---- checksums ---------------------------------------------------------------------------------------------


class FlippingFileSystem(FailingFileSystem):
    """Flips the first byte of its first `flips` answers."""

    protocol = "flipping"
    flips = 0

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        data = bytearray(CONTENT[start:end])
        if type(self).flips:
            type(self).flips -= 1
            data[0] ^= 1
        return bytes(data)


@pytest.fixture
def flipping() -> type[FlippingFileSystem]:
    return FlippingFileSystem.registered()


@pytest.mark.parametrize("flips", [0, 1])
def test_wrong_bytes_are_read_again(flipping: type[FlippingFileSystem], flips: int) -> None:
    shard, reader, out = indexed("flipping://shard.bin"), StoreReader(), np.empty(10, np.uint8)
    flipping.flips = flips
    reader.read_into(shard, 5, out, checksum=zlib.crc32(CONTENT[5:15]))
    assert out.tobytes() == CONTENT[5:15]
    assert reader.stats() == ReadStats(checksum_failures=flips)


def test_bytes_that_are_wrong_twice_are_an_error(flipping: type[FlippingFileSystem]) -> None:
    shard, reader, out = indexed("flipping://shard.bin"), StoreReader(), np.empty(10, np.uint8)
    flipping.flips = 2
    with pytest.raises(ShardReadError, match=r"bytes 5 to 14 have checksum .* read twice, and had") as caught:
        reader.read_into(shard, 5, out, checksum=zlib.crc32(CONTENT[5:15]))
    assert_names_the_place(caught.value, shard, 5)
    assert reader.stats().checksum_failures == 2


def test_local_bytes_are_held_to_the_checksum_too(path: Path) -> None:
    out = np.empty(10, np.uint8)
    with pytest.raises(ShardReadError, match="have checksum"):
        StoreReader().read_into(indexed(str(path)), 5, out, checksum=zlib.crc32(b"other"))


# ---- the object --------------------------------------------------------------------------------------------


def test_an_object_with_another_etag_is_refused_until_it_is_back(failing: type[FailingFileSystem]) -> None:
    shard, reader = indexed("failing://shard.bin"), StoreReader()
    assert shard.version == "etag:one"
    failing.etag = "two"
    for _ in range(2):
        with pytest.raises(ShardChangedError, match="its etag is two; it was one"):
            read(shard, reader=reader)
    failing.etag = "one"
    assert read(shard, reader=reader) == CONTENT[:10]


def test_a_remote_shard_is_checked_once_a_reader(failing: type[FailingFileSystem]) -> None:
    shard, reader = indexed("failing://shard.bin"), StoreReader()
    failing.num_infos = 0
    for offset in range(5):
        assert read(shard, offset, reader=reader) == CONTENT[offset : offset + 10]
    assert failing.num_infos == 1
    read(shard)
    assert failing.num_infos == 2


def test_storage_options_reach_the_filesystem(failing: type[FailingFileSystem]) -> None:
    shard = indexed("failing://shard.bin")
    assert failing.options == [{}]
    options = {"key": "secret"}
    reader = StoreReader(options)
    options.clear()  # the reader keeps its own copy
    read(shard, reader=reader)
    assert failing.options == [{}, {"key": "secret"}]


def test_an_unknown_protocol_is_an_error_of_the_shard() -> None:
    with pytest.raises(ShardReadError, match="nosuch"):
        read(Shard("nosuch://bucket/shard.bin", 10, ""))
