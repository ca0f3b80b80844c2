"""The next step is negotiated: this rank's row is sent while the present step computes, then decided.

Where every rank has as many batches in the epoch (each says so when it begins), no weight depends on data and
there is no controller, nothing is sent for steps: every rank knows what the others have.
"""

from __future__ import annotations

import io
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch.serialization import default_restore_location

from dataflow.grad.adapt.controller import Controller, Measurement
from dataflow.grad.adapt.options import ACCUMULATE, IO, Allowed
from dataflow.grad.agreement import Consensus
from dataflow.grad.gate import GateDecision, GateMode
from dataflow.grad.lookahead import LookAhead, StepBatches
from dataflow.grad.step import (
    MICROBATCHES,
    Position,
    Replay,
    ScheduleSettings,
    Step,
    StepPlan,
    UnevenRanksError,
    joined,
    merged_batches,
    plan_step,
    scales,
    summed,
)
from dataflow.grad.strategies.strategy import Strategy
from dataflow.grad.strategies.switch import StrategySwitch
from dataflow.grad.wrapper import ModelWrapper, mixes_batches
from dataflow.telemetry.timing.phases import StepInfo

_COLUMNS = (
    "epoch's batches",
    "count",
    "window",
    "step",
    "accumulate",
    "order of collectives",
    "replay",
    "the controller's mode",
)
_BATCHES, _COUNT, _WINDOW, _STEP, _ACCUMULATE, _ORDER, _REPLAY, _MODE = range(len(_COLUMNS))
"""Indices of a rank's row; the weights follow, and what a controller tells. `_MODE`: a checksum."""
_ALIKE = (_WINDOW, _STEP, _ACCUMULATE, _ORDER, _MODE)
"""Columns in which ranks that do the same have the same."""


