"""`DataLoader`: torch's class, that streams shards and hands over other datasets' batches faster.

It is a front: it sorts arguments, checks states and measures loops. Batches come from one of two engines:
`dataflow.stream` over shards, `dataflow.workers` over any other dataset.
"""

from __future__ import annotations

import copy
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, cast, overload

import torch
from torch.utils.data import BatchSampler, default_collate, default_convert
from typing_extensions import TypeVar

from dataflow.limits import memory_limit_bytes
from dataflow.progress.observer import DATA_STALL, REPLAYED, WATCHERS, Role
from dataflow.shard_order import Sharded, ShardOrder, is_file_order, order_given
from dataflow.state_checksum import checked_fields, with_checksum
from dataflow.tables import Row, Shown, builders_text
from dataflow.workers.drop_in import DropInEngine, checked_workers
from dataflow.workers.fetching import DropInState, WorkerLoader
from prefetch.control.depth import DepthPolicy
from sharding.lengths.batching import Batching
from sharding.order.shuffle import Shuffle
from sharding.plan.batch_plan import Tail
from sharding.topology.topology import Topology

if TYPE_CHECKING:
    import pyarrow as pa

    from dataflow.stats import LoaderStats, WorkerStats
    from dataflow.stream.loader import StreamLoader
    from dataflow.telemetry.status.loaders import LoaderStatus
    from dataflow.telemetry.timing.health import LoaderHealth
    from prefetch.control.pause import ReadPause

D_co = TypeVar("D_co", covariant=True, default=Any)
"""The dataset: a `Sharded` one decides what batches and statistics are."""
B = TypeVar("B", default=dict[str, Any])
"""A batch of shards: what `collate_fn` returns, or else a dict of columns."""
T = TypeVar("T")


