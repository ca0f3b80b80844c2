"""The resources of a session, opened: sources behind a gate and caches, memory, builders and their engine.

What is opened follows from the session's plan (`decisions`) alone. `Resources` ends it all, in any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils.pin_memory import pin_memory

from dataflow.batch.at_work import sample_at
from dataflow.batch.builder import BuildContext
from dataflow.batch.delivered import Delivered
from dataflow.planning.settings import StreamSettings
from dataflow.staging.block_source import BlockSource, Traffic
from dataflow.staging.rows import open_rows
from dataflow.staging.stager import Stager
from dataflow.stream.cache import OpenCaches
from dataflow.stream.decisions import (
    CLUSTERS,
    EXPLAIN,
    SUMS,
    BuilderPlan,
    SessionPlan,
    batch_bytes,
    datasets_read,
    is_all_local,
)
from dataflow.stream.deliveries import PendingErrors
from dataflow.stream.stream import Stream
from dataflow.torch_threads import one_torch_thread, setting_kept
from prefetch.control.broker import SharedGate, broker_name
from prefetch.control.chunk_time import ChunkTime
from prefetch.control.depth import Decision
from prefetch.control.gate import ReadGate
from prefetch.control.inflight import Inflight
from prefetch.control.pause import ReadPause
from prefetch.core.kernels import kernels
from prefetch.counts import ReadStats
from prefetch.engine.builders import Builders, ThreadBuilders
from prefetch.engine.engine import Engine
from prefetch.engine.ledger import Ledger, State
from prefetch.engine.stats import ConsumerWait, EngineOptions
from prefetch.memory.arena import Arena, HeapKeeper
from prefetch.memory.copies import Copies
from prefetch.memory.device import register_pinned
from prefetch.memory.guards import FileGuards
from sharding.urls import is_local, naming_part

if TYPE_CHECKING:
    from dataflow.processes.builders import ProcessBuilders

BUILDER_MAIN = "dataflow.processes.builder_main"
"""The module that builder processes run; their server imports it, while this process does other things."""
_NO_GATE = Decision(0, "local shards are read without a limit")
_ACTORS_READ = Decision(0, "actors of the cluster read, 16 ranges at a time each")


class Resources:
    """All that a session has open.

    Args:
        decided: what there is to open.
        epoch, start: of the first batch.
        errors: decides about bad samples.
        pause: asks remote reads to wait; outlives the session.
    """

    def __init__(
        self, decided: SessionPlan, epoch: int, start: int, *, errors: PendingErrors, pause: ReadPause | None
    ) -> None:
        plan, limit, ahead = decided.plan, decided.memory_limit, decided.ahead
        self._pause = pause
        self.builds_end = threading.Event()
        """Set when nobody wants the batches any more: builders end with the sample that they are at."""
        self.sums: Any = resolve_name(SUMS)(epoch, start) if find_spec(EXPLAIN) else None
        """The `BatchSums` of its batches; None: the core is alone."""
        self.ledger = Ledger(limit - sum(decided.kept_bytes.values()))
        register = register_pinned if decided.settings.is_pinned else None
        # Threads that call functions of the user's may leave them what is staged.
        hides = decided.builders.num_processes > 0 or not decided.build.calls_functions
        self.arena = Arena(limit_bytes=limit, register=register, hides=hides)
        self.ledger.reconcile_first(self.arena.reconcile)
        self.sources = OpenSources(decided, pause)
        is_read_there = decided.builders.reads
        stager = Stager(
            self.sources.opened,
            self.arena,
            num_readers=ahead.num_readers,
            limit_bytes=limit,
            seed=plan.seed,
            open_window=resolve_name(CLUSTERS[decided.builders.workers][2]) if is_read_there else open_rows,
        )
        options = EngineOptions(
            num_readers=ahead.num_readers,
            depth=ahead.depth,
            max_windows=ahead.max_windows,
            first_batch_alone=is_all_local(plan.dataset),
            chunk_time=None if decided.builders.copies_only else ChunkTime(),
            keep_bytes=ahead.output_bytes,
            timeout_s=decided.settings.timeout_s,
            initializer=one_torch_thread,
            interrupt=self.sources.end_reads,
            explain=self.sources.waiting,
        )
        context, copies = self._context(decided, errors), None
        if decided.builders.copies_only:
            copies = self._copies(decided, options)
        stream = Stream(plan, stager, context, copies=copies, batches_per_chunk=ahead.batches_per_chunk)
        with setting_kept():  # builders before the engine's threads: they may be forked from this process
            builders, self.choice = open_builders(
                decided, context, copies, ledger=self.ledger, traffic=self.sources.traffic
            )
            self.engine = Engine(
                stream.windows(epoch, start),
                ledger=self.ledger,
                builders=builders,
                options=options,
                epoch=epoch,
            )
        if pause:
            pause.watch(self.engine.staged_batches)

    def _context(self, decided: SessionPlan, errors: PendingErrors) -> BuildContext:
        """Return what builders of this process build with."""
        plan, ledger = decided.plan, self.ledger
        return BuildContext(
            settings=decided.build,
            on_bad=errors.decide,
            arena=self.arena,
            guards=self.sources.guards,
            on_return=lambda nbytes: lambda: ledger.give_back(nbytes),
            closing=self.builds_end,
            heap=HeapKeeper(decided.memory_limit),
            shares_batches=decided.builders.workers == "thread" and decided.builders.num_workers > 1,
            ships_values=decided.builders.num_processes > 0,
            row_bytes=batch_bytes(plan) // plan.samples_per_batch if decided.builders.reads else None,
            pin=pin_memory if decided.settings.is_pinned else None,
            sums=None if plan.measures_lengths else self.sums,
        )

    def _copies(self, decided: SessionPlan, options: EngineOptions) -> Copies:
        """Copies by threads that never take the interpreter lock."""
        ahead = decided.ahead
        queue = kernels().open_queue(decided.builders.num_workers, wake_at=ahead.jobs_ready // 2)
        self.sources.guards.drain_loads = queue.drain
        return Copies(
            queue,
            self.arena,
            partial(ConsumerWait, options=options),
            charge=partial(self.ledger.charge, State.IN_USE),
            give_back=self.ledger.give_back,
            job_bytes=ahead.job_bytes,
            batches_per_job=ahead.batches_per_job,
            most_slots=ahead.jobs_ready,
        )

    def close(self, *, join: bool) -> None:
        """Stop everything; see `Engine.close`."""
        if self.sources.gate:
            self.sources.gate.close()
        if self._pause:
            self._pause.raise_priority()  # reads that waited find the gate closed
        self.engine.close(join=join)
        self.sources.close(join=join)
        self.arena.close()


class OpenSources:
    """The sources of a session with what they share: an account of bytes, a gate, guards and caches."""

    def __init__(self, decided: SessionPlan, pause: ReadPause | None) -> None:
        self.traffic, self.guards = Traffic(), FileGuards()
        self._actors_read = decided.builders.reads
        is_read_here = not self._actors_read and not is_all_local(decided.plan.dataset)
        self.gate = self._open_gate(decided, pause) if is_read_here else None
        """Says how many bytes may be in flight; None: local shards, or actors read."""
        self.caches = OpenCaches(decided.plan, decided.topology)
        keep_bytes = decided.ahead.mapped_bytes
        opened = [dataset.source(keep_bytes, self.guards, pause) for dataset in decided.plan.dataset.sources]
        self.opened = [self._shared(source, decided, number, 0) for number, source in enumerate(opened)]
        """In the order of a mixture."""

    def _open_gate(self, decided: SessionPlan, pause: ReadPause | None) -> ReadGate:
        """The gate of this rank, or of all ranks of this machine together."""
        dataset, topology = decided.plan.dataset, decided.topology
        ranks, start_bytes = topology.local_world_size, decided.ahead.in_flight_bytes

        def control(share: int = 1) -> Inflight:
            most = decided.memory_limit * ranks // share
            return Inflight(start_bytes=min(start_bytes // share, most), max_bytes=most)

        now = pause.running_s if pause else time.perf_counter
        url = next(url for part in datasets_read(dataset) for url in part.catalog.urls if not is_local(url))
        name = broker_name("/".join(naming_part(url).split("/")[:3])) if ranks > 1 else None
        if name is None:
            return ReadGate(control(share=ranks), refusals=self._num_refused, now=now)
        return SharedGate(
            control(share=ranks),
            name=name,
            rank=topology.local_rank,
            shared_control=control,
            refusals=self._num_refused,
            now=now,
        )

    def _shared(self, source: BlockSource, decided: SessionPlan, number: int, join: int) -> BlockSource:
        """A source, or the `join`-th that is joined to it, with what all share."""
        matches = [
            match.shared(
                self._shared(match.source, decided, number, i + 1), keeps=(number, i) in decided.kept_bytes
            )
            for i, match in enumerate(source.matches)
        ]
        cache = self.caches.of(number, join)
        return replace(
            source, number=number, traffic=self.traffic, gate=self.gate, cache=cache, matches=matches
        )

    @property
    def every(self) -> list[BlockSource]:
        """All sources, and those joined to them."""
        return [member for source in self.opened for member in (source, *(p.source for p in source.matches))]

    def waiting(self) -> str:
        """Return what reads wait for, in words."""
        return "; ".join(text for source in self.every if (text := source.reader.waiting()))

    def _num_refused(self) -> int:
        return sum(source.reader.stats().throttled for source in self.every)

    @property
    def in_flight(self) -> Decision:
        """Bytes that may be in flight at a store."""
        return self.gate.decision if self.gate else _ACTORS_READ if self._actors_read else _NO_GATE

    @property
    def faults(self) -> ReadStats:
        """Counts of what went wrong with reads, here and elsewhere."""
        return sum((source.reader.stats() for source in self.every), self.traffic.faults)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of local shards whose pages are in this process."""
        return sum(source.mappings.mapped_bytes for source in self.every)

    def end_reads(self) -> None:
        """End reads early, as errors."""
        for source in self.every:
            source.reader.close()
        self.caches.end()

    def close(self, *, join: bool) -> None:
        """Let go of files; caches only after `join`, as threads that hang may still read."""
        self.guards.close(join=join)
        if join:
            self.caches.close()


