"""Headspace: how much faster a training would be with a perfect loader, for `dataflow doctor --headspace`.

A loader's batches are first handed out as they are; then copies of a few of them are replayed in its place,
from memory, and the loader is closed, so that nothing runs beside the training. What the training gains is
measured, not computed from waits: batches that are made beside a training slow it down, too, where they take
its cores. All ranks change over at the same step, so that the replayed steps are perfect on all of them.

A training may change its batches, so each step gets a copy of its own. Copies are made ten at a time, between
steps, while the clock stands still: a perfect loader costs nothing. A CUDA device is waited for there, and
after as many steps before the replay: the host runs ahead of it, and would otherwise be what is measured.
"""

from __future__ import annotations

import copy
import itertools
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dataflow.timing import ROUND
from dataflow.timing.records import save_text

WARM_UP = 20
"""Steps that are left out before each measurement: programs compile, and queues that were filled run dry."""
_STOCK_BYTES = 256 << 20
"""Of the batches that are kept, and of the copies that lie ready; one at least."""
_SERIAL = itertools.count()
"""Of loaders that this process looped over: one file each, with the same number on all ranks."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of one rank: from one batch asked for to the next."""

    total_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    """Of each, waiting for its batch."""


@dataclass(frozen=True, kw_only=True)
class HeadspaceRecord:
    """What one rank measured."""

    rank: int
    world_size: int
    host: str
    steps: int
    """That were to be measured, of either kind."""
    seen: int
    """Steps that ended, those left out included."""
    optimizer_steps: int
    """Of torch's optimizers. 0: the loop evaluates."""
    live: MeasuredSteps
    """With the loader as it is."""
    replayed: MeasuredSteps
    """With batches from memory."""
    batches: int
    """That were replayed in turns."""
    shared: str
    """Why these could not be copied, and steps shared them; "" where they were copied."""
    ended: bool = False
    """Whether the command was ended here."""

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HeadspaceRecord:
        """`ValueError` if it is no such value."""
        try:
            steps = {
                name: MeasuredSteps(*(tuple(value[name][field]) for field in ("total_s", "wait_s")))
                for name in ("live", "replayed")
            }
            return cls(**{**value, **steps})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a record of this version: {error}") from None


class BatchStock:
    """Batches that are kept, and copies of them that lie ready. Used by the training thread."""

    def __init__(self) -> None:
        self._originals: list[Any] = []
        self._copies: deque[Any] = deque()
        self._next = 0
        self._kept_bytes = self._largest_bytes = 0
        self.shared = ""
        """Why batches could not be copied; "" where they could."""

    def __len__(self) -> int:
        return len(self._originals)

    def offer(self, batch: Any) -> None:
        """Keep a copy of a batch, if there is room."""
        if len(self) == ROUND or self._kept_bytes + self._largest_bytes > _STOCK_BYTES:
            return
        kept, nbytes = self._copy_of(batch)
        self._kept_bytes, self._largest_bytes = self._kept_bytes + nbytes, max(nbytes, self._largest_bytes)
        self._originals.append(kept)

    @property
    def is_empty(self) -> bool:
        """Whether no copy lies ready."""
        return not self._copies

    def fill(self) -> None:
        """Make copies: as many as there is room for, of the batches in turns."""
        room = ROUND if not self._largest_bytes else _STOCK_BYTES // self._largest_bytes
        for _ in range(max(1, min(ROUND, room))):
            self._copies.append(self._copy_of(self._originals[self._next % len(self)])[0])
            self._next += 1

    def take(self) -> Any:
        """A copy that nobody else has."""
        return self._copies.popleft()

    def _copy_of(self, batch: Any) -> tuple[Any, int]:
        memo: dict[int, Any] = {}
        try:
            duplicate = copy.deepcopy(batch, memo)
        except Exception as error:  # whatever the user's classes raise: steps share the batch then
            self.shared = self.shared or f"{type(error).__name__}: {error}"
            return batch, 0
        # The memo has all that was copied, whatever classes it lies in.
        nbytes = sum(one.nbytes for one in memo.values() if isinstance(getattr(one, "nbytes", None), int))
        originals = memo.get(id(memo), ())
        is_pinned = any(isinstance(one, torch.Tensor) and one.is_pinned() for one in originals)
        return (_pinned(duplicate) if is_pinned else duplicate), nbytes


