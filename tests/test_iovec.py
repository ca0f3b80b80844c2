"""Spans moved by the kernel, against a plain loop over slices."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prefetch import iovec
from prefetch.iovec import copy_spans, plan_scatter, scatter_read

LONG = 32 << 10
"""Gaps beyond this are jumped over."""

pytestmark = pytest.mark.skipif(not iovec.can_scatter, reason="this system has no preadv")

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


CONTENT = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()


@pytest.fixture(scope="module")
def descriptor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """An open file that holds CONTENT."""
    path: Path = tmp_path_factory.mktemp("iovec") / "file"
    path.write_bytes(CONTENT)
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


def int64(values: Any) -> NDArray[np.int64]:
    return np.array(values, np.int64)


class Memory:
    """Destinations with guard bytes between them, in any order."""

    def __init__(self, lengths: NDArray[np.int64], seed: int = 0) -> None:
        self.lengths = lengths
        order = np.random.default_rng(seed).permutation(len(lengths))
        self.offsets = np.zeros(len(lengths), np.int64)
        at = 1
        for i in order.tolist():
            self.offsets[i] = at
            at += int(lengths[i]) + 1
        self.bytes = np.full(at, 0xA5, np.uint8)
        self.addresses = self.bytes.ctypes.data + self.offsets

    def filled(self, starts: NDArray[np.int64]) -> tuple[bytes, bool]:
        """What must lie here after a read of these spans, by the plain loop, and whether it found all."""
        expected, complete = bytearray(b"\xa5" * len(self.bytes)), True
        for start, length, offset in zip(starts, self.lengths, self.offsets, strict=True):
            data = CONTENT[start : start + length]
            expected[offset : offset + len(data)] = data
            complete = complete and len(data) == int(length)
        return bytes(expected), complete


def spans_of(pairs: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(gap before, length) -> starts, lengths."""
    table = int64(pairs).reshape(-1, 2)
    return np.cumsum(table[:, 0]) + np.cumsum(table[:, 1]) - table[:, 1], table[:, 1].copy()


gaps = st.one_of(st.just(0), st.integers(0, 600), st.sampled_from([LONG - 1, LONG, LONG + 1, 3 * LONG]))
span_lists = st.lists(st.tuples(gaps, st.integers(1, 700)), min_size=1, max_size=40)


