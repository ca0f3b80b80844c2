"""Transforms beyond a function of one sample: `BatchTransform`, and who asks for its parts.

A transform is any callable that takes a sample. What works on many samples at once much faster than one by
one, as tokenizers do, has a `batch` form besides. Nobody needs to inherit anything: the parts are looked up
by name, here and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex

import numpy as np

from prefetch.memory.interrupts import as_exception, must_go_on

if TYPE_CHECKING:
    from dataflow.batch.samples import BatchSamples
    from sharding.lengths.batching import Batching


BatchFn = Callable[[Any], Any]
Sample = dict[str, Any]
_MOST = 32
"""Most characters of a fingerprint."""
COSTS = "__costs__"
"""The column of costs, a list of integers a sample, of samples that are measured and not made."""


class BatchTransform(Protocol):
    """A transform of many samples. `dataflow.Tokenize` is one, so is any object with these two methods.

    Builders call `batch` with the samples of a batch, threads at the same time. Where it raises, each sample
    is transformed by itself: so the error names the one that is bad, and `on_error` decides about it alone.
    A transform that takes `rng=` is called sample by sample, whatever it has; so is one whose class has a
    `__call__` of its own and inherits `batch`; nor is an inherited `deferred` called then.

    Six attributes are looked up, and may be left out:

    - `measure`, a function of a sample that returns `{column: length}` without making it, as from headers of
      images. Packing windows are planned by it, and each sample is made when its row is built. Where lengths
      can be kept (`fingerprint`), later epochs and runs know them. `measure(sample, rng)` draws what the
      transform draws from its `rng`; its lengths hold for one epoch.
    - `lists`, names of columns: tensors or arrays [n, ...] whose length differs from sample to sample, of one
      dtype and trailing shape. Without a `collate_fn`, batches have each of them as a `Ragged`.
    - `targets`, names of columns: masks of the tokens that are to be learned. A sample of which none is, as
      where all are cut off, is delivered, counted in `stats().untrained_samples`, and warned of once.
    - `fingerprint`, up to 32 printable ASCII characters without "@", "+" and "~": what the results depend on
      besides the samples, such as the hash of a tokenizer's file. A loader's state has it, and a loader with
      another one refuses the state.
    - `deferred`, a function of a sample that gives the same with `LateArray` in the place of large arrays. It
      is called instead where samples are made for a row that is planned.
    - `releases_gil`: True where nearly all of its work is done without the interpreter lock, so that threads
      build batches. Any function of yours may say so: those in `decode=`, `collate_fn`, `batch_transform`.
    """

    def __call__(self, sample: Sample, /) -> Any:
        """One sample, transformed. The argument stays as it is."""

    def batch(self, samples: list[Sample], /) -> Sequence[Any]:
        """`[self(sample) for sample in samples]`. The samples stay as they are."""


def own_form(transform: object, name: str) -> Callable[..., Any] | None:
    """A method that stands for the transform's call; None: it has none, or a class below has another call."""
    kinds = [getattr(transform, "__dict__", {}), *map(vars, type(transform).__mro__)]
    nearest = next((kind for kind in kinds if name in kind or "__call__" in kind), {})
    return getattr(transform, name) if callable(nearest.get(name)) else None


def lists_of(transform: object) -> tuple[str, ...]:
    """The columns of its samples that are lists of unlike lengths."""
    return tuple(getattr(transform, "lists", ()))


def measure_of(transform: object) -> Callable[..., Mapping[str, int]] | None:
    """The function that tells lengths of a transform's samples without making them; None: it has none."""
    measure = getattr(transform, "measure", None)
    return measure if callable(measure) else None


def has_random_lengths(transform: Callable[..., Any]) -> bool:
    """Return whether its samples may be of other lengths in another epoch."""
    return wants_rng(measure_of(transform) or transform)


