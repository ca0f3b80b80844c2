"""A registry of objects that live, which runs no Python code where one of them dies.

`weakref.WeakSet` does: a KeyboardInterrupt that strikes in its callback is printed and dropped, and the loop
goes on as if nobody had pressed Ctrl-C. It also compares its members: it holds one of two that are equal, and
none that has no hash.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """The objects that were added and live, by identity. Thread-safe; without a lock that a fork could copy.

    Adding takes O(1), finding one of n O(n).
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[T]] = {}
        """By their own identity: references are equal where their objects are."""
        self._dead: deque[weakref.ref[T]] = deque()
        """The references of objects that have died since the registry was used last."""

    def add(self, member: T) -> None:
        """Hold it weakly; what is added twice comes twice. `TypeError` for what takes no weak reference."""
        self._forget_dead()
        ref = weakref.ref(member, self._dead.append)
        self._refs[id(ref)] = ref

    def discard(self, member: T) -> None:
        """Hold it no longer. Idempotent."""
        for key, ref in self._refs.copy().items():
            if ref() is member:
                self._refs.pop(key, None)

    def __contains__(self, member: object) -> bool:
        return any(other is member for other in self)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the objects that live now."""
        self._forget_dead()
        return (member for ref in self._refs.copy().values() if (member := ref()) is not None)

    def _forget_dead(self) -> None:
        with suppress(IndexError):  # asking first whether there is one would race with other threads
            while True:
                dead = self._dead.popleft()  # held here: nothing else has its identity meanwhile
                self._refs.pop(id(dead), None)
