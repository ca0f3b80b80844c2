"""A registry of living objects: by identity, and without Python code where one dies."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import pytest
from forked_kit import fork
from threads_kit import python_calls

from prefetch.weak_registry import WeakRegistry


class Member:
    """Something that dies."""


@dataclass
class Equal:
    """Equal to all others, and without a hash."""


def test_it_has_those_that_live_and_runs_nothing_where_one_dies() -> None:
    registry: WeakRegistry[Member] = WeakRegistry()
    kept, dropped = Member(), [Member()]
    registry.add(kept)
    registry.add(dropped[0])
    assert list(registry) == [kept, dropped[0]]
    assert python_calls(dropped.clear) == []
    assert list(registry) == [kept]


def test_members_that_are_equal_are_each_held() -> None:
    registry: WeakRegistry[Equal] = WeakRegistry()
    one, other = Equal(), Equal()
    registry.add(one)
    registry.add(other)
    assert list(map(id, registry)) == [id(one), id(other)]
    registry.discard(one)
    assert one not in registry
    assert other in registry
    registry.discard(one)
    del other
    assert list(registry) == []


def test_a_member_in_the_place_of_a_dead_one_is_held() -> None:
    registry: WeakRegistry[Member] = WeakRegistry()
    for _ in range(100):  # most of these lie where the one before did
        member = Member()
        assert member not in registry
        registry.add(member)
        assert list(registry) == [member]
        del member
    assert list(registry) == []


def test_what_is_kept_of_dead_members_goes_when_the_registry_is_used() -> None:
    registry: WeakRegistry[Member] = WeakRegistry()
    members = [Member() for _ in range(100)]
    for member in members:
        registry.add(member)
    del member
    members.clear()
    assert list(registry) == []
    assert len(registry._refs) == 0


def test_what_cannot_be_referred_to_weakly_is_refused() -> None:
    with pytest.raises(TypeError, match="weak reference"):
        WeakRegistry[list[int]]().add([])


def test_threads_add_and_drop_members_at_once() -> None:
    registry: WeakRegistry[Member] = WeakRegistry()
    kept: list[Member] = []

    def run() -> None:
        for _ in range(200):
            registry.add(Member())
            kept.append(Member())
            registry.add(kept[-1])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(map(id, registry)) == set(map(id, kept))


def test_a_forked_child_has_those_that_lived() -> None:
    registry: WeakRegistry[Member] = WeakRegistry()
    kept, dropped = Member(), [Member()]
    registry.add(kept)
    registry.add(dropped[0])
    if (child := fork()) == 0:
        dropped.clear()
        os._exit(list(registry) != [kept])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(registry) == [kept, dropped[0]]
