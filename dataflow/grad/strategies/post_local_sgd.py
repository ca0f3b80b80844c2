"""PyTorch's post-local SGD (Lin et al. 2020): all-reduce at first, then averages of the parameters.

The hook is `post_localSGD_hook`, the averages are `PeriodicModelAverager`'s or `HierarchicalModelAverager`'s.
From `start_step` on, gradients are reduced inside each node only, or not at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as stock
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.futures import Future

from dataflow.grad.strategies.drift import Drifting
from dataflow.grad.strategies.groups import give_back, own_group, ranks_by_node
from dataflow.grad.strategies.strategy import StrategyContext
from dataflow.grad.strategies.wire import Wire


class PostLocalSGD(Drifting):
    """All-reduce gradients until `start_step`, then average parameters.

    Args:
        every: steps between averages over all ranks, >= 2. Or a mapping from steps to the number of
            consecutive ranks that average then, such as {4: 8, 16: 64}: the largest period that divides the
            step wins; the last one must have all ranks.
        start_step: the first step without an all-reduce.
        reduce_in_node: from then on, all-reduce gradients inside each node (by `context.topology`).
    """

    hooks_gradients = True

    def __init__(
        self, every: int | Mapping[int, int] = 8, *, start_step: int = 0, reduce_in_node: bool = False
    ) -> None:
        periods = [every] if isinstance(every, int) else list(every)
        if not periods or min(periods) < 1 or max(periods) < 2 or periods != sorted(set(periods)):
            raise ValueError(f"every must be >= 2 steps; several in ascending order; got {every}")
        if start_step < 0:
            raise ValueError(f"start_step must be >= 0, got {start_step}")
        told = every if isinstance(every, int) else dict(every)
        super().__init__("post-local-sgd", every=told, start_step=start_step, reduce_in_node=reduce_in_node)
        self._every, self._start_step, self._reduce_in_node = every, start_step, reduce_in_node

    def setup(self, context: StrategyContext) -> None:
        """Make groups and averagers; all ranks."""
        super().setup(context)
        self._step = 0
        by_node = ranks_by_node(context.topology, "reduce_in_node=True") if self._reduce_in_node else []
        if context.group is None:
            return
        self._inside = Wire(own_group(context, by_node))
        self._hook_state = stock.PostLocalSGDState(
            context.group, self._inside.group, self._start_step, self._inside.size > 1
        )
        self._averager: PeriodicModelAverager | HierarchicalModelAverager
        if isinstance(self._every, int):
            self._averager = PeriodicModelAverager(self._every, self._start_step, context.group)
            self._averaging: dict[int, Wire] = {self._every: self.wire}
        else:
            sizes = OrderedDict(self._every)
            self._averager = HierarchicalModelAverager(sizes, self._start_step, context.group)
            groups = self._averager.period_process_group_dict
            self._averaging = {p: self.wire if g is context.group else Wire(g) for p, g in groups.items()}

    def syncs(self, step: int) -> bool:
        """Until `start_step`, and after it if nodes reduce."""
        return step < self._start_step or self._reduce_in_node

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the all-reduce of now: over all ranks, over the node, or none."""
        if self.context.group is None:
            return super().reduce(bucket)
        # The hook counts backward passes; a window may have several.
        self._hook_state.iter = self._step
        wire = self.wire if self._step < self._start_step else self._inside
        wire.count_all_reduce(bucket.buffer().nbytes)
        future: Future[Tensor] = stock.post_localSGD_hook(self._hook_state, bucket)
        return future

    def after_step(self, step: int, *, skipped: bool) -> None:
        """Average, when it is time."""
        self._step = step + (not skipped)
        if self.context.group is None or skipped:
            return
        self._averager.step = step
        self.drifted |= step >= self._start_step
        wire = self._due(step)
        if wire is None:
            return
        # The stock averager passes over parameters without a gradient; `zero_grad` may have run already.
        parameters = list(self.context.parameters.values())
        lent = [parameter for parameter in parameters if parameter.grad is None]
        for parameter in lent:
            parameter.grad = parameter.data
        try:
            self._averager.average_parameters(parameters)
        finally:
            for parameter in lent:
                parameter.grad = None
        wire.count_all_reduce(sum(parameter.nbytes for parameter in parameters))
        if wire is self.wire:
            self.drifted = False

    def _due(self, step: int) -> Wire | None:
        """The group that averages after a step, by the stock averagers' rules."""
        if step < self._start_step:
            return None
        since = step - self._start_step if isinstance(self._every, int) else step
        return next((w for period, w in reversed(self._averaging.items()) if since % period == 0), None)

    def bytes_sent(self) -> int:
        """Gradients and parameters, over all groups."""
        if self.context.group is None:
            return 0
        wires = {id(wire): wire for wire in (self.wire, self._inside, *self._averaging.values())}
        return sum(wire.sent for wire in wires.values())

    def state_dict(self) -> dict[str, Any]:
        """The step; this rank's parameters, if they are its own."""
        return super().state_dict() | {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; every rank loads its own."""
        self.check_entries(state, {"parameters", "step"})
        step = int(state["step"])
        super().load_state_dict({"parameters": state["parameters"]})
        self._step = step

    def close(self) -> None:
        """Destroy the groups."""
        if hasattr(self, "_averaging"):
            parts = [wire for wire in (self._inside, *self._averaging.values()) if wire is not self.wire]
            give_back([wire.group for wire in parts])
            for wire in parts:
                wire.group = None
