"""Deal a row of numbered items to the batches of ranks: arithmetic on a few integers.

Items are what is dealt out: the positions of an epoch's order, or the units of length-aware batches. Global
batch b holds items [start + b*G, start + (b+1)*G) with G = batch_size * world_size. So what forms global
batch b depends on G alone, never on how many ranks, nodes or workers deliver it; and one number, the items
done, resumes an epoch under any other G with nothing lost or repeated.

A batch lists its items *by lane*, and rank r takes the r-th `batch_size` of them: the ranks' parts one after
the other are the same list for any world. Where the number of lanes divides G, each lane has the same part
of every batch; ranks (and nodes, which are runs of ranks) that divide the lanes then read whole lanes, and no
block twice. Otherwise a boundary between ranks falls inside a lane, whose blocks two ranks read:
`sharding.plan.placement` counts what that costs. With one lane, ranks take consecutive items. No
communication, O(G) memory.

The items left over for the last, incomplete global batch follow the tail rule:
"drop" leaves them out, "pad" fills up with the epoch's first items, "even" does so only until all ranks have
equal parts, so that the last batches are short, "uneven" shares them out as evenly as possible without any,
so that ranks may differ by one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NotRequired, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from sharding.cached_property import cached_property

Tail = Literal["drop", "pad", "even", "uneven"]


class Dealing(TypedDict):
    """The rule by which items are dealt to ranks, as keywords: see the fields of `BatchPlan`."""

    batch_size: int
    rank: int
    world_size: int
    tail: Tail
    start: NotRequired[int]


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchPlan:
    """One rank's batches of numbered items, from `start` on. Batches count from 0 at `start`; thread-safe.

    Raises `ValueError` where an argument is out of range.
    """

    num_items: int
    """Items are numbered from 0 to this."""
    batch_size: int
    """Items of one rank in a full batch."""
    rank: int
    """The shard index of this rank: ranks are listed rack by rack, node by node
    (`placement.shard_indices`)."""
    world_size: int
    tail: Tail
    """The rule for the last, incomplete global batch: "drop", "pad", "even" or "uneven"."""
    start: int = 0
    """First item to deliver, in [0, num_items]."""
    num_lanes: int = 1
    """Item i is of lane `i % num_lanes`."""
    wraps: bool = True
    """The last batch is filled up with the first items of all; False: with its own first ones."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, world_size={self.world_size}), got {self.rank}")
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail must be one of {', '.join(get_args(Tail))}, got {self.tail!r}")
        if not 0 <= self.start <= self.num_items:
            raise ValueError(f"start must be in [0, {self.num_items}], got {self.start}")

    # What follows from the fields alone is asked for with every batch, so it is kept.

    @cached_property
    def global_batch_size(self) -> int:
        """Items of all ranks in a full batch."""
        return self.batch_size * self.world_size

    @cached_property
    def num_global_batches(self) -> int:
        """Batches that at least one rank gets: the steps left in the epoch."""
        return self.num_full + (self._num_left > 0 and self.tail != "drop")

    @cached_property
    def num_batches(self) -> int:
        """Batches of this rank, none of them empty."""
        return self.num_full + (self._last_share[1] > 0)

    @property
    def num_steps(self) -> int:
        """Batches of this rank, and those that are passed over: see `sharding.plan.passing`."""
        return self.num_batches

    @property
    def num_steps_global(self) -> int:
        """Batches that at least one rank gets, and those that are passed over."""
        return self.num_global_batches

    def steps_after(self, num_batches: int) -> int:
        """Global batches that are done once `num_batches` were taken: those passed over before count."""
        return num_batches

    def end_of(self, num_batches: int) -> int:
        """The item after so many full batches, of all ranks."""
        return self.start + self.steps_after(num_batches) * self.global_batch_size

    @cached_property
    def num_full(self) -> int:
        """Return the number of complete global batches."""
        return (self.num_items - self.start) // self.global_batch_size

    @property
    def num_padded(self) -> int:
        """Items this rank gets a second time: the last ones of its last batch."""
        return int(np.count_nonzero(self._last_batch >= self.num_items)) if self._num_left else 0

    @property
    def num_padded_global(self) -> int:
        """Items delivered a second time, over all ranks."""
        return max(0, self._last_size - self._num_left)

    def items(self, first_batch: int, last_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Items of this rank in its batches [first_batch, last_batch).

        Returns:
            items int64 [m], batch after batch, by lane within a batch, each in [0, num_items); sizes int64
            [batches], sum m.

        Raises `IndexError` unless 0 <= first_batch <= last_batch <= num_batches.
        """
        if not 0 <= first_batch <= last_batch <= self.num_batches:
            raise IndexError(f"batches [{first_batch}, {last_batch}) are not within [0, {self.num_batches})")
        sizes = np.full(last_batch - first_batch, self.batch_size, np.int64)
        items = self._full_batches(first_batch, min(last_batch, self.num_full))
        if first_batch < last_batch and last_batch > self.num_full:
            last = self._once(self._last_batch)
            sizes[-1] = len(last)
            items = np.concatenate((items, last))
        return items, sizes

    def repeats(self, first_batch: int, last_batch: int) -> NDArray[np.bool_]:
        """Return which of `items(first_batch, last_batch)` fill the last batch up a second time, bool [m]."""
        flags = np.zeros(max(0, min(last_batch, self.num_full) - first_batch) * self.batch_size, bool)
        if first_batch < last_batch and last_batch > self.num_full:
            flags = np.concatenate((flags, self._last_batch >= self.num_items))
        return flags

    def position_after(self, num_batches: int) -> int:
        """The items done once all ranks have taken `num_batches` batches: what a state saves.

        Raises `IndexError` unless 0 <= num_batches <= num_global_batches.
        """
        if not 0 <= num_batches <= self.num_global_batches:
            raise IndexError(f"num_batches must be in [0, {self.num_global_batches}], got {num_batches}")
        return min(self.num_items, self.end_of(num_batches))

    @property
    def padding(self) -> NDArray[np.int64]:
        """Items that this rank gets as padding, in its last batch, int64 [num_padded]."""
        last = self._last_batch if self.num_padded else np.zeros(0, np.int64)
        return self._once(last[last >= self.num_items])

    def _once(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return items as they are numbered; those beyond the last fill up."""
        begin = 0 if self.wraps else self.start + self.num_full * self.global_batch_size
        again = begin + items % self.num_items % max(1, self.num_items - begin)
        return np.where(items < self.num_items, items, again)

    @property
    def rank_tail(self) -> NDArray[np.int64]:
        """Items of this rank in the incomplete global batch, padding left out, int64 [k]."""
        return self._last_batch[self._last_batch < self.num_items]

    def rank_items(self, first: int, end: int) -> NDArray[np.int64] | None:
        """The items in [first, end) that this rank's batches take, padding left out, int64 [j]; None for all.

        Costs O(end - first) for this rank's share; nothing where one rank takes everything.
        """
        done = self.start + self.num_full * self.global_batch_size
        delivered = done if self.tail == "drop" else self.num_items
        if self.world_size == 1 and self.start <= first and end <= delivered:
            return None
        begin = max(0, (first - self.start) // self.global_batch_size)
        stop = min(self.num_full, max(begin, -(-(end - self.start) // self.global_batch_size)))
        items = self._full_batches(begin, stop)
        if end > done:
            items = np.concatenate((items, self.rank_tail))
        inside: NDArray[np.bool_] = (items >= first) & (items < end)
        return items[inside]

    def whole_lanes(self, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int] | None:
        """The lanes of which this rank takes the same share of every full batch, where it is so.

        Returns:
            lanes int64 [l], in the order in which a batch lists them; the depth int64 [l] in each at which
            `batch` begins; the items of each that a batch takes. From batch to batch, depths grow by these.
        """
        lanes, group = self.num_lanes, self.global_batch_size
        each = group // lanes
        if group % lanes or self.batch_size % each:
            return None
        first = self.rank * self.batch_size // each
        local_lanes = np.arange(first, first + self.batch_size // each)
        begin = self.start + batch * group
        return local_lanes, -((local_lanes - begin) // lanes), each

    def batches_within(self, first: int, end: int) -> range:
        """The full batches whose items, over all ranks, lie in [first, end)."""
        begin = -(-max(0, first - self.start) // self.global_batch_size)
        return range(begin, max(begin, min(self.num_full, (end - self.start) // self.global_batch_size)))

    @property
    def _num_left(self) -> int:
        return (self.num_items - self.start) % self.global_batch_size

    @property
    def _last_size(self) -> int:
        """Items of all ranks in the incomplete global batch, padding included; 0 where there is none."""
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
        """Items of this rank in the incomplete global batch; padding has numbers beyond the last item."""
        first, size = self._last_share
        if not size:
            return np.zeros(0, np.int64)
        begin = self.start + self.num_full * self.global_batch_size
        return np.array(begin + self._shares(np.array([begin]), self._last_size, first, size)[0])

    def _full_batches(self, first_batch: int, last_batch: int) -> NDArray[np.int64]:
        """Items of this rank in complete global batches, one after the other."""
        if first_batch >= last_batch:
            return np.empty(0, np.int64)
        begin = self.start + np.arange(first_batch, last_batch) * self.global_batch_size
        shares = self._shares(begin, self.global_batch_size, self.rank * self.batch_size, self.batch_size)
        return (begin[:, None] + shares).reshape(-1)

    def _shares(self, begin: NDArray[np.int64], size: int, first: int, count: int) -> NDArray[np.int64]:
        """Offsets in batches of `size` that begin at these items: `count` from the `first` by lane.

        [batches, count], or [1, count] where all have the same.
        """
        # A batch's lanes depend on the lane it begins in: one and the same if the lanes divide the batch.
        if self.global_batch_size % self.num_lanes == 0:
            return _share_by_lane(int(begin[0]) % self.num_lanes, size, self.num_lanes, first, count)[None]
        lanes, which = np.unique(begin % self.num_lanes, return_inverse=True)
        shares = [_share_by_lane(lane, size, self.num_lanes, first, count) for lane in lanes.tolist()]
        stacked: NDArray[np.int64] = np.stack(shares)[which]
        return stacked


@lru_cache(maxsize=64)
def _share_by_lane(lane: int, size: int, num_lanes: int, first: int, count: int) -> NDArray[np.int64]:
    """Offsets in a batch of `size` whose first item is of `lane`: `count` from the `first` by lane."""
    if num_lanes == 1:
        share = np.arange(first, first + count)
    else:
        lanes = (np.arange(lane, lane + size) % num_lanes).astype(np.uint16)
        share = np.argsort(lanes, kind="stable")[first : first + count].copy()
    share.setflags(write=False)
    return share
