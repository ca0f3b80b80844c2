"""`GradSchedule`: what a training loop calls for accumulation, reduction and optimizer steps.

It checks its arguments, compares them with the other ranks', puts its parts together, and is the front of
`StepLoop`. Users call the microbatches of one optimizer step a window; in the code they are a step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from dataflow.grad.adapt.controller import Mode
from dataflow.grad.adapt.options import Adapt, allowed, with_options
from dataflow.grad.agreement import Consensus, give_private_back, private_group
from dataflow.grad.boundary import StepBoundary, check_boundary
from dataflow.grad.gate import GateDecision, GateMode, GateModeOf, Io, IoGate, checked_io
from dataflow.grad.loop import StepLoop
from dataflow.grad.negotiation import WindowControl
from dataflow.grad.step import (
    MICROBATCHES,
    Partial,
    Position,
    ScheduleSettings,
    Step,
    Uneven,
    Weight,
    check_same_windows,
)
from dataflow.grad.strategies.all_reduce import AllReduce, Delayed
from dataflow.grad.strategies.strategy import Strategy, StrategyContext
from dataflow.grad.wrapper import (
    DdpModel,
    ModelWrapper,
    check_hooks,
    check_optimizer,
    sparse_layer,
    trainable,
    wrapper_of,
)
from dataflow.tables import Row, Shown
from dataflow.telemetry.status.page import schedule_status
from dataflow.telemetry.timing.phases import Phase, PhaseLedger, StepInfo
from dataflow.telemetry.timing.report import Report, report_of, write_trace
from dataflow.topology_exchange import detect_topology
from prefetch.weak_registry import WeakRegistry
from sharding.topology.topology import Topology

_IN_USE: WeakRegistry[Strategy] = WeakRegistry()
"""Strategies of schedules that are not closed: a strategy knows one model only."""


class GradSchedule(Shown):
    """Gradient accumulation in windows that equal one large batch, on one rank or many.

    Iterating runs one epoch of the loader and yields its microbatches; for each, call `backward` and then
    `step`. Ranks may have different numbers of batches, last windows may be short, weights may vary: the
    gradient of a window is that of all its samples together, to rounding. Used by one thread. Making one is
    collective: every rank does, with the same arguments.

    Args:
        loader: a `DataLoader`, or any iterable of batches.
        model: what is called in the loop: a plain module in one process, `DistributedDataParallel`, or one
            that `fully_shard` (FSDP2) was applied to.
        optimizer: made for the model's parameters.
        accumulate: microbatches a rank and window.
        global_batch: samples a window over all ranks, instead of `accumulate`: the same on any number of
            ranks. Needs a loader with a `batch_size`.
        weights: name -> weight of a microbatch, a constant or a function of the batch: what `scale` divides
            by. "microbatches" is there always, 1 each.
        max_norm: clip the window's gradient to this norm.
        scaler: a `torch.amp.GradScaler`.
        lr: a learning-rate scheduler, or several; stepped once after each step taken.
        ema: an `AveragedModel`, or a function called with the model after each step taken.
        uneven: where ranks have different numbers of microbatches: "pad" (those that lack some replay a batch
            with weight zero), "min" (the epoch ends with the shortest), "error".
        partial: the last windows, which are full on no rank: "keep" or "drop".
        strategy: how gradients travel; see docs/guide/gradient-accumulation.md.
        io: how reads of remote shards make room for gradients: "open" (not at all), "sync" (two at a time,
            which stand still while gradients travel), or "auto": each is tried for some windows and the best
            kept (docs/guide/gradient-accumulation.md). Needs a `DataLoader` over remote shards.
        adapt: what the controller may change beside that where gradients keep ranks waiting, although the
            numbers change with it: see `Adapt` and docs/notes/control.md. None: nothing.
        skip_nonfinite: skip the step, on all ranks, if the gradient is not finite. False without `max_norm`
            and `scaler` saves computing its norm.
        timeout_s: seconds that a rank waits for the others, to agree or for their gradients; longer than the
            longest pause of one rank, such as writing a checkpoint. On NCCL the time-out of the model's
            process group counts for gradients.
        topology: which ranks share a node; None: found.
        ledger: where phases are kept; listeners may be added to it.

    Raises:
        ValueError: an argument or a combination that cannot work.
        DisagreementError: ranks gave different arguments.

    Examples:
        >>> schedule = GradSchedule(loader, model, optimizer, 2, weights={"samples": lambda b: len(b["y"])})
        >>> for batch in schedule:
        ...     loss = mse_loss(model(batch["x"]), batch["y"], reduction="sum")
        ...     schedule.backward(loss * schedule.scale("samples"))
        ...     info = schedule.step()  # a `StepInfo` at the end of a window, None before
    """

    def __init__(
        self,
        loader: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accumulate: int | None = None,
        *,
        global_batch: int | None = None,
        weights: Mapping[str, Weight] | None = None,
        max_norm: float | None = None,
        scaler: Any = None,
        lr: Any = None,
        ema: Any = None,
        uneven: Uneven = "pad",
        partial: Partial = "keep",
        strategy: Strategy | None = None,
        io: Io | GateModeOf = "auto",
        adapt: Adapt | None = None,
        skip_nonfinite: bool = True,
        timeout_s: float = 600.0,
        topology: Topology | None = None,
        ledger: PhaseLedger | None = None,
    ) -> None:
        self._settings = ScheduleSettings(
            accumulate=accumulate,
            global_batch=global_batch,
            weights={} if weights is None else weights,
            uneven=uneven,
            partial=partial,
            max_norm=max_norm,
            skip_nonfinite=skip_nonfinite,
            timeout_s=timeout_s,
        )
        self._way_of = checked_io(io)
        schedulers = () if lr is None else tuple(lr) if isinstance(lr, Sequence) else (lr,)
        check_boundary(optimizer, schedulers, ema, scaler)
        self.strategy: Strategy = with_options(strategy or AllReduce(), adapt)
        wrapper = wrapper_of(model)
        check_hooks(wrapper)
        check_optimizer(wrapper, optimizer)
        _check_strategy(self.strategy, wrapper)
        self.phases = ledger or PhaseLedger()
        self._scaler = scaler
        self._agreement = Consensus(wrapper.ranks, timeout_s, lambda: wrapper.layers)
        several = self._agreement.world_size > 1
        self.window_size = self._settings.window_size(loader, self._agreement.world_size)
        """Microbatches a rank and full window."""
        pause = getattr(loader, "read_pause", None) if several else None
        ways = tuple(GateMode) if pause is not None and self._way_of is None else ()
        options = allowed(adapt, self.strategy, self.window_size, ways=ways)
        self._control = WindowControl(options, self.strategy) if options.tunables and several else None
        self._agreement.compare(
            {
                "what may change (adapt=, io=)": {knob.name: knob.options for knob in options.tunables},
                "accumulate": self.window_size,
                "strategy": self.strategy.key,
                "the kind of model": wrapper.kind,
                "a scaler": scaler is not None and scaler.is_enabled(),
                **self._settings.compared(),
            }
        )
        way_of = self._way_of or (self._control.way if self._control else None)
        self._gate = None if pause is None or way_of is None else IoGate(pause, self.phases, way_of)
        self._status = schedule_status(
            loader=str(getattr(loader, "name", "")),
            rank=self._agreement.ranks[self._agreement.rank],
            world_size=self._agreement.world_size,
            strategy=self.strategy.name,
            model=wrapper.kind,
        )
        self._loop = StepLoop(
            loader=loader,
            boundary=StepBoundary(
                model=wrapper,
                optimizer=optimizer,
                strategy=self.strategy,
                agreement=self._agreement,
                settings=self._settings,
                scaler=scaler,
                schedulers=schedulers,
                ema=ema,
            ),
            accumulate=self.window_size,
            phases=self.phases,
            gate=self._gate,
            control=self._control,
            status=self._status,
        )
        self._warned_of_scale = False
        self._implied: str | None = None
        self.last: StepInfo | None = None
        """The last return value of `step` at a boundary."""
        self._end_strategy = _set_up(
            self.strategy,
            wrapper,
            optimizer,
            self._agreement,
            timeout_s=timeout_s,
            topology=topology,
            on_bucket=functools.partial(self.phases.enter, Phase.SYNC),  # not `self`: DDP keeps it for ever
        )

    @property
    def io(self) -> GateDecision | None:
        """The way reads and gradients share the network at present, and why; None where no gate is needed."""
        if self._gate is None:
            return None
        if self._way_of is not None:
            return GateDecision(self._way_of(self._loop.position.window), "as told", {})
        return self._control.io if self._control else None

    @property
    def mode(self) -> Mode | None:
        """Return what the controller has decided, and why; the same on all ranks.

        None if it may change nothing.
        """
        return self._control.controller.mode if self._control else None

    @property
    def position(self) -> Position:
        """Windows, steps and totals so far; a copy."""
        return replace(self._loop.position, totals=dict(self._loop.position.totals))

    # ---- the loop -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """One epoch's microbatches; sync is switched for the forward and the backward pass of each."""
        for step in self._loop.steps():
            yield from self._loop.microbatches(step)

    def windows(self) -> Iterator[Iterator[Any]]:
        """One epoch's windows, each an iterator of its microbatches; call `step` after each window."""
        for step in self._loop.steps():
            yield self._loop.microbatches(step)

    def scale(self, name: str = MICROBATCHES) -> float:
        """Return what to multiply a microbatch's *sum* of losses with, for the mean over the weight `name`.

        The number of ranks divided by the weight's total over window and ranks; 0 in a replay.
        """
        microbatch = self._loop.present()
        microbatch.step.is_scaled = True
        return microbatch.scale(name)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the microbatch: once for each, with all its losses added up."""
        microbatch = self._loop.present()
        if microbatch.is_done:
            raise RuntimeError("backward was called twice for one microbatch: add its losses up first")
        if self._implied is not None:
            loss = loss * self.scale(self._implied)
        if microbatch.is_replay:
            loss = loss * 0.0  # its gradient is zero, and its backward pass takes part in the reduction
        elif microbatch.index == 0 and isinstance(self._loop.model, DdpModel):
            self._loop.replay.note(microbatch.batch, loss)
        self._loop.model.forward_ended()
        if microbatch.reduces and not self.strategy.hooks_gradients:
            self.phases.enter(Phase.SYNC)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        try:
            self._loop.call(loss.backward)
        finally:
            self._loop.deadline.end()
        self.phases.enter(Phase.COMPUTE)
        microbatch.finish()

    def step(self) -> StepInfo | None:
        """End the window after its last microbatch, with an optimizer step; None after all others."""
        microbatch = self._loop.present()
        if not microbatch.is_done:
            raise RuntimeError("sched.step was called before sched.backward(loss) for this microbatch")
        if not microbatch.is_last or microbatch.step.has_ended:
            return None
        self._check_scaled(microbatch.step)
        self.phases.enter(Phase.STEP)
        number, replays = self._loop.position.step, microbatch.step.plan.replays
        outcome = self._loop.call(lambda: self._loop.boundary.step(number, replays=replays))
        self.phases.enter(Phase.COMPUTE)
        self.last = self._loop.end(microbatch.step, outcome)
        return self.last

    def _check_scaled(self, step: Step) -> None:
        """Warn, once, of losses that nobody divided by the step's size."""
        count = step.plan.counts[self._agreement.rank]
        if count < 2 or step.is_scaled or self._warned_of_scale:
            return
        self._warned_of_scale = True
        warnings.warn(
            f"the gradients of {count} microbatches were added up, and no loss of this window was multiplied "
            f"by sched.scale(): losses that are means give {count} times the gradient; multiply them by "
            'sched.scale(), and sums by sched.scale("tokens") or another of the weights',
            stacklevel=3,
        )

    @contextmanager
    def accumulate(self, name: str = MICROBATCHES) -> Iterator[None]:
        """Serve loops written for Accelerate: `backward` takes the unscaled loss, leaving the block steps.

        The loss is the mean over the microbatch for the default `name`, the sum for other weights.
        """
        self._implied = name
        try:
            yield
        finally:
            self._implied = None
        self.step()

    # ---- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands after the last window that ended.

        The loader's state in it is that of the batches trained on, not of those looked ahead at. Model,
        optimizer, scaler, schedule and average are yours to save. JSON, where loader's and strategy's are.

        Raises `RuntimeError` inside a window: gradients are no part of it.
        """
        if self._loop.microbatch is not None:
            raise RuntimeError("a window is under way: take the state after step() has returned a StepInfo")
        return {
            **self._loop.position.to_json(),
            "accumulate": self.window_size,
            "global_batch": self._settings.global_batch,
            "world_size": self._agreement.world_size,
            **self._loop.boundary.units(),
            **self._loop.look.state(),
            "strategy": {"key": self.strategy.key, "state": self.strategy.state_dict()},
            "control": self._control.state_dict() if self._control else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the window at which `state_dict` was taken; the next loop takes its loader's place.

        On another number of ranks what a strategy has kept for each rank is dropped, with a warning.

        Raises `ValueError` if the state does not fit; then nothing has changed.
        """
        if self._loop.is_running:
            raise RuntimeError("a loop is under way: load the state before it")
        position = Position.from_json(state, self._settings.weights)
        check_same_windows(
            state,
            accumulate=self.window_size,
            global_batch=self._settings.global_batch,
            strategy=self.strategy.key,
        )
        strategy_state, control = state["strategy"]["state"], state.get("control")
        same_ranks = state["world_size"] == self._agreement.world_size
        if strategy_state and not same_ranks:
            warnings.warn(
                f"the state of {self.strategy.name} is that of {state['world_size']} ranks, here are "
                f"{self._agreement.world_size}: it begins anew",
                stacklevel=2,
            )
        with ExitStack() as undo:
            undo.callback(self._loop.boundary.load_units, self._loop.boundary.units())
            self._loop.boundary.load_units(state)
            undo.callback(self._loop.look.undo_of_load())
            self._loop.look.load(state)
            if self._control and control is not None and same_ranks:  # elsewhere other things are measured
                undo.callback(self._control.load_state_dict, self._control.state_dict())
                self._control.load_state_dict(control)
            if strategy_state and same_ranks:
                self.strategy.load_state_dict(strategy_state)
            undo.pop_all()
        self._loop.position = position

    def report(self, *, all_ranks: bool = False, trace: str | None = None) -> Report:
        """Return where the time of the windows so far went (the last 2,000), and what to do about it.

        Args:
            all_ranks: compare the ranks; collective, all call it at the same place. Else this rank tells
                only what it knows, and waiting for slower ranks counts as communication.
            trace: write a Chrome trace to this path; on the first rank only where all ranks are asked.

        Raises `ValueError` before the first window has ended.
        """
        step_record = self._loop.recorder.record(events=trace is not None)
        records = self._agreement.gathered(step_record) if all_ranks else [step_record]
        if trace is not None and (not all_ranks or self._agreement.rank == 0):
            write_trace({record.rank: record.events for record in records}, trace)
        return report_of(records)

    def _shown(self) -> Iterator[Row]:
        agreement, position = self._agreement, self._loop.position
        yield "accumulate", f"{self.window_size} microbatches"
        yield "global batch", str(self._settings.global_batch or "")
        yield "rank", f"{agreement.rank} of {agreement.world_size}"
        yield "strategy", self.strategy.name
        yield "window", str(position.window)
        yield "step", str(position.step)
        yield "model", self._loop.model.kind

    # ---- its end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give groups back, on all ranks. Idempotent.

        Loader and model stay usable; where a strategy has reduced gradients, its hook stays in DDP, and
        training goes on with the module in a new `DistributedDataParallel`.
        """
        self._loop.model.restore()
        if self._gate:
            self._gate.close()
        self._loop.recorder.close()
        if self._status is not None:
            self._status.ends()
        self._end_strategy()
        self._agreement.close()

    def __enter__(self) -> GradSchedule:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close; an error of a connection becomes one that names the rank that is gone."""
        explained = error and self._agreement.explained(error, also=self._loop.model.group)
        self.close()
        if explained is not error and explained is not None:
            raise explained from error


