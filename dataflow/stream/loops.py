"""The loops over one loader: which epoch each runs, how far it is, and whose position is the loader's.

Loops have their epochs in order of `iter`, but where they begin is decided when the first of them is asked
for a batch: training loops set the epoch after `iter`. The loader stands where its newest loop stands.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Generator
from numbers import Integral
from typing import Any

from dataflow.dataset import ShardedDataset
from dataflow.mixture import Mixture
from dataflow.stream.session import Session
from prefetch.memory.lifetimes import Finalizer
from sharding.lengths.unit_plan import UNKNOWN
from sharding.plan.history import StepHistory
from sharding.plan.plan import RankPlan


class EpochLoop:
    """One loop over a loader: which epoch, how far it is, and what serves it."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The number among the loops over this loader, in order of `iter`."""
        self.begins: tuple[int, int] | None = None
        """Epoch and position where it begins; None: they follow from the loops before."""
        self.plan: RankPlan | None = None
        """The plan from where its session began; None: no batch was asked for."""
        self.taken = self.steps_before = 0
        """Batches of the plan that were handed out; steps of the plans that it had before."""
        self.num_ahead = 0
        """Batches handed out that a framework keeps for later (`LoopQueue.is_taken_ahead`)."""
        self.session: Session | None = None
        self.finalizer: Finalizer | None = None
        self.closed = False
        """True if the loader was closed meanwhile."""
        self.batches: Callable[[], Any] = lambda: None
        """The generator that the training code iterates over, if it still has it."""
        self._copied_from: tuple[int | None, bool] = None, False
        """`position` and `is_whole` of the loop that this one is a copy of."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy stands where this loop stands, and is not served."""
        numbers = {"number": self.number, "taken": self.taken, "num_ahead": self.num_ahead}
        return {**numbers, "_copied_from": (self.position, self.is_whole)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(0)  # type: ignore[misc]
        self.__dict__.update(state)

    @property
    def is_whole(self) -> bool:
        """Return whether it has all its batches; those that count batches do not ask for the end."""
        return self._copied_from[1] if self.plan is None else self.taken == self.plan.num_batches

    @property
    def has_ended(self) -> bool:
        """Return whether no batches are to come."""
        return self.closed or self.is_whole

    def warn_if_empty(self, epoch: int) -> None:
        """Say so where it went on where its epoch has no more batches."""
        if self.begins is not None and self.begins[1] > 0 and self.is_whole and not self.taken:
            warnings.warn(
                "this loop had no batch: the loaded state was taken in the loop, after the last batch of "
                f"epoch {epoch}. The next loop runs the next epoch. Take states behind the loop, "
                "or say which epoch comes: loader.set_epoch(...)",
                stacklevel=3,
            )

    @property
    def position(self) -> int | None:
        """Return where in the epoch the batches handed out end; None: none was asked for."""
        if self.plan is None:
            return self._copied_from[0]
        return self.plan.position_after(max(0, self.taken - self.num_ahead))

    def go_on_with(self, plan: RankPlan) -> None:
        """Have another plan, from where it is."""
        if self.plan is not None:
            self.steps_before += self.plan.batch_plan.steps_after(self.taken)
        self.plan, self.taken = plan, 0

    @property
    def is_live(self) -> bool:
        """Return whether its batches may still be asked for."""
        batches = self.batches()
        return not self.closed and getattr(batches, "gi_frame", None) is not None


class LoopFrame:
    """A variable of a loop's generator: it dies when the loop is over or left, however that happens."""

    __slots__ = ("__weakref__",)


class LoopQueue:
    """Loops in order of `iter`, and the position of their loader."""

    def __init__(self, dataset: ShardedDataset | Mixture) -> None:
        self._dataset = dataset
        self.epoch = 0
        """The epoch that runs, or runs next."""
        self.start = 0
        """Position at which the epoch begins, or goes on after a loaded state."""
        self.resumed = False
        """True if a state was loaded and no batch asked for since."""
        self.num_begun = 0
        self._in_epoch = False
        self._num_loops = 0
        self._num_ahead = self._next_ahead = 0
        """Batches that a framework was seen to take ahead, and those of the next loop."""
        self._since = 0
        """The loop from which on they move the loader's position."""
        self._last_begun = -1
        self._pending: list[EpochLoop] = []
        """Loops that were asked for, and not for a batch yet."""
        self.newest: EpochLoop | None = None
        """The loop whose position is the loader's; None: none has begun since."""
        self._before: StepHistory | None = StepHistory()
        """The steps before that loop; None: a state of before was loaded, which does not tell."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy stands where this queue stands, without the loops that wait."""
        stands = {"newest": copy.copy(self.newest), "_before": self.history}
        return {**self.__dict__, "_pending": [], **stands}

    @property
    def history(self) -> StepHistory | None:
        """The steps that the loader's state is behind; None: not known. Of loops at a time, the newest's."""
        return self._history()

    def standing(self) -> tuple[int | None, int]:
        """Return the steps that the state is behind, None: not known; and batches that are taken ahead."""
        history, newest = self.history, self.newest
        return None if history is None else history.num_steps, newest.num_ahead if newest else 0

    def _history(self, *, is_over: bool = False) -> StepHistory | None:
        before, loop = self._before, self.newest
        if before is None or loop is None or loop.plan is None:
            return before
        dealt = loop.plan.batch_plan
        steps = dealt.steps_after(max(0, loop.taken - loop.num_ahead))
        if is_over and loop.is_whole:
            steps = dealt.num_steps_global  # this rank may have had one less
        place = self.epoch, self.start, dealt.global_batch_size, dealt.world_size, loop.plan.tail
        return before.after(loop.steps_before + steps, *place)

    def add(
        self, batches_of: Callable[[EpochLoop], Generator[Any, None, None]]
    ) -> Generator[Any, None, None]:
        """Add a loop, whose batches `batches_of` makes."""
        if self._in_epoch:
            self._begin_epoch(*self.next_start())
        loop = EpochLoop(self._num_loops)
        self._num_loops += 1
        batches = batches_of(loop)
        loop.batches = weakref.ref(batches)
        self._pending.append(loop)
        return batches

    def begin(self, loop: EpochLoop, plan_of: Callable[[int, int], RankPlan]) -> RankPlan:
        """Decide what a loop delivers: it is asked for its first batch."""
        if loop in self._pending:
            count = self._pending.index(loop) + 1
            asked, self._pending = self._pending[:count], self._pending[count:]
            self._fix_starts(asked)
        assert loop.begins is not None
        loop.plan = plan_of(*loop.begins)
        if loop.number >= self._since:
            self._since = loop.number
            self._begin_epoch(*loop.begins)
            self.newest, self._in_epoch = loop, True
        if loop.plan.num_batches == UNKNOWN:
            loop.num_ahead = self._next_ahead
        self._next_ahead = 0
        self._last_begun = max(self._last_begun, loop.number)
        self.num_begun += 1
        return loop.plan

    def _fix_starts(self, loops: list[EpochLoop]) -> None:
        """Decide where loops begin, in the order they were asked for, without those that were dropped."""
        start = self.next_start()
        for loop in loops:
            if loop.is_live:
                loop.begins = start
                if not self._is_endless:
                    start = start[0] + 1, 0

    def end(self, loop: EpochLoop, epoch: int) -> None:
        """Move on to the next epoch, if it is the newest loop that has ended."""
        if self.newest is loop and not loop.closed:
            self._begin_epoch(epoch + 1, 0)

    def is_taken_ahead(self, epoch: int) -> bool:
        """Return whether a framework that begins an epoch now has taken its first batch before.

        Lightning does so with loaders that have no length, and stays a batch ahead, also in epochs that it
        begins later: the loader's position is that of the batches which it goes on to use.
        """
        newest = self.newest
        if newest is None or self.epoch != epoch or newest.taken != 1 or not newest.is_live:
            self._next_ahead = self._num_ahead
            return False
        self._num_ahead = newest.num_ahead = 1
        return True

    def is_last_begun(self, loop: EpochLoop) -> bool:
        """Return whether no later loop has begun."""
        return loop.number == self._last_begun

    def next_start(self) -> tuple[int, int]:
        """Epoch and position at which the next loop begins."""
        if not self._in_epoch:
            return self.epoch, self.start
        # The last loop was left early: a new loop is a new epoch.
        endless = not self._is_whole() and self._is_endless
        return (self.epoch, self.position) if endless else (self.epoch + 1, 0)

    @property
    def position(self) -> int:
        """Return where in the epoch the batches handed out by the newest loop end."""
        position = self.newest.position if self.newest else None
        return self.start if position is None else position

    def set_epoch(self, epoch: int) -> bool:
        """Let the next loop run this epoch, from its beginning; whether that moves the position."""
        if not isinstance(epoch, Integral) or epoch < 0:
            raise ValueError(f"epoch must be an integer >= 0, got {epoch!r}")
        if self._is_whole():
            self._begin_epoch(self.epoch + 1, 0)
        if epoch == self.epoch and not self._in_epoch:
            return False
        self._pending = [loop for loop in self._pending if loop.is_live]
        self._fix_starts(self._pending[:-1])
        self._pending = self._pending[-1:]
        self._since = self._pending[0].number if self._pending else self._num_loops
        self._begin_epoch(epoch, 0)
        return True

    def resume(self, epoch: int, position: int, history: StepHistory | None) -> None:
        """Let the next loop go on at a position that was loaded, behind these steps."""
        self._begin_epoch(epoch, position)
        self._before, self.resumed = history, True

    def _begin_epoch(self, epoch: int, start: int) -> None:
        if self.newest is not None:
            self._before = self._history(is_over=True)
        self.epoch, self.start, self._in_epoch = epoch, start, False
        self.newest, self.resumed = None, False

    def _is_whole(self) -> bool:
        """Return whether the newest loop has all batches of its epoch."""
        return self._in_epoch and self.newest is not None and self.newest.is_whole

    @property
    def _is_endless(self) -> bool:
        """Return whether an epoch has no end."""
        return isinstance(self._dataset, Mixture) and self._dataset.spec.stop == "never"
