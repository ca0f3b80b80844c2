"""What a worker process does: fetch batches of a dataset and hand them over in shared memory.

A worker serves one or more *lanes*. Lane k of n is what PyTorch calls worker k of n: it has its own copy of
the dataset, its own `get_worker_info()`, its own random state, and takes every n-th batch. There are as many
lanes as workers, unless a state is resumed that was taken with another number of workers: then the
lanes of the state go on, on the processes there are.
"""

from __future__ import annotations

import _random
import contextlib
import copy
import ctypes
import os
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import collate, signal_handling
from torch.utils.data._utils import worker as torch_worker

from dataflow.payload import Buffer, Packed, pack, unpack
from prefetch.shared_arena import Header, Region, read_message
from prefetch.workers import Answer, WorkerStart, begin

BATCH, ERROR, END, OPENED = range(4)
"""Kinds of answers. END: the lane's iterable has no more. OPENED: the lane stands at its beginning."""

TASK, SKIP, RANDOM, MARK, RESET, BACK = range(6)
"""Kinds of messages to a worker: fetch a batch; fetch one and drop it; set the generators; remember them;
begin the next epoch; do so with the generators that were remembered."""

_STATE_BYTES = 625 * 4
"""MT19937: 624 words and the place in them."""
_DIRECT_BYTES = 32 << 10
"""Tensors of at least this size are collated in shared memory at once; smaller ones are copied together."""


@dataclass
class Job:
    """What all workers of a loader need to know."""

    kind: int
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    init_fn: Callable[[int], Any] | None
    base_seed: int
    num_lanes: int
    """As `get_worker_info().num_workers` tells; 0: fetching as if there were no workers."""
    shared_seed: int | None = None
    collate_map: Mapping[Any, Any] = field(default_factory=dict)
    """What the parent has registered with torch's `default_collate`."""
    default_dtype: torch.dtype = torch.float32
    state_every: int = 0
    """Ship the state of the dataset with every so many batches; 0: never."""
    announce: bool = False
    """Tell when a lane is open, with its state or what went wrong."""
    resumed: Mapping[int, LaneState] = field(default_factory=dict)


@dataclass
class LaneState:
    """Where a lane stands, for a dataset or an iterator that tells its own state."""

    dataset: Any = None
    iterator: Any = None
    ended: bool = False
    """The iterable was exhausted while its last batch was made."""


def collate_map_changes() -> dict[Any, Any]:
    """What was registered with `default_collate` beside what torch registers itself."""
    own = (collate.__name__, __name__)  # in a worker, ours is registered
    return {
        kind: function
        for kind, function in collate.default_collate_fn_map.items()
        if getattr(function, "__module__", None) not in own
    }


def seed_all(base_seed: int, lane: int) -> None:
    """Seed the global generators as PyTorch seeds worker `lane`."""
    random.seed(base_seed + lane)
    torch.manual_seed(base_seed + lane)
    np.random.seed(torch_worker._generate_state(base_seed, lane))


