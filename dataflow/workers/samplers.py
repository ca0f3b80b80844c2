"""Samplers' orders: what decides the order of the indices, and the position in it.

A state does not hold indices. It holds what the sampler drew them from: a seed, the state of a generator, a
`DistributedSampler`'s epoch, or the sampler's own state where it has one. Resuming draws the same order again
and leaves out what was handed out, without touching the dataset. Generators that a sampler holds under any
name are found. Where it draws from something else, another order comes: a checksum of what was handed out
tells so, with a warning.

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
import marshal
import math
import pickle
import random
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader as TorchDataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    _DatasetKind,
)

from dataflow.workers.worker import has_state
from prefetch.ipc.generators import random_state, set_random_state

_MAX_PARTS = 8
"""Samplers inside samplers that are looked at."""
_CONSTANT_SAMPLERS = {
    kind.__qualname__
    for kind in (
        *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
        *(list, tuple, range),
    )
}
"""Samplers whose length is the same in every epoch."""
_TAKE_A_GENERATOR = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}
"""Samplers of torch's that draw from their `generator`, or else from torch's global one."""
_DRAWN_AT_ONCE = {SequentialSampler, SubsetRandomSampler, WeightedRandomSampler}
"""Beside `RandomSampler` and `DistributedSampler`, those of torch's that draw all indices when they begin."""


