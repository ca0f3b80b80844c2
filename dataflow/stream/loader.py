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
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from dataflow.batch.builder import REPEAT
from dataflow.batch.delivered import UNTRAINED
from dataflow.batch.transforms import fingerprint_of
from dataflow.dataset import ShardedDataset
from dataflow.limits import memory_limit_bytes, told_of_memory
from dataflow.mixture import Mixture
from dataflow.planning.joined_reads import check_reads
from dataflow.planning.length_aware import (
    SampleLengths,
    are_measured,
    check_batching,
    is_by_tokens,
    make_planner,
)
from dataflow.planning.plan import StreamPlan, check_known
from dataflow.planning.settings import StreamSettings
from dataflow.stats import LoaderStats
from dataflow.stream.builders import BuilderPlan, plan_builders, warm_up
from dataflow.stream.deliveries import Deliveries, LastGood, Skipped, SkippedAhead
from dataflow.stream.loop_sessions import LoopSessions
from dataflow.stream.loops import EpochLoop, LoopQueue
from dataflow.stream.measuring import MeasuringStage
from dataflow.stream.read_ahead import megabatch_bytes
from dataflow.stream.session import Session, SessionOptions, building_bytes, datasets_read, is_all_local
from dataflow.topology_exchange import detect_topology
from prefetch.control.depth import Decision
from prefetch.control.pause import ReadPause
from prefetch.errors import EngineClosedError, MemoryLimitError, StallError
from prefetch.memory.lifetimes import Finalizer
from sharding.catalog.table import BlockTable
from sharding.lengths.unit_plan import UNKNOWN, UnitPlan, UnitPlanner
from sharding.order.epoch_order import EpochOrder
from sharding.order.shuffle import Shuffle
from sharding.plan.batch_plan import Tail
from sharding.plan.placement import shard_index_of
from sharding.plan.plan import EpochPlan, PlanState, RankPlan
from sharding.plan.window_size import resolve_windows, window_bytes
from sharding.topology.topology import Topology


class LoopFrame:
    """A variable of a loop's generator: it dies when the loop is over or left, however that happens."""

    __slots__ = ("__weakref__",)


