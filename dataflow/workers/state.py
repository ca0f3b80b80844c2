"""The state of a loader over a map-style or iterable dataset, as a JSON value and back.

Kept are: how many batches of the epoch were handed out; what decided their order (see `samplers`); and for
datasets or iterators with a `state_dict`, their state on each worker. Nothing of what was merely prefetched
is in it. An iterable without a state is read again up to the position.

One class is both what an iterator writes while it delivers, and what a loaded state says until an iterator
goes on from it. In a state's JSON, workers are called lanes.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import itertools
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from dataflow.workers.samplers import (
    SamplerProgress,
    draw_seed,
    draws_globally,
    epochs_kept,
    identity,
    is_iterable,
    restore_between,
    tokens_between,
)
from dataflow.workers.worker import WorkerState

VERSION = 5
_TAG = "__dataflow__"
_TOKENS = frozenset(("begun", "draws", "epoch", "iterator", "now", "order", "seed", "state"))
"""The names of what `SamplerProgress` tells of the order."""


@dataclass(kw_only=True)
class WorkerProgress:
    """The position of a worker in the epoch."""

    batches: int = 0
    """Number of batches delivered in this epoch."""
    since: int = 0
    """Number of those delivered after `state` was taken."""
    state: WorkerState = field(default_factory=WorkerState)
    random: Any = None
    """State of the worker's global generators after the last batch, if the batches draw from them."""
    at_end: tuple[WorkerState | None, Any] | None = None
    """State and generators when the iterable had ended: what the next epoch begins with."""

    @property
    def has_state(self) -> bool:
        """Return whether a dataset, an iterator or generators that were drawn from have a state here."""
        return any(x is not None for x in (self.state.dataset, self.state.iterator, self.random))

    def at_next_epoch(self) -> WorkerProgress:
        """Return what outlives the epoch."""
        return WorkerProgress(state=WorkerState(self.state.dataset), random=self.random)

    def fields(self) -> dict[str, Any]:
        """Return it as part of a state, to be encoded."""
        return {
            "batches": self.batches,
            "since": self.since,
            "dataset": self.state.dataset,
            "iterator": self.state.iterator,
            "ended": self.state.ended,
            "random": self.random,
        }

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> WorkerProgress:
        """Return the inverse of `fields`."""
        return cls(
            batches=_count(value, "batches"),
            since=_count(value, "since"),
            state=WorkerState(value["dataset"], value["iterator"], _checked(value, "ended", bool)),
            random=value["random"],
        )


