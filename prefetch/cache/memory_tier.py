"""Blocks kept in the memory of one process, above the folder: what is needed next, within a fixed size."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prefetch.cache.eviction import victims


class MemoryTier:
    """Copies of blocks by name. Thread-safe.

    Args:
        limit_bytes: of all of them.
        lease: memory of so many bytes, which goes back when the array dies.
        next_use: when each of these names is needed next, [n]; infinity: never, as far as is known.
    """

    def __init__(
        self,
        limit_bytes: int,
        lease: Callable[[int], NDArray[np.uint8]],
        next_use: Callable[[list[str]], NDArray[np.float64]],
    ) -> None:
        self._limit, self._lease, self._next_use = limit_bytes, lease, next_use
        self._lock = threading.Lock()  # guards both
        self._blocks: dict[str, NDArray[np.uint8]] = {}
        self._held_bytes = 0

    def read(self, name: str, out: NDArray[np.uint8]) -> bool:
        """Fill `out` with a block; False if it is not here."""
        with self._lock:
            block = self._blocks.get(name)
        if block is None:
            return False
        np.copyto(out, block[: out.nbytes])  # it lives until we are done, whoever drops it
        return True

    def keep(self, name: str, data: NDArray[np.uint8], next_use: float) -> bool:
        """Keep a copy; False if all that is here is needed sooner, or it is never needed again."""
        if next_use == np.inf:
            return False
        with self._lock:
            if name in self._blocks or not self._make_room(data.nbytes, next_use):
                return False
            self._held_bytes += data.nbytes
        block = self._lease(data.nbytes)[: data.nbytes]
        np.copyto(block, data)
        with self._lock:
            if name in self._blocks:  # two threads read it
                self._held_bytes -= data.nbytes
            self._blocks[name] = block
        return True

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._blocks.clear()
            self._held_bytes = 0

    def _make_room(self, nbytes: int, next_use: float) -> bool:
        need = self._held_bytes + nbytes - self._limit
        if need <= 0:
            return True
        names = list(self._blocks)
        sizes = np.array([self._blocks[name].nbytes for name in names], np.int64)
        chosen = victims(self._next_use(names), sizes, newcomer=next_use, need=need)
        for i in chosen.tolist():
            self._held_bytes -= self._blocks.pop(names[i]).nbytes
        return len(chosen) > 0
