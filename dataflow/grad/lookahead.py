"""The batches of the window after this one, held until their turn, with their weights.

Looking ahead by one window is what lets every loss be scaled right before its first forward pass. One batch
is taken for the next window before each microbatch of the present one, so up to `accumulate` + 1 batches are
held, and waiting for the loader is spread over the window.

An epoch may end before a rank's loader does (`uneven="min"`). The loader is then left one batch after those
taken for windows, by the run itself and by one resumed from there: a sampler that draws from a generator
draws once more where it ends, so both must take it as far.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Weight = float | Callable[[Any], Any]
"""Of one microbatch: a constant, or a function of the batch."""
_NONE = object()
"""In place of a batch."""


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
        self._no_windows = self._rest_has_none = False

    def window_ended(self, share: Share, *, last: bool) -> None:
        """The batches of a window were trained on; `last`: none follows in this epoch."""
        self._consumed, self._no_windows = share.state, last

    def epoch_ended(self) -> None:
        """No window of the epoch follows, though the loader may have more: the shortest rank has ended it."""
        self._no_windows = False
        if self._iterator is not None and self._has_state:
            self._consumed = self._share.state
            self._leave()
        self._left_early = not self.exhausted
        if self.exhausted:
            self._consumed = self._loader_state()

    def _leave(self) -> None:
        """Take one batch more, for nobody."""
        assert self._iterator is not None
        if next(self._iterator, _NONE) is _NONE:
            self._iterator = None

    def state(self) -> dict[str, Any]:
        """Where the loader stood after the batches trained on.

        "no_windows": what is left of that epoch has none, on any rank. "left_early": it is over, though the
        loader has more.
        """
        return {"loader": self._consumed, "left_early": self._left_early, "no_windows": self._no_windows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the loader back to `state()`; `ValueError` if it cannot be."""
        if state["loader"] is not None:
            if not callable(getattr(self._loader, "load_state_dict", None)):
                raise ValueError(
                    "the state has the place of a loader, but this loader has no load_state_dict"
                )
            self._loader.load_state_dict(state["loader"])
        elif self._has_state:
            raise ValueError("the state has no place of the loader, which would start over")
        self._consumed = state["loader"]
        self._left_early = self._to_leave = bool(state.get("left_early"))
        # A loader without a state begins an epoch anew.
        self._no_windows = self._rest_has_none = bool(state.get("no_windows")) and state["loader"] is not None

    def place(self) -> tuple[dict[str, Any], Any]:
        """For `put_back`, between loops."""
        return dict(vars(self)), self._loader_state()

    def put_back(self, own: Mapping[str, Any], loader: Any) -> None:
        """Undo a `load`."""
        vars(self).update(own)
        if loader is not None:
            self._loader.load_state_dict(loader)

    def settle(self) -> None:
        """Before an epoch: leave the one that had ended when the state was taken, by beginning its rest."""
        if self._to_leave:
            self._iterator = iter(self._loader)
            self._leave()
            self.end()
        self._left_early = self._to_leave = False

    def batches_ahead(self) -> int:
        """Batches that the next loop takes for windows; -1 where nobody can tell."""
        return 0 if self._rest_has_none else batches_ahead(self._loader)

    def begin(self) -> None:
        """Begin an epoch, or the rest of one."""
        self.end()
        self._no_windows, self._rest_has_none = self._rest_has_none, False
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
        if self._iterator is None or self._no_windows or len(self._share.batches) == self._accumulate:
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