def has_state(thing: Any) -> bool:
    """Whether a dataset, iterator or sampler follows the `state_dict` protocol."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class Lane:
    """One lane's dataset and the place in it."""

    def __init__(self, job: Job, number: int, dataset: Any, state: LaneState | None) -> None:
        self._job, self._number = job, number
        self._dataset: Any = dataset
        self._fetcher: Any = None
        self._shared_rng = torch.Generator()
        self._since_state = 0
        self._ended = self._initialised = False
        self.where = f"in DataLoader worker process {number}"
        self.info: Any = None
        if job.num_lanes:
            self.info = torch_worker.WorkerInfo(
                id=number, num_workers=job.num_lanes, seed=job.base_seed + number, dataset=dataset
            )
        self._resumed = state

    def open(self, shared_seed: int | None) -> None:
        """Begin an epoch."""
        self._ended, self._since_state = False, 0
        if isinstance(self._dataset, torch.utils.data.IterDataPipe) and shared_seed is not None:
            self._shared_rng.manual_seed(shared_seed)
            graph = torch.utils.data.graph_settings
            self._dataset = graph.apply_random_seed(self._dataset, self._shared_rng)
        if not self._initialised and self._job.init_fn is not None:
            self._job.init_fn(self._number)
        self._initialised = True
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.dataset is not None:
            self._dataset.load_state_dict(resumed.dataset)
        job = self._job
        self._fetcher = _DatasetKind.create_fetcher(
            job.kind, self._dataset, job.auto_collation, job.collate_fn, job.drop_last
        )
        if resumed is not None:
            self._resume(resumed)

    def _resume(self, state: LaneState) -> None:
        iterator: Any = getattr(self._fetcher, "dataset_iter", None)
        self._ended = state.ended
        if state.iterator is not None and has_state(iterator):
            iterator.load_state_dict(state.iterator)

    def skip(self, index: Any) -> None:
        """Fetch a batch that was delivered before, and drop it, with the error that it may have been."""
        with contextlib.suppress(Exception):
            self._fetcher.fetch(index)

    def fetch(self, index: Any) -> Any:
        """The next batch. `StopIteration` at the end of an iterable."""
        if self._ended:
            raise StopIteration
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            self._ended = self._job.kind == _DatasetKind.Iterable
            raise

    def answer(self, index: Any) -> tuple[int, Any, LaneState | None]:
        """The next batch as kind of answer, batch or error, and the state if it is its turn."""
        try:
            try:
                data = self.fetch(index)
            except StopIteration:
                if self._job.kind != _DatasetKind.Iterable:
                    raise
                return END, None, self.snapshot() if self._job.state_every else None
            return BATCH, data, self.state()
        except Exception:
            return ERROR, ExceptionWrapper(where=self.where), None

    def state(self) -> LaneState | None:
        """Where the lane stands after the batch just fetched; None when it is not its turn to tell."""
        self._since_state += 1
        if not self._job.state_every or self._since_state < self._job.state_every:
            return None
        self._since_state = 0
        return self.snapshot()

    def snapshot(self) -> LaneState | None:
        """Where the lane stands now; None if neither dataset nor iterator tells."""
        iterator: Any = getattr(self._fetcher, "dataset_iter", None)
        ended = bool(getattr(self._fetcher, "ended", False))
        if iterator is self._dataset and has_state(iterator):
            return LaneState(iterator=iterator.state_dict(), ended=ended)
        dataset = self._dataset.state_dict() if has_state(self._dataset) else None
        if has_state(iterator):
            return LaneState(dataset, iterator.state_dict(), ended)
        return LaneState(dataset, ended=ended) if dataset is not None else None


def random_state() -> Any:
    """The state of the three global generators."""
    return random.getstate(), torch.get_rng_state(), np.random.get_state()


def set_random_state(state: Any) -> None:
    """Set the three global generators."""
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    np.random.set_state(state[2])


def _address_of_python_state() -> int | None:
    """Where CPython keeps the state of `random`, behind the head of the object; None if not found there."""
    address = id(random._inst) + object.__basicsize__
    if (
        sys.implementation.name != "cpython"
        or _random.Random.__basicsize__ < object.__basicsize__ + _STATE_BYTES
    ):
        return None
    place, *words = np.frombuffer(ctypes.string_at(address, _STATE_BYTES), np.uint32).tolist()
    return address if (*words, place) == random.getstate()[1] else None


def copied_random_state(state: Any) -> Any:
    """The same with arrays of its own."""
    kind, words, *rest = state[2]
    return state[0], state[1].clone(), (kind, words.copy(), *rest)


class Draws:
    """Notices whether anything was drawn from the three global generators.

    The states of numpy and of `random` are looked at where they lie: asking for them takes as long as
    handing over a small batch.
    """

    def __init__(self) -> None:
        generator = np.random.mtrand._rand._bit_generator
        self._numpy_at: int = generator.ctypes.state_address
        self._python_at = _address_of_python_state()
        self._words, self._pair = b"", False
        self._last = self._look()

    def _look(self) -> Any:
        words = ctypes.string_at(self._numpy_at, _STATE_BYTES)
        # Normal numbers are made in pairs, and handing out the second changes no word.
        if words != self._words or self._pair:
            self._pair = bool(np.random.get_state(legacy=False)["has_gauss"])
        self._words = words
        return words, self._pair, torch.get_rng_state().numpy().tobytes(), self._look_at_python()

    def _look_at_python(self) -> Any:
        if self._python_at is None:
            return random.getstate()
        return ctypes.string_at(self._python_at, _STATE_BYTES), random._inst.gauss_next  # type: ignore[attr-defined]

    def since(self) -> Any:
        """The state of the generators if anything was drawn since the last call, else None."""
        before, self._last = self._last, self._look()
        return None if self._last == before else random_state()


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
