"""The settings of a `DataLoader` over shards: one value, from its arguments to its threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch

from prefetch.control.depth import DepthPolicy, fixed_depth
from sharding.lengths.batching import Batching
from sharding.order.shuffle import Shuffle
from sharding.plan.batch_plan import Tail
from sharding.plan.history import StepRange
from sharding.topology.topology import Topology

_TIMEOUT_S = 600.0
CHECKED_STEPS = "sharding.plan.passing:checked_steps"
PASSING = "sharding.plan.passing:passing"
WITH_STEPS = "dataflow.explain.skips:with_steps"
TRANSFORMED = "dataflow.explain.batch:facts_of_transforms"
"""Steps that are passed over, facts of transforms: outside the core, and imported where there are some."""


def checked_context(given: Any) -> BaseContext:
    """Return the context that `multiprocessing_context=` means. Raises as torch does for what is none."""
    if isinstance(given, str):
        if given not in (valid := torch.multiprocessing.get_all_start_methods()):
            raise ValueError(
                f"multiprocessing_context option should specify a valid start method in {valid!r}, but got "
                f"multiprocessing_context={given!r}"
            )
        given = torch.multiprocessing.get_context(given)
    if not isinstance(given, BaseContext):
        raise TypeError(
            "multiprocessing_context option should be a valid context object or a string specifying the "
            f"start method, but got multiprocessing_context={given}"
        )
    return given


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """The arguments of `DataLoader` that shape a stream. Raises `ValueError` for values that are none."""

    batch_size: int = 1
    """Samples per batch and rank; with `batching=Packed(...)` rows."""
    shuffle: bool | Shuffle | None = None
    """None or False: file order, so that the ranks' batches, put together rank by rank, are the samples as
    the files have them; True: a windowed shuffle; or a `Shuffle`."""
    drop_last: bool = False
    """Leave out the last, incomplete global batch (the same as `tail="drop"`)."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Samples -> batch; None stacks columns (or torch's `default_collate` after a transform)."""
    timeout: float = 0
    """Seconds to wait for one batch; 0: 600."""
    seed: int = 0
    """Any 64-bit integer; with the epoch it decides order and augmentation."""
    topology: Topology | None = None
    """This rank's topology; None: torch.distributed if initialised, else the environment."""
    device: str | torch.device | None = None
    """The device of batches; None, "cpu": host memory. "cuda": page-locked slots, copied on a side stream."""
    memory_limit: int | str | None = None
    """Bytes, or text such as "2GB", that the loader may hold; None: 1 GiB or an eighth of the memory of the
    machine (or its cgroup) per local rank, whichever is less, but what the windows of a shuffle need."""
    tail: Tail | None = None
    """The rule for the last, incomplete global batch: "drop"; "pad" (filled up with the epoch's first
    samples); "even" (equal short parts: filled up only to a multiple of the ranks); "uneven" (shared out as
    it is, so that ranks may differ by a step). None: "drop" if drop_last, else "uneven" in one process and
    "even" with several."""
    depth: int | DepthPolicy | None = None
    """Batches kept ready: an int, a `DepthPolicy`, or None: 4 over local shards, and over remote ones what
    `AdaptiveDepth` decides (docs/notes/control.md)."""
    num_workers: int | None = None
    """Builders of batches on this rank, all sources together. 0: batches are built when they are asked for,
    by who asks; blocks are read ahead all the same. None: as many as this rank has cores."""
    workers: Literal["process", "thread", "auto"] | None = None
    """The kind of builders. "process"; "thread"; "auto": processes where functions may hold the interpreter
    lock, else threads (docs/guide/workers.md has the rule). None:
    "process" where `num_workers` is given, else "auto". Batches that are copies alone are made by threads of
    compiled code all the same, which hold no lock."""
    max_worker_restarts: int = 3
    """Builder processes that are replaced when they die, each with a warning, and their batches built again.
    One more that dies, or a second one on the same batches, is an error; 0: the first one is."""
    worker_init_fn: Callable[[int], Any] | None = None
    """Called in each builder, then a process, with its number, before its first chunk. Seeds that it sets do
    not last: generators are seeded for each sample."""
    multiprocessing_context: Any = None
    """The start of builders, which are processes then: a context of `multiprocessing`, or its name; None: as
    `multiprocessing` says."""
    builders: Literal["ray"] | None = None
    """"ray": builders are actors of a Ray cluster, `num_workers` of them; where that is None, as many as this
    rank's part of the cluster has CPUs."""
    ship_blocks: bool = False
    """True if the training process reads for such actors, and sends them values; else they read."""
    batching: Batching | None = None
    """`Packed(...)`, `TokenBudget(...)` or `Bucketed(...)`: batches by the lengths of samples, which are
    measured on the way where a `transform` makes them. See docs/guide/batching.md."""
    pin_memory: bool = False
    """Build batches in page-locked memory, where there is CUDA."""
    mark_repeats: bool = False
    """Add a column "__repeat__" to each batch, bool [samples] ([rows] with `Packed`): what the tail rule
    delivers a second time. After `collate_fn` and transforms, whose result must be a dict."""

    skip_steps: Sequence[StepRange] = ()
    """Steps since the training began, (first, the one after the last), that are passed over."""

    def __post_init__(self) -> None:
        if not self.timeout >= 0:
            raise ValueError(f"timeout must be >= 0 seconds, got {self.timeout}")
        if self.multiprocessing_context is not None:
            context = checked_context(self.multiprocessing_context)
            object.__setattr__(self, "multiprocessing_context", context)
        self._check_workers()
        if isinstance(self.shuffle, str):
            raise ValueError(
                f"shuffle must be True, False, None or a Shuffle; for {self.shuffle!r} give "
                f"Shuffle({self.shuffle!r})"
            )
        if self.drop_last and self.tail not in (None, "drop"):
            raise ValueError(f'drop_last=True means tail="drop", and tail is {self.tail!r}: give one of them')
        device = self.torch_device
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"device must be a CPU or CUDA device, got {device}; copy batches to it yourself"
            )
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device}, but torch sees no CUDA device")
        _ = self.depth_policy  # raises for a depth that is none

    @property
    def is_pinned(self) -> bool:
        """Return whether batches are made in page-locked memory."""
        return self.torch_device.type == "cuda" or (self.pin_memory and torch.cuda.is_available())

    def _check_workers(self) -> None:
        if self.num_workers is not None and self.num_workers < 0:
            raise ValueError(
                f"num_workers must be >= 0, got {self.num_workers}; None: as many as there are cores"
            )
        if self.workers not in (None, "process", "thread", "auto"):
            raise ValueError(f'workers must be "process", "thread" or "auto", got {self.workers!r}')
        if self.num_workers == 0 and self.workers is not None:
            raise ValueError(
                f"num_workers=0 builds batches where they are asked for, without workers={self.workers!r}"
            )
        if self.builders not in (None, "ray"):
            raise ValueError(f'builders must be "ray" or None, got {self.builders!r}')
        if self.ship_blocks and self.builders is None:
            raise ValueError(
                'ship_blocks=True is for builders="ray": other builders are given what was read here'
            )
        if self.builders == "ray" and (self.num_workers == 0 or self.workers is not None):
            raise ValueError(
                'builders="ray" takes num_workers=, None or above 0, for the number of its actors, and no '
                "workers="
            )
        if self.max_worker_restarts < 0:
            raise ValueError(f"max_worker_restarts must be >= 0, got {self.max_worker_restarts}")

        if self.asks_for_processes:
            refused = {
                "num_workers=0": self.num_workers == 0,
                f"workers={self.workers!r}": self.workers not in (None, "process"),
                f"builders={self.builders!r}": self.builders is not None,
            }
            if names := [name for name, is_given in refused.items() if is_given]:
                raise ValueError(
                    "worker_init_fn and multiprocessing_context are for builders that are processes of this "
                    f"machine, and {names[0]} asks for others: leave one of them out"
                )

    def warn_of_another_order(self, seed: int, kind: str) -> None:
        """Say which settings a loaded state replaces. Nobody can tell a default that was given."""
        pairs = []
        if self.seed not in (0, seed):
            pairs.append((f"seed={self.seed}", f"seed={seed}"))
        if self.shuffle is not None and self.order.kind != kind:
            pairs.append((f"shuffle {self.order.kind!r}", f"shuffle {kind!r}"))
        if pairs:
            here, there = (" and ".join(names) for names in zip(*pairs, strict=True))
            warnings.warn(
                f"this loader was given {here}, and goes on with {there} of the loaded state, in which its "
                "position means the samples that come next; for another order begin anew, without the state",
                stacklevel=4,
            )

    @property
    def asks_for_processes(self) -> bool:
        """Return whether something is given that only processes of this machine have."""
        return self.worker_init_fn is not None or self.multiprocessing_context is not None

    @property
    def torch_device(self) -> torch.device:
        """The device that batches go to."""
        return torch.device("cpu" if self.device is None else self.device)

    @property
    def order(self) -> Shuffle:
        """The shuffle, its windows maybe not sized yet."""
        shuffle = self.shuffle
        return shuffle if isinstance(shuffle, Shuffle) else Shuffle("window" if shuffle else "none")

    @property
    def depth_policy(self) -> DepthPolicy | None:
        """The policy that decides how many batches are kept ready; None: what suits the store."""
        return fixed_depth(self.depth) if isinstance(self.depth, int) else self.depth

    @property
    def timeout_s(self) -> float:
        """Seconds to wait for one batch."""
        return self.timeout or _TIMEOUT_S

    def tail_on(self, topology: Topology) -> Tail:
        """Return what happens to the last, incomplete global batch of this many ranks."""
        if self.tail is not None:
            return self.tail
        if self.drop_last:
            return "drop"
        return "even" if topology.data_world_size > 1 else "uneven"
