"""The batches of the step after this one, held until their turn, with their weights.

Looking ahead by one step is what lets every loss be scaled right before its first forward pass. One batch is
taken for the next step before each microbatch of the present one, so up to `accumulate` + 1 batches are held,
and waiting for the loader is spread over the step.

An epoch may end before a rank's loader does (`uneven="min"`). The loader is then left one batch after those
taken for steps, by the run itself and by one resumed from there: a sampler that draws from a generator draws
once more where it ends, so both must take it as far.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_NONE = object()
"""In place of a batch."""


@dataclass
class StepBatches:
    """The batches that one rank has for one step."""

    batches: list[Any] = field(default_factory=list)
    weights: list[dict[str, float]] = field(default_factory=list)
    state: Any = None
    """The loader's state after the last of these batches; None if it has none."""


class LookAhead:
    """Takes batches from a loader, step by step. Used by one thread.

    Args:
        loader: any iterable; where it has a `state_dict`, its state is kept with each step.
        accumulate: batches of a full step.
        weigh: the weights of a batch.
    """

    def __init__(self, loader: Any, accumulate: int, weigh: Callable[[Any], dict[str, float]]) -> None:
        self._loader, self._accumulate, self._weigh = loader, accumulate, weigh
        self._has_state = callable(getattr(loader, "state_dict", None))
        self._iterator: Iterator[Any] | None = None
        self.share = StepBatches()
        """The share of the next step, as far as it was taken."""
        self.num_taken = 0
        """Batches taken in this epoch."""
        self._state = self._loader_state()
        """The loader's after the batches that were trained on."""
        self._left_early = self._must_leave = False
        self._no_steps = self._rest_has_none = False

    # ---- an epoch -----------------------------------------------------------------------------------

    def leave_ended_epoch(self) -> None:
        """Before an epoch: leave the one that had ended when the state was taken, by beginning its rest."""
        if self._must_leave:
            self._iterator = iter(self._loader)
            self._skip_one()
            self.end()
        self._left_early = self._must_leave = False

    def batches_ahead(self) -> int:
        """Batches that the next loop takes for steps; -1 where nobody can tell."""
        return 0 if self._rest_has_none else batches_ahead(self._loader)

    def begin(self) -> None:
        """Begin an epoch, or the rest of one."""
        self.end()
        self._no_steps, self._rest_has_none = self._rest_has_none, False
        self.share, self.num_taken = StepBatches(state=self._loader_state()), 0
        self._iterator = iter(self._loader)

    @property
    def exhausted(self) -> bool:
        """Return whether the loader has no more batches."""
        return self._iterator is None

    def take_one(self) -> bool:
        """Take one more batch for the next step; False if the step is full or the loader exhausted."""
        if self._iterator is None or self._no_steps or len(self.share.batches) == self._accumulate:
            return False
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return False
        self.share.batches.append(batch)
        self.share.weights.append(self._weigh(batch))
        # After every batch: only the next attempt tells whether it was the last, and by then the loader
        # stands at the beginning of another epoch.
        self.share.state = self._loader_state()
        self.num_taken += 1
        return True

    def fill(self) -> None:
        """Take what the next step lacks."""
        while self.take_one():
            pass

    def next_share(self) -> StepBatches:
        """The filled share; another one begins."""
        share, self.share = self.share, StepBatches(state=self.share.state)
        return share

    def step_ended(self, share: StepBatches, *, last: bool) -> None:
        """The batches of a step were trained on; `last`: none follows in this epoch."""
        self._state, self._no_steps = share.state, last

    def epoch_ended(self) -> None:
        """No step of the epoch follows, though the loader may have more: the shortest rank has ended it."""
        self._no_steps = False
        if self._iterator is not None and self._has_state:
            self._state = self.share.state
            self._skip_one()
        self._left_early = not self.exhausted
        if self.exhausted:
            self._state = self._loader_state()

    def end(self) -> None:
        """Let go of the loader's iterator and of what is held."""
        iterator, self._iterator = self._iterator, None
        self.share = StepBatches()
        if callable(close := getattr(iterator, "close", None)):
            close()

    def _skip_one(self) -> None:
        """Take one batch more, for nobody."""
        assert self._iterator is not None
        if next(self._iterator, _NONE) is _NONE:
            self._iterator = None

    # ---- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return where the loader stood after the batches trained on.

        "no_windows": what is left of that epoch has none, on any rank. "left_early": it is over, though the
        loader has more.
        """
        return {"loader": self._state, "left_early": self._left_early, "no_windows": self._no_steps}

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
        self._state = state["loader"]
        self._left_early = self._must_leave = bool(state.get("left_early"))
        # A loader without a state begins an epoch anew.
        self._no_steps = self._rest_has_none = bool(state.get("no_windows")) and state["loader"] is not None

    def undo_of_load(self) -> Callable[[], None]:
        """Return what undoes the next `load`; between loops."""
        fields, loader_state = dict(vars(self)), self._loader_state()

        def undo() -> None:
            vars(self).update(fields)
            if loader_state is not None:
                self._loader.load_state_dict(loader_state)

        return undo

    def _loader_state(self) -> Any:
        """Return what the loader says of its place; None if it has no state."""
        return copy.deepcopy(self._loader.state_dict()) if self._has_state else None


def batches_ahead(loader: Any) -> int:
    """Batches that the next loop over the loader runs; -1 where nobody can tell."""
    left = getattr(loader, "batches_left", "unknown")  # ours over shards know, or say None
    if left != "unknown":
        return -1 if left is None else int(left)
    if getattr(loader, "resumed", hasattr(loader, "load_state_dict")):  # ours tell, others may be resumed
        return -1
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1
