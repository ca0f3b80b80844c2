"""The controller in a schedule: tells the other ranks what this one saw, and does what was decided.

What a rank saw of a window travels in the row by which it offers its share of a later one, so nothing more is
exchanged; the row also says in which mode this rank is, and a rank that is in another one is an error.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dataflow.grad.adapt.controller import Controller, Measurement, Mode
from dataflow.grad.adapt.io_gate import GateDecision, Way
from dataflow.grad.adapt.knobs import ACCUMULATE, IO, KnobSet
from dataflow.grad.adapt.merged import merged_batches
from dataflow.grad.adapt.strategy_switch import StrategySwitch
from dataflow.timing.phases import StepInfo

_VERSION = 2
"""Of the controller's part of a state. 1 had a list for each thing that is known of the settings."""
_NOTHING = (-1.0, 0.0, -1.0, 0.0)
_WINDOW, _SECONDS, _EXPOSED, _HELD = range(len(_NOTHING))
"""Of what a rank tells; -1: no window, unknown."""


class Control:
    """The controller of one schedule, on one rank; also the policy of its I/O gate. One thread.

    Args:
        knobs: what may be changed.
        strategy: the schedule's.
    """

    def __init__(self, knobs: KnobSet, strategy: Any) -> None:
        self._knobs, self._names = knobs, [knob.name for knob in knobs.knobs]
        self._switch = strategy if isinstance(strategy, StrategySwitch) else None
        self.controller = Controller(knobs.knobs)
        self._outbox: deque[tuple[float, ...]] = deque()
        self._options: tuple[int, ...] = ()
        self._held_reads = 0
        self._exposed: tuple[tuple[int, ...], float] | None = None
        """What was exposed in the last window that tells, and in which mode."""

    @property
    def mode(self) -> Mode:
        """Of the window under way, or the last one."""
        return self.controller.mode

    def row(self) -> tuple[float, ...]:
        """What to tell the other ranks."""
        return self._outbox[0] if self._outbox else _NOTHING

    def check(self) -> int:
        """Equal on ranks that are in the same mode and tell of the same window."""
        return zlib.crc32(repr((self._options, self.controller.changes, self.row()[_WINDOW])).encode())

    def begin(self, rows: Sequence[Sequence[float]], window: int) -> int:
        """Hear what all ranks told, and go into the mode of a step; returns microbatches in a pass."""
        if rows[0][_WINDOW] >= 0:
            self._outbox.popleft()
            self.controller.observe(measured_by_all(rows))
        self._options = self.controller.options(window)
        settings = dict(zip(self._names, self._options, strict=True))
        if self._switch is not None:
            self._switch.use(self._options[-1])
        return self._knobs.at_once[settings.get(ACCUMULATE, 0)]

    def merged(self, batches: Sequence[Any], count: int, at_once: int) -> list[Any]:
        """The first `count` batches of a step, as its passes want them."""
        return merged_batches(batches, count, at_once, self._knobs.join)

    def step_ended(self, info: StepInfo, exposed_s: float | None, *, syncs: bool) -> None:
        """Note what this rank saw.

        `exposed_s`: None where it was not measured. `syncs`: gradients were reduced; else what travels are
        parameters, after the step.
        """
        exposed_s = exposed_s if syncs else info.seconds.step
        if exposed_s is not None:
            self._exposed = self._options, exposed_s
        elif self._exposed is not None and self._exposed[0] == self._options:
            exposed_s = self._exposed[1]
        exposed_or_unknown = -1.0 if exposed_s is None else exposed_s
        self._outbox.append((info.window, info.seconds.total, exposed_or_unknown, self._held_reads))
        self._held_reads = 0

    def state_dict(self) -> dict[str, Any]:
        """The controller's state, and what other ranks were not told yet. JSON."""
        untold = [list(row) for row in self._outbox]
        return {"version": _VERSION, "controller": self.controller.to_json(), "untold": untold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on; where something else was allowed then, the controller begins anew.

        Raises `ValueError` if it is no such state, or an earlier release's; then nothing has changed.
        """
        if isinstance(state, Mapping) and (version := state.get("version", 1)) != _VERSION:
            raise ValueError(
                f"the controller's part of the state is of version {version}, this release reads {_VERSION}; "
                'with state["control"] = None the controller begins anew, and all else goes on'
            )
        controller = Controller(self._knobs.knobs)
        try:
            controller.load_json(state["controller"])
            outbox = deque(tuple(row) for row in state["untold"])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"the controller's part of the state is not whole: {error!r}") from error
        self.controller, self._outbox = controller, outbox
        self._options, self._exposed = (), None

    # ---- the policy of the gate ---------------------------------------------------------------------

    @property
    def decision(self) -> GateDecision:
        """How reads and gradients share the network at present."""
        if IO not in self._names:
            return GateDecision(Way.OPEN, "gradients are not reduced", {})
        result = self.controller.result(IO)
        seconds = {Way(name): mean for name, mean in result.seconds.items()}
        return GateDecision(self.way(), result.reason, seconds)

    def way(self, window: int = 0) -> Way:
        """Of the window under way."""
        return Way(self.mode.settings.get(IO, Way.OPEN))

    def ended(self, window: int, seconds: float, held_reads: int) -> None:
        """Note how many reads waited."""
        self._held_reads = held_reads


def measured_by_all(rows: Sequence[Sequence[float]]) -> Measurement:
    """One window as all ranks see it, from what each told. The same on all ranks."""
    exposed = [row[_EXPOSED] for row in rows if row[_EXPOSED] >= 0]
    return Measurement(
        int(rows[0][_WINDOW]),
        fmean(row[_SECONDS] for row in rows),
        min(exposed) if len(exposed) == len(rows) else None,
        int(sum(row[_HELD] for row in rows)),
    )
