"""Spans copied by the kernel, against a plain loop over slices."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from prefetch.memory import spans
from prefetch.memory.spans import copies_by_kernel, copy_mapped, copy_spans, process_vm_readv

few = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


CONTENT = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()


def int64(values: Any) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def gathered(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> bytes:
    return b"".join(CONTENT[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True))


def assert_copies_like_the_loop(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], readv: Any = process_vm_readv
) -> None:
    source = np.frombuffer(CONTENT, np.uint8)
    out = np.full(int(lengths.sum()) + 2, 0xA5, np.uint8)
    copy_spans(source.ctypes.data + starts, lengths, out[1:-1], readv=readv)
    assert out.tobytes() == b"\xa5" + gathered(starts, lengths) + b"\xa5"


def short(pid: int, local: int, one: int, remote: int, count: int, flags: int) -> int:
    """Copies only a part of the first span that is not empty, as a call beyond 2 GiB may."""
    size = ctypes.c_int64.from_address(local + 8)
    wanted, size.value = size.value, max(1, size.value // 2)
    try:
        return int(process_vm_readv(pid, local, one, remote, count, flags))
    finally:
        size.value = wanted


def forbidden(*_: int) -> int:
    return -1


WAYS = [process_vm_readv, None, forbidden, short]


@pytest.fixture(params=WAYS, ids=["kernel", "no call", "forbidden", "short"])
def readv(request: pytest.FixtureRequest) -> Any:
    if process_vm_readv is None and request.param in (process_vm_readv, short):
        pytest.skip("this system has no process_vm_readv")
    return request.param


@few
@given(pieces=st.lists(st.tuples(st.integers(0, (1 << 20) - 900), st.integers(0, 900)), max_size=60))
def test_copied_spans_equal_the_plain_loop_in_any_order_and_overlapping(
    readv: Any, pieces: list[tuple[int, int]]
) -> None:
    table = int64(pieces).reshape(-1, 2)
    assert_copies_like_the_loop(table[:, 0], table[:, 1], readv)


@pytest.mark.parametrize("num_spans", [1023, 1024, 1025, 3000])
def test_more_spans_than_one_copy_takes(readv: Any, num_spans: int) -> None:
    rng = np.random.default_rng(2)
    starts = rng.integers(0, len(CONTENT) - 100, num_spans)
    assert_copies_like_the_loop(starts, rng.integers(0, 100, num_spans), readv)


def test_where_the_kernel_copies_nothing_else_does() -> None:
    if not copies_by_kernel():
        pytest.skip("process_vm_readv is forbidden here")
    lengths: list[int] = []

    def watched(pid: int, local: int, one: int, remote: int, count: int, flags: int) -> int:
        got = int(process_vm_readv(pid, local, one, remote, count, flags))
        lengths.append(got)
        if got == 50:
            ctypes.memset(ctypes.c_int64.from_address(local).value, 0x5A, 1)
        return got

    source, out = np.frombuffer(CONTENT, np.uint8), np.zeros(50, np.uint8)
    copy_spans(source.ctypes.data + int64([0, 100]), int64([20, 30]), out, readv=watched)
    assert lengths[-1] == 50
    assert out.tobytes() == b"\x5a" + CONTENT[1:20] + CONTENT[100:130]  # nobody copied once more


@pytest.mark.parametrize(("kept_pages", "copied"), [(0, 0), (1, 1), (2, 3), (3, 4)])
def test_spans_behind_the_end_of_a_truncated_file_are_told_not_touched(
    tmp_path: Path, kept_pages: int, copied: int
) -> None:
    if not copies_by_kernel():
        pytest.skip("process_vm_readv is forbidden here")
    page, path = mmap.PAGESIZE, tmp_path / "file"
    path.write_bytes(CONTENT[: 3 * page])
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = np.frombuffer(mapped, np.uint8)
    os.truncate(path, kept_pages * page)
    starts, lengths = int64([0, page - 10, page + 7, 2 * page]), int64([20, 10 + page // 2, 50, page])
    starts[1], lengths[1] = page, 10
    out = np.zeros(int(lengths.sum()), np.uint8)
    assert copy_mapped(np.stack((view.ctypes.data + starts, lengths), 1), out) == copied
    done = int(lengths[:copied].sum())
    assert out[:done].tobytes() == gathered(starts[:copied], lengths[:copied])


@pytest.mark.parametrize("size", [29, 31])
def test_a_destination_of_another_size_is_refused(size: int) -> None:
    source, out = np.zeros(100, np.uint8), np.full(size, 0xA5, np.uint8)
    with pytest.raises(ValueError, match=f"spans hold 30 bytes, the destination {size}"):
        copy_spans(source.ctypes.data + int64([0, 50]), int64([10, 20]), out)
    assert (out == 0xA5).all()


def test_a_call_that_the_c_library_lacks_is_none() -> None:
    assert spans._load("no_such_call_in_any_libc") is None
