"""Counts of what is delivered; errors that a policy forgives; the stand-in of an empty batch."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, Self

import torch

from dataflow.batch.delivered import UNTRAINED, Delivered
from dataflow.batch.samples import REPEAT
from dataflow.outputs.columns import odd_text
from dataflow.stream.decisions import ACCOUNT, EXPLAIN
from dataflow.torch_threads import run_with_one_torch_thread
from sharding.errors import DataflowError, SampleError

LISTED_ERRORS = 1000
Standing = Callable[[], tuple[int | None, int]]
"""Tells the steps that the loader's state is behind, None: not known; and batches that are taken ahead."""


class DeliveryCounters:
    """Counts of what was handed out, over all loops of a loader."""

    def __init__(self, standing: Standing) -> None:
        self.account: Any = resolve_name(ACCOUNT)(standing=standing) if find_spec(EXPLAIN) else None
        """The `DeliveryAccount` of steps; None: the core is alone."""
        self.samples = self.batches = self.empty_batches = 0
        self.first_batch_s = 0.0
        self.remarks: Counter[str] = Counter()
        self._warned_of = set[str]()

    def going_on(self, standing: Standing) -> Self:
        """Counts that go on from these, with an account of its own."""
        other = copy.copy(self)
        other.account = self.account and self.account.going_on(standing)
        return other

    def add(self, delivered: Delivered, noted: Any, taken: int | None) -> None:
        """Count a batch that is handed out, or left out for being empty.

        `noted`: sums of its session; `taken`: batches of its loop, None: that is not the newest.
        """
        _, number, _, num_samples, skipped, in_place, remarks = delivered
        if (account := self.account) is not None:
            is_next = number == account.end and noted is account.noted and not (skipped or in_place)
            if is_next and taken and taken < account.due:
                account.end = number + 1  # as most are: the account need not be told
            else:
                account.add(delivered, noted, taken)
        self.samples += num_samples
        if num_samples:
            self.batches += 1
        if in_place or not num_samples:
            self.empty_batches += 1
        for kind, num_values, first in remarks:
            if first and kind not in self._warned_of:
                self._warned_of.add(kind)
                text = untrained_text(first) if kind == UNTRAINED else odd_text(first)
                warnings.warn(text, stacklevel=4)
            self.remarks[kind] += num_values


def untrained_text(first: str) -> str:
    """The warning of a sample that trains nothing, whose context is given, and of those that follow."""
    counted = "such samples are delivered, and counted in stats().untrained_samples"
    return f"{first}: {counted}; max_length= may have cut all answers off: raise it, or leave such chats out"


class RepeatedBatch:
    """The last batch with samples, for those of which `on_error` left nothing where ranks step together.

    The training code may change what it gets, so the copy is made before: one a chunk. Used by one thread.
    """

    def __init__(self) -> None:
        self._last: Delivered | None = None

    def in_place_of_empty(self, batches: Iterable[Delivered]) -> Iterator[Delivered]:
        """The batches of a chunk, all of which have samples. `DataflowError` before any has."""
        filled, before = [], self._last
        for delivered in batches:
            if delivered.num_samples:
                self._last = delivered
            elif self._last is None:
                raise _nothing_to_repeat(delivered) from delivered.skipped[0]
            else:
                delivered = self._repeated(self._last, delivered)
            filled.append(delivered)
        if self._last is not None and self._last is not before:
            self._last = self._last._replace(batch=_copied(self._last.batch))
        return iter(filled)

    @staticmethod
    def _repeated(last: Delivered, empty: Delivered) -> Delivered:
        batch = _copied(last.batch)
        if isinstance(batch, MutableMapping) and REPEAT in batch:
            batch[REPEAT] = torch.ones_like(batch[REPEAT])
        return empty._replace(batch=batch, num_samples=last.num_samples, in_place=True)


def _copied(batch: Any) -> Any:
    """A copy; of what cannot be copied (it holds a generator, a file), the batch itself."""
    copies = [batch]
    with suppress(Exception):
        run_with_one_torch_thread(lambda: copies.append(copy.deepcopy(batch)))
    return copies[-1]


def _nothing_to_repeat(empty: Delivered) -> DataflowError:
    return DataflowError(
        f"all {len(empty.skipped)} samples of a batch were left out by on_error=, and this rank has no "
        "earlier batch that could come in its place, which keeps ranks in step: mend the samples, or take "
        f"larger batches; the first one: {empty.skipped[0]}"
    )


class ErrorBudget:
    """The samples left out by policy, over all loops of a loader. `lock` guards what follows it."""

    def __init__(self, on_error: Any, budget: int) -> None:
        self.on_error, self.budget = on_error, budget
        self.lock = threading.Lock()
        self.num_ahead = 0
        """Samples left out of batches that are not delivered yet."""
        self.count = 0
        self.errors: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None, "num_ahead": 0, "errors": [*self.errors]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "lock": threading.Lock()}


class PendingErrors:
    """The errors that one session forgave in batches that are not delivered yet. Thread-safe."""

    def __init__(self, skipped: ErrorBudget) -> None:
        self._skipped = skipped
        self._count = 0

    def decide(self, error: SampleError) -> bool:
        """Return whether to leave the sample out."""
        skipped = self._skipped
        if skipped.on_error != "skip" and not (callable(skipped.on_error) and skipped.on_error(error)):
            return False
        with skipped.lock:
            before = skipped.count + skipped.num_ahead
            if before >= skipped.budget:
                error.add_note(f"{before} samples were skipped before; error_budget={skipped.budget}")
                return False
            skipped.num_ahead += 1
            self._count += 1
        return True

    def delivered(self, errors: Sequence[SampleError]) -> None:
        """Count what is missing from a batch that is handed out."""
        skipped = self._skipped
        with skipped.lock:
            skipped.num_ahead -= len(errors)
            self._count -= len(errors)
            skipped.count += len(errors)
            skipped.errors += map(str, errors[: LISTED_ERRORS - len(skipped.errors)])

    def forget(self) -> None:
        """Forget what was decided about batches that will never be delivered."""
        with self._skipped.lock:
            self._skipped.num_ahead -= self._count
            self._count = 0
