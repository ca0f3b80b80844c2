"""The engine of a `DataLoader` over a `ShardedDataset` or a `Mixture`.

It turns settings into a plan (which samples, in which order, for this rank), starts one engine (threads,
credits, arena), and hands out batches. The engine lives from the first batch to `close`, across epochs: while
the last batches of an epoch train, the first ones of the next are read. Loops that run at the same time have
an engine each (`dataflow.stream.loop_sessions`). The loader's state is the position of the batches that its
newest loop handed out, never of those that were prefetched.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from dataflow.batch.delivered import UNTRAINED, Delivered
from dataflow.dataset import ShardedDataset
from dataflow.limits import told_of_memory
from dataflow.mixture import Mixture
from dataflow.planning.exchange import NotHeldError
from dataflow.planning.length_aware import SampleLengths, is_by_tokens
from dataflow.planning.plan import StreamPlan, check_known, facts_of, first_plan
from dataflow.planning.rank import RankTopology, is_distributed
from dataflow.planning.settings import TRANSFORMED, StreamSettings
from dataflow.progress.bar import ProgressBar
from dataflow.progress.observer import EpochPosition, LoaderObserver
from dataflow.stats import LoaderStats
from dataflow.stream.decisions import (
    check_fits,
    check_settings,
    datasets_read,
    is_all_local,
    loader_limit,
    plan_builders,
    plan_session,
    with_steps,
)
from dataflow.stream.deliveries import DeliveryCounters, ErrorBudget, PendingErrors, RepeatedBatch
from dataflow.stream.loop_sessions import LoopSessions
from dataflow.stream.loops import EpochLoop, LoopFrame, LoopQueue
from dataflow.stream.measuring import LengthsStage, MeasuringStage
from dataflow.stream.resources import warm_up
from dataflow.stream.session import Session
from dataflow.tables import builders_text
from prefetch.control.depth import Decision
from prefetch.control.pause import ReadPause
from prefetch.errors import EngineClosedError, MemoryLimitError, StallError
from prefetch.memory.lifetimes import Finalizer
from sharding.cached_property import cached_property
from sharding.lengths.unit_plan import UNKNOWN, UnitPlan, UnitPlanner
from sharding.order.epoch_order import EpochOrder
from sharding.plan.difference import Facts
from sharding.plan.history import StepHistory
from sharding.plan.plan import EpochPlan, PlanState, RankPlan
from sharding.spans import Ints
from sharding.topology.topology import Topology


class StreamLoader:
    """Batches of a dataset or a mixture, in an order that is a function of (seed, epoch, position).

    `for batch in loader` runs one epoch; the next loop runs the next one, also while others run: loops have
    their epochs in order of `iter` and share the memory limit; the loader's state is that of the newest. Each
    loop is for one thread. Of a mixture with `stop="never"`, one goes on where the last was left.

    Raises `ValueError` for settings that do not go with the dataset or each other, `MemoryLimitError` where
    the memory limit has no room for a batch, `SampleError` where samples are known to lack a column.
    """

    def __init__(self, dataset: ShardedDataset | Mixture, settings: StreamSettings) -> None:
        check_settings(dataset, settings)
        self.dataset, self.settings, self.batching = dataset, settings, settings.batching
        self.device, self.mark_repeats = settings.torch_device, settings.mark_repeats
        self._rank = RankTopology(settings.topology)
        if isinstance(dataset, Mixture):
            dataset.timeout_s = settings.timeout_s
        self._lengths = SampleLengths(settings, dataset) if settings.batching is not None else None
        """The lengths that are measured; None: batches do not depend on them."""
        self._length_plan: UnitPlan | None = None
        """The plan of the epoch begun last."""
        self._pause: ReadPause | None = None
        self._finalizer: Finalizer | None = None
        self._errors = ErrorBudget(dataset.on_error, dataset.error_budget)
        self.epoch_named: int | None = None
        """The epoch that a framework has named last, by `ShardOrder.set_epoch`."""
        self.facts_loaded: Facts | None = None
        self.loop_length = 0
        """Batches of the loop begun last on this rank."""
        self.observer: LoaderObserver | None = None
        """Is told of each loop; None: nobody watches them."""
        self._loops, self.sessions = LoopQueue(dataset), LoopSessions()
        self.counters, self._repeated = DeliveryCounters(self._loops.standing), RepeatedBatch()
        with self._planning():
            plan, self.window_reason = first_plan(dataset, settings)
        self._own_shuffle, self._own_reason = plan.shuffle, self.window_reason
        self._steps_asked = settings.skip_steps
        """Steps to be passed over, until the first loop begins, or a state says where they lie."""
        self._use_plan(plan)
        # Else torch.distributed may come before the first batch.
        if self._rank.topology.world_size == 1 or is_distributed():
            self._join_ranks()
        self.epoch_plan(0, 0)  # raises if the settings make no plan
        check_fits(self._plan, settings, self.memory_limit)
        if self.builder_plan.num_processes:
            warm_up(self.builder_plan, settings.multiprocessing_context)

    def __getstate__(self) -> dict[str, Any]:
        # A copy stands where this loader stands, goes on by itself and reads with threads of its own.
        changing = ("_rank", "_errors", "_loops", "sessions")
        copies = {name: copy.copy(self.__dict__[name]) for name in changing}
        none = dict.fromkeys(("_finalizer", "_pause", "_length_plan", "observer"))
        new = {"_repeated": RepeatedBatch(), "counters": self.counters.going_on(copies["_loops"].standing)}
        return {**self.__dict__, **copies, **none, **new}

    @property
    def read_pause(self) -> ReadPause | None:
        """Asks reads of remote shards to wait; None where all shards are local."""
        if self._pause is None and not is_all_local(self.dataset):
            self._pause = ReadPause()
        return self._pause

    # ---- deciding -----------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The topology of this rank.

        Found when the loader is made, and once more if torch.distributed is initialised afterwards.
        """
        self._resolve_rank()
        return self._rank.whole()

    def _resolve_rank(self) -> None:
        """Know this rank, and what other ranks know: before anything that depends on them."""
        if self._rank.resolve():
            self._use_plan(self._plan)
        self._join_ranks()

    def _join_ranks(self) -> None:
        """Join the other ranks, where lengths are measured together: a collective, once."""
        planner = self._plan.planner
        if planner is None or not planner.is_measured or planner.are_lengths_given:
            return
        assert self._lengths is not None
        planner = self._lengths.join_ranks(planner, self._rank.topology, self._plan.rank)
        if planner.lengths is None and is_by_tokens(self.dataset):
            planner = planner.with_lengths(self._lengths.measured(self._measure))
        self._use_planner(planner)

    def _measure(self, component: ShardedDataset) -> SampleLengths:
        """Measure all samples of a source whose lengths are not known yet, on all ranks, each its part."""
        changes: dict[str, Any] = {"shuffle": None, "device": None, "skip_steps": ()}
        loader = StreamLoader(component, replace(self.settings, topology=self._rank.topology, **changes))
        try:
            assert loader._lengths is not None
            if not loader._lengths.are_known:
                num_samples = len(component) // loader.topology.data_world_size
                with ProgressBar("measuring lengths", total=num_samples, unit="sample") as bar:
                    for _ in loader:
                        bar.show(loader.counters.samples)
        finally:
            loader.close()
        return loader._lengths

    def _use_planner(self, planner: UnitPlanner) -> None:
        if planner is not self._plan.planner:
            self._use_plan(replace(self._plan, planner=planner))

    def _use_plan(self, plan: StreamPlan) -> None:
        """Go on by a plan, on this rank, within a limit that has room for its windows and builders."""
        topology, settings = self._rank.topology, self.settings
        self._plan = plan.on_rank(topology, settings.tail_on(topology))
        self.shuffle, self.seed, self.tail = self._plan.shuffle, self._plan.seed, self._plan.tail
        self.builder_plan = plan_builders(self._plan, settings, topology)
        self.memory_limit = loader_limit(self._plan, settings, topology, self.builder_plan)

    def epoch_plan(self, epoch: int, start: int) -> RankPlan:
        """The plan of this rank for an epoch, from a position on."""
        with self._planning():
            plan = self._plan.epoch(epoch, start)
        if isinstance(plan, UnitPlan):
            self._length_plan = plan
        return plan

    def _planning(self) -> AbstractContextManager[None]:
        samples = sum(map(len, self.dataset.sources))
        cure = "take fewer at a time (dataset.subset), or another shuffle= or batching="
        catalogs = (component.catalog for component in self.dataset.sources)
        return told_of_memory(f"plan an epoch of {samples:,} samples", cure, catalogs)

    # ---- iterating ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of the whole epoch on this rank; with `batching=`, or in a mixture, epochs may differ.

        One rank alone delivers fewer where `on_error` leaves nothing of some.

        `TypeError` for a mixture that never ends, and while lengths are still to be measured.
        """
        if self._plan.planner is None:
            len(self.dataset)
        self._resolve_rank()
        num_steps = self.epoch_plan(self._loops.epoch, 0).num_steps
        if num_steps == UNKNOWN:
            raise TypeError(
                "the lengths of samples are measured on the way: how many batches there are shows when all "
                "are kept; `dataflow index --lengths --transform` measures them before"
            )
        return num_steps

    def __iter__(self) -> Iterator[Any]:
        self._resolve_rank()
        return self._loops.add(self._batches)

    def _batches(self, loop: EpochLoop) -> Generator[Any, None, None]:
        # What is to be delivered is looked up at the first `next`: training loops set the epoch after `iter`.
        plan, began_s = self._loops.begin(loop, self._newest_plan), time.perf_counter()
        epoch, asked_s, self.loop_length = plan.order.epoch, began_s, plan.num_batches
        observer = self.observer.begin(self, epoch, partial(self._position, plan)) if self.observer else None
        frame, counters, mixes = LoopFrame(), self.counters, isinstance(self.dataset, Mixture)
        try:
            while not loop.has_ended:
                session = loop.session
                if session is None or (mixes and self._is_outdated(loop)):
                    session = self._serve(loop, frame)
                on_device = session.copier.to_device if session.copier else None
                for delivered in self._chunk_of(session, loop):
                    counters.first_batch_s = counters.first_batch_s or time.perf_counter() - began_s
                    batch = delivered.batch if on_device is None else on_device(delivered.batch)
                    if delivered.skipped:
                        session.errors.delivered(delivered.skipped)
                    loop.taken += 1
                    taken = loop.taken if self._loops.newest is loop else None
                    counters.add(delivered, session.sums, taken)
                    if observer is not None:
                        observer.batch(asked_s)
                    if loop.is_whole:
                        self._deliver_last(loop, session)
                    if delivered.num_samples:
                        yield batch
                        asked_s = time.perf_counter()
                    del delivered, batch  # while the next one is made, only the training code has this
        except GeneratorExit:
            raise  # the loop was left: whatever else ran here now would swallow a Ctrl-C
        except BaseException as error:
            self._fail(loop, error)
            if observer is not None:
                observer.end(asked_s, error)
            raise
        loop.warn_if_empty(epoch)
        self._loops.end(loop, epoch)
        if observer is not None:
            observer.end(asked_s)

    def _chunk_of(self, session: Session, loop: EpochLoop) -> Iterator[Delivered]:
        """Return what a session delivers next, up to where the loop ends or goes on with another session."""
        mixes, batches = isinstance(self.dataset, Mixture), None
        while loop.session is session and not (mixes and self._is_outdated(loop)):
            try:
                if batches is None:
                    chunk = session.stage.next_batches() if session.stage else session.next_chunk()
                    may_be_empty = self.dataset.on_error != "raise" and self._may_be_empty
                    steps_together = may_be_empty and self._rank.topology.data_world_size > 1
                    batches = self._repeated.in_place_of_empty(chunk) if steps_together else iter(chunk)
                    del chunk
                delivered = next(batches, None)
            except (EngineClosedError, NotHeldError) as error:
                if loop.closed:
                    raise
                if isinstance(error, NotHeldError):
                    self._use_plan(replace(self._plan, makes_twice=True))
                    self.sessions.drop(loop)
                return  # it held more than its share when another loop began, or than all of it
            if delivered is None:
                break
            yield delivered  # outside of `try`: nothing may run here when the loop is left
            del delivered
        if loop.is_whole and loop.session is session:  # where lengths are measured, it shows only now
            self._deliver_last(loop, session)

    def _serve(self, loop: EpochLoop, frame: LoopFrame) -> Session:
        """Have a session for a loop, from where it is: its former one was closed, or has other weights."""
        plan = loop.plan
        assert plan is not None
        if self._is_outdated(loop):
            self._take_weights(plan.order.epoch, plan.position_after(loop.taken))
            self.sessions.drop(loop)  # what was read ahead is in other shares
        if loop.finalizer is None:
            loop.finalizer = Finalizer(frame, partial(self.sessions.release, loop))
        else:
            plan = self.epoch_plan(plan.order.epoch, plan.position_after(loop.taken))
            loop.go_on_with(plan)
        if self._finalizer is None:
            self._finalizer = Finalizer(self, self.sessions.close)
        make = partial(self.new_session, plan.order.epoch, plan.start)
        session = self.sessions.serve(loop, self.memory_limit, make)
        if self._loops.num_begun > 1:
            session.read_on()
        return session

    def _is_outdated(self, loop: EpochLoop) -> bool:
        """Return whether the newest loop is served with other weights than were set for the mixture."""
        session, plan = loop.session, self._plan
        is_old = session is not None and session.decided.plan.dataset is not plan.dataset
        return (is_old or plan.lacks_weights(self.dataset)) and self._loops.is_last_begun(loop)

    def _newest_plan(self, epoch: int, start: int) -> RankPlan:
        """The plan of a loop that begins."""
        self._take_weights(epoch, start)
        if self._steps_asked:
            self._use_plan(self._plan_from(epoch, start))
            self._steps_asked = ()
        plan = self.epoch_plan(epoch, start)
        check_known(plan)
        return plan

    @property
    def mixture(self) -> Mixture | None:
        """The mixture as the next batch has it, also with weights that wait for that; None: one dataset."""
        plan = self._plan
        if plan.lacks_weights(self.dataset):
            plan = plan.with_weights(self._loops.epoch, self._loops.position, self.dataset)
        return plan.dataset if isinstance(plan.dataset, Mixture) else None

    def _plan_from(self, epoch: int, position: int) -> StreamPlan:
        """The plan, with the steps that wait for the first loop: it begins at this position."""
        return with_steps(self._plan, self._steps_asked, self._loops.history, epoch, position)

    def plan_now(self, epoch: int, position: int) -> StreamPlan:
        """The plan as the next batch has it, which begins at this position."""
        self._take_weights(epoch, position)
        return self._plan_from(epoch, position)

    def go_on_with(self, plan: StreamPlan) -> None:
        """Have another plan from the next batch of the newest loop on: what was read ahead is dropped."""
        self._use_plan(plan)
        self._steps_asked = ()
        if (loop := self._loops.newest) is not None:
            self.sessions.drop(loop)
        self.sessions.drop_idle(-1)

    def _take_weights(self, epoch: int, position: int) -> None:
        """Go on, from a position on, with the weights that were set for the mixture since the last call."""
        if self._plan.lacks_weights(self.dataset):
            self._use_plan(self._plan.with_weights(epoch, position, self.dataset))
            self.sessions.drop_idle(-1)  # wherever it stands: it reads the next epoch in other shares

    def _deliver_last(self, loop: EpochLoop, session: Session) -> None:
        """Note that the last batch of a loop is handed out: its session serves the next one, or ends."""
        assert loop.plan is not None
        if self._lengths is not None:
            self._lengths.save(self._rank.topology)
        is_measured_now = session.decided.plan.measures_lengths and self._plan.makes_rows
        if self._loops.is_last_begun(loop) and not is_measured_now:
            session.epoch_done(loop.plan.order.epoch)
            self.sessions.keep(loop)
        else:
            self.sessions.release(loop)

    def _fail(self, loop: EpochLoop, error: BaseException) -> None:
        """End a loop that failed, or was interrupted."""
        num_loops, measures = self.sessions.num_loops, self._plan.measures_ahead
        if isinstance(error, MemoryLimitError) and num_loops + measures > 1:
            who = f"{num_loops} loops over this loader" if num_loops > 1 else "building rows"
            also = ", and measuring what comes next," if measures else ""
            error.add_note(f"{who}{also} share its memory_limit: each has a part of it")
        if loop.closed:  # by another thread, which waits for what is being built
            return
        if isinstance(error, Exception):
            self.sessions.release(loop, join=not isinstance(error, StallError))  # what hangs cannot be joined
        elif loop.finalizer is not None:  # Ctrl-C: nobody wants to wait
            loop.finalizer.fire()

    def _position(self, plan: RankPlan) -> EpochPosition:
        """Return where a loop begins that runs this plan."""
        with self._planning():
            whole = self._plan.epoch(epoch := plan.order.epoch, 0).num_steps
        if whole >= UNKNOWN or (isinstance(self.dataset, Mixture) and self.dataset.spec.stop == "never"):
            return EpochPosition(epoch, 0, None)
        return EpochPosition(epoch, whole - plan.num_batches, whole)

    @property
    def batches_left(self) -> int | None:
        """Batches that the next loop runs on this rank: those after a loaded state, else of a whole epoch.

        None where some may be left out, being empty.
        """
        self._resolve_rank()
        if self._may_be_empty and self._rank.topology.data_world_size == 1:
            return None
        start = self._loops.next_start()
        with self._planning():
            num_batches = self._plan_from(*start).epoch(*start).num_batches
        return None if num_batches == UNKNOWN else num_batches

    @property
    def _may_be_empty(self) -> bool:
        """Return whether `on_error` may leave nothing of a batch that was planned with more."""
        planner = self._plan.planner
        leaves_out_first = planner is not None and planner.lengths is None
        return self.dataset.on_error != "raise" and (self._plan.measures_ahead or not leaves_out_first)

    @property
    def remainder(self) -> int:
        """The figure of `ShardOrder.remainder`."""
        self._resolve_rank()
        plan = self.epoch_plan(*self._loops.next_start())
        in_order = self.shuffle.is_file_order and type(plan) is EpochPlan and not self._plan.passed
        if self.tail == "drop" or not in_order:
            return -1
        return (plan.order.num_samples - plan.start) % plan.batch_plan.global_batch_size

    @property
    def epoch(self) -> int:
        """The epoch that runs, or runs next."""
        return self._loops.epoch

    @property
    def resumed(self) -> bool:
        """Return whether a state was loaded and no batch asked for since."""
        return self._loops.resumed

    @property
    def nothing_left(self) -> bool:
        """Return whether no batches are left of the epoch that the next loop runs."""
        return self.epoch_plan(self._loops.epoch, self._loops.start).num_batches == 0

    def is_after(self, epoch: int, num_batches: int) -> bool:
        """See `ShardOrder.is_after`."""
        plan = self.epoch_plan(epoch, 0)
        is_within = epoch == self.epoch and num_batches <= plan.num_batches
        return is_within and plan.position_after(num_batches) == self._loops.start

    def is_taken_ahead(self, epoch: int) -> bool:
        """See `LoopQueue.is_taken_ahead`."""
        return self._loops.is_taken_ahead(epoch)

    def set_epoch(self, epoch: int) -> None:
        """The next loop runs this epoch, from its beginning. Costs nothing if it is the next one anyway.

        Loops that have begun go on with theirs.
        """
        if self._loops.set_epoch(epoch):
            self.sessions.drop_idle(epoch)

    # ---- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the batches handed out so far end: a small JSON value, the same on every rank.

        It resumes under any number of ranks, threads or nodes. Taken inside a loop after the last batch of
        an epoch, it resumes to nothing more of that epoch; taken after the loop, to the next epoch.
        """
        epoch, position, history = self._loops.epoch, self._loops.position, self._loops.history
        state = self.plan_now(epoch, position).state(epoch, position, of=self.dataset, data=self._facts)
        counts = {"skipped_samples": self._errors.count, "epoch_named": self.epoch_named}
        return {**state.to_json(), **counts, "history": history and history.to_json()}

    @property
    def taken(self) -> tuple[StreamPlan, StepHistory | None]:
        """The plan, and which steps it has delivered so far; None: the loaded state does not tell."""
        return self._plan, self._loops.history

    @property
    def position(self) -> int:
        """The place in the epoch at which the batches handed out end."""
        return self._loops.position

    @cached_property
    def _facts(self) -> Facts:
        """The facts of the dataset in states, and of what transforms it."""
        with suppress(ModuleNotFoundError):  # the core alone
            if any((s.transform, s.batch_transform) != (None, None) for s in self.dataset.sources):
                return {**facts_of(self.dataset), **resolve_name(TRANSFORMED)(self.dataset)}
        return facts_of(self.dataset)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: seed and shuffle come from the state.

        A warning says where the loader was given others. Between two epochs data and batching may be others.

        Raises:
            ValueError: the state is damaged, or inside an epoch of other data or another `batching`.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"a state must be a mapping, got {type(state).__name__}")
        fields = {k: v for k, v in state.items() if k not in ("skipped_samples", "epoch_named", "history")}
        loaded = self._plan.meant(PlanState.from_json(fields), self.dataset)
        skipped = state.get("skipped_samples")
        named, history = state.get("epoch_named"), StepHistory.from_json(state.get("history"))
        for name, count in (("skipped_samples", skipped), ("epoch_named", 0 if named is None else named)):
            if type(count) is not int or count < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {count!r}")
        plan = self._plan.resumed(loaded, of=self.dataset, data=self._facts, shuffle=self._own_shuffle)
        known_history = plan.history(history, loaded, self.dataset)
        plan = with_steps(plan, self.settings.skip_steps, known_history, loaded.epoch, loaded.position)
        self.settings.warn_of_another_order(loaded.seed, plan.shuffle.kind)
        self.close()
        self._steps_asked = ()
        self._use_plan(plan)
        is_kept = plan.shuffle == loaded.shuffle
        self.window_reason = "as in the loaded state" if is_kept else f"{self._own_reason}, as data differ"
        self._errors.count, self.epoch_named, self.facts_loaded = int(skipped or 0), named, loaded.data
        self._loops.resume(loaded.epoch, loaded.position, known_history)
        self.counters = self.counters.going_on(self._loops.standing)

    # ---- engine -------------------------------------------------------------------------------------

    def shown(self) -> Iterator[tuple[str, str]]:
        """Yield what a loader is, for `repr`: no other rank is asked, and nothing is read."""
        settings, plan, topology = self.settings, self.builder_plan, self._rank.topology
        yield "over", repr(self.dataset)
        yield "batch size", str(settings.batch_size)
        yield "shuffle", self.shuffle.kind
        yield "batching", repr(self.batching) if self.batching else ""
        yield "rank", f"{topology.rank} of {topology.world_size}"
        yield "seed", str(self.seed)
        yield "built by", builders_text(plan.workers, plan.num_workers)

    def new_session(self, epoch: int, start: int, memory_limit: int) -> Session:
        """A session from this position on, which may hold so many bytes."""
        plan, settings, stage, topology = self._plan, self.settings, None, self._rank.topology
        errors, builders, pause = PendingErrors(self._errors), self.builder_plan, self.read_pause
        if plan.planner is not None and plan.planner.is_measured and not plan.makes_rows:
            stage = (LengthsStage if plan.measures_ahead else MeasuringStage)(
                plan=plan,
                settings=settings,
                errors=errors,
                num_ranks=topology.world_size,
                exchange=self._lengths.exchange if self._lengths else None,
                record=self._record,
            )
            memory_limit //= 1 + plan.measures_ahead  # the other half is for the rows
            plan, settings = stage.plan, stage.settings
            builders = plan_builders(plan, settings, topology)
        decided = plan_session(plan, settings, topology, memory_limit, builders)
        with told_of_memory("find samples in their blocks", "write shards with smaller blocks (row groups)"):
            return Session(decided, epoch, start, errors=errors, pause=pause, device=self.device, stage=stage)

    def _record(self, order: EpochOrder, first: int, lengths: Ints) -> None:
        """Keep the lengths of samples that were measured, from a position of an order on."""
        if self._plan.planner is not None and self._lengths is not None:
            self._use_planner(self._lengths.record(self._plan.planner, order, first, lengths))
            self._lengths.save(self._rank.topology, if_much=True)

    def stats(self) -> LoaderStats:
        """A snapshot; cheap, any thread."""
        sessions, delivered = self.sessions.open, self.counters
        return LoaderStats(
            **vars(self.sessions.stats()),
            samples=delivered.samples,
            batches=delivered.batches,
            first_batch_s=delivered.first_batch_s,
            window=Decision(self.shuffle.window_blocks or 0, self.window_reason),
            skipped_samples=self._errors.count,
            skipped=tuple(self._errors.errors),
            empty_batches=delivered.empty_batches,
            image_warnings={k: n for k, n in delivered.remarks.items() if k != UNTRAINED},
            untrained_samples=delivered.remarks[UNTRAINED],
            read_amplification=self._plan.read_amplification,
            lengths=self._length_plan.stats if self._length_plan else None,
            mapped_bytes=sum(session.mapped_bytes for session in sessions),
            unfinished_shards=sum(len(dataset.catalog.unfinished) for dataset in datasets_read(self.dataset)),
        )

    @property
    def has_counts(self) -> bool:
        """Return whether `stats()` has counted something."""
        return self.counters.batches > 0 or self._errors.count > 0

    @property
    def ranks(self) -> tuple[int, int, int, int]:
        """Rank, world size, local rank and node, as far as they are known: no other rank is asked."""
        topology = self._rank.topology
        return topology.rank, topology.world_size, topology.local_rank, topology.node

    def close(self) -> None:
        """Stop and join all threads, drop what is prefetched, and end the loops that run. Idempotent.

        Batches handed out stay valid. Another thread that waits for a batch gets a `RuntimeError`.
        """
        if self._lengths is not None:
            self._lengths.save(self._rank.topology)
        try:
            self.sessions.close()
        except BaseException:  # Ctrl-C: nobody wants to wait
            if self._finalizer is not None:
                self._finalizer.fire()
            raise
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
