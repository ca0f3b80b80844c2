"""Parts of files that another process has open are read as they are there, or refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefetch.memory import open_files
from prefetch.memory.open_files import OpenFile, OpenFiles, StaleFileError


@pytest.fixture
def reader() -> Iterator[OpenFiles]:
    reader = OpenFiles()
    yield reader
    reader.close()


def opened(path: Path, content: bytes) -> tuple[OpenFile, int]:
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    return OpenFile.of(descriptor, os.fstat(descriptor)), descriptor


def read(reader: OpenFiles, files: list[OpenFile], parts: list[tuple[int, int, int]]) -> bytes:
    numbers, offsets, lengths = np.array(parts, np.int64).reshape(-1, 3).T
    out = np.zeros(int(lengths.sum()), np.uint8)
    reader.read(files, numbers, offsets, lengths, out)
    return out.tobytes()


def test_parts_of_several_files_come_one_behind_the_other(tmp_path: Path, reader: OpenFiles) -> None:
    first, one = opened(tmp_path / "a", b"0123456789")
    second, two = opened(tmp_path / "b", b"abcdefghij")
    parts = [(1, 2, 3), (0, 0, 10), (0, 4, 0), (1, 9, 1), (0, 7, 2)]
    assert read(reader, [first, second], parts) == b"cde0123456789j78"
    assert read(reader, [], []) == b""
    os.close(one)
    os.close(two)
    assert read(reader, [first], [(0, 1, 2)]) == b"12"  # it is open here


def test_a_file_that_lost_its_name_is_read_on(tmp_path: Path, reader: OpenFiles) -> None:
    file, descriptor = opened(tmp_path / "a", b"before")
    (tmp_path / "other").write_bytes(b"behind")
    (tmp_path / "other").rename(tmp_path / "a")
    assert read(reader, [file], [(0, 0, 6)]) == b"before"
    os.close(descriptor)


def test_a_descriptor_that_was_closed_or_stands_for_another_file_is_refused(
    tmp_path: Path, reader: OpenFiles
) -> None:
    file, descriptor = opened(tmp_path / "a", b"before")
    os.close(descriptor)
    with pytest.raises(StaleFileError, match="No such file"):
        read(reader, [file], [(0, 0, 1)])
    _, again = opened(tmp_path / "b", b"others")
    os.dup2(again, descriptor)
    with pytest.raises(StaleFileError, match="is another file now"):
        read(reader, [file], [(0, 0, 1)])
    os.close(descriptor)
    if again != descriptor:
        os.close(again)


def test_a_file_that_has_become_shorter_is_refused_and_what_is_left_is_read(
    tmp_path: Path, reader: OpenFiles
) -> None:
    file, descriptor = opened(tmp_path / "a", b"0123456789")
    os.truncate(tmp_path / "a", 5)
    with pytest.raises(StaleFileError, match="ends before byte 6"):
        read(reader, [file], [(0, 0, 5), (0, 2, 4)])
    assert read(reader, [file], [(0, 0, 5)]) == b"01234"
    os.close(descriptor)


def test_only_so_many_files_stay_open_those_used_last(
    tmp_path: Path, reader: OpenFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "MOST_OPEN", 3)
    files, descriptors = zip(*[opened(tmp_path / str(n), b"%d" % n) for n in range(8)], strict=True)
    before = len(os.listdir("/proc/self/fd"))
    for file in files:
        read(reader, [file], [(0, 0, 1)])
    read(reader, [files[5]], [(0, 0, 1)])
    read(reader, [files[0]], [(0, 0, 1)])
    assert len(os.listdir("/proc/self/fd")) == before + 3
    assert [*reader._descriptors] == [files[7], files[5], files[0]]
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
    for descriptor in descriptors:
        os.close(descriptor)
