"""One run of a loader's engine, with all that it works with: from a place in the stream on, until closed.

A session is told what to deliver by a plan, and how by options; it knows no loader. What follows
from the data is decided here (how many threads build) and in `read_ahead`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from dataflow.batch.builder import BuildContext, BuildSettings, Postprocessing
from dataflow.batch.delivered import Delivered
from dataflow.dataset import ShardedDataset
from dataflow.limits import machine_memory
from dataflow.mixture import Mixture
from dataflow.planning.joined_reads import kept_bytes
from dataflow.planning.plan import StreamPlan
from dataflow.planning.settings import StreamSettings
from dataflow.staging.source import Source, Traffic
from dataflow.staging.stager import Stager
from dataflow.stats import SessionStats
from dataflow.stream.builders import BuilderPlan, OpenBuilders, open_builders, plan_builders
from dataflow.stream.cache import OpenCaches
from dataflow.stream.deliveries import SkippedAhead
from dataflow.stream.measuring import MeasuringStage
from dataflow.stream.read_ahead import (
    CHUNK_BYTES,
    HAND_OVER_S,
    ReadAhead,
    choose_read_ahead,
    chunks_ahead,
)
from dataflow.stream.stream import Stream
from dataflow.torch_threads import one_torch_thread, setting_kept
from prefetch.control.broker import SharedGate, broker_name
from prefetch.control.depth import Decision
from prefetch.control.gate import ReadGate
from prefetch.control.inflight import Inflight
from prefetch.control.pause import ReadPause
from prefetch.core.executor import executor
from prefetch.engine.engine import Engine
from prefetch.engine.ledger import Ledger, State
from prefetch.engine.stats import ConsumerWait, EngineOptions
from prefetch.memory.arena import Arena, HeapKeeper
from prefetch.memory.copies import Copies
from prefetch.memory.device import CudaStreams, DeviceCopier, register_pinned
from prefetch.memory.guards import FileGuards
from prefetch.work import Batches
from sharding.lengths.batching import Packed
from sharding.topology.topology import Topology
from sharding.urls import is_local, naming_part

_NO_GATE = Decision(0, "local shards are read without a limit")
_ACTORS_READ = Decision(0, "actors of the cluster read, 16 ranges at a time each")


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """How a session works; which samples it delivers, and in which order, is its plan's."""

    settings: StreamSettings
    topology: Topology
    memory_limit: int
    """Bytes; the share of this session, if others of the loader run."""
    skipped: SkippedAhead
    """Decides about bad samples."""
    pause: ReadPause | None
    """Asks remote reads to wait; outlives the session."""


