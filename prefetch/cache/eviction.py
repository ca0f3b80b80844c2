"""Which blocks to drop for a new one, where it is known when each is needed next; a tier in memory that does.

Belady's rule (1966): drop what is needed latest, and if that is the newcomer, do not keep it. For blocks of
one size no rule, knowing the future, fetches less; for blocks of about one size it is close.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


def victims(
    next_use: NDArray[np.float64],
    nbytes: NDArray[np.int64],
    *,
    newcomer: float,
    need: int,
    spare: int = 0,
) -> NDArray[np.int64]:
    """Indices of the blocks to drop, int64 [k].

    Args:
        next_use: [n] when each is needed next; infinity: never, NaN: it must stay.
        nbytes: [n] their sizes.
        newcomer: when the new block is needed after now. What is needed no later stays.
        need: bytes to free at least, or nothing is dropped: the newcomer is not worth it.
        spare: bytes to free if that costs only blocks needed later than the newcomer.
    """
    later = np.flatnonzero(next_use > newcomer)
    order = later[np.argsort(-next_use[later], kind="stable")]
    freed = np.cumsum(nbytes[order])
    if need > 0 and (not len(freed) or freed[-1] < need):
        return order[:0]
    least_bytes = max(need, spare)
    return order[: int(np.searchsorted(freed, least_bytes)) + 1] if least_bytes > 0 else order[:0]


class MemoryTier:
    """Copies of blocks by name in the memory of one process, above the folder. Thread-safe.

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
