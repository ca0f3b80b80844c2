"""What a forked child must not keep open: descriptors whose closing tells others that this process is gone.

A child made by `os.fork` shares every open descriptor, so a lock or a socket would outlive the process that
it stands for. Children made by starting a program do not inherit them in the first place.
"""

from __future__ import annotations

import os
from typing import Protocol, TypeVar

from prefetch.memory.finalizer import WeakRegistry


class Closable(Protocol):
    """An open descriptor's owner."""

    def close(self) -> None:
        """Close this process's copy; others' copies stay as they are."""
        ...


C = TypeVar("C", bound=Closable)
_ours: WeakRegistry[Closable] = WeakRegistry()


def only_ours(owner: C) -> C:
    """Close it in every child that this process forks from now on. Gives it back."""
    _ours.add(owner)
    return owner


def _in_child() -> None:
    for owner in _ours:
        owner.close()


os.register_at_fork(after_in_child=_in_child)