class Session:
    """One engine with its arena and ledger, from a place in the stream on. `close` may run in any thread.

    Args:
        plan: of the batches.
        options: how it works.
        epoch, start: of the first batch.
        stage: forms the batches of what the engine makes; None: it makes batches.
    """

    def __init__(
        self,
        plan: StreamPlan,
        options: SessionOptions,
        epoch: int,
        start: int,
        *,
        stage: MeasuringStage | None = None,
    ) -> None:
        device = options.settings.torch_device
        self.copier = DeviceCopier(CudaStreams(device)) if device.type == "cuda" else None
        if stage is not None:
            plan, options = stage.plan, replace(options, settings=stage.settings)
        dataset, limit, settings = plan.dataset, options.memory_limit, options.settings
        ranks = max(1, options.topology.local_world_size)
        builder_plan = plan_builders(plan, settings, options.topology)
        ahead = choose_read_ahead(
            limit,
            batch_bytes=_batch_bytes(plan),
            is_local=is_all_local(dataset),
            num_sources=len(dataset.sources),
            num_nodes=options.topology.num_nodes,
            depth=settings.depth_policy,
            copies_only=builder_plan.copies_only,
            num_processes=builder_plan.num_processes,
            batch_samples=plan.samples_per_batch,
            in_consumer=builder_plan.num_workers == 0,
            machine_bytes=machine_memory() // ranks,
            num_makers=max(builder_plan.num_threads, builder_plan.num_workers)
            if plan.measures_lengths
            else 0,
        )
        kept = kept_bytes(plan, limit)
        self._kept_bytes = sum(kept.values())
        self.ledger = Ledger(limit - self._kept_bytes)
        pinned = settings.is_pinned
        register = register_pinned if pinned else None
        self.pin: Callable[[Any], Any] | None = pin_memory if pinned else None
        self.arena = Arena(limit_bytes=limit, register=register)
        self.ledger.reconcile_first(self.arena.reconcile)
        self.traffic = Traffic()
        self.skipped = options.skipped
        self._pause = options.pause
        self._now = options.pause.running_s if options.pause else time.perf_counter
        self.gate = None
        if not builder_plan.reads:
            self.gate = _open_gate(
                dataset,
                options.topology,
                limit,
                start_bytes=ahead.in_flight_bytes.value,
                refusals=self._refusals,
                now=self._now,
            )
        self.guards = FileGuards()
        self.caches = OpenCaches(dataset.sources, plan, options.topology)
        self.sources = _open_sources(
            dataset,
            ahead.mapped_bytes.value,
            self.traffic,
            self.gate,
            self.guards,
            self.caches,
            self._pause,
            kept,
        )
        self._next: tuple[int, int] | None = (epoch, start)
        """Epoch and position of the next batch, where that is the first of what was asked for."""
        self._closing = threading.RLock()  # held until all has ended
        self._builds_end = threading.Event()
        self._closed = False
        self._num_taken, self._last_taken_s = 0, self._now()
        self._builder_plan = builder_plan
        self._builders: OpenBuilders
        self.engine = self._open_engine(plan, options, builder_plan, ahead, epoch, start)
        if self._pause:
            self._pause.watch(self.engine.staged_batches)
        self._stage = stage
        if stage is not None:
            stage.begin(self.next_chunk, self.ledger, epoch, start)

    def _open_engine(
        self,
        plan: StreamPlan,
        options: SessionOptions,
        builder_plan: BuilderPlan,
        ahead: ReadAhead,
        epoch: int,
        start: int,
    ) -> Engine[Delivered]:
        """The engine over what is open, with its builders."""
        settings, limit, ledger = options.settings, options.memory_limit, self.ledger
        stager = Stager(
            self.sources,
            self.arena,
            num_readers=ahead.num_readers.value,
            limit_bytes=limit,
            reads=not builder_plan.reads,
            seed=plan.seed,
        )
        engine_options = EngineOptions(
            num_readers=ahead.num_readers.value,
            depth=ahead.depth,
            max_windows=ahead.max_windows.value,
            first_batch_alone=is_all_local(plan.dataset),
            keep_bytes=ahead.output_bytes.value,
            timeout_s=settings.timeout_s,
            initializer=one_torch_thread,
            interrupt=self._end_reads,
            explain=self._what_reads_wait_for,
        )
        copies = None
        if builder_plan.copies_only:
            copies = self._open_copies(builder_plan.num_workers, engine_options, ahead)
        context = BuildContext(
            settings=BuildSettings(
                outputs=plan.dataset.outputs,
                seed=plan.seed,
                postprocessing=_postprocessing(plan, settings),
                charge_bytes=ahead.charge_bytes.value,
                limit_bytes=limit,
                num_builders=builder_plan.num_workers,
                hand_over_s=HAND_OVER_S,
                is_pinned=settings.is_pinned,
            ),
            on_bad=options.skipped.decide,
            arena=self.arena,
            guards=self.guards,
            on_return=lambda nbytes: lambda: ledger.give_back(nbytes),
            closing=self._builds_end,
            heap=HeapKeeper(limit),
            ships_values=builder_plan.num_processes > 0,
            row_bytes=_batch_bytes(plan) // plan.samples_per_batch if builder_plan.reads else None,
            pin=self.pin,
        )
        stream = Stream(plan, stager, context, copies=copies, batches_per_chunk=ahead.batches_per_chunk.value)
        with setting_kept():
            self._builders = open_builders(
                builder_plan,
                context,
                copies,
                ledger=ledger,
                traffic=self.traffic,
                datasets=plan.dataset.sources,
                max_restarts=settings.max_worker_restarts,
            )
            return Engine(
                stream.windows(epoch, start),
                ledger=ledger,
                builders=self._builders.builders,
                options=engine_options,
                epoch=epoch,
            )

    def _open_copies(self, num_threads: int, options: EngineOptions, ahead: ReadAhead) -> Copies:
        """Copies by threads that never take the interpreter lock."""
        queue = executor().open_queue(num_threads, wake_at=ahead.jobs_ready.value // 2)
        self.guards.drain_loads = queue.drain
        new_wait = partial(ConsumerWait, options=options)
        return Copies(
            queue,
            self.arena,
            new_wait,
            charge=partial(self.ledger.charge, State.IN_USE),
            give_back=self.ledger.give_back,
            job_bytes=ahead.job_bytes.value,
            batches_per_job=ahead.batches_per_job.value,
            most_slots=ahead.jobs_ready.value,
        )

    @property
    def _sources_read(self) -> list[Source]:
        """Its sources, and those joined to them."""
        return [one for source in self.sources for one in (source, *(p.source for p in source.matches))]

    def _end_reads(self) -> None:
        for source in self._sources_read:
            source.reader.close()
        self.caches.end()

    def _what_reads_wait_for(self) -> str:
        return "; ".join(text for source in self._sources_read if (text := source.reader.waiting()))

    def _refusals(self) -> int:
        return sum(source.reader.stats().throttled for source in self._sources_read)

    def next_batches(self) -> Batches[Delivered]:
        """The batches of the next chunk, or what the stage forms next."""
        stage = self._stage
        return self.next_chunk() if stage is None else stage.next_batches()

    def next_chunk(self) -> Batches[Delivered]:
        """What the engine has made next."""
        gap_s = self._now() - self._last_taken_s
        batches = self.engine.next_batches()
        if batches:
            self._next = None
            self._last_taken_s = self._now()
            self._tell_demand(len(batches), gap_s)
            if self._pause:
                self._pause.batches_taken()
        return batches

    def _tell_demand(self, taken: int, gap_s: float) -> None:
        if self.gate:
            self._num_taken += taken
            # What is read ahead counts, too: that makes the demand too high at first, which does no harm.
            self.gate.observe_use(self.traffic.read_bytes * taken // self._num_taken, gap_s)

    def read_on(self) -> None:
        """A second epoch has begun: see `Engine.read_on`."""
        self.engine.read_on()

    def is_at(self, epoch: int, start: int) -> bool:
        """Whether the next batch is the first from `start` of the epoch."""
        return self._next == (epoch, start)

    def epoch_done(self, epoch: int) -> None:
        """All batches of the epoch were taken."""
        self._next = (epoch + 1, 0)
        if (stage := self._stage) is not None:
            stage.begin(self.next_chunk, self.ledger, epoch + 1, 0)

    def stats(self) -> SessionStats:
        """A snapshot; cheap, any thread."""
        (workers, reason), reads = self._builders.choice(), self._builder_plan.reads
        return SessionStats(
            engine=self.engine.stats(),
            read_bytes=self.traffic.read_bytes,
            decoded_bytes=self.traffic.decoded_bytes,
            in_flight=self.gate.decision if self.gate else _ACTORS_READ if reads else _NO_GATE,
            faults=sum((source.reader.stats() for source in self._sources_read), self.traffic.faults),
            cache=self.caches.stats(),
            workers=workers,
            workers_reason=reason,
            num_workers=self._builder_plan.num_workers,
        )

    def mapped_bytes(self) -> int:
        """Bytes of local shards whose pages are in this process."""
        return sum(source.mappings.mapped_bytes for source in self._sources_read)

    def resize(self, memory_limit: int) -> bool:
        """Have another limit from now on; False, and nothing is changed, if more is held than that.

        Where other ranks wait for it, it goes on with what it has, as theirs do.
        """
        if not self.ledger.resize(memory_limit - self._kept_bytes):
            stage = self._stage
            return stage is not None and stage.is_shared
        self.arena.resize(memory_limit)
        return True

    def close(self, *, join: bool = True) -> None:
        """Stop everything; see `Engine.close`. Whoever comes second waits, too. Idempotent."""
        self._builds_end.set()
        with self._closing:
            if self._closed:
                return
            if self.copier:
                self.copier.close()
            if self.gate:
                self.gate.close()
            if self._pause:
                self._pause.raise_priority()  # reads that waited find the gate closed
            self.engine.close(join=join)
            self.guards.close(join=join)
            if join:  # threads that hang may still read
                self.caches.close()
            self.arena.close()
            self.skipped.forget()
            self._stage = None  # which has this session, and samples
            self._closed = True  # at last: who is interrupted here has not closed it


def is_all_local(dataset: ShardedDataset | Mixture) -> bool:
    """Whether no shard is behind a network."""
    return all(is_local(one.catalog.urls[0]) for one in datasets_read(dataset))


def datasets_read(dataset: ShardedDataset | Mixture) -> list[ShardedDataset]:
    """All that it delivers columns of: sources, and what is joined to them."""
    return [one for source in dataset.sources for one in source.datasets_read]


def _open_gate(
    dataset: ShardedDataset | Mixture,
    place: Topology,
    limit: int,
    *,
    start_bytes: int,
    refusals: Callable[[], int],
    now: Callable[[], float],
) -> ReadGate | None:
    """The gate of this rank, or of all ranks of this machine together; None for local shards."""
    if is_all_local(dataset):
        return None
    ranks = place.local_world_size

    def control(share: int = 1) -> Inflight:
        most = limit * ranks // share
        return Inflight(start_bytes=min(start_bytes // share, most), max_bytes=most)

    url = next(url for one in datasets_read(dataset) for url in one.catalog.urls if not is_local(url))
    name = broker_name("/".join(naming_part(url).split("/")[:3])) if ranks > 1 else None
    if name is None:
        return ReadGate(control(share=ranks), refusals=refusals, now=now)
    return SharedGate(
        control(share=ranks),
        name=name,
        rank=place.local_rank,
        shared_control=control,
        refusals=refusals,
        now=now,
    )


def _postprocessing(plan: StreamPlan, settings: StreamSettings) -> Postprocessing:
    """What happens to a batch beyond its columns."""
    dataset = plan.dataset
    return Postprocessing(
        transforms=[(source.transform, source.transform_wants_rng) for source in dataset.sources],
        collate=settings.collate_fn,
        batch_transform=None if plan.measures_lengths else dataset.batch_transform,
        batching=plan.planner.batching if plan.planner else None,
        mark_repeats=settings.mark_repeats,
        marks_kept=plan.measures_lengths,
    )


def _open_sources(
    dataset: ShardedDataset | Mixture,
    keep_bytes: int,
    traffic: Traffic,
    gate: ReadGate | None,
    guards: FileGuards,
    caches: OpenCaches,
    pause: ReadPause | None,
    kept: Container[tuple[int, int]],
) -> list[Source]:
    """What the stream reads, numbered, with one account of bytes and one gate."""
    opened = [source.source(keep_bytes, guards, pause) for source in dataset.sources]

    def shared(source: Source, number: int, place: int) -> Source:
        matches = [
            replace(p, source=shared(p.source, number, at + 1), keeps=(number, at) in kept)
            for at, p in enumerate(source.matches)
        ]
        cache = caches.of(number, place)
        return replace(source, number=number, traffic=traffic, gate=gate, cache=cache, matches=matches)

    return [shared(source, number, 0) for number, source in enumerate(opened)]


def building_bytes(plan: StreamPlan, builders: BuilderPlan) -> int:
    """Bytes of batches that keep all builders of a plan at work, about; 0 where threads of the core copy.

    As many chunks as are held ready beside them, each with the stored values that processes are given.
    """
    if builders.copies_only or not builders.num_workers:
        return 0
    batch = _batch_bytes(plan)
    if builders.num_processes:
        batch += plan.samples_per_batch * max(map(_mean_bytes, plan.dataset.sources))
    return chunks_ahead(builders.num_workers) * max(batch, CHUNK_BYTES)


def _batch_bytes(plan: StreamPlan) -> int:
    """Bytes of one batch, from the catalog: exact for fixed rows, the mean for ragged ones."""
    dataset = plan.dataset
    fixed = sum(output.row_bytes for output in dataset.outputs)
    ragged = not all(output.is_fixed for output in dataset.outputs)
    mean = max(map(_mean_bytes, dataset.sources)) if ragged else 0
    laid = 0
    batching = plan.planner.batching if plan.planner else None
    if isinstance(batching, Packed):  # 8 bytes an element, and as many for segment ids and positions
        laid = plan.batch_size * batching.length * 8 * (len(batching.columns) + 1)
    return max(1, plan.samples_per_batch * (fixed + mean) + laid)


def _mean_bytes(source: ShardedDataset) -> int:
    """Bytes of a sample, with what is joined to it."""
    catalogs = [one.catalog for one in source.datasets_read]
    return sum(int(c.blocks.nbytes.sum()) // max(1, c.num_samples) for c in catalogs)