# ---- setting a strategy up ------------------------------------------------------------------------------


def _check_strategy(strategy: Strategy, model: ModelWrapper) -> None:
    """`ValueError` if the strategy has nothing to hook into, or cannot send what the model makes."""
    if strategy in _IN_USE:
        raise ValueError(
            f"this {strategy.name} belongs to another GradSchedule: make one for each, or close that schedule"
        )
    if strategy.hooks_gradients and not isinstance(model, DdpModel):
        raise ValueError(f"{strategy.name} needs DistributedDataParallel's hook, got a {model.kind} model")
    sparse = sparse_layer(model.inner)
    if sparse is not None and (strategy.hooks_gradients or isinstance(strategy, Delayed)):
        raise ValueError(
            f"{strategy.name} needs dense gradients, and {sparse!r} makes sparse ones: make it with "
            "sparse=False, or leave the reduction to AllReduce()"
        )


def _set_up(
    strategy: Strategy,
    model: ModelWrapper,
    optimizer: torch.optim.Optimizer,
    agreement: Consensus,
    *,
    timeout_s: float,
    topology: Topology | None,
    on_bucket: Callable[[], None],
) -> Callable[[], None]:
    """Set the strategy up on all ranks; `on_bucket` is called before each bucket. Returns what ends it."""
    group = None
    if agreement.world_size > 1 and type(strategy) is not AllReduce:
        # With the backend of the gradients: host memory is not where they are under NCCL.
        backend = dist.get_backend(model.group) if model.group is not None else "gloo"
        group = private_group(agreement.ranks, timeout_s, backend)
    strategy.setup(
        StrategyContext(
            model=model.inner,
            optimizer=optimizer,
            parameters=trainable(model.inner),
            group=group,
            rank=agreement.rank,
            world_size=agreement.world_size,
            topology=topology or detect_topology(),
            timeout_s=timeout_s,
        )
    )
    _IN_USE.add(strategy)

    def reduced(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        on_bucket()
        return strategy.reduce(bucket)

    if strategy.hooks_gradients and isinstance(model, DdpModel):
        # DDP compares annotations with its classes, and ours are strings: a lambda has none.
        model.ddp.register_comm_hook(None, lambda _, bucket: reduced(bucket))

    def end() -> None:
        nonlocal group
        strategy.close()
        _IN_USE.discard(strategy)
        if not agreement.lost:
            give_private_back(group)
        group = None

    return end