@dataclass(kw_only=True)
class Negotiation:
    """Offers what this rank has for a step, and decides on the step with the other ranks' offers.

    Attributes:
        agreement: with whom.
        model: how it is wrapped says what a replay may be.
        look: has the batches of the next step.
        replay: has the batch that this rank can run again.
        settings: the schedule's.
        accumulate: microbatches of a full step.
        control: tells the other ranks of steps that ended, and decides on the mode of the next one.
    """

    agreement: Consensus
    model: ModelWrapper
    look: LookAhead
    replay: Replay
    settings: ScheduleSettings
    accumulate: int
    control: WindowControl | None

    def __post_init__(self) -> None:
        self._weights = tuple(self.settings.weights)
        self._rows: Callable[[], list[list[float]]] = list
        self._promise: int | None = None
        """Batches that every rank has in this epoch; None: unknown, and every step is agreed on."""

    def begin_epoch(self, position: Position) -> None:
        """Learn whether all ranks know that they have as many batches."""
        self._promise = None
        by_batch = any(callable(weight) for weight in self.settings.weights.values())
        if self.agreement.world_size == 1 or by_batch or self.control is not None:
            return
        batches = self.look.batches_ahead()
        rows = self.agreement.offer(self._row(position, batches=batches))()
        self._check(rows)
        counts = {row[_BATCHES] for row in rows}
        self._promise = batches if len(counts) == 1 and batches >= 0 else None

    def end_epoch(self) -> None:
        """Wait for the other ranks where nothing was sent: who hangs after the last average is missed."""
        if self._promise is not None:
            self.agreement.any(False)

    def offer(self, position: Position) -> None:
        """Tell what this rank has for the next step. Waits for nobody."""
        share, num_taken = self.look.share, self.look.num_taken
        row = self._row(position, share, can_replay=not share.batches and self.replay.available())
        if self._promise is None:
            self._rows = self.agreement.offer(row)
            return
        if num_taken > self._promise or (self.look.exhausted and num_taken < self._promise):
            raise RuntimeError(
                f"the loader said {self._promise} batches in this epoch and gave {num_taken}"
                f"{'' if self.look.exhausted else ' or more'}; the other ranks have relied on that: its len "
                "must be right, or raise TypeError"
            )
        rows = [row] * self.agreement.world_size  # theirs are as mine
        self._rows = lambda: rows

    def decide(self, position: Position) -> Step:
        """Wait for the other ranks' offers, and decide; on all ranks alike.

        Raises `DisagreementError` where ranks are not at the same place, and `UnevenRanksError`.
        """
        share, rank = self.look.next_share(), self.agreement.rank
        equal_forwards = self.model.equal_forwards
        rows = self._rows()
        self._check(rows)
        end = len(_COLUMNS) + len(self._weights)  # of the weights in a row
        at_once = self.control.begin([row[end:] for row in rows], position.window) if self.control else 1
        counts = [int(row[_COUNT]) for row in rows]
        plan = plan_step(
            counts,
            accumulate=self.accumulate,
            uneven=self.settings.uneven,
            partial=self.settings.partial,
            equal_forwards=equal_forwards,
        )
        if plan.replays and mixes_batches(self.model.inner):
            raise UnevenRanksError(
                plan.counts, 'SyncBatchNorm would mix a replayed batch into the others: use uneven="min"'
            )
        weights = [dict(zip(self._weights, row[len(_COLUMNS) : end], strict=True)) for row in rows]
        if any(plan.left_out) and not plan.empty:
            # Rows have the weights of all batches that were offered; only now it is known which of them run.
            sums = summed(share.weights[: plan.counts[rank]])
            run = self.agreement.offer([sums.get(name, 0.0) for name in self._weights])()
            weights = [dict(zip(self._weights, row, strict=True)) for row in run]
        if self.control and at_once > 1:
            join = self.control.allowed.merge or joined
            batches = merged_batches(share.batches, plan.counts[rank], at_once, join)
            share, plan = replace(share, batches=batches), plan.merged(at_once)
        totals = {**summed(weights), MICROBATCHES: float(sum(plan.counts))}
        factors = scales(totals, self.agreement.world_size)
        lent = self._lent(plan, share) if plan.replays and equal_forwards else []
        if plan.replays and not equal_forwards:
            self._lend_one(rows, plan, share)
        return Step(plan=plan, share=share, lent=lent, totals=totals, scales=factors)

    def _lend_one(self, rows: list[list[float]], plan: StepPlan, share: StepBatches) -> None:
        """Hand a batch to ranks that must replay one, any, and never had any."""
        lacking = (
            forwards and not (count or row[_REPLAY])
            for forwards, count, row in zip(plan.forwards, plan.counts, rows, strict=True)
        )
        if any(lacking) and (lent := self._lent(plan, share)) and not self.replay.available():
            self.replay.take_over(lent[0])

    def _lent(self, plan: StepPlan, share: StepBatches) -> list[Any]:
        """The batches of a rank that has all, for the replays of this one: of the same microbatches.

        Where forward passes are collective, a batch that takes another way through the model will not do.
        """
        pairs = list(zip(plan.counts, plan.forwards, strict=True))
        begin, end = min(plan.counts), max(forwards for count, forwards in pairs if count < forwards)
        lender = plan.counts.index(max(plan.counts))
        payload = _packed(share.batches[begin:end]) if lender == self.agreement.rank else None
        packed = self.agreement.broadcast(payload, lender)
        if isinstance(packed, str):  # on all ranks alike: who waited for the batches would wait in vain
            raise ValueError(
                f"ranks without data replay batches of rank {self.agreement.ranks[lender]}, which cannot be "
                f'sent: {packed}; make batches that can be pickled, or use uneven="min"'
            )
        count, forwards = pairs[self.agreement.rank]
        batches: list[Any] = torch.load(io.BytesIO(packed), map_location=self._placed, weights_only=False)
        return batches[count - begin : forwards - begin]

    def _placed(self, storage: Any, location: str) -> Any:
        """Return what lay on the lender's accelerator comes to this rank's."""
        return None if location == "cpu" else default_restore_location(storage, str(self.model.device))

    def _row(
        self, spot: Position, share: StepBatches | None = None, *, can_replay: bool = False, batches: int = -1
    ) -> list[float]:
        """Return what this rank tells: its columns, its weights, and what its controller says."""
        weights = summed(share.weights) if share is not None else {}
        row = [0.0] * len(_COLUMNS)
        row[_BATCHES], row[_COUNT] = batches, len(share.batches) if share is not None else 0
        row[_WINDOW], row[_STEP], row[_ACCUMULATE] = spot.window, spot.step, self.accumulate
        row[_ORDER], row[_REPLAY] = spot.order, can_replay
        row += [weights.get(name, 0.0) for name in self._weights]
        if self.control is not None:
            row[_MODE] = self.control.check()
            row += self.control.row()
        return row

    def _check(self, rows: list[list[float]]) -> None:
        for column in _ALIKE:
            self.agreement.same(_COLUMNS[column], [int(row[column]) for row in rows])


def _packed(batches: list[Any]) -> bytes | str:
    """The batches as bytes, or why they cannot be."""
    file = io.BytesIO()
    try:
        torch.save(batches, file)
    except Exception as error:  # whatever a batch's own reduction raises
        return f"{type(error).__name__}: {error}"
    return file.getvalue()


# ---- the controller's part ------------------------------------------------------------------------------

