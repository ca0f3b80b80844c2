"""Builders that are actors of a Ray cluster: they get chunks, and give back batches by Ray's object store.

One thread dispatches, as with processes (`dataflow.processes.builders`): it sends a chunk, with the stored
values or without where actors read by themselves (`reading`), to the actor that has least to do, and takes
what comes back; Ray's own thread only puts what has come into a queue. A chunk's credits cover what
is sent; what comes back is charged when its size is known, before it is asked for, is copied into a slot, and
leaves Ray's store at once.

Whatever happens to an actor, each build comes to its end. Plan, windows and decisions about bad samples stay
here, so an actor that dies, alone or with its machine, costs time only: its chunks are built again by others,
from the first batch that was not delivered, with the same answers, and another actor is asked for. Actors
that the cluster has no room for yet are used once they are there.

Each rank has actors of its own, which know of no others and end with it. Ranks share the cluster's CPUs, and
exchange nothing for it: each first asks for its part, and for the rest of what it was told to use once that
has begun, when the others have asked for theirs. If a rank still has no actor after a while, since others
were there before it or nodes have died, it has one that reserves no CPU, until another begins: it is slow,
but it waits for nobody.
"""

from __future__ import annotations

import logging
import math
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from dataflow.actors.actor import ActorInfo, ActorResponse, BuilderActor, packed_bytes
from dataflow.actors.cluster import (
    BuilderActorError,
    ClusterNodes,
    RayClusterError,
    connected_ray,
)
from dataflow.actors.reading import only_read, read_plan
from dataflow.batch.builder import BuildContext
from dataflow.batch.delivered import Delivered
from dataflow.executors.versions import Versions
from dataflow.outputs.output import staged_outputs
from dataflow.processes.dispatch import ASSIGNED, RemoteBuild, RemoteBuilders, chunk_of
from dataflow.processes.serialized import serialize
from dataflow.staging.block_source import Traffic
from prefetch.engine.builders import Build
from prefetch.ipc.batch_writer import TorchSettings
from prefetch.ipc.payload import PackedObject, pack, unpack
from prefetch.ipc.protocol import RemoteError, WorkerMessage, WorkerResult
from prefetch.memory.arena import rounded_bytes
from prefetch.work import PartialChunk, Task

if TYPE_CHECKING:
    from dataflow.dataset import ShardedDataset

_log = logging.getLogger("dataflow")

_MOST_FAILED_STARTS = 3
"""Actors, one after another, that may die before they said where they are."""
_TRIES = 10
"""Times that a job is packed, at most, while others change it."""
_CLOSE_S = 10.0
"""To wait for actors that were ended."""
_PATIENCE_S = 15.0
"""With no actor. To start one where there is a CPU takes some 3 s, with modules on a network share more."""


def cluster_nodes() -> ClusterNodes:
    """Return where actors would run. Raises as `RayBuilders` does."""
    return ClusterNodes.of(connected_ray())


@dataclass(eq=False, kw_only=True)
class _Actor:
    """An actor, from when Ray is asked for it."""

    handle: Any
    name: str
    end: futures.Future[Any]
    """The call that fails when it dies."""
    reserves: bool = True
    """True if Ray waits for a free CPU before it begins."""
    windows: frozenset[tuple[int, int]] = frozenset()
    """Windows of the newest chunk that it was sent, by source and first block."""
    is_ready: bool = False
    is_lost: bool = False


@dataclass(eq=False, kw_only=True)
class _ActorBuild(RemoteBuild):
    """A build for actors; `builder` is an `_Actor`."""

    charged_bytes: int = 0
    """Bytes of the batches that are asked for."""


def _packed(job: object) -> PackedObject:
    """Pack a job by value: our main module is not the actors'.

    The dataset may be that of a loop in another thread, which keeps more of it meanwhile.
    """
    for _ in range(_TRIES - 1):
        try:
            return pack(job, by_value=True)
        except RuntimeError as error:
            if "changed size during iteration" not in str(error):
                raise
    return pack(job, by_value=True)


