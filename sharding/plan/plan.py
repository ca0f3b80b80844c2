"""Which positions of an epoch each rank gets in which batch, and the state that resumes it.

Global batch b holds positions [start + b*G, start + (b+1)*G) with G = batch_size * world_size. So what
forms global batch b depends on G alone, never on how many ranks, nodes or workers deliver it; and one
number, the position, resumes an epoch under any other G with nothing lost or repeated.

A batch lists its positions *by lane*, and rank r takes the r-th `batch_size` of them: the ranks' parts one
after the other are the same list for any world. Where the number of lanes divides G, each lane has the same
part of every batch; ranks (and nodes, which are runs of ranks) that divide the lanes then read whole lanes,
and no block twice. Otherwise a boundary between ranks falls inside a lane, whose blocks two ranks read:
`sharding.plan.placement` counts what that costs. With one lane, ranks take consecutive positions. All of it
is arithmetic on a few integers: no communication, O(G) memory.

The samples left over for the last, incomplete global batch follow the tail rule:
"drop" leaves them out, "pad" fills up with the epoch's first positions, "even" does so only until all ranks
have equal parts, so that the last batches are short, "uneven" shares them out as evenly as possible without
any, so that ranks may differ by one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields
from functools import lru_cache
from typing import Literal, Protocol, cast, get_args

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle

Tail = Literal["drop", "pad", "even", "uneven"]

STATE_VERSION = 2
"""Version 2 knows lanes; the order of version 1 had none."""


class Windows(Protocol):
    """Where the positions of an order lie."""

    def window_span(self, window: int) -> tuple[int, int]:
        """First position of the window, and the one after its last."""
        ...

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Window and slot of each position."""
        ...


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """One rank's batches of one epoch, from `start` on. Batches count from 0 at `start`; thread-safe.

    Raises `ValueError` where an argument is out of range.
    """

    order: Order
    _: KW_ONLY
    batch_size: int
    """Samples of one rank in a full batch."""
    rank: int
    """Place of this rank when ranks are listed rack by rack, node by node (`placement.seats`)."""
    world_size: int
    tail: Tail
    """What becomes of the last, incomplete global batch: "drop", "pad", "even" or "uneven"."""
    start: int = 0
    """Global position of the first sample to deliver, in [0, num_samples]: a state's position."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, world_size={self.world_size}), got {self.rank}")
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail must be one of {', '.join(get_args(Tail))}, got {self.tail!r}")
        if not 0 <= self.start <= self.order.num_samples:
            raise ValueError(f"start must be in [0, {self.order.num_samples}], got {self.start}")

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in a full batch."""
        return self.batch_size * self.world_size

    @property
    def num_global_batches(self) -> int:
        """Batches that at least one rank gets: the steps left in the epoch."""
        return self._num_full + (self._num_left > 0 and self.tail != "drop")

    @property
    def num_batches(self) -> int:
        """Batches of this rank, none of them empty."""
        return self._num_full + (self._last_share[1] > 0)

    @property
    def steps_agree(self) -> bool:
        """Whether all ranks have `num_global_batches` batches.

        False only under "uneven", where the last samples do not reach every rank.
        """
        return self.tail != "uneven" or not 0 < self._num_left < self.world_size

    @property
    def num_padded(self) -> int:
        """Samples this rank gets a second time: the last ones of its last batch."""
        return int(np.count_nonzero(self._last_batch >= self.order.num_samples)) if self._num_left else 0

    @property
    def num_padded_global(self) -> int:
        """Samples delivered a second time, over all ranks."""
        return max(0, self._last_size - self._num_left)

    @property
    def num_dropped_global(self) -> int:
        """Samples that no rank gets in this epoch."""
        return self._num_left if self.tail == "drop" else 0

    def positions(self, first_batch: int, last_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions of this rank in its batches [first_batch, last_batch).

        Returns:
            positions int64 [m], batch after batch, by lane within a batch, each in [0, num_samples); sizes
            int64 [batches], sum m.

        Raises `IndexError` unless 0 <= first_batch <= last_batch <= num_batches.
        """
        if not 0 <= first_batch <= last_batch <= self.num_batches:
            raise IndexError(f"batches [{first_batch}, {last_batch}) are not within [0, {self.num_batches})")
        sizes = np.full(last_batch - first_batch, self.batch_size, np.int64)
        positions = self._full_batches(first_batch, min(last_batch, self._num_full))
        if first_batch < last_batch and last_batch > self._num_full:
            last = self._last_batch % self.order.num_samples  # padding wraps
            sizes[-1] = len(last)
            positions = np.concatenate((positions, last))
        return positions, sizes

    def repeats(self, first_batch: int, last_batch: int) -> NDArray[np.bool_]:
        """Which of `positions(first_batch, last_batch)` fill the last batch up a second time, bool [m]."""
        flags = np.zeros(max(0, min(last_batch, self._num_full) - first_batch) * self.batch_size, bool)
        if first_batch < last_batch and last_batch > self._num_full:
            flags = np.concatenate((flags, self._last_batch >= self.order.num_samples))
        return flags

    def position_after(self, num_batches: int) -> int:
        """The global position once all ranks have taken `num_batches` batches: what a state saves.

        Raises `IndexError` unless 0 <= num_batches <= num_global_batches.
        """
        if not 0 <= num_batches <= self.num_global_batches:
            raise IndexError(f"num_batches must be in [0, {self.num_global_batches}], got {num_batches}")
        return min(self.order.num_samples, self.start + num_batches * self.global_batch_size)

    @property
    def padding(self) -> NDArray[np.int64]:
        """Positions that this rank gets as padding, in its last batch, int64 [num_padded]."""
        last = self._last_batch if self.num_padded else np.zeros(0, np.int64)
        return last[last >= self.order.num_samples] % self.order.num_samples

    def whole_lanes(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int] | None:
        """The lanes of which this rank takes the same share of every full batch, where it is so.

        Returns:
            lanes int64 [l], in the order in which a batch lists them; the depth int64 [l] in each at which
            `batch` begins; the samples of each that a batch takes. From batch to batch, depths grow by these.
        """
        lanes, group = self.order.num_lanes, self.global_batch_size
        each = group // lanes
        if group % lanes or self.batch_size % each:
            return None
        first = self.rank * self.batch_size // each
        own = np.arange(first, first + self.batch_size // each)
        begin = self.start + batch * group
        return own, -((own - begin) // lanes), each

    def batches_within(self, first: int, end: int) -> range:
        """The full batches whose positions, over all ranks, lie in [first, end)."""
        begin = -(-max(0, first - self.start) // self.global_batch_size)
        return range(begin, max(begin, min(self._num_full, (end - self.start) // self.global_batch_size)))

    def own_slots(self, window: int, windows: Windows | None = None) -> NDArray[np.int64] | None:
        """The slots of a window that this rank's batches take, ascending, each once, int64 [j]; None for all.

        Padding, which comes back to the epoch's first windows, is left out. `windows` is the order unless
        given. Costs O(samples of the window that are this rank's); nothing where one rank takes everything.
        """
        windows = windows or self.order
        first, end = windows.window_span(window)
        done = self.start + self._num_full * self.global_batch_size
        if (
            self.world_size == 1
            and self.start <= first
            and end <= (done if self.tail == "drop" else self.order.num_samples)
        ):
            return None
        begin = max(0, (first - self.start) // self.global_batch_size)
        stop = min(self._num_full, max(begin, -(-(end - self.start) // self.global_batch_size)))
        positions = self._full_batches(begin, stop)
        if end > done and self._last_share[1]:
            last = self._last_batch
            positions = np.concatenate((positions, last[last < self.order.num_samples]))
        found, slots = windows.locate(positions)
        return np.sort(slots[found == window])

    @property
    def _num_full(self) -> int:
        return (self.order.num_samples - self.start) // self.global_batch_size

    @property
    def _num_left(self) -> int:
        return (self.order.num_samples - self.start) % self.global_batch_size

    @property
    def _last_size(self) -> int:
        """Samples of all ranks in the incomplete global batch, padding included; 0 where there is none."""
        left = self._num_left
        if not left or self.tail == "drop":
            return 0
        if self.tail == "pad":
            return self.global_batch_size
        return -(-left // self.world_size) * self.world_size if self.tail == "even" else left

    @property
    def _last_share(self) -> tuple[int, int]:
        """First and size of this rank's part of the incomplete global batch, by lane; size 0 for none."""
        each, extra = divmod(self._last_size, self.world_size)
        return self.rank * each + min(self.rank, extra), each + (self.rank < extra)

    @cached_property
    def _last_batch(self) -> NDArray[np.int64]:
        """Positions of this rank in the incomplete global batch; padding lies beyond the epoch."""
        first, size = self._last_share
        begin = self.start + self._num_full * self.global_batch_size
        return np.array(begin + self._shares(np.array([begin]), self._last_size, first, size)[0])

    def _full_batches(self, first_batch: int, last_batch: int) -> NDArray[np.int64]:
        """Positions of this rank in complete global batches, one after the other."""
        if first_batch >= last_batch:
            return np.empty(0, np.int64)
        begin = self.start + np.arange(first_batch, last_batch) * self.global_batch_size
        shares = self._shares(begin, self.global_batch_size, self.rank * self.batch_size, self.batch_size)
        return (begin[:, None] + shares).reshape(-1)

    def _shares(self, begin: NDArray[np.int64], size: int, first: int, count: int) -> NDArray[np.int64]:
        """Offsets in batches of `size` that begin at these positions: `count` from the `first` by lane."""
        lanes = self.order.num_lanes
        # A batch's lanes depend on the lane it begins in: one and the same if the lanes divide the batch.
        phases, which = np.unique(begin % lanes, return_inverse=True)
        shares = [_share_by_lane(phase, size, lanes, first, count) for phase in phases.tolist()]
        stacked: NDArray[np.int64] = np.stack(shares)[which]
        return stacked


@lru_cache(maxsize=64)
def _share_by_lane(phase: int, size: int, num_lanes: int, first: int, count: int) -> NDArray[np.int64]:
    """Offsets in a batch of `size` from lane `phase` on: `count` from the `first` by lane."""
    if num_lanes == 1:
        share = np.arange(first, first + count)
    else:
        lanes = (np.arange(phase, phase + size) % num_lanes).astype(np.uint16)
        share = np.argsort(lanes, kind="stable")[first : first + count].copy()
    share.setflags(write=False)
    return share


@dataclass(frozen=True)
class PlanState:
    """Where a run stands: enough to go on with any number of ranks, constant in size (< 1 KB of JSON)."""

    seed: int
    epoch: int
    position: int
    """Global position: samples of this epoch that are done, in [0, num_samples]; units with a `batching`."""
    num_samples: int
    shuffle: Shuffle
    """As `Order.shuffle` gives it, with nothing left open: other windows or lanes are another order."""
    fingerprint: str = ""
    """What identifies the block table, at most 128 printable ASCII characters; "" where nothing does."""
    version: int = STATE_VERSION
    batching: Mapping[str, object] | None = None
    """What decides the units of a length-aware plan (`UnitPlanner.mark`); None: positions count samples."""

    def __post_init__(self) -> None:
        _check_version(self.version)
        if self.batching is not None and not isinstance(self.batching, Mapping):
            raise ValueError(f"batching must be an object or missing, got {self.batching!r}")
        for name in ("seed", "epoch", "position", "num_samples"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be an integer, got {getattr(self, name)!r}")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        if not 0 <= self.epoch < 1 << 63:
            raise ValueError(f"epoch must be >= 0 and fit 63 bits, got {self.epoch}")
        # Samples that are split are in several units, so only the plan knows how many units there are.
        most = self.num_samples if self.batching is None else (1 << 63) - 1
        if not 0 <= self.num_samples < 1 << 63 or not 0 <= self.position <= most:
            raise ValueError(f"position must be in [0, num_samples={self.num_samples}], got {self.position}")
        if not isinstance(self.shuffle, Shuffle):
            raise ValueError(f"shuffle must be a Shuffle, got {self.shuffle!r}")
        mark = self.fingerprint
        if not isinstance(mark, str) or len(mark) > 128 or not (mark.isascii() and mark.isprintable()):
            raise ValueError(f"fingerprint must be at most 128 printable ASCII characters, got {mark!r}")

    def to_json(self) -> dict[str, object]:
        """The state as JSON types; `batching` only where there is one."""
        fields = asdict(self) | {"shuffle": self.shuffle.to_json()}
        return fields if self.batching is not None else {k: v for k, v in fields.items() if k != "batching"}

    @classmethod
    def from_json(cls, value: object) -> PlanState:
        """The inverse of `to_json`. Raises `ValueError` naming the field that is wrong."""
        if not isinstance(value, Mapping):
            raise ValueError(f"a state must be an object, got {type(value).__name__}")
        _check_version(value.get("version"))  # first, since another version may have other fields
        names = {field.name for field in fields(cls)}
        if missing := sorted(names - {"batching"} - set(value)):
            raise ValueError(f"the state lacks {', '.join(missing)}")
        if unknown := sorted(set(value) - names, key=str):
            raise ValueError(f"the state has unknown fields: {', '.join(map(str, unknown))}")
        known = cast(Mapping[str, object], value)
        return cls(**{**known, "shuffle": Shuffle.from_json(known["shuffle"])})  # type: ignore[arg-type]


def _check_version(version: object) -> None:
    if version != STATE_VERSION or type(version) is not int:
        raise ValueError(f"this is state version {version!r}, and only version {STATE_VERSION} can be read")
