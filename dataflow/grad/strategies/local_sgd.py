"""Ranks step alone, and average their parameters every so many steps.

Local SGD (Stich 2019), DiLoCo (Douillard et al. 2023), and post-local SGD (Lin et al. 2020), which begins
with an all-reduce. No rank is ever more than `every` steps away from the common model, which bounds
its staleness. Between the averages nothing is sent.

While ranks are apart, one rank's checkpoint is not the run: DDP copies rank 0's parameters to all when it is
made. So the state of these strategies holds the rank's own parameters whenever they differ, and loading it
puts them back. The optimizer's state differs too: every rank saves and loads its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from dataflow.grad.strategies.hierarchical import ranks_by_node
from dataflow.grad.strategies.strategy import Strategy, StrategyContext, Wire


class LocalStrategy(Strategy):
    """Keeps account of whether parameters are equal on all ranks. Args: as `Strategy`."""

    def parameters(self) -> Iterable[Tensor]:
        """The data of all parameters, in the model's order."""
        return [parameter.data for parameter in self.context.parameters.values()]

    @torch.no_grad()
    def average(self) -> None:
        """Average the parameters now, if ranks have drifted apart; on all ranks."""
        if self.drifted:
            self.wire.mean(self.parameters())
        self.drifted = False

    def state_dict(self) -> dict[str, Any]:
        """The rank's parameters by name, if they are its own."""
        parameters = self.context.parameters.items() if self.drifted else ()
        return {"parameters": {name: parameter.detach().clone() for name, parameter in parameters}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put this rank's parameters back."""
        self.check_entries(state, {"parameters"})
        for name, tensor in self.checked_tensors(state["parameters"]).items():
            self.context.parameters[name].copy_(tensor)
        self.drifted = bool(state["parameters"])


def _checked_every(every: int) -> int:
    if every < 1:
        raise ValueError(f"every must be >= 1 step, got {every}")
    return every


class LocalSGD(LocalStrategy):
    """Average the parameters every so many steps. Momentum and other optimizer state stay each rank's own.

    Args:
        every: steps from one average to the next; 1 with plain SGD is what averaging gradients does.
    """

    def __init__(self, every: int = 8) -> None:
        super().__init__("local-sgd", every=_checked_every(every))
        self.every = every

    @torch.no_grad()
    def after_step(self, step: int, *, skipped: bool) -> None:
        """Average at every `every`-th step."""
        if skipped:
            return
        self.drifted = True
        if (step + 1) % self.every == 0:
            self.average()


class DiLoCo(LocalStrategy):
    """Average what ranks did in `every` steps; an outer SGD with Nesterov momentum takes that as a gradient.

    A parameter that no rank has moved in these steps has none.

    Costs the memory of the parameters twice: the last common model, and the outer momentum.

    Args:
        every: inner steps for an outer one.
        outer_lr: of the outer SGD; 1 without momentum is plain averaging.
        outer_momentum: of the outer SGD, Nesterov's; 0 for none.
    """

    def __init__(self, every: int = 32, *, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> None:
        _checked_every(every)
        if outer_lr <= 0 or not 0 <= outer_momentum < 1:
            raise ValueError(
                f"outer_lr must be > 0 and outer_momentum in [0, 1), got {outer_lr} and {outer_momentum}"
            )
        super().__init__("diloco", every=every, outer_lr=outer_lr, outer_momentum=outer_momentum)
        self._every, self._lr, self._momentum = every, outer_lr, outer_momentum

    def setup(self, context: StrategyContext) -> None:
        """Nothing is common yet: parameters may still be loaded."""
        super().setup(context)
        self._common: dict[str, Tensor] = {}

    def before_step(self, step: int) -> None:
        """Remember the common model before the first step."""
        if not self._common:
            self._begin()

    def _begin(self) -> None:
        self._common = {name: p.detach().clone() for name, p in self.context.parameters.items()}
        nesterov = self._momentum > 0
        self._outer = torch.optim.SGD(self._common.values(), self._lr, self._momentum, nesterov=nesterov)

    @torch.no_grad()
    def after_step(self, step: int, *, skipped: bool) -> None:
        """Take an outer step at every `every`-th step."""
        if skipped:
            return
        self.drifted = True
        if (step + 1) % self._every:
            return
        ways = [common - self.context.parameters[name] for name, common in self._common.items()]
        for common, way in zip(self._common.values(), ways, strict=True):
            common.grad = way
        has_moved = torch.stack([way.any().to(ways[0]) for way in ways])  # travels with those of its kind
        self.wire.mean([*ways, has_moved])
        for common, share in zip(self._common.values(), has_moved.tolist(), strict=True):
            if not share:  # zeros in place of none would move it by the outer momentum
                common.grad = None
        self._outer.step()
        self._outer.zero_grad()
        for name, common in self._common.items():
            self.context.parameters[name].copy_(common)
        self.drifted = False

    def state_dict(self) -> dict[str, Any]:
        """The common model and the outer momentum, by name; this rank's parameters, if they are its own."""
        momentum = {}
        for name, common in self._common.items():
            buffer = self._outer.state.get(common, {}).get("momentum_buffer")
            if buffer is not None:
                momentum[name] = buffer.clone()
        copies = {name: tensor.clone() for name, tensor in self._common.items()}
        return super().state_dict() | {"common": copies, "momentum": momentum}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; every rank loads its own."""
        self.check_entries(state, {"parameters", "common", "momentum"})
        common, momentum = self.checked_tensors(state["common"]), self.checked_tensors(state["momentum"])
        super().load_state_dict({"parameters": state["parameters"]})
        if not common:  # before the first step
            self._common = {}
            return
        self._begin()
        for name, tensor in common.items():
            self._common[name].copy_(tensor)
        for name, buffer in momentum.items():
            self._outer.state[self._common[name]]["momentum_buffer"] = buffer


class PostLocalSGD(LocalStrategy):
    """All-reduce gradients until `start_step`, then average parameters.

    To the bit as PyTorch's `post_localSGD_hook` and `PeriodicModelAverager` do it.

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
        setting = every if isinstance(every, int) else dict(every)
        super().__init__(
            "post-local-sgd", every=setting, start_step=start_step, reduce_in_node=reduce_in_node
        )
        self._every, self._start_step, self._reduce_in_node = setting, start_step, reduce_in_node

    def setup(self, context: StrategyContext) -> None:
        """Make the groups; all ranks. `ValueError` for numbers of ranks that are not the model's."""
        super().setup(context)
        self._step = 0
        by_node = ranks_by_node(context.topology, "reduce_in_node=True") if self._reduce_in_node else []
        self._inside = self.wire_among(by_node)
        world = context.world_size
        sizes = {self._every: world} if isinstance(self._every, int) else self._every
        if context.group is None:
            self._averaging = dict.fromkeys(sizes, self.wire)
            return
        if list(sizes.values())[-1] != world or any(size < 1 or world % size for size in sizes.values()):
            raise ValueError(f"every must end with all {world} ranks, in equal parts before; got {sizes}")
        self._averaging = {period: self._wire_of(size) for period, size in sizes.items()}

    def _wire_of(self, size: int) -> Wire:
        """Over so many consecutive ranks."""
        ranks = range(self.context.world_size)
        parts = [ranks[start : start + size] for start in ranks[::size]]
        return self.wire if len(parts) == 1 else self.wire_among(parts)

    def syncs(self, step: int) -> bool:
        """Until `start_step`, and after it if nodes reduce."""
        return step < self._start_step or self._reduce_in_node

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the all-reduce of now: over all ranks, over the node, or none."""
        wire = self.wire if self._step < self._start_step else self._inside
        return wire.begin_add(bucket.buffer().div_(wire.size))  # as PyTorch's hook; DDP takes times 1 / ranks

    @torch.no_grad()
    def after_step(self, step: int, *, skipped: bool) -> None:
        """Average, when it is time."""
        self._step = step + (not skipped)
        if self.context.group is None or skipped or step < self._start_step:
            return
        self.drifted = True
        # As PyTorch's averagers count: one period since the start, several since the first step.
        number = step - self._start_step if isinstance(self._every, int) else step
        wire = next((w for period, w in reversed(self._averaging.items()) if number % period == 0), None)
        if wire is self.wire:
            self.average()
        elif wire is not None:
            wire.mean(self.parameters())

    def state_dict(self) -> dict[str, Any]:
        """The step; this rank's parameters, if they are its own."""
        return super().state_dict() | {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; every rank loads its own."""
        self.check_entries(state, {"parameters", "step"})
        step = int(state["step"])
        super().load_state_dict({"parameters": state["parameters"]})
        self._step = step
