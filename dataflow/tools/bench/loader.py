"""`dataflow bench loader` emulates accelerators, measures each part alone, and says what holds them up.

Phases run one after the other, each in fresh gloo ranks: the whole (load, compute, in step), and the same
once more with a batch from memory in the loader's place; the loader without computing, the storage without
decoding, the loader from memory with and without decoding; and if the loader alone stays behind its parts,
the loader with four times the memory limit. If the whole found its data on the disk and not in memory, the
data is dropped from memory before the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dataflow.dataset import ShardedDataset
from dataflow.limits import memory_limit_bytes
from dataflow.telemetry.timing.bottleneck import Bottleneck, Epochs, Rates, bottleneck_of
from dataflow.telemetry.timing.data_stall_report import DataStall, data_stall_of
from dataflow.telemetry.timing.diagnosis import diagnose
from dataflow.testing import run_ranks
from dataflow.tools.bench.evidence import evict
from dataflow.tools.bench.settings import Emulation, settings_json, stored_sample_bytes
from dataflow.tools.bench.stages import EmulationPhase, RankFigures, Steps, Work, run_phase
from dataflow.tools.terminal.report import (
    Drawing,
    Page,
    Part,
    Table,
    bytes_text,
    machine,
    optional,
    usable_cores,
)
from dataflow.tools.verdicts.loading import loader_verdict
from sharding.blocks import Shard
from sharding.urls import is_local

_PHASES: Mapping[EmulationPhase, str] = {
    "training": "all together",
    "loader": "loading, without computing",
    "storage": "reading the blocks",
    "memory": "loading from memory",
    "undecoded": "  the same, bytes left as they are",
    "more memory": "loading, 4 x the memory limit",
}
"""In the order in which they run; the last only where loading stays behind its parts."""
_COUNTS = ("rank", "samples", "samples_per_s", "read_bytes", "device_bytes", "cpu_s")
_SECONDS = ("running_s", "waited_s", "synced_s", "first_batch_s")
_KEPT_BYTES = 256 << 20
_FROM_DEVICE = 0.5
_BEHIND = 0.9
_START_S = 120.0
_MORE = 4
_MOST_CORES = 0.5
_GOOD_UTILISATION = 0.9
"""The utilisation that MLPerf Storage asks of most workloads."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EmulationFigures:
    """The measurements of `dataflow bench loader`."""

    settings: Emulation
    memory_limit: int
    """Limit of a rank, in bytes."""
    dataset: str
    phases: Mapping[EmulationPhase, Sequence[RankFigures]]
    """The figures of each rank, by phase."""
    evicted: bool
    """True if the data was dropped from memory before the phases after the first."""
    headspace: DataStall
    """Times faster that the whole is with a batch from memory in the loader's place."""
    rates: Rates
    bottleneck: Bottleneck
    stored_bytes: int
    """Bytes of all blocks of the dataset."""
    sample_bytes: float
    """Bytes of the blocks for each sample."""
    is_local: bool
    """True if the shards are files of this machine."""

    @property
    def need(self) -> dict[str, Any] | None:
        """The rate that is needed, as JSON types; None: nobody asked."""
        need = self.settings.need
        return None if need is None else need.to_json(self.sample_bytes)

    @property
    def training(self) -> Sequence[RankFigures]:
        """The whole, rank by rank."""
        return self.phases["training"]

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        return {
            "need": self.need,
            "asked": settings_json(self.settings),
            "stored_bytes": self.stored_bytes,
            "is_local": self.is_local,
            "memory_limit": self.memory_limit,
            "dataset": self.dataset,
            "machine": {**machine(), "torch": torch.__version__},
            "accelerator_utilisation": _mean_utilisation(rank.steps for rank in self.training),
            "evicted": self.evicted,
            "headspace": self.headspace.to_json(),
            "rates_samples_per_s": asdict(self.rates),
            "bottleneck": {
                name: getattr(self.bottleneck, name)
                for name in ("bound", "predicted", "gains", "reason", "gain")
            },
            "phases": {name: [rank.to_json() for rank in ranks] for name, ranks in self.phases.items()},
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of a CSV file for each rank in each phase."""
        return [
            {
                "phase": phase,
                **{name: getattr(rank, name) for name in _COUNTS},
                "utilisation": rank.steps and rank.steps.utilisation,
                "steps": rank.steps and rank.steps.counted,
                **{name: rank.steps and getattr(rank.steps, name) for name in _SECONDS},
            }
            for phase, ranks in self.phases.items()
            for rank in ranks
        ]


# ---- measuring ------------------------------------------------------------------------------------------


def emulate(
    settings: Emulation,
    progress: Callable[[int, int, str], None] = lambda *_: None,
    run: Callable[[Work, int], list[RankFigures]] | None = None,
    drop: Callable[[Sequence[Shard]], None] = evict,
) -> EmulationFigures:
    """Run all phases.

    Args:
        settings: what to emulate.
        progress: hears of each phase before it begins: how many are done, of how many, and its name.
        run: runs one in all ranks; None: in processes of their own.
        drop: drops shards from memory.

    Raises:
        ImportError, ValueError: the dataset cannot be made, or has too few samples.
        ShardReadError: shards that cannot be read.
        MemoryLimitError: the limit does not hold a window and a batch.
    """
    if settings.compute_ms <= 0:
        raise ValueError(f"compute-ms must be > 0, got {settings.compute_ms:g}")
    run = run or run_in_ranks
    dataset = settings.dataset.open_shards()  # indexed once, before the ranks open it
    limit = memory_limit_bytes(settings.memory_limit, settings.ranks)
    work = Work(
        phase="training",
        dataset=settings.dataset,
        batch_size=settings.batch_size,
        compute_s=settings.compute_ms / 1e3,
        seconds=settings.seconds,
        seed=settings.seed,
        memory_limit=settings.memory_limit,
        kept_bytes=min(_KEPT_BYTES, limit),
    )
    phases: dict[EmulationPhase, list[RankFigures]] = {}
    evicted = False
    for number, phase in enumerate(_PHASES):
        if phase == "more memory":
            rates = _rates(phases)
            if rates.loader >= min(_BEHIND * min(rates.storage, rates.decode), rates.compute):
                break
            work = replace(work, memory_limit=_MORE * limit)
        progress(number, len(_PHASES) - (phase != "more memory"), phase)
        if evicted:
            drop(_shards(dataset))
        phases[phase] = run(replace(work, phase=phase), settings.ranks)
        evicted = evicted or (phase == "training" and _from_device(phases[phase]))
    rates = _rates(phases)
    return EmulationFigures(
        settings=settings,
        memory_limit=limit,
        dataset=repr(dataset),
        phases=phases,
        evicted=evicted,
        headspace=_data_stall(phases["training"]),
        rates=rates,
        bottleneck=bottleneck_of(rates),
        stored_bytes=int(dataset.catalog.blocks.length.sum()),
        sample_bytes=stored_sample_bytes(dataset.catalog),
        is_local=all(is_local(shard.url) for shard in _shards(dataset)),
    )


def run_in_ranks(work: Work, ranks: int) -> list[RankFigures]:
    """One phase, in as many fresh processes."""
    timeout_s = _START_S * ranks + 20 * work.seconds
    return run_ranks(run_phase, ranks, args=(work,), start_method="forkserver", timeout_s=timeout_s)


def _shards(dataset: ShardedDataset) -> list[Shard]:
    catalog = dataset.catalog
    return [catalog.shard(number) for number in range(catalog.num_shards)]


def _from_device(ranks: Sequence[RankFigures]) -> bool:
    """Return whether most of what was read came from a disk of this machine."""
    device_bytes = sum(rank.device_bytes or 0 for rank in ranks)
    return device_bytes > _FROM_DEVICE * max(1, sum(rank.read_bytes for rank in ranks))


def _data_stall(training: Sequence[RankFigures]) -> DataStall:
    return data_stall_of(
        [rank.steps.windows for rank in training if rank.steps],
        [rank.replayed.windows for rank in training if rank.replayed],
    )


def _rates(phases: Mapping[EmulationPhase, Sequence[RankFigures]]) -> Rates:
    def together(phase: EmulationPhase) -> float:
        return max(sum(rank.samples_per_s for rank in phases[phase]), 1e-9)

    measured = together("training")
    return Rates(
        measured=measured,
        compute=measured * _data_stall(phases["training"]).gain,
        storage=together("storage"),
        decode=together("memory"),
        loader=together("loader"),
        more_memory=together("more memory") if "more memory" in phases else None,
        epochs=_epochs(phases["loader"]),
        cores_used=min(1.0, _cores(phases["loader"]) / usable_cores()),
    )


def _epochs(ranks: Sequence[RankFigures]) -> Epochs | None:
    """Return how epochs began in a phase, on the rank that has the fewest batches."""
    known = [figures for figures in ranks if figures.epoch_batches and figures.steps and figures.stats]
    if not known:
        return None
    rank = min(known, key=lambda figures: figures.epoch_batches or 0)
    assert rank.epoch_batches is not None
    assert rank.steps is not None
    assert rank.stats is not None
    share = min(0.99, rank.steps.border_s / max(rank.steps.running_s, 1e-9))
    return Epochs(batches=rank.epoch_batches, ahead=rank.stats["depth"], border_share=share)


def _cores(ranks: Sequence[RankFigures]) -> float:
    """Cores that a phase kept busy, on all ranks."""
    return sum(rank.cpu_s for rank in ranks) / max(_span_s(rank, 0.0) for rank in ranks)


def _mean_utilisation(ranks: Iterable[Steps | None]) -> float | None:
    utilisations = [steps.utilisation for steps in ranks if steps and steps.utilisation is not None]
    return sum(utilisations) / len(utilisations) if utilisations else None


# ---- telling --------------------------------------------------------------------------------------------


def page_of(figures: EmulationFigures) -> Page:
    """Return the verdict, figures of ranks and parts, and the evidence."""
    settings = figures.settings
    head = (
        f"{settings.ranks} ranks of {settings.batch_size} samples, {settings.compute_ms:g} ms a step, "
        f"memory limit {bytes_text(figures.memory_limit)} a rank"
    )
    parts: Sequence[Part] = (
        figures.dataset,
        head,
        _rank_table(figures),
        _phase_table(figures),
        *sentences(figures),
        Drawing(11, 4.2, lambda figure: _draw(figures, figure)),
    )
    values = figures.to_json()
    return Page(
        "dataflow bench loader",
        values,
        parts,
        verdict=loader_verdict(values),
        rows=figures.rows(),
    )


def _draw(figures: EmulationFigures, figure: Any) -> None:
    """Samples a second of each part, and what the time of a rank's steps went to."""
    rates, shares = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [_PHASES[phase].strip() for phase in figures.phases]
    values = [sum(rank.samples_per_s for rank in ranks) for ranks in figures.phases.values()]
    rates.plot(values, names, "o")  # bars would have no foot on a logarithmic axis
    rates.invert_yaxis()
    rates.grid(axis="x", alpha=0.3)
    if figures.need is not None:
        target = figures.need["samples_per_s"]
        rates.axvline(target, color="black", linestyle=":", label=f"needed, {figures.need['asked']}")
        rates.legend(frameon=False, fontsize="small")
    rates.set(title="samples a second, each part alone", xlabel="samples/s", xscale="log")
    left = [0.0] * len(figures.training)
    for name in ("computed_s", "waited_s", "synced_s"):
        parts = [
            getattr(rank.steps, name) / max(rank.steps.running_s, 1e-9) if rank.steps else 0.0
            for rank in figures.training
        ]
        shares.barh([f"rank {row.rank}" for row in figures.training], parts, left=left, label=_SHARES[name])
        left = [a + b for a, b in zip(left, parts, strict=True)]
    shares.set(title="time of steps", xlabel="share", xlim=(0, 1))
    shares.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)


