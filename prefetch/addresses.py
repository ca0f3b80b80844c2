"""Memory by its address, as arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray


def array_interface(address: int, nbytes: int) -> dict[str, Any]:
    """Return the `__array_interface__` of an object that owns memory: writable uint8 [nbytes].

    The object becomes the base of the array made from it, and dies with the array's last view.
    """
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def memory_at(address: int, nbytes: int, owner: object = None) -> NDArray[np.uint8]:
    """Memory that lives as long as `owner`, writable uint8 [nbytes].

    The array keeps the owner: whoever shows the variables of a traceback reads it when all else is closed.
    None: others keep the memory, and the array goes nowhere. Not by a ctypes array: each length would be a
    type of its own, which is never freed.
    """
    return np.asarray(SimpleNamespace(__array_interface__=array_interface(address, nbytes), owner=owner))


def address_of(array: NDArray[Any] | None) -> int:
    """Return the address at which an array begins; 0: there is none."""
    return 0 if array is None else array.__array_interface__["data"][0]
