"""Counts and account of what is delivered; errors that a policy forgives; the stand-in of an empty batch."""

from __future__ import annotations

import copy
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from dataflow.batch.delivered import NO_SUM, UNTRAINED, BatchSum, BatchSums, Delivered
from dataflow.batch.samples import REPEAT
from dataflow.outputs.columns import odd_text
from dataflow.torch_threads import run_with_one_torch_thread
from sharding.errors import DataflowError, SampleError

LISTED_ERRORS = 1000
CUT_STEPS = 256
MOST_CUTS = 256
"""More cuts of an account than that are thinned out: every second one goes."""
Standing = Callable[[], tuple[int | None, int]]
"""Tells the steps that the loader's state is behind, None: not known; and batches that are taken ahead."""


@dataclass(eq=False, kw_only=True)
class DeliveryAccount:
    """The account of a loader from when it was made, or a state loaded. For one thread at a time."""

    standing: Standing
    cuts: list[tuple[int, int, int, int]]
    """Steps of the training, and rows and sums that were handed out before them; empty: steps are unknown."""
    run: str = field(default_factory=lambda: os.urandom(8).hex())
    began_s: float = field(default_factory=time.time)
    left_out: list[tuple[int, str]] = field(default_factory=list)
    """Step and text of samples that `on_error` left out, `LISTED_ERRORS` of them."""
    repeated: list[int] = field(default_factory=list)
    """Steps at which an earlier batch came in place of one of which nothing was left."""
    num_left_out: int = 0
    num_aside: int = 0
    """Batches of loops beside the newest, which are no steps."""
    sums: BatchSum = NO_SUM
    """Rows and sums before the last batch, which a framework may keep for later."""
    last: BatchSum = NO_SUM
    noted: BatchSums | None = None
    """The sums of the session that handed out batches [first, end) of `epoch`, which are not added yet."""
    epoch: int = 0
    first: int = 0
    end: int = 0

    def note(self, delivered: Delivered) -> None:
        """List what is odd about a batch."""
        step = (self.standing()[0] or 1) - 1
        texts = map(str, delivered.skipped[: LISTED_ERRORS - len(self.left_out)])
        self.left_out += [(step, text) for text in texts]
        self.num_left_out += len(delivered.skipped)
        self.repeated += [step] * (delivered.in_place and len(self.repeated) < LISTED_ERRORS)

    def settle(self) -> None:
        """Add the sums of what was handed out since, at least one batch."""
        assert self.noted is not None
        before, last = self.noted.take(self.epoch, self.first, self.end)
        self.sums = _added(_added(self.sums, self.last), before)
        self.last, self.first = last, self.end

    def cut(self) -> None:
        """Note what was handed out before the steps that the loader's state is behind."""
        if self.first < self.end:
            self.settle()
        steps, num_ahead = self.standing()
        if steps is not None and self.cuts and steps > self.cuts[-1][0]:
            self.cuts.append((steps, *(self.sums if num_ahead else _added(self.sums, self.last))))
        if len(self.cuts) > MOST_CUTS:
            del self.cuts[1:-1:2]


def _added(one: BatchSum, other: BatchSum) -> BatchSum:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


class DeliveryCounters:
    """Counts of what was handed out, over all loops of a loader."""

    def __init__(self, standing: Standing) -> None:
        self.account = DeliveryAccount(standing=standing, cuts=[(0, 0, 0, 0)])
        self.samples = self.batches = self.empty_batches = 0
        self.first_batch_s = 0.0
        self.remarks: Counter[str] = Counter()
        self._warned_of = set[str]()

    def going_on(self, standing: Standing) -> Self:
        """Counts that go on from these, with an account of its own."""
        other, steps = copy.copy(self), standing()[0]
        other.account = DeliveryAccount(standing=standing, cuts=[] if steps is None else [(steps, 0, 0, 0)])
        return other

    def add(self, delivered: Delivered, noted: BatchSums, taken: int | None) -> None:
        """Count a batch that is handed out, or left out for being empty.

        `noted`: sums of its session; `taken`: batches of its loop, None: that is not the newest.
        """
        epoch, number, _, num_samples, skipped, in_place, remarks = delivered
        account = self.account
        if taken is None:
            account.num_aside += 1
            noted.take(epoch, number, number + 1)
        else:
            if number != account.end or noted is not account.noted:
                if account.first < account.end:  # another session's, or epoch's
                    account.settle()
                account.noted, account.epoch, account.first = noted, epoch, number
            account.end = number + 1
            if skipped or in_place:
                account.note(delivered)
            if not taken % CUT_STEPS:
                account.cut()
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
        for one in batches:
            if one.num_samples:
                self._last = one
            elif self._last is None:
                raise _nothing_to_repeat(one) from one.skipped[0]
            else:
                one = self._repeated(self._last, one)
            filled.append(one)
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
