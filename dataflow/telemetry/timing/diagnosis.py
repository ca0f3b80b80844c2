"""One diagnosis of a training: what holds it up, in one line, and the next action with its gain.

It is of steps as they were, of parts that were each measured alone, or of a loader that is waited for. Every
gain is computed from what was measured, and of steps it is at most that: the part is taken to vanish, or to
halve, and nothing else to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dataflow.telemetry.timing.bottleneck import Bottleneck, Bound
from dataflow.telemetry.timing.records import LoaderTimes, StepRecord
from dataflow.telemetry.timing.shares import WORTH, StepShares, takes_turns

_BUSY = 0.7
_MOST = 0.5
_FEW_CHUNKS = 0.5
"""Share of the waiting in which builders lacked work: where it is less, something else holds them up."""
_FULL = 0.8
"""Share of a memory limit: where no more was held at any time, a larger one brings nothing."""
_LOCKED_CORES = 0.8, 1.2
"""Cores that several busy threads keep busy, from and to, where one interpreter lock lets them run in
turn."""
_STORES = {
    "": "a faster or nearer store",
    "local": "a faster disk",
    "remote": "a faster or nearer store, or a cache on this machine (cache=)",
    "cached": "a larger or faster cache, or a faster or nearer store",
}

Where = Literal[
    "store",
    "decoding and transforms",
    "read-ahead",
    "hand-over",
    "training",
    "network",
    "slow rank",
    "optimizer",
]
"""The parts of a training that may hold it up."""

_CURES: Mapping[Bound, tuple[Where, str]] = {
    "compute": (
        "training",
        "Leave the loader as it is; a faster step is in the computation, which torch.profiler shows.",
    ),
    "storage": (
        "store",
        "Take a faster store, or a cache on local disks (cache=); dataflow bench storage measures it.",
    ),
    "decode": (
        "decoding and transforms",
        "Give loading more cores, or cheaper samples: smaller images, transforms that are done once.",
    ),
    "memory": ("read-ahead", "Raise DataLoader(memory_limit=), so that more is read ahead."),
    "epochs": (
        "hand-over",
        'Measure with more data; a training on so little takes Mixture({dataset: 1}, stop="never").',
    ),
}
"""By part that was measured alone: where that is, and what helps where it holds a training up."""


@dataclass(frozen=True)
class Diagnosis:
    """The part that holds a training up, why, and the next thing to do."""

    verdict: str
    """Such as "network-bound: 37 % exposed"."""
    action: str
    gain: float | None
    """Times faster at most; None: it cannot be told from these windows."""
    where: Where = "training"
    """The part that holds the training up."""

    def __str__(self) -> str:
        gain = "what that gains, these figures cannot tell" if self.gain is None else gain_text(self.gain)
        return f"{self.verdict}\nnext: {self.action} ({gain})"


def gain_text(gain: float) -> str:
    """Such as "at most 1.59 x faster"."""
    return f"at most {gain:.2f} x faster"


def diagnose(facts: StepShares | Bottleneck | LoaderTimes, records: Sequence[StepRecord] = ()) -> Diagnosis:
    """Return what holds a training up, and the next action.

    Args:
        facts: where the time of the ranks' steps goes, what bounds parts that were measured alone, or what a
            loader says that is waited for.
        records: of the ranks whose steps these are.
    """
    if isinstance(facts, LoaderTimes):
        where, action = _loader_action(facts)
        verdict = f"data-bound: {facts.stall_share or 0.0:.0%} waiting for the loader"
        return Diagnosis(verdict, action, None, where)
    if isinstance(facts, Bottleneck):
        where, _ = _CURES[facts.bound]
        action = cure_of(facts.bound, facts.cores_used)
        return Diagnosis(f"{facts.bound}-bound: {facts.reason}", action, facts.gain, where)
    shares, critical = facts, records[facts.critical]
    if shares.bound == "data":
        return _data(shares, critical, len(records))
    if shares.bound == "network":
        return _network(shares, critical, waiting_in_it=critical.world_size > len(records))
    if shares.bound == "straggler":
        return _straggler(shares, critical, len(records))
    if shares.bound == "optimizer":
        verdict = f"optimizer-bound: {shares.share('optimizer'):.0%} of the time in step()"
        if critical.strategy != "all-reduce" and critical.world_size > 1 and critical.model == "DDP":
            verdict += f", the exchanges of {critical.strategy} included"
        action = (
            "accumulate twice the microbatches a step (a larger global batch), or a fused optimizer "
            "(fused=True) where there is one"
        )
        return Diagnosis(verdict, action, shares.halved("optimizer"), "optimizer")
    # Batches take most of the cores that computing may need: not where it has a device.
    if critical.device in ("", "cpu") and (critical.loader.cores_busy or 0.0) >= _MOST:
        return _cores(shares, critical.loader)
    if not critical.in_schedule:
        verdict = f"not data-bound: {shares.share('data'):.0%} waiting for the loader"
        action = (
            "let the loop run over a GradSchedule(loader, model, optimizer, ...): it tells computing, "
            "communication, slow ranks and optimizer apart"
        )
        return Diagnosis(verdict, action, None)
    verdict = f"compute-bound: {shares.share('compute'):.0%} forward, backward and the loop itself"
    if max(shares.gains.values()) < WORTH:
        verdict += "; no cure of the rest gains 5%"
    return Diagnosis(
        verdict,
        "look into the computation with torch.profiler: torch.compile, lower precision, larger microbatches",
        None,
    )


def cure_of(bound: Bound, cores_used: float | None) -> str:
    """Return what helps where a part that was measured alone is too slow.

    `cores_used`: share of the cores that loading kept busy, in [0, 1]; None: not known.
    """
    if bound == "decode" and cores_used is not None and cores_used < _BUSY:
        return (
            f"Give the loader more workers (num_workers=), or cheaper samples: {cores_used:.0%} of the cores "
            "are busy."
        )
    return _CURES[bound][1]


def _data(shares: StepShares, critical: StepRecord, num_ranks: int) -> Diagnosis:
    where = "" if num_ranks == 1 or takes_turns(shares, num_ranks) else f", most on rank {critical.rank}"
    verdict = f"data-bound: {shares.share('data'):.0%} waiting for the loader{where}"
    part, action = _loader_action(critical.loader)
    return Diagnosis(verdict, action, shares.gains["data"], part)


def _cores(shares: StepShares, loader: LoaderTimes) -> Diagnosis:
    verdict = (
        f"decoding takes the cores: {loader.cores_busy:.0%} of this rank's {loader.cores:g} are busy making "
        f"batches, {shares.share('data'):.0%} waiting for the loader"
    )
    action = (
        "if the training computes on these cores, too: cheaper decoding or transforms (smaller images, "
        "work done once when shards are written), or more cores"
    )
    return Diagnosis(verdict, action, None, "decoding and transforms")


def _loader_action(loader: LoaderTimes) -> tuple[Where, str]:
    """Return which part of a loader does not keep up, and what helps."""
    part: Where = "decoding and transforms"
    cores_are_busy = (loader.cores_busy or 0.0) >= _BUSY
    if loader.kind == "main":
        return part, "make batches beside the training: DataLoader(num_workers=...), it has none"
    if loader.kind in ("process", "thread"):
        if cores_are_busy:
            share = f"they keep {loader.cores_busy:.0%} of {loader.cores:g} cores busy"
            return (
                part,
                f"cheaper items, or more cores: the {loader.kind} workers do not keep up, and {share}",
            )
        return part, f"more workers or cheaper items: the {loader.kind} workers do not keep up"
    if loader.kind != "shards":
        return part, "fetch ahead, by dataflow's DataLoader with num_workers=, or over shards"
    if loader.builders == "main":
        return part, "make batches beside the training: DataLoader(num_workers=...) has builders, 0 has none"
    read, build = loader.read_busy or 0.0, loader.build_busy or 0.0
    busy = f"threads that read were busy {read:.0%} of the time, {_who_builds(loader)} {build:.0%}"
    if max(read, build) >= _BUSY:
        if build > read:
            return part, f"{_builders_action(loader, cores_are_busy=cores_are_busy)}: {busy}"
        return "store", f"{_STORES[loader.store]}: {busy}; `dataflow bench loader` measures each alone"
    if loader.memory_held is None or loader.memory_held >= _FULL:
        return "read-ahead", f"a larger memory_limit=, so that more is fetched ahead: {busy}{_held(loader)}"
    if loader.few_chunks and loader.few_chunks >= _FEW_CHUNKS * (loader.stall_share or 1.0):
        at_work = build * loader.num_builders
        return part, (
            f"fewer workers (num_workers=), smaller batches, or longer epochs: of {loader.num_builders} that "
            f"build {at_work:.1f} were at work, as there were not enough batches to build: {busy}"
        )
    return "hand-over", (
        f"`dataflow bench loader`, which measures each part alone: {busy}{_held(loader)}, so neither "
        "more of them nor a larger memory_limit= is the cure; short epochs or other programs may be why"
    )


def _who_builds(loader: LoaderTimes) -> str:
    name = {"process": "processes", "ray": "Ray actors"}.get(loader.builders, "threads")
    count = f"the {loader.num_builders} {name} that" if loader.num_builders else "those that"
    return f"{count} decode and gather"


def _held(loader: LoaderTimes) -> str:
    return (
        "" if loader.memory_held is None else f"; at most {loader.memory_held:.0%} of memory_limit= was held"
    )


def _builders_action(loader: LoaderTimes, *, cores_are_busy: bool) -> str:
    """Return what helps where those that build do not keep up."""
    if cores_are_busy:
        return "cheaper decoding or transforms, or more cores"
    cores, (least, most) = loader.build_cores, _LOCKED_CORES
    if (
        loader.builders == "thread"
        and loader.num_builders > 1
        and cores is not None
        and least <= cores <= most
    ):
        return (
            f'processes in place of threads (without workers="thread"), or cheaper transforms: the threads '
            f"keep {cores:.1f} cores busy together, as functions do that hold the interpreter lock"
        )
    if cores is None:
        return "more workers (num_workers=), or cheaper decoding or transforms"
    return (
        f"more workers (num_workers=, there are {loader.num_builders}), or cheaper decoding or transforms: "
        f"they keep {cores:.1f} of {loader.cores:g} cores busy, and wait for the rest of their time"
    )


def _network(shares: StepShares, critical: StepRecord, *, waiting_in_it: bool) -> Diagnosis:
    verdict = f"network-bound: {shares.share('network'):.0%} exposed"
    if waiting_in_it:
        action = "compare the ranks (all_ranks=True, or dataflow doctor): waiting for slower ones is in it"
        return Diagnosis(verdict, action, shares.gains["network"], "network")
    action = (
        "halve the bytes (16 bits, docs/guide/strategies.md), or accumulate twice the microbatches a step"
    )
    if critical.strategy != "all-reduce":
        action = "accumulate twice the microbatches a step (a larger global batch)"
    return Diagnosis(verdict, action, shares.halved("network"), "network")


def _straggler(shares: StepShares, critical: StepRecord, num_ranks: int) -> Diagnosis:
    share = f"{shares.share('straggler'):.0%} waiting for the slowest rank"
    if takes_turns(shares, num_ranks):
        verdict = f"straggler-bound: {share}, and ranks take turns"
        action = f"{_equal_work(critical.loader)} longer windows, in which differences even out"
    else:
        verdict = (
            f"straggler-bound: {share}, rank {critical.rank} on {critical.host} "
            f"in {shares.critical_share:.0%} of the windows"
        )
        action = (
            f"look at rank {critical.rank}'s machine (clock, other processes) and at its share of the work"
        )
    return Diagnosis(verdict, action, shares.gains["straggler"], "slow rank")


def _equal_work(loader: LoaderTimes) -> str:
    if loader.batching in ("Packed", "TokenBudget"):
        return f"batches have equal numbers of tokens already ({loader.batching}):"
    if loader.kind == "shards":
        how = "batching=TokenBudget(...) or Packed(...)"
    else:
        how = "a batch_sampler= that counts them"
    return f"give ranks equal work: batches of equal numbers of tokens ({how}), or"
