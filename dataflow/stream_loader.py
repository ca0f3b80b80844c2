"""What `DataLoader` does over a `ShardedDataset` or a `Mixture`.

It turns its arguments into a plan (which samples, in which order, for this rank), starts one engine
(threads, credits, arena), and hands out batches. The engine lives from the first batch to `close`, across
epochs: while the last batches of an epoch train, the first ones of the next are read. The loader's state
is the position of the batches that were handed out, never of those that were prefetched.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from dataflow.accounts import Counts, Skipped
from dataflow.dataset import ShardedDataset
from dataflow.length_aware import checked_batching, make_planner
from dataflow.memory_limit import memory_limit_bytes
from dataflow.mixture import Mixture
from dataflow.session import Session, SessionOptions, is_all_local
from dataflow.stats import LoaderStats
from dataflow.stream_plan import RankPlan, StreamPlan
from dataflow.topology_exchange import detect_topology
from prefetch.depth import DepthPolicy, fixed_depth
from prefetch.engine import MemoryLimitError, StallError
from prefetch.hold import ReadHold
from sharding.batching import Batching
from sharding.mixture import ENDLESS
from sharding.order import Shuffle
from sharding.placement import seat_of
from sharding.plan import PlanState, Tail
from sharding.topology import Topology
from sharding.unit_plan import UnitPlan
from sharding.units import LengthStats
from sharding.window_size import DEFAULT_LIMIT, deciding_table, resolve_windows


class StreamLoader:
    """Batches of a dataset or a mixture, in an order that is a function of (seed, epoch, position).

    Args:
        dataset: a `ShardedDataset` (or a view of one), or a `Mixture`.
        batch_size: samples per batch and rank; with `batching=Packed(...)` rows.
        shuffle: True or None: windowed shuffle; False: file order; or a `Shuffle`.
        drop_last: leave out the last, incomplete global batch (the same as `tail="drop"`).
        collate_fn: samples -> batch; None stacks columns (or torch's `default_collate` after a transform).
        timeout: seconds to wait for one batch; 0: 600.
        seed: any 64-bit integer; with the epoch it decides order and augmentation.
        topology: this rank's place; None: torch.distributed if initialised, else the environment.
        device: where batches go; None or "cpu": host memory. "cuda": page-locked slots, copied on a side
            stream.
        memory_limit: bytes, or text such as "2GB", that the loader may hold; None: 1 GiB or an eighth of
            the memory of the machine (or its cgroup) per local rank, whichever is less.
        tail: what happens to the last, incomplete global batch: "drop", "pad" (repeat the epoch's first
            samples), "uneven" (a short batch, shared out over the ranks). None: "drop" if drop_last, else
            "uneven" in one process and "pad" with several, so that no rank lacks a step.
        depth: batches kept ready: an int, a `DepthPolicy`, or None: 4 over local shards, and over remote ones
            what `AdaptiveDepth` decides (docs/adaptive.md).
        num_threads: threads that build batches; None: by the number of cores.
        batching: `Packed(...)`, `TokenBudget(...)` or `Bucketed(...)`: batches by the lengths of samples.
            `transform` and `collate_fn` then go together, and not with `Packed`. See docs/batching.md.
        pin_memory: build batches in page-locked memory, where there is CUDA.

    A loader is used by one thread. `for batch in loader` runs one epoch; the next loop runs the next one.
    A mixture with `stop="never"` has no length and one epoch: the next loop goes on where the last was left.
    """

    def __init__(
        self,
        dataset: ShardedDataset | Mixture,
        batch_size: int = 1,
        shuffle: bool | Shuffle | None = None,
        *,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        timeout: float = 0,
        seed: int = 0,
        topology: Topology | None = None,
        device: str | torch.device | None = None,
        memory_limit: int | str | None = None,
        tail: Tail | None = None,
        depth: int | DepthPolicy | None = None,
        num_threads: int | None = None,
        batching: Batching | None = None,
        pin_memory: bool = False,
    ) -> None:
        if timeout < 0:
            raise ValueError(f"timeout must be >= 0 seconds, got {timeout}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(
                f"num_threads must be >= 1, or None for as many as suit the cores, got {num_threads}"
            )
        self.dataset, self.batch_size, self.collate_fn = dataset, batch_size, collate_fn
        self.drop_last, self.timeout, self.seed = drop_last, timeout, seed
        self._unplaced: ValueError | None = None
        """Why the launcher's variables alone do not tell this rank's place."""
        self._alone = topology is None and not _is_distributed()
        """Whether the place was found before torch.distributed was there to ask."""
        self._topology = topology or self._first_place()
        self.device = _checked_device(device)
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.batching = checked_batching(batching, dataset, batch_size, collate_fn)
        self._length_stats: LengthStats | None = None
        self._given_tail = tail
        self._given_limit = memory_limit
        self._take_place(self._topology)
        self._planner = (
            make_planner(self.batching, dataset, self._window_limit // 8)
            if self.batching and isinstance(dataset, ShardedDataset)
            else None
        )
        self._depth = fixed_depth(depth) if isinstance(depth, int) else depth
        self._num_threads = num_threads
        self.shuffle, self.window_reason = self._resolve_shuffle(shuffle)
        self._epoch = 0
        self._start = 0
        self.resumed = False
        """A state was loaded and no batch asked for since."""
        self._in_epoch = False
        self._loop: object | None = None
        """The loop that runs now: only one may."""
        self._current: RankPlan | None = None
        self._taken = 0
        self._session: Session | None = None
        self._hold: ReadHold | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._skipped = Skipped(dataset.on_error, dataset.error_budget)
        self._counts = Counts()
        self._plan = self._stream_plan()
        self._epoch_plan(0, 0)  # raises if the arguments make no plan
        self._check_batch_fits()

    def __getstate__(self) -> dict[str, Any]:
        # A copy stands where this loader stands, and reads with threads of its own.
        return {**self.__dict__, "_session": None, "_finalizer": None, "_hold": None}

    @property
    def read_hold(self) -> ReadHold | None:
        """Asks reads of remote shards to wait; None where all shards are local."""
        if self._hold is None and not is_all_local(self.dataset):
            self._hold = ReadHold()
        return self._hold

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
        self.tail: Tail = self._given_tail or _default_tail(self.drop_last, topology)
        self.memory_limit = memory_limit_bytes(self._given_limit, topology.local_world_size)

    def _settle(self) -> None:
        """Find this rank's place again, if torch.distributed came up after the loader was made."""
        if self._alone and _is_distributed():
            self._alone, self._unplaced = False, None
            self._take_place(detect_topology())
            self._plan = self._stream_plan()
        if self._unplaced is not None:
            raise self._unplaced

    @property
    def topology(self) -> Topology:
        """The place of this rank.

        Found when the loader is made, and once more if torch.distributed is initialised afterwards.
        """
        self._settle()
        return self._topology

    def _resolve_shuffle(self, shuffle: bool | Shuffle | None) -> tuple[Shuffle, str]:
        """The shuffle, and why its windows are as large as they are.

        Each source of a mixture has windows of its own, and they share that quarter.
        It never depends on the machine: ranks of unlike machines must agree on the order.
        """
        if isinstance(shuffle, str):
            raise ValueError(
                f"shuffle must be True, False, None or a Shuffle; for {shuffle!r} give Shuffle({shuffle!r})"
            )
        if not isinstance(shuffle, Shuffle):
            shuffle = Shuffle("window" if shuffle is None or shuffle else "none")
        limit = None if self._given_limit is None else self.memory_limit
        tables = [source.kept_blocks for source in self.dataset.sources]
        return resolve_windows(shuffle, *deciding_table(tables, limit))

    @property
    def _window_limit(self) -> int:
        return DEFAULT_LIMIT if self._given_limit is None else self.memory_limit

    def _stream_plan(self) -> StreamPlan:
        seat, world_size = seat_of(self._topology), self._topology.data_world_size
        return StreamPlan(
            self.dataset,
            self.shuffle,
            self.seed,
            self.batch_size,
            seat,
            world_size,
            self.tail,
            self._planner,
        )

    def _epoch_plan(self, epoch: int, start: int) -> RankPlan:
        plan = self._plan.epoch(epoch, start)
        if isinstance(plan, UnitPlan):
            self._length_stats = plan.stats
        return plan

    def _check_batch_fits(self) -> None:
        rows = self._plan.samples_per_batch * sum(
            o.row_bytes for o in self.dataset.outputs if o.kind != "objects"
        )
        if rows > self.memory_limit:
            raise MemoryLimitError(
                f"one batch of {self.batch_size} samples needs {rows:,} bytes, more than "
                f"memory_limit={self.memory_limit:,}; lower batch_size or raise memory_limit"
            )

    # ---- iterating ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of the whole epoch on this rank; with `batching=`, or in a mixture, epochs may differ.

        `TypeError` for a mixture that never ends.
        """
        len(self.dataset)
        self._settle()
        return self._epoch_plan(self._epoch, 0).num_batches

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        if self._is_whole():
            self._end_epoch()
        elif self._in_epoch:
            self._begin_epoch(*self._next_loop())
        self._loop = object()
        return self._batches(self._loop)

    def _batches(self, loop: object) -> Iterator[Any]:
        # What is to be delivered is looked up at the first `next`: training loops set the epoch after `iter`.
        epoch = self._epoch
        plan = self._epoch_plan(epoch, self._start)
        self._in_epoch, self.resumed = True, False
        total = plan.num_batches
        began = time.perf_counter()
        session = self._open(epoch, plan.start) if total else None
        on_device = session.copier.to_device if session and session.copier else None
        self._current, self._taken = plan, 0
        taken = 0
        try:
            while taken < total:
                assert session is not None
                batches = session.next_batches()
                self._counts.first_batch_s = self._counts.first_batch_s or time.perf_counter() - began
                for delivered in batches:
                    self._taken = taken = taken + 1
                    self._counts.batches += 1
                    self._counts.samples += delivered.num_samples
                    if delivered.skipped:
                        self._skipped.add(delivered.skipped)
                    yield delivered.batch if on_device is None else on_device(delivered.batch)
                    if self._loop is not loop:
                        raise RuntimeError("two loops ran over one loader at the same time; make two loaders")
                    if session is not self._session or self._epoch != epoch:
                        return  # the loader was closed or moved elsewhere inside the loop
        except GeneratorExit:
            if self._loop is loop and taken < total:  # left at the last batch, the next epoch is read on
                self._stop(join=True)
            raise
        except BaseException as error:  # Ctrl-C among them
            if self._loop is loop:
                self._stop(join=not isinstance(error, StallError))  # what hangs cannot be joined
            raise
        if session is not None:
            session.epoch_done(epoch)
        self._begin_epoch(epoch + 1, 0)

    def _next_loop(self) -> tuple[int, int]:
        """Epoch and position at which the next loop begins."""
        if not self._in_epoch:
            return self._epoch, self._start
        # The last loop was left early: a new loop is a new epoch.
        endless = not self._is_whole() and self.dataset.num_samples(self._epoch) >= ENDLESS
        return (self._epoch, self._position()) if endless else (self._epoch + 1, 0)

    @property
    def batches_left(self) -> int:
        """Batches that the next loop runs on this rank: those after a loaded state, else of a whole epoch."""
        self._settle()
        return self._epoch_plan(*self._next_loop()).num_batches

    @property
    def epoch(self) -> int:
        """The epoch that runs, or runs next."""
        return self._epoch

    @property
    def nothing_left(self) -> bool:
        """Whether no batches are left of the epoch that the next loop runs."""
        return self._epoch_plan(self._epoch, self._start).num_batches == 0

    def _is_whole(self) -> bool:
        """Whether the loop has all batches of the epoch; those that count batches do not ask for the end."""
        return self._in_epoch and self._current is not None and self._taken == self._current.num_batches

    def _end_epoch(self) -> None:
        if self._session is not None:
            self._session.epoch_done(self._epoch)
        self._begin_epoch(self._epoch + 1, 0)

    def _begin_epoch(self, epoch: int, start: int) -> None:
        self._epoch, self._start, self._in_epoch = epoch, start, False
        self._current, self._taken, self.resumed = None, 0, False

    def set_epoch(self, epoch: int) -> None:
        """The next loop runs this epoch, from its beginning. Costs nothing if it is the next one anyway."""
        if not isinstance(epoch, Integral) or epoch < 0:
            raise ValueError(f"epoch must be an integer >= 0, got {epoch!r}")
        if self._is_whole():
            self._end_epoch()
        if epoch != self._epoch or self._in_epoch:
            if self._session is not None and (self._in_epoch or epoch != self._epoch):
                self.close()
            self._begin_epoch(epoch, 0)

    # ---- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the batches handed out so far end: a small JSON value, the same on every rank.

        It resumes under any number of ranks, threads or nodes. Taken inside a loop after the last batch of
        an epoch, it resumes to nothing more of that epoch; taken after the loop, to the next epoch.
        """
        state = PlanState(
            seed=self.seed,
            epoch=self._epoch,
            position=self._position(),
            num_samples=self.dataset.num_samples(self._epoch),
            shuffle=self.shuffle,
            fingerprint=self.dataset.fingerprint(),
            batching=self._planner.mark if self._planner else None,
        )
        return {**state.to_json(), "skipped_samples": self._skipped.count}

    def _position(self) -> int:
        return self._current.position_after(self._taken) if self._current else self._start

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: seed and shuffle come from the state.

        Raises:
            ValueError: the state is damaged or was taken over other data, or with another `batching`.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"a state must be a mapping, got {type(state).__name__}")
        fields = {k: v for k, v in state.items() if k != "skipped_samples"}
        loaded = PlanState.from_json(fields)
        if loaded.fingerprint != self.dataset.fingerprint():
            here = self.dataset.num_samples(0)
            raise ValueError(
                "the state was taken over other shards (their names, sizes or blocks differ), another view "
                "or other shares of a mixture, where its position means other samples "
                f"({loaded.num_samples:,} samples, here {here:,})"
            )
        planner = self._planner and self._planner.resumed(loaded.batching or {})
        mark = planner and planner.mark
        if loaded.batching != mark:
            raise ValueError(
                "the state was taken with other batching or lengths, where its position means other rows or "
                f"batches: it has {loaded.batching}, this loader {mark}"
            )
        if planner:  # only a plan knows how many units there are: refuse before anything changes
            plan = replace(self._plan, seed=loaded.seed, shuffle=loaded.shuffle, planner=planner)
            plan.epoch(loaded.epoch, loaded.position)
        self.close()
        self.seed, self.shuffle, self._planner = loaded.seed, loaded.shuffle, planner
        self.window_reason = "as in the loaded state"
        self._skipped.start(int(state.get("skipped_samples", 0)))
        self._plan = self._stream_plan()
        self._begin_epoch(loaded.epoch, loaded.position)
        self.resumed = True

    # ---- engine -------------------------------------------------------------------------------------

    def _open(self, epoch: int, start: int) -> Session:
        """The running session if it stands at this place, else a new one."""
        session = self._session
        if session is not None and session.stands_at(epoch, start):
            return session
        self.close()
        options = SessionOptions(
            topology=self._topology,
            memory_limit=self.memory_limit,
            device=self.device,
            pin_memory=self.pin_memory,
            collate_fn=self.collate_fn,
            on_bad=self._skipped.decide,
            depth=self._depth,
            num_threads=self._num_threads,
            timeout_s=self.timeout or 600.0,
            hold=self.read_hold,
        )
        self._session = session = Session(self._plan, options, epoch, start)
        # The finaliser, not __del__: it also runs at interpreter exit, and joins the threads.
        self._finalizer = weakref.finalize(self, session.close)
        return session

    def stats(self) -> LoaderStats:
        """A snapshot; cheap, any thread."""
        counted = self._counts.snapshot(self._session, self.shuffle, self.window_reason, self._skipped)
        return replace(counted, lengths=self._length_stats)

    def close(self) -> None:
        """Stop and join all threads, drop what is prefetched. Batches handed out stay valid. Idempotent."""
        self._stop(join=True)

    def _stop(self, *, join: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            assert self._finalizer is not None
            self._finalizer.detach()
            session.close(join=join)
            self._skipped.start(self._skipped.count)
            self._counts.keep(session)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _checked_device(device: str | torch.device | None) -> torch.device:
    checked = torch.device("cpu" if device is None else device)
    if checked.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or CUDA device, got {checked}; copy batches to it yourself")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {checked}, but torch sees no CUDA device")
    return checked


def _default_tail(drop_last: bool, place: Topology) -> Tail:
    if drop_last:
        return "drop"
    return "pad" if place.data_world_size > 1 else "uneven"