class StreamLoader:
    """Batches of a dataset or a mixture, in an order that is a function of (seed, epoch, position).

    `for batch in loader` runs one epoch; the next loop runs the next one, also while others run: loops have
    their epochs in order of `iter` and share the memory limit; the loader's state is that of the newest. Each
    loop is for one thread.
    A mixture with `stop="never"` has no length and one epoch: the next loop goes on where the last was left.

    Raises `ValueError` for settings that do not go with the dataset or each other, `MemoryLimitError` where
    the memory limit has no room for a batch, `SampleError` where samples are known to lack a column.
    """

    def __init__(self, dataset: ShardedDataset | Mixture, settings: StreamSettings) -> None:
        if settings.mark_repeats and any(output.name == REPEAT for output in dataset.outputs):
            raise ValueError(f"mark_repeats=True: the dataset has a column of its own called {REPEAT!r}")
        self.dataset, self.settings = dataset, settings
        self.batching = settings.batching
        self.device, self.mark_repeats = settings.torch_device, settings.mark_repeats
        self._unplaced: ValueError | None = None
        """Why the launcher's variables alone do not tell this rank's place."""
        self._alone = settings.topology is None and not _is_distributed()
        """Whether the place was found before torch.distributed was there to ask."""
        self._window_bytes = self._building_bytes = 0
        self._take_place(settings.topology or self._first_place())
        check_batching(settings, dataset)
        for source in dataset.sources:
            source.check_missing()
            fingerprint_of(source.transform)  # raises now, not where a state is taken
        self._lengths = SampleLengths(settings, dataset)
        self._length_plan: UnitPlan | None = None
        """Of the epoch begun last."""
        self._num_weights_taken, planner = 0, None
        if settings.batching:
            megabatch = megabatch_bytes(settings.memory_limit, self.memory_limit).value
            with self._planning():
                measured = are_measured(settings, dataset)
                planner = make_planner(settings.batching, dataset, megabatch, measured=measured)
        self._mix_by(*self._resolve_shuffle())
        self._pause: ReadPause | None = None
        self._finalizer: Finalizer | None = None
        self._skipped = Skipped(dataset.on_error, dataset.error_budget)
        if isinstance(dataset, Mixture):
            dataset.timeout_s = settings.timeout_s
        self._deliveries = Deliveries()
        self._loops = LoopQueue(dataset)
        self.sessions = LoopSessions()
        self._last_good = LastGood()
        place = self._topology
        plan = StreamPlan(
            dataset=dataset,
            shuffle=self.shuffle,
            seed=settings.seed,
            batch_size=settings.batch_size,
            rank=place.data_rank,
            world_size=place.data_world_size,
            tail=self.tail,
            planner=planner,
        )
        self._plan_by(plan)
        if self._topology.world_size == 1 or _is_distributed():  # else that may come before the first batch
            self._join_ranks()
        self.epoch_plan(0, 0)  # raises if the settings make no plan
        self._check_batch_fits()
        check_reads(self._plan, self.memory_limit)
        warm_up(self.builder_plan)

    def __getstate__(self) -> dict[str, Any]:
        # A copy stands where this loader stands, goes on by itself and reads with threads of its own.
        changing = ("_skipped", "_deliveries", "_loops", "sessions")
        own = {name: copy.copy(self.__dict__[name]) for name in changing}
        none = dict.fromkeys(("_finalizer", "_pause", "_length_plan"))
        return {**self.__dict__, **own, **none, "_last_good": LastGood()}

    @property
    def builder_plan(self) -> BuilderPlan:
        """Who builds its batches."""
        return plan_builders(self._plan, self.settings, self._topology)

    @property
    def read_pause(self) -> ReadPause | None:
        """Asks reads of remote shards to wait; None where all shards are local."""
        if self._pause is None and not is_all_local(self.dataset):
            self._pause = ReadPause()
        return self._pause

    # ---- deciding -----------------------------------------------------------------------------------

    def _first_place(self) -> Topology:
        try:
            return detect_topology()
        except ValueError as error:
            if not self._alone or not dist.is_available():
                raise
            self._unplaced = error  # Lightning sets a part of the variables, and torch.distributed later
            return Topology()

    def _take_place(self, topology: Topology) -> None:
        self._topology = topology
        self.tail: Tail = self.settings.tail_on(topology)
        self._take_limit()

    def _take_limit(self) -> None:
        given, ranks = self.settings.memory_limit, self._topology.local_world_size
        self.memory_limit = memory_limit_bytes(given, ranks, self._window_bytes, self._building_bytes)

    def _settle(self) -> None:
        """Find this rank's place again, if torch.distributed came up after the loader was made."""
        if self._alone and _is_distributed():
            self._alone, self._unplaced = False, None
            self._take_place(detect_topology())
            self._plan_by(self._plan)
        if self._unplaced is not None:
            raise self._unplaced
        self._join_ranks()

    def _join_ranks(self) -> None:
        """Join the other ranks, where lengths are measured together: a collective, once."""
        planner = self._plan.planner
        if planner is None or not planner.is_measured or planner.are_lengths_given:
            return
        planner = self._lengths.join_ranks(planner, self._topology, self._plan.rank)
        if planner.lengths is None and is_by_tokens(self.dataset):
            planner = planner.with_lengths(self._lengths.measured(self._measure))
        self._take_planner(planner)

    def _take_planner(self, planner: UnitPlanner) -> None:
        if planner is not self._plan.planner:
            self._plan_by(replace(self._plan, planner=planner))

    def _measure(self, source: ShardedDataset) -> SampleLengths:
        """Make all samples of a source whose lengths are not known yet, on all ranks, each its part."""
        settings = replace(self.settings, shuffle=None, device=None, topology=self._topology)
        loader = StreamLoader(source, settings)
        try:
            if not loader._lengths.are_known:
                for _ in loader:
                    pass
        finally:
            loader.close()
        return loader._lengths

    @property
    def topology(self) -> Topology:
        """The place of this rank.

        Found when the loader is made, and once more if torch.distributed is initialised afterwards.
        """
        self._settle()
        return self._topology

    def _resolve_shuffle(self) -> tuple[Shuffle, str]:
        """The shuffle, and why its windows are as large as they are.

        Each source of a mixture has windows of its own, and they share that quarter.
        It never depends on the machine: ranks of unlike machines must agree on the order.
        """
        limit = None if self.settings.memory_limit is None else self.memory_limit
        return resolve_windows(self.settings.order, self._block_tables, limit)

    def _mix_by(self, shuffle: Shuffle, reason: str) -> None:
        """Take a shuffle with nothing left open, and a limit that has room for its windows."""
        self.shuffle, self.window_reason = shuffle, reason
        self._window_bytes = window_bytes(shuffle, self._block_tables)
        self._take_limit()

    @property
    def _block_tables(self) -> list[BlockTable]:
        return [source.kept_blocks for source in self.dataset.sources]

    def _plan_by(self, plan: StreamPlan) -> None:
        """Go on by a plan, for this rank's place, with a limit that has room for its builders."""
        place, self.seed = self._topology, plan.seed
        # In file order what is gathered by rank must be in order: shard indices may be numbered otherwise.
        rank = place.data_rank if plan.shuffle.is_file_order else shard_index_of(place)
        self._plan = replace(plan, rank=rank, world_size=place.data_world_size, tail=self.tail)
        if self.settings.memory_limit is None:
            self._building_bytes = building_bytes(self._plan, self.builder_plan)
            self._take_limit()

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
        catalogs = (source.catalog for source in self.dataset.sources)
        return told_of_memory(f"plan an epoch of {samples:,} samples", cure, catalogs)

    def _check_batch_fits(self) -> None:
        rows = self._plan.samples_per_batch * sum(output.row_bytes for output in self.dataset.outputs)
        if rows > self.memory_limit:
            raise MemoryLimitError(
                f"one batch of {self.settings.batch_size} samples needs {rows:,} bytes, more than "
                f"memory_limit={self.memory_limit:,}; lower batch_size or raise memory_limit"
            )

    # ---- iterating ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of the whole epoch on this rank; with `batching=`, or in a mixture, epochs may differ.

        One rank alone delivers fewer where `on_error` leaves nothing of some.

        `TypeError` for a mixture that never ends, and while lengths are still to be measured.
        """
        if self._plan.planner is None:
            len(self.dataset)
        self._settle()
        num_batches = self.epoch_plan(self._loops.epoch, 0).num_batches
        if num_batches == UNKNOWN:
            raise TypeError(
                "the lengths of samples are measured as they are made: how many batches there are shows when "
                "all were made once, and kept under a lengths_key="
            )
        return num_batches

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        return self._loops.add(self._batches)

    def _batches(self, loop: EpochLoop) -> Generator[Any, None, None]:
        # What is to be delivered is looked up at the first `next`: training loops set the epoch after `iter`.
        plan, began, counts = (
            self._loops.begin(loop, self._newest_plan),
            time.perf_counter(),
            self._deliveries,
        )
        taken, batches, mixed = 0, None, self._plan.dataset
        frame, session, on_device = LoopFrame(), None, None
        in_step = self._may_be_empty and self._topology.data_world_size > 1
        try:
            while taken < plan.num_batches and not loop.closed:
                is_changed = mixed is not self._plan.dataset or self._are_weights_new
                if is_changed and self._loops.is_last_begun(loop):
                    self._take_weights(plan.order.epoch, plan.position_after(taken))
                    mixed = self._plan.dataset
                    self.sessions.drop(loop)  # what was read ahead is in other shares
                if session is None or loop.session is not session:
                    session = self._serve(loop, frame, plan.order.epoch, restarted=session is not None)
                    assert loop.plan is not None
                    plan, taken, batches = loop.plan, loop.taken, None
                    on_device = session.copier.to_device if session.copier else None
                try:
                    if batches is None:
                        taken_now = session.next_batches()
                        batches = self._last_good.in_place_of_empty(taken_now) if in_step else iter(taken_now)
                        del taken_now
                    delivered = next(batches, None)
                except EngineClosedError:
                    if loop.closed:
                        raise
                    batches = None
                    continue  # it held more than its share when another loop began
                if delivered is None:
                    batches = None
                    if taken == plan.num_batches:  # which shows only now
                        self._deliver_last(loop, session)
                    continue
                counts.first_batch_s = counts.first_batch_s or time.perf_counter() - began
                batch = delivered.batch if on_device is None else on_device(delivered.batch)
                if delivered.skipped:
                    session.skipped.delivered(delivered.skipped)
                counts.add(delivered)
                loop.taken = taken = taken + 1
                if taken == plan.num_batches:
                    self._deliver_last(loop, session)
                if delivered.num_samples:
                    yield batch
                del delivered, batch  # while the next one is made, only the training code has this
        except GeneratorExit:
            raise  # the loop was left: whatever else ran here now would swallow a Ctrl-C
        except BaseException as error:
            self._fail(loop, error)
            raise
        if loop.nothing_left:
            warnings.warn(
                "this loop had no batch: the loaded state was taken in the loop, after the last batch of "
                f"epoch {plan.order.epoch}. The next loop runs the next epoch. Take states behind the loop, "
                "or say which epoch comes: loader.set_epoch(...)",
                stacklevel=2,
            )
        self._loops.end(loop, plan.order.epoch)

    def _newest_plan(self, epoch: int, start: int) -> RankPlan:
        """The plan of a loop that begins."""
        self._take_weights(epoch, start)
        plan = self.epoch_plan(epoch, start)
        check_known(plan)
        return plan

    @property
    def _are_weights_new(self) -> bool:
        """Whether weights were set for the mixture since they were looked at last."""
        dataset = self.dataset
        if not isinstance(dataset, Mixture) or dataset.weights_set is None:
            return False
        return dataset.weights_set[0] != self._num_weights_taken

    def _take_weights(self, epoch: int, position: int) -> None:
        """From a place on, go on with the weights that were set for the mixture since the last call."""
        if not self._are_weights_new:
            return
        assert isinstance(self.dataset, Mixture)
        assert self.dataset.weights_set is not None
        number, weights = self.dataset.weights_set
        self._plan_by(self._plan.with_weights(epoch, position, weights))
        self._num_weights_taken = number
        self.sessions.drop_idle(-1, 0)  # wherever it stands: it reads the next epoch in other shares

    def _serve(self, loop: EpochLoop, frame: LoopFrame, epoch: int, *, restarted: bool) -> Session:
        """Have a session for a loop; `restarted` from where the loop is, as its former one was closed."""
        assert loop.plan is not None
        if restarted:
            loop.plan, loop.taken = self.epoch_plan(epoch, loop.plan.position_after(loop.taken)), 0
        else:
            loop.finalizer = Finalizer(frame, partial(self.sessions.leave, loop))
        if self._finalizer is None:
            self._finalizer = Finalizer(self, self.sessions.close)
        make = partial(self.new_session, epoch, loop.plan.start)
        session = self.sessions.serve(loop, self.memory_limit, make)
        if self._loops.num_begun > 1:
            session.read_on()
        return session

    def _deliver_last(self, loop: EpochLoop, session: Session) -> None:
        """Note that the last batch of a loop is handed out: its session serves the next one, or ends."""
        assert loop.plan is not None
        self._lengths.save(self._topology)
        if self._loops.is_last_begun(loop):
            session.epoch_done(loop.plan.order.epoch)
            self.sessions.keep(loop)
        else:
            self.sessions.leave(loop)

    def _fail(self, loop: EpochLoop, error: BaseException) -> None:
        """End a loop that failed, or was interrupted."""
        num_loops = self.sessions.num_loops
        if isinstance(error, MemoryLimitError) and num_loops > 1:
            error.add_note(
                f"{num_loops} loops over this loader share its memory_limit: each has a part of it"
            )
        if loop.closed:  # by another thread, which waits for what is being built
            return
        if isinstance(error, Exception):
            self.sessions.leave(loop, join=not isinstance(error, StallError))  # what hangs cannot be joined
        elif loop.finalizer is not None:  # Ctrl-C: nobody wants to wait
            loop.finalizer.fire()

    @property
    def batches_left(self) -> int | None:
        """Batches that the next loop runs on this rank: those after a loaded state, else of a whole epoch.

        None where some may be left out, being empty.
        """
        self._settle()
        if self._may_be_empty and self._topology.data_world_size == 1:
            return None
        num_batches = self.epoch_plan(*self._loops.next_place()).num_batches
        return None if num_batches == UNKNOWN else num_batches

    @property
    def _may_be_empty(self) -> bool:
        """Whether `on_error` may leave nothing of a batch that was planned with more."""
        planner = self._plan.planner
        leaves_out_first = planner is not None and planner.lengths is None
        return self.dataset.on_error != "raise" and not leaves_out_first

    @property
    def remainder(self) -> int:
        """As `ShardOrder.remainder`."""
        self._settle()
        plan = self.epoch_plan(*self._loops.next_place())
        if self.tail == "drop" or not self.shuffle.is_file_order or type(plan) is not EpochPlan:
            return -1
        return (plan.order.num_samples - plan.start) % plan.batch_plan.global_batch_size

    @property
    def epoch(self) -> int:
        """The epoch that runs, or runs next."""
        return self._loops.epoch

    @property
    def resumed(self) -> bool:
        """Whether a state was loaded and no batch asked for since."""
        return self._loops.resumed

    @property
    def nothing_left(self) -> bool:
        """Whether no batches are left of the epoch that the next loop runs."""
        return self.epoch_plan(self._loops.epoch, self._loops.start).num_batches == 0

    def is_after(self, epoch: int, num_batches: int) -> bool:
        """See `ShardOrder.is_after`."""
        plan = self.epoch_plan(epoch, 0)
        if epoch != self.epoch or num_batches > plan.num_batches:
            return False
        return plan.position_after(num_batches) == self._loops.start

    def is_taken_ahead(self, epoch: int) -> bool:
        """See `LoopQueue.is_taken_ahead`."""
        return self._loops.is_taken_ahead(epoch)

    def set_epoch(self, epoch: int) -> None:
        """The next loop runs this epoch, from its beginning. Costs nothing if it is the next one anyway.

        Loops that have begun go on with theirs.
        """
        if self._loops.set_epoch(epoch):
            self.sessions.drop_idle(epoch, 0)

    # ---- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the batches handed out so far end: a small JSON value, the same on every rank.

        It resumes under any number of ranks, threads or nodes. Taken inside a loop after the last batch of
        an epoch, it resumes to nothing more of that epoch; taken after the loop, to the next epoch.
        """
        epoch, position = self._loops.epoch, self._loops.position
        self._take_weights(epoch, position)
        state = self._plan.state(epoch, position, of=self.dataset)
        return {**state.to_json(), "skipped_samples": self._skipped.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: seed and shuffle come from the state.

        Raises:
            ValueError: the state is damaged or was taken over other data, or with another `batching`.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"a state must be a mapping, got {type(state).__name__}")
        fields = {k: v for k, v in state.items() if k != "skipped_samples"}
        loaded, skipped = PlanState.from_json(fields), state.get("skipped_samples")
        if type(skipped) is not int or skipped < 0:
            raise ValueError(f"skipped_samples must be an integer >= 0, got {skipped!r}")
        plan = self._plan.resumed(loaded, of=self.dataset)
        self.close()
        self._mix_by(loaded.shuffle, "as in the loaded state")
        self._plan_by(plan)
        if isinstance(self.dataset, Mixture) and self.dataset.weights_set is not None:
            self._num_weights_taken = self.dataset.weights_set[0]  # the state's weights hold
        self._skipped.count = skipped
        self._loops.resume(loaded.epoch, loaded.position)

    # ---- engine -------------------------------------------------------------------------------------

    def new_session(self, epoch: int, start: int, memory_limit: int) -> Session:
        """A session from this place on, which may hold so many bytes."""
        options = SessionOptions(
            settings=self.settings,
            topology=self._topology,
            memory_limit=memory_limit,
            skipped=SkippedAhead(self._skipped),
            pause=self.read_pause,
        )
        stage = None
        if self._plan.planner is not None and self._plan.planner.is_measured:
            stage = MeasuringStage(
                plan=self._plan,
                settings=self.settings,
                skipped=options.skipped,
                num_ranks=self._topology.world_size,
                exchange=self._lengths.exchange,
                record=self._record,
            )
        with told_of_memory("find samples in their blocks", "write shards with smaller blocks (row groups)"):
            return Session(self._plan, options, epoch, start, stage=stage)

    def _record(self, order: EpochOrder, first: int, lengths: NDArray[np.int64]) -> None:
        """Keep the lengths of samples that were measured, from a position of an order on."""
        if self._plan.planner is not None:
            self._take_planner(self._lengths.record(self._plan.planner, order, first, lengths))
            self._lengths.save(self._topology, if_much=True)

    def stats(self) -> LoaderStats:
        """A snapshot; cheap, any thread."""
        sessions, delivered = self.sessions.open, self._deliveries
        return LoaderStats(
            **vars(self.sessions.stats()),
            samples=delivered.samples,
            batches=delivered.batches,
            first_batch_s=delivered.first_batch_s,
            window=Decision(self.shuffle.window_blocks or 0, self.window_reason),
            skipped_samples=self._skipped.count,
            skipped=tuple(self._skipped.errors),
            empty_batches=delivered.empty_batches,
            image_warnings={k: n for k, n in delivered.remarks.items() if k != UNTRAINED},
            untrained_samples=delivered.remarks[UNTRAINED],
            read_amplification=self._plan.read_amplification,
            lengths=self._length_plan.stats if self._length_plan else None,
            mapped_bytes=sum(session.mapped_bytes() for session in sessions),
            unfinished_shards=sum(len(one.catalog.unfinished) for one in datasets_read(self.dataset)),
        )

    def close(self) -> None:
        """Stop and join all threads, drop what is prefetched, and end the loops that run. Idempotent.

        Batches handed out stay valid. Another thread that waits for a batch gets a `RuntimeError`.
        """
        finalizer = self._finalizer
        self._lengths.save(self._topology)
        try:
            self.sessions.close()
        except BaseException:  # Ctrl-C: nobody wants to wait
            if finalizer is not None:
                finalizer.fire()
            raise
        if finalizer is not None:
            finalizer.detach()
            self._finalizer = None


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
