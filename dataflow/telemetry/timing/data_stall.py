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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dataflow.telemetry.timing import ROUND
from dataflow.telemetry.timing.records import StepRecord, StepTimes

WARM_UP = 20
"""Steps that are left out before each measurement: programs compile, and queues that were filled run dry."""
_STOCK_BYTES = 256 << 20
"""Bytes of the batches that are kept, and of the copies that lie ready; one at least."""


@dataclass(frozen=True, kw_only=True)
class DataStallRecord(StepRecord):
    """The measurements of a rank: steps with the loader, then as many with batches from memory."""

    steps: int
    """Steps that were to be measured, of either kind."""
    batches: int
    """Batches that were replayed in turns."""
    shared: str
    """Why these could not be copied, and steps shared them; "" where they were copied."""
    ended: bool = False
    """True if the command was ended here."""

    @property
    def is_whole(self) -> bool:
        """Return whether all steps were measured."""
        return len(self.windows) >= 2 * (WARM_UP + self.steps)

    @property
    def live(self) -> Sequence[StepTimes]:
        """The windows with the loader as it is."""
        return self.windows[WARM_UP : WARM_UP + self.steps]

    @property
    def replayed(self) -> Sequence[StepTimes]:
        """The windows with batches from memory."""
        begin = 2 * WARM_UP + self.steps
        return self.windows[begin : begin + self.steps]


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
        duplicate, nbytes = self._copy_of(batch)
        self._kept_bytes, self._largest_bytes = self._kept_bytes + nbytes, max(nbytes, self._largest_bytes)
        self._originals.append(duplicate)

    @property
    def is_empty(self) -> bool:
        """Return whether no copy lies ready."""
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
        nbytes = sum(item.nbytes for item in memo.values() if isinstance(getattr(item, "nbytes", None), int))
        originals = memo.get(id(memo), ())
        is_pinned = any(isinstance(item, torch.Tensor) and item.is_pinned() for item in originals)
        return (_pinned(duplicate) if is_pinned else duplicate), nbytes


def wait_for_device() -> None:
    """Until what was asked of it is done; the host runs ahead of it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)
