"""The verdict on a store: what it gives, and whether that is enough, from the cases that were measured.

A shuffled training reads blocks in a random order, so random reads decide where there are any. A case is
judged by its mean rate, and by how far quarters of its time lie apart: a rate that lies between the slowest
and the fastest of them is not told from the mean. If the last quarter is far below the first, the store
slowed down (burst credits, limits), and the last one counts. What came from this machine's memory proves
nothing of the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from dataflow.tables import bytes_text, number_text
from dataflow.tools.terminal.report import ReportSummary
from dataflow.tools.verdicts.need import wanted_text

SHORT_S = 0.9
"""Seconds, and `FEW` measurements: with less a second run gives quite another rate."""
FEW = 20
FAR = 4
"""Times the measured rate: what is needed beyond that is not reached, however few measurements there are."""
_QUARTERS = 4
_SLOWED = 0.7
_ENOUGH = 0.95
_GROWS = 1.1
_OFTEN = 1.5

Answer = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, kw_only=True)
class _Rated:
    """A case and the rates that it is judged by, in bytes a second."""

    case: Mapping[str, Any]
    rate: float
    low: float
    high: float
    slowed_from: float | None = None
    """The rate of the first quarter, if the last one is far below."""

    @property
    def in_flight(self) -> int:
        return int(self.case["case"]["concurrency"])

    @property
    def block_bytes(self) -> int:
        return int(self.case["case"]["block_bytes"])

    @property
    def reads(self) -> str:
        """Such as "random reads of 2 MiB, 4 in flight"."""
        size = block_text(self.block_bytes)
        return f"{self.case['case']['pattern']} reads of {size}, {self.in_flight} in flight"

    def is_short(self, target: float = 0.0) -> bool:
        """Return whether too little was measured to say that the rate is, or is not, the target."""
        few = self.case["reads"] < FEW and target < FAR * self.rate
        return bool(self.case["seconds"] < SHORT_S or few)


def storage_verdict(figures: Mapping[str, Any]) -> ReportSummary:
    """The verdict on the figures of `dataflow bench storage`."""
    rated = [_rated(case, figures["seconds_a_case"]) for case in figures["cases"]]
    rated = [rating for rating in rated if rating.case["case"]["pattern"] == "random"] or rated
    best = max(rated, key=lambda rating: rating.rate)
    if figures["need"] is not None:
        return _answer(figures, rated, best)
    if best.is_short():
        return ReportSummary(text=f"Too short to tell what this store gives: {_short(best)}.", advice=_LONGER)
    if from_memory := _from_memory(figures, best):
        text = f"What this store gives was not measured, as {from_memory}; {best.reads}, gave"
        return ReportSummary(text=f"{text} {bytes_text(best.rate)}/s.", advice=_around(figures))
    limit = ", where this client was the limit and not the store" if best.case["client_is_busy"] else ""
    again = _again(figures, best)
    text = f"This store gives {bytes_text(best.rate)}/s by {best.reads}{_slowed(best)}{limit}{again}."
    if best.slowed_from is not None:
        return ReportSummary(text=text, advice=_SUSTAINED)
    if best.case["faults"]["throttled"]:
        return ReportSummary(text=text, advice=_throttled(best))
    if best.case["client_is_busy"]:
        return ReportSummary(text=text, advice=_more_clients(figures))
    if _grows(best, rated):
        return ReportSummary(text=text, advice=_more_in_flight(best))
    least = _simplest([rating for rating in rated if rating.rate >= _ENOUGH * best.rate])
    share = "" if least is best else f", which gives {least.rate / best.rate:.0%} of that"
    return ReportSummary(text=text, advice=_read_by(least, share, "--need RATE says whether it is enough"))


def _answer(figures: Mapping[str, Any], rated: Sequence[_Rated], best: _Rated) -> ReportSummary:
    need = figures["need"]
    target = need["bytes_per_s"]
    clear = [rating for rating in rated if rating.low >= target and not rating.is_short()]
    chosen = _simplest(clear) if clear else best
    margin = chosen.rate / target
    fact = (
        f"{chosen.reads}, give {bytes_text(chosen.rate)}/s{_slowed(chosen)}, {number_text(margin)} times "
        f"{wanted_text(need)}"
    )
    answer, why, advice = _judged(figures, rated, chosen, target)
    text = {
        "yes": f"Yes, this store is fast enough: {fact}{why}.",
        "no": f"No, this store is not fast enough: {fact}{why}.",
        "unknown": f"It cannot be said whether this store is fast enough: {why}; {fact}.",
    }[answer]
    return ReportSummary(text=text, advice=advice, answer=answer, margin=margin)


def _judged(
    figures: Mapping[str, Any], rated: Sequence[_Rated], chosen: _Rated, target: float
) -> tuple[Answer, str, str]:
    """The answer, why, and what to do."""
    if chosen.is_short(target):
        return "unknown", _short(chosen), _LONGER
    if chosen.low < target <= chosen.high:
        between = f"quarters of the time gave from {bytes_text(chosen.low)}/s to {bytes_text(chosen.high)}/s"
        return "unknown", between, _LONGER
    if chosen.rate >= target:
        if from_memory := _from_memory(figures, chosen):
            return "unknown", from_memory, _around(figures)
        only = "; nothing but sequential reads was measured" * (chosen.case["case"]["pattern"] != "random")
        decoding = "dataflow bench loader --need says whether decoding keeps up"
        return "yes", only + _again(figures, chosen), _read_by(chosen, "", decoding)
    if chosen.slowed_from is not None:
        return "no", "", _SUSTAINED
    if chosen.case["faults"]["throttled"]:
        refusals = chosen.case["faults"]["throttled"]
        return "no", f", and it refused {refusals:,} requests (429, 503)", _throttled(chosen)
    if chosen.case["client_is_busy"]:
        return "unknown", "this client was the limit, not the store", _more_clients(figures)
    if _grows(chosen, rated):
        return "unknown", "more reads in flight than were tried may give more", _more_in_flight(chosen)
    return "no", "", _faster(figures)


def _rated(case: Mapping[str, Any], asked_s: float) -> _Rated:
    """Rates of a case. What is read after the asked time has fewer and fewer in flight, and is left out."""
    rate, parts = case["mb_per_s"] * 1e6, case["mb_per_s_over_time"]
    whole = parts if case["exhausted"] else parts[: int(len(parts) * min(1.0, asked_s / case["seconds"]))]
    if len(whole) < 2 * _QUARTERS:
        return _Rated(case=case, rate=rate, low=rate, high=rate)
    cuts = [len(whole) * number // _QUARTERS for number in range(_QUARTERS + 1)]
    quarters = [1e6 * fmean(whole[a:b]) for a, b in pairwise(cuts)]
    first, last = quarters[0], quarters[-1]
    if last < _SLOWED * first and last <= min(quarters):
        return _Rated(case=case, rate=last, low=last, high=last, slowed_from=first)
    return _Rated(case=case, rate=rate, low=min(*quarters, rate), high=max(*quarters, rate))


def block_text(nbytes: int) -> str:
    """A block size in binary units where it is a round one, else in bytes."""
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} bytes"


def _simplest(rated: Sequence[_Rated]) -> _Rated:
    """Return the case of fewest reads in flight; of these, the fastest."""
    return min(rated, key=lambda rating: (rating.in_flight, -rating.rate))


def _grows(chosen: _Rated, rated: Sequence[_Rated]) -> bool:
    """Return whether more reads in flight than were tried may give more, as the most gave more than fewer."""
    others = [
        rating
        for rating in rated
        if rating.block_bytes == chosen.block_bytes
        and rating.case["case"]["pattern"] == chosen.case["case"]["pattern"]
    ]
    fewer = [rating.rate for rating in others if rating.in_flight < chosen.in_flight]
    most = max(rating.in_flight for rating in others)
    return chosen.in_flight == most and chosen.rate > _GROWS * max(fewer, default=0.0)


def _from_memory(figures: Mapping[str, Any], rating: _Rated) -> str:
    """Why the store is not what was measured; "" if it is. Of a remote store nobody can know."""
    label = rating.case["label"]
    if figures["read"] == "store" or label["word"] == "cold":
        return ""
    answered = "answered" if label["word"] == "warm" else "may have answered"
    return f"the page cache of this machine {answered} ({label['reason']})"


def _again(figures: Mapping[str, Any], rating: _Rated) -> str:
    """Return that a remote store was asked for the same again, if it was."""
    if figures["read"] != "store" or rating.case["passes"] < _OFTEN:
        return ""
    return f"; the same data was read {rating.case['passes']:.0f} times, which a store may answer from memory"


def _slowed(rating: _Rated) -> str:
    if rating.slowed_from is None:
        return ""
    return f" at the end, after {bytes_text(rating.slowed_from)}/s at the beginning"


def _short(rating: _Rated) -> str:
    return f"{rating.case['seconds']:.2g} s and {rating.case['reads']:,} reads were measured"


_LONGER = "Measure longer: --seconds 10, over more data if every block is read before."
_SUSTAINED = (
    "Measure with --seconds 60: a store that slows down has a limit that a training meets, not its start."
)


def _around(figures: Mapping[str, Any]) -> str:
    if figures["read"] == "direct":
        return "Measure on the disk itself: this file system does not show that direct reads come from it."
    return "Read around the page cache (--read direct, which needs fio), or add --evict."


def _throttled(rating: _Rated) -> str:
    return (
        f"Have fewer than {rating.in_flight} reads in flight, larger blocks, shards spread over prefixes, or "
        "the store's limit raised."
    )


def _more_clients(figures: Mapping[str, Any]) -> str:
    if figures["read"] == "buffered":
        return "Measure with --read direct, which needs fio, or with larger blocks."
    return (
        "Measure from several processes or machines at a time, as the ranks of a training read, and add up."
    )


def _more_in_flight(best: _Rated) -> str:
    double = 2 * best.in_flight
    return f"Measure with more reads in flight: --in-flight {double} --in-flight {2 * double}."


def _faster(figures: Mapping[str, Any]) -> str:
    cure = "a faster disk"
    if figures["read"] == "store":
        cure = "a nearer store, or a cache on local disks (cache=)"
    return f"Take {cure}, or store fewer bytes a sample (smaller images, compression)."


def _read_by(best: _Rated, share: str, then: str) -> str:
    size = block_text(best.block_bytes)
    return (
        f"Read blocks of {size} (dataflow index --block-bytes {size.replace(' ', '')}), {best.in_flight} in "
        f"flight for all ranks together{share}; loaders adapt that number by themselves, and {then}."
    )
