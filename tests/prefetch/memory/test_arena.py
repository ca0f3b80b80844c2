"""The arena: slabs come back with the last view, are reused while warm, and unmapped beyond the limit."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray
from threads_kit import python_calls

from prefetch.memory.arena import Arena, rounded_bytes

PAGE = 4096
MIB = 1 << 20


class Registrations:
    """Stands for CUDA: which ranges are page-locked now."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.registered = self.unregistered = 0

    def __call__(self, address: int, nbytes: int) -> Callable[[], None]:
        assert all(address + nbytes <= a or a + n <= address for a, n in self.now.items()), "overlap"
        self.now[address] = nbytes
        self.registered += 1

        def unregister() -> None:
            del self.now[address]
            self.unregistered += 1

        return unregister


@pytest.fixture
def pinned() -> Registrations:
    return Registrations()


@pytest.fixture
def arena(pinned: Registrations) -> Arena:
    return Arena(limit_bytes=MIB, register=pinned)


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


# ---- sizes -------------------------------------------------------------------------------------------------


@given(st.one_of(st.integers(0, 1 << 20), st.integers(0, 1 << 42)))
def test_a_rounded_size_holds_the_bytes_in_whole_pages_and_is_its_own_class(nbytes: int) -> None:
    size = rounded_bytes(nbytes)
    assert size >= max(nbytes, PAGE)
    assert size % PAGE == 0
    assert rounded_bytes(size) == size


@given(st.integers(32 << 10, 1 << 42))
def test_rounding_wastes_at_most_an_eighth_beyond_32_kib(nbytes: int) -> None:
    assert rounded_bytes(nbytes) - nbytes <= nbytes / 8


@given(st.integers(0, 1 << 42), st.integers(0, 1 << 20))
def test_rounding_is_monotone(nbytes: int, more: int) -> None:
    assert rounded_bytes(nbytes) <= rounded_bytes(nbytes + more)


def test_there_are_few_size_classes() -> None:
    assert len({rounded_bytes(n) for n in range(1 << 20, 2 << 20, 1000)}) <= 10


