"""Who builds the batches of a session: threads, processes or the consumer; how many of them, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dataflow.batch.at_work import sample_at
from dataflow.batch.builder import BuildContext
from dataflow.batch.delivered import Delivered
from dataflow.batch.transforms import releases_gil
from dataflow.dataset import ShardedDataset
from dataflow.limits import allowed_cores
from dataflow.mixture import Mixture
from dataflow.outputs.objects import is_text
from dataflow.staging.source import Traffic
from dataflow.stream.plan import StreamPlan
from dataflow.stream.settings import StreamSettings
from dataflow.torch_threads import one_torch_thread
from prefetch.engine.builders import Builders, ThreadBuilders
from prefetch.engine.ledger import Ledger
from prefetch.memory.copies import Copies
from sharding.topology.topology import Topology

if TYPE_CHECKING:
    from dataflow.actors.builders import RayBuilders
    from dataflow.processes.builder_main import BuilderJob
    from dataflow.processes.builders import ProcessBuilders
    from dataflow.processes.threads_first import ThreadsFirstBuilders


_FEW_CORES = 4
"""So many threads decode beside a training: each takes the lock between two values, a few percent of the
time. Sixteen took a third of a training's rate, processes a tenth (docs/notes/benchmarks.md)."""


@dataclass(frozen=True, kw_only=True)
class BuilderPlan:
    """Who builds."""

    workers: str
    """"main" (the consumer), "thread", "process" or "ray"."""
    num_workers: int
    """0: the consumer."""
    reason: str
    num_threads: int = 0
    """Threads that build until processes have started; 0: batches wait for these."""
    copies_only: bool = False
    """Whether batches are copies, which compiled code makes."""
    reads: bool = False
    """Whether builders read blocks by themselves."""
    num_ranks: int = 1
    """That share the cluster which actors are on."""

    @property
    def num_processes(self) -> int:
        """Builders that are processes, of this machine or another."""
        return self.num_workers if self.workers in ("process", "ray") else 0

    @property
    def is_local(self) -> bool:
        """Whether builders are threads or processes of this machine."""
        return self.workers != "ray"


