"""The batches of the window after this one, held until their turn, with their weights.

Looking ahead by one window is what lets every loss be scaled right before its first forward pass. One batch
is taken for the next window before each microbatch of the present one, so up to `accumulate` + 1 batches are
held, and waiting for the loader is spread over the window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Weight = float | Callable[[Any], Any]
"""Of one microbatch: a constant, or a function of the batch."""


@dataclass
class Share:
    """What one rank has for one window."""

    batches: list[Any] = field(default_factory=list)
    weights: list[dict[str, float]] = field(default_factory=list)
    state: Any = None
    """The loader's state after the last of these batches; None if it has none."""


class LookAhead:
    """Takes batches from a loader, window by window. Used by one thread.

    Args:
        loader: any iterable; where it has a `state_dict`, its state is kept with each window.
        accumulate: batches of a full window.
        weigh: the weights of a batch.
    """

    def __init__(self, loader: Any, accumulate: int, weigh: Callable[[Any], dict[str, float]]) -> None:
        self._loader, self._accumulate, self._weigh = loader, accumulate, weigh
        self._has_state = callable(getattr(loader, "state_dict", None))
        self._iterator: Iterator[Any] | None = None
        self._share = Share()
        self.taken = 0
        """Batches taken in this epoch."""
        self._consumed = self._loader_state()
        self._left_early = self._to_leave = False

    def window_ended(self, share: Share) -> None:
        """The batches of a window were trained on."""
        self._consumed = share.state

    def epoch_ended(self) -> None:
        """No window of the epoch follows, though the loader may have more: the shortest rank has ended it."""
        self._left_early = not self.exhausted
        if self.exhausted:
            self._consumed = self._loader_state()

    def state(self) -> dict[str, Any]:
        """Where the loader stood after the batches trained on; whether that epoch is over all the same."""
        return {"loader": self._consumed, "left_early": self._left_early}

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the loader back to `state()`; `ValueError` if it cannot be."""
        if state["loader"] is not None:
            if not callable(getattr(self._loader, "load_state_dict", None)):
                raise ValueError(
                    "the state has the place of a loader, but this loader has no load_state_dict"
                )
            self._loader.load_state_dict(state["loader"])
        self._consumed = state["loader"]
        self._left_early = self._to_leave = bool(state.get("left_early"))

    def settle(self) -> None:
        """Before an epoch: leave the one that had ended when the state was taken, by beginning its rest."""
        if self._to_leave:
            self._iterator = iter(self._loader)
            next(self._iterator, None)
            self.end()
        self._left_early = self._to_leave = False

    def begin(self) -> None:
        """Begin an epoch."""
        self.end()
        self._share, self.taken = Share(state=self._loader_state()), 0
        self._iterator = iter(self._loader)

    def end(self) -> None:
        """Let go of the loader's iterator and of what is held."""
        iterator, self._iterator = self._iterator, None
        self._share = Share()
        if callable(close := getattr(iterator, "close", None)):
            close()

    @property
    def exhausted(self) -> bool:
        """The loader has no more batches."""
        return self._iterator is None

    def take_one(self) -> bool:
        """Take one more batch for the next window; False if the window is full or the loader exhausted."""
        if self._iterator is None or len(self._share.batches) == self._accumulate:
            return False
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return False
        self._share.batches.append(batch)
        self._share.weights.append(self._weigh(batch))
        # After every batch: only the next attempt tells whether it was the last, and by then the loader
        # stands at the beginning of another epoch.
        self._share.state = self._loader_state()
        self.taken += 1
        return True

    def fill(self) -> Share:
        """Take what the next window lacks, and look at it."""
        while self.take_one():
            pass
        return self._share

    def next_share(self) -> Share:
        """The filled window; another one begins."""
        share, self._share = self._share, Share(state=self._share.state)
        return share

    def _loader_state(self) -> Any:
        """The loader's own word; None if it has no state."""
        return copy.deepcopy(self._loader.state_dict()) if self._has_state else None


def weigher(
    weights: Mapping[str, Weight], check: Callable[[str, Any], float]
) -> Callable[[Any], dict[str, float]]:
    """A function from a batch to all its weights."""

    def weigh(batch: Any) -> dict[str, float]:
        return {name: check(name, of(batch) if callable(of) else of) for name, of in weights.items()}

    return weigh


def batches_ahead(loader: Any) -> int:
    """Batches that the next loop over the loader runs; -1 where nobody can tell."""
    left = getattr(loader, "batches_left", None)
    if isinstance(left, int):
        return left
    resumed = getattr(loader, "_resumed", None)  # our own loader over other datasets: None unless resumed
    if resumed is not None or (hasattr(loader, "load_state_dict") and not hasattr(loader, "_resumed")):
        return -1
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1
