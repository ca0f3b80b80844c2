"""What `dataflow bench loader` prints: figures of ranks and parts, and the verdict with its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from dataflow.tools.bench.loader import Emulated
from dataflow.tools.bench.stages import Phase, RankFigures
from dataflow.tools.bench.storage import usable_cores
from dataflow.tools.terminal.indexing import bytes_text

_ALONE: tuple[tuple[Phase, str], ...] = (
    ("synthetic", "computing, over one batch"),
    ("storage", "reading the blocks"),
    ("memory", "loading from memory"),
    ("undecoded", "  the same, bytes left as they are"),
    ("loader", "loading, without computing"),
    ("more memory", "  the same, 4 x the memory limit"),
    ("training", "all together"),
)
_MOST = 0.5
_GOOD = 0.9
"""What MLPerf Storage asks of most workloads."""


def show(found: Emulated, console: Console) -> None:
    """Print everything."""
    asked = found.asked
    console.print(found.dataset, markup=False)
    console.print(
        f"{asked.ranks} ranks of {asked.batch_size} samples, {asked.compute_ms:g} ms a step, "
        f"memory limit {bytes_text(found.memory_limit)} a rank"
    )
    console.print(_rank_table(found))
    console.print(_part_table(found))
    for line in lines(found):
        console.print(line, markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right")
    return table


def _rank_table(found: Emulated) -> Table:
    table = _table("rank", "AU", "samples/s", "MB/s read", "waiting", "in step", "first batch", "memory")
    for one in found.training:
        table.add_row(str(one.rank), *_rank_cells(one))
    if len(found.training) > 1:
        rate = sum(one.samples_per_s for one in found.training)
        mb_per_s = sum(map(_mb_per_s, found.training))
        table.add_row("all", _percent(found.utilisation), f"{rate:,.0f}", f"{mb_per_s:,.1f}")
    return table


def _rank_cells(one: RankFigures) -> list[str]:
    steps, stats = one.steps, one.stats
    assert steps is not None
    assert stats is not None
    running_s = max(steps["ended_s"] - steps["first_s"], 1e-9)
    return [
        _percent(one.utilisation),
        f"{one.samples_per_s:,.0f}",
        f"{_mb_per_s(one):,.1f}",
        _percent(steps["waited_s"] / running_s),
        _percent(steps["synced_s"] / running_s),
        f"{steps['first_batch_s'] * 1e3:,.0f} ms",
        bytes_text(stats["memory"]["peak_bytes"]),
    ]


def _mb_per_s(one: RankFigures) -> float:
    assert one.steps is not None
    span_s: float = max(one.steps["ended_s"] - one.steps["began_s"], 1e-9)
    return one.read_bytes / 1e6 / span_s


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _part_table(found: Emulated) -> Table:
    table = _table("alone", "samples/s", "MB/s read", "cores", "from disk")
    for phase, name in _ALONE:
        if ranks := found.phases.get(phase):
            rate = sum(one.samples_per_s for one in ranks)
            table.add_row(name, f"{rate:,.0f}", *_traffic(ranks, found.asked.seconds))
    return table


def _traffic(ranks: Sequence[RankFigures], seconds: float) -> list[str]:
    read = sum(one.read_bytes for one in ranks)
    spans = [one.steps["ended_s"] - one.steps["began_s"] if one.steps else seconds for one in ranks]
    span = max(*spans, 1e-9)
    device = [one.device_bytes for one in ranks]
    known = sum(came for came in device if came is not None)
    share = "-" if None in device or not read else f"{min(1.0, known / read):.0%}"
    return [f"{read / 1e6 / span:,.1f}", f"{sum(one.cpu_s for one in ranks) / span:.2f}", share]


def lines(found: Emulated) -> Iterator[str]:
    """The verdict, and what it rests on."""
    verdict, rates = found.verdict, found.rates
    au = found.utilisation
    if au is not None:
        word = "at least" if au >= _GOOD else "below"
        yield f"accelerator utilisation {au:.1%}, {word} the 90 % that MLPerf Storage asks of most workloads"
    alone = [one.utilisation for one in found.phases["synthetic"] if one.utilisation is not None]
    if alone:
        yield (
            f"with data that is there already it is {sum(alone) / len(alone):.1%}: the rest is what timers "
            "and going in step cost on this machine"
        )
    yield f"{verdict.bound}-bound: {verdict.reason}"
    gains = ", ".join(f"{name} {gain:.2f} x" for name, gain in verdict.gains.items())
    yield f"expected gain of curing one part: {gains}"
    yield (
        f"the slowest part alone predicts {verdict.predicted:,.0f} samples/s; "
        f"measured {rates.measured:,.0f} ({rates.measured / verdict.predicted:.0%})"
    )
    yield from _evidence(found)
    training = [one.steps for one in found.training if one.steps]
    if training:
        span_s = max(one["ended_s"] - one["began_s"] for one in training)
        busy = sum(one.cpu_s for one in found.training) / max(span_s, 1e-9)
        yield from cores_text(busy, usable_cores())


def cores_text(busy: float, cores: int) -> Iterator[str]:
    """A warning where loading takes most of the cores of a training, whose computing is emulated here."""
    if busy >= _MOST * cores:
        yield (
            f"loading takes {busy:.2f} of the {cores} cores ({busy / cores:.0%}) beside the emulated "
            "computing, which takes none: a training that computes on them gets what is left; cheaper "
            "decoding or more cores help it, whatever the verdict"
        )


def _evidence(found: Emulated) -> Iterator[str]:
    stats = [one.stats for one in found.training if one.stats]
    if not stats:
        return
    elapsed = sum(one["elapsed_s"] for one in stats)
    for stage in ("read", "build"):
        busy = sum(one[stage]["busy_s"] for one in stats)
        threads = max(one[stage]["threads"] for one in stats)
        share = busy / max(elapsed * threads, 1e-9)
        yield f"{stage} threads: busy {share:.0%} of the time ({threads} a rank)"
    peak = max(one["memory"]["peak_bytes"] for one in stats)
    yield (
        f"ledger: at most {bytes_text(peak)} of {bytes_text(found.memory_limit)} held; "
        f"{stats[0]['depth']} batches ahead ({stats[0]['depth_reason']})"
    )
    faults = sum(one["faults"]["retries"] for one in stats)
    if faults:
        yield f"reads tried again: {faults:,} (faults in --json)"
    if found.evicted:
        yield "the data came from the disk; it was dropped from memory before each further phase"
