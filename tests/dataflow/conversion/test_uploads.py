"""Shards that go to S3 in parts: one that fails, or a process that dies between two, shows nothing half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from http_kit import S3Server, s3_server

from dataflow import DataflowError, convert
from sharding.write.file import NewFile

pytest.importorskip("s3fs")
PART = 5 << 20
"""The least that S3 takes for a part."""


ROWS = [{"x": 1}]


@pytest.fixture
def store() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def options_of(store: S3Server) -> dict[str, Any]:
    return {**store.options, "default_block_size": PART}


def test_a_part_that_fails_shows_nothing_and_leaves_nothing(store: S3Server) -> None:
    rows = [{"b": bytes([i]) * (PART + 1)} for i in range(2)]
    options: dict[str, Any] = {"to": "tar", "workers": 1, "storage_options": options_of(store)}
    store.refuses = lambda verb, path: "partNumber=2" in path
    with pytest.raises(DataflowError, match="permission denied"):
        convert(rows, "s3://bucket/out", **options)
    assert store.uploads == {}
    assert not [name for name in store.objects if name.endswith(".tar")]
    store.refuses = lambda verb, path: False
    convert(rows, "s3://bucket/out", **options)
    assert len(store.objects["bucket/out/shard-000000.tar"]) > 2 * PART


def test_parts_that_cannot_be_removed_are_named(store: S3Server) -> None:
    store.refuses = lambda verb, path: verb == "DELETE"
    file = NewFile("s3://bucket/x.tar", storage_options=options_of(store))
    file.write(bytes(2 * PART + 1))
    with pytest.warns(UserWarning, match=r"parts of s3://bucket/x\.tar, which was not finished, may be left"):
        file.discard()
    assert list(store.objects) == []


def test_a_restart_ends_the_uploads_of_a_process_that_died(store: S3Server) -> None:
    options: dict[str, Any] = {"to": "mds", "shard_samples": 1, "workers": 1, "overwrite": True}
    convert(ROWS, "s3://bucket/out", **options, storage_options=options_of(store))
    fs, _ = fsspec.core.url_to_fs("s3://bucket/out", **options_of(store))
    left = ("out/shard.00001.mds", "out/shard.00003-r1.mds")
    others = ("out/theirs.tar", "out/shards/shard.00001.mds", "output/shard.00001.mds")
    for key in (*left, *others):
        fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    store.refuses = lambda verb, path: "uploads" in path and verb == "GET"
    with pytest.warns(UserWarning, match="parts of shards that were not finished may be left"):
        convert(ROWS, "s3://bucket/out", **options, storage_options=options_of(store))
    assert len(store.uploads) == 5
    store.refuses = lambda verb, path: False
    convert(ROWS, "s3://bucket/out", **options, storage_options=options_of(store))
    assert sorted(key for key, _ in store.uploads.values()) == sorted(f"bucket/{key}" for key in others)
    assert [name for name in store.objects if name.endswith(".mds")] == ["bucket/out/shard.00000-r2.mds"]


def test_a_shard_without_a_receipt_is_known_as_a_conversions_own(store: S3Server) -> None:
    options: dict[str, Any] = {"to": "mds", "shard_samples": 1, "workers": 1, "overwrite": True}
    options["storage_options"] = options_of(store)
    convert(ROWS, "s3://bucket/out", **options)
    store.refuses = lambda verb, path: path.endswith("shards-r1/000000.json")
    with pytest.raises(DataflowError, match="permission denied"):
        convert(ROWS, "s3://bucket/out", **options)
    assert "bucket/out/shard.00000-r1.mds" in store.objects
    store.refuses = lambda verb, path: False
    convert(ROWS, "s3://bucket/out", **options)
    assert [name for name in store.objects if name.endswith(".mds")] == ["bucket/out/shard.00000-r2.mds"]
