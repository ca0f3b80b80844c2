"""The decisions about a session: who builds, how far ahead it reads, what stays in memory, and why.

All of it is decided by a plan, settings, this rank's topology and a memory limit, and is one frozen value.
Nothing is opened here: that does `dataflow.stream.resources`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

from dataflow.batch.builder import BuildSettings
from dataflow.batch.samples import REPEAT
from dataflow.batch.transforms import fingerprint_of, has_random_lengths, releases_gil
from dataflow.dataset import ShardedDataset
from dataflow.limits import allowed_cores, machine_memory, memory_limit_bytes
from dataflow.mixture import Mixture
from dataflow.outputs.objects import is_text
from dataflow.planning.length_aware import check_batching, gather_of, is_by_tokens, lengths_alone
from dataflow.planning.plan import StreamPlan
from dataflow.planning.settings import CHECKED_STEPS, WITH_STEPS, StreamSettings
from dataflow.stream.read_ahead import CHUNK_BYTES, HAND_OVER_S, ReadAhead, choose_read_ahead
from prefetch.engine.builds import chunks_ahead
from prefetch.errors import MemoryLimitError
from prefetch.workers.starting import is_fork, start_context
from sharding.lengths.batching import Packed
from sharding.plan.history import StepRange
from sharding.plan.window_size import window_bytes
from sharding.topology.topology import Topology
from sharding.urls import is_local

_FEW_CORES = 4
"""Threads that decode beside a training: each takes the lock between two values, a few percent of the
time. Sixteen took a third of a training's rate, processes 1 to 12 % (docs/notes/benchmarks.md)."""


_ACTORS = "dataflow.actors.builders"
CLUSTERS = {
    "ray": (f"{_ACTORS}:cluster_nodes", f"{_ACTORS}:RayBuilders", "dataflow.actors.reading:PlannedWindow")
}
"""By the name that `builders=` takes: what says where builders of a cluster would run, these builders, and
windows of those that read by themselves."""
EXPLAIN = "dataflow.explain"
ACCOUNT, SUMS = f"{EXPLAIN}.account:DeliveryAccount", f"{EXPLAIN}.account:BatchSums"
"""The entries for what was handed out, noted by every loader where that package is there."""

_JOINED = ("dataflow.joins.reads:kept_bytes", "dataflow.joins.reads:check_reads")
"""The names of what tells which joined datasets stay in memory, and of what refuses their reads."""

_THREADS_AT_FIRST = 8
"""Threads that build until processes have started: eight fed a training 1.4 times as fast as seventeen."""


@dataclass(frozen=True, kw_only=True)
class BuilderPlan:
    """The builders of a session: who they are, how many, and why."""

    workers: str
    """"main" (the consumer), "thread", "process" or "ray"."""
    num_workers: int
    """0: the consumer."""
    reason: str
    num_threads: int = 0
    """Threads that build until processes from a server have started; 0: batches wait for these, as each
    function of the user's is to see one state of what it looks at."""
    copies_only: bool = False
    """True if batches are copies, which compiled code makes."""
    reads: bool = False
    """True if builders read blocks by themselves."""
    num_ranks: int = 1
    """The ranks that share the cluster which actors are on."""

    @property
    def num_processes(self) -> int:
        """Builders that are processes, of this machine or another."""
        return self.num_workers if self.workers in ("process", "ray") else 0

    @property
    def is_local(self) -> bool:
        """Return whether builders are threads or processes of this machine."""
        return self.workers != "ray"


