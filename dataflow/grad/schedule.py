"""`GradSchedule`: the loop over microbatches, windows and steps.

It owns the window: what is in it (agreed with the other ranks while the one before computes), when gradients
are reduced, and what happens at its end. Its invariant: for each rank and window the same collectives in the
same order, whatever the ranks' data.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from dataflow.grad.adapt.control import Control
from dataflow.grad.adapt.controller import Mode
from dataflow.grad.adapt.io_gate import GateDecision, GatePolicy, Io, IoGate, gate_policy
from dataflow.grad.adapt.knobs import Adapt, allowed, with_options
from dataflow.grad.adapt.strategy_switch import StrategySwitch
from dataflow.grad.agreement import Agreement
from dataflow.grad.boundary import Boundary, Outcome, check_boundary
from dataflow.grad.deadline import Deadline
from dataflow.grad.lookahead import LookAhead, Weight, weigher
from dataflow.grad.microbatch import Microbatch
from dataflow.grad.negotiation import Negotiation, Window
from dataflow.grad.position import Position, check_same_windows
from dataflow.grad.records import RankRecords, WindowRecorder
from dataflow.grad.replay import Replay
from dataflow.grad.settings import Settings, checked_names
from dataflow.grad.strategies.all_reduce import AllReduce
from dataflow.grad.strategies.strategy import Strategy
from dataflow.grad.strategy_setup import check_strategy, set_up
from dataflow.grad.units import Units
from dataflow.grad.windows import MICROBATCHES, Partial, Uneven, checked_weight
from dataflow.grad.wrapped import Ddp, buffers_kept, check_hooks, check_optimizer, mixes_batches, wrapped
from dataflow.timing.phases import Phase, PhaseLedger
from dataflow.timing.step_info import StepInfo
from sharding.topology.topology import Topology

if TYPE_CHECKING:
    from dataflow.timing.report import Report

T = TypeVar("T")


class GradSchedule:
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
        strategy: how gradients travel; see docs/gradient-accumulation.md.
        io: how reads of remote shards make room for gradients: "open" (not at all), "sync" (two at a time,
            which stand still while gradients travel), or
            "auto": each is tried for some windows and the best kept (docs/gradient-accumulation.md). Needs a
            `DataLoader` over remote shards.
        adapt: what the controller may change beside that where gradients keep ranks waiting, although the
            numbers change with it: see `Adapt` and docs/controller.md. None: nothing.
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
        io: Io | GatePolicy = "auto",
        adapt: Adapt | None = None,
        skip_nonfinite: bool = True,
        timeout_s: float = 600.0,
        topology: Topology | None = None,
        ledger: PhaseLedger | None = None,
    ) -> None:
        self._settings = Settings(
            accumulate,
            global_batch,
            checked_names(weights),
            uneven,
            partial,
            max_norm,
            skip_nonfinite,
            timeout_s,
        )
        policy = gate_policy(io)
        schedulers = () if lr is None else tuple(lr) if isinstance(lr, Sequence) else (lr,)
        check_boundary(optimizer, schedulers, ema, scaler)
        self.strategy: Strategy = with_options(strategy or AllReduce(), adapt)
        self._wrapped = wrapped(model)
        check_hooks(self._wrapped)
        check_optimizer(self._wrapped, optimizer)
        check_strategy(self.strategy, self._wrapped)
        self.phases = ledger or PhaseLedger()
        self._loader, self._scaler = loader, scaler
        self._agreement = Agreement(self._wrapped.ranks, timeout_s)
        self._deadline = Deadline(self._wrapped.group, timeout_s)
        self.window_size = self._settings.window_size(loader, self._agreement.world_size)
        """Microbatches a rank and full window."""
        hold = getattr(loader, "read_hold", None) if self._agreement.world_size > 1 else None
        may = allowed(adapt, self.strategy, self.window_size, gated=hold is not None and policy is None)
        self._control: Control | None = None
        if may.knobs and self._agreement.world_size > 1:
            self._control = Control(may, self.strategy)
        self._agreement.compare(
            {
                "what may change (adapt=, io=)": {knob.name: knob.options for knob in may.knobs},
                "accumulate": self.window_size,
                "strategy": self.strategy.key,
                "the kind of model": self._wrapped.kind,
                "a scaler": scaler is not None and scaler.is_enabled(),
                **self._settings.compared(),
            }
        )
        self._look = LookAhead(loader, self.window_size, weigher(self._settings.weights, checked_weight))
        self._negotiation = Negotiation(
            self._agreement,
            self._settings.weights,
            constant=self._settings.constant_weights,
            accumulate=self.window_size,
            uneven=uneven,
            partial=partial,
            replays_allowed=not mixes_batches(self._wrapped.inner),
            control=self._control,
        )
        self._boundary = Boundary(
            self._wrapped.inner,
            optimizer,
            self.strategy,
            self._agreement,
            max_norm,
            scaler,
            schedulers,
            ema,
            skip_nonfinite,
        )
        policy = policy or self._control
        self._gate = None if hold is None or policy is None else IoGate(hold, policy, self.phases)
        self._replay = Replay()
        self._running = self._warned_of_scale = False
        self._microbatch: Microbatch | None = None
        self._implied: str | None = None
        self._position = Position.start(self._settings.weights)
        self.last: StepInfo | None = None
        """What `step` returned last at a boundary."""
        self._units = Units(optimizer, scaler)
        self._recorder = WindowRecorder(self._wrapped, self.phases)
        self._records = RankRecords(
            self._recorder, self._agreement, self._wrapped, self.strategy, loader, self._control
        )
        self._end_strategy = set_up(
            self.strategy,
            self._wrapped,
            optimizer,
            self._agreement,
            timeout_s=timeout_s,
            topology=topology,
            on_bucket=functools.partial(self.phases.enter, Phase.SYNC),  # not `self`: DDP keeps it for ever
        )

    @property
    def io(self) -> GateDecision | None:
        """How reads and gradients share the network at present, and why; None where no gate is needed."""
        return self._gate.policy.decision if self._gate else None

    @property
    def mode(self) -> Mode | None:
        """What the controller has decided, and why; the same on all ranks. None if it may change nothing."""
        return self._control.mode if self._control else None

    @property
    def position(self) -> Position:
        """Windows, steps and totals so far; a copy."""
        return replace(self._position, totals=dict(self._position.totals))

    # ---- the loop -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """One epoch's microbatches; sync is switched for the forward and the backward pass of each."""
        for window in self._windows():
            yield from self._microbatches(window)

    def windows(self) -> Iterator[Iterator[Any]]:
        """One epoch's windows, each an iterator of its microbatches; call `step` after each window."""
        for window in self._windows():
            yield self._microbatches(window)

    def scale(self, name: str = MICROBATCHES) -> float:
        """What to multiply a microbatch's *sum* of losses with, for the mean over the weight `name`.

        The number of ranks divided by the weight's total over window and ranks; 0 in a replay.
        """
        microbatch = self._open()
        microbatch.window.scaled = True
        return microbatch.scale(name)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the microbatch: once for each, with all its losses added up."""
        microbatch = self._open()
        if microbatch.done:
            raise RuntimeError("backward was called twice for one microbatch: add its losses up first")
        if self._implied is not None:
            loss = loss * self.scale(self._implied)
        if microbatch.is_replay:
            loss = loss * 0.0
        elif microbatch.index == 0:
            self._replay.note(microbatch.batch, loss)
        if microbatch.reduces and not self.strategy.hooks_gradients:
            self.phases.enter(Phase.SYNC)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        try:
            self._call(loss.backward)
        finally:
            self._deadline.end()
        self.phases.enter(Phase.COMPUTE)
        microbatch.finish()

    def step(self) -> StepInfo | None:
        """End the window after its last microbatch, with an optimizer step; None after all others."""
        microbatch = self._open()
        if not microbatch.done:
            raise RuntimeError("sched.step was called before sched.backward(loss) for this microbatch")
        if not microbatch.is_last or microbatch.window.ended:
            return None
        self._check_scaled(microbatch.window)
        self.phases.enter(Phase.STEP)
        exact = type(self.strategy) is AllReduce or isinstance(self.strategy, StrategySwitch)
        equal = exact and self.strategy.syncs(self._position.step) and isinstance(self._wrapped, Ddp)
        outcome = self._call(lambda: self._boundary.step(self._position.step, equal_gradients=equal))
        self.phases.enter(Phase.COMPUTE)
        return self._end(microbatch.window, outcome)

    def _check_scaled(self, window: Window) -> None:
        """Warn, once, of losses that nobody divided by the window's size."""
        count = window.plan.counts[self._agreement.rank]
        if count < 2 or window.scaled or self._warned_of_scale:
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
        """For loops written for Accelerate: `backward` takes the unscaled loss, and leaving the block steps.

        The loss is the mean over the microbatch for the default `name`, the sum for other weights.
        """
        self._implied = name
        try:
            yield
        finally:
            self._implied = None
        self.step()

    def _windows(self) -> Iterator[Window]:
        if self._running:
            raise RuntimeError("two loops ran over one GradSchedule at the same time")
        self._running, self._microbatch = True, None
        try:
            self._look.settle()
            self._negotiation.begin_epoch(self._look.batches_ahead(), self._position)
            self._look.begin()
            self._offer()
            while True:
                window = self._decide()
                self._position.left_out += window.plan.left_out[self._agreement.rank]
                if window.plan.empty:
                    break
                self._units.tell(self.strategy)
                if self._gate and self.strategy.syncs(self._position.step):
                    self._gate.window_begins(self._position.window)
                elif self._gate:
                    self._gate.left()
                yield window
                if not window.ended:
                    raise RuntimeError("a window was left before its end: call step() after each backward()")
                if window.plan.last:
                    break
            self._look.epoch_ended()
        finally:
            if self._microbatch is not None:  # left within a window, whose gradient nobody will step on
                self._boundary.drop_gradients()
            self._running, self._microbatch = False, None
            self._deadline.end()
            self._wrapped.restore()
            self._look.end()
            self.phases.enter(Phase.COMPUTE)
            if self._gate:
                self._gate.left()
            self._records.save()

    def _microbatches(self, window: Window) -> Iterator[Any]:
        rank = self._agreement.rank
        forwards, count = window.plan.forwards[rank], window.plan.counts[rank]
        syncs = self.strategy.syncs(self._position.step)
        self._wrapped.window_begins(reduces=syncs)
        batch = None
        for index in range(forwards):
            is_last = index == forwards - 1
            if not window.plan.last:
                self.phases.waited(self._look.take_one)
                if is_last:
                    self._offer()
            if is_replay := index >= count:
                batch = self._replay.batch(instead=batch)
            else:
                batch, window.share.batches[index] = window.share.batches[index], None
            self._wrapped.sync(is_last and syncs)
            microbatch = Microbatch(window, index, is_last, is_replay, is_last and syncs, batch)
            if is_replay:
                microbatch.kept = buffers_kept(self._wrapped.inner)
            self._microbatch = microbatch
            self._deadline.begin()
            yield batch
            if not microbatch.done:
                raise RuntimeError("call sched.backward(loss) once for every microbatch, replays too")

    # ---- between windows ----------------------------------------------------------------------------

    def _offer(self) -> None:
        share = self.phases.waited(self._look.fill)
        replay = not share.batches and self._replay.available()
        self._negotiation.offer(
            share, self._position, replay=replay, taken=self._look.taken, exhausted=self._look.exhausted
        )

    def _decide(self) -> Window:
        share = self._look.next_share()

        def decide() -> Window:
            forwards = self._wrapped.equal_forwards
            return self._negotiation.decide(share, self._position, equal_forwards=forwards)

        window = self.phases.waited(lambda: self._call(decide), "peers")
        share = window.share
        if window.giver is not None:
            mine = share.batches[0] if window.giver == self._agreement.rank else None
            given = self._agreement.handed_over(mine, window.giver)
            if not share.batches and not self._replay.available():
                self._replay.given(given)
        return window

    def _end(self, window: Window, outcome: Outcome) -> StepInfo:
        plan, rank = window.plan, self._agreement.rank
        window.ended, self._microbatch = True, None
        if outcome.skipped:
            self._replay.forget()
        self._wrapped.window_done()
        syncs = self.strategy.syncs(self._position.step)
        self._position.ended(plan, window.totals, syncs=syncs, skipped=outcome.skipped)
        self._look.window_ended(window.share, last=plan.last)
        self.last = StepInfo(
            self._position.window - 1,
            self._position.step,
            outcome.skipped,
            outcome.grad_norm,
            outcome.lr,
            window.totals,
            plan.forwards[rank] - plan.counts[rank],
            self.phases.take(),
        )
        if self._gate and syncs:
            self._gate.window_ended(self.last.seconds.total)
        exposed_s = self._records.window_ended(self.last, plan.forwards[rank])
        if self._control:
            self._control.window_ended(self.last, exposed_s, syncs=syncs)
        return self.last

    def _open(self) -> Microbatch:
        if self._microbatch is not None:
            return self._microbatch
        if self._running:
            raise RuntimeError(
                "no microbatch is under way: step(), or the end of the accumulate() block, has ended the "
                "window, and `sched.last` is its StepInfo"
            )
        raise RuntimeError("no microbatch is under way: this is for the body of `for batch in sched`")

    def _call(self, what: Callable[[], T]) -> T:
        """Do what communicates; an error names the rank that is gone, if one is."""
        try:
            return what()
        except RuntimeError as error:
            explained = self._agreement.explained(error, also=self._wrapped.group)
            if explained is error:
                raise
            raise explained from error

    # ---- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands after the last window that ended.

        The loader's state in it is that of the batches trained on, not of those looked ahead at. Model,
        optimizer, scaler, schedule and average are yours to save. JSON, where loader's and strategy's are.

        Raises `RuntimeError` inside a window: gradients are no part of it.
        """
        if self._microbatch is not None:
            raise RuntimeError("a window is under way: take the state after step() has returned a StepInfo")
        return {
            **self._position.to_json(),
            "accumulate": self.window_size,
            "global_batch": self._settings.global_batch,
            "world_size": self._agreement.world_size,
            **self._units.state(),
            **self._look.state(),
            "strategy": {"key": self.strategy.key, "state": self.strategy.state_dict()},
            "control": self._control.state_dict() if self._control else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the window at which `state_dict` was taken; the next loop takes its loader's place.

        On another number of ranks what a strategy has kept for each rank is dropped, with a warning.

        Raises `ValueError` if the state does not fit; then nothing has changed.
        """
        if self._running:
            raise RuntimeError("a loop is under way: load the state before it")
        position = Position.from_json(state, self._settings.weights)
        check_same_windows(
            state,
            accumulate=self.window_size,
            global_batch=self._settings.global_batch,
            strategy=self.strategy.key,
        )
        kept, control = state["strategy"]["state"], state.get("control")
        same_ranks = state["world_size"] == self._agreement.world_size
        if kept and not same_ranks:
            warnings.warn(
                f"the state of {self.strategy.name} is that of {state['world_size']} ranks, here are "
                f"{self._agreement.world_size}: it begins anew",
                stacklevel=2,
            )
        with ExitStack() as undo:
            undo.callback(self._units.load, self._units.state())
            self._units.load(state)
            undo.callback(self._look.put_back, *self._look.place())
            self._look.load(state)
            if self._control and control is not None and same_ranks:  # elsewhere other things are measured
                undo.callback(self._control.load_state_dict, self._control.state_dict())
                self._control.load_state_dict(control)
            if kept and same_ranks:
                self.strategy.load_state_dict(kept)
            undo.pop_all()
        self._position = position

    def report(self, *, all_ranks: bool = False, trace: str | None = None) -> Report:
        """Where the time of the windows so far went (the last 2,000), and what to do about it.

        Args:
            all_ranks: compare the ranks; collective, all call it at the same place. Else this rank tells
                only what it knows, and waiting for slower ranks counts as communication.
            trace: write a Chrome trace to this path; on the first rank only where all ranks are asked.

        Raises `ValueError` before the first window has ended.
        """
        return self._records.report(all_ranks=all_ranks, trace=trace)

    # ---- its end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give groups back, on all ranks. Idempotent.

        Loader and model stay usable; where a strategy has reduced gradients, its hook stays in DDP, and
        training goes on with the module in a new `DistributedDataParallel`.
        """
        self._wrapped.restore()
        if self._gate:
            self._gate.close()
        self._records.close()
        self._end_strategy()
        self._agreement.close()

    def __enter__(self) -> GradSchedule:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close; an error of a connection becomes one that names the rank that is gone."""
        explained = error and self._agreement.explained(error, also=self._wrapped.group)
        self.close()
        if explained is not error and explained is not None:
            raise explained from error