_CONTROL_VERSION = 3
"""Version of the controller's part of a state."""
_UNTOLD = (-1.0, 0.0, -1.0, 0.0)
_SEEN, _SECONDS, _EXPOSED, _HELD = range(len(_UNTOLD))
"""Indices of what a rank tells of a window, here its number; -1: no window, unknown."""


class WindowControl:
    """The controller of one schedule, on one rank: tells the others what this one saw, does what was decided.

    What a rank saw of a window travels in the row by which it offers its share of a later one, so nothing
    more is exchanged; the row also says in which mode this rank is, and a rank that is in another one is an
    error. One thread.

    Args:
        allowed: what may be changed.
        strategy: the schedule's.
    """

    def __init__(self, allowed: Allowed, strategy: Strategy) -> None:
        self.allowed, self._names = allowed, [tunable.name for tunable in allowed.tunables]
        self._switch = strategy if isinstance(strategy, StrategySwitch) else None
        self.controller = Controller(allowed.tunables)
        self._outbox: deque[tuple[float, ...]] = deque()
        self._options: tuple[int, ...] = ()
        self._exposed: tuple[tuple[int, ...], float] | None = None
        """The mode of the last window that tells what was exposed, and its seconds."""

    def row(self) -> tuple[float, ...]:
        """Return what to tell the other ranks."""
        return self._outbox[0] if self._outbox else _UNTOLD

    def check(self) -> int:
        """Equal on ranks that are in the same mode and tell of the same window."""
        return zlib.crc32(repr((self._options, self.controller.changes, self.row()[_SEEN])).encode())

    def begin(self, rows: Sequence[Sequence[float]], window: int) -> int:
        """Hear what all ranks told, and go into the mode of a step; returns microbatches in a pass."""
        if rows[0][_SEEN] >= 0:
            self._outbox.popleft()
            self.controller.observe(measured_by_all(rows))
        self._options = self.controller.options(window)
        if self._switch is not None:
            self._switch.use(self._options[-1])
        return self.allowed.at_once[dict(zip(self._names, self._options, strict=True)).get(ACCUMULATE, 0)]

    def step_ended(self, info: StepInfo, exposed_s: float | None, held_reads: int, *, syncs: bool) -> None:
        """Note what this rank saw.

        `exposed_s`: None where it was not measured. `held_reads`: how many waited. `syncs`: gradients were
        reduced; else what travels are parameters, after the step.
        """
        exposed_s = exposed_s if syncs else info.seconds.step
        if exposed_s is not None:
            self._exposed = self._options, exposed_s
        elif self._exposed is not None and self._exposed[0] == self._options:
            exposed_s = self._exposed[1]
        exposed_or_unknown = -1.0 if exposed_s is None else exposed_s
        self._outbox.append((info.window, info.seconds.total, exposed_or_unknown, held_reads))

    def way(self, window: int) -> GateMode:
        """Return how reads and gradients share the network in the window under way."""
        return GateMode(self.controller.mode.settings.get(IO, GateMode.OPEN))

    @property
    def io(self) -> GateDecision:
        """The same, with the reason."""
        if IO not in self._names:
            return GateDecision(GateMode.OPEN, "gradients are not reduced", {})
        result = self.controller.result(IO)
        return GateDecision(
            self.way(0), result.reason, {GateMode(name): s for name, s in result.seconds.items()}
        )

    def state_dict(self) -> dict[str, Any]:
        """The controller's state, and what other ranks were not told yet. JSON."""
        untold = [list(row) for row in self._outbox]
        return {"version": _CONTROL_VERSION, "controller": self.controller.to_json(), "untold": untold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on; where something else was allowed then, the controller begins anew.

        Raises `ValueError` if it is no such state, or an earlier release's; then nothing has changed.
        """
        if isinstance(state, Mapping) and (version := state.get("version", 1)) != _CONTROL_VERSION:
            raise ValueError(
                f"the controller's part of the state is of version {version}, this release reads "
                f'{_CONTROL_VERSION}; with state["control"] = None the controller begins anew, and all else '
                "goes on"
            )
        controller = Controller(self.allowed.tunables)
        try:
            controller.load_json(state["controller"])
            outbox = deque(tuple(row) for row in state["untold"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the controller's part of the state is not whole: {error!r}") from error
        self.controller, self._outbox = controller, outbox
        self._options, self._exposed = (), None


def measured_by_all(rows: Sequence[Sequence[float]]) -> Measurement:
    """One window as all ranks see it, from what each told. The same on all ranks."""
    exposed = [row[_EXPOSED] for row in rows if row[_EXPOSED] >= 0]
    return Measurement(
        int(rows[0][_SEEN]),
        fmean(row[_SECONDS] for row in rows),
        min(exposed) if len(exposed) == len(rows) else None,
        int(sum(row[_HELD] for row in rows)),
    )
