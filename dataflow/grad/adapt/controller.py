"""The controller: which mode the windows of a run go in, decided from what all ranks agreed on.

It looks for saturation: gradients that are still on their way when nothing is left to compute, on the rank
that waits least (on the others, slower ranks are what is waited for). Then the settings that it may change
take their turns: first those that leave the numbers as they are, then those that were allowed by name.

A trial: the options of one setting take turns of some windows, then the best one is kept. Turns are short and
go round several times, so that what else happens meanwhile hits all options alike. The first window of a turn
does not count: what it does depends on the option before. An option is preferred to those before it (they
change less) only if its windows are shorter by a share that is worth it, and by more than chance explains;
the option in use is given up only where it saves much less than that: a dead band. A trial is followed by a
rest, which becomes longer each time that nothing comes of it, and ends early when communication has changed.

Pure: no clock, no thread, no collective. Every rank feeds the same numbers and gets the
same modes. A window is told when the one after it has begun, so what is seen in window w acts from window
w + 2 on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, stdev, variance
from typing import Any

from dataflow.grad.adapt.options import Tunable

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
"""Windows from a trial to the next one where nothing happens; doubled, at most twice, when nothing came of
it."""
_BAND = 0.4
"""Share of a new option's saving that the option in use must have to stay."""
_ENOUGH = 6
"""Windows after which an option may be found hopeless: of two turns, so that a burst in one does not do."""


@dataclass(frozen=True)
class Measurement:
    """A window that all ranks have run and agreed on."""

    window: int
    seconds: float
    """Mean seconds over the ranks."""
    exposed_s: float | None
    """Gradients on their way with nothing left to compute, on the rank that waited least; None: unknown."""
    held_reads: int = 0
    """Number of reads that waited, over all ranks."""


@dataclass(frozen=True)
class Mode:
    """The settings that a window runs with."""

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


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial."""

    option: int
    reason: str
    seconds: Mapping[str, float]
    """Mean window of each option that was tried."""


@dataclass(kw_only=True)
class _Setting:
    """The knowledge of one tunable. Numbers are windows."""

    chosen: int = 0
    """The option in use outside trials."""
    due: int = _WARM_UP
    """The first that may be part of a trial."""
    ended: int
    """The last one of the latest trial."""
    dwell: int
    """Windows from a trial to the next one, at least."""
    rest: int
    """Windows from a trial to the next one where nothing happens."""
    result: TrialResult = field(default_factory=lambda: TrialResult(0, "not tried yet", {}))


@dataclass(kw_only=True)
class _Trial:
    """A trial that is under way."""

    at: int
    """The index of its tunable."""
    alive: list[int]
    """Options that are not hopeless."""
    seconds: list[list[float]]
    """Seconds of each option's windows that count."""
    plan: list[list[Any]] = field(default_factory=list)
    """The windows to come: the option of each, and whether it counts."""
    rounds: int = 0
    held: int = 0
    """Number of reads that waited."""


@dataclass(kw_only=True)
class _Known:
    """All that a controller knows, as its state has it."""

    settings: list[_Setting]
    trial: _Trial | None = None
    ran: list[list[Any]] = field(default_factory=list)
    """Windows that were not told yet: number, options, and whether it counts in the trial."""
    recent: list[list[Any]] = field(default_factory=list)
    """Seconds, and exposed ones, of windows in this mode."""
    usual_s: float | None = None
    """Exposed communication in this mode, when it was new."""
    latest: int = 0
    """Place of the tunable that was judged last."""
    since: int | None = 0
    """The first window in this mode; None: the next one."""
    changes: int = 0