class RayBuilders(RemoteBuilders[_ActorBuild]):
    """`Builders` that are actors of a Ray cluster.

    Args:
        context: of the builders of this process; `num_builders` of its settings: the actors to use. In its
            arena values lie until Ray has them, and then batches.
        num_ranks: that share the cluster.
        datasets: whose shards actors read by themselves; none: values are serialized.
        traffic: where what actors read is counted.

    Raises `RayClusterError`, `ImportError` without Ray, `ValueError` for functions that cannot be sent.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        traffic: Traffic,
        num_ranks: int = 1,
        datasets: Sequence[ShardedDataset] = (),
    ) -> None:
        super().__init__(context.settings.num_builders, decide=context.on_bad)
        self._context, self._serializes = context, not datasets
        # A chunk comes whole: a part of it would be a call more, which costs this process 3 ms.
        settings = structs.replace(context.settings, hand_over_s=math.inf)
        self._traffic, self._num_ranks = traffic, num_ranks
        try:
            packed = _packed((TorchSettings.here(), settings, [*map(only_read, datasets)]))
        except Exception as error:
            raise ValueError(
                f"a function that builds batches cannot be sent to Ray actors ({error}): make what it uses "
                'inside of it, or have threads build: leave out builders="ray"'
            ) from error
        self._ray = connected_ray()
        self._job, self._layout = packed_bytes(packed), packed.layout
        self._remote = self._ray.remote(BuilderActor)
        self._actors: list[_Actor] = []
        """The actors, guarded by the lock."""
        self._num_started = self._num_failed_starts = 0
        self._events: queue.SimpleQueue[Task] = queue.SimpleQueue()
        """Events for the thread that dispatches. Ray's thread and the engine put them there."""
        self._num_wanted = min(self.num_builders, ClusterNodes.of(self._ray).actors_of(num_ranks))
        """Actors that are asked for by now."""
        self._is_patient = True
        """True if an actor that reserves no CPU is yet to be asked for, if no other begins."""
        self._ask_for_actors()
        self._start(self._run)

    @property
    def num_begun(self) -> int:
        """Actors that are there now."""
        with self._lock:
            return sum(actor.is_ready for actor in self._actors)

    # ---- for the engine -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._events.put(lambda: None)

    def contexts(self) -> list[str]:
        """See `Builders`."""
        with self._lock:
            if not any(actor.is_ready for actor in self._actors):
                return [
                    f"by none of the {len(self._actors)} Ray actors asked for so far: each needs a free CPU "
                    "of the cluster and some seconds to start; `ray status` shows what there is"
                ]
            builds = [remote for remote in self._assigned.values() if remote.is_active]
            names = dict.fromkeys(remote.builder.name for remote in builds if remote.builder)
        return [f"in {name}" for name in names]

    def stop(self) -> None:
        """See `Builders`."""
        super().stop()
        self._thread.stop()

    def _end_builders(self) -> None:
        self._kill_all()
        futures.wait([actor.end for actor in self._actors], _CLOSE_S)
        self._actors.clear()

    # ---- actors -------------------------------------------------------------------------------------------

    def _ask_for_actors(self) -> None:
        """Ask for those that are wanted and were not asked for."""
        num_asked = sum(actor.reserves for actor in self._actors)
        if num_asked < self._num_wanted:
            nodes = ClusterNodes.of(self._ray)
            for _ in range(self._num_wanted - num_asked):
                self._start_actor(num_cpus=nodes.cpus_of_actor(self._num_ranks), **nodes.near())

    def _ask_without_cpu(self) -> None:
        """No actor has begun for a while: have one, for the time being, that waits for no CPU."""
        self._is_patient = False
        node = ClusterNodes.of(self._ray).any_with_cpus()
        _log.warning(
            "the Ray cluster has had no free CPU for an actor of this rank for %g s: %s; `ray status` shows "
            "what there is",
            _PATIENCE_S,
            "no node has any" if node is None else "one begins that reserves none, until another has one",
        )
        if node is not None:
            strategies = self._ray.util.scheduling_strategies
            strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            self._start_actor(num_cpus=0, scheduling_strategy=strategy)

    def _start_actor(self, **placement: Any) -> None:
        """Ask for one more; it is used once it has said where it is."""
        handle = self._remote.options(
            max_restarts=0, max_task_retries=0, max_concurrency=ASSIGNED + 2, **placement
        ).remote()
        name = f"Ray actor {self._num_started}"
        self._num_started += 1
        reserves = placement["num_cpus"] > 0
        actor = _Actor(handle=handle, name=name, end=handle.heartbeat.remote().future(), reserves=reserves)
        with self._lock:
            self._actors.append(actor)
        # Before it is there for the others, what its end calls is set: it may be dead already.
        self._when_there(handle.info.remote().future(), partial(self._open, actor))
        self._when_there(actor.end, lambda end: self._lose_actor(actor, end.exception()))

    def _open(self, actor: _Actor, info: futures.Future[ActorInfo]) -> None:
        """Note an actor that has begun, once it has answered from where."""
        if actor.is_lost or not self._is_answered(actor, info):
            return
        pid, node, versions = info.result()
        actor.name += f" (pid {pid} on {node})"
        if difference := Versions.here().difference(versions):
            raise RayClusterError(f"{actor.name}: {difference}")
        opened = actor.handle.open.remote(actor.name, self._job, self._layout).future()
        self._when_there(opened, partial(self._use, actor))

    def _use(self, actor: _Actor, opened: futures.Future[RemoteError | None]) -> None:
        """An actor can be sent chunks, unless it cannot read the shards, or lacks a module."""
        if actor.is_lost or not self._is_answered(actor, opened):
            return
        failure = opened.result()
        if failure is not None:
            raise failure.restored()
        self._num_failed_starts, actor.is_ready, self._is_patient = 0, True, True
        if not actor.reserves:
            return
        for other in [other for other in self._actors if not other.reserves]:
            self._remove(other, None)
        if all(actor.is_ready for actor in self._actors):
            self._num_wanted = self.num_builders
            self._ask_for_actors()

    def _is_answered(self, actor: _Actor, result: futures.Future[Any]) -> bool:
        """Return whether a call has returned; False: the actor died, of which its end tells."""
        error = result.exception()
        if isinstance(error, self._ray.exceptions.RayTaskError):
            raise RayClusterError(
                f"{actor.name} cannot begin (is dataflow-loader[ray] installed on all nodes?): {error}"
            ) from error
        return error is None

    def _lose_actor(self, actor: _Actor, error: BaseException | None) -> None:
        """Have what an actor had built by others, and ask for another one."""
        if actor.is_lost or self._is_stopped or self._failure is not None:
            return
        if not actor.is_ready:
            self._num_failed_starts += 1
            if self._num_failed_starts >= _MOST_FAILED_STARTS:
                raise BuilderActorError(
                    "Ray actors die before they have begun (is dataflow-loader[ray] installed on all "
                    f"nodes?): {error}"
                ) from error
        _log.warning("%s has died: %s; its chunks are built by others", actor.name, _first_line(error))
        self._remove(actor, (actor.name, error) if self._is_own_death(error) else None)
        self._is_patient = True
        self._ask_for_actors()

    def _remove(self, actor: _Actor, death: tuple[str, BaseException | None] | None) -> None:
        """Have what an actor had built by others; `death`: if what it had may be why it died."""
        actor.is_lost = True
        self._kill(actor)  # where only the way to it is lost: nobody would use it any more
        with self._lock:
            self._actors.remove(actor)
        for remote in self._builds_of(actor):
            self._lose(remote, death)

    def _death_error(self, remote: _ActorBuild) -> BuilderActorError:
        plan = chunk_of(remote.build).plan
        names = " and ".join(name for name, _ in remote.deaths)
        failure = BuilderActorError(
            f"batches {plan.first_batch} to {plan.first_batch + len(plan.sizes) - 1} of epoch {plan.epoch} "
            f"are not built: {names} died with them"
        )
        failure.__cause__ = remote.deaths[-1][1]
        return failure

    def _is_own_death(self, error: BaseException | None) -> bool:
        """Return whether an actor died by itself: not with its machine, nor because the way there is lost."""
        return isinstance(error, self._ray.exceptions.ActorDiedError) and "node has died" not in str(error)

    def _kill_all(self) -> None:
        for actor in self._actors:
            self._kill(actor)

    def _kill(self, actor: _Actor) -> None:
        with suppress(Exception):  # the cluster may be gone
            self._ray.kill(actor.handle)

    # ---- the thread that dispatches ------------------------------------------------------------------------

    def _when_there(self, result: futures.Future[Any], then: Callable[[Any], None]) -> None:
        """Have the thread that dispatches deal with a result once it has come."""
        result.add_done_callback(lambda there: self._events.put(partial(then, there)))

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                self._dispatch()
                self._next_event()()  # no name keeps it: it holds memory of Ray's store
            except Exception as error:  # versions, or no actor can live: that ends all
                self._fail(error)
        self._kill_all()  # here, too: after a time-out nobody waits for us

    def _next_event(self) -> Task:
        """Return what to deal with next: what has come, or that no actor has begun."""
        waits = self._is_patient and self._failure is None and not any(peer.is_ready for peer in self._actors)
        try:
            return self._events.get(timeout=_PATIENCE_S if waits else None)
        except queue.Empty:
            return self._ask_without_cpu

    def _new(self, build: Build[Delivered]) -> _ActorBuild:
        return _ActorBuild(build=build)

    def _choose(self, remote: _ActorBuild, loads: Counter[Any]) -> _Actor | None:
        needs, ready = _window_names(remote), [actor for actor in self._actors if actor.is_ready]
        # Of several that have as little to do one that has had a window of the chunk.
        return min(ready, key=lambda actor: (loads[actor], actor.windows.isdisjoint(needs)), default=None)

    def _content(self, remote: _ActorBuild) -> tuple[Any, ...]:
        chunk = chunk_of(remote.build)
        if not self._serializes:
            return read_plan(chunk.plan, chunk.rows), remote.num_added, (), None
        context, outputs = self._context, staged_outputs(self._context.settings.outputs)
        with context.guards.loading():
            serialized, memory = serialize(chunk.plan, chunk.rows, outputs, context.arena)
        return serialized, remote.num_added, (), memory  # which Ray's store has once it is sent

    def _send(self, remote: _ActorBuild, kind: int, content: Any = None) -> None:
        actor, memory = remote.builder, None
        if kind == WorkerMessage.TASK:
            actor.windows = _window_names(remote)
            *content, memory = content  # an argument of its own, which Ray's store takes
        method = actor.handle.handle.options(num_returns=2)
        response, packed = method.remote(kind, remote.build.number, content, memory)
        # By its number: what Ray still refers to when we are closed must not keep the chunk's memory.
        self._when_there(response.future(), partial(self._charge, remote.build.number, actor, packed))

    def _charge(
        self, number: int, actor: _Actor, packed: Any, response: futures.Future[ActorResponse]
    ) -> None:
        """An actor has said how much it has to deliver: take credits, and ask for it."""
        remote = self._build_of(number, actor, response)
        if remote is None:
            return
        head = response.result()
        self._traffic.add(*head.counts)
        more_bytes = rounded_bytes(head.nbytes) - remote.charged_bytes
        # Built anew, it has its credits already, and maybe a few bytes too many of them.
        if head.kind == WorkerResult.BATCH and more_bytes > 0:
            remote.charged_bytes += more_bytes
            remote.build.add(PartialChunk(slot_bytes=more_bytes))
        self._when_there(packed.future(), partial(self._take, number, actor, head))

    def _build_of(self, number: int, actor: _Actor, result: futures.Future[Any]) -> _ActorBuild | None:
        """The build of a chunk that a result has come of; None: none has, or the actor has it no more."""
        with self._lock:
            remote = self._assigned.get(number)
        if remote is not None and remote.builder is not actor:
            remote = None
        error = result.exception()
        if not isinstance(error, self._ray.exceptions.RayTaskError):
            if error is not None:
                self._lose_actor(actor, error)
        elif remote is not None:  # a fault of ours: it would come each time
            self._end(remote, error)
        return remote if error is None else None

    def _take(self, number: int, actor: _Actor, head: ActorResponse, packed: futures.Future[Any]) -> None:
        """Take what an actor delivers: copied, since Ray's memory is read-only and has to go back."""
        remote = self._build_of(number, actor, packed)
        if remote is None:
            return
        is_charged = head.kind == WorkerResult.BATCH
        give_back = self._context.on_return(remote.charged_bytes) if is_charged else None
        slot = self._context.arena.lease(head.nbytes, give_back)
        np.copyto(slot, packed.result())
        obj = unpack(slot, *head.layout)
        del slot, packed
        if is_charged:
            remote.charged_bytes = 0
            # What the actor makes it makes in memory of its own; arrays of it lie in the slot here.
            obj = obj._replace(heap_bytes=max(0, obj.heap_bytes - head.nbytes), made_bytes=0)
        self._take_response(remote, head.kind, obj)


def _window_names(remote: _ActorBuild) -> frozenset[tuple[int, int]]:
    windows = chunk_of(remote.build).needs
    return frozenset((window.source_number, window.samples.blocks[0].number) for window in windows)


def _first_line(error: BaseException | None) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