class SamplerProgress:
    """The position of one epoch in a sampler's order.

    `tokens` is the part of a state about that: {} where the epoch begins.

    Args:
        tokens: of a state that was taken inside the epoch.
        is_restored: the sampler was set to a state of its own that was taken between two epochs.
    """

    def __init__(self, tokens: Mapping[str, Any] | None = None, *, is_restored: bool = False) -> None:
        self.tokens: Mapping[str, Any] = tokens or {}
        self._is_restored = is_restored
        self._epoch_tokens: dict[str, Any] = {}
        """The tokens that decide the order of this epoch."""
        self._sources: _Sources | None = None
        """The generators that the sampler may draw from, where these have to be told."""
        self._checksums: dict[int, int] | None = None
        """Checksums of the indices up to each batch, from the last that was handed out on."""
        self._stateful: Any = None
        """The sampler, or its iterator, that tells its own state."""
        self._state: Any = None
        """The sampler's state where the batches end that were handed out without a gap."""
        self._states: dict[int, Any] = {}
        """By number: the states behind batches that were handed out beyond those."""
        self._state_name = "state"
        self._draws_seed = False
        """True if the first index draws a seed, which a state from before it settles."""
        self._chain: torch.Generator | None = None

    def begin(self, sampler: Any) -> None:
        """Note where generators stand: the next `iter(sampler)` is that of this epoch, and may draw."""
        self._sources = _sources_of(sampler)
        if self._sources is not None:
            self._epoch_tokens["begun"] = self._sources.states()

    def iterator(
        self,
        sampler: Any,
        skip: int,
        handed_out: int,
        chain: torch.Generator | None,
        begun: Iterator[Any] | None = None,
    ) -> Iterator[Any]:
        """The sampler's indices behind the first `skip`; takes note of what decides them.

        Args:
            sampler: what the indices come from.
            skip: batches to leave out.
            handed_out: batches up to the last that was handed out; out of order, more than `skip`.
            chain: what seeds are drawn from in place of torch's global generator, if anything.
            begun: what `iter(sampler)` gave for this epoch; a second `iter` might draw a second time.
        """
        self._chain = chain
        counting = [part for part in parts(sampler) if _counts_epochs(part)]
        if "epoch" in self.tokens:
            for part in counting:
                part.set_epoch(int(self.tokens["epoch"]))
        if self.tokens:
            begun = None  # it began before what decides the order was set back
        iterator, left = self._iterator(sampler, skip, handed_out, begun)
        if counting:
            self._epoch_tokens["epoch"] = counting[0].epoch
            iterator = _Once(iterator, partial(self._note_epoch, counting[0]))
        return itertools.islice(iterator, left, None) if left else iterator

    def _note_epoch(self, part: Any, step: Callable[[], Any]) -> Any:
        self._epoch_tokens["epoch"] = part.epoch  # some training loops set it after `iter`, before `next`
        return step()

    def _iterator(
        self, sampler: Any, skip: int, handed_out: int, begun: Iterator[Any] | None
    ) -> tuple[Iterator[Any], int]:
        """The iterator, and how many of its batches are still to be left out."""
        core, tokens = _core(sampler), self.tokens
        stateful = stateful_part(sampler)
        if "state" in tokens or stateful is not None:
            self._stateful = core if stateful is None else stateful
            if "state" in tokens and stateful is not None:
                stateful.load_state_dict(tokens["state"])
            iterator: Any = iter(sampler) if begun is None else begun
            self._state = self._stateful.state_dict()
            if self._is_restored:
                iterator = _NotEmpty(iterator, sampler)
            return iterator, 0 if "state" in tokens else skip
        iterator = self._begun_by_tokens(sampler) if begun is None else begun
        if has_state(iterator):
            self._stateful, self._state_name = iterator, "iterator"
            if "iterator" in tokens:
                iterator.load_state_dict(tokens["iterator"])
            self._state = iterator.state_dict()
            return iterator, 0 if "iterator" in tokens else skip
        if type(core) is SequentialSampler and skip:
            first = skip * (sampler.batch_size if core is not sampler else 1)
            return _batched(sampler, range(first, len(core))), 0
        if type(core) is SequentialSampler or _is_distributed(core):
            return _Once(iterator), skip
        if type(core) is RandomSampler and core.generator is None:
            self._epoch_tokens |= {"seed": int(tokens["seed"])} if "seed" in tokens else {}
            self._draws_seed = True
            return _batched(sampler, self._seeded(core)), skip
        assert self._sources is not None
        self._epoch_tokens["draws"] = tokens["draws"] if "draws" in tokens else self._sources.states()
        self._checksums = None if num_readable(sampler) else {}
        return _Redrawn(_Once(iterator, self._note_draws), self, handed_out), skip

    def _seeded(self, core: RandomSampler) -> Iterator[int]:
        """Indices of a sampler whose seed is drawn at the first, as by torch; also if a state settled it."""
        self._epoch_tokens.setdefault("seed", draw_seed(self._chain) if "seed" not in self.tokens else None)
        yield from _random_copy(core, torch.Generator().manual_seed(self._epoch_tokens["seed"]))

    def begun_again(self, sampler: Any) -> Iterator[Any]:
        """`iter(sampler)` once more, as if the one before had not been."""
        if self._sources is not None:
            self._sources.set(self._epoch_tokens["begun"])
        return iter(sampler)

    def _begun_by_tokens(self, sampler: Any) -> Iterator[Any]:
        """`iter(sampler)`, from where generators stood when the epoch began."""
        if self._sources is None:
            self.begin(sampler)
        sources, begun = self._sources, self.tokens.get("begun", self.tokens.get("draws"))
        if sources is None or begun is None:
            return iter(sampler)
        self._epoch_tokens["begun"] = begun
        with sources.set_to(begun):
            return iter(sampler)

    def _note_draws(self, step: Callable[[], Any]) -> Any:
        """Take the first element of a sampler, from where what it draws from stood then."""
        sources, tokens = self._sources, self.tokens
        assert sources is not None
        if "draws" in tokens:
            with sources.set_to(tokens["draws"]):
                return step()
        with from_chain(self._chain if sources.with_global else None):
            self._epoch_tokens["draws"] = sources.states()
            return step()

    def drawn(self, number: int, index: Any, before: int) -> int:
        """The checksum of indices up to this batch; `before`: up to the one before."""
        if self._checksums is None:
            return 0
        try:
            checksum = zlib.crc32(_bytes_of(index), before)
        except Exception:  # of what cannot be written as bytes, there is none
            self._checksums = None
            return 0
        self._checksums[number] = checksum
        return checksum

    def reached(self, sampled: int, checksum: int) -> None:
        """Note that so many batches were drawn again, with this checksum. Those left out come next."""
        expected = self.tokens.get("order", checksum)
        if self._checksums is not None and (checksum != expected or sampled < 0):
            warnings.warn(
                "the sampler gives another order than the one that this state was taken in: samples of this "
                "epoch may come twice, or not at all. It has no state, and draws from what it does not hold, "
                "or from generators that others draw from, too: give it state_dict and load_state_dict, or a "
                "generator of its own that is seeded for each epoch",
                stacklevel=2,
            )
        if self._sources is not None and "now" in self.tokens:
            self._sources.set(self.tokens["now"])

    def sampled(self) -> Any:
        """The sampler's state after the index just taken; None without one."""
        return self._stateful.state_dict() if self._stateful is not None else None

    def delivered(self, state: Any, number: int, batches: int) -> None:
        """Record a batch that was handed out, with the state behind it; `batches` were without a gap."""
        if state is not None:
            self._states[number] = state
            if (last := batches - 1) in self._states:
                self._state = self._states[last]
                self._states = {later: of for later, of in self._states.items() if later > last}
        while self._checksums and (number := next(iter(self._checksums))) < batches - 1:
            del self._checksums[number]

    @property
    def has_state(self) -> bool:
        """Return whether the sampler tells its own state."""
        return self._state is not None

    def own_tokens(self, handed_out: int, *, now: bool) -> dict[str, Any]:
        """The `tokens` to go on from here, with a checksum of the batches up to the last that was handed out.

        `now`: nothing was sampled beyond it.
        """
        if now and self._stateful is not None:
            self._state = copy.deepcopy(self._stateful.state_dict())
        if self._draws_seed and "seed" not in self._epoch_tokens:
            self._epoch_tokens["seed"] = _seed_ahead(self._chain)
        tokens = dict(self._epoch_tokens)
        if now and "draws" in tokens and self._sources is not None:
            # Others may have drawn from these, too.
            tokens["now"] = [*self._sources.states()[:-1], tokens["draws"][-1]]
        for name in tokens.keys() & {"begun", "now"}:
            if pickle.dumps(tokens[name]) == pickle.dumps(tokens.get("draws", tokens[name])):
                del tokens[name]
        if (checksum := (self._checksums or {}).get(handed_out - 1)) is not None:
            tokens["order"] = checksum
        return {**tokens, **({self._state_name: self._state} if self._state is not None else {})}