_SHARES = {"computed_s": "computing", "waited_s": "waiting for data", "synced_s": "waiting for ranks"}


def _rank_table(figures: EmulationFigures) -> Table:
    training = figures.training
    rows = [_rank_row(rank) for rank in training]
    if len(training) > 1:
        rate = sum(rank.samples_per_s for rank in training)
        mb_per_s = sum(rank.read_bytes / 1e6 / _span_s(rank, 0.0) for rank in training)
        rows.append(
            [
                "all",
                optional(_mean_utilisation(rank.steps for rank in training), ".1%"),
                f"{rate:,.0f}",
                f"{mb_per_s:,.1f}",
            ]
        )
    columns = ("rank", "AU", "samples/s", "MB/s read", "waiting", "in step", "first batch", "memory")
    return Table(columns, rows)


def _rank_row(figures: RankFigures) -> list[str]:
    steps, stats = figures.steps, figures.stats
    assert steps is not None
    assert stats is not None
    running_s = max(steps.running_s, 1e-9)
    return [
        str(figures.rank),
        optional(steps.utilisation, ".1%"),
        f"{figures.samples_per_s:,.0f}",
        f"{figures.read_bytes / 1e6 / _span_s(figures, 0.0):,.1f}",
        f"{steps.waited_s / running_s:.1%}",
        f"{steps.synced_s / running_s:.1%}",
        f"{steps.first_batch_s * 1e3:,.0f} ms",
        bytes_text(stats["memory"]["peak_bytes"]),
    ]


