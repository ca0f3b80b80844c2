"""Put what a process makes where the training process sees it: tensors once, all else as a pickle."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils import collate

from prefetch.ipc.payload import PackedObject, pack
from prefetch.workers.shared_arena import Buffer, Region

_DIRECT_BYTES = 32 << 10
"""Tensors of at least this size are collated in shared memory at once; smaller ones are copied together."""


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """The settings of torch where a loader is made, which its workers take over."""

    default_dtype: torch.dtype
    collate_map: Mapping[Any, Any]
    """The functions that were registered with `default_collate` beside what torch registers itself."""

    @classmethod
    def here(cls) -> TorchSettings:
        """Read the settings of this process."""
        own = (collate.__name__, __name__)  # in a worker, ours is registered
        changes = {
            kind: function
            for kind, function in collate.default_collate_fn_map.items()
            if getattr(function, "__module__", None) not in own
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
        """True if any tensor that lies in the region stays there; else only one that is all of a slab, which
        the training process can page-lock."""
        self._direct: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._by_value: bool | None = None
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
        if nbytes < _DIRECT_BYTES or type(elem) is not torch.Tensor or any(t.requires_grad for t in batch):
            return torch.stack(batch, 0)
        leased = self._region.arena.lease(nbytes)
        self._direct[leased.ctypes.data] = leased
        out = torch.from_numpy(leased).view(elem.dtype).view(len(batch), *elem.shape)
        return torch.stack(batch, 0, out=out)

    def _shared_offset(self, tensor: torch.Tensor) -> int | None:
        address = tensor.data_ptr()
        if self.takes_parts:
            return self._region.offset_of(address) if self._region.holds(address) else None
        if address in self._direct and self._direct[address].nbytes == tensor.untyped_storage().nbytes():
            return self._region.offset_of(address)
        return None

    def put(self, obj: Any) -> tuple[int, PackedObject]:
        """Copy an object into shared memory; gives its offset in the file."""
        packed = pack(obj, shared_offset=self._shared_offset, by_value=self._by_value)
        self._by_value = packed.by_value or None
        leased: Buffer = self._region.arena.lease(packed.nbytes)
        packed.copy_to(leased.__array_interface__["data"][0])
        for tensor, _ in packed.placed:
            self._region.grant(tensor, tensor.data_ptr())
        return self._region.grant(leased, leased.__array_interface__["data"][0]), packed