def tokens_between(sampler: Any) -> dict[str, Any]:
    """Return what a state between two epochs says about a sampler, for `restore_between`."""
    if (stateful := stateful_part(sampler)) is not None:
        return {"state": copy.deepcopy(stateful.state_dict())}
    sources = _sources_of(sampler)
    return {"draws": [*sources.states()[:-1], None]} if sources is not None and sources.held else {}


def restore_between(sampler: Any, tokens: Mapping[str, Any]) -> None:
    """Set a sampler, or the generators that it holds, to where they stood between two epochs."""
    stateful, sources = stateful_part(sampler), _sources_of(sampler)
    if "state" in tokens and stateful is not None:
        stateful.load_state_dict(copy.deepcopy(tokens["state"]))
    elif "draws" in tokens and sources is not None:
        sources.set(tokens["draws"])


def stateful_part(sampler: Any) -> Any:
    """The sampler, or what it takes its indices from, where that tells its own state; else None."""
    core = _core(sampler)
    return sampler if has_state(sampler) else core if has_state(core) else None


_Generators = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class _Sources:
    """The generators a sampler may draw from: those that it holds, and, if allowed, the three global ones."""

    def __init__(self, held: list[Any], *, with_global: bool) -> None:
        self.held, self.with_global = held, with_global

    def states(self) -> list[Any]:
        """Return the state of each that is held; at the end those of the global ones, or None."""
        return [*map(_state_of, self.held), random_state() if self.with_global else None]

    def set(self, states: list[Any]) -> None:
        """Set those that are held to where they stood, for a sampler that holds as many."""
        if len(states) == len(self.held) + 1:
            for generator, state in zip(self.held, states, strict=False):
                _set_state(generator, state)

    @contextlib.contextmanager
    def set_to(self, states: list[Any]) -> Iterator[None]:
        """Set all of them; the global ones, which are the training code's, for as long only."""
        self.set(states)
        if not self.with_global or states[-1] is None:
            yield
            return
        before = random_state()
        set_random_state(states[-1])
        try:
            yield
        finally:
            set_random_state(before)