def plan_builders(plan: StreamPlan, settings: StreamSettings, place: Topology) -> BuilderPlan:
    """Who builds the batches of a plan on this rank."""
    local_ranks = place.local_world_size
    dataset, workers, number = plan.dataset, settings.workers, settings.num_workers
    copies_only = not settings.collate_fn and not plan.planner and _are_copies(dataset)
    cores = max(1, allowed_cores() // max(1, local_ranks))
    each = f"{cores} cores for this rank" if local_ranks > 1 else f"{cores} cores"
    if number == 0:
        return BuilderPlan(workers="main", num_workers=0, reason="num_workers=0", copies_only=copies_only)
    if copies_only:
        # One core is left to the consumer, who copies too while it waits.
        text = "batches are copies alone, which compiled threads make without the interpreter lock"
        copying = (settings.builders is None and number) or max(1, cores - 1)
        return BuilderPlan(workers="thread", num_workers=copying, reason=text, copies_only=True)
    if settings.builders == "ray":
        if not settings.ship_blocks and any(source.joins_used for source in dataset.sources):
            raise ValueError(
                'actors do not read joined datasets: pass ship_blocks=True beside builders="ray"'
            )
        return _plan_actors(settings, place.world_size)
    if workers is None and number is not None:
        workers = "process"
    if workers == "process":
        text = f"num_workers={number}" if number else f'workers="process", {each}'
        return BuilderPlan(workers="process", num_workers=number or cores, reason=text)
    # Decoders take the lock between values: one more thread than cores works while another waits for it.
    threads = cores + any(output.releases_gil for output in dataset.outputs)
    if workers == "thread":
        text = f'workers="thread", {f"num_workers={number}" if number else each}'
        return BuilderPlan(workers="thread", num_workers=number or threads, reason=text)
    if why := _why_processes(dataset, settings, cores):
        return BuilderPlan(
            workers="process",
            num_workers=number or cores,
            reason=f"{why}; {each}",
            num_threads=number or threads,
        )
    text = f"no function of yours may hold the interpreter lock; {each}"
    return BuilderPlan(workers="thread", num_workers=number or threads, reason=text)


def _plan_actors(settings: StreamSettings, num_ranks: int) -> BuilderPlan:
    """So many actors as were asked for, or as this rank's part of the cluster has CPUs."""
    number, reason = settings.num_workers, 'builders="ray"'
    if number is None:
        from dataflow.actors.builders import cluster_nodes

        nodes = cluster_nodes()
        number = nodes.actors_of(num_ranks)
        reason += f", {nodes.num_cpus} CPUs of its cluster" + (
            f" for {num_ranks} ranks" if num_ranks > 1 else ""
        )
    reads = not settings.ship_blocks
    return BuilderPlan(workers="ray", num_workers=number, reason=reason, reads=reads, num_ranks=num_ranks)


def _are_copies(dataset: ShardedDataset | Mixture) -> bool:
    """Whether batches are made by copying alone: no decoder, and nothing of the user's, runs."""
    transforms = [dataset.batch_transform, *(source.transform for source in dataset.sources)]
    return not any(transforms) and all(output.is_copied for output in dataset.outputs)


def _why_processes(dataset: ShardedDataset | Mixture, settings: StreamSettings, cores: int) -> str | None:
    """Why builders are better processes; None: threads serve as well."""
    outputs = dataset.outputs
    functions = [settings.collate_fn, dataset.batch_transform, *(one.transform for one in dataset.sources)]
    functions += [output.function for output in outputs]
    if any(function is not None and not releases_gil(function) for function in functions):
        return "functions of yours may hold the interpreter lock"
    # To decode text takes a microsecond a value: less than to hand it over from a process.
    decoded = any(one.is_decoded and one.function is None and not is_text(one) for one in outputs)
    if decoded and cores > _FEW_CORES:
        return f"decoders in more than {_FEW_CORES} threads would keep the interpreter lock from the training"
    return None


def warm_up(plan: BuilderPlan) -> None:
    """Start what builder processes come from, while this process has one thread and can be forked."""
    if plan.num_processes and plan.is_local:
        from dataflow.processes.server import warm_up_for_builders

        warm_up_for_builders(is_needed=not plan.num_threads)


class BuilderOpening:
    """Opens the builders of a session.

    Args:
        plan: who.
        context: what they build with.
        ledger: of the session.
        traffic: of the session.
        limit_bytes: of the session.
        is_pinned: whether slots are page-locked.
        datasets: of the stream.
        max_restarts: how many processes may be replaced.
    """

    def __init__(
        self,
        plan: BuilderPlan,
        context: BuildContext,
        *,
        ledger: Ledger,
        traffic: Traffic,
        limit_bytes: int,
        is_pinned: bool,
        datasets: Sequence[ShardedDataset],
        max_restarts: int,
    ) -> None:
        self._datasets, self._traffic = datasets, traffic
        self.plan, self._context, self._ledger = plan, context, ledger
        self._opened: ThreadsFirstBuilders | None = None
        self._opened_actors: RayBuilders | None = None
        self._limit_bytes, self._is_pinned, self._max_restarts = limit_bytes, is_pinned, max_restarts

    def builders(self, copies: Copies | None) -> Builders[Delivered]:
        """The builders; `copies`: who makes batches that are copies alone."""
        plan = self.plan
        if plan.workers == "process":
            if not plan.num_threads:
                return self._processes(None)
            self._opened = self._threads_first()
            return self._opened
        if plan.workers == "ray":
            self._opened_actors = self._actors()
            return self._opened_actors
        return self._threads(min(1, plan.num_workers) if copies else plan.num_workers, copies)

    @property
    def choice(self) -> tuple[str, str]:
        """Who builds now, and why."""
        if self._opened is not None:
            return self._opened.choice
        if self._opened_actors is not None:
            return "ray", f"{self.plan.reason}: {self._opened_actors.num_begun} are there"
        return self.plan.workers, self.plan.reason

    def _threads(self, number: int, copies: Copies | None = None) -> ThreadBuilders[Delivered]:
        return ThreadBuilders(number, copies=copies, initializer=one_torch_thread, about=sample_at)

    def _threads_first(self) -> ThreadsFirstBuilders:
        from dataflow.processes.threads_first import ThreadsFirstBuilders

        context = self._context
        return ThreadsFirstBuilders(
            self._threads(self.plan.num_threads),
            self._processes,
            (*context.postprocessing.functions, *(output.function for output in context.outputs)),
            num_processes=self.plan.num_workers,
            reason=self.plan.reason,
        )

    def _processes(self, on_start: Callable[[BaseException | None], None] | None) -> ProcessBuilders:
        from dataflow.processes.builders import ProcessBuilders

        context = self._context
        builders = ProcessBuilders(
            self._job(),
            self.plan.num_workers,
            guards=context.guards,
            decide=context.postprocessing.on_bad,
            give_back=self._ledger.give_back,
            max_restarts=self._max_restarts,
            on_start=on_start,
            initializer=one_torch_thread,
        )
        self._ledger.settle_first(builders.file.settle)
        return builders

    def _actors(self) -> RayBuilders:
        from dataflow.actors.builders import RayBuilders

        context = self._context
        return RayBuilders(
            self._job(),
            self.plan.num_workers,
            guards=context.guards,
            decide=context.postprocessing.on_bad,
            arena=context.arena,
            on_return=context.on_return,
            traffic=self._traffic,
            num_ranks=self.plan.num_ranks,
            datasets=self._datasets if self.plan.reads else (),
            initializer=one_torch_thread,
        )

    def _job(self) -> BuilderJob:
        from dataflow.processes.batch_writer import collate_map_changes
        from dataflow.processes.builder_main import BuilderJob, never

        context = self._context
        return BuilderJob(
            outputs=context.outputs,
            postprocessing=replace(context.postprocessing, on_bad=never),
            seed=context.seed,
            charge_bytes=context.charge_bytes,
            hand_over_s=context.hand_over_s,
            limit_bytes=self._limit_bytes,
            num_builders=self.plan.num_workers,
            is_pinned=self._is_pinned,
            collate_map=collate_map_changes(),
            default_dtype=torch.get_default_dtype(),
        )