class LengthsAlone:
    """Stands for a transform while lengths are measured: its samples are as long, and empty of content.

    Args:
        transform: one that has `measure`.
        batching: its columns are as long as `measure` says of the first one, and the lengths of its
            `cost_columns` stand in `COSTS`.
    """

    def __init__(self, transform: Any, batching: Batching) -> None:
        self._measure, self._columns, self._whole = transform.measure, batching.columns, [*batching.whole]
        self._costs = batching.cost_columns
        self.fingerprint, self.releases_gil = fingerprint_of(transform), releases_gil(transform)

    def __call__(self, sample: Sample, **draws: np.random.Generator) -> Sample:
        """Lists of zeros. It is given `rng` where `measure` takes it, as the transform is later."""
        lengths, names = self._measure(sample, **draws), (self._columns[0], *self._costs)
        if wrong := [name for name in names if not isinstance(lengths.get(name), SupportsIndex)]:
            raise ValueError(f"measure returned {lengths!r}, without the length of {wrong[0]!r}, an integer")
        length, *costs = (index(lengths[name]) for name in names)
        lists, none = np.zeros(length, np.int8), np.zeros(0, np.int8)
        return {**dict.fromkeys(self._columns, lists), **dict.fromkeys(self._whole, none), COSTS: costs}


def trains_nothing(transform: object, sample: Any) -> str:
    """The mask of a sample that a transform has made where it says that nothing is to be learned; else ""."""
    names: Sequence[str] = getattr(transform, "targets", ())
    if not names or not isinstance(sample, Mapping):
        return ""
    return "" if any(np.any(np.asarray(sample[name])) for name in names if name in sample) else names[0]


def wants_rng(transform: Callable[..., Any]) -> bool:
    """Return whether a transform takes `rng=`, a generator of random numbers."""
    try:
        return "rng" in inspect.signature(transform).parameters
    except (TypeError, ValueError):
        return False


def fingerprint_of(transform: object) -> str:
    """Return what a state knows of the transform; "": nothing.

    `ValueError` for what a state has no room for.
    """
    fingerprint = str(getattr(transform, "fingerprint", "") or "")
    if (
        len(fingerprint) > _MOST
        or not (fingerprint.isascii() and fingerprint.isprintable())
        or {*"@+~"} & {*fingerprint}
    ):
        raise ValueError(
            f"the fingerprint of a transform is at most {_MOST} printable ASCII characters, without @, + and "
            f"~, got {fingerprint!r}: take a hash of it"
        )
    return fingerprint


def releases_gil(function: object) -> bool:
    """Return whether it says that threads may do its work side by side."""
    return bool(getattr(function, "releases_gil", False))


def transformed_together(
    samples: Sequence[Sample] | BatchSamples, transforms: Sequence[tuple[object, bool]]
) -> tuple[dict[int, Any], BaseException | None]:
    """Return what batch forms make of the samples.

    Args:
        samples: [n], made when they are asked for.
        transforms: [n], of each sample: its transform, or None, and whether that takes `rng=`.

    Returns:
        By row, what became of the samples whose transform has a batch form that did not fail; and the first
        failure. What is not there is to be transformed one by one.
    """
    outcomes: dict[int, Any] = {}
    failure: BaseException | None = None
    ids = [id(transform) for transform, _ in transforms]
    for number, (transform, wants_rng) in dict(zip(ids, transforms, strict=True)).items():
        form = own_form(transform, "batch")
        if form is None or wants_rng:
            continue
        rows = [row for row, other in enumerate(ids) if other == number]
        try:
            results = form([samples[row] for row in rows])
            if len(results) != len(rows):
                raise TypeError(f"the batch form returned {len(results)} samples for {len(rows)}")
            outcomes.update(zip(rows, results, strict=True))
        except BaseException as error:
            if must_go_on(error):
                raise
            failure = failure or error
    return outcomes, failure


def called(function: BatchFn, argument: Any, context: Callable[[], str]) -> Any:
    """Call a user's function of batches; what it raises says where that was.

    A `StopIteration` of it would seem to be the loader's end, a `SystemExit` the program's.
    """
    try:
        return function(argument)
    except BaseException as error:
        if must_go_on(error):
            raise
        failure: Exception = as_exception(error)
        if isinstance(error, StopIteration):
            failure = RuntimeError(f"{getattr(function, '__name__', function)} raised StopIteration")
            failure.__cause__ = error
        failure.add_note(context())
        raise failure from failure.__cause__