def _sources_of(sampler: Any) -> _Sources | None:
    """None for those of torch's whose order follows from an epoch or a seed that is told."""
    core = _core(sampler)
    if type(core) is SequentialSampler or _is_distributed(core):
        return None
    if type(core) is RandomSampler and core.generator is None:
        return None
    held: dict[int, Any] = {}
    seen: set[int] = set()
    left = list(parts(sampler))
    while left and len(seen) < _MAX_PARTS:
        part = left.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        values = list(getattr(part, "__dict__", {}).values())
        left += [value for value in values if isinstance(value, Sampler)]
        drawn = [value for value in values if isinstance(value, _Generators)]
        held |= {id(value): value for value in drawn if not isinstance(value, random.SystemRandom)}
    is_torchs = type(core) in _TAKE_A_GENERATOR and core.generator is not None
    return _Sources(list(held.values()), with_global=not is_torchs)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


@contextlib.contextmanager
def from_chain(chain: torch.Generator | None) -> Iterator[None]:
    """Yield what is drawn from torch's global generator comes from this one, if there is one."""
    if chain is None:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(chain.get_state())
    try:
        yield
    finally:
        chain.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _bytes_of(index: Any) -> bytes:
    """Equal for equal indices: by `marshal`, which takes numbers, text, lists, tuples and arrays."""
    try:
        return marshal.dumps(index, 2)
    except ValueError:
        return pickle.dumps(index)


class _Redrawn(Iterator[Any]):
    """A sampler's items, from the first; tells of each, and where those that were handed out end."""

    def __init__(self, items: Iterator[Any], progress: SamplerProgress, handed_out: int) -> None:
        self._items, self._progress, self._handed_out = items, progress, handed_out
        self._number = self._checksum = 0

    def __next__(self) -> Any:
        number = self._number
        try:
            index = next(self._items)
        except StopIteration:
            if number < self._handed_out:
                self._progress.reached(-1, self._checksum)
            raise
        self._number += 1
        self._checksum = self._progress.drawn(number, index, self._checksum)
        if self._number == self._handed_out:
            self._progress.reached(number, self._checksum)
        return index


class _NotEmpty(Iterator[Any]):
    """A sampler's items; it is begun again where it had nothing more.

    The state of one that has just ended may be a position in the epoch that ended, or one before the next.
    """

    def __init__(self, items: Iterator[Any], sampler: Any) -> None:
        self._items, self._sampler = items, sampler

    def __next__(self) -> Any:
        sampler, self._sampler = self._sampler, None
        try:
            return next(self._items)
        except StopIteration:
            if sampler is None:
                raise
            self._items = iter(sampler)
            return next(self._items)


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
    """Return what `sampler` will yield in the next epoch if nothing else draws random numbers; None: unknown.

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
            generator.manual_seed(_seed_ahead(chain))
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
    """Return what torch's own batch sampler takes its indices from; any other sampler itself."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def _batched(sampler: Any, indices: Iterable[Any]) -> Iterator[Any]:
    """Return what `sampler` makes of indices of its core: batches, or these."""
    if _core(sampler) is sampler:
        return iter(indices)
    return iter(BatchSampler(indices, sampler.batch_size, sampler.drop_last))


def _random_copy(core: RandomSampler, generator: torch.Generator) -> RandomSampler:
    return RandomSampler(core.data_source, core.replacement, core.num_samples, generator)


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed, as torch's loader and samplers draw it; None: from torch's global generator."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _seed_ahead(chain: torch.Generator | None) -> int:
    """The seed that `draw_seed` will draw next."""
    state = torch.get_rng_state() if chain is None else chain.get_state()
    return draw_seed(torch.Generator().set_state(state))


def draws_globally(sampler: Any) -> bool:
    """Return whether the order of each epoch may come from torch's global generator."""
    core = _core(sampler)
    if type(core) in _TAKE_A_GENERATOR:
        return core.generator is None
    return type(core) is not SequentialSampler and not _is_distributed(core)


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


def _is_distributed(sampler: Any) -> bool:
    """Return whether its order is a function of its seed and epoch."""
    return getattr(type(sampler), "__iter__", None) is DistributedSampler.__iter__


def is_iterable(loader: TorchDataLoader[Any]) -> bool:
    """Return whether the dataset is iterated over; else it is indexed."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)


def identity(loader: TorchDataLoader[Any]) -> dict[str, Any]:
    """Return what decides which samples a position in an epoch means, as part of a state.

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
