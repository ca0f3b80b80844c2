"""The verdicts on loaders: what holds a training up, whether loading is enough, which loader is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.tables import bytes_text, counted, number_text
from dataflow.telemetry.timing.bottleneck import Bottleneck, Bound
from dataflow.telemetry.timing.data_stall_report import gain_verdict, rounds_differ
from dataflow.telemetry.timing.diagnosis import cure_of, diagnose
from dataflow.telemetry.timing.shares import WORTH
from dataflow.tools.terminal.report import ReportSummary
from dataflow.tools.verdicts.storage import FAR, FEW, SHORT_S, Answer

SAME = 0.05
"""Ratios within this share of 1 are called equal."""
_FROM_DISK = 0.05
_MOST_OF_MEMORY = 0.5
_LONGER = "Measure longer: --seconds 20, over more data if an epoch has few batches."
_BOTH = "Take a faster store or a cache on local disks (cache=), and more cores or cheaper samples."
_COMPETE = "Give loading more cores: its parts are fast enough alone, and share them."


def loader_verdict(figures: Mapping[str, Any]) -> ReportSummary:
    """The verdict on the figures of `dataflow bench loader`."""
    if figures["need"] is not None:
        return _answer(figures)
    if short := _short(figures, "training"):
        return ReportSummary(text=f"Too short to tell what holds this training up: {short}.", advice=_LONGER)
    headspace, saved = figures["headspace"], figures["bottleneck"]
    fields = {name: saved[name] for name in ("bound", "predicted", "gains", "reason")}
    diagnosis = diagnose(Bottleneck(**fields, cores_used=figures["rates_samples_per_s"]["cores_used"]))
    gain = headspace["gain"]
    because = f"{diagnosis.verdict}{_from_memory(figures)}"
    if rounds_differ(gain, headspace["replayed"]["slowest"], headspace["live"]["usual"]):
        text = f"Rounds of steps differ by more than a perfect loader would gain ({gain:.2f}x); {because}."
        return ReportSummary(text=text, advice=f"{_LONGER[:-1]}, and on an idle machine.")
    said = gain_verdict(gain)
    return ReportSummary(text=f"{said[0].upper()}{said[1:]}; {because}.", advice=diagnosis.action)


def _answer(figures: Mapping[str, Any]) -> ReportSummary:
    need, rates = figures["need"], figures["rates_samples_per_s"]
    target, rate = need["samples_per_s"], rates["loader"]
    answer, why, advice = _judged(figures, target)
    asked = f"the {target:,.0f} that are needed"
    if need["unit"] == "bytes":
        asked += f" ({bytes_text(need['bytes_per_s'])}/s, at {bytes_text(need['sample_bytes'])} a sample)"
    reached = f"loading alone reaches {rate:,.0f} samples/s {_setting(figures)}"
    fact = f"{reached}, {number_text(rate / target)} times {asked}"
    text = {
        "yes": f"Yes, loading is fast enough: {fact}{why}.",
        "no": f"No, loading is not fast enough: {fact}{why}.",
        "unknown": f"It cannot be said whether loading is fast enough: {fact}{why}.",
    }[answer]
    if rates["compute"] < target / WORTH:
        needed_ms = figures["asked"]["ranks"] * figures["asked"]["batch_size"] / target * 1e3
        advice = (
            f"{advice[:-1]}; steps of {figures['asked']['compute_ms']:g} ms allow only "
            f"{rates['compute']:,.0f} samples/s, as the needed rate leaves {needed_ms:.3g} ms."
        )
    return ReportSummary(text=text, advice=advice, answer=answer, margin=rate / target)


def _judged(figures: Mapping[str, Any], target: float) -> tuple[Answer, str, str]:
    """The answer, why, and what to do."""
    rates = figures["rates_samples_per_s"]
    if short := _short(figures, "loader", few=FEW if target < FAR * rates["loader"] else 0):
        return "unknown", f", but {short}", _LONGER
    low, high = _range(figures)
    if low < target <= high:
        return "unknown", f", but quarters of the time gave from {low:,.0f} to {high:,.0f}", _LONGER
    if rates["loader"] >= target:
        memory, size = figures["machine"]["memory_bytes"], bytes_text(figures["stored_bytes"])
        if not (cached := _from_memory(figures)):
            return "yes", "", "Train with these defaults; dataflow doctor shows whether steps wait for data."
        if figures["stored_bytes"] <= _MOST_OF_MEMORY * memory:
            return (
                "yes",
                cached,
                f"Keep {size} of memory free for it; dataflow bench storage says what the disk gives.",
            )
        return (
            "unknown",
            cached,
            "Measure after dropping the page cache: more data than memory is read from disk.",
        )
    named: dict[Bound, str] = {"storage": "reading the blocks", "decode": "decoding from memory"}
    slow = [(name, bound) for bound, name in named.items() if rates[bound] < target]
    if slow:
        parts = " and ".join(f"{name} alone reaches {rates[bound]:,.0f}" for name, bound in slow)
        return "no", f"; {parts}", _BOTH if len(slow) > 1 else cure_of(slow[0][1], rates["cores_used"])
    if (rates["more_memory"] or 0) >= target:
        more = f"; with four times the memory limit it reaches {rates['more_memory']:,.0f}"
        return "no", more, cure_of("memory", None)
    alone = f"; reading alone reaches {rates['storage']:,.0f}, decoding from memory {rates['decode']:,.0f}"
    if figures["bottleneck"]["bound"] == "epochs":
        return "unknown", f", but borders of short epochs were measured{alone}", cure_of("epochs", None)
    return "no", alone, _COMPETE


def _setting(figures: Mapping[str, Any]) -> str:
    """Return what loading was done with: its builders and memory, as the loader chose or was told."""
    stats = figures["phases"]["loader"][0]["stats"]
    kind = "process" if stats["workers"] == "process" else "thread"
    builders = counted(stats["build"]["threads"], kind).replace(kind, f"building {kind}")
    return f"with {builders} and {bytes_text(figures['memory_limit'])} of memory a rank"


def _short(figures: Mapping[str, Any], phase: str, few: int = FEW) -> str:
    count = min(rank["steps"]["count"] for rank in figures["phases"][phase])
    if figures["asked"]["seconds"] >= SHORT_S and count >= few:
        return ""
    return f"{figures['asked']['seconds']:g} s and {count:,} batches a rank were measured"


def _range(figures: Mapping[str, Any]) -> tuple[float, float]:
    """Samples a second of all ranks in the slowest and the fastest quarter of loading."""
    quarters = [rank["steps"]["steps_per_s_by_quarter"] for rank in figures["phases"]["loader"]]
    together = [sum(rates) * figures["asked"]["batch_size"] for rates in zip(*quarters, strict=True)]
    mean = figures["rates_samples_per_s"]["loader"]
    return min([*together, mean]), max([*together, mean])


def _from_memory(figures: Mapping[str, Any]) -> str:
    """Return that the data came from this machine's memory, if it did and not from its disk; "" else."""
    ranks = figures["phases"]["loader"]
    came = [rank["device_bytes"] for rank in ranks]
    read_bytes = sum(rank["read_bytes"] for rank in ranks)
    if not figures["is_local"] or None in came or not read_bytes or sum(came) > _FROM_DISK * read_bytes:
        return ""
    return "; the data came from this machine's memory, not from its disk"


