"""Where a loader over a map-style or iterable dataset stands, as a JSON value.

Kept are: how many batches of the epoch were handed out; what decided their order (the seed or state of the
generator that the sampler began with, the sampler's own state where it has one, a `DistributedSampler`'s
epoch); and for datasets or iterators with a `state_dict`, their state on each lane. Nothing of what was
merely prefetched is in it. Resuming draws the same order again and leaves out what was handed out,
without touching the dataset; an iterable without a state is read again up to the place.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    _DatasetKind,
)

from dataflow.workers.json_values import decoded, encoded
from dataflow.workers.lane import LaneState, has_state
from dataflow.workers.random_state import random_state, set_random_state
from dataflow.workers.resumed import VERSION, Resumed, ResumedLane
from dataflow.workers.settings import WorkerLoader

_MAX_PARTS = 8
"""Samplers inside samplers that are looked at."""
_CONSTANT_SAMPLERS = {
    kind.__qualname__
    for kind in (
        *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
        *(list, tuple, range),
    )
}


class Progress:
    """What has been delivered of an epoch. Written by the iterator, read by `state_dict`."""

    def __init__(self) -> None:
        self.batches = 0
        self._ahead: set[int] = set()
        self.complete = True
        """No epoch is under way: the next loop begins one."""
        self.base_seed = 0
        self.num_lanes = 0
        self.turn = 0
        """Epochs that were begun with this base seed before."""
        self._generator: Any = None
        self.chain: torch.Generator | None = None
        """After resuming: what seeds are drawn from, in place of torch's global generator."""
        self._mark: dict[str, Any] = {}
        self._sampler_state: Any = None
        self._stateful: Any = None
        self._order: Any = None
        self.next_lane = 0
        self.lanes: dict[int, ResumedLane] = {}
        self._loaded: Mapping[str, Any] | None = None
        self.live = False
        """Nothing runs ahead of what was delivered."""
        self.look: Callable[[], list[LaneState | None]] | None = None
        """Takes the states of all lanes now."""

    @classmethod
    def begin(cls, loader: WorkerLoader, resumed: Resumed | None, before: Progress | None = None) -> Progress:
        """An epoch that begins, or goes on. Sets generators back to where the epoch began.

        `before`: the epoch whose workers go on, with the seed that they have.
        """
        made = cls()
        if before is not None:
            made.lanes = {
                number: ResumedLane(state=LaneState(lane.state.dataset), random=lane.random)
                for number, lane in before.lanes.items()
            }
            made.base_seed, made.num_lanes, made.turn = before.base_seed, before.num_lanes, before.turn + 1
        made.complete = False
        made.chain = loader._chain
        if resumed:
            made.batches = resumed.batches
            made.lanes = dict(resumed.lanes)
            made.next_lane = resumed.next_lane
            made._ahead = set(resumed.ahead)
            if resumed.generator is not None and loader.generator is not None:
                loader.generator.set_state(resumed.generator)
        if loader.generator is not None:
            made._generator = loader.generator.get_state()
        return made

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> Progress:
        """What a state that was loaded, and not yet used, tells."""
        made = cls()
        made._loaded = state
        return made

    def seeded(self, loader: WorkerLoader, drawn: int, num_lanes: int, resumed: Resumed | None) -> int:
        """The seed of the workers: what the iterator has drawn, unless the epoch began elsewhere."""
        if resumed and (resumed.persistent or not resumed.complete):
            drawn = resumed.base_seed
            self.turn = resumed.turn + resumed.complete
            if resumed.complete and loader.generator is not None and resumed.generator is not None:
                loader.generator.set_state(resumed.generator)
        elif self.chain is not None:
            drawn = _draw(self.chain)
        self.base_seed, self.num_lanes = drawn, num_lanes
        return drawn

    # ---- the sampler ---------------------------------------------------------------------------

    def sampler_iterator(self, loader: WorkerLoader, resumed: Resumed | None, skip: int) -> Iterator[Any]:
        """The sampler's indices, from the place on, taking note of what decides them.

        `skip`: batches that were delivered.
        """
        sampler: Any = loader._index_sampler
        core = sampler.sampler if type(sampler) is BatchSampler else sampler
        if is_iterable(loader):
            return iter(sampler)
        mark = resumed.sampler if resumed else {}
        iterator, skipped = self._iterator(sampler, core, mark, skip)
        if skip > skipped:
            iterator = itertools.islice(iterator, skip - skipped, None)
        if not self._ahead:
            return iterator
        ahead = frozenset(self._ahead)
        return (index for number, index in enumerate(iterator, skip) if number not in ahead)

    def _iterator(
        self, sampler: Any, core: Any, mark: Mapping[str, Any], skip: int
    ) -> tuple[Iterator[Any], int]:
        """The iterator, and how many batches are left out already."""
        counting = [part for part in _parts(sampler) if _counts_epochs(part)]
        if "epoch" in mark:
            for part in counting:
                part.set_epoch(int(mark["epoch"]))
        iterator, skipped = self._begun(sampler, core, mark, skip)
        if not counting:
            return iterator, skipped
        self._mark["epoch"] = counting[0].epoch
        return self._noting_epoch(iterator, counting[0]), skipped

    def _noting_epoch(self, iterator: Iterator[Any], counting: Any) -> Iterator[Any]:
        self._mark["epoch"] = counting.epoch  # some training loops set it after `iter`, before `next`
        yield from iterator

    def _begun(
        self, sampler: Any, core: Any, mark: Mapping[str, Any], skip: int
    ) -> tuple[Iterator[Any], int]:
        if "state" in mark or has_state(sampler) or has_state(core):
            owner = sampler if has_state(sampler) else core
            if "state" in mark and has_state(owner):
                owner.load_state_dict(decoded(mark["state"]))
            iterator = iter(sampler)
            self._stateful = owner
            self._sampler_state = owner.state_dict()
            return iterator, skip if "state" in mark else 0
        iterator = iter(sampler)
        if has_state(iterator):
            self._stateful = iterator
            if "iterator" in mark:
                iterator.load_state_dict(decoded(mark["iterator"]))
            self._sampler_state = iterator.state_dict()
            return iterator, skip if "iterator" in mark else 0
        iterator = _Once(iterator)
        if type(core) is SequentialSampler:
            if not skip:
                return iterator, 0
            rest = range(skip * (sampler.batch_size if core is not sampler else 1), len(core))
            if core is sampler:
                return iter(rest), skip
            return iter(BatchSampler(rest, sampler.batch_size, sampler.drop_last)), skip
        if _is_distributed(core):
            return iterator, 0
        if type(core) is RandomSampler and core.generator is None:
            # The sampler draws its seed when it is first asked: drawn here instead, it can be told.
            self._mark = {"seed": int(mark["seed"]) if "seed" in mark else _draw(self.chain)}
            again = RandomSampler(
                core.data_source,
                core.replacement,
                core.num_samples,
                torch.Generator().manual_seed(self._mark["seed"]),
            )
            if core is sampler:
                return iter(again), 0
            return iter(BatchSampler(again, sampler.batch_size, sampler.drop_last)), 0
        # No generator function: an error of the sampler would end it, and the sampler may go on.
        generator = _generator_of(sampler)
        steps = (lambda: self._first_noting_random(iterator, generator, mark), lambda: iterator)
        return itertools.chain.from_iterable(map(_called, steps)), 0

    def _first_noting_random(
        self, iterator: Iterator[Any], generator: torch.Generator | None, mark: Mapping[str, Any]
    ) -> Iterator[Any]:
        """The first element of other samplers, and the state of the generators that they may draw from."""
        before = None
        if generator is not None:
            if "generator" in mark:
                generator.set_state(decoded(mark["generator"]))
            self._mark["generator"] = generator.get_state()
        else:
            if "random" in mark or self.chain is not None:
                before = random_state()
            if "random" in mark:
                set_random_state(decoded(mark["random"]))
            elif self.chain is not None:
                torch.set_rng_state(self.chain.get_state())
            self._mark["random"] = random_state()
        try:
            first = list(itertools.islice(iterator, 1))
            if before is not None and "random" not in mark and self.chain is not None:
                self.chain.set_state(torch.get_rng_state())
        finally:
            if before is not None:
                set_random_state(before)
        return iter(first)

    def sampled(self) -> Any:
        """The sampler's state after the index just taken; None without one."""
        return self._stateful.state_dict() if self._stateful is not None else None

    # ---- lanes ---------------------------------------------------------------------------------

    def lanes_begin(self, order: Any) -> None:
        """The lanes of this epoch."""
        self._order = order
        for number in range(order.count):
            self.lanes.setdefault(number, ResumedLane())

    def lane_opened(self, lane: int, state: LaneState | None) -> None:
        """What a lane tells before its first batch."""
        if state is not None and not self.lanes[lane].batches:
            self.lanes[lane].state = state

    def lane_ended(self, lane: int, state: LaneState | None, random: Any) -> None:
        """A lane's iterable is exhausted. Its last batches may not be out yet."""
        self.lanes[lane].at_end = (state, random)

    def delivered(
        self,
        lane: int,
        state: LaneState | None = None,
        random: Any = None,
        sampled: Any = None,
        number: int | None = None,
    ) -> None:
        """One more batch, or an error in its place, was handed out."""
        if number is None or number == self.batches:
            self.batches += 1
        else:
            self._ahead.add(number)
        while self.batches in self._ahead:
            self._ahead.remove(self.batches)
            self.batches += 1
        there = self.lanes[lane]
        there.batches += 1
        there.since += 1
        if state is not None:
            there.state, there.since = state, 0
        if random is not None:
            there.random = random
        if sampled is not None:
            self._sampler_state = sampled
        self.next_lane = (lane + 1) % self._order.count

    def end(self) -> None:
        """The epoch was handed out to its end."""
        self.complete = True
        for lane in self.lanes.values():
            if lane.at_end is not None:
                lane.state = lane.at_end[0] or lane.state
                lane.random = lane.at_end[1] or lane.random

    # ---- as JSON -------------------------------------------------------------------------------

    def to_json(self, loader: WorkerLoader) -> dict[str, Any]:
        """The state."""
        if self._loaded is not None:
            return copy.deepcopy(dict(self._loaded))
        generator, chain = self._generator, None
        if self.complete:
            generator = loader.generator.get_state() if loader.generator is not None else None
        if self._draws(loader):
            chain = torch.get_rng_state() if self.chain is None else self.chain.get_state()
        mark = dict(self._mark)
        if self.live and self._stateful is not None:
            self._sampler_state = copy.deepcopy(self._stateful.state_dict())
        if self._sampler_state is not None:
            own = has_state(loader._index_sampler) or has_state(
                getattr(loader._index_sampler, "sampler", None)
            )
            mark["state" if own else "iterator"] = self._sampler_state
        state: dict[str, Any] = {
            "version": VERSION,
            **identity(loader),
            "complete": self.complete,
            "persistent": bool(loader.persistent_workers) and self._order is not None,
            "generator": encoded(generator),
            "chain": encoded(chain),
            "batches": 0 if self.complete else self.batches,
            "ahead": [] if self.complete else sorted(self._ahead),
            "base_seed": self.base_seed,
            "turn": self.turn,
            "num_lanes": self.num_lanes,
            "next_lane": 0 if self.complete else self.next_lane,
            "sampler": {} if self.complete else {name: encoded(value) for name, value in mark.items()},
            "lanes": [],
        }
        lanes = [self.lanes[number] for number in sorted(self.lanes)]
        if self.look is not None:
            for lane, now in zip(lanes, self.look(), strict=True):
                if now is not None:
                    lane.state, lane.since = now, 0
        stateful = any(lane.is_kept for lane in lanes)
        if self.complete:  # what outlives the epoch: the dataset in this process or in persistent workers
            if stateful and (loader.num_workers == 0 or loader.persistent_workers):
                lanes = [ResumedLane(0, 0, LaneState(x.state.dataset), x.random) for x in lanes]
                state["lanes"] = [lane.to_json() for lane in lanes]
        elif is_iterable(loader) or stateful:
            state["lanes"] = [lane.to_json() for lane in lanes]
        return state

    def _draws(self, loader: WorkerLoader) -> bool:
        """Whether seeds of later epochs come from torch's global generator."""
        if loader.generator is not None:
            return False
        if loader.num_workers:  # the seeds of workers
            return True
        if is_iterable(loader) or self._sampler_state is not None:
            return False
        sampler: Any = loader._index_sampler
        core = sampler.sampler if type(sampler) is BatchSampler else sampler
        known = type(core) is SequentialSampler or _is_distributed(core)
        return not known and _generator_of(sampler) is None


