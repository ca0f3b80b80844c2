"""What a worker process does: fetch batches of a dataset and hand them over in shared memory.

A worker serves one or more lanes (`dataflow.workers.lane`). There are as many lanes as workers, unless a
state is resumed that was taken with another number of workers: then the lanes of the state go on, on the
processes there are.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import weakref
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import collate, signal_handling, worker as torch_worker

from dataflow.workers.lane import BACK, BATCH, ERROR, MARK, OPENED, RANDOM, RESET, SKIP, Job, Lane
from dataflow.workers.payload import Buffer, Packed, pack, unpack
from dataflow.workers.random_state import Draws, random_state, seed_all, set_random_state
from prefetch.workers.pool import Answer, WorkerStart, begin
from prefetch.workers.shared_arena import Header, Region, read_message

_DIRECT_BYTES = 32 << 10
"""Tensors of at least this size are collated in shared memory at once; smaller ones are copied together."""


def collate_map_changes() -> dict[Any, Any]:
    """What was registered with `default_collate` beside what torch registers itself."""
    own = (collate.__name__, __name__)  # in a worker, ours is registered
    return {
        kind: function
        for kind, function in collate.default_collate_fn_map.items()
        if getattr(function, "__module__", None) not in own
    }


class _Hand:
    """Puts objects into this worker's region."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._direct: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._by_value: bool | None = None
        self._stack = collate.collate_tensor_fn
        if collate.default_collate_fn_map.get(torch.Tensor) is self._stack:
            collate.default_collate_fn_map[torch.Tensor] = self._collate_tensor
            os.register_at_fork(after_in_child=self._release)

    def _release(self) -> None:
        """In a process that is forked from this one, whose region it is not."""
        if collate.default_collate_fn_map.get(torch.Tensor) == self._collate_tensor:
            collate.default_collate_fn_map[torch.Tensor] = self._stack

    def _collate_tensor(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        """torch's, but into our shared memory instead of a new shared object a tensor."""
        elem = batch[0]
        if elem.layout is not torch.strided or elem.is_nested or elem.device.type != "cpu":
            stacked: torch.Tensor = self._stack(batch, collate_fn_map=collate_fn_map)
            return stacked
        nbytes = len(batch) * elem.numel() * elem.element_size()
        if nbytes < _DIRECT_BYTES or type(elem) is not torch.Tensor:
            return torch.stack(batch, 0)
        leased = self._region.arena.lease(nbytes)
        self._direct[leased.ctypes.data] = leased
        out = torch.from_numpy(leased).view(elem.dtype).view(len(batch), *elem.shape)
        return torch.stack(batch, 0, out=out)

    def _place(self, tensor: torch.Tensor) -> int | None:
        address = tensor.data_ptr()
        if address in self._direct and self._direct[address].nbytes == tensor.untyped_storage().nbytes():
            return self._region.offset_of(address)
        return None

    def put(self, obj: Any) -> tuple[int, Packed]:
        """Copy an object into shared memory; gives its offset in the file."""
        packed = pack(obj, place=self._place, by_value=self._by_value)
        self._by_value = packed.by_value or None
        leased: Buffer = self._region.arena.lease(packed.nbytes)
        packed.copy_to(leased.ctypes.data)
        for tensor, _ in packed.placed:
            self._region.lend(self._direct[tensor.data_ptr()])
        return self._region.lend(leased), packed


def run(start: WorkerStart) -> None:
    """A worker process, from its start to its end."""
    try:
        begin(start)
        signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
        torch.set_num_threads(1)
        _serve(start)
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the parent hears Ctrl-C itself, or has gone


def _serve(start: WorkerStart) -> None:
    memory = start.memory.fd
    header = Header(memory)
    hand = _Hand(Region(memory, start.region_offset, start.region_bytes, start.region_limit))
    region = hand._region
    lanes: dict[int, Lane] = {}
    failure: ExceptionWrapper | None = None
    broken: dict[int, ExceptionWrapper] = {}
    randoms: dict[int, Any] = {}
    marked: dict[int, Any] = {}
    draws: dict[int, Draws] = {}
    running = -1

    def load() -> Job:
        if start.inherited is not None:
            inherited: Job = start.inherited
            return inherited
        buffer = read_message(memory, start.message_offset, start.message_bytes)
        meta, meta_bytes, spans = np.frombuffer(buffer[:24], np.int64).tolist()
        fds = [passed.fd for passed in start.passed]
        sizes = np.frombuffer(buffer[24 : 24 + 8 * len(fds)], np.int64).tolist()
        shared = list(zip(fds, sizes, strict=True))
        loaded: Job = unpack(buffer[4096:], meta, meta_bytes, spans, shared=shared)
        for fd in fds:
            os.close(fd)
        torch.set_default_dtype(loaded.default_dtype)
        collate.default_collate_fn_map.update(loaded.collate_map)
        return loaded

    def switch(lane: int) -> None:
        nonlocal running
        if lane != running:
            if running >= 0:
                randoms[running] = random_state()
            if lane in randoms:
                set_random_state(randoms[lane])
            else:
                seed_all(current.base_seed, lane)
                draws[lane] = Draws()
            running = lane
        torch_worker._worker_info = lanes[lane].info

    def wrapped(lane: int) -> ExceptionWrapper:
        return ExceptionWrapper(where=f"in DataLoader worker process {lane}")

    def open_lane(lane: int, shared_seed: int | None, generation: int) -> None:
        broken.pop(lane, None)
        state = None
        try:
            switch(lane)
            lanes[lane].open(shared_seed)
            if current.announce and current.state_every:
                state = lanes[lane].snapshot()
        except Exception:
            broken[lane] = wrapped(lane)
        if current.announce:
            answer(OPENED, generation, lane, lane, broken.get(lane), state)

    def answer(
        kind: int, generation: int, lane: int, task: int, data: Any, state: Any = None, random: Any = None
    ) -> None:
        try:
            offset, packed = hand.put((data, state, random))
        except Exception:
            kind = ERROR if kind == BATCH else kind
            try:
                offset, packed = hand.put((wrapped(lane), state, random))
            except Exception:
                offset, packed = hand.put((wrapped(lane), None, None))
        start.answer(
            Answer(
                kind,
                start.worker,
                generation,
                task,
                offset,
                packed.nbytes,
                packed.meta_offset,
                len(packed.meta),
                len(packed.spans),
                len(packed.placed),
                packed.nbytes + sum(tensor.nbytes for tensor, _ in packed.placed),
            )
        )

    try:
        current = load()
        for number in range(start.worker, max(1, current.num_lanes), start.num_workers):
            dataset = copy.deepcopy(current.dataset) if lanes else current.dataset
            lanes[number] = Lane(current, number, dataset, current.resumed.get(number))
            open_lane(number, current.shared_seed, 0)
    except Exception:
        failure = wrapped(start.worker)
        answer(OPENED, 0, start.worker, start.worker, failure)
    while True:
        try:
            message = start.tasks.recv_bytes()
        except (EOFError, OSError):
            return
        if not message:
            return
        kind, generation, lane, task, sent, returned = pickle.loads(message)
        for offset in returned:
            region.take_back(offset)
        if header.get(Header.STOP):
            return
        if failure is not None:
            continue  # the parent has been told
        if kind == RANDOM:
            switch(lane)
            set_random_state(pickle.loads(sent))
            draws[lane].since()
            continue
        if kind == MARK:
            marked = {number: randoms[number] if number != running else random_state() for number in lanes}
            continue
        if kind in (RESET, BACK):
            for number in lanes:
                if kind == BACK:
                    switch(number)
                    set_random_state(marked[number])
                    draws[number].since()
                open_lane(number, pickle.loads(sent), generation)
            continue
        if generation < header.get(Header.GENERATION):
            continue
        if kind == SKIP:
            if lane not in broken:
                switch(lane)
                with contextlib.suppress(Exception):
                    lanes[lane].skip(pickle.loads(sent))
            continue
        if lane in broken:
            answer(ERROR, generation, lane, task, broken[lane])
            continue
        try:
            index = pickle.loads(sent)
        except Exception:
            answer(ERROR, generation, lane, task, wrapped(lane))
            continue
        switch(lane)
        kind, data, state = lanes[lane].answer(index)
        answer(kind, generation, lane, task, data, state, draws[lane].since())
        del data, index, sent, message
