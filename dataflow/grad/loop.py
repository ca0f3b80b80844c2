"""The loop over steps and their microbatches on one rank.

Each step is decided on with the other ranks while the one before computes; its microbatches are handed out
with the model's switches set for them; at its end all who keep account of steps are told. Its invariant: for
each rank and step the same collectives in the same order, whatever the ranks' data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from dataflow.grad.agreement import Deadline
from dataflow.grad.boundary import Outcome, StepBoundary
from dataflow.grad.gate import IoGate
from dataflow.grad.lookahead import LookAhead
from dataflow.grad.negotiation import Negotiation, WindowControl
from dataflow.grad.step import Microbatch, Position, Replay, Step
from dataflow.grad.wrapper import copied_buffers
from dataflow.telemetry.status.loaders import ScheduleStatus
from dataflow.telemetry.timing.phases import Phase, PhaseLedger, StepInfo
from dataflow.telemetry.timing.steps import StepRecorder

T = TypeVar("T")


@dataclass(kw_only=True)
class StepLoop:
    """The loop of one schedule, and what takes part in it. Used by one thread.

    Attributes:
        loader: whose batches are run.
        boundary: ends steps; knows the model, the strategy, the settings, and the other ranks.
        accumulate: microbatches a rank of a full step.
        phases: counts seconds.
        gate, control: where reads are held back, and where something may change.
        status: its line on the page of this process; None: it has none.
    """

    loader: Any
    boundary: StepBoundary
    accumulate: int
    phases: PhaseLedger
    gate: IoGate | None
    control: WindowControl | None
    status: ScheduleStatus | None

    def __post_init__(self) -> None:
        boundary, control = self.boundary, self.control
        self.model, self.strategy, self.agreement = boundary.model, boundary.strategy, boundary.agreement
        model, agreement, settings = boundary.model, boundary.agreement, boundary.settings
        self.look, self.replay = LookAhead(self.loader, self.accumulate, settings.weigh), Replay()
        self._negotiation = Negotiation(
            agreement=agreement,
            model=model,
            look=self.look,
            replay=self.replay,
            settings=settings,
            accumulate=self.accumulate,
            control=control,
        )
        self.deadline = Deadline(model.group, settings.timeout_s)
        self.recorder = StepRecorder(
            self.phases,
            self.loader,
            mode=lambda: str(control.controller.mode) if control else "",
            rank=agreement.ranks[agreement.rank],
            world_size=agreement.world_size,
            model=model.kind,
            strategy=self.strategy.name,
            device=model.device.type,
        )
        self.position = Position.start(settings.weights)
        self.is_running = False
        self.microbatch: Microbatch | None = None
        """The one under way: handed out, and its step has not ended."""

    def steps(self) -> Iterator[Step]:
        """The steps of one epoch; `end` is called for each before the next."""
        if self.is_running:
            raise RuntimeError("two loops ran over one GradSchedule at the same time")
        self.is_running, self.microbatch = True, None
        try:
            self.look.leave_ended_epoch()
            self._negotiation.begin_epoch(self.position)
            self.look.begin()
            self._offer()
            while True:
                step = self.phases.waited(lambda: self.call(self._decide), "peers")
                self.position.left_out += step.plan.left_out[self.agreement.rank]
                if step.plan.empty:
                    break
                self.boundary.units_changed()
                self.boundary.drop_gradients()  # of backward passes that were none of a window
                if self.gate and self.strategy.syncs(self.position.step):
                    self.gate.step_begins(self.position.window)
                elif self.gate:
                    self.gate.open()
                yield step
                if not step.has_ended:
                    raise RuntimeError("a window was left before its end: call step() after each backward()")
                if step.plan.last:
                    break
            if self.strategy.drifted:
                self.phases.waited(self._negotiation.end_epoch, "peers")
            self.look.epoch_ended()
        finally:
            if self.microbatch is not None:  # left within a step, on whose gradient nobody will step
                self.boundary.drop_gradients()
                self.model.step_left()
            self.is_running, self.microbatch = False, None
            self.deadline.end()
            self.model.restore()
            self.look.end()
            self.phases.enter(Phase.COMPUTE)
            if self.gate:
                self.gate.open()
            self.recorder.save()

    def microbatches(self, step: Step) -> Iterator[Any]:
        """The batches of one step, replays included; sync is switched for both passes of each."""
        rank = self.agreement.rank
        forwards, count = step.plan.forwards[rank], step.plan.counts[rank]
        syncs = self.strategy.syncs(self.position.step)
        self.model.step_begins(reduces=syncs, replays=step.plan.replays)
        batch = None
        for index in range(forwards):
            is_last, is_replay = index == forwards - 1, index >= count
            if not step.plan.last:
                self.phases.waited(self.look.take_one)
                if is_last:  # the other ranks get to know it while this microbatch computes
                    self._offer()
            if is_replay:
                self.model.replay_begins()
                batch = step.lent.pop(0) if step.lent else self.replay.batch(instead=batch)
            else:
                batch, step.share.batches[index] = step.share.batches[index], None
            # DDP looks at the switch in the forward and in the backward pass: it is set before both.
            self.model.sync(is_last and syncs)
            if self.model.holds_always or (step.plan.replays and index >= min(step.plan.counts)):
                self.model.hold_together(self.agreement)
            self.microbatch = microbatch = Microbatch(
                step=step,
                index=index,
                is_last=is_last,
                is_replay=is_replay,
                reduces=is_last and syncs,
                batch=batch,
                buffers=copied_buffers(self.model.inner) if is_replay else (),
            )
            self.deadline.begin()
            yield batch
            if not microbatch.is_done:
                raise RuntimeError("call sched.backward(loss) once for every microbatch, replays too")

    def present(self) -> Microbatch:
        """The microbatch under way; `RuntimeError` without one."""
        if self.microbatch is not None:
            return self.microbatch
        if self.is_running:
            raise RuntimeError(
                "no microbatch is under way: step(), or the end of the accumulate() block, has ended the "
                "window, and `sched.last` is its StepInfo"
            )
        raise RuntimeError("no microbatch is under way: this is for the body of `for batch in sched`")

    def end(self, step: Step, outcome: Outcome) -> StepInfo:
        """Account for a step whose optimizer has stepped, or skipped it."""
        plan, rank = step.plan, self.agreement.rank
        step.has_ended, self.microbatch = True, None
        if outcome.skipped:
            self.replay.forget()
        syncs = self.strategy.syncs(self.position.step)  # before the position moves on
        self.position.step_ended(
            plan, step.totals, syncs=syncs, skipped=outcome.skipped, layers=outcome.layers
        )
        self.look.step_ended(step.share, last=plan.last)
        info = StepInfo(
            window=self.position.window - 1,
            step=self.position.step,
            skipped=outcome.skipped,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            totals=step.totals,
            replays=plan.forwards[rank] - plan.counts[rank],
            seconds=self.phases.take(),
        )
        held_reads = self.gate.step_ended() if self.gate and syncs else 0
        exposed_s = self.model.exposed_s(info.seconds.sync)
        times = self.recorder.step_ended(info, plan.forwards[rank], exposed_s)
        if self.control:
            self.control.step_ended(info, exposed_s, held_reads, syncs=syncs)
        if self.status is not None:
            seconds = times.data_s, times.peers_s, times.compute_s, times.exposed_s or 0.0, times.optimizer_s
            self.status.window(
                seconds=seconds,
                microbatches=times.microbatches,
                replays=info.replays,
                skipped=info.skipped,
                step=info.step,
                totals=info.totals,
                decided=self._decided,
            )
        return info

    def _decided(self) -> dict[str, str]:
        """Return what the controller has decided, and why."""
        if self.control is None:
            return {}
        mode = self.control.controller.mode
        settings = ", ".join(f"{name} {option}" for name, option in mode.settings.items())
        return {"mode": settings, "mode_reason": mode.reason}

    def call(self, what: Callable[[], T]) -> T:
        """Do what communicates, also over the model's group; an error names the rank that is gone."""
        return self.agreement.call(what, also=self.model.group)

    def _offer(self) -> None:
        self.phases.waited(self.look.fill)
        self._negotiation.offer(self.position)

    def _decide(self) -> Step:
        return self._negotiation.decide(self.position)
