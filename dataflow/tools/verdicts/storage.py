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

    def is_short(self, wanted: float = 0.0) -> bool:
        """Return whether too little was measured to say that the rate is, or is not, the wanted one."""
        few = self.case["reads"] < FEW and wanted < FAR * self.rate
        return bool(self.case["seconds"] < SHORT_S or few)


def storage_verdict(figures: Mapping[str, Any]) -> ReportSummary:
    """The verdict on the figures of `dataflow bench storage`."""
    rated = [_rated(one, figures["seconds_a_case"]) for one in figures["cases"]]
    rated = [one for one in rated if one.case["case"]["pattern"] == "random"] or rated
    best = max(rated, key=lambda one: one.rate)
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
    least = _simplest([one for one in rated if one.rate >= _ENOUGH * best.rate])
    share = "" if least is best else f", which gives {least.rate / best.rate:.0%} of that"
    return ReportSummary(text=text, advice=_read_by(least, share, "--need RATE says whether it is enough"))


def _answer(figures: Mapping[str, Any], rated: Sequence[_Rated], best: _Rated) -> ReportSummary:
    need = figures["need"]
    wanted = need["bytes_per_s"]
    clear = [one for one in rated if one.low >= wanted and not one.is_short()]
    chosen = _simplest(clear) if clear else best
    margin = chosen.rate / wanted
    fact = (
        f"{chosen.reads}, give {bytes_text(chosen.rate)}/s{_slowed(chosen)}, {number_text(margin)} times "
        f"{wanted_text(need)}"
    )
    answer, why, advice = _judged(figures, rated, chosen, wanted)
    text = {
        "yes": f"Yes, this store is fast enough: {fact}{why}.",
        "no": f"No, this store is not fast enough: {fact}{why}.",
        "unknown": f"It cannot be said whether this store is fast enough: {why}; {fact}.",
    }[answer]
    return ReportSummary(text=text, advice=advice, answer=answer, margin=margin)


def _judged(
    figures: Mapping[str, Any], rated: Sequence[_Rated], chosen: _Rated, wanted: float
) -> tuple[Answer, str, str]:
    """The answer, why, and what to do."""
    if chosen.is_short(wanted):
        return "unknown", _short(chosen), _LONGER
    if chosen.low < wanted <= chosen.high:
        between = f"quarters of the time gave from {bytes_text(chosen.low)}/s to {bytes_text(chosen.high)}/s"
        return "unknown", between, _LONGER
    if chosen.rate >= wanted:
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
    return min(rated, key=lambda one: (one.in_flight, -one.rate))


def _grows(chosen: _Rated, rated: Sequence[_Rated]) -> bool:
    """Return whether more reads in flight than were tried may give more, as the most gave more than fewer."""
    others = [
        one
        for one in rated
        if one.block_bytes == chosen.block_bytes
        and one.case["case"]["pattern"] == chosen.case["case"]["pattern"]
    ]
    fewer = [one.rate for one in others if one.in_flight < chosen.in_flight]
    most = max(one.in_flight for one in others)
    return chosen.in_flight == most and chosen.rate > _GROWS * max(fewer, default=0.0)


def _from_memory(figures: Mapping[str, Any], one: _Rated) -> str:
    """Why the store is not what was measured; "" if it is. Of a remote store nobody can know."""
    label = one.case["label"]
    if figures["read"] == "store" or label["word"] == "cold":
        return ""
    answered = "answered" if label["word"] == "warm" else "may have answered"
    return f"the page cache of this machine {answered} ({label['reason']})"


def _again(figures: Mapping[str, Any], one: _Rated) -> str:
    """Return that a remote store was asked for the same again, if it was."""
    if figures["read"] != "store" or one.case["passes"] < _OFTEN:
        return ""
    return f"; the same data was read {one.case['passes']:.0f} times, which a store may answer from memory"


def _slowed(one: _Rated) -> str:
    return (
        ""
        if one.slowed_from is None
        else f" at the end, after {bytes_text(one.slowed_from)}/s at the beginning"
    )


def _short(one: _Rated) -> str:
    return f"{one.case['seconds']:.2g} s and {one.case['reads']:,} reads were measured"


_LONGER = "Measure longer: --seconds 10, over more data if every block is read before."
_SUSTAINED = (
    "Measure with --seconds 60: a store that slows down has a limit that a training meets, not its start."
)


def _around(figures: Mapping[str, Any]) -> str:
    if figures["read"] == "direct":
        return "Measure on the disk itself: this file system does not show that direct reads come from it."
    return "Read around the page cache (--read direct, which needs fio), or add --evict."


def _throttled(one: _Rated) -> str:
    return (
        f"Have fewer than {one.in_flight} reads in flight, larger blocks, shards spread over prefixes, or "
        "the store's limit raised."
    )


def _more_clients(figures: Mapping[str, Any]) -> str:
    if figures["read"] == "buffered":
        return "Measure with --read direct, which needs fio, or with larger blocks."
    return (
        "Measure from several processes or machines at a time, as the ranks of a training read, and add up."
    )


def _more_in_flight(one: _Rated) -> str:
    return (
        f"Measure with more reads in flight: --in-flight {2 * one.in_flight} --in-flight {4 * one.in_flight}."
    )


def _faster(figures: Mapping[str, Any]) -> str:
    cure = (
        "a faster disk"
        if figures["read"] != "store"
        else "a nearer store, or a cache on local disks (cache=)"
    )
    return f"Take {cure}, or store fewer bytes a sample (smaller images, compression)."


def _read_by(one: _Rated, share: str, then: str) -> str:
    size = block_text(one.block_bytes)
    return (
        f"Read blocks of {size} (dataflow index --block-bytes {size.replace(' ', '')}), {one.in_flight} in "
        f"flight for all ranks together{share}; loaders adapt that number by themselves, and {then}."
    )