@dataclass(kw_only=True)
class EpochProgress:
    """The part of an epoch that has been delivered."""

    epoch: int = -1
    """Epoch of the loop begun last, as loops and `set_epoch` count; -1: none was."""
    named: int | None = None
    """Epoch that `set_epoch` names for the next loop."""
    complete: bool = True
    """No epoch is under way: the next loop begins one."""
    persistent: bool = False
    """True if workers outlive epochs: nothing is seeded anew."""
    batches: int = 0
    """Number of batches delivered without a gap."""
    ahead: set[int] = field(default_factory=set)
    """Numbers of batches delivered beyond those."""
    base_seed: int = 0
    turn: int = 0
    """Epochs that were begun with this base seed before."""
    num_workers: int = 0
    next_worker: int = 0
    generator: Any = None
    """State of the loader's `generator` where the epoch began."""
    chain: torch.Generator | None = None
    """After resuming: what seeds are drawn from, in place of torch's global generator."""
    sampler: SamplerProgress = field(default_factory=SamplerProgress)
    workers: dict[int, WorkerProgress] = field(default_factory=dict)
    loaded: Mapping[str, Any] | None = None
    """The JSON value that all this comes from, until an iterator goes on from it."""
    nothing_yet: bool = False
    """The rest of a loaded epoch was begun, and no batch of it was handed out yet."""
    look: Callable[[], list[WorkerState | None]] | None = None
    """Takes the states of all workers now, or [], where nothing runs ahead of what was delivered."""

    # ---- beginning an epoch --------------------------------------------------------------------

    @property
    def following(self) -> int:
        """The epoch after this one."""
        return self.epoch + 1 if self.named is None else self.named

    def left(self, loader: TorchDataLoader[Any]) -> EpochProgress:
        """Return what follows this loaded epoch without the rest of it: as if that had been delivered.

        The sampler is run to its end where it has one, as what it draws from decides the next epoch's order;
        one without a length is left where the state was taken.
        """
        rest = replace(self.begun(loader), nothing_yet=False, turn=self.turn)
        if loader.generator is not None and not (self.persistent and self.turn):
            draw_seed(loader.generator)  # that of the workers, which comes before the order
        if not is_iterable(loader):
            sampler: Any = loader._index_sampler
            with epochs_kept(sampler), contextlib.suppress(TypeError, NotImplementedError):
                count = max(0, len(sampler) - self.batches)
                deque(itertools.islice(rest.sampler_iterator(loader), count + 1), maxlen=0)
        else:  # an iterable's own state is a position in the epoch that is left
            rest.workers = {}
        rest.begin_workers(max(1, rest.num_workers))
        rest.end()
        return progress_from(rest.to_json(loader), loader)

    def begun(self, loader: TorchDataLoader[Any]) -> EpochProgress:
        """The epoch after this one, or the rest of this one if it was loaded.

        Sets the loader's generator back to where that epoch began.
        """
        progress = EpochProgress(complete=False, chain=self.chain, epoch=self.following)
        if self.loaded is not None:
            progress = replace(
                self,
                epoch=self.following if self.complete else self.epoch,
                named=None,
                complete=False,
                nothing_yet=not self.complete and self.batches > 0,
                persistent=False,
                ahead=set(self.ahead),
                turn=0,
                sampler=SamplerProgress(
                    {} if self.complete else copy.deepcopy(self.sampler.tokens),
                    is_restored=self.complete and "state" in self.sampler.tokens,
                ),
                workers={number: replace(worker) for number, worker in self.workers.items()},
                loaded=None,
            )
            if not self.complete:
                self.restore_generator(loader)
        progress.generator = loader.generator.get_state() if loader.generator is not None else None
        return progress

    def restore_generator(self, loader: TorchDataLoader[Any]) -> None:
        """Set the loader's generator to where it stood when the epoch began, or between two epochs."""
        if self.generator is not None and loader.generator is not None:
            loader.generator.set_state(self.generator)

    def restore_between(self, loader: TorchDataLoader[Any]) -> None:
        """Set what a loaded state between two epochs tells of the loader's generator and sampler.

        When it is loaded: who seeds a generator for each epoch does so after that.
        """
        if self.complete:
            self.restore_generator(loader)
            if not is_iterable(loader):
                restore_between(loader._index_sampler, self.sampler.tokens)

    def begun_with_same_workers(self, loader: TorchDataLoader[Any]) -> EpochProgress:
        """The epoch after this one, of persistent workers, which go on with the seed that they have."""
        progress = self.begun(loader)
        progress.workers = {number: worker.at_next_epoch() for number, worker in self.workers.items()}
        progress.base_seed, progress.num_workers = self.base_seed, self.num_workers
        progress.turn = self.turn + 1
        return progress

    def seeded(self, loader: TorchDataLoader[Any], drawn: int, resumed: EpochProgress | None) -> int:
        """The seed of the workers: what the iterator has drawn, unless the epoch began elsewhere."""
        if resumed and (resumed.persistent or not resumed.complete):
            drawn = resumed.base_seed
            self.turn = resumed.turn + resumed.complete
            if resumed.complete:
                self.restore_generator(loader)
        self.base_seed = drawn
        self.num_workers = loader.num_workers
        if resumed:  # another number of workers would draw other random values
            goes_on = loader.num_workers > 0 and resumed.num_workers > 0 and not resumed.complete
            self.num_workers = resumed.num_workers if resumed.workers or goes_on else loader.num_workers
        return drawn

    def sampler_iterator(
        self, loader: TorchDataLoader[Any], begun: Iterator[Any] | None = None
    ) -> Iterator[Any]:
        """The sampler's indices of what was not delivered; `begun`: as for `SamplerProgress.iterator`."""
        sampler: Any = loader._index_sampler
        if is_iterable(loader):
            return iter(sampler)
        iterator = self.sampler.iterator(sampler, self.batches, self._handed_out, self.chain, begun)
        if not self.ahead:
            return iterator
        ahead = frozenset(self.ahead)
        return (index for number, index in enumerate(iterator, self.batches) if number not in ahead)

    @property
    def _handed_out(self) -> int:
        """Batches up to the last that was handed out, those between that were not included."""
        return max(self.ahead, default=self.batches - 1) + 1

    # ---- what iterators tell -------------------------------------------------------------------

    def begin_workers(self, count: int) -> None:
        """The epoch has so many workers; 1 without any."""
        for number in range(count):
            self.workers.setdefault(number, WorkerProgress())

    def worker_opened(self, worker: int, state: WorkerState | None) -> None:
        """Take what a worker tells before its first batch."""
        if state is not None and not self.workers[worker].batches:
            self.workers[worker].state = state

    def worker_ended(self, worker: int, state: WorkerState | None, random: Any) -> None:
        """A worker's iterable is exhausted. Its last batches may not be out yet."""
        self.workers[worker].at_end = (state, random)

    def delivered(
        self,
        worker: int,
        state: WorkerState | None = None,
        random: Any = None,
        sampled: Any = None,
        number: int | None = None,
    ) -> None:
        """One more batch, or an error in its place, was handed out."""
        self.nothing_yet = False
        if number is None:
            number = self.batches
        if number == self.batches:
            self.batches += 1
        else:
            self.ahead.add(number)
        while self.batches in self.ahead:
            self.ahead.remove(self.batches)
            self.batches += 1
        progress = self.workers[worker]
        progress.batches += 1
        progress.since += 1
        if state is not None:
            progress.state, progress.since = state, 0
        if random is not None:
            progress.random = random
        self.sampler.delivered(sampled, number, self.batches)
        self.next_worker = (worker + 1) % len(self.workers)

    def end(self) -> None:
        """The epoch was handed out to its end."""
        if self.nothing_yet:
            self.nothing_yet = False
            warnings.warn(
                "this loop had no batch: the loaded state was taken in the loop, after the last batch of "
                f"epoch {self.epoch}. The next loop runs the next epoch. Take states behind the loop, "
                "or say which epoch comes: loader.set_epoch(...)",
                stacklevel=5,
            )
        self.complete = True
        for worker in self.workers.values():
            if worker.at_end is not None:
                worker.state = worker.at_end[0] or worker.state
                worker.random = worker.at_end[1] or worker.random

    # ---- as JSON -------------------------------------------------------------------------------

    def to_json(self, loader: TorchDataLoader[Any]) -> dict[str, Any]:
        """Return the state as a JSON value."""
        if self.loaded is not None:
            epoch = self.following if self.complete else self.epoch
            return {**copy.deepcopy(dict(self.loaded)), "epoch": epoch}
        generator, chain = self.generator, None
        if self.complete:
            generator = loader.generator.get_state() if loader.generator is not None else None
        if self._draws_globally(loader):
            chain = torch.get_rng_state() if self.chain is None else self.chain.get_state()
        if self.complete:
            tokens = {} if is_iterable(loader) else tokens_between(loader._index_sampler)
        else:
            tokens = self.sampler.own_tokens(self._handed_out, now=self.look is not None)
        if self.look is not None:
            for worker, state in zip(self.workers.values(), self.look(), strict=False):
                if state is not None:
                    worker.state, worker.since = state, 0
        return {
            "version": VERSION,
            **identity(loader),
            "epoch": self.following if self.complete else self.epoch,
            "complete": self.complete,
            "persistent": bool(loader.persistent_workers and self.workers),
            "generator": encoded(generator),
            "chain": encoded(chain),
            "batches": 0 if self.complete else self.batches,
            "ahead": [] if self.complete else sorted(self.ahead),
            "base_seed": self.base_seed,
            "turn": self.turn,
            "num_lanes": self.num_workers,
            "next_lane": 0 if self.complete else self.next_worker,
            "sampler": encoded(dict(tokens)),
            "lanes": encoded([worker.fields() for worker in self._workers_to_tell(loader)]),
        }

    def _workers_to_tell(self, loader: TorchDataLoader[Any]) -> list[WorkerProgress]:
        workers = list(self.workers.values())
        stateful = any(worker.has_state for worker in workers)
        if not self.complete:
            return workers if is_iterable(loader) or stateful else []
        # What outlives the epoch: the dataset in this process or in persistent workers.
        persists = loader.num_workers == 0 or loader.persistent_workers
        return [worker.at_next_epoch() for worker in workers] if stateful and persists else []

    def _draws_globally(self, loader: TorchDataLoader[Any]) -> bool:
        """Return whether seeds of later epochs come from torch's global generator."""
        if loader.generator is not None:
            return False
        if loader.num_workers:  # the seeds of workers
            return True
        if is_iterable(loader) or self.sampler.has_state:
            return False
        return draws_globally(loader._index_sampler)


