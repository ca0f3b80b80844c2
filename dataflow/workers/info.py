"""The things that exist once a process and once a worker: `get_worker_info()` and random numbers.

torch keeps the answer in a global of one module, of which each worker process has its own. A caller may hold
the function itself, so replacing it where it can be found would not reach everybody: while worker
threads exist, the function gets other code, which asks for the calling thread's own answer; then its own
code again. Threads that are no workers see what they saw before.

Threads draw from `Generators`, which depend on no thread; processes from the global generators.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data._utils import collate, worker as torch_worker

from prefetch.interpreter import has_lock
from sharding.cached_property import cached_property

G = TypeVar("G")

_own = threading.local()
_lock = threading.RLock()  # a finaliser may call `uninstall` here; guards _users and torch's function
_users = 0
_code = torch_worker.get_worker_info.__code__
_worker_info: Any = None
"""Stands for torch's global of that name, which `_get_worker_info` finds where its code is put."""


def _get_worker_info() -> Any:
    from dataflow.workers.info import of_this_thread

    return of_this_thread(_worker_info)


def of_this_thread(otherwise: Any) -> Any:
    """The calling thread's answer, if it is a worker."""
    info = getattr(_own, "info", None)
    if info is None:
        return otherwise
    if sys._getframe(2).f_code is collate.collate_tensor_fn.__code__:
        return None  # torch asks whether to collate into shared memory, which threads do not need
    return info


def install() -> None:
    """One more owner of worker threads. Thread-safe."""
    global _users
    with _lock:
        _users += 1
        if _users == 1 and torch_worker.get_worker_info.__code__ is _code:
            torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


def uninstall() -> None:
    """Count one user less; the last one puts torch's function back."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and has_lock():  # else somebody may be running it; it answers what it answered before
            torch_worker.get_worker_info.__code__ = _code


# A child is forked between two changes, never while a thread that it lacks holds the lock.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def become(info: Any) -> None:
    """Set what `get_worker_info` answers in the calling thread from now on."""
    _own.info = info


class Generators:
    """`get_worker_info().rng`: generators that are seeded anew for each thing that is worked on.

    So what is drawn for an item depends on the loader's seed, the epoch and the item's position in it, not
    on who works on it. They are made when first asked for. Used by one thread.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._position = 0
        self._seeders: list[tuple[int, Callable[[int], object]]] = []
        """The generators that were asked for, each by the bytes of its seed and what takes it."""

    def begin(self, *key: Any) -> None:
        """Begin with something else: generators are drawn anew for it."""
        self._key = key
        self.go_to(0)

    def go_to(self, position: int) -> None:
        """Work on another part of it."""
        self._position = position
        for num_bytes, take_seed in self._seeders:
            take_seed(self._seed(num_bytes))

    def _seed(self, num_bytes: int) -> int:
        text = repr((self._key, self._position))
        return int.from_bytes(blake2b(text.encode(), digest_size=num_bytes).digest())

    def _seeded(self, generator: G, num_bytes: int, take_seed: Callable[[int], object]) -> G:
        self._seeders.append((num_bytes, take_seed))
        take_seed(self._seed(num_bytes))
        return generator

    @cached_property
    def random_generator(self) -> random.Random:
        """The generator of Python's `random`, seeded anew."""
        generator = random.Random()
        return self._seeded(generator, 16, generator.seed)

    @cached_property
    def torch_generator(self) -> torch.Generator:
        """The generator of torch, seeded anew."""
        generator = torch.Generator()
        return self._seeded(generator, 7, generator.manual_seed)

    @cached_property
    def numpy_generator(self) -> np.random.Generator:
        """The generator of numpy, seeded anew."""
        bits = np.random.PCG64()
        generator = np.random.Generator(bits)
        return self._seeded(generator, 16, lambda seed: setattr(bits, "state", np.random.PCG64(seed).state))