class HeadspaceLoop:
    """The batches of one loader over all its epochs: first its own, then replayed ones. Used by one thread.

    Args:
        folder: where the record goes.
        steps: to measure, of either kind.
        rank_and_world_size: of this process.
        optimizer_steps: how often torch's optimizers stepped in this process.
        now: seconds on a clock that only goes forward.
    """

    def __init__(
        self,
        folder: str,
        *,
        steps: int,
        rank_and_world_size: tuple[int, int],
        optimizer_steps: Callable[[], int],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank, self._world_size = rank_and_world_size
        self._path = Path(folder) / f"{self._rank:06d}-headspace-{next(_SERIAL):03d}.json"
        self._planned, self._now, self._stepped = steps, now, optimizer_steps
        self._stock = BatchStock()
        self._steps: list[tuple[float, float]] = []
        """Seconds of each step that ended, and how many of them it waited."""
        self._under_way: tuple[float, float, int] | None = None
        """When the present batch was asked for, when it came, and how often optimizers had stepped."""
        self._optimizer_steps = 0
        self._position = 0
        """Batches handed out in this epoch."""
        self._epoch_batches: int | None = None
        """Of an epoch that the loader ended itself."""
        self._closed = self._ended = False

    @property
    def replays(self) -> bool:
        """Whether batches come from memory: as soon as the loader's own are measured."""
        return len(self._steps) >= WARM_UP + self._planned

    @property
    def is_measured(self) -> bool:
        """Whether nothing is left to measure."""
        return len(self._steps) >= 2 * (WARM_UP + self._planned)

    def begin(self, loader: Any, engine: Any) -> Any:
        """What iterates over an epoch's batches: the loader's own as long as they are wanted."""
        self._position = 0
        return ReplayedEpoch(loader) if self.replays else iter(engine)

    def next_of(self, batches: Iterator[Any], loader: Any) -> Any:
        """The next batch; the step on the one before is over.

        Raises:
            StopIteration: the epoch has as many batches as one of the loader.
            SystemExit: all is measured; the training ends, for it no longer learns from its data.
        """
        self._step_ended()
        batch = self._replayed(loader) if self.replays else self._live(batches)
        self._position += 1
        return batch

    def left(self, loader: Any) -> None:
        """The loop was left, maybe in the middle of a step: that one is not counted."""
        self._under_way = None
        self.save()

    def save(self) -> None:
        """Write the record."""
        save_text(self._path, json.dumps(self.record().to_json()))

    def record(self) -> HeadspaceRecord:
        """What was measured so far."""
        change = WARM_UP + self._planned
        return HeadspaceRecord(
            rank=self._rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            steps=self._planned,
            seen=len(self._steps),
            optimizer_steps=self._optimizer_steps,
            live=_measured(self._steps[WARM_UP:change]),
            replayed=_measured(self._steps[change + WARM_UP : change + WARM_UP + self._planned]),
            batches=len(self._stock),
            shared=self._stock.shared,
            ended=self._ended,
        )

    def _step_ended(self) -> None:
        if self._under_way is None:
            return
        if (len(self._steps) + 1) % ROUND == 0 or (self.replays and self._stock.is_empty):
            _wait_for_device()
        (asked_at, came_at, stepped), self._under_way, now = self._under_way, None, self._now()
        self._optimizer_steps += self._stepped() - stepped
        if not self.is_measured:
            self._steps.append((now - asked_at, came_at - asked_at))
            if self.is_measured:
                self.save()

    def _live(self, batches: Iterator[Any]) -> Any:
        asked_at = self._now()
        try:
            batch = next(batches)
        except StopIteration:
            self._epoch_batches = self._position
            self.save()
            raise
        except BaseException:
            self.save()
            raise
        self._under_way = (asked_at, self._now(), self._stepped())
        if len(self._steps) < WARM_UP:
            self._stock.offer(batch)
        return batch

    def _replayed(self, loader: Any) -> Any:
        if not self._closed:
            self._closed = True
            self.save()
            loader.close()  # its threads and processes would go on, to fill their queues
        if self.is_measured:
            self._end()
        if self._position == self._length(loader):
            self.save()
            raise StopIteration
        if self._stock.is_empty:
            self._stock.fill()
        batch, now = self._stock.take(), self._now()
        self._under_way = (now, now, self._stepped())
        return batch

    def _end(self) -> None:
        """End a training; what only evaluates goes on, for a training may follow."""
        if self._optimizer_steps:
            self._ended = True
            self.save()
            raise SystemExit(0)

    def _length(self, loader: Any) -> int | None:
        """Batches of an epoch; None: it goes on until all is measured."""
        if self._epoch_batches is not None:
            return self._epoch_batches
        try:
            return len(loader)
        except TypeError:
            return self._position if self.is_measured else None


class ReplayedEpoch:
    """In the place of a loader's iterator, in an epoch that is all replayed."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> ReplayedEpoch:
        return self

    def __next__(self) -> Any:
        raise StopIteration

    def __len__(self) -> int:
        return len(self._loader)


def _measured(steps: list[tuple[float, float]]) -> MeasuredSteps:
    return MeasuredSteps(tuple(total for total, _ in steps), tuple(wait for _, wait in steps))


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)