def _span_s(figures: RankFigures, otherwise: float) -> float:
    """Seconds from asking for the first batch to the end of the last step; `otherwise` without steps."""
    return max(figures.steps.ended_s - figures.steps.began_s if figures.steps else otherwise, 1e-9)


def _phase_table(figures: EmulationFigures) -> Table:
    rows = []
    for phase, ranks in figures.phases.items():
        span_s = max(_span_s(rank, figures.settings.seconds) for rank in ranks)
        read_bytes = sum(rank.read_bytes for rank in ranks)
        device_bytes = [rank.device_bytes for rank in ranks]
        from_disk = sum(nbytes or 0 for nbytes in device_bytes) / max(1, read_bytes)
        known = read_bytes and None not in device_bytes
        rows.append(
            [
                _PHASES[phase],
                f"{sum(rank.samples_per_s for rank in ranks):,.0f}",
                f"{read_bytes / 1e6 / span_s:,.1f}",
                f"{sum(rank.cpu_s for rank in ranks) / span_s:.2f}",
                f"{min(1.0, from_disk):.0%}" if known else "-",
            ]
        )
    return Table(("alone", "samples/s", "MB/s read", "cores", "from disk"), rows)


def sentences(figures: EmulationFigures) -> Iterator[str]:
    """Yield what the verdict rests on."""
    bottleneck, rates, training = figures.bottleneck, figures.rates, figures.training
    utilisation = _mean_utilisation(rank.steps for rank in training)
    if utilisation is not None:
        word = "at least" if utilisation >= _GOOD_UTILISATION else "below"
        yield (
            f"accelerator utilisation {utilisation:.1%}, {word} the 90 % that MLPerf Storage asks of most "
            "workloads"
        )
    alone = _mean_utilisation(rank.replayed for rank in training)
    if alone is not None:
        yield (
            f"with data that is there already it is {alone:.1%}: the rest is what timers "
            "and going in step cost on this machine"
        )
    if figures.need is not None:  # else the verdict says it
        yield figures.headspace.verdict
        yield diagnose(bottleneck).verdict
    yield from figures.headspace.lines
    gains = ", ".join(f"{name} {gain:.2f} x" for name, gain in bottleneck.gains.items())
    yield f"expected gain of curing one part: {gains}"
    yield (
        f"the slowest part alone predicts {bottleneck.predicted:,.0f} samples/s; "
        f"measured {rates.measured:,.0f} ({rates.measured / bottleneck.predicted:.0%})"
    )
    yield from _evidence(figures)
    yield from cores_text(_cores(training), usable_cores())


