"""What a headspace measurement says: pure functions of the steps that the ranks measured.

Ranks go in step, so a step takes as long as on the slowest of them. Steps are taken in rounds, and the median
of the rounds' means counts: a checkpoint that is written is in one round only, workers that deliver in bursts
are in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from dataflow.timing import ROUND
from dataflow.timing.diagnosis import WORTH
from dataflow.timing.headspace import WARM_UP, HeadspaceRecord, MeasuredSteps

_GROWN = 0.05
"""Share of the time: if waiting grew by so much while it was measured, it had not settled."""


@dataclass(frozen=True)
class StepRate:
    """How many steps a second, by the rounds."""

    median: float
    slowest: float
    fastest: float

    def __str__(self) -> str:
        return f"{self.median:,.4g} steps/s (rounds from {self.slowest:,.4g} to {self.fastest:,.4g})"


@dataclass(frozen=True, kw_only=True)
class HeadspaceReport:
    """How much faster a training would be with a perfect loader."""

    gain: float
    """Times as fast. Near 1: nothing is to be gained by the loader."""
    live: StepRate
    """With the loader as it is."""
    replayed: StepRate
    """With batches from memory."""
    waited: float
    """Share of the live steps' time that the rank that waited most waited for the loader, in [0, 1]."""
    steps: int
    """Measured, of either kind."""
    batches: int
    """That were replayed in turns."""
    ranks: int
    world_size: int
    notes: tuple[str, ...]
    """What these figures do not tell."""

    @property
    def verdict(self) -> str:
        """In a line."""
        if self.gain < WORTH:
            return f"nothing is to be gained by a faster loader: {self.gain:.2f}x with a perfect one"
        return f"the training would be {self.gain:.2f}x faster with a perfect loader"

    @property
    def lines(self) -> tuple[str, ...]:
        """All that is told besides the verdict."""
        return (
            f"as it is:         {self.live}, {self.waited:.0%} of the time waiting for the loader",
            f"a perfect loader: {self.replayed}, {self.batches} batches replayed from memory",
            f"{self.steps} steps each in rounds of {ROUND}, the median counts; {WARM_UP} before each are "
            f"left out; on {self.ranks} of {self.world_size} ranks",
            *self.notes,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return asdict(self)


def headspace_of(records: Sequence[HeadspaceRecord]) -> HeadspaceReport | None:
    """The report of the ranks of one loader; None where there was not enough to measure."""
    if not records or any(len(one.replayed.total_s) < one.steps for one in records):
        return None
    live, replayed = ([getattr(one, kind) for one in records] for kind in ("live", "replayed"))
    rates = _rate(live), _rate(replayed)
    gain = rates[1].median / rates[0].median
    waited = max(_waited(one) for one in live)
    return HeadspaceReport(
        gain=gain,
        live=rates[0],
        replayed=rates[1],
        waited=waited,
        steps=records[0].steps,
        batches=min(one.batches for one in records),
        ranks=len(records),
        world_size=records[0].world_size,
        notes=tuple(_notes(records, *rates, waited)),
    )


def reason_without(records: Sequence[HeadspaceRecord]) -> str:
    """Why a loop was not measured."""
    least = min(records, key=lambda one: one.seen)
    needed = 2 * (WARM_UP + least.steps)
    return (
        f"nothing to report: {least.seen} steps ended on rank {least.rank}, and headspace takes {needed} ("
        f"{WARM_UP} to warm up and {least.steps} to measure, with the loader and without it): let it run "
        "longer, for more epochs, or measure fewer: --steps"
    )


def _rate(ranks: Sequence[MeasuredSteps]) -> StepRate:
    steps = [max(step) for step in zip(*(one.total_s for one in ranks), strict=False)]
    rates = [1 / fmean(steps[at : at + ROUND]) for at in range(0, max(1, len(steps) - ROUND + 1), ROUND)]
    return StepRate(median(rates), min(rates), max(rates))


def _waited(steps: MeasuredSteps) -> float:
    return sum(steps.wait_s) / sum(steps.total_s)


def _notes(
    records: Sequence[HeadspaceRecord], live: StepRate, replayed: StepRate, waited: float
) -> Iterator[str]:
    gain = replayed.median / live.median
    if gain >= WORTH and replayed.slowest < live.fastest:
        yield "rounds of both kinds overlap: measure more --steps before you trust the difference"
    elif gain * (1 - waited) >= WORTH:
        yield (
            "more is gained than was waited: making batches takes cores or memory bandwidth that the "
            "training needs"
        )
    if any(_waiting_grew(one.live) for one in records):
        yield (
            "waiting grew while it was measured, as what had been read ahead was used up: measure more "
            "--steps for the whole difference"
        )
    if gain >= WORTH:
        yield "what holds the loader up: the same command without --headspace"
    if shared := next((one.shared for one in records if one.shared), ""):
        yield f"batches could not be copied, so all steps got the same ones ({shared})"
    if any(one.ended for one in records):
        yield (
            "the command was ended when all was measured; it trained on the same batches again and again: "
            "do not use what it saved"
        )


def _waiting_grew(steps: MeasuredSteps) -> bool:
    half = len(steps.total_s) // 2
    before, after = (
        MeasuredSteps(steps.total_s[part], steps.wait_s[part]) for part in (slice(half), slice(half, None))
    )
    return half >= ROUND and _waited(after) > _waited(before) + _GROWN
