"""The account of a rank: counts and sums over what it handed out, by intervals of steps, and as JSON.

Every loader keeps one, as it may be asked for at any time. Sums are noted for many batches at once, when
their rows are located, and added up when these were handed out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sharding.core.library import address_of, library
from sharding.order.permutations import sum_key
from sharding.spans import Ints

if TYPE_CHECKING:
    from dataflow.batch.delivered import Delivered
    from dataflow.loader import DataLoader
    from dataflow.staging.window import WindowSamples
    from sharding.lengths.units import Segments

LISTED_ERRORS = 1000
CUT_STEPS = 256
MOST_CUTS = 256
"""More cuts of an account than that are thinned out: every second one goes."""
VERSION = 1
WORD = (1 << 64) - 1
_COUNTS = ("rank", "world_size", "first_step", "num_steps", "num_left_out", "num_aside")
_TEXTS = ("run", "fingerprint")


BatchSum = tuple[int, int, int]
"""Rows of batches (samples, or pieces of them), and two sums modulo 2**64 over them."""
NO_SUM: BatchSum = (0, 0, 0)
_NONE_NOTED = np.zeros((3, 0), np.uint64)


class BatchSums:
    """The sums of a session's batches, from when their rows are located until an account takes them.

    They are noted for many batches at once, in any order and also twice, and taken for many in their order:
    next to nothing is done for one batch. Thread-safe. `epoch`, `start`: of the session's first batch.
    """

    def __init__(self, epoch: int = 0, start: int = 0) -> None:
        self._begin, self._lock = (epoch, start), threading.Lock()
        self._noted = {epoch: (start, _NONE_NOTED)}
        """The first batch of each epoch that was not taken, and rows and sums [3, batches] from it on."""

    def note_rows(
        self,
        epoch: int,
        first_batch: int,
        sizes: Ints,
        parts: Iterable[tuple[Ints, slice | Ints, WindowSamples | None]],
        pieces: Segments | None,
    ) -> None:
        """Note the sums of batches of so many rows each: of the rows that are read, and not of the plan.

        `parts`: rows of windows, the rows of all batches that they fill, ascending, and the window's samples;
        None: they are numbers of samples. `pieces`: the part of its sample that each row has; None: all.
        """
        buffer, num, table = np.zeros((3, len(sizes)), np.int64), len(sizes), list[tuple[int, ...]]()
        np.cumsum(sizes, out=buffer[0])
        spans = () if pieces is None else (pieces.begin, pieces.length)
        cuts = [np.require(cut, np.int64, "C") for cut in spans]
        base = address_of(buffer)
        of_all = (*(map(address_of, cuts) if cuts else (0, 0)), base, sum_key(epoch), base + 8 * num)
        for rows, targets, samples in parts:
            targets_at, first = (0, targets.start) if isinstance(targets, slice) else (address_of(targets), 0)
            blocks = (0, 0, 0, 0) if samples is None else samples.table
            table.append((address_of(rows), targets_at, len(rows), first, *blocks, *of_all))
        fields = np.array(table, np.uint64)  # of `core_samples`
        library().core_sum_samples(address_of(fields), len(fields))
        both = buffer[1:].view(np.uint64).reshape(num, 2).T
        self.note(epoch, first_batch, np.vstack([sizes.astype(np.uint64), both]))

    def note(self, epoch: int, first: int, sums: NDArray[np.uint64]) -> None:
        """Keep the sums [3, batches] of an epoch's batches from `first` on; not of those that were taken."""
        with self._lock:
            begin, noted = self._noted.get(epoch, (0, _NONE_NOTED))
            past, end = max(0, begin - first), max(0, first + sums.shape[1] - begin)
            lacking = max(0, end - noted.shape[1])
            noted = np.concatenate([noted, np.zeros((3, lacking), np.uint64)], 1) if lacking else noted
            noted[:, first + past - begin : end] = sums[:, past:]
            self._noted[epoch] = begin, noted

    def take(self, epoch: int, first: int, end: int) -> tuple[BatchSum, BatchSum]:
        """Take the sum over batches [first, end - 1), and that of the last, by number in the session."""
        if epoch == self._begin[0]:
            first, end = first + self._begin[1], end + self._begin[1]
        with self._lock:
            begin, noted = self._noted.get(epoch, (0, _NONE_NOTED))
            self._noted = {later: of for later, of in self._noted.items() if later > epoch}
            self._noted[epoch] = max(begin, end), noted[:, max(0, end - begin) :]
        taken = noted[:, max(0, first - begin) : max(0, end - begin)]
        return tuple(taken[:, :-1].sum(axis=1).tolist()), tuple(taken[:, -1:].sum(axis=1).tolist())

    def take_next(self) -> NDArray[np.uint64]:
        """Take the sum [3, 1] of the first batch that was noted, where numbers leave gaps."""
        with self._lock:
            epoch, (begin, noted) = min(item for item in self._noted.items() if item[1][1][0].any())
            end = int((noted[0] > 0).argmax()) + 1
            self._noted[epoch] = begin + end, noted[:, end:]
            return noted[:, end - 1 : end]


