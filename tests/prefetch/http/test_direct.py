"""S3 by signed URLs: the same bytes and the same handling of faults, and s3fs where they cannot serve."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import pytest
from http_kit import slowstore
from test_connections import RawServer, head, sends, serving, whole

from prefetch.http.connections import Destination
from prefetch.http.direct import direct_s3
from prefetch.retries import RetryPolicy
from prefetch.store.reader import StoreReader
from sharding.blocks import Shard
from sharding.errors import ShardChangedError, ShardReadError

pytest.importorskip("s3fs")
pytestmark = [
    # aiobotocore leaves its session to be closed by garbage collection.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CONTENT = np.random.default_rng(1).bytes(2_000_000)
QUICK = RetryPolicy(base_s=0.001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    for name in ("x.bin", "x 0%+ü.bin"):
        (tmp_path / "bucket" / name).write_bytes(CONTENT)
    return tmp_path


def by_client(server: RawServer) -> list[bool]:
    """Of each request, whether it came from s3fs, which signs in a header and not in the URL."""
    return ["\r\nauthorization:" in text.lower() for _, text in server.heads]


def count(url: str, name: str) -> int:
    """Of the requests to a `slowstore`; never by a proxy, which `urlopen` keeps from its first call on."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/__stats", timeout=20) as answer:
        return int(json.load(answer)[name])


def options(url: str, **more: Any) -> dict[str, Any]:
    return {"key": "x", "secret": "y", "endpoint_url": url, **more}


def shard(name: str = "x.bin", version: str = "") -> Shard:
    return Shard(f"s3://bucket/{name}", len(CONTENT), version)


def read(reader: StoreReader, offset: int, nbytes: int, name: str = "x.bin") -> bytes:
    out = np.zeros(nbytes, np.uint8)
    reader.read_into(shard(name), offset, out)
    return out.tobytes()


@pytest.mark.parametrize("name", ["x.bin", "x 0%+ü.bin"])
def test_ranges_come_by_signed_urls(folder: Path, name: str) -> None:
    with slowstore(folder) as url:
        reader = StoreReader(options(url))
        for offset in (0, 1000):
            assert read(reader, offset, 1_000_000, name) == CONTENT[offset : offset + 1_000_000]
        assert count(url, "ranges") == 2
        assert count(url, "authorized") == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("more", "direct"),
    [
        ({"config_kwargs": {"max_pool_connections": 3}}, True),
        ({"client_kwargs": {"region_name": "eu-north-1"}}, True),
        ({"config_kwargs": {"read_timeout": 9}}, False),
        ({"client_kwargs": {"verify": False}}, False),
        ({"s3_additional_kwargs": {"RequestPayer": "requester"}}, False),
        ({"requester_pays": True}, False),
    ],
)
def test_what_a_signed_url_cannot_say_is_left_to_s3fs(
    folder: Path, more: dict[str, Any], direct: bool
) -> None:
    with slowstore(folder) as url:
        assert read(StoreReader(options(url, **more)), 0, 1000) == CONTENT[:1000]
        assert (count(url, "authorized") > 0) == (not direct)


@pytest.mark.parametrize("bypass", ["127.0.0.1", "elsewhere"])
def test_where_the_environment_names_a_proxy_s3fs_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bypass: str
) -> None:
    with slowstore(folder) as url:
        monkeypatch.setenv("http_proxy", url)  # it is no proxy, and answers "not found" then
        monkeypatch.setenv("no_proxy", bypass)
        with nullcontext() if bypass == "127.0.0.1" else pytest.raises(ShardReadError, match="no such file"):
            assert read(StoreReader(options(url)), 0, 1000) == CONTENT[:1000]
        assert (count(url, "authorized") > 0) == (bypass != "127.0.0.1")


def targets(server: RawServer) -> list[str]:
    return [text.split()[1] for _, text in server.heads]


def s3_of(server: RawServer, **more: Any) -> StoreReader:
    return StoreReader(options(server.url.removesuffix("/x.bin"), **more), policy=QUICK)


def raw_read(reader: StoreReader) -> None:
    reader.read_into(Shard("s3://bucket/x.bin", 300_000, ""), 0, np.zeros(10, np.uint8))


def test_urls_are_signed_for_an_hour_with_the_token_that_belongs_to_the_keys() -> None:
    with serving() as server:
        raw_read(s3_of(server))
        raw_read(s3_of(server, token="t"))
        first, second = targets(server)
    assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in first
    assert "X-Amz-Expires=3600" in first
    assert "Token" not in first
    assert "X-Amz-Security-Token=t" in second