# ---- compare --------------------------------------------------------------------------------------------


def comparison_verdict(figures: Mapping[str, Any]) -> ReportSummary:
    """The verdict on the figures of `dataflow bench compare`."""
    ours, theirs = (
        max((loader for loader in figures["contestants"] if loader["whose"] == whose), key=_median)
        for whose in ("dataflow", "torch")
    )
    text = comparison_text(ours["name"], _median(ours), theirs["name"], _median(theirs))
    asked, ratio = figures["asked"], _median(ours) / _median(theirs)
    if asked["seconds"] < SHORT_S:
        text = f"Too short to tell ({asked['seconds']:g} s a run): {text}"
        return ReportSummary(text=f"{text}.", advice="Measure longer: --seconds 3 or more.")
    if asked["repeats"] < 2:
        return ReportSummary(
            text=f"By one run each, {text}.", advice="Repeat: --repeats 3 tells how far runs differ."
        )
    a, b = _rates(ours), _rates(theirs)
    if abs(ratio - 1) > SAME and min(a) <= max(b) and min(b) <= max(a):
        text = f"Too close to tell, as the ranges of the single runs overlap: {text}"
        return ReportSummary(
            text=f"{text}.", advice="Measure on an idle machine, with more --repeats or --seconds."
        )
    if ratio < 1 - SAME:
        advice = f"Keep torch's loader for this data, with num_workers={theirs['workers']}."
    elif ratio <= 1 + SAME:
        advice = "Choose by what else you need, such as exact resume: speed does not decide here."
    elif ours["workers"] is None:
        advice = "Train with dataflow.DataLoader(dataset, ...), and leave num_workers out."
    else:
        advice = f"Train with dataflow.DataLoader(..., num_workers={ours['workers']})."
    return ReportSummary(text=f"{text}.", advice=advice)


def comparison_text(ours: str, rate: float, theirs: str, other: float) -> str:
    """Return who of two is faster, by their samples a second, torch's too."""
    ratio = rate / other
    pair = f"{ours}: {rate:,.0f} samples/s; {theirs}: {other:,.0f}"
    if ratio < 1 - SAME:
        return f"torch is faster here, {1 / ratio:.2f} x ({pair})"
    if ratio <= 1 + SAME:
        return f"no difference beyond {SAME:.0%} ({pair})"
    return f"dataflow is faster here, {ratio:.2f} x ({pair})"


def _median(contestant: Mapping[str, Any]) -> float:
    return float(contestant["median_samples_per_s"])


def _rates(contestant: Mapping[str, Any]) -> Sequence[float]:
    return [run["samples_per_s"] for run in contestant["runs"]]
