"""Several strategies of which one is in use, exchanged between two windows on all ranks at once.

DDP takes one communication hook for ever, so the hook asks here, and even the plain all-reduce runs in it.
Whatever a strategy knows from an earlier turn is stale when its next one comes: each turn begins as the first
did, with nothing owed. Parameters that have drifted apart are averaged before the next strategy begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from dataflow.grad.strategies.all_reduce import AllReduce, AllReduceHook
from dataflow.grad.strategies.local_sgd import LocalStrategy
from dataflow.grad.strategies.strategy import Strategy, StrategyContext


class StrategySwitch(Strategy):
    """One of several strategies at a time. Args: the strategies; the first is in use at first."""

    def __init__(self, options: Sequence[Strategy]) -> None:
        self.options = tuple(AllReduceHook() if type(each) is AllReduce else each for each in options)
        if len({each.hooks_gradients for each in self.options}) > 1:
            raise ValueError("strategies that hook gradients and others cannot take turns")
        self._option = 0
        self._new: list[dict[str, Any]] = []
        self.name = f"one of {', '.join(each.name for each in self.options)}"
        self.key = f"one of {', '.join(each.key for each in self.options)}"
        self.hooks_gradients = self.options[0].hooks_gradients

    @property
    def current(self) -> Strategy:
        """The strategy that is in use."""
        return self.options[self._option]

    def use(self, option: int) -> None:
        """Go on with another one, from the next window on; on all ranks."""
        if option == self._option:
            return
        before, self._option = self.current, option
        if isinstance(before, LocalStrategy):
            before.average()
        self.current.load_state_dict(self._new[option])

    def setup(self, context: StrategyContext) -> None:
        """Set all of them up, on one group: only one uses it at a time."""
        for each in self.options:
            each.setup(context)
        self._new = [each.state_dict() for each in self.options]

    def syncs(self, step: int) -> bool:
        """Answer as the strategy in use."""
        return self.current.syncs(step)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce as the strategy in use."""
        return self.current.reduce(bucket)

    def before_step(self, step: int) -> None:
        """Do what the strategy in use does before a step."""
        self.current.before_step(step)

    def after_step(self, step: int, *, skipped: bool) -> None:
        """Do what the strategy in use does after a step."""
        self.current.after_step(step, skipped=skipped)

    def lr_changed(self, ratio: float) -> None:
        """The others begin anew anyway."""
        self.current.lr_changed(ratio)

    def scale_changed(self, ratio: float) -> None:
        """Tell the strategy in use of the new scale."""
        self.current.scale_changed(ratio)

    def bytes_sent(self) -> int:
        """The bytes sent by all of the strategies."""
        return sum(each.bytes_sent() for each in self.options)

    def state_dict(self) -> dict[str, Any]:
        """Return which one is in use, and its state."""
        return {"option": self._option, "state": self.current.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the one that was in use."""
        self.check_entries(state, {"option", "state"})
        if state["option"] not in range(len(self.options)):
            raise ValueError(f"the state does not fit {self.key}: it has option {state['option']!r}")
        self.options[state["option"]].load_state_dict(state["state"])
        self._option = state["option"]

    def close(self) -> None:
        """Close all of the strategies."""
        for each in self.options:
            each.close()