def warm_up(plan: BuilderPlan, chosen: Any) -> None:
    """Start the server that builder processes will come from, if they do, without waiting for it."""
    if plan.num_processes and plan.is_local:
        from prefetch.workers import starting

        if isinstance(starting.start_context(chosen), starting.ByValueContext):
            starting.warm_up({BUILDER_MAIN})


def open_builders(
    decided: SessionPlan, context: BuildContext, copies: Copies | None, *, ledger: Ledger, traffic: Traffic
) -> tuple[Builders[Delivered], Callable[[], tuple[str, str]]]:
    """Open the builders of a session; and what returns who builds now, and why.

    Args:
        decided: who they are.
        context: what threads build with; processes and actors get its settings.
        copies: who makes batches that are copies alone.
        ledger: of the session.
        traffic: of the session.
    """
    plan = decided.builders
    if plan.workers == "ray":
        datasets = decided.plan.dataset.sources if plan.reads else ()
        new_actors = resolve_name(CLUSTERS[plan.workers][1])
        actors = new_actors(context, traffic=traffic, num_ranks=plan.num_ranks, datasets=datasets)
        return actors, lambda: ("ray", f"{plan.reason}: {actors.num_begun} are there")
    number = plan.num_threads or (min(1, plan.num_workers) if copies else plan.num_workers)
    new_threads = partial(
        ThreadBuilders[Delivered], copies=copies, initializer=one_torch_thread, about=sample_at
    )
    if plan.workers != "process":
        return new_threads(number), lambda: (plan.workers, plan.reason)
    open_processes = partial(_open_processes, context, ledger, decided.settings)
    if not plan.num_threads:
        return open_processes(None), lambda: (plan.workers, plan.reason)
    from dataflow.processes.threads_first import ThreadsFirstBuilders

    first = ThreadsFirstBuilders(
        new_threads(number), open_processes, num_processes=plan.num_workers, reason=plan.reason
    )
    return first, lambda: first.choice


def _open_processes(
    context: BuildContext,
    ledger: Ledger,
    settings: StreamSettings,
    on_start: Callable[[BaseException | None], None] | None,
) -> ProcessBuilders:
    from dataflow.processes.builders import ProcessBuilders

    builders = ProcessBuilders(
        context,
        give_back=ledger.give_back,
        max_restarts=settings.max_worker_restarts,
        start=settings.multiprocessing_context,
        worker_init_fn=settings.worker_init_fn,
        on_start=on_start,
    )
    ledger.reconcile_first(builders.file.reconcile)
    return builders