@pytest.mark.parametrize("is_flexible", [False, True])
def test_a_free_slab_that_is_up_to_a_quarter_larger_is_taken_before_another_is_mapped(
    pinned: Registrations, is_flexible: bool
) -> None:
    """Its pages are there; to map others costs more than to use them, and drops what is free at the limit."""
    arena = Arena(limit_bytes=100 * MIB, register=pinned)
    arena.is_flexible = is_flexible  # which says something of larger ones alone
    address(arena.lease(10 * MIB))
    assert pinned.registered == 1
    address(arena.lease(9 * MIB))  # a part that is kept by itself, and holds no more than it needs
    assert pinned.registered == 2
    for nbytes, mapped in ((8 * MIB, 2), (10 * MIB, 2), (7 * MIB, 3), (MIB, 4), (MIB - MIB // 8, 5)):
        leased = arena.lease(nbytes, int)
        assert (leased.nbytes, pinned.registered) == (nbytes, mapped)
        del leased
    held = [arena.lease(8 * MIB, int) for _ in range(3)]
    assert pinned.registered == 6  # two larger ones were free, and are held as what they are
    assert arena.mapped_bytes == sum(pinned.now.values())
    del held
    assert arena.mapped_bytes == sum(pinned.now.values())


@pytest.mark.parametrize(("limit", "size"), [(22, 10), (21, 8)])
def test_a_larger_slab_is_taken_only_within_the_limit(limit: int, size: int) -> None:
    arena = Arena(limit_bytes=limit * MIB)
    first, held = arena.lease(10 * MIB, int), arena.lease(12 * MIB, int)
    del first
    taken = arena.lease(8 * MIB, int)
    assert arena.mapped_bytes == (12 + size) * MIB
    del held, taken


# ---- one lease ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 100_000, 3 * MIB])
def test_a_lease_is_a_writable_page_aligned_array_of_the_size_asked_for(arena: Arena, nbytes: int) -> None:
    array = arena.lease(nbytes)
    assert (array.dtype, array.shape) == (np.uint8, (nbytes,))
    assert address(array) % PAGE == 0
    assert array.flags.writeable
    assert array.flags.c_contiguous
    array[:] = 7
    assert arena.num_leased == 1
    assert arena.mapped_bytes == rounded_bytes(nbytes)


def test_a_lease_comes_back_when_the_array_dies(arena: Arena) -> None:
    array = arena.lease(100)
    del array
    assert arena.num_leased == 0


def numpy_views(array: NDArray[np.uint8]) -> list[Any]:
    matrix = array.view(np.float32).reshape(25, 40)
    return [matrix[3:5], matrix.T, array[::2], memoryview(matrix)]


def torch_views(array: NDArray[np.uint8]) -> list[Any]:
    tensor = torch.from_numpy(array.view(np.float32))
    grid = tensor.as_strided((10, 8), (4, 1))
    return [*tensor.split([10, 20, 970]), tensor.view(25, 40).t(), grid, tensor[5:].numpy(), tensor.detach()]


@pytest.mark.parametrize("views_of", [numpy_views, torch_views])
def test_a_lease_comes_back_when_the_last_view_dies(arena: Arena, views_of: Any) -> None:
    returned: list[int] = []
    views = views_of(arena.lease(4000, lambda: returned.append(1)))
    while views:
        assert arena.num_leased == 1
        assert returned == []
        views.pop(len(views) // 2)
    assert arena.num_leased == 0
    assert returned == [1]


def test_a_view_keeps_its_bytes_while_others_take_new_leases(arena: Arena) -> None:
    tensor = torch.from_numpy(arena.lease(8000).view(np.int64))[100:200]
    tensor[:] = torch.arange(100)
    for _ in range(5):
        arena.lease(8000)[:] = 255
    assert tensor.tolist() == list(range(100))


def test_the_last_view_may_die_in_another_thread(arena: Arena) -> None:
    returned: list[int] = []
    views = [torch.from_numpy(arena.lease(100, lambda: returned.append(1)))]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join(10)
    assert arena.num_leased == 0
    assert returned == [1]


@pytest.mark.parametrize("views_of", [numpy_views, torch_views])
@pytest.mark.parametrize("closed", [False, True])
def test_nothing_of_python_runs_where_the_last_view_dies(views_of: Any, closed: bool) -> None:
    """A Ctrl-C that struck there would be printed and dropped."""
    arena, returned = Arena(limit_bytes=MIB), []
    array = arena.lease(4000, lambda: returned.append(1))
    start = address(array)
    views = views_of(array)
    del array
    if closed:
        arena.close()
    assert is_mapped(start)
    assert python_calls(views.clear) == []
    assert is_mapped(start) != closed
    arena.reconcile()
    assert returned == [1]


def is_mapped(start: int) -> bool:
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= start < int(end, 16) for first, end in spans)


def test_a_view_in_a_reference_cycle_comes_back_with_the_garbage_collection(arena: Arena) -> None:
    cycle: list[Any] = [arena.lease(100)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert arena.num_leased == 0


def test_a_view_may_die_inside_the_arenas_critical_section(arena: Arena) -> None:
    views = [arena.lease(100)]
    arena.lease(100, views.clear)  # runs inside the next `lease`, as a garbage collection may
    thread = threading.Thread(target=arena.lease, args=(100,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "deadlock"
    assert views == []
    assert arena.num_leased == 0


def test_on_return_runs_once_a_lease_though_the_slab_is_reused(arena: Arena) -> None:
    returned: list[str] = []
    for name in "abc":
        arena.lease(100, lambda name=name: returned.append(name))  # type: ignore[misc]
    arena.lease(100)
    assert returned == ["a", "b", "c"]


# ---- reuse -------------------------------------------------------------------------------------------------


def test_a_slab_is_registered_once_however_often_it_is_leased(arena: Arena, pinned: Registrations) -> None:
    for nbytes in (100, 200, PAGE):
        arena.lease(nbytes)
    assert (pinned.registered, pinned.unregistered) == (1, 0)
    assert list(pinned.now.values()) == [PAGE]


def test_the_slab_that_came_back_last_is_leased_first(arena: Arena) -> None:
    first, second, third = (arena.lease(100) for _ in range(3))
    order = [address(first), address(third), address(second)]
    del first
    del third
    del second
    again = [arena.lease(100) for _ in range(3)]
    assert [address(array) for array in again] == order[::-1]


def test_only_slabs_of_the_same_size_class_are_reused(arena: Arena, pinned: Registrations) -> None:
    arena.lease(100)
    large = arena.lease(3 * PAGE)
    assert pinned.registered == 2
    assert len(large) == 3 * PAGE


def test_free_slabs_beyond_the_limit_are_unmapped_coldest_class_first(pinned: Registrations) -> None:
    arena = Arena(limit_bytes=8 * PAGE, register=pinned)
    cold, warm = arena.lease(3 * PAGE), arena.lease(4 * PAGE)
    del cold
    del warm
    arena.lease(2 * PAGE)
    assert sorted(pinned.now.values()) == [2 * PAGE, 4 * PAGE]
    assert arena.mapped_bytes == 6 * PAGE


def test_a_class_in_use_stays_warm(pinned: Registrations) -> None:
    arena = Arena(limit_bytes=8 * PAGE, register=pinned)
    old, other = arena.lease(3 * PAGE), arena.lease(4 * PAGE)
    del old
    del other
    arena.lease(3 * PAGE)  # used again: now the other one is colder
    arena.lease(2 * PAGE)
    assert sorted(pinned.now.values()) == [2 * PAGE, 3 * PAGE]


def test_free_slabs_stay_mapped_within_the_limit(arena: Arena, pinned: Registrations) -> None:
    arrays = [arena.lease(n * PAGE) for n in range(1, 6)]
    del arrays
    arena.lease(6 * PAGE)
    assert pinned.unregistered == 0
    assert arena.mapped_bytes == 21 * PAGE


def test_leases_alone_may_exceed_the_limit_and_leave_nothing_free(pinned: Registrations) -> None:
    arena = Arena(limit_bytes=4 * PAGE, register=pinned)
    arena.lease(PAGE)
    kept = [arena.lease(2 * PAGE) for _ in range(5)]
    assert arena.mapped_bytes == 10 * PAGE
    assert len(pinned.now) == len(kept) == 5


class ArenaMachine(RuleBasedStateMachine):
    """Leases never share memory, and what is mapped is leased or fits the limit."""

    LIMIT = 16 * PAGE

    def __init__(self) -> None:
        super().__init__()
        self.pinned = Registrations()
        self.arena = Arena(limit_bytes=self.LIMIT, register=self.pinned)
        self.held: list[tuple[NDArray[np.uint8], int]] = []
        self.returned: list[int] = []
        self.leased = 0

    @rule(nbytes=st.integers(1, 6 * PAGE))
    def lease(self, nbytes: int) -> None:
        number = self.leased
        array = self.arena.lease(nbytes, lambda: self.returned.append(number))
        array[:] = number % 251
        self.held.append((array, number))
        self.leased += 1
        leased_bytes = sum(rounded_bytes(len(array)) for array, _ in self.held)
        assert leased_bytes <= self.arena.mapped_bytes <= max(self.LIMIT, leased_bytes)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 1000))
    def drop(self, which: int) -> None:
        _, number = self.held.pop(which % len(self.held))
        del _
        self.arena.reconcile()
        assert self.returned[-1] == number

    @invariant()
    def every_lease_keeps_what_was_written(self) -> None:
        assert self.arena.num_leased == len(self.held)
        for array, number in self.held:
            assert (array == number % 251).all()

    @invariant()
    def what_is_mapped_is_registered(self) -> None:
        assert sum(self.pinned.now.values()) == self.arena.mapped_bytes

    def teardown(self) -> None:
        self.arena.close()
        assert len(self.pinned.now) == len(self.held)
        self.held.clear()
        assert not self.pinned.now
        self.arena.reconcile()
        assert sorted(self.returned) == list(range(self.leased))


ArenaMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestArenaMachine = ArenaMachine.TestCase


# ---- failures and close ------------------------------------------------------------------------------------


def test_a_slab_that_cannot_be_registered_leaves_nothing_behind() -> None:
    def refuse(address: int, nbytes: int) -> Callable[[], None]:
        raise RuntimeError("cudaHostRegister failed")

    arena, returned = Arena(limit_bytes=MIB, register=refuse), []
    with pytest.raises(RuntimeError, match="cudaHostRegister failed"):
        arena.lease(100, lambda: returned.append(1))
    assert arena.num_leased == 0
    assert arena.mapped_bytes == 0
    assert returned == []


def test_close_unmaps_free_slabs_now_and_leased_ones_as_they_come_back(
    arena: Arena, pinned: Registrations
) -> None:
    kept, dropped = arena.lease(100), arena.lease(2 * PAGE)
    del dropped
    arena.close()
    assert list(pinned.now) == [address(kept)]
    assert arena.mapped_bytes == PAGE
    kept[:] = 3  # the memory is still there
    view = torch.from_numpy(kept)[:10]
    del kept
    assert view.tolist() == [3] * 10
    assert len(pinned.now) == 1
    del view
    assert not pinned.now
    assert pinned.registered == pinned.unregistered == 2
    assert arena.mapped_bytes == 0


def test_on_return_runs_after_close_too(arena: Arena) -> None:
    returned: list[int] = []
    array = arena.lease(100, lambda: returned.append(1))
    arena.close()
    assert returned == []
    del array
    arena.reconcile()
    assert returned == [1]


def test_a_slab_that_comes_back_while_the_arena_closes_is_unmapped(
    arena: Arena, pinned: Registrations
) -> None:
    """`close` runs in another thread between the death of the last view and the return of its slab."""
    array = arena.lease(100)
    watch = weakref.ref(array.base, lambda _: arena.close())  # the newest is called first
    del array
    assert watch() is None
    assert not pinned.now
    assert arena.mapped_bytes == 0


def test_close_may_come_twice_and_a_lease_after_it_is_refused(arena: Arena, pinned: Registrations) -> None:
    arena.lease(100)
    arena.close()
    arena.close()
    assert pinned.unregistered == 1
    with pytest.raises(RuntimeError, match="the arena is closed"):
        arena.lease(1)


def test_an_arena_that_is_dropped_leaves_views_valid() -> None:
    arena = Arena(limit_bytes=MIB)
    gone = weakref.ref(arena)
    array = arena.lease(100)
    array[:] = 9
    arena.close()
    del arena
    assert (array == 9).all()
    del array
    gc.collect()
    assert gone() is None


def test_threads_that_lease_and_drop_at_once_share_no_bytes(pinned: Registrations) -> None:
    arena, together = Arena(limit_bytes=32 * PAGE), threading.Barrier(4, timeout=10)
    wrong: list[int] = []

    def work(mark: int) -> None:
        together.wait()
        kept: list[NDArray[np.uint8]] = []
        for i in range(100):
            array = arena.lease(1 + (i * 977) % (3 * PAGE))
            array[:] = mark
            kept = [*kept[-2:], array]
            wrong.extend(mark for k in kept if not (k == mark).all())

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert wrong == []
    assert arena.num_leased == 0
    arena.close()
    assert arena.mapped_bytes == 0
