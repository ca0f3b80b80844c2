"""A trial: the options of one setting take turns of some windows, then the best one is named.

Turns are short and go round several times, so that what else happens meanwhile hits all options alike. The
first window of a turn does not count: what it does depends on the option before. An option is preferred to
those before it (they change less) only if its windows are shorter by a share that is worth it, and by more
than chance explains; the option in use is given up only where it saves much less than that: a dead band.
Pure: no clock, no thread; the same windows give the same verdict on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import fmean, median, variance
from typing import Any

_BAND = 0.4
"""What the option in use must save to stay, as a share of what a new one must."""
_ENOUGH = 6
"""Samples after which an option may be found hopeless: of two turns, so that a burst in one does not do."""


@dataclass(frozen=True)
class Knob:
    """A setting, what it can be, and how its options are compared."""

    name: str
    options: tuple[str, ...]
    """As reported. The run begins with the first; each changes more than those before it."""
    _: KW_ONLY
    turn: int = 5
    """Windows of a turn; the first does not count."""
    rounds: int = 3
    """Turns of each option before a verdict."""
    most_rounds: int = 9
    """Turns of each option where chance could explain what is seen."""
    cycle: int = 1
    """Windows that are looked at together, since they differ by plan; divides `turn - 1`."""
    saving: float = 0.05
    """Share of a window that an option must save to be worth it."""
    sure: float = 2.0
    """Standard errors by which its windows must be shorter."""
    hopeless: float | None = 2.5
    """An option whose windows are so many times as long as the best ones is tried no longer; None: is."""
    only_if_held: bool = False
    """Where no read waited in the whole trial, the options did nothing, and the first is kept."""


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial."""

    option: int
    reason: str
    seconds: Mapping[str, float]
    """Mean window of each option that was tried."""


class Trial:
    """One trial under way. Args: the knob, the option in use, and how many times as long as usual it is."""

    def __init__(self, knob: Knob, incumbent: int, length: int = 1) -> None:
        self.knob, self._incumbent = knob, incumbent
        self._alive = list(range(len(knob.options)))
        self._seconds: list[list[float]] = [[] for _ in knob.options]
        self._turns: list[tuple[int, bool]] = []
        self._ran: dict[int, tuple[int, bool]] = {}
        self._rounds = self._held = 0
        for _ in range(knob.rounds * length):
            self._add_round()

    def next(self, window: int) -> int:
        """The option of the next window; when all turns are over, the one in use."""
        if not self._turns:
            return self._incumbent
        self._ran[window] = self._turns.pop(0)
        return self._ran[window][0]

    def observe(self, window: int, seconds: float, held_reads: int) -> None:
        """A window took that long, and so many reads waited in it; windows come in order."""
        option, counts = self._ran.pop(window, (self._incumbent, False))
        self._ran = {number: ran for number, ran in self._ran.items() if number > window}
        self._held += held_reads
        if counts:
            self._seconds[option].append(seconds)
            self._drop_if_hopeless(option)

    def result(self) -> TrialResult | None:
        """None while turns are under way; asks for more turns where they could decide."""
        if self._turns or self._ran:
            return None
        result, sure = self._judged()
        if not sure and self._rounds < self.knob.most_rounds:
            self._add_round()
            return None
        return result

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return {
            "incumbent": self._incumbent,
            "alive": self._alive,
            "found": self._seconds,
            "plan": [list(entry) for entry in self._turns],
            "ran": [[window, *entry] for window, entry in self._ran.items()],
            "rounds": self._rounds,
            "held": self._held,
        }

    @classmethod
    def from_json(cls, knob: Knob, state: Mapping[str, Any]) -> Trial:
        """From `to_json()`."""
        trial = cls(knob, state["incumbent"])
        trial._alive, trial._rounds, trial._held = list(state["alive"]), state["rounds"], state["held"]
        trial._seconds = [list(seconds) for seconds in state["found"]]
        trial._turns = [(option, counts) for option, counts in state["plan"]]
        trial._ran = {window: (option, counts) for window, option, counts in state["ran"]}
        return trial

    def _add_round(self) -> None:
        self._rounds += 1
        for option in self._alive:
            self._turns += [(option, at > 0) for at in range(self.knob.turn)]

    def _samples(self, option: int) -> list[float]:
        seconds, cycle = self._seconds[option], self.knob.cycle
        return [fmean(seconds[at : at + cycle]) for at in range(0, len(seconds) - cycle + 1, cycle)]

    def _drop_if_hopeless(self, option: int) -> None:
        if self.knob.hopeless is None or option not in self._alive:
            return
        samples = {each: self._samples(each) for each in self._alive}
        enough = 2 if self.knob.cycle > 1 else _ENOUGH
        usual = {each: median(values) for each, values in samples.items() if len(values) >= min(enough, 2)}
        if len(samples[option]) < enough or len(usual) < 2:
            return
        if usual[option] > self.knob.hopeless * min(usual.values()):
            self._alive.remove(option)
            self._turns = [entry for entry in self._turns if entry[0] != option]

    def _judged(self) -> tuple[TrialResult, bool]:
        """What is best, and whether more turns would not change it."""
        knob = self.knob
        samples = {option: values for option in range(len(knob.options)) if (values := self._usual(option))}
        means = {option: fmean(values) for option, values in samples.items()}
        seconds = {knob.options[option]: mean for option, mean in means.items()}
        if knob.only_if_held and not self._held:
            return TrialResult(0, "no read came while gradients travelled", seconds), True
        # From the option that changes least on, so that one that changes more must beat all before it. The
        # one in use needs less to stay (the dead band), and no proof: only a change must be more than chance.
        best, most, unsure = 0, 0.0, []
        for option in list(means)[1:]:
            saved = 1 - means[option] / means[best]
            most = max(most, saved)
            stays = option == self._incumbent
            if saved < knob.saving * (_BAND if stays else 1):
                continue
            if not stays and means[best] - means[option] < knob.sure * _error(samples[best], samples[option]):
                unsure.append(option)
                continue
            best = option
        sure = not any(means[option] * (1 - knob.saving) < means[best] for option in unsure)
        if not best:
            name = knob.name
            return TrialResult(
                0, f"{name}: nothing saves enough, at best {most:.1%} of a window", seconds
            ), sure
        saved = 1 - means[best] / means[0]
        return TrialResult(best, f"{knob.options[best]} saves {saved:.1%} of a window", seconds), sure

    def _usual(self, option: int) -> list[float]:
        """All but the slowest: a checkpoint is not the network's fault. No more: bursts of reads are rare."""
        samples = sorted(self._samples(option))
        return samples[: max(1, len(samples) - 1)]


def _error(one: Sequence[float], other: Sequence[float]) -> float:
    """Standard error of the difference of two means; infinite for too few samples."""
    if min(len(one), len(other)) < 2:
        return math.inf
    return math.sqrt(variance(one) / len(one) + variance(other) / len(other))
