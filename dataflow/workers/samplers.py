"""What decides the order of a sampler's indices, and the place in it.

A state does not hold indices. It holds what the sampler drew them from: a seed, the state of a generator, a
`DistributedSampler`'s epoch, or the sampler's own state where it has one. Resuming draws the same order again
and leaves out what was handed out, without touching the dataset.

In the same way the indices of the next epoch are predicted where `prefetch_across_epochs=True` asks for it,
so that persistent workers have work before anybody asks for that epoch: from copies of what decides them.
When the epoch is really begun, the sampler is asked as always, and the work that was done ahead counts only
if the indices are the same; else it is dropped and the workers' random generators go back to where they were.
So a wrong guess costs time, never a different value.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader as TorchDataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    _DatasetKind,
)

from dataflow.processes.generators import random_state, set_random_state
from dataflow.workers.worker import has_state

_MAX_PARTS = 8
"""Samplers inside samplers that are looked at."""
_CONSTANT_SAMPLERS = {
    kind.__qualname__
    for kind in (
        *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
        *(list, tuple, range),
    )
}
"""Those whose length is the same in every epoch."""
_DRAWN_AT_ONCE = {SequentialSampler, SubsetRandomSampler, WeightedRandomSampler}
"""Beside `RandomSampler` and `DistributedSampler`, those of torch's that draw all indices when they begin."""


class SamplerProgress:
    """The place of one epoch in a sampler's order.

    `marks` is the part of a state about that: {} where the epoch begins.
    """

    def __init__(self, marks: Mapping[str, Any] | None = None) -> None:
        self.marks: Mapping[str, Any] = marks or {}
        self._own: dict[str, Any] = {}
        """What decides the order of this epoch."""
        self._stateful: Any = None
        """The sampler, or its iterator, that tells its own state."""
        self._state: Any = None
        """That state where the batches handed out so far end."""
        self._state_name = "state"

    def iterator(
        self, sampler: Any, skip: int, chain: torch.Generator | None, begun: Iterator[Any] | None = None
    ) -> Iterator[Any]:
        """The sampler's indices behind the first `skip`; takes note of what decides them.

        Args:
            sampler: what the indices come from.
            skip: batches to leave out.
            chain: what seeds are drawn from in place of torch's global generator, if anything.
            begun: what `iter(sampler)` gave for this epoch; a second `iter` might draw a second time.
        """
        counting = [part for part in parts(sampler) if _counts_epochs(part)]
        if "epoch" in self.marks:
            for part in counting:
                part.set_epoch(int(self.marks["epoch"]))
        if self.marks:
            begun = None  # it began before what decides the order was set back
        iterator, skipped = self._iterator(sampler, skip, chain, begun)
        if counting:
            self._own["epoch"] = counting[0].epoch
            iterator = _Once(iterator, partial(self._note_epoch, counting[0]))
        return itertools.islice(iterator, skip - skipped, None) if skip > skipped else iterator

    def _note_epoch(self, part: Any, step: Callable[[], Any]) -> Any:
        self._own["epoch"] = part.epoch  # some training loops set it after `iter`, before `next`
        return step()

    def _iterator(
        self, sampler: Any, skip: int, chain: torch.Generator | None, begun: Iterator[Any] | None
    ) -> tuple[Iterator[Any], int]:
        """The iterator, and how many batches are left out already."""
        core, marks = _core(sampler), self.marks
        if "state" in marks or has_state(sampler) or has_state(core):
            self._stateful = sampler if has_state(sampler) else core
            if "state" in marks and has_state(self._stateful):
                self._stateful.load_state_dict(marks["state"])
            iterator: Any = iter(sampler) if begun is None else begun
            self._state = self._stateful.state_dict()
            return iterator, skip if "state" in marks else 0
        iterator = iter(sampler) if begun is None else begun
        if has_state(iterator):
            self._stateful, self._state_name = iterator, "iterator"
            if "iterator" in marks:
                iterator.load_state_dict(marks["iterator"])
            self._state = iterator.state_dict()
            return iterator, skip if "iterator" in marks else 0
        if type(core) is SequentialSampler and skip:
            first = skip * (sampler.batch_size if core is not sampler else 1)
            return _batched(sampler, range(first, len(core))), skip
        if type(core) is SequentialSampler or _is_distributed(core):
            return _Once(iterator), 0
        if type(core) is RandomSampler and core.generator is None:
            # The sampler draws its seed when it is first asked: drawn here instead, it can be told.
            self._own["seed"] = seed = int(marks["seed"]) if "seed" in marks else draw_seed(chain)
            return _batched(sampler, _random_copy(core, torch.Generator().manual_seed(seed))), 0
        return _Once(iterator, partial(self._note_random, _generator_of(sampler), chain)), 0

    def _note_random(
        self, generator: torch.Generator | None, chain: torch.Generator | None, step: Callable[[], Any]
    ) -> Any:
        """Take the first element of another sampler, from where the generators stood that it draws from."""
        before, marks = None, self.marks
        if generator is not None:
            if "generator" in marks:
                generator.set_state(marks["generator"])
            self._own["generator"] = generator.get_state()
        else:
            if "random" in marks or chain is not None:
                before = random_state()
            if "random" in marks:
                set_random_state(marks["random"])
            elif chain is not None:
                torch.set_rng_state(chain.get_state())
            self._own["random"] = random_state()
        try:
            return step()
        finally:
            if before is not None:
                if "random" not in marks and chain is not None:
                    chain.set_state(torch.get_rng_state())
                set_random_state(before)

    def sampled(self) -> Any:
        """The sampler's state after the index just taken; None without one."""
        return self._stateful.state_dict() if self._stateful is not None else None

    def delivered(self, state: Any) -> None:
        """The batch was handed out that `sampled` gave this state for."""
        if state is not None:
            self._state = state

    @property
    def has_state(self) -> bool:
        """Whether the sampler tells its own state."""
        return self._state is not None

    def own_marks(self, *, now: bool) -> dict[str, Any]:
        """The `marks` to go on from here. `now`: nothing was sampled beyond what was handed out."""
        if now and self._stateful is not None:
            self._state = copy.deepcopy(self._stateful.state_dict())
        return {**self._own, **({self._state_name: self._state} if self._state is not None else {})}