class SigningClient:
    """Counts what it signs; the filesystem of it, and its session."""

    config_kwargs = client_kwargs = kwargs = req_kw = s3_additional_kwargs = MappingProxyType[str, Any]({})

    def __init__(self, url: str) -> None:
        self._url, self.signed, self.session = url, 0, self

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    async def set_session(self) -> None:
        pass

    async def get_s3(self, bucket: str) -> Self:
        return self

    async def generate_presigned_url(self, method: str, Params: dict[str, str], ExpiresIn: int) -> str:  # noqa: N803
        self.signed += 1
        return f"{self._url}/{Params['Key']}?signature={self.signed}"


class Ahead(asyncio.SelectorEventLoop):
    """Its clock can be put forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def test_an_object_is_signed_once_and_again_before_that_ends() -> None:
    async def ask_at(times_s: list[float]) -> None:
        loop, fs = asyncio.get_running_loop(), SigningClient(server.url.removesuffix("/x.bin"))
        assert isinstance(loop, Ahead)
        for loop.ahead_s in times_s:
            dest = Destination(memoryview(bytearray(10)), lambda nbytes: None)
            await direct_s3(fs, "bucket/x.bin", 0, dest, lambda fields: None)
            assert not len(dest.rest)

    with serving() as server, asyncio.Runner(loop_factory=Ahead) as runner:
        runner.run(ask_at([0.0, 0.0, 299.0, 301.0, 599.0, 602.0]))
        assert [int(target.partition("=")[2]) for target in targets(server)] == [1, 1, 1, 2, 2, 3]


class Offline(asyncio.SelectorEventLoop):
    """Connects to nobody."""

    async def create_connection(self, *_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError


def test_not_every_object_of_a_large_dataset_is_remembered() -> None:
    async def ask_for(numbers: Iterable[int]) -> int:
        fs = SigningClient("http://127.0.0.1:80")
        for number in numbers:
            dest = Destination(memoryview(bytearray(10)), lambda nbytes: None)
            with pytest.raises(ConnectionRefusedError):
                await direct_s3(fs, f"bucket/{number}", 0, dest, lambda fields: None)
        return fs.signed

    with asyncio.Runner(loop_factory=Offline) as runner:
        assert runner.run(ask_for([0, 1, 2, 0, 1, 2])) == 3
        assert runner.run(ask_for([*range(4100), 0])) == 4101


def test_public_buckets_are_not_signed() -> None:
    with serving() as server:
        raw_read(s3_of(server, anon=True, key=None, secret=None))
        assert targets(server) == ["/bucket/x.bin"]


@pytest.mark.parametrize("status", ["403 Forbidden", "400 Bad Request", "301 Moved Permanently"])
def test_a_refusal_of_a_signed_url_is_not_final(status: str) -> None:
    with serving() as server:
        server.script = [sends(head(0, 0, status=status), goes_on=True), whole]
        reader = s3_of(server)
        raw_read(reader)
        raw_read(reader)  # the store is known now
        assert by_client(server) == [False, True, True]


def test_refusals_and_cut_bodies_are_tried_again_by_us_and_counted(folder: Path) -> None:
    with slowstore(folder, "--error-rate", "0.3", "--reset-rate", "0.3") as url:
        reader = StoreReader(options(url), policy=QUICK)
        for at in range(0, 40_000, 1000):
            assert read(reader, at, 500_000) == CONTENT[at : at + 500_000]
        seen = reader.stats()
    assert seen.throttled > 0
    assert seen.retries > seen.throttled
    assert seen.resumed > 0


def test_a_missing_object_is_an_error_at_once(folder: Path) -> None:
    with slowstore(folder) as url:
        reader = StoreReader(options(url), policy=RetryPolicy(stall_s=100, least_stall_s=100))
        with pytest.raises(ShardReadError, match="no such file"):
            read(reader, 0, 10, "nowhere.bin")
        assert reader.stats().retries == 0
        assert count(url, "authorized") == 0


def test_another_etag_than_the_indexed_one_is_noticed(folder: Path) -> None:
    with slowstore(folder) as url, pytest.raises(ShardChangedError, match="etag"):
        StoreReader(options(url)).read_into(shard(version="etag:other"), 0, np.zeros(10, np.uint8))
