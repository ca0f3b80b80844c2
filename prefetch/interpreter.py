"""Tell whether there is an interpreter lock, for a free-threaded build of Python has none.

docs/notes/design.md lists what was read and mended. What looks at other threads while they run asks
here first. And tell which modules another interpreter finds.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from types import FrameType, FunctionType
from typing import Any, TypeVar

T = TypeVar("T")


def has_lock() -> bool:
    """Return whether one thread runs Python at a time: always before Python 3.13, and in usual builds."""
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is None or bool(is_enabled())


def frames_of_threads() -> dict[int, FrameType]:
    """Return where each other thread stands, by its number; nothing where there is no lock.

    A frame that another thread leaves while it is looked at may end the process there. The caller's own frame
    is left out: it refers to the result, and all that the frames hold would stay until the next collection.
    """
    # Python 3.11 holds a lock there that a collection of garbage may want, and would wait for (gh-106883).
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames() if has_lock() else {}
    finally:
        if was_enabled:
            gc.enable()
    frames.pop(threading.get_ident(), None)
    return frames


def taken_by_one(stack: list[T]) -> Iterator[T]:
    """Take from the end of a list until nothing is left; of several threads, one gets each.

    A list's `pop` is one step with and without the lock; `next` of a shared iterator is one with it only.
    """
    with suppress(IndexError):  # asking first whether there is one would race with other threads
        while True:
            yield stack.pop()


def home_of(obj: Any) -> str:
    """Return the module of a class or a function, where another interpreter looks for it; else ""."""
    return obj.__module__ or "" if isinstance(obj, type | FunctionType) else ""


def is_importable(name: str) -> bool:
    """Return whether another interpreter with our `sys.path` finds a module, whatever `sys.modules` has."""
    return name != "__main__" and _is_found(name, tuple(sys.path))


@lru_cache(maxsize=1024)
def _is_found(name: str, path: tuple[str, ...]) -> bool:
    parent, locations, spec = name.rpartition(".")[0], None, None
    if parent:
        locations = getattr(sys.modules.get(parent), "__path__", None)
        if locations is None or not is_importable(parent):
            return is_importable(parent)  # which makes it, if it is no package
    for finder in sys.meta_path:
        with suppress(Exception):  # of a finder of somebody's
            spec = spec or finder.find_spec(name, locations)
    # A folder that has the name of a module is a package of its own.
    return spec is not None and (spec.origin is not None or hasattr(sys.modules.get(name), "__path__"))