def progress_from(state: Mapping[str, Any], loader: TorchDataLoader[Any]) -> EpochProgress:
    """Return what a state says.

    Args:
        state: its fields, without the checksum.
        loader: that it is for.

    Raises:
        ValueError: it is no state of such a loader.
    """
    here = identity(loader)
    if state.get("version") != VERSION:
        raise ValueError(f"not a state of this kind of DataLoader (version {VERSION}): {str(state)[:200]}")
    if wrong := EpochProgress().to_json(loader).keys() ^ state.keys():
        raise ValueError(f"the state lacks or has too many fields: {', '.join(sorted(map(str, wrong)))}")
    differing = [name for name, value in here.items() if state[name] != value]
    # Where nothing was handed out, nothing stands anywhere in an order: any may begin with the same seed.
    is_between = state["complete"] is True or (state["batches"], state["ahead"]) == (0, [])
    if differing and ("kind" in differing or not is_between):
        raise ValueError(_told_difference(state, here, differing[0]))
    try:
        progress = _checked_progress(state)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"the state is damaged: {error!r}") from error
    if "sampler_kind" in differing:  # what another sampler drew from says nothing to this one
        progress.sampler = SamplerProgress()
    return progress


_CURES = {
    "batch_size": "batch_size={}",
    "length": "a dataset of the {} samples that it had (such as a torch.utils.data.Subset of this one)",
    "sampler_length": "a sampler of {} samples (of a DistributedSampler: the number of ranks that it had)",
}


