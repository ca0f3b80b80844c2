"""Clients that block for ever: reads are given up, closed, and counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec import AbstractFileSystem

from prefetch.errors import ReaderClosedError
from prefetch.retries import RetryPolicy
from prefetch.store import blocking
from prefetch.store.blocking import BlockingCall
from prefetch.store.reader import StoreReader
from sharding.blocks import Shard
from sharding.errors import ShardReadError

CONTENT = bytes(range(256))
SHARD = Shard("hanging://shard.bin", len(CONTENT), "etag:one")
pytestmark = pytest.mark.timeout(30)


class HangingFileSystem(AbstractFileSystem):
    """Its first `hangs` reads hang until the test is over."""

    protocol = "hanging"
    hangs = 0
    asked = threading.Semaphore(0)
    over = threading.Event()

    def info(self, path: str, **_: Any) -> Any:
        return {"name": path, "size": len(CONTENT), "type": "file", "ETag": "one"}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        one = type(self)
        one.asked.release()
        if one.hangs:
            one.hangs -= 1
            one.over.wait()
        return CONTENT[start:end]


@pytest.fixture
def hanging() -> Iterator[type[HangingFileSystem]]:
    class Fresh(HangingFileSystem):
        asked, over = threading.Semaphore(0), threading.Event()

    fsspec.register_implementation("hanging", Fresh, clobber=True)
    yield Fresh
    Fresh.over.set()
    for thread in threading.enumerate():
        if thread.name == "dataflow-client":
            thread.join()
    assert len(blocking.abandoned) == 0


def read(reader: StoreReader) -> bytes:
    out = np.zeros(10, np.uint8)
    reader.read_into(SHARD, 5, out)
    return out.tobytes()


def test_a_read_that_hangs_is_given_up_and_asked_again(hanging: type[HangingFileSystem]) -> None:
    hanging.hangs = 1
    reader = StoreReader(policy=RetryPolicy(stall_s=0.01, least_stall_s=0.01, base_s=0.001))
    assert read(reader) == CONTENT[5:15]
    assert reader.stats().timeouts == 1
    assert len(blocking.abandoned) == 1


def test_closing_ends_a_read_that_hangs(hanging: type[HangingFileSystem]) -> None:
    hanging.hangs = 1
    reader = StoreReader(policy=RetryPolicy(stall_s=100))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            read(reader)
        except ReaderClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    hanging.asked.acquire()
    reader.close()
    thread.join()
    assert len(errors) == 1


def test_as_many_calls_as_are_allowed_hang_and_no_more(
    hanging: type[HangingFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "MOST_ABANDONED", 2)
    hanging.hangs = 5
    reader = StoreReader(policy=RetryPolicy(stall_s=0.01, least_stall_s=0.01, base_s=0.001))
    with pytest.raises(ShardReadError, match="2 calls of storage clients hang in this process"):
        read(reader)
    assert len(blocking.abandoned) == 2


def test_what_a_client_raises_is_raised() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        BlockingCall(fail).run(None)
