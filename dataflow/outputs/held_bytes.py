"""The bytes that the objects of a batch hold, by a shallow look: what a user's function or a decoder made.

Tensors and arrays count by the memory they keep alive, each once; text, bytes and numbers as Python says; of
an object with attributes those that are tensors, arrays, text or bytes count. Memory that is counted
elsewhere (the slots of gathered columns) is left out. About 2 us a tensor; long lists are sampled.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor

_MOST_LOOKED_AT = 256
"""Elements of one list: of longer ones so many, evenly spread."""
_FEW = 4
_SMALL = 4096
"""Samples of which few, evenly spread, are no larger than this are taken to be like them."""
_DEEPEST = 5
"""A batch is a dict of lists of samples, which hold lists: what lies deeper counts by its own size only."""
_PLAIN = frozenset((str, bytes, bytearray, int, float, complex, bool, type(None)))


class Ranges(Struct):
    """Ranges of memory, such as those that are counted elsewhere."""

    _starts: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    def add(self, start: int, nbytes: int) -> None:
        """Add `nbytes` from an address on."""
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self._ends.insert(index, start + nbytes)

    def __contains__(self, address: int) -> bool:
        return self.length_at(address) > 0

    def length_at(self, address: int) -> int:
        """Bytes of the range that an address lies in; 0 where it lies in none."""
        index = bisect_right(self._starts, address) - 1
        return self._ends[index] - self._starts[index] if index >= 0 and address < self._ends[index] else 0

    @classmethod
    def of(cls, values: Iterable[Any]) -> Ranges:
        """Return the ranges of tensors, and of lists of tensors."""
        ranges, parts = cls(), [*values]
        while parts:
            part = parts.pop()
            if isinstance(part, list):
                parts.extend(part)
            elif isinstance(part, Tensor) and part.nbytes:
                ranges.add(part.data_ptr(), part.nbytes)
        return ranges

    @property
    def nbytes(self) -> int:
        """The bytes of all ranges together."""
        return sum(self._ends) - sum(self._starts)


def held_bytes(batch: Any, elsewhere: Ranges) -> int:
    """Bytes in main memory that a batch keeps alive, but those `elsewhere`. Never raises."""
    return _Look(elsewhere).of(batch, _DEEPEST)


class _Look(Struct):
    _elsewhere: Ranges
    _seen: set[int] = field(default_factory=set)

    def of(self, thing: Any, depth: int) -> int:
        kind = type(thing)
        if kind in _PLAIN:
            return sys.getsizeof(thing)
        if isinstance(thing, Tensor):
            return self._tensor(thing)
        if isinstance(thing, np.ndarray):
            return self._array(thing, depth)
        if depth == 0:
            return _own_size(thing)
        if kind is dict or isinstance(thing, Mapping):
            return _own_size(thing) + self._sum([*thing.values()], depth - 1)
        if isinstance(thing, (list, tuple)):
            return _own_size(thing) + self._sum(thing, depth - 1)
        nbytes = getattr(thing, "nbytes", None)
        if isinstance(nbytes, int):  # tables, buffers, images
            return self._once(id(thing), nbytes)
        members = getattr(thing, "__dict__", None)
        values = [v for v in members.values() if isinstance(v, _COUNTED)] if isinstance(members, dict) else []
        return _own_size(thing) + self._sum(values, 0)

    def _sum(self, things: Sequence[Any], depth: int) -> int:
        few = list[int]()
        if len(things) > _FEW and type(things[0]) in _NESTED:
            few = [self.of(thing, depth) for thing in _spread(things, _FEW)]
            if max(few) <= _SMALL:
                return sum(few) * len(things) // _FEW
        looked_at = things if len(things) <= _MOST_LOOKED_AT else _spread(things, _MOST_LOOKED_AT)
        counted = {*_spread(range(len(looked_at)), _FEW)} if few else set()  # seen: again, they are nothing
        others = [thing for i, thing in enumerate(looked_at) if i not in counted] if few else looked_at
        size = sys.getsizeof if _PLAIN.issuperset(map(type, others)) else lambda thing: self.of(thing, depth)
        total = sum(few) + sum(map(size, others))
        return total if looked_at is things else total * len(things) // _MOST_LOOKED_AT

    def _tensor(self, tensor: Tensor) -> int:
        if not tensor.is_cpu:
            return 0
        try:
            address = tensor.data_ptr()
            if address in self._elsewhere:
                return 0
            if not tensor._is_view():
                return self._once(address, tensor.nbytes)
            storage = tensor.untyped_storage()
            address, nbytes = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse ones, and others without memory of their own
            parts = [getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ())]
            return sum(self._tensor(part) for part in parts)
        return self._once(address, nbytes)

    def _array(self, array: Any, depth: int) -> int:
        if array.dtype.hasobject:
            return int(array.nbytes) + self._sum(array.reshape(-1).tolist() if depth else [], depth - 1)
        if array.__array_interface__["data"][0] in self._elsewhere:
            return 0
        while isinstance(array.base, np.ndarray):
            array = array.base
        return self._once(array.__array_interface__["data"][0], int(array.nbytes))

    def _once(self, address: int, nbytes: int) -> int:
        if address in self._seen:
            return 0
        self._seen.add(address)
        return nbytes


_NESTED = (dict, list, tuple)
_COUNTED = (Tensor, np.ndarray, str, bytes, bytearray)
"""Attributes that count: others may be shared by all samples."""
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
}


def _spread(things: Sequence[Any], count: int) -> Sequence[Any]:
    return [things[i * len(things) // count] for i in range(count)]


def _own_size(thing: Any) -> int:
    try:
        return sys.getsizeof(thing)
    except Exception:  # a `__sizeof__` of the user's
        return 0
