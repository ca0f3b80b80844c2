"""Put what a process makes where the training process sees it: tensors once, all else as a pickle."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils import collate

from prefetch.ipc.payload import LARGE, PackedObject, pack
from prefetch.workers.shared_arena import Region

_MOST_HELD = 1.1
"""A part that is kept holds so many times its bytes at most, and a page."""


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """The settings of torch where a loader is made, which its workers take over."""

    default_dtype: torch.dtype
    collate_map: Mapping[Any, Any]
    """The functions that were registered with `default_collate` beside what torch registers itself."""

    @classmethod
    def here(cls) -> TorchSettings:
        """Read the settings of this process."""
        modules = (collate.__name__, __name__)  # in a worker, ours is registered
        changes = {
            kind: function
            for kind, function in collate.default_collate_fn_map.items()
            if getattr(function, "__module__", None) not in modules
        }
        return cls(default_dtype=torch.get_default_dtype(), collate_map=changes)

    def apply(self) -> None:
        """Set them in this process."""
        torch.set_default_dtype(self.default_dtype)
        collate.default_collate_fn_map.update(self.collate_map)


class BatchWriter:
    """Puts objects into this process's region of shared memory."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.takes_parts = False
        """True if whatever lies in the region stays there; else only what is all of a slab, which holds no
        more than it needs, and which the training process can page-lock."""
        self._direct: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._by_value: bool | None = None
        self._joins = True
        self._joined: tuple[int, int] | None = None
        """Address and bytes of the large part that lies with all small ones."""
        self._stack = collate.collate_tensor_fn
        if collate.default_collate_fn_map.get(torch.Tensor) is self._stack:
            collate.default_collate_fn_map[torch.Tensor] = self._collate_tensor
            os.register_at_fork(after_in_child=self._release)

    def _release(self) -> None:
        """Give torch its own collate function back, in a fork of this process, whose region it is not."""
        if collate.default_collate_fn_map.get(torch.Tensor) == self._collate_tensor:
            collate.default_collate_fn_map[torch.Tensor] = self._stack

    def _collate_tensor(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        """torch's, but into our shared memory instead of a new shared object a tensor."""
        elem = batch[0]
        if elem.layout is not torch.strided or elem.is_nested or elem.device.type != "cpu":
            stacked: torch.Tensor = self._stack(batch, collate_fn_map=collate_fn_map)
            return stacked
        nbytes = len(batch) * elem.numel() * elem.element_size()
        # What requires grad cannot be stacked into memory that is there.
        if nbytes < LARGE or type(elem) is not torch.Tensor or any(t.requires_grad for t in batch):
            return torch.stack(batch, 0)
        leased = self._region.arena.lease(nbytes)
        self._direct[leased.ctypes.data] = leased
        out = torch.from_numpy(leased).view(elem.dtype).view(len(batch), *elem.shape)
        return torch.stack(batch, 0, out=out)

    def _place(self, address: int, nbytes: int, keep: Any) -> tuple[Any, int] | None:
        """Find a part where it lies, or give it a slab of its own; the first joins the pickle in one."""
        if self.takes_parts and self._region.holds(address):
            return keep, self._region.offset_of(address)
        if nbytes < LARGE:
            return None
        if (direct := self._direct.get(address)) is not None and direct.nbytes == nbytes:
            return keep, self._region.offset_of(address)
        if self._joins and self._joined in (None, (address, nbytes)):  # it is asked again if it goes by value
            self._joined = address, nbytes
            return None
        leased, to = self._region.arena.lease_at(nbytes)
        ctypes.memmove(to, address, nbytes)
        return leased, self._region.offset_of(to)

    def _packed(self, obj: Any) -> PackedObject:
        self._joined = None
        packed = pack(obj, place=self._place, by_value=self._by_value)
        if self._joined is not None and packed.nbytes > _MOST_HELD * self._joined[1]:
            self._joins = False  # who keeps that part would keep too much else
            return self._packed(obj)
        return packed

    def put(self, obj: Any) -> tuple[int, PackedObject]:
        """Copy an object into shared memory; gives its offset in the file."""
        packed = self._packed(obj)
        self._by_value = packed.by_value or None
        leased, address = self._region.arena.lease_at(packed.nbytes)
        packed.copy_to(address)
        for keep, offset in packed.placed:
            self._region.grant(keep, offset)
        return self._region.grant(leased, self._region.offset_of(address)), packed