def cores_text(busy: float, cores: int) -> Iterator[str]:
    """A warning where loading takes most of the cores of a training, whose computing is emulated here."""
    if busy >= _MOST_CORES * cores:
        yield (
            f"loading takes {busy:.2f} of the {cores} cores ({busy / cores:.0%}) beside the emulated "
            "computing, which takes none: a training that computes on them gets what is left; cheaper "
            "decoding or more cores help it, whatever the verdict"
        )


def _evidence(figures: EmulationFigures) -> Iterator[str]:
    stats = [rank.stats for rank in figures.training if rank.stats]
    elapsed_s = sum(row["elapsed_s"] for row in stats)
    for stage in ("read", "build"):
        busy_s = sum(row[stage]["busy_s"] for row in stats)
        threads = max(row[stage]["threads"] for row in stats)
        share = busy_s / max(elapsed_s * threads, 1e-9)
        who = "processes" if stage == "build" and stats[0]["workers"] == "process" else "threads"
        yield f"{stage} {who}: busy {share:.0%} of the time ({threads} a rank)"
    peak = max(row["memory"]["peak_bytes"] for row in stats)
    yield (
        f"ledger: at most {bytes_text(peak)} of {bytes_text(figures.memory_limit)} held; "
        f"{stats[0]['depth']} batches ahead ({stats[0]['depth_reason']})"
    )
    retries = sum(row["faults"]["retries"] for row in stats)
    if retries:
        yield f"reads tried again: {retries:,} (faults in --json)"
    if figures.evicted:
        yield "the data came from the disk; it was dropped from memory before each further phase"
