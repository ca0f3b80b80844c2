"""Copies of batches to a CUDA device that overlap with what the device is doing.

Slabs of the arena are page-locked once, when they are mapped, so a copy is one DMA from the slot that the
batch was built in. Copies run on a side stream; the consumer's stream waits for the copy's event, the
host never does. A slot is held until its event has passed: at most `_IN_FLIGHT` batches are between
host and device, and only a consumer that is further ahead than that waits for the oldest.

Device tensors come from torch's caching allocator and are recorded on the consumer's stream, so two
batches alternate between the same blocks of memory unless the training code keeps them.

Beside `prefetch.ipc`, this is the one module of `prefetch` that imports torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

_IN_FLIGHT = 2


def register_pinned(address: int, nbytes: int) -> Callable[[], object]:
    """Page-lock a range of our own memory for CUDA; gives the function that unlocks it, written in C.

    Raises `RuntimeError` with CUDA's error where the driver refuses (often the limit on locked memory).
    """
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(address, nbytes, 0))
    if status != 0:
        with suppress(RuntimeError):  # CUDA keeps the error for the next launch to fail with: let it be this
            torch.zeros(1, device="cuda")
        raise RuntimeError(
            f"cudaHostRegister of {nbytes:,} bytes failed with error {status}; raise the limit on locked "
            "memory (ulimit -l), or use the loader without device= and copy batches yourself"
        )
    return partial(cudart.cudaHostUnregister, address)


class CudaStreams:
    """The calls into CUDA that a copier makes; tests give a fake."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)

    def copy(self, tensor: Tensor) -> Tensor:
        """Start copying on the side stream; the copy belongs to the consumer's stream."""
        consumer = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._side):
            copied = tensor.to(self.device, non_blocking=True)
        copied.record_stream(consumer)
        return copied

    def recorded(self) -> Any:
        """An event after all copies so far, which the consumer's stream waits for."""
        event = torch.cuda.Event()
        event.record(self._side)
        torch.cuda.current_stream(self.device).wait_event(event)
        return event


class DeviceCopier:
    """Moves batches to one device. Used by the consumer's thread only."""

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._in_flight: deque[tuple[Any, Any]] = deque()  # event, host batch that it protects

    def to_device(self, batch: Any) -> Any:
        """The batch with every CPU tensor replaced by its copy; returns before the copies are done."""
        while self._in_flight and (len(self._in_flight) >= _IN_FLIGHT or self._in_flight[0][0].query()):
            self._in_flight.popleft()[0].synchronize()
        copied = _map_tensors(batch, self._streams.copy)
        self._in_flight.append((self._streams.recorded(), batch))
        return copied

    def close(self) -> None:
        """Wait for the copies that still read from slots."""
        while self._in_flight:
            self._in_flight.popleft()[0].synchronize()


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply to every CPU tensor in nested mappings, sequences and named tuples; the rest stays."""
    if isinstance(value, Tensor):
        return function(value) if value.device.type == "cpu" else value
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    return value
