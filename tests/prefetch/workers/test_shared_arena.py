"""Shared slots: they come back when their last view dies, and nothing of Python runs where it does."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from forked_kit import exit_code_in_child
from threads_kit import python_calls

from prefetch.workers.shared_arena import HEADER_BYTES, Region, SharedFile

PAGE = 4096
MIB = 1 << 20
SLOT = HEADER_BYTES + 16 * PAGE


def used_bytes(file: SharedFile) -> int:
    """Memory that the file takes, as the system sees it through a descriptor that outlives `close`."""
    return os.fstat(file.seen).st_blocks * 512  # type: ignore[attr-defined]


def make(register: Any = None) -> SharedFile:
    file = SharedFile(2, 0, register)
    file.seen = os.dup(file.fd)  # type: ignore[attr-defined]
    return file


def make_region(
    limit_bytes: int, *, is_locked: bool = False, is_flexible: bool = False
) -> tuple[SharedFile, Region]:
    """A file, and the region of its first worker."""
    file = make()
    where = file.fd, file.region_offset(0), file.region_bytes
    region = Region(*where, limit_bytes, is_locked=is_locked)
    region.arena.is_flexible = is_flexible
    return file, region


def views_of(file: SharedFile, worker: int = 0, slot: int = 0, nbytes: int = 3 * PAGE) -> list[Any]:
    """What the training code has of a slot that a worker has written."""
    offset = SLOT + 4 * slot * PAGE
    array = file.view(worker, offset, nbytes)
    array[:] = slot + 1
    return [torch.from_numpy(array)[:10], array[20:]]


def test_a_slot_is_given_back_when_its_last_view_has_died() -> None:
    file = make()
    views = views_of(file, worker=1)
    assert file.take_returned(1) == []
    views.pop()
    assert file.take_returned(1) == []
    assert python_calls(views.clear) == []
    assert file.take_returned(0) == []
    assert file.take_returned(1) == [SLOT]
    assert file.take_returned(1) == []
    file.close()


def test_core_dumps_leave_the_address_space_of_all_workers_out() -> None:
    file = make()
    start = np.frombuffer(file.memory, np.uint8).ctypes.data
    with open("/proc/self/smaps") as lines:
        of_file = lines.read().partition(f"\n{start:x}-")[2]
    flags = of_file.partition("VmFlags:")[2].partition("\n")[0].split()
    assert "dd" in flags
    file.close()


def test_what_is_in_use_at_the_end_keeps_its_memory_and_gives_it_back_as_it_dies() -> None:
    file = make()
    first, second = views_of(file, slot=0), views_of(file, slot=1)
    file.header.set(0, 1)
    file.close()
    assert used_bytes(file) == file.held_bytes == 6 * PAGE
    assert python_calls(first.clear) == []
    assert used_bytes(file) == file.held_bytes == 3 * PAGE
    assert second[0].tolist() == [2] * 10
    second.pop(0)
    assert used_bytes(file) == 3 * PAGE
    second.clear()
    assert used_bytes(file) == file.held_bytes == 0


def test_a_slot_that_is_in_use_twice_is_given_back_with_the_second() -> None:
    file = make()
    once, twice = views_of(file), views_of(file)
    file.close()
    once.clear()
    assert used_bytes(file) == 3 * PAGE
    twice.clear()
    assert used_bytes(file) == 0


@pytest.mark.parametrize("gives_back", [True, False])
def test_locked_ranges_are_unlocked_once_before_their_memory_goes(gives_back: bool) -> None:
    locked: dict[int, int] = {}

    def register(address: int, nbytes: int) -> Callable[[], None]:
        assert address not in locked
        locked[address] = nbytes

        def unregister() -> None:
            assert not gives_back or used_bytes(file) == 3 * PAGE
            del locked[address]

        return unregister

    file = make(register)
    if not gives_back:  # the kernel refuses to where a page is locked for good
        last = np.frombuffer(file.memory, np.uint8)[-PAGE:]
        assert ctypes.CDLL(None).mlock(ctypes.c_void_p(last.ctypes.data), ctypes.c_size_t(PAGE)) == 0
    views = views_of(file)
    views += views_of(file)
    assert len(locked) == 1
    file.close()
    assert len(locked) == 1
    views.clear()
    assert not locked
    assert used_bytes(file) == (0 if gives_back else 4 * PAGE)


def test_a_forked_child_leaves_its_parents_memory_alone() -> None:
    file = make()
    views = views_of(file)
    file.close()
    assert exit_code_in_child(views.clear) == 0
    assert used_bytes(file) == 3 * PAGE
    assert np.asarray(views[1]).tolist() == [1] * (3 * PAGE - 20)


@pytest.mark.parametrize("is_locked", [True, False])
def test_slabs_that_were_locked_keep_their_pages_and_serve_all_smaller_batches(is_locked: bool) -> None:
    """A device reads the pages that a range had when it was locked, whatever lies there by then."""
    file, region = make_region(8 * MIB, is_locked=is_locked)
    for round_number in range(3):
        for size in (2, 7, 3, 8, 5, 4, 6):
            batches = [region.arena.lease(size * MIB) for _ in range(2)]
            for number, batch in enumerate(batches):
                batch[:] = round_number + number
            del batches, batch
    assert used_bytes(file) == (34 if is_locked else 12) * MIB  # two of 2, 7 and 8 MiB: the others fit there
    assert bool(sum(map(len, region._dropped.values()))) is not is_locked
    file.close()


def test_a_full_region_lets_a_free_slab_grow_and_maps_no_other() -> None:
    """Pages that are there are written in a tenth of the time that new ones take."""
    file, region = make_region(48 * MIB, is_flexible=True)
    first, second = region.arena.lease(24 * MIB), region.arena.lease(20 * MIB)
    first[:], second[:] = 1, 2
    address = first.ctypes.data
    del first
    third = region.arena.lease(28 * MIB)
    assert third.ctypes.data == address
    third[:] = 3
    assert used_bytes(file) == (20 + 28) * MIB
    assert region.arena.mapped_bytes == used_bytes(file)
    del third
    fourth = region.arena.lease(60 * MIB)  # more than twice what it was made for
    fourth[:] = 4
    assert fourth.ctypes.data != address
    assert second.tolist()[::MIB] == [2] * 20
    file.close()


@pytest.mark.parametrize("is_flexible", [True, False])
@pytest.mark.parametrize(
    ("size", "is_near"), [(17, True), (20, True), (35, True), (40, False), (9, False), (16, True)]
)
def test_a_flexible_region_takes_slabs_of_half_to_twice_the_size(
    size: int, is_near: bool, is_flexible: bool
) -> None:
    """Rows whose sizes differ have as many slabs as are in use, and not as many as there are sizes.

    Others have the size of their batch: who keeps a batch of a worker keeps no more.
    """
    file, region = make_region(400 * MIB, is_flexible=is_flexible)
    address = region.arena.lease(20 * MIB).ctypes.data
    is_same = region.arena.lease(size * MIB).ctypes.data == address
    assert is_same is (is_near if is_flexible else size == 20)
    file.close()


def test_a_small_batch_does_not_cost_the_next_large_one_its_pages() -> None:
    file, region = make_region(32 * MIB, is_flexible=True)
    kept, free = region.arena.lease(24 * MIB), region.arena.lease(24 * MIB)
    kept[:], free[:] = 1, 2
    address = free.ctypes.data
    del free
    small = region.arena.lease(PAGE)
    small[:] = 3
    assert used_bytes(file) == 48 * MIB + PAGE
    assert region.arena.lease(24 * MIB).ctypes.data == address
    file.close()


@pytest.mark.parametrize(("num_free", "mapped"), [(1, 40), (2, 80)])
def test_a_smaller_row_takes_a_large_slab_where_another_is_left(num_free: int, mapped: int) -> None:
    """The last rows of an epoch are small, and the pages are there."""
    file, region = make_region(400 * MIB, is_flexible=True)
    held = [region.arena.lease(40 * MIB) for _ in range(num_free)]
    addresses = {slab.ctypes.data for slab in held}
    del held[:]
    small = region.arena.lease(18 * MIB)
    assert (small.ctypes.data in addresses) is (num_free == 2)
    assert region.arena.mapped_bytes == (mapped + 18 * (num_free == 1)) * MIB
    file.close()


def test_what_is_viewed_is_locked_whole_whatever_came_first_in_its_slab() -> None:
    locked: dict[int, int] = {}

    def register(address: int, nbytes: int) -> Callable[[], object]:
        assert address not in locked
        locked[address] = nbytes
        return lambda: locked.pop(address)

    file = make(register)
    for pages, expected in ((1, 1), (3, 3), (2, 3)):
        view = file.view(0, SLOT, pages * PAGE)
        assert [*locked.values()] == [expected * PAGE]
        del view
    file.close()
    assert not locked