def is_iterable(loader: WorkerLoader) -> bool:
    """Whether the dataset is iterated over; else it is indexed."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


def identity(loader: WorkerLoader) -> dict[str, Any]:
    """What decides which samples a place in an epoch means, as part of a state.

    Lengths of samplers are compared where they are known to be the same in every epoch.
    """
    if is_iterable(loader):
        indexed: dict[str, Any] = {"length": None, "sampler_kind": None, "sampler_length": None}
        return {"kind": "iterable", "batch_size": loader.batch_size, **indexed}
    sampler: Any = loader._index_sampler
    parts = list(_parts(sampler))
    batched = type(sampler).__qualname__ == BatchSampler.__qualname__  # torchdata puts its own in its place
    core = parts[1] if batched and len(parts) > 1 else sampler
    return {
        "kind": "map",
        "batch_size": sampler.batch_size if batched else None,
        "length": _length(loader.dataset),
        "sampler_kind": " of ".join(type(part).__qualname__ for part in parts),
        "sampler_length": _length(core) if type(core).__qualname__ in _CONSTANT_SAMPLERS else None,
    }


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


class _Once(Iterator[Any]):
    """The same items without a second `iter`, which begins Lightning's iterator for predictions anew.

    No generator function: an error of the sampler would end it, and the sampler may go on.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._next = iterator.__next__

    def __next__(self) -> Any:
        return self._next()


def _parts(sampler: Any) -> Iterator[Any]:
    """A sampler and what it takes its indices from: a batch sampler's sampler, a wrapper's batch sampler."""
    for _ in range(_MAX_PARTS):
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def _counts_epochs(sampler: Any) -> bool:
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)


def _generator_of(sampler: Any) -> torch.Generator | None:
    found = (getattr(part, "generator", None) for part in _parts(sampler))
    return next((generator for generator in found if isinstance(generator, torch.Generator)), None)


def _is_distributed(sampler: Any) -> bool:
    """Whether its order is a function of its seed and epoch."""
    return getattr(type(sampler), "__iter__", None) is DistributedSampler.__iter__


def _called(step: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    return step()


def _draw(generator: torch.Generator | None) -> int:
    """A seed, as torch's loader and samplers draw it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