def plan_builders(plan: StreamPlan, settings: StreamSettings, topology: Topology) -> BuilderPlan:
    """Decide who builds the batches of a plan on this rank."""
    local_ranks = topology.local_world_size
    dataset, workers, number = plan.dataset, settings.workers, settings.num_workers
    copies_only = not (settings.collate_fn or plan.planner or settings.asks_for_processes)
    copies_only = copies_only and _are_copies(dataset)
    cores = max(1, allowed_cores() // max(1, local_ranks))
    count = "1 core" if cores == 1 else f"{cores} cores"
    each = f"{count} for this rank" if local_ranks > 1 else count
    if number == 0:
        return BuilderPlan(workers="main", num_workers=0, reason="num_workers=0", copies_only=copies_only)
    if copies_only:
        # One core is left to the consumer, who copies too while it waits.
        text = "batches are copies alone, which compiled threads make without the interpreter lock"
        copying = (settings.builders is None and number) or max(1, cores - 1)
        return BuilderPlan(workers="thread", num_workers=copying, reason=text, copies_only=True)
    if settings.builders == "ray":
        if not settings.ship_blocks and plan.has_joins:
            raise ValueError(
                'actors do not read joined datasets: pass ship_blocks=True beside builders="ray"'
            )
        return _plan_actors(settings, topology.world_size)
    if workers is None and (number is not None or settings.asks_for_processes):
        workers = "process"
    if workers == "process" or settings.asks_for_processes:
        asked = 'workers="process"' if workers == "process" else "worker_init_fn or multiprocessing_context"
        text = f"num_workers={number}" if number else f"{asked}, {each}"
        return BuilderPlan(workers="process", num_workers=number or cores, reason=text)
    # Decoders take the lock between values: one more thread than cores works while another waits for it.
    threads = cores + any(output.releases_gil for output in dataset.outputs)
    if workers == "thread":
        text = f'workers="thread", {f"num_workers={number}" if number else each}'
        return BuilderPlan(workers="thread", num_workers=number or threads, reason=text)
    if why := _why_processes(dataset, settings, cores):
        are_forked = is_fork(start_context())
        at_first = (
            0 if are_forked or _functions(dataset, settings) else min(number or threads, _THREADS_AT_FIRST)
        )
        return BuilderPlan(
            workers="process",
            num_workers=number or cores,
            reason=f"{why}; {each}",
            num_threads=at_first,
        )
    text = f"no function of yours may hold the interpreter lock; {each}"
    return BuilderPlan(workers="thread", num_workers=number or threads, reason=text)


def _plan_actors(settings: StreamSettings, num_ranks: int) -> BuilderPlan:
    """Plan as many actors as were asked for, or as this rank's part of the cluster has CPUs."""
    number, reason = settings.num_workers, 'builders="ray"'
    if number is None:
        nodes = resolve_name(CLUSTERS["ray"][0])()
        number = nodes.actors_of(num_ranks)
        reason += f", {nodes.num_cpus} CPUs of its cluster" + (
            f" for {num_ranks} ranks" if num_ranks > 1 else ""
        )
    reads = not settings.ship_blocks
    return BuilderPlan(workers="ray", num_workers=number, reason=reason, reads=reads, num_ranks=num_ranks)


def _are_copies(dataset: ShardedDataset | Mixture) -> bool:
    """Return whether batches are made by copying alone: no decoder, and nothing of the user's, runs."""
    transforms = [dataset.batch_transform, *(component.transform for component in dataset.sources)]
    return not any(transforms) and all(output.is_copied for output in dataset.outputs)


def _functions(dataset: ShardedDataset | Mixture, settings: StreamSettings) -> list[Any]:
    """The user's functions that builders call."""
    functions = [settings.collate_fn, dataset.batch_transform, *(s.transform for s in dataset.sources)]
    functions += [output.function for output in dataset.outputs]
    return [function for function in functions if function is not None]


def _why_processes(dataset: ShardedDataset | Mixture, settings: StreamSettings, cores: int) -> str | None:
    """Why builders are better processes; None: threads serve as well."""
    outputs = dataset.outputs
    if not all(map(releases_gil, _functions(dataset, settings))):
        return "functions of yours may hold the interpreter lock"
    # To decode text takes a microsecond a value: less than to hand it over from a process.
    decoded = any(output.is_decoded and output.function is None and not is_text(output) for output in outputs)
    if decoded and cores > _FEW_CORES:
        return f"decoders in more than {_FEW_CORES} threads would keep the interpreter lock from the training"
    return None


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """All that is decided about a session before anything of it is opened."""

    plan: StreamPlan
    """It decides which samples come when."""
    settings: StreamSettings
    topology: Topology
    memory_limit: int
    """Bytes; the share of this session, if others of the loader run."""
    builders: BuilderPlan
    ahead: ReadAhead
    kept_bytes: Mapping[tuple[int, int], int]
    """(Source, number of what is joined to it) -> bytes of all its blocks, for those that stay in memory."""

    @property
    def build(self) -> BuildSettings:
        """The settings that all chunks are built with."""
        plan, settings, dataset = self.plan, self.settings, self.plan.dataset
        batching = plan.planner.batching if plan.planner else None
        collate = settings.collate_fn
        if batching is not None and plan.makes_rows:
            collate = gather_of(batching)
        transforms: list[Any] = [(each.transform, each.transform_wants_rng) for each in dataset.sources]
        if plan.asked is not None:
            transforms = [(lengths_alone(fn, plan.asked), has_random_lengths(fn)) for fn, _ in transforms]
        return BuildSettings(
            outputs=dataset.outputs,
            seed=plan.seed,
            transforms=transforms,
            collate=collate,
            batch_transform=None if plan.measures_lengths else dataset.batch_transform,
            batching=batching,
            mark_repeats=settings.mark_repeats,
            marks_kept=plan.measures_lengths,
            charge_bytes=self.ahead.charge_bytes,
            limit_bytes=self.memory_limit,
            num_builders=self.builders.num_workers,
            hand_over_s=HAND_OVER_S,
            is_pinned=settings.is_pinned,
        )


def plan_session(
    plan: StreamPlan, settings: StreamSettings, topology: Topology, memory_limit: int, builders: BuilderPlan
) -> SessionPlan:
    """Decide what a session works with whose builders deliver a plan's batches within so many bytes."""
    dataset = plan.dataset
    if plan.asked is not None and builders.num_processes:  # beside those that build rows
        share = 2 if plan.makes_twice else 4
        builders = replace(builders, num_workers=-(-builders.num_workers // share))
    producers = max(builders.num_threads, builders.num_workers) if plan.measures_lengths else 0
    ahead = choose_read_ahead(
        memory_limit,
        batch_bytes=batch_bytes(plan),
        is_local=is_all_local(dataset),
        num_sources=len(dataset.sources),
        num_nodes=topology.num_nodes,
        depth=settings.depth_policy,
        copies_only=builders.copies_only,
        num_processes=builders.num_processes,
        num_threads=0 if builders.copies_only or builders.num_processes else builders.num_workers,
        batch_samples=plan.samples_per_batch,
        in_consumer=builders.num_workers == 0,
        machine_bytes=machine_memory() // max(1, topology.local_world_size),
        num_producers=producers,
    )
    return SessionPlan(
        plan=plan,
        settings=settings,
        topology=topology,
        memory_limit=memory_limit,
        builders=builders,
        ahead=ahead,
        kept_bytes=resolve_name(_JOINED[0])(plan, memory_limit) if plan.has_joins else {},
    )


def loader_limit(
    plan: StreamPlan, settings: StreamSettings, topology: Topology, builders: BuilderPlan
) -> int:
    """Bytes that a loader may hold: as given, else with room for a plan's windows and builders."""
    ranks = topology.local_world_size
    if settings.memory_limit is not None:
        return memory_limit_bytes(settings.memory_limit, ranks)
    of_windows = window_bytes(plan.shuffle, [component.kept_blocks for component in plan.dataset.sources])
    return memory_limit_bytes(None, ranks, of_windows, _building_bytes(plan, builders))


def is_all_local(dataset: ShardedDataset | Mixture) -> bool:
    """Return whether no shard is behind a network."""
    return all(is_local(component.catalog.urls[0]) for component in datasets_read(dataset))


def datasets_read(dataset: ShardedDataset | Mixture) -> list[ShardedDataset]:
    """The datasets that it delivers columns of: sources, and what is joined to them."""
    return [read_dataset for component in dataset.sources for read_dataset in component.datasets_read]


def _building_bytes(plan: StreamPlan, builders: BuilderPlan) -> int:
    """Bytes of batches that keep all builders of a plan at work, about; 0 where threads of the core copy.

    As many chunks as are held ready beside them, each with the stored values that processes are given.
    """
    if builders.copies_only or not builders.num_workers:
        return 0
    batch = batch_bytes(plan)
    if builders.num_processes:
        batch += plan.samples_per_batch * max(map(mean_bytes, plan.dataset.sources))
    return chunks_ahead(builders.num_workers) * max(batch, CHUNK_BYTES)


def batch_bytes(plan: StreamPlan) -> int:
    """Bytes of one batch, from the catalog: exact for fixed rows, the mean for ragged ones."""
    dataset = plan.dataset
    fixed = sum(output.row_bytes for output in dataset.outputs)
    ragged = not all(output.is_fixed for output in dataset.outputs)
    mean = max(map(mean_bytes, dataset.sources)) if ragged else 0
    laid = 0
    batching = plan.planner.batching if plan.planner else None
    if isinstance(batching, Packed):  # 8 bytes an element, and as many for segment ids and positions
        laid = plan.batch_size * batching.length * 8 * (len(batching.columns) + 1)
    return max(1, plan.samples_per_batch * (fixed + mean) + laid)


def mean_bytes(source: ShardedDataset) -> int:
    """Bytes of a sample, with what is joined to it."""
    catalogs = [dataset.catalog for dataset in source.datasets_read]
    return sum(int(c.blocks.nbytes.sum()) // max(1, c.num_samples) for c in catalogs)


def check_fits(plan: StreamPlan, settings: StreamSettings, memory_limit: int) -> None:
    """Raise `MemoryLimitError` where a limit has no room for a batch, or for what joins read beside it."""
    rows = plan.samples_per_batch * sum(output.row_bytes for output in plan.dataset.outputs)
    if rows > memory_limit:
        raise MemoryLimitError(
            f"one batch of {settings.batch_size} samples needs {rows:,} bytes, more than "
            f"memory_limit={memory_limit:,}; lower batch_size or raise memory_limit"
        )
    if plan.has_joins:
        resolve_name(_JOINED[1])(plan, memory_limit)


def check_settings(dataset: ShardedDataset | Mixture, settings: StreamSettings) -> None:
    """Raise for settings that a dataset does not go with, as `StreamLoader` says."""
    if settings.mark_repeats and any(output.name == REPEAT for output in dataset.outputs):
        raise ValueError(f"mark_repeats=True: the dataset has a column of its own called {REPEAT!r}")
    if settings.skip_steps:
        resolve_name(CHECKED_STEPS)(settings.skip_steps)
    if settings.batching is not None or is_by_tokens(dataset):
        check_batching(settings, dataset)
    for component in dataset.sources:
        component.check_missing()
        if component.transform is not None:
            fingerprint_of(component.transform)  # raises now, not where a state is taken


def with_steps(plan: StreamPlan, steps: Sequence[StepRange], *begin: Any) -> StreamPlan:
    """The plan that passes over steps, too; `begin`: history, epoch and position where they are looked up."""
    passing: StreamPlan = resolve_name(WITH_STEPS)(plan, steps, *begin) if steps else plan
    return passing