@dataclass(eq=False, kw_only=True)
class DeliveryAccount:
    """The account of a loader from when it was made, or a state loaded. For one thread at a time."""

    standing: Callable[[], tuple[int | None, int]]
    """Tells the steps that the loader's state is behind, None: not known; and batches taken ahead."""
    cuts: list[tuple[int, int, int, int]] = field(default_factory=lambda: [(0, 0, 0, 0)])
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
    due: int = CUT_STEPS
    """Batches of the loop with which it wants to be told again; of those before, `end` is enough."""

    def going_on(self, standing: Callable[[], tuple[int | None, int]]) -> DeliveryAccount:
        """A new one, from where a copy of the loader stands, or a loaded state."""
        steps = standing()[0]
        return DeliveryAccount(standing=standing, cuts=[] if steps is None else [(steps, 0, 0, 0)])

    def add(self, delivered: Delivered, noted: BatchSums, taken: int | None) -> None:
        """Note a batch: the first of a session or an epoch, one that is odd, or one with which a cut is due.

        `noted`: sums of its session; `taken`: batches of its loop, None: that is not the newest.
        """
        epoch, number = delivered.epoch, delivered.number
        if taken is None:
            self.num_aside += 1
            noted.take(epoch, number, number + 1)
            return
        if number != self.end or noted is not self.noted:
            if self.first < self.end:  # another session's, or epoch's
                self.settle()
            self.noted, self.epoch, self.first = noted, epoch, number
        self.end, self.due = number + 1, taken - taken % CUT_STEPS + CUT_STEPS
        if delivered.skipped or delivered.in_place:
            step = (self.standing()[0] or 1) - 1
            texts = map(str, delivered.skipped[: LISTED_ERRORS - len(self.left_out)])
            self.left_out += [(step, text) for text in texts]
            self.num_left_out += len(delivered.skipped)
            self.repeated += [step] * (delivered.in_place and len(self.repeated) < LISTED_ERRORS)
        if not taken % CUT_STEPS:
            self.cut()

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


def _added(total: BatchSum, other: BatchSum) -> BatchSum:
    return total[0] + other[0], total[1] + other[1], total[2] + other[2]


class AccountInterval(NamedTuple):
    """The rows that a rank handed out in steps that follow one another."""

    begin: int
    end: int
    rows: int
    """Samples, or pieces of them, also those that `on_error` left out."""
    low: int
    high: int

    def joined(self, later: AccountInterval) -> AccountInterval:
        """Itself and the interval that follows it."""
        sums = (self.low + later.low) & WORD, (self.high + later.high) & WORD
        return AccountInterval(self.begin, later.end, self.rows + later.rows, *sums)


