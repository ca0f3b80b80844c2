"""The controller: which mode the windows of a run go in, decided from what all ranks agreed on.

It looks for saturation: gradients that are still on their way when nothing is left to compute, on the rank
that waits least (on the others, slower ranks are what is waited for). Then the settings that it may change
take their turns: first those that leave the numbers as they are, then those that were allowed by name. Each
is tried (`dataflow.grad.adapt.trial`) and kept only if windows got shorter. A trial is followed by a rest,
which becomes longer each time that nothing comes of it, and ends early when communication has changed.

Pure: no clock, no thread, no collective. Every rank feeds the same numbers and gets the same modes. A window
is told when the one after it has begun, so what is seen in window w acts from window w + 2 on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from dataflow.grad.adapt.trial import Knob, Trial, TrialResult

_SATURATED = 0.05
"""Share of a window in which gradients are exposed: less is not worth a trial."""
_CHANGED = 0.1
"""Share of a window by which exposed communication must change to count as another network."""
_CHANCE = 4.0
"""Standard errors by which it must change as well: it is looked at after every window of a long run."""
_WARM_UP = 3
"""Windows at first that count for nothing: connections are made, DDP arranges its buckets."""
_RECENT = 8
"""Windows, or cycles of them, in one mode that tell how it goes: by their median, since one may be long."""
_DWELL = 128
"""Windows from a trial to the next one of the same setting, whatever happens. Doubled when that happened soon
after a trial, and the next trial is as much longer: a network that changes as fast as trials take cannot be
followed, but what is best on average can be found."""
_PATIENCE = 1024
"""Windows from a trial to the next one where nothing happens; doubled when nothing came of a trial."""
_LONGEST = 4 * _PATIENCE


@dataclass(frozen=True)
class Measurement:
    """A window that all ranks have run and agreed on."""

    window: int
    seconds: float
    """Mean over ranks."""
    exposed_s: float | None
    """Gradients on their way with nothing left to compute, on the rank that waited least; None: unknown."""
    held_reads: int = 0
    """Over all ranks."""


@dataclass(frozen=True)
class Mode:
    """How a window goes."""

    settings: Mapping[str, str]
    """The option of each setting, by name."""
    reason: str
    since: int | None
    """The first window after the latest decision; None: the next one."""
    trying: str | None = None
    """The setting of which options take turns now; None: none."""

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {option}" for name, option in self.settings.items())
        since = "" if self.since is None else f" since window {self.since}"
        return f"{settings}{since}: {self.reason}" + (f"; trying {self.trying}" if self.trying else "")


@dataclass(kw_only=True)
class _Setting:
    """What is known of one knob. Numbers are windows."""

    chosen: int = 0
    """The option in use outside trials."""
    due: int = _WARM_UP
    """The first that may be part of a trial."""
    ended: int
    """The last one of the latest trial."""
    dwell: int
    """From a trial to the next one at least."""
    rest: int
    """From a trial to the next one where nothing happens."""
    result: TrialResult = field(default_factory=lambda: TrialResult(0, "not tried yet", {}))
    """Of the latest trial."""


class Controller:
    """Chooses the mode of each window. Not thread-safe; the same on every rank.

    Args:
        knobs: what may be changed, safest first.
        dwell: windows between trials of one setting at least.
        patience: windows between trials of one setting where nothing changes.
    """

    def __init__(self, knobs: Sequence[Knob], *, dwell: int = _DWELL, patience: int = _PATIENCE) -> None:
        self._knobs, self._dwell, self._patience = tuple(knobs), dwell, patience
        self._settings = [_Setting(ended=-2 * dwell, dwell=dwell, rest=patience) for _ in knobs]
        self._at: int | None = None
        """Place in `knobs` of what the trial under way is about."""
        self._trial: Trial | None = None
        self._cycle = math.lcm(*(knob.cycle for knob in knobs))
        self._recent: deque[tuple[float, float | None]] = deque(maxlen=_RECENT * self._cycle)
        self._usual_s: float | None = None
        """Exposed communication in this mode, when it was new."""
        self._ran: dict[int, list[int]] = {}
        self._latest = 0
        """The knob that was judged last."""
        self._since: int | None = 0
        """None: from the next window on."""
        self.changes = 0
        """Decisions that changed the mode."""

    def options(self, window: int) -> tuple[int, ...]:
        """The option of each knob in a window. Windows come in order; asked again, it says the same."""
        if window not in self._ran:
            if self._trial is None:
                self._begin(window)
            now = self._chosen()
            self._since = window if self._since is None else self._since
            if self._trial is not None and self._at is not None:
                now[self._at] = self._trial.next(window)
            self._ran[window] = now
        return tuple(self._ran[window])

    @property
    def mode(self) -> Mode:
        """In words: of the window that options were asked for last; before that, as decided so far."""
        options = self._ran[max(self._ran)] if self._ran else self._chosen()
        return Mode(
            {knob.name: knob.options[option] for knob, option in zip(self._knobs, options, strict=True)},
            self._settings[self._latest].result.reason,
            self._since,
            None if self._at is None else self._knobs[self._at].name,
        )

    def result(self, name: str) -> TrialResult:
        """Of the last trial of a knob."""
        settings = zip(self._knobs, self._settings, strict=True)
        return next(setting.result for knob, setting in settings if knob.name == name)

    def observe(self, one: Measurement) -> None:
        """A window has ended; windows come in order, some may be missing."""
        ran = self._ran.get(one.window)
        self._ran = {window: options for window, options in self._ran.items() if window > one.window}
        if self._trial is not None:
            self._trial.observe(one.window, one.seconds, one.held_reads)
            self._judge(one.window)
        elif ran == self._chosen() and self._since is not None and one.window > self._since:
            self._recent.append((one.seconds, one.exposed_s))
            self._notice(one.window)

    def to_json(self) -> dict[str, Any]:
        """What it knows, as a JSON value; the same on every rank."""
        return {
            "knobs": [[knob.name, *knob.options] for knob in self._knobs],
            "settings": [asdict(setting) for setting in self._settings],
            "at": self._at,
            "trial": None if self._trial is None else self._trial.to_json(),
            "recent": [list(each) for each in self._recent],
            "usual_s": self._usual_s,
            "ran": [[window, list(options)] for window, options in self._ran.items()],
            "latest": self._latest,
            "since": self._since,
            "changes": self.changes,
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Go on from `to_json()`; where other settings or options were allowed then, begin anew."""
        if state["knobs"] != [[knob.name, *knob.options] for knob in self._knobs]:
            return
        self._settings = [
            _Setting(**{**setting, "result": TrialResult(**setting["result"])})
            for setting in state["settings"]
        ]
        self._at, trial = state["at"], state["trial"]
        self._trial = None if trial is None else Trial.from_json(self._knobs[state["at"]], trial)
        self._recent.clear()
        self._recent.extend((seconds, exposed) for seconds, exposed in state["recent"])
        self._usual_s = state["usual_s"]
        self._ran = {window: list(options) for window, options in state["ran"]}
        self._latest, self._since, self.changes = state["latest"], state["since"], state["changes"]

    def _begin(self, window: int) -> None:
        """Begin a trial, if one is due."""
        if len(self._recent) < _RECENT * self._cycle:
            return
        seconds, exposed = self._usual()
        saturated = exposed is not None and exposed >= _SATURATED * seconds
        for at, (knob, setting) in enumerate(zip(self._knobs, self._settings, strict=True)):
            blind = exposed is None and knob.only_if_held  # changes no number: no reason needed
            if window >= setting.due and (saturated or blind or setting.chosen):
                # It changed again while the last trial was rested from.
                soon = window - setting.ended <= setting.dwell + _RECENT * self._cycle
                setting.dwell = min(2 * setting.dwell, self._patience) if soon else self._dwell
                length = setting.dwell // self._dwell if self._dwell else 1
                self._at, self._trial = at, Trial(knob, setting.chosen, length)
                return

    def _judge(self, window: int) -> None:
        """End the trial, if it has come to an end."""
        assert self._trial is not None
        assert self._at is not None
        result = self._trial.result()
        if result is None:
            return
        setting, self._latest = self._settings[self._at], self._at
        same = result.option == setting.chosen
        setting.rest = min(2 * setting.rest, _LONGEST) if same else self._patience
        setting.ended, setting.due = window, window + setting.rest
        self.changes += not same
        setting.chosen, setting.result = result.option, result
        self._since = self._trial = self._at = self._usual_s = None
        self._recent.clear()

    def _notice(self, window: int) -> None:
        """See whether communication has changed since the mode was new."""
        if len(self._recent) < _RECENT * self._cycle:
            return
        seconds, exposed = self._usual()
        if exposed is None:
            return
        if self._usual_s is None:
            self._usual_s = exposed
        elif abs(exposed - self._usual_s) > max(_CHANGED * seconds, _CHANCE * self._error()):
            self._usual_s = exposed
            for setting in self._settings:
                setting.rest = self._patience
                setting.due = min(setting.due, max(window, setting.ended + setting.dwell))

    def _chosen(self) -> list[int]:
        """The option of each knob outside trials."""
        return [setting.chosen for setting in self._settings]

    def _usual(self) -> tuple[float, float | None]:
        values = self._exposed()
        seconds = median(self._by_cycle([seconds for seconds, _ in self._recent]))
        return seconds, median(values) if values else None

    def _exposed(self) -> list[float]:
        return self._by_cycle([exposed for _, exposed in self._recent if exposed is not None])

    def _error(self) -> float:
        """Standard error of a difference between two looks at exposed communication."""
        values = self._exposed()
        return stdev(values) * math.sqrt(2 / len(values)) if len(values) > 1 else 0.0

    def _by_cycle(self, values: Sequence[float]) -> list[float]:
        cycle = min(self._cycle, len(values)) or 1
        return [fmean(values[at : at + cycle]) for at in range(0, len(values) - cycle + 1, cycle)]