class _Once(Iterator[Any]):
    """The same items without a second `iter`, which begins Lightning's iterator for predictions anew.

    `first` takes the first one. No generator function: an error of the sampler would end it, and the sampler
    may go on.
    """

    def __init__(
        self, iterator: Iterator[Any], first: Callable[[Callable[[], Any]], Any] | None = None
    ) -> None:
        self._next, self._first = iterator.__next__, first

    def __next__(self) -> Any:
        first, self._first = self._first, None
        return self._next() if first is None else first(self._next)


def predicted_indices(sampler: Any, chain: torch.Generator | None, epoch_step: int) -> Iterator[Any] | None:
    """What `sampler` will yield in the next epoch if nothing else draws random numbers; None: unknown.

    Args:
        sampler: a torch sampler, or a `BatchSampler` over one.
        chain: what seeds are drawn from in place of torch's global generator, if anything.
        epoch_step: how a `DistributedSampler`'s epoch grows from one epoch to the next.
    """
    core = _core(sampler)
    if type(core) is SequentialSampler:
        return _batched(sampler, core)
    if type(core) is DistributedSampler:
        successor = copy.copy(core)
        successor.epoch = core.epoch + epoch_step
        return _batched(sampler, successor)
    if type(core) is RandomSampler:
        generator = torch.Generator()
        if core.generator is not None:
            generator.set_state(core.generator.get_state())
        else:
            source = torch.Generator()
            source.set_state(torch.get_rng_state() if chain is None else chain.get_state())
            generator.manual_seed(draw_seed(source))
        return _batched(sampler, _random_copy(core, generator))
    return None