class Controller:
    """Chooses the mode of each window. Not thread-safe; the same on every rank.

    Args:
        tunables: what may be changed, safest first.
        dwell: windows between trials of one setting at least.
        patience: windows between trials of one setting where nothing changes.
    """

    def __init__(
        self, tunables: Sequence[Tunable], *, dwell: int = _DWELL, patience: int = _PATIENCE
    ) -> None:
        self._tunables, self._dwell, self._patience = tuple(tunables), dwell, patience
        settings = [_Setting(ended=-2 * dwell, dwell=dwell, rest=patience) for _ in tunables]
        self._known = _Known(settings=settings)
        self._cycle = math.lcm(*(tunable.cycle for tunable in tunables))

    @property
    def changes(self) -> int:
        """Decisions that changed the mode."""
        return self._known.changes

    @property
    def mode(self) -> Mode:
        """The options in words: those of the window that asked last; before that, as decided so far."""
        known = self._known
        options = known.ran[-1][1] if known.ran else self._chosen()
        return Mode(
            {knob.name: knob.options[option] for knob, option in zip(self._tunables, options, strict=True)},
            known.settings[known.latest].result.reason,
            known.since,
            None if known.trial is None else self._tunables[known.trial.at].name,
        )

    def result(self, name: str) -> TrialResult:
        """Return the result of the last trial of a tunable."""
        settings = zip(self._tunables, self._known.settings, strict=True)
        return next(setting.result for tunable, setting in settings if tunable.name == name)

    def options(self, window: int) -> tuple[int, ...]:
        """The option of each tunable in a window. Windows come in order; asked again, it says the same."""
        known = self._known
        if not known.ran or known.ran[-1][0] != window:
            if known.trial is None:
                self._begin(window)
            now, counts = self._chosen(), False
            if known.since is None:
                known.since = window
            if known.trial is not None and known.trial.plan:
                now[known.trial.at], counts = known.trial.plan.pop(0)
            known.ran.append([window, now, counts])
        return tuple(known.ran[-1][1])

    def observe(self, sample: Measurement) -> None:
        """A window has ended; windows come in order, some may be missing."""
        known, trial = self._known, self._known.trial
        _, options, counts = next((ran for ran in known.ran if ran[0] == sample.window), (0, [], False))
        known.ran = [ran for ran in known.ran if ran[0] > sample.window]
        if trial is not None:
            trial.held += sample.held_reads
            if counts:
                trial.seconds[options[trial.at]].append(sample.seconds)
                self._drop_hopeless(trial)
            if not trial.plan and not any(counts for _, _, counts in known.ran):
                self._judge(trial, sample.window)
        elif options == self._chosen() and known.since is not None and sample.window > known.since:
            known.recent = [*known.recent, [sample.seconds, sample.exposed_s]][-_RECENT * self._cycle :]
            self._notice(sample.window)

    def to_json(self) -> dict[str, Any]:
        """Return what it knows, as a JSON value; the same on every rank."""
        return {"tunables": [[knob.name, *knob.options] for knob in self._tunables], **asdict(self._known)}

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Go on from `to_json()`; where other settings or options were allowed then, begin anew."""
        fields = dict(state)
        if fields.pop("tunables") != [[knob.name, *knob.options] for knob in self._tunables]:
            return
        settings = [_Setting(**row | {"result": TrialResult(**row["result"])}) for row in state["settings"]]
        trial = state["trial"] and _Trial(**state["trial"])
        self._known = _Known(**{**fields, "settings": settings, "trial": trial})

    def _begin(self, window: int) -> None:
        """Begin a trial, if one is due."""
        if (usual := self._usual()) is None:
            return
        seconds, exposed, _ = usual
        saturated = exposed is not None and exposed >= _SATURATED * seconds
        for index, (tunable, setting) in enumerate(zip(self._tunables, self._known.settings, strict=True)):
            blind = exposed is None and tunable.only_if_held  # changes no number: no reason needed
            if window >= setting.due and (saturated or blind or setting.chosen):
                # It changed again while the last trial was rested from.
                soon = window - setting.ended <= setting.dwell + _RECENT * self._cycle
                setting.dwell = min(2 * setting.dwell, self._patience) if soon else self._dwell
                options = range(len(tunable.options))
                self._known.trial = _Trial(at=index, alive=list(options), seconds=[[] for _ in options])
                for _ in range(tunable.rounds * (setting.dwell // self._dwell if self._dwell else 1)):
                    self._add_round(self._known.trial)
                return

    def _add_round(self, trial: _Trial) -> None:
        """One more turn of each option."""
        trial.rounds += 1
        turn = range(self._tunables[trial.at].turn)
        trial.plan += [[option, index > 0] for option in trial.alive for index in turn]

    def _drop_hopeless(self, trial: _Trial) -> None:
        """Leave out of the trial what takes many times as long as the best."""
        tunable = self._tunables[trial.at]
        samples = {option: _by_cycle(trial.seconds[option], tunable.cycle) for option in trial.alive}
        if tunable.hopeless is None or min(map(len, samples.values())) < 2:
            return
        usual = {option: median(values) for option, values in samples.items()}
        most_s = tunable.hopeless * min(usual.values())
        enough = 2 if tunable.cycle > 1 else _ENOUGH
        trial.alive = [option for option in usual if usual[option] <= most_s or len(samples[option]) < enough]
        trial.plan = [entry for entry in trial.plan if entry[0] in trial.alive]

    def _judge(self, trial: _Trial, window: int) -> None:
        """End the trial, unless more turns could decide what chance may explain."""
        known, setting, tunable = self._known, self._known.settings[trial.at], self._tunables[trial.at]
        result, sure = _judged(tunable, trial, setting.chosen)
        if not sure and trial.rounds < tunable.most_rounds:
            self._add_round(trial)
            return
        same = result.option == setting.chosen
        setting.rest = min(2 * setting.rest, 4 * _PATIENCE) if same else self._patience
        setting.ended, setting.due = window, window + setting.rest
        setting.chosen, setting.result = result.option, result
        known.latest, known.changes = trial.at, known.changes + (not same)
        known.since = known.trial = known.usual_s = None
        known.recent = []

    def _notice(self, window: int) -> None:
        """See whether communication has changed since the mode was new."""
        known = self._known
        if (usual := self._usual()) is None:
            return
        seconds, exposed, error = usual
        if exposed is None:
            return
        if known.usual_s is None:
            known.usual_s = exposed
        elif abs(exposed - known.usual_s) > max(_CHANGED * seconds, _CHANCE * error):
            known.usual_s = exposed
            for setting in known.settings:
                setting.rest = self._patience
                setting.due = min(setting.due, max(window, setting.ended + setting.dwell))

    def _chosen(self) -> list[int]:
        """The option of each tunable outside trials."""
        return [setting.chosen for setting in self._known.settings]

    def _usual(self) -> tuple[float, float | None, float] | None:
        """Seconds of a window in this mode, exposed ones, and by how much two looks at these may differ.

        Medians, and a standard error; None: there were not enough windows yet.
        """
        recent = self._known.recent
        if len(recent) < _RECENT * self._cycle:
            return None
        seconds = _by_cycle([seconds for seconds, _ in recent], self._cycle)
        exposed = _by_cycle([each for _, each in recent if each is not None], self._cycle)
        error = stdev(exposed) * math.sqrt(2 / len(exposed)) if len(exposed) > 1 else 0.0
        return median(seconds), median(exposed) if exposed else None, error


def _by_cycle(values: Sequence[float], cycle: int) -> list[float]:
    """The mean of each whole cycle."""
    return [fmean(values[start : start + cycle]) for start in range(0, len(values) - cycle + 1, cycle)]


def _judged(tunable: Tunable, trial: _Trial, incumbent: int) -> tuple[TrialResult, bool]:
    """Return what is best, and whether more turns would not change it."""
    # All but the slowest sample: a checkpoint is not the network's fault. No more: bursts of reads are rare.
    every = [sorted(_by_cycle(seconds, tunable.cycle)) for seconds in trial.seconds]
    samples = {option: values[: max(1, len(values) - 1)] for option, values in enumerate(every) if values}
    means = {option: fmean(values) for option, values in samples.items()}
    seconds = {tunable.options[option]: mean for option, mean in means.items()}
    if tunable.only_if_held and not trial.held:
        return TrialResult(0, "no read came while gradients travelled", seconds), True
    # From the option that changes least on, so that one that changes more must beat all before it. The one
    # in use needs less to stay (the dead band), and no proof: only a change must be more than chance.
    best, most, unsure = 0, 0.0, []
    for option in list(means)[1:]:
        saved = 1 - means[option] / means[best]
        most = max(most, saved)
        stays = option == incumbent
        if saved < tunable.saving * (_BAND if stays else 1):
            continue
        pair = samples[best], samples[option]
        error = math.sqrt(sum(variance(s) / len(s) for s in pair)) if min(map(len, pair)) > 1 else math.inf
        if not stays and means[best] - means[option] < tunable.sure * error:
            unsure.append(option)
            continue
        best = option
    sure = not any(means[option] * (1 - tunable.saving) < means[best] for option in unsure)
    if best:
        reason = f"{tunable.options[best]} saves {1 - means[best] / means[0]:.1%} of a window"
    else:
        reason = f"{tunable.name}: nothing saves enough, at best {most:.1%} of a window"
    return TrialResult(best, reason, seconds), sure
