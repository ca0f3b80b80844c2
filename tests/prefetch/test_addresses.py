"""Memory at an address: writable, not copied, and no type left behind for each length."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from prefetch.addresses import HeldMemory, memory_at


def test_memory_is_seen_and_written_where_it_lies() -> None:
    owner = np.arange(16, dtype=np.uint8)
    view = memory_at(owner.ctypes.data + 4, 8)
    assert view.tolist() == list(range(4, 12))
    view[0] = 99
    assert owner[4] == 99
    assert len(memory_at(owner.ctypes.data, 0)) == 0


def test_an_array_keeps_the_object_alive_that_it_was_made_from() -> None:
    memory = np.arange(8, dtype=np.uint8)
    held = HeldMemory(memory, memory.ctypes.data, 8)
    died = weakref.ref(held)
    view = np.asarray(held)[2:]
    del held
    assert died() is not None
    assert view.tolist() == list(range(2, 8))
    del view
    assert died() is None


def test_memory_at_an_address_keeps_its_owner_as_long_as_a_view_of_it() -> None:
    class Owner:
        def __init__(self) -> None:
            self.memory = np.arange(8, dtype=np.uint8)

    owner = Owner()
    died = weakref.ref(owner)
    view = memory_at(owner.memory.ctypes.data, 8, owner)[2:].view(np.int16)
    del owner
    assert died() is not None
    del view
    assert died() is None


def test_no_length_makes_a_type_of_its_own() -> None:
    owner = np.zeros(64, np.uint8)
    before = len(ctypes.Array.__subclasses__())
    assert [len(memory_at(owner.ctypes.data, nbytes)) for nbytes in range(64)] == list(range(64))
    assert len(ctypes.Array.__subclasses__()) == before
