"""Who builds the batches of a session: threads, processes or the consumer; how many of them, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dataflow.batch.at_work import sample_at
from dataflow.batch.builder import BuildContext
from dataflow.batch.delivered import Delivered
from dataflow.batch.transforms import releases_gil
from dataflow.dataset import ShardedDataset
from dataflow.limits import allowed_cores
from dataflow.mixture import Mixture
from dataflow.outputs.objects import is_text
from dataflow.planning.plan import StreamPlan
from dataflow.planning.settings import StreamSettings
from dataflow.staging.source import Traffic
from dataflow.torch_threads import one_torch_thread
from prefetch.engine.builders import Builders, ThreadBuilders
from prefetch.engine.ledger import Ledger
from prefetch.memory.copies import Copies
from sharding.topology.topology import Topology

if TYPE_CHECKING:
    from dataflow.processes.builders import ProcessBuilders

BUILDER_MAIN = "dataflow.processes.builder_main"
"""What builder processes run; only their server imports it, while this process does other things."""
_FEW_CORES = 4
"""So many threads decode beside a training: each takes the lock between two values, a few percent of the
time. Sixteen took a third of a training's rate, processes 1 to 12 % (docs/notes/benchmarks.md)."""


_THREADS_AT_FIRST = 8
"""So many build at most until processes have started: eight fed a training 1.4 times as fast as seventeen."""


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
            num_threads=min(number or threads, _THREADS_AT_FIRST),
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
        from prefetch.ipc.server import server_needs, start_context
        from prefetch.workers import fork_server

        if start_context(None) is None:
            fork_server.warm_up(server_needs(set(), BUILDER_MAIN), is_needed=not plan.num_threads)


class OpenBuilders(NamedTuple):
    """The builders of a session."""

    builders: Builders[Delivered]
    choice: Callable[[], tuple[str, str]]
    """Who builds now, and why."""


def open_builders(
    plan: BuilderPlan,
    context: BuildContext,
    copies: Copies | None,
    *,
    ledger: Ledger,
    traffic: Traffic,
    datasets: Sequence[ShardedDataset],
    max_restarts: int,
) -> OpenBuilders:
    """Open the builders of a session.

    Args:
        plan: who.
        context: what threads build with; processes and actors get its settings.
        copies: who makes batches that are copies alone.
        ledger: of the session.
        traffic: of the session.
        datasets: of the stream.
        max_restarts: how many processes may be replaced.
    """
    settings = context.settings
    if plan.workers == "ray":
        from dataflow.actors.builders import RayBuilders

        actors = RayBuilders(
            settings,
            guards=context.guards,
            decide=context.on_bad,
            arena=context.arena,
            on_return=context.on_return,
            traffic=traffic,
            num_ranks=plan.num_ranks,
            datasets=datasets if plan.reads else (),
            initializer=one_torch_thread,
        )
        return OpenBuilders(actors, lambda: ("ray", f"{plan.reason}: {actors.num_begun} are there"))
    number = plan.num_threads or (min(1, plan.num_workers) if copies else plan.num_workers)
    new_threads = partial(
        ThreadBuilders[Delivered], copies=copies, initializer=one_torch_thread, about=sample_at
    )
    if plan.workers != "process":
        return OpenBuilders(new_threads(number), lambda: (plan.workers, plan.reason))
    open_processes = partial(_open_processes, context, ledger, max_restarts)
    if not plan.num_threads:
        return OpenBuilders(open_processes(None), lambda: (plan.workers, plan.reason))
    from dataflow.processes.threads_first import ThreadsFirstBuilders

    first = ThreadsFirstBuilders(
        new_threads(number),
        open_processes,
        (*settings.postprocessing.functions, *(output.function for output in settings.outputs)),
        num_processes=plan.num_workers,
        reason=plan.reason,
    )
    return OpenBuilders(first, lambda: first.choice)


def _open_processes(
    context: BuildContext,
    ledger: Ledger,
    max_restarts: int,
    on_start: Callable[[BaseException | None], None] | None,
) -> ProcessBuilders:
    from dataflow.processes.builders import ProcessBuilders

    builders = ProcessBuilders(
        context.settings,
        guards=context.guards,
        decide=context.on_bad,
        give_back=ledger.give_back,
        max_restarts=max_restarts,
        on_start=on_start,
        initializer=one_torch_thread,
    )
    ledger.reconcile_first(builders.file.reconcile)
    return builders
