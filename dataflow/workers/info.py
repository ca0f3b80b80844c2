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
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate, worker as torch_worker

from prefetch.interpreter import has_lock

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
        self._used = False
        self._random: random.Random | None = None
        self._torch: torch.Generator | None = None
        self._numpy: np.random.Generator | None = None

    def begin(self, *key: Any) -> None:
        """Begin with something else: generators are drawn anew for it."""
        self._key = key
        self.go_to(0)

    def go_to(self, position: int) -> None:
        """Work on another part of it."""
        self._position = position
        if self._used:
            self._seed_again()

    def _seed_again(self) -> None:
        if self._random is not None:
            self._random.seed(self._seed(16))
        if self._torch is not None:
            self._torch.manual_seed(self._seed(7))
        if self._numpy is not None:
            self._numpy.bit_generator.state = np.random.PCG64(self._seed(16)).state

    def _seed(self, num_bytes: int) -> int:
        self._used = True
        text = repr((self._key, self._position))
        return int.from_bytes(blake2b(text.encode(), digest_size=num_bytes).digest())

    @property
    def random_generator(self) -> random.Random:
        """The generator of Python's `random`, seeded anew."""
        if self._random is None:
            self._random = random.Random(self._seed(16))
        return self._random

    @property
    def torch_generator(self) -> torch.Generator:
        """The generator of torch, seeded anew."""
        if self._torch is None:
            self._torch = torch.Generator().manual_seed(self._seed(7))
        return self._torch

    @property
    def numpy_generator(self) -> np.random.Generator:
        """The generator of numpy, seeded anew."""
        if self._numpy is None:
            self._numpy = np.random.Generator(np.random.PCG64(self._seed(16)))
        return self._numpy
