"""The gain of a perfect loader: pure functions of steps with a loader, and with batches from memory.

One verdict for all that measures both: `dataflow doctor --headspace`, of a training as it is, and
`dataflow bench loader`, of an emulated one.

Ranks go in step, so a step takes as long, and waits as long, as on the slowest of them. Waiting is the
loader's and counts by its mean, however rare and long: of a loader over shards with a slow transform ten
batches came in 5 ms and another ten in 0.4 s. What else a step takes counts by the median of rounds of steps:
a checkpoint that is written is in one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from dataflow.telemetry.timing import ROUND
from dataflow.telemetry.timing.data_stall import WARM_UP, DataStallRecord
from dataflow.telemetry.timing.records import StepTimes
from dataflow.telemetry.timing.shares import WORTH

Steps = Sequence[StepTimes]
"""Steps of one rank: from one batch asked for to the next."""
_FEW = 3
_GROWN = 0.05
"""Share of the time: if waiting grew by so much while it was measured, it had not settled."""


@dataclass(frozen=True)
class StepRate:
    """A rate of steps a second."""

    usual: float
    """With all waiting, and the median of the rest."""
    slowest: float
    """The rate of the slowest round."""
    fastest: float

    def __str__(self) -> str:
        return f"{self.usual:,.4g} steps/s (rounds from {self.slowest:,.4g} to {self.fastest:,.4g})"


@dataclass(frozen=True, kw_only=True)
class DataStall:
    """The gain that a training would have of a perfect loader."""

    gain: float
    """Times as fast. Near 1: nothing is to be gained by the loader."""
    live: StepRate
    """With the loader as it is."""
    replayed: StepRate
    """The rate with batches from memory."""
    waited: float
    """Share of the live steps' time that the rank that waited most waited for the loader, in [0, 1]."""
    steps: int
    """Measured with the loader, and about as many from memory."""
    left_out: int
    """Steps before either of them."""
    batches: int
    """Batches that were replayed in turns."""
    ranks: int
    world_size: int
    notes: tuple[str, ...]
    """Notes on what these figures do not tell."""

    @property
    def verdict(self) -> str:
        """The result in a line."""
        return gain_verdict(self.gain)

    @property
    def lines(self) -> tuple[str, ...]:
        """All that is told besides the verdict."""
        return (
            f"as it is:         {self.live}, {self.waited:.0%} of the time waiting for the loader",
            f"a perfect loader: {self.replayed}, replayed from memory (of {self.batches} batch"
            f"{'es' * (self.batches > 1)})",
            f"{self.steps} steps each, {self.left_out} before them left out, on {self.ranks} of "
            f"{self.world_size} ranks; all waiting counts, and of the rest the median of rounds of {ROUND}",
            *self.notes,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON value."""
        return {"verdict": self.verdict, **asdict(self)}


def data_stall_of(
    live: Sequence[Steps],
    replayed: Sequence[Steps],
    *,
    left_out: int = 1,
    batches: int = 1,
    world_size: int | None = None,
) -> DataStall:
    """The headspace of ranks that go in step, from the steps of each, with its loader and from memory."""
    usual, perfect = _rate(live), _rate(replayed)
    waited = max(_waited(steps) for steps in live)
    return DataStall(
        gain=perfect.usual / usual.usual,
        live=usual,
        replayed=perfect,
        waited=waited,
        steps=len(live[0]),
        left_out=left_out,
        batches=batches,
        ranks=len(live),
        world_size=world_size or len(live),
        notes=tuple(_notes(live, usual, perfect, waited)),
    )


def data_stall_of_records(records: Sequence[DataStallRecord]) -> DataStall | None:
    """The headspace of the ranks of one loader; None where there was not enough to measure."""
    if not records or not all(record.is_whole for record in records):
        return None
    stall = data_stall_of(
        [record.live for record in records],
        [record.replayed for record in records],
        left_out=WARM_UP,
        batches=min(record.batches for record in records),
        world_size=records[0].world_size,
    )
    return replace(stall, notes=(*stall.notes, *_notes_of_training(records, stall.gain)))


def gain_verdict(gain: float) -> str:
    """Say what a perfect loader gains."""
    if gain < WORTH:
        return f"nothing is to be gained by a faster loader: {gain:.2f}x with a perfect one"
    return f"the training would be {gain:.2f}x faster with a perfect loader"


def rounds_differ(gain: float, slowest: float, usual: float) -> bool:
    """Return whether rounds differ by more than a gain: the slowest from memory, the usual one as it is."""
    return (gain >= WORTH and slowest < usual) or gain < 1 / WORTH


def reason_without(records: Sequence[DataStallRecord]) -> str:
    """Why a loop was not measured."""
    least = min(records, key=lambda record: len(record.windows))
    needed = 2 * (WARM_UP + least.steps)
    return (
        f"nothing to report: {len(least.windows)} steps ended on rank {least.rank}, and headspace takes "
        f"{needed} ({WARM_UP} to warm up and {least.steps} to measure, with the loader and without it): let "
        "it run longer, for more epochs, or measure fewer: --steps"
    )


def _rate(ranks: Sequence[Steps]) -> StepRate:
    together = list(zip(*ranks, strict=True))
    totals_s = [max(rank.total_s for rank in step) for step in together]
    waits_s = [max(rank.data_s for rank in step) for step in together]
    rest_s = _rounds([total - wait for total, wait in zip(totals_s, waits_s, strict=True)])
    rounds_s = _rounds(totals_s)
    return StepRate(1 / (fmean(waits_s) + median(rest_s)), 1 / max(rounds_s), 1 / min(rounds_s))


def _rounds(steps_s: Sequence[float]) -> list[float]:
    """The mean of each; steps that fill none are left out, unless there is no round."""
    length = min(ROUND, len(steps_s))
    return [fmean(steps_s[start : start + length]) for start in range(0, len(steps_s) - length + 1, length)]


def _waited(steps: Steps) -> float:
    return sum(step.data_s for step in steps) / sum(step.total_s for step in steps)


def _notes(live: Sequence[Steps], usual: StepRate, perfect: StepRate, waited: float) -> Iterator[str]:
    gain = perfect.usual / usual.usual
    if rounds_differ(gain, perfect.slowest, usual.usual):
        yield "rounds differ by more than both kinds of steps do: measure more steps"
    elif gain * (1 - waited) >= WORTH:
        yield (
            "more is gained than was waited: making batches takes cores or memory bandwidth that the "
            "training needs"
        )
    if waited >= WORTH - 1 and any(map(_is_rare, live)):
        yield f"{_FEW} steps did most of the waiting: measure more steps, to have it as often as it comes"
    if any(map(_waiting_grew, live)):
        yield (
            "waiting grew while it was measured, as what had been read ahead was used up: measure more "
            "steps for the whole difference"
        )


def _notes_of_training(records: Sequence[DataStallRecord], gain: float) -> Iterator[str]:
    if gain >= WORTH:
        yield "what holds the loader up: the same command without --headspace"
    if shared := next((record.shared for record in records if record.shared), ""):
        yield f"batches could not be copied, so all steps got the same ones ({shared})"
    if any(record.ended for record in records):
        yield (
            "the command was ended when all was measured; it trained on the same batches again and again: "
            "do not use what it saved"
        )


def _is_rare(steps: Steps) -> bool:
    waits_s = sorted(step.data_s for step in steps)
    return sum(waits_s[-_FEW:]) > sum(waits_s) / 2


def _waiting_grew(steps: Steps) -> bool:
    half = len(steps) // 2
    return half >= ROUND and _waited(steps[half:]) > _waited(steps[:half]) + _GROWN