def num_readable(sampler: Any) -> float:
    """Batches of an epoch that may be asked for early, with nobody seeing a difference.

    A sampler that draws while it is read, or that shares a generator, has to be read when torch would read
    it: what follows a loop that is left early depends on it. Those of torch's that draw everything when they
    begin may be read at any time; a `RandomSampler` with a generator of the caller's draws once more at its
    end.

    Args:
        sampler: what batches of indices come from.

    Returns: 0 where nothing may be read early, infinity where everything may.
    """
    core = _core(sampler)
    if type(core) is RandomSampler and core.generator is not None and not core.replacement:
        count = len(core.data_source)
        items = math.inf if core.num_samples < count else count
        return items // (1 if core is sampler else sampler.batch_size)
    if type(core) is RandomSampler:
        return 0 if core.replacement or core.num_samples > len(core.data_source) else math.inf
    return math.inf if type(core) in _DRAWN_AT_ONCE or _is_distributed(core) else 0


def _core(sampler: Any) -> Any:
    """What torch's own batch sampler takes its indices from; any other sampler itself."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def _batched(sampler: Any, indices: Iterable[Any]) -> Iterator[Any]:
    """What `sampler` makes of indices of its core: batches, or these."""
    if _core(sampler) is sampler:
        return iter(indices)
    return iter(BatchSampler(indices, sampler.batch_size, sampler.drop_last))


def _random_copy(core: RandomSampler, generator: torch.Generator) -> RandomSampler:
    return RandomSampler(core.data_source, core.replacement, core.num_samples, generator)


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed, as torch's loader and samplers draw it; None: from torch's global generator."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def draws_globally(sampler: Any) -> bool:
    """Whether the order of each epoch may come from torch's global generator."""
    core = _core(sampler)
    return (
        type(core) is not SequentialSampler and not _is_distributed(core) and _generator_of(sampler) is None
    )


def parts(sampler: Any) -> Iterator[Any]:
    """A sampler and what it takes its indices from: a batch sampler's sampler, a wrapper's batch sampler."""
    for _ in range(_MAX_PARTS):
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def _counts_epochs(sampler: Any) -> bool:
    return callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int)


def sampler_epoch(sampler: Any) -> int | None:
    """The epoch that a sampler, or one inside it, was set to; None: none counts epochs."""
    return next((part.epoch for part in parts(sampler) if _counts_epochs(part)), None)


@contextlib.contextmanager
def epochs_kept(sampler: Any) -> Iterator[None]:
    """A sampler counts the same epoch afterwards, whatever is done with it."""
    epochs = [(part, part.epoch) for part in parts(sampler) if _counts_epochs(part)]
    try:
        yield
    finally:
        for part, epoch in epochs:
            part.set_epoch(epoch)


def _generator_of(sampler: Any) -> torch.Generator | None:
    generators = (getattr(part, "generator", None) for part in parts(sampler))
    return next((generator for generator in generators if isinstance(generator, torch.Generator)), None)


def _is_distributed(sampler: Any) -> bool:
    """Whether its order is a function of its seed and epoch."""
    return getattr(type(sampler), "__iter__", None) is DistributedSampler.__iter__


def is_iterable(loader: TorchDataLoader[Any]) -> bool:
    """Whether the dataset is iterated over; else it is indexed."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


def identity(loader: TorchDataLoader[Any]) -> dict[str, Any]:
    """What decides which samples a place in an epoch means, as part of a state.

    Lengths of samplers are compared where they are known to be the same in every epoch.
    """
    if is_iterable(loader):
        unused: dict[str, Any] = {"length": None, "sampler_kind": None, "sampler_length": None}
        return {"kind": "iterable", "batch_size": loader.batch_size, **unused}
    sampler: Any = loader._index_sampler
    chain = list(parts(sampler))
    batched = type(sampler).__qualname__ == BatchSampler.__qualname__  # torchdata puts its own in its place
    core = chain[1] if batched and len(chain) > 1 else sampler
    return {
        "kind": "map",
        "batch_size": sampler.batch_size if batched else None,
        "length": _length(loader.dataset),
        "sampler_kind": " of ".join(type(part).__qualname__ for part in chain),
        "sampler_length": _length(core) if type(core).__qualname__ in _CONSTANT_SAMPLERS else None,
    }


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None
