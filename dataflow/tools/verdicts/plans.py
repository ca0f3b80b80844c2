"""The verdicts on what is computed and not measured: an order's mixing and reads, a step on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataflow.tables import bytes_text, number_text
from dataflow.tools.terminal.report import ReportSummary

_WELL_MIXED = 0.8
_ACCEPTABLE_DISPERSION = 1.5
_READ_AGAIN = 1.1
_HOT = 2.0
_EXPOSED = 0.1


def inspection_verdict(figures: Mapping[str, Any]) -> ReportSummary:
    """The verdict on the figures of `dataflow inspect`: mixing first, then what is read."""
    plan, full = figures["plan"], figures["full"]
    first, last, total = figures["measured_batches"]
    sampled = "" if last - first == total else f", in {last - first:,} of {total:,} batches"
    share = plan["blocks_per_batch"] / full["blocks_per_batch"]
    labels = plan["label_dispersion"]
    facts = (
        f"a batch has {plan['blocks_per_batch']:,.1f} blocks, "
        f"a full shuffle's {full['blocks_per_batch']:,.1f}"
    )
    if labels is not None:
        facts += f"; its labels vary {labels:.3g} times as much as by chance"
    facts += _reads(plan, full)
    kind = figures["shuffle"]["kind"]
    if kind == "none":
        text = f"Every epoch has the same order, that of the files{sampled}: {facts}."
        return ReportSummary(
            text=text, advice="Train with shuffle=True, unless the order of the files is wanted."
        )
    if labels is not None and labels > _ACCEPTABLE_DISPERSION:
        return ReportSummary(
            text=f"Labels come in runs{sampled}: {facts}.", advice=f"Mix more: {_mix_more(kind)}."
        )
    is_mixed = share >= _WELL_MIXED or plan["blocks_per_batch"] >= _most_blocks(figures)
    if labels is None and not is_mixed:
        text = f"This plan mixes less than a full shuffle{sampled}: {facts}."
        advice = f"Look at labels (--label COLUMN), and if they come in runs, mix more: {_mix_more(kind)}."
        return ReportSummary(text=text, advice=advice)
    how = (
        "This plan mixes about as a full shuffle does" if is_mixed else "Labels are mixed about as by chance"
    )
    return ReportSummary(text=f"{how}{sampled}: {facts}.", advice=_of_reads(figures))


def _mix_more(kind: str) -> str:
    if kind == "blocks":  # its windows mix nothing
        return "--shuffle window, or smaller blocks (dataflow index --block-bytes)"
    return "a larger --memory-limit or --window-blocks, or smaller blocks (dataflow index --block-bytes)"


def _most_blocks(figures: Mapping[str, Any]) -> float:
    """Blocks that a batch can have at most and be called mixed, however many a full shuffle takes."""
    batch: int = figures["asked"]["batch_size"] * figures["topology"]["world_size"]
    return _WELL_MIXED * min(float(figures["dataset"]["blocks"]), batch)


def _reads(plan: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    """Return how much is read for 1,000 samples, and by how many requests."""
    bytes_read = ""
    if plan["amplification"] is not None:
        bytes_read = f" and {plan['amplification']:.2f} times the data"
    requests = number_text(plan["requests_per_1000_samples"])
    others = number_text(full["requests_per_1000_samples"])
    return f"; 1,000 samples take {requests} reads{bytes_read}, in a full shuffle {others}"


def _of_reads(figures: Mapping[str, Any]) -> str:
    plan = figures["plan"]
    if (plan["amplification"] or 0) > _READ_AGAIN and figures["shuffle"]["kind"] != "full":
        nodes = figures["topology"]["num_nodes"]
        return f"Give each node lanes of its own, so that nothing is read twice: --canonical-nodes {nodes}."
    if (plan["amplification"] or 0) > _READ_AGAIN:
        return (
            f"Train with shuffle=True, or with a cache of {bytes_text(plan['cache_bytes'])} a node (cache=)."
        )
    hot = {kind: spot for kind, spot in plan["hot_spots"].items() if kind != "host" and spot["ratio"] > _HOT}
    if "prefix" in hot and hot["prefix"]["most"] < hot["prefix"]["ahead"]:
        spot = hot["prefix"]
        return (
            f"Spread shards over prefixes: {spot['name']} gets {spot['ratio']:.1f} times its share of reads."
        )
    if figures["shuffle"]["kind"] == "full":
        return "Train with it if the store keeps up with a read a sample (dataflow bench storage tells)."
    return (
        f"Train with it: DataLoader(dataset, {figures['asked']['batch_size']}, {_shuffle(figures['asked'])})."
    )


def _shuffle(asked: Mapping[str, Any]) -> str:
    """Return the shuffle as a program names it: only what was asked for."""
    arguments = [
        f"{name}={asked[name]}" for name in ("window_blocks", "canonical_nodes") if asked[name] is not None
    ]
    arguments += [f"exchange={asked['exchange']:g}"] * (asked["exchange"] != 1)
    if asked["kind"] == "window" and not arguments:
        return "shuffle=True"
    return f"Shuffle({', '.join([repr(asked['kind']), *arguments])})"


def plan_verdict(figures: Mapping[str, Any]) -> ReportSummary:
    """The verdict on the figures of `dataflow plan`: a prediction, and says so."""
    asked, plan = figures["asked"], figures["plan"]
    best, ranks = plan["best"], asked["nodes"] * asked["ranks_per_node"]
    busy = best["compute_s"] / best["window_s"]
    text = (
        f"Predicted, not measured: {ranks:,} ranks take {best['samples_per_s']:,.0f} samples/s and compute "
        f"{busy:.0%} of the time; {_lost(best)}"
    )
    unusable = [doubt for doubt in plan["doubts"] if doubt.startswith("Unusable")]
    if unusable:
        reason, _, cure = unusable[0].partition(": ")[2].partition(". ")
        return ReportSummary(text=f"{text}, with a batch that is of no use: {reason}.", advice=cure)
    if best["data_wait_s"] > 0:
        rate = bytes_text(best["data_bytes_per_s"])
        advice = f"Read fewer bytes a sample or from a cache on the node: {rate}/s a node are the limit."
        return ReportSummary(text=f"{text}.", advice=advice)
    advice = (
        f"Accumulate {best['accumulate']} microbatches (a batch of {best['batch']:,}) and reduce by "
        f"{best['algorithm']!r}"
    )
    if best["exposed_s"] > _EXPOSED * best["window_s"]:
        advice += "; fewer --gradient-bits or a faster network would help"
    return ReportSummary(text=f"{text}.", advice=f"{advice}.")


def _lost(best: Mapping[str, Any]) -> str:
    if best["data_wait_s"] > 0:
        return f"{best['data_wait_s'] / best['window_s']:.0%} is waiting for data"
    return f"{best['exposed_s'] / best['window_s']:.0%} is waiting for gradients"