class Account(NamedTuple):
    """The account of one process on one rank, up to some step."""

    run: str
    """The name of the process; its later accounts have the same."""
    began_s: float
    """The time at which it began, in seconds since 1970."""
    fingerprint: str
    """The fingerprint of the dataset."""
    seed: int
    rank: int
    world_size: int
    first_step: int
    num_steps: int
    """The steps before its first, and before the next one."""
    intervals: tuple[AccountInterval, ...]
    """They go from `first_step` to `num_steps`, without a gap."""
    left_out: tuple[tuple[int, str], ...]
    """Step and text of samples that `on_error` left out, as far as they are listed."""
    num_left_out: int
    repeated: tuple[int, ...]
    """Steps at which an earlier batch came once more, as nothing was left of the planned one."""
    num_aside: int
    """Batches of loops that ran beside the newest: they are no steps."""

    @property
    def cuts(self) -> frozenset[int]:
        """The steps at which an interval begins or ends."""
        return frozenset([self.first_step, *(interval.end for interval in self.intervals)])

    def to_json(self) -> dict[str, Any]:
        """JSON types; the two sums of an interval are 32 hexadecimal digits."""
        rows = [[*interval[:3], f"{interval.high:016x}{interval.low:016x}"] for interval in self.intervals]
        fields = {**self._asdict(), "intervals": rows, "left_out": [[*entry] for entry in self.left_out]}
        return {"version": VERSION, **fields, "repeated": [*self.repeated]}

    @classmethod
    def from_json(cls, value: object, name: str) -> Account:
        """The inverse of `to_json`. `ValueError` for what is no account; `name`: of it, in errors."""
        if not isinstance(value, Mapping) or not {"intervals", "run", "num_steps"} <= {*value}:
            raise ValueError(f"{name} is no account: it is what loader.account() returned, as JSON")
        if value.get("version") != VERSION:
            raise ValueError(f"{name} is an account of version {value.get('version')}, and {VERSION} is read")
        try:
            fields = {field: value[field] for field in cls._fields}
            for field in _COUNTS:
                _check(type(fields[field]) is int and fields[field] >= 0, field)
            for field in _TEXTS:
                _check(type(fields[field]) is str, field)
            _check(type(fields["seed"]) is int, "seed")
            _check(isinstance(fields["began_s"], int | float), "began_s")
            _check(fields["rank"] < fields["world_size"], "rank")
            intervals = tuple(_interval(row) for row in fields["intervals"])
            ends = [fields["first_step"], *(interval.end for interval in intervals)]
            begins = [*(interval.begin for interval in intervals), fields["num_steps"]]
            _check(ends == begins and ends == sorted({*ends}), "intervals")
            left_out = tuple((index(step), str(text)) for step, text in fields["left_out"])
            repeated = tuple(map(index, fields["repeated"]))
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{name} is a damaged account: {error}") from error
        return cls(**{**fields, "intervals": intervals, "left_out": left_out, "repeated": repeated})


def _check(holds: bool, field: str) -> None:
    if not holds:
        raise ValueError(f"its {field} cannot be so")


def _interval(row: Any) -> AccountInterval:
    begin, end, rows, digits = row
    _check(
        all(type(num) is int and num >= 0 for num in (begin, end, rows)) and len(digits) == 32, "intervals"
    )
    return AccountInterval(begin, end, rows, int(digits[16:], 16), int(digits[:16], 16))


def account_of_loader(loader: DataLoader[Any, Any]) -> dict[str, Any]:
    """The entry of `DataLoader.account`."""
    from dataflow.explain.run import NO_HISTORY, stream_of  # not for each loader, as this module is

    stream = stream_of(loader)
    account, state = stream.counters.account, stream.state_dict()
    account.cut()
    if not account.cuts:
        raise ValueError(NO_HISTORY.partition(":")[0])
    plan, intervals = stream.taken[0], list[AccountInterval]()
    for (begin, *before), (end, *after) in pairwise(account.cuts):
        rows, low, high = (later - sooner for sooner, later in zip(before, after, strict=True))
        intervals.append(AccountInterval(begin, end, rows, low & WORD, high & WORD))
    return Account(
        account.run,
        account.began_s,
        state["fingerprint"],
        plan.seed,
        plan.rank,
        plan.world_size,
        account.cuts[0][0],
        account.cuts[-1][0],
        tuple(intervals),
        tuple(account.left_out),
        account.num_left_out,
        tuple(account.repeated),
        account.num_aside,
    ).to_json()
