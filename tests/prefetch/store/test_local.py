"""`read_fully` brings a whole range, however little a system call brings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefetch.store.local import read_fully


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(10)))
    with path.open("rb") as file:
        yield file.fileno()


def test_short_calls_are_continued(descriptor: int) -> None:
    out = np.zeros(7, np.uint8)
    calls: list[int] = []

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return os.preadv(descriptor, [views[0][:3]], offset)

    assert read_fully(descriptor, 2, out, read=short) == 7
    assert calls == [2, 5, 8]
    assert out.tolist() == list(range(2, 9))


def test_the_end_of_the_file_ends_it(descriptor: int) -> None:
    out = np.full(4, 77, np.uint8)
    assert read_fully(descriptor, 8, out) == 2
    assert out.tolist() == [8, 9, 77, 77]
    assert read_fully(descriptor, 10, out) == 0