def _told_difference(state: Mapping[str, Any], here: Mapping[str, Any], name: str) -> str:
    """The one cause for which a position means nothing here, and the ways on."""
    cure = _CURES.get(name, f"the {name} that it had").format(state[name])
    return (
        f"the state was taken with {name}={state[name]!r}, and this loader has {name}={here[name]!r}: its "
        f"position means other samples here. To go on inside the epoch, give {cure}; else begin anew, "
        "without the state. Taken between two epochs, it is one for any length, batches and sampler"
    )


def _checked_progress(loaded: Mapping[str, Any]) -> EpochProgress:
    state = {name: decoded(value) for name, value in loaded.items()}
    chain = None if state["chain"] is None else _chain_from(state)
    batches, num_workers = _count(state, "batches"), _count(state, "num_lanes")
    next_worker, ahead = _count(state, "next_lane"), _checked(state, "ahead", list)
    workers = _checked(state, "lanes", list)
    if next_worker >= max(1, num_workers) or len(workers) not in (0, max(1, num_workers)):
        raise ValueError(
            f"the state is damaged: {len(workers)} of {num_workers} lanes, lane {next_worker} is next"
        )
    if any(type(number) is not int or number <= batches for number in ahead):
        raise ValueError(f"the state is damaged: batches {ahead} were delivered ahead of {batches}")
    complete, sampler = _checked(state, "complete", bool), _checked(state, "sampler", dict)
    if complete and (batches or next_worker or ahead or sampler.keys() - {"draws", "state"}):
        raise ValueError("the state is damaged: it is of no epoch, and has a position in one")
    if unknown := sampler.keys() - _TOKENS:
        raise ValueError(f"the state is damaged: its sampler has unknown fields {unknown}")
    for name in sampler.keys() & {"seed", "epoch"}:
        _count(sampler, name)
    if batches and not sampler and not str(state["sampler_kind"]).endswith(("None", "SequentialSampler")):
        raise ValueError("the state is damaged: it lacks what decided the sampler's order")
    return EpochProgress(
        epoch=_count(state, "epoch") - complete,
        complete=complete,
        persistent=_checked(state, "persistent", bool),
        batches=batches,
        ahead=set(ahead),
        base_seed=_count(state, "base_seed"),
        turn=_count(state, "turn"),
        num_workers=num_workers,
        next_worker=next_worker,
        generator=state["generator"],
        chain=chain,
        sampler=SamplerProgress(sampler),
        workers={number: WorkerProgress.of(value) for number, value in enumerate(workers)},
        loaded=loaded,
    )


