"""Memory by its address, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTES = {"typestr": "|u1", "version": 3}


class HeldMemory:
    """Memory that lives as long as `owner`; numpy makes of it writable uint8 [nbytes].

    The object becomes the base of the array made from it, and dies with the array's last view.
    """

    __slots__ = ("__array_interface__", "__weakref__", "owner")

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner, self.__array_interface__ = owner, {"shape": (nbytes,), "data": (address, False), **_BYTES}


def memory_at(address: int, nbytes: int, owner: object = None) -> NDArray[np.uint8]:
    """Memory that lives as long as `owner`, writable uint8 [nbytes].

    The array keeps the owner: whoever shows the variables of a traceback reads it when all else is closed.
    None: others keep the memory, and the array goes nowhere. Not by a ctypes array: each length would be a
    type of its own, which is never freed.
    """
    return np.asarray(HeldMemory(owner, address, nbytes))


def address_of(array: NDArray[Any] | None) -> int:
    """Return the address at which an array begins; 0: there is none."""
    return 0 if array is None else array.__array_interface__["data"][0]