def assert_reads_like_the_loop(
    descriptor: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> None:
    memory = Memory(lengths)
    expected, complete = memory.filled(starts)
    assert scatter_read(descriptor, starts, lengths, memory.addresses) is complete
    assert memory.bytes.tobytes() == expected


# ---- from a file -------------------------------------------------------------------------------------------


@few
@given(pairs=span_lists)
def test_scattered_spans_equal_the_plain_loop(descriptor: int, pairs: list[tuple[int, int]]) -> None:
    assert_reads_like_the_loop(descriptor, *spans_of(pairs))


@few
@given(pairs=span_lists, before=st.integers(0, 2000))
def test_at_the_end_of_the_file_what_is_there_is_read_and_the_lack_is_told(
    descriptor: int, pairs: list[tuple[int, int]], before: int
) -> None:
    starts, lengths = spans_of(pairs)
    assert_reads_like_the_loop(descriptor, starts + len(CONTENT) - before, lengths)


def test_spans_that_end_with_the_file_are_complete(descriptor: int) -> None:
    assert_reads_like_the_loop(descriptor, int64([len(CONTENT) - 30, len(CONTENT) - 10]), int64([20, 10]))


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("num_spans", [511, 512, 513, 1023, 1024, 1025, 5000])
def test_more_spans_than_one_system_call_takes(descriptor: int, num_spans: int, gap: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, num_spans)
    starts = np.cumsum(lengths + gap) - lengths
    assert_reads_like_the_loop(descriptor, starts, lengths)


def test_no_spans_read_nothing(descriptor: int) -> None:
    assert scatter_read(descriptor, int64([]), int64([]), int64([]))


@pytest.mark.parametrize("starts", [[0, 9], [50, 0], [0, 0]])
def test_spans_that_overlap_or_descend_are_refused(descriptor: int, starts: list[int]) -> None:
    memory = Memory(int64([10, 10]))
    with pytest.raises(ValueError, match="must ascend and not overlap"):
        scatter_read(descriptor, int64(starts), memory.lengths, memory.addresses)
    assert (memory.bytes == 0xA5).all()


@few
@given(
    stretches=st.lists(st.lists(st.tuples(gaps, st.integers(1, 300)), max_size=8), max_size=6), data=st.data()
)
def test_a_plan_reads_its_stretches_in_any_order_and_again(
    descriptor: int, stretches: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    tables = [spans_of(pairs) for pairs in stretches]  # each begins at the start of the file: they overlap
    bounds = np.cumsum([0, *(len(starts) for starts, _ in tables)])
    starts = np.concatenate([int64([]), *(s for s, _ in tables)])
    memory = Memory(np.concatenate([int64([]), *(n for _, n in tables)]))
    plan = plan_scatter(starts, memory.lengths, memory.addresses, bounds)
    for _ in range(2):
        memory.bytes[:] = 0xA5
        for stretch in data.draw(st.permutations(range(len(stretches)))):
            assert plan.read(descriptor, stretch)
        assert memory.bytes.tobytes() == memory.filled(starts)[0]


def test_a_stretch_touches_no_place_of_another(descriptor: int) -> None:
    memory = Memory(int64([10, 10]))
    plan = plan_scatter(int64([0, 5]), memory.lengths, memory.addresses, int64([0, 1, 1, 2]))
    assert plan.read(descriptor, 1)
    assert (memory.bytes == 0xA5).all()
    assert plan.read(descriptor, 2)
    second = slice(int(memory.offsets[1]), int(memory.offsets[1]) + 10)
    assert memory.bytes[second].tobytes() == CONTENT[5:15]
    assert (np.delete(memory.bytes, second) == 0xA5).all()


def test_a_long_gap_is_not_read(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = iovec._preadv

    def counting(*args: Any) -> int:
        read.append(real(*args))
        return read[-1]

    monkeypatch.setattr(iovec, "_preadv", counting)
    memory = Memory(int64([10, 10, 10]))
    assert scatter_read(descriptor, int64([0, 20, 40 + LONG]), memory.lengths, memory.addresses)
    assert read == [30, 10]


def test_a_failing_read_raises_with_the_systems_reason(tmp_path: Path) -> None:
    memory, directory = Memory(int64([10])), os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            scatter_read(directory, int64([0]), memory.lengths, memory.addresses)
    finally:
        os.close(directory)


def interrupted(script: list[int | None]) -> Callable[..., int]:
    """`preadv` that follows a script: None fails with EINTR, a number reads at most so many bytes."""
    real, left = iovec._preadv, list(script)

    def preadv(descriptor: int, pieces: int, count: int, offset: int) -> int:
        if not left:
            return int(real(descriptor, pieces, count, offset))
        most = left.pop(0)
        if most is None:
            ctypes.set_errno(errno.EINTR)
            return -1
        table = (
            np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(pieces)).reshape(-1, 2).copy()
        )
        before = np.cumsum(table[:, 1]) - table[:, 1]
        table[:, 1] = np.clip(most - before, 0, table[:, 1])
        return int(real(descriptor, table.ctypes.data, count, offset))

    return preadv


@few
@given(pairs=span_lists, script=st.lists(st.one_of(st.none(), st.integers(1, 1500)), max_size=12))
def test_a_read_that_is_interrupted_or_short_goes_on_where_it_ended(
    descriptor: int, pairs: list[tuple[int, int]], script: list[int | None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iovec, "_preadv", interrupted(script))
        assert_reads_like_the_loop(descriptor, *spans_of(pairs))


def test_a_short_read_may_end_exactly_between_two_spans(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iovec, "_preadv", interrupted([10, 3, None, 10]))
    assert_reads_like_the_loop(descriptor, int64([0, 13, 30]), int64([10, 10, 10]))


# ---- from memory -------------------------------------------------------------------------------------------


def gathered(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> bytes:
    return b"".join(CONTENT[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True))


def assert_copies_like_the_loop(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    source = np.frombuffer(CONTENT, np.uint8)
    out = np.full(int(lengths.sum()) + 2, 0xA5, np.uint8)
    copy_spans(source.ctypes.data + starts, lengths, out[1:-1])
    assert out.tobytes() == b"\xa5" + gathered(starts, lengths) + b"\xa5"


def by_kernel(patch: pytest.MonkeyPatch) -> None:
    if iovec._readv is None:
        pytest.skip("this system has no process_vm_readv")


def without_the_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(iovec, "_readv", None)


def forbidden(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(iovec, "_readv", lambda *_: -1)


def short(patch: pytest.MonkeyPatch) -> None:
    """The call copies less than asked for, as it does beyond 2 GiB."""
    real = iovec._readv

    def readv(*args: Any) -> int:
        return int(real(*args)) - 1 if real else -1

    patch.setattr(iovec, "_readv", readv)


PATHS = [by_kernel, without_the_call, forbidden, short]


@pytest.mark.parametrize("path", PATHS)
@few
@given(spans=st.lists(st.tuples(st.integers(0, (1 << 20) - 900), st.integers(0, 900)), max_size=60))
def test_copied_spans_equal_the_plain_loop_in_any_order_and_overlapping(
    path: Callable[[pytest.MonkeyPatch], None], spans: list[tuple[int, int]]
) -> None:
    table = int64(spans).reshape(-1, 2)
    with pytest.MonkeyPatch.context() as patch:
        path(patch)
        assert_copies_like_the_loop(table[:, 0], table[:, 1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_spans", [1023, 1024, 1025, 3000])
def test_more_spans_than_one_copy_takes(
    monkeypatch: pytest.MonkeyPatch, path: Callable[..., None], num_spans: int
) -> None:
    path(monkeypatch)
    rng = np.random.default_rng(2)
    starts = rng.integers(0, len(CONTENT) - 100, num_spans)
    assert_copies_like_the_loop(starts, rng.integers(0, 100, num_spans))


def test_the_kernel_does_the_copy_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernel(monkeypatch)
    source, out = np.frombuffer(CONTENT, np.uint8), np.empty(50, np.uint8)
    if not iovec._copy_by_kernel(source.ctypes.data + int64([0, 100]), int64([20, 30]), out):
        pytest.skip("process_vm_readv is forbidden here")
    monkeypatch.setattr(iovec, "_copy_by_memmove", None)  # would fail if it were called
    assert_copies_like_the_loop(int64([0, 100]), int64([20, 30]))


@pytest.mark.parametrize("size", [29, 31])
def test_a_destination_of_another_size_is_refused(size: int) -> None:
    source, out = np.zeros(100, np.uint8), np.full(size, 0xA5, np.uint8)
    with pytest.raises(ValueError, match=f"spans hold 30 bytes, the destination {size}"):
        copy_spans(source.ctypes.data + int64([0, 50]), int64([10, 20]), out)
    assert (out == 0xA5).all()


def test_a_call_that_the_c_library_lacks_is_none() -> None:
    assert iovec._load("no_such_call_in_any_libc") is None
