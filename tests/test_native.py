"""obstore below s3fs: the same bytes and the same handling of faults, and s3fs where obstore cannot serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_kit import slowstore

from prefetch import bodies, native
from prefetch.retries import RetryPolicy
from prefetch.store import StoreReader
from sharding.blocks import Shard
from sharding.errors import ShardChangedError, ShardReadError

pytest.importorskip("obstore")
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
    (tmp_path / "bucket" / "x.bin").write_bytes(CONTENT)
    (tmp_path / "bucket" / "x 0%.bin").write_bytes(CONTENT)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who was asked for ranges, in order."""
    asked: list[str] = []

    def recording(name: str, body: Any) -> Any:
        async def recorded(*arguments: Any) -> Any:
            async for piece in body(*arguments):
                asked.append(name)
                yield piece

        return recorded

    monkeypatch.setattr(bodies, "native_body", recording("obstore", bodies.native_body))
    monkeypatch.setattr(bodies, "s3_body", recording("s3fs", bodies.s3_body))
    return asked


def options(url: str, **more: Any) -> dict[str, Any]:
    return {"key": "x", "secret": "y", "endpoint_url": url, **more}


def shard(name: str = "x.bin", version: str = "") -> Shard:
    return Shard(f"s3://bucket/{name}", len(CONTENT), version)


def read(reader: StoreReader, offset: int, nbytes: int, name: str = "x.bin") -> bytes:
    out = np.zeros(nbytes, np.uint8)
    reader.read_into(shard(name), offset, out)
    return out.tobytes()


def test_ranges_come_through_obstore(folder: Path, asked: list[str]) -> None:
    with slowstore(folder) as url:
        assert read(StoreReader(options(url)), 1000, 1_000_000) == CONTENT[1000:1_001_000]
    assert set(asked) == {"obstore"}


@pytest.mark.parametrize(
    ("more", "name"), [({"config_kwargs": {"read_timeout": 9}}, "x.bin"), ({}, "x 0%.bin")]
)
def test_what_obstore_cannot_be_told_is_left_to_s3fs(
    folder: Path, asked: list[str], more: dict[str, Any], name: str
) -> None:
    with slowstore(folder) as url:
        assert read(StoreReader(options(url, **more)), 0, 1000, name) == CONTENT[:1000]
    assert set(asked) == {"s3fs"}


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
        reader = StoreReader(options(url))
        with pytest.raises(ShardReadError, match="no such file"):
            read(reader, 0, 10, "nowhere.bin")
        assert reader.stats().retries == 0


def test_another_etag_than_the_indexed_one_is_noticed(folder: Path) -> None:
    with slowstore(folder) as url, pytest.raises(ShardChangedError, match="etag"):
        StoreReader(options(url)).read_into(shard(version="etag:other"), 0, np.zeros(10, np.uint8))


def test_a_child_of_a_process_that_used_obstore_does_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native._use, "pid", os.getpid())
    assert native.is_native()
    monkeypatch.setattr(native._use, "pid", os.getppid())
    assert not native.is_native()