_OF_A_LOADER = ("kind", "batch_size", "length", "sampler_kind", "sampler_length", "base_seed")


class _SeedChain(torch.Generator):
    """A generator that can be referred to weakly: in older releases, its own class cannot."""


_chains: weakref.WeakKeyDictionary[_SeedChain, set[str]] = weakref.WeakKeyDictionary()
"""The states of torch's global generator that go on, with the loaders that draw from it."""


def _chain_from(state: Mapping[str, Any]) -> torch.Generator:
    """Return what seeds are drawn from after this state.

    Two loaders in a cycle draw from the global generator by turns. Where their states were taken at one time,
    these have the same bytes of it: they go on by turns, too, until one has drawn. A state that is loaded
    twice, or another one of the same loader, goes on by itself.
    """
    loader = str([*(state[name] for name in _OF_A_LOADER), state["sampler"].get("seed")])
    for chain, loaders in [*_chains.items()]:
        if loader not in loaders and torch.equal(chain.get_state(), state["chain"]):
            break
    else:
        chain, loaders = _SeedChain(), set()
        chain.set_state(state["chain"])
        _chains[chain] = loaders
    loaders.add(loader)
    return chain


def _checked(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields[name]
    if type(value) is not kind:
        raise ValueError(f"the state is damaged: {name} must be a {kind.__name__}, got {str(value)[:200]}")
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value: int = _checked(fields, name, int)
    if value < 0:
        raise ValueError(f"the state is damaged: {name} must be >= 0, got {value}")
    return value


def encoded(value: Any) -> Any:
    """A JSON value of scalars and lists for tensors, arrays, bytes, tuples and mappings.

    Mappings become lists of pairs because of torch.distributed.checkpoint, which keeps each value of a
    mapping by itself, and loads those whose keys the loader's state has before it is loaded. What JSON and
    this function do not know is left as it is: such a state is for `torch.save`.
    """
    if isinstance(value, torch.Tensor):
        return [_TAG, "tensor", encoded(value.detach().cpu().numpy())]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return [_TAG, "array", [value.dtype.str, list(value.shape), data]]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return [_TAG, "bytes", base64.b64encode(value).decode()]
    if type(value) in (dict, OrderedDict):
        return [_TAG, "dict", [[encoded(key), encoded(item)] for key, item in value.items()]]
    if type(value) not in (tuple, list):
        return value
    items = [encoded(item) for item in value]
    if type(value) is list and items[:1] != [_TAG]:
        return items
    return [_TAG, type(value).__name__, items]


def decoded(value: Any) -> Any:
    """Return the inverse of `encoded`."""
    if type(value) is not list:
        return value
    if value[:1] != [_TAG]:
        return [decoded(item) for item in value]
    _, tag, held = value
    if tag == "tensor":
        return torch.from_numpy(decoded(held))
    if tag == "array":
        dtype, shape, data = held
        return np.frombuffer(bytearray(base64.b64decode(data)), np.dtype(dtype)).reshape(shape)
    if tag == "bytes":
        return base64.b64decode(held)
    if tag == "dict":
        return {decoded(key): decoded(item) for key, item in held}
    if tag not in ("tuple", "list"):
        raise TypeError(f"{tag!r} names no kind of value")
    items = [decoded(item) for item in held]
    return tuple(items) if tag == "tuple" else items