class StreamAttribute(Generic[T]):
    """An attribute that a loader has over shards only: its stream's.

    Under the same name `vars(loader)` has the argument as it was given, for frameworks that make a loader
    anew from what they find there.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc  # what `help` shows

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, loader: None, owner: type) -> Self: ...
    @overload
    def __get__(self, loader: DataLoader[Any, Any], owner: type) -> T: ...
    def __get__(self, loader: DataLoader[Any, Any] | None, owner: type) -> Self | T:
        if loader is None:
            return self
        if loader._stream is not None:
            return cast("T", getattr(loader._stream, self._name))
        if self._name not in vars(loader):  # over other data some are attributes of the loader
            raise AttributeError(f"a {type(loader).__name__} has {self._name!r} over shards only")
        return cast("T", vars(loader)[self._name])

    def __set__(self, loader: DataLoader[Any, Any], value: T) -> None:
        vars(loader)[self._name] = value


class DataLoader(Shown, WorkerLoader, Generic[D_co, B]):
    """Batches of any dataset.

    Over a `ShardedDataset` or a `Mixture` it streams shards, in an order that is a function of
    (seed, epoch, position); see docs/guide/order.md. Over any other dataset it does what
    `torch.utils.data.DataLoader` 2.13 does, argument by argument, with a faster hand-over from worker
    processes and a `state_dict`; what differs on purpose is listed in docs/reference/differences.md.

    Args:
        dataset: a `ShardedDataset`, a `Mixture`, or any map-style or iterable dataset.
        batch_size: samples per batch and rank; with `batching=Packed(...)` rows. None, over other datasets
            only: no batches, as in torch.
        shuffle: None or False: file order over shards, no shuffle over other datasets. True: a windowed
            shuffle over shards, as in torch over others. Over shards also a `Shuffle`.
        sampler: as in torch: the order of the indices, in place of `shuffle`. Not over shards, where
            `dataset.balanced(...)` draws classes by weights.
        batch_sampler: as in torch: lists of indices, one a batch. Not over shards.
        num_workers: builders of batches on this rank; 0: whoever asks builds. None: 0 over other datasets;
            over shards as many as this rank has cores: processes where functions of yours may hold the
            interpreter lock, else threads.
        collate_fn: makes a batch of a list of samples. None: torch's over other datasets, and over shards
            after a transform; else columns are stacked without a list of samples.
        pin_memory: deliver batches in page-locked memory, where there is CUDA.
        drop_last: leave out the last, incomplete batch, over shards that of all ranks.
        timeout: seconds to wait for one batch; 0: 600 over shards, for ever over other datasets.
        worker_init_fn: as in torch: called in each worker with its number. Over shards, builders are
            processes then.
        multiprocessing_context: as in torch: how worker processes start. None: as `multiprocessing` says, so
            up to Python 3.13 they are forked from this process (docs/guide/workers.md). Over shards,
            builders are processes then.
        generator: as in torch: the `torch.Generator` of sampler and workers. Not over shards: see `seed`.
        prefetch_factor: as in torch: batches that each worker keeps in work, 2 where None. Over shards
            `depth` decides.
        persistent_workers: as in torch: keep the workers from one loop to the next. Over shards they stay.
        pin_memory_device: as in torch, where it is deprecated.
        in_order: as in torch: False delivers batches as they are finished. Not over shards.
        workers: the kind that `num_workers` counts: "process" (or None) or "thread"; over shards also
            "auto", the rule that holds without a number. Over other datasets, "thread" has threads fetch
            items: all use `dataset` as it is and share the global random generators with this code, so draw
            from `get_worker_info().rng` (docs/guide/workers.md).
        snapshot_every_n_steps: batches from one state of a dataset with a `state_dict` to the next; a
            resumed loader over an iterable fetches those between again (docs/reference/differences.md).
        prefetch_across_epochs: persistent workers with nothing left to do begin the next epoch before anybody
            asks for it. They may then not see what the training code changes between epochs in a place that
            they look up by name (a file, shared memory, a manager). Over shards reading goes on anyway.
        memory_limit: bytes, or text such as "2GB", that the loader may hold. None: an eighth of the machine's
            (or container's) memory per local rank, at most 1 GiB or what windows and many builders need.
        seed: any 64-bit integer; with the epoch it decides order and augmentation over shards. Not used
            over other datasets, which have `generator`.
        topology: this rank and the others, over shards only. None: torch.distributed if it is initialised,
            else the launcher's variables.
        device: the device that batches come on, over shards only. None: host memory. "cuda": copied there
            on a side stream.
        tail: the rule for the last, incomplete batch of all ranks, over shards only. "drop" leaves it out.
            "pad" fills it up with the epoch's first samples. "even" shares it out in equal short parts,
            filled up to a multiple of the ranks. "uneven" shares it out as it is, so that ranks may differ by
            a step. None: "drop" with `drop_last`, else "uneven" on one rank and "even" on several.
        depth: batches kept ready over shards: a number or a `DepthPolicy`. None: 4 over local shards, over
            remote ones as many as waits of the training code ask for.
        max_worker_restarts: builder processes over shards that are replaced when they die, each with a
            warning. One more, or a second death on the same batches, is an error.
        builders: "ray" has `num_workers` actors of a Ray cluster build batches of shards, on other machines'
            cores, of shards that they read; `num_workers=None`: this rank's part of the cluster's CPUs.
        ship_blocks: with `builders="ray"`, have this process read, and send the stored values to the actors.
        batching: `Packed(...)`, `TokenBudget(...)` or `Bucketed(...)`, over shards only: batches by the
            lengths of samples (docs/guide/batching.md).
        mark_repeats: add a column "__repeat__" to batches of shards, bool: the samples (rows with `Packed`)
            that `tail` delivers a second time.
        skip_steps: pairs (first step, the one after the last): global batches that are passed over on every
            rank, over shards only; see `skip_steps`. Of a state that has them, they are known.
        progress: True or a title: show a bar of each loop, on stderr and rank 0 only: samples a second, the
            share of the time spent waiting, the time left (docs/guide/monitoring.md).
        name: what metrics, `dataflow top` and progress call this loader. None: the dataset's folder, its name
            on the Hub, or its class.
        role: "train" or "validation", for the same. None: "validation" where gradients are off when its first
            loop begins, or the dataset is called so, as in "imagenet/val"; else "train".

    Raises:
        ValueError: arguments that contradict each other, or that the dataset does not go with.
        MemoryLimitError: the memory limit has no room for one batch.

    Used by one thread. `for batch in loader` runs one epoch.

    Examples:
        >>> dataset = ShardedDataset("images/*.tar", decode={"jpg": Image(size=224)})
        >>> with DataLoader(dataset, batch_size=4, shuffle=True) as loader:
        ...     for batch in loader:
        ...         images, labels = batch["jpg"], batch["cls"]  # uint8 [4, 3, 224, 224] and int64 [4]
    """

    def __init__(
        self,
        dataset: D_co,
        batch_size: int | None = 1,
        shuffle: bool | Shuffle | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], B] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers: Literal["process", "thread", "auto"] | None = None,
        snapshot_every_n_steps: int = 1,
        prefetch_across_epochs: bool = False,
        memory_limit: int | str | None = None,
        seed: int = 0,
        topology: Topology | None = None,
        device: str | torch.device | None = None,
        tail: Tail | None = None,
        depth: int | DepthPolicy | None = None,
        max_worker_restarts: int = 3,
        builders: Literal["ray"] | None = None,
        ship_blocks: bool = False,
        batching: Batching | None = None,
        mark_repeats: bool = False,
        skip_steps: Sequence[tuple[int, int]] = (),
        progress: bool | str = False,
        name: str | None = None,
        role: Role | None = None,
    ) -> None:
        if not isinstance(progress, (bool, str)):
            raise ValueError(f"progress must be True, False or a title, got {progress!r}")
        self.progress = progress
        self._given_label = _checked_label(name, role)
        self._status: LoaderStatus | None = None
        self._is_observed = False
        self._stream: StreamLoader | None = None
        num_workers = None if num_workers is None else operator.index(num_workers)  # numpy's may overflow
        of_shards = {
            "topology": topology, "device": device, "tail": tail, "builders": builders,
            "ship_blocks": ship_blocks, "max_worker_restarts": max_worker_restarts, "batching": batching,
            "mark_repeats": mark_repeats,
        }  # fmt: skip
        if not isinstance(dataset, Sharded):
            mixes = {"shuffle": shuffle} if isinstance(shuffle, Shuffle) else {}
            _refuse(
                "only a ShardedDataset or a Mixture has ", {**of_shards, **mixes, "skip_steps": skip_steps}
            )
            self.workers = checked_workers(workers, num_workers or 0, multiprocessing_context)
            self.snapshot_every_n_steps = snapshot_every_n_steps
            self.prefetch_across_epochs = prefetch_across_epochs
            if prefetch_across_epochs and not (persistent_workers and in_order):
                raise ValueError("prefetch_across_epochs needs persistent_workers=True and in_order=True")
            self.memory_limit = memory_limit_bytes(memory_limit, 1)
            self._drop_in = DropInState(num_workers or 0, self.workers)
            super().__init__(
                cast("Any", dataset), batch_size, cast("bool | None", shuffle), sampler, batch_sampler,
                num_workers or 0, collate_fn, pin_memory, drop_last, timeout, worker_init_fn,
                multiprocessing_context, generator, prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers, pin_memory_device=pin_memory_device,
                in_order=in_order,
            )  # fmt: skip
            DropInEngine(self).warm_up()
            return
        from dataflow.planning.settings import StreamSettings
        from dataflow.stream.loader import StreamLoader

        if (order := order_given(sampler, batch_sampler)) is not None:
            settings = order.settings
        else:
            if is_file_order(sampler, dataset) and not shuffle:
                # A loader made anew of attributes of another one, which had made these of None.
                sampler, workers = None, None if builders or num_workers == 0 else workers
                collate_fn = None if collate_fn in (default_collate, default_convert) else collate_fn
            draws = sampler is not None or batch_sampler is not None
            _refuse(
                f"a {type(dataset).__name__} has an order of its own and is read by threads: ",
                {
                    "sampler": sampler,
                    "batch_sampler": batch_sampler,
                    "generator": generator,
                    "in_order": in_order,
                    "prefetch_across_epochs": prefetch_across_epochs,
                },
                _INSTEAD_OF_SAMPLERS if draws else "",
            )
            if batch_size is None:
                raise ValueError("batch_size=None is not for shards: they are read in batches")
            settings = StreamSettings(
                batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, collate_fn=collate_fn,
                timeout=timeout, seed=seed, topology=topology, device=device, memory_limit=memory_limit,
                tail=tail, depth=depth, num_workers=num_workers, workers=workers,
                max_worker_restarts=max_worker_restarts, worker_init_fn=worker_init_fn,
                multiprocessing_context=multiprocessing_context, builders=builders, ship_blocks=ship_blocks,
                batching=batching, pin_memory=pin_memory, mark_repeats=mark_repeats,
                skip_steps=skip_steps,
            )  # fmt: skip
        self._stream = StreamLoader(cast("Any", dataset), settings)
        plan = self._stream.builder_plan
        self.workers = plan.workers
        super().__init__(
            cast("Any", dataset),
            settings.batch_size,
            sampler=ShardOrder(self._stream),
            drop_last=settings.drop_last,
            collate_fn=settings.collate_fn,
            timeout=timeout,
            worker_init_fn=settings.worker_init_fn,
        )
        # As they were given: frameworks make a loader anew from what they find here.
        vars(self).update(of_shards, memory_limit=memory_limit, seed=seed, depth=depth)
        if batch_sampler is not None:  # the one who gave it looks for it
            self.__dict__["batch_sampler"] = batch_sampler
        self.num_workers, self.pin_memory = plan.num_workers, pin_memory
        if num_workers and plan.is_local:
            self.check_worker_number_rationality()

    @property
    def _engine(self) -> StreamLoader | DropInEngine:
        return self._stream if self._stream is not None else DropInEngine(self)

    batches_left = StreamAttribute[int | None]("Batches of the next loop on this rank; None: not known.")
    batching = StreamAttribute[Batching | None]("The rule of batches by length; None: there is none.")
    device = StreamAttribute[torch.device]("The device that batches come on.")
    epoch = StreamAttribute[int]("The epoch that runs, or runs next; `set_epoch` chooses it.")
    mark_repeats = StreamAttribute[bool]("Whether batches have a column `__repeat__`.")
    memory_limit = StreamAttribute[int]("Bytes that the loader may hold.")  # over other data, an attribute
    mixture = StreamAttribute[Any](
        "The mixture as it goes on: `print` says from which sample on weights that were set hold."
    )
    seed = StreamAttribute[int]("The seed of order and augmentation.")
    shuffle = StreamAttribute[Shuffle]("The shuffle, with what the loader chose.")
    tail = StreamAttribute[Tail]("The rule for the last, incomplete batch of all ranks.")
    topology = StreamAttribute[Topology]("Which rank this is, and how many there are.")
    window_reason = StreamAttribute[str]("Why windows are as large as they are.")

    # ---- iterating ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch (on this rank). `TypeError` where it cannot be known."""
        return len(self._engine)

    @overload  # type: ignore[override]  # torch's own iterator class says nothing of batches
    def __iter__(self: DataLoader[Sharded, B]) -> Iterator[B]: ...
    @overload
    def __iter__(self) -> Iterator[Any]: ...
    def __iter__(self) -> Any:
        if not self._is_observed:
            self._is_observed = True
            owner = self._drop_in if self._stream is None else self._stream
            try:
                self._status = resolve_name(WATCHERS)(self, owner, *self._given_label)
            except ModuleNotFoundError as error:
                if error.name != "dataflow.telemetry":
                    raise
        if not os.environ.get(DATA_STALL):
            return iter(self._engine)
        return resolve_name(REPLAYED)(self._engine, self)

    def _get_iterator(self) -> Any:
        return DropInEngine(self).new_iterator()  # torch's `__iter__` asks for one, which shards do not use

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch: of the order over shards, else of the sampler and the dataset that have one."""
        self._engine.set_epoch(epoch)

    def skip_steps(self, steps: Sequence[tuple[int, int]]) -> None:
        """Pass over global batches to come, on every rank, while all others stay what they were.

        Any number of ranks that goes on from a state passes over the same samples (docs/guide/explain.md). A
        collective where torch.distributed is initialised: all ranks call it with the same steps, after the
        same number of batches. What was read ahead is dropped and read anew.

        Args:
            steps: pairs (first step, the one after the last), counted since the training began.

        Raises:
            ValueError: steps that were taken, that ranks name unlike, or nobody knows the samples of.
            DataflowError: other ranks did not call it within `timeout`.
        """
        resolve_name("dataflow.explain.skips:skip_steps")(self, steps)

    # ---- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the batches handed out end: a small JSON value, if a dataset's own state is one.

        Taken inside a loop after the last batch, it resumes to nothing more of that epoch; taken after the
        loop, to a new epoch. With any number of workers it resumes to the same order; with any number above
        0 of worker processes, if it was taken with processes, to the same random values in that epoch.
        """
        return with_checksum(self._engine.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop go on where `state_dict` was taken.

        Raises:
            ValueError: it is no state, was damaged or edited, or is inside an epoch of other data or other
                settings, where its position means other samples. Nothing has changed then. Between two
                epochs no position is meant: data, lengths and batching may be others.
        """
        fields, kinds = checked_fields(state), ("a map-style or iterable dataset", "shards")
        is_of_shards = "fingerprint" in fields
        if is_of_shards is not (self._stream is not None) and (is_of_shards or "kind" in fields):
            raise ValueError(
                f"the state is of a loader over {kinds[is_of_shards]}, and this one is over "
                f"{kinds[not is_of_shards]}: give it that dataset, or begin anew, without the state"
            )
        self._engine.load_state_dict(fields)

    @property
    def resumed(self) -> bool:
        """Return whether a state was loaded and no batch asked for since."""
        return self._engine.resumed

    # ---- what was delivered -------------------------------------------------------------------------

    def provenance(
        self, steps: int | Iterable[int], rank: int | None = None, keys: bool = True, accumulate: int = 1
    ) -> pa.Table:
        """Return which samples, or pieces, were in steps: the table that docs/guide/explain.md describes.

        Args:
            steps: one, or several: batches of all ranks together, counted since the training began.
            rank: only what this rank got, counted in the order in which ranks share out a batch.
            keys: whether keys are read, where samples have some; nothing else of the data is.
            accumulate: microbatches a rank of an optimizer step, whose numbers `steps` are then.

        Raises as `dataflow.provenance`, and `TypeError` for a loader over another dataset.
        """
        table = resolve_name("dataflow.explain.provenance:provenance_of_loader")
        return table(self, steps, rank, keys, accumulate)

    def batch_at(self, step: int, rank: int | None = None, world_size: int | None = None) -> Any:
        """Make the batch that a rank got in a step again, bit by bit. The loader stays where it is.

        Args:
            step: counted since the training began.
            rank: of `world_size` ranks; None: this one.
            world_size: ranks that share out the step's samples; None: as many as did.

        Raises as `provenance`, and as reading does.
        """
        return resolve_name("dataflow.explain.batch:batch_of_loader")(self, step, rank, world_size)

    def find(self, samples: Any, on: str = "__key__") -> pa.Table:
        """Return at which steps of this training samples were delivered, and when they come next.

        Arguments, table and errors are those of `dataflow.find`.
        """
        return resolve_name("dataflow.explain.find:find_of_loader")(self, samples, on)

    def account(self) -> dict[str, Any]:
        """Return counts and sums over what this rank got since the loader was made, or a state loaded.

        Save it with each checkpoint, one JSON file a rank: `dataflow.verify` adds them up. Raises as `find`.
        """
        account: dict[str, Any] = resolve_name("dataflow.explain.account:account_of_loader")(self)
        return account

    # ---- statistics ---------------------------------------------------------------------------------

    def health(self, limit_s: float = 600.0) -> LoaderHealth:
        """Return whether the loader is well, with a sentence about it: for health checks and logs.

        Args:
            limit_s: seconds without a batch after which a loop that runs is taken to hang.
        """
        entry: Callable[..., LoaderHealth] = resolve_name("dataflow.telemetry.timing.health:health_of_loader")
        return entry(self, limit_s)

    @property
    def name(self) -> str:
        """The name of this loader in metrics and `dataflow top`."""
        from dataflow.telemetry.status.names import name_of

        decided = "" if self._status is None else self._status.page.name_of(self._status)
        return decided or self._given_label[0] or name_of(self.dataset)

    @overload
    def stats(self: DataLoader[Sharded, B]) -> LoaderStats: ...
    @overload
    def stats(self) -> LoaderStats | WorkerStats: ...
    def stats(self) -> LoaderStats | WorkerStats:
        """Return how the loader fares: a `LoaderStats` over shards, otherwise a `WorkerStats`."""
        return self._engine.stats()

    @property
    def read_pause(self) -> ReadPause | None:
        """The pause that `GradSchedule` has remote reads make; None for local shards and other datasets."""
        return self._engine.read_pause

    # ---- end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End workers and threads. Batches handed out stay valid, and another loop may follow. Idempotent."""
        self._engine.close()
        if self._status is not None:
            self._status.closes()

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins with an epoch of its own, or where a loaded state says."""
        state = {**self.__dict__, "_iterator": None, "_status": None, "_is_observed": False}
        if self._stream is None:
            state["_drop_in"] = copy.copy(self._drop_in)
        return state

    def __copy__(self) -> Self:
        """A loader over the same dataset with loops of its own; over shards with an order of its own, too."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__getstate__())
        if self._stream is not None:
            stream, batches = copy.copy(self._stream), cast("Any", self.batch_sampler)
            order = cast("ShardOrder", self.sampler).over(stream)
            if getattr(batches, "sampler", None) is self.sampler:  # torch's, not one that was given
                batches = BatchSampler(order, batches.batch_size, batches.drop_last)
            other.__dict__.update(_stream=stream, sampler=order, batch_sampler=batches)
        return other

    def _shown(self) -> Iterator[Row]:
        if self._stream is not None:
            return self._stream.shown()
        sampler, workers = type(self.sampler).__name__, self.workers if self.num_workers else "main"
        batch_sampler = type(self.batch_sampler).__name__
        return iter(
            (
                ("over", _described_size(self.dataset)),
                ("batch size", str(self.batch_size) if self.batch_size is not None else ""),
                ("batch sampler", batch_sampler if self.batch_sampler is not None else ""),
                ("sampler", sampler if self.batch_size is not None else ""),
                ("built by", builders_text(workers, self.num_workers)),
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_INSTEAD_OF_SAMPLERS = "; dataset.balanced(by=..., weights=...) draws classes, dataset.subset(...) samples"
_DEFAULTS = {name: param.default for name, param in inspect.signature(DataLoader.__init__).parameters.items()}


def _described_size(dataset: Any) -> str:
    """Name the class of a dataset and its length, where it says one."""
    kind = type(dataset).__name__
    try:
        return f"{kind} of {len(dataset):,} samples"
    except Exception:  # of whoever wrote it
        return kind


def _checked_label(name: str | None, role: Role | None) -> tuple[str | None, Role | None]:
    """Return the name and the role that a loader is given. `ValueError` if they are none."""
    if role not in (None, "train", "validation"):
        raise ValueError(f'role must be "train" or "validation", got {role!r}')
    if name is not None:
        from dataflow.telemetry.status.names import checked_name

        name = checked_name(name)
    return name, role


def _refuse(why: str, arguments: Mapping[str, Any], cure: str = "") -> None:
    """Raise `ValueError` where an argument is not its default: each is None, a truth value or a number."""
    refused = [
        f"{name}="
        for name, value in arguments.items()
        if (value is not None if (default := _DEFAULTS[name]) is None else value != default)
    ]
    if refused:
        raise ValueError(f"{why}{', '.join(refused)} cannot be used here{cure}")
