"""S3 by signed URLs: the same bytes and the same handling of faults, and s3fs where they cannot serve."""

from __future__ import annotations

import json
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_kit import slowstore
from test_connections import RawServer, head, sends, serving, whole

from prefetch.store import clients, direct
from prefetch.store.reader import StoreReader
from prefetch.store.retries import RetryPolicy
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


@pytest.fixture
def by_client(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that s3fs was asked for."""
    paths: list[str] = []
    real = clients.botocore_body

    async def recording(fs: Any, path: str, *more: Any) -> None:
        paths.append(path)
        await real(fs, path, *more)

    monkeypatch.setattr(clients, "botocore_body", recording)
    return paths


def options(url: str, **more: Any) -> dict[str, Any]:
    return {"key": "x", "secret": "y", "endpoint_url": url, **more}


def shard(name: str = "x.bin", version: str = "") -> Shard:
    return Shard(f"s3://bucket/{name}", len(CONTENT), version)


def read(reader: StoreReader, offset: int, nbytes: int, name: str = "x.bin") -> bytes:
    out = np.zeros(nbytes, np.uint8)
    reader.read_into(shard(name), offset, out)
    return out.tobytes()


@pytest.mark.parametrize("name", ["x.bin", "x 0%+ü.bin"])
def test_ranges_come_by_signed_urls(folder: Path, by_client: list[str], name: str) -> None:
    with slowstore(folder) as url:
        reader = StoreReader(options(url))
        for offset in (0, 1000):
            assert read(reader, offset, 1_000_000, name) == CONTENT[offset : offset + 1_000_000]
        with urllib.request.urlopen(f"{url}/__stats", timeout=20) as answer:
            assert json.load(answer)["ranges"] == 2
    assert not by_client


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
    folder: Path, by_client: list[str], more: dict[str, Any], direct: bool
) -> None:
    with slowstore(folder) as url:
        assert read(StoreReader(options(url, **more)), 0, 1000) == CONTENT[:1000]
    assert by_client == ([] if direct else ["bucket/x.bin"])


@pytest.mark.parametrize("bypass", ["127.0.0.1", "elsewhere"])
def test_where_the_environment_names_a_proxy_s3fs_is_asked(
    folder: Path, by_client: list[str], monkeypatch: pytest.MonkeyPatch, bypass: str
) -> None:
    with slowstore(folder) as url:
        monkeypatch.setenv("http_proxy", url)  # it is no proxy, and answers "not found" then
        monkeypatch.setenv("no_proxy", bypass)
        with nullcontext() if bypass == "127.0.0.1" else pytest.raises(ShardReadError, match="no such file"):
            assert read(StoreReader(options(url)), 0, 1000) == CONTENT[:1000]
    assert by_client == ([] if bypass == "127.0.0.1" else ["bucket/x.bin"])


def targets(server: RawServer) -> list[str]:
    return [text.split()[1] for _, text in server.heads]


def s3_of(server: RawServer, **more: Any) -> StoreReader:
    return StoreReader(options(server.url.removesuffix("/x.bin"), **more), policy=QUICK)


def raw_read(reader: StoreReader) -> None:
    reader.read_into(Shard("s3://bucket/x.bin", 300_000, ""), 0, np.zeros(10, np.uint8))


def test_an_object_is_signed_once_and_again_before_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        reader = s3_of(server)
        raw_read(reader)
        raw_read(reader)
        [first] = set(targets(server))
        assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in first
        assert "X-Amz-Expires=3600" in first
        monkeypatch.setattr(direct, "_SIGNATURE_USED_S", -1.0)
        monkeypatch.setattr(direct, "_MOST_TARGETS", 1)
        reader = s3_of(server, token="t")
        raw_read(reader)
        raw_read(reader)
        assert len(targets(server)) == 4
        assert all("X-Amz-Security-Token=t" in target for target in targets(server)[2:])


def test_public_buckets_are_not_signed() -> None:
    with serving() as server:
        raw_read(s3_of(server, anon=True, key=None, secret=None))
        assert targets(server) == ["/bucket/x.bin"]


@pytest.mark.parametrize("status", ["403 Forbidden", "400 Bad Request", "301 Moved Permanently"])
def test_a_refusal_of_a_signed_url_is_not_final(by_client: list[str], status: str) -> None:
    with serving() as server:
        server.script = [sends(head(0, 0, status=status), goes_on=True), whole]
        reader = s3_of(server)
        raw_read(reader)
        raw_read(reader)  # the store is known now
        assert by_client == ["bucket/x.bin"] * 2
        assert len(server.heads) == 3


def test_refusals_and_cut_bodies_are_tried_again_by_us_and_counted(folder: Path) -> None:
    with slowstore(folder, "--error-rate", "0.3", "--reset-rate", "0.3") as url:
        reader = StoreReader(options(url), policy=QUICK)
        for at in range(0, 40_000, 1000):
            assert read(reader, at, 500_000) == CONTENT[at : at + 500_000]
        seen = reader.stats()
    assert seen.throttled > 0
    assert seen.retries > seen.throttled
    assert seen.resumed > 0


def test_a_missing_object_is_an_error_at_once(folder: Path, by_client: list[str]) -> None:
    with slowstore(folder) as url:
        reader = StoreReader(options(url))
        with pytest.raises(ShardReadError, match="no such file"):
            read(reader, 0, 10, "nowhere.bin")
        assert reader.stats().retries == 0
    assert not by_client


def test_another_etag_than_the_indexed_one_is_noticed(folder: Path) -> None:
    with slowstore(folder) as url, pytest.raises(ShardChangedError, match="etag"):
        StoreReader(options(url)).read_into(shard(version="etag:other"), 0, np.zeros(10, np.uint8))
