"""One rank's batches of an epoch, and the state that resumes it.

A plan has an order, which tells where positions lie, and a `BatchPlan`, which tells what is dealt to this
rank.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from sharding.order.epoch_order import EpochOrder, Windows
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.batch_plan import BatchPlan, Dealing, Tail
from sharding.plan.difference import Facts, are_facts
from sharding.plan.history import PassedRange, ranges_from_json

_OPTIONAL = {"batching", "data", "passed", "sources", "weights"}
_AS_TEXT = ("batching", "weights", "data", "passed")
STATE_VERSION = 4
"""The order of version 1 had no lanes; in that of version 2 all epochs began with small windows; in that of
version 3 pieces of samples were carried from packing window to packing window, and what came before weights
that were set was forgotten."""


Passing = Callable[[BatchPlan], BatchPlan]
"""Leaves out what is passed over: see `sharding.plan.passing`."""


class RankPlan(ABC):
    """One rank's batches of one epoch, from `start` on. Batches count from 0 at `start`; thread-safe.

    What is dealt out are items: positions of the order, or units of samples (`UnitPlan`).
    """

    order: EpochOrder
    """The order in which the positions lie."""
    goes_on = False
    """True if more of the epoch is planned later: from `end` on."""
    _batch_plan: BatchPlan
    _passing: Passing | None = None

    def passing_over(self, passing: Passing) -> Self:
        """The same plan without some items: of the batches that `passing` makes of all."""
        other = copy.copy(self)
        other._passing, other._batch_plan = passing, passing(self._batch_plan)
        return other

    @property
    def batch_plan(self) -> BatchPlan:
        """Return which items each batch takes."""
        return self._batch_plan

    def positions(self, first_batch: int, last_batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions of the samples of this rank's batches [first_batch, last_batch).

        Returns:
            positions int64 [m], batch after batch, by lane within a batch, each in [0, num_samples); sizes
            int64 [batches], sum m.

        Raises `IndexError` unless 0 <= first_batch <= last_batch <= num_batches.
        """
        return self.batch_plan.items(first_batch, last_batch)

    @property
    def padding(self) -> NDArray[np.int64]:
        """Positions that this rank gets as padding, in its last batch, int64 [k]."""
        return self.batch_plan.padding

    @abstractmethod
    def rank_indices(self, window: int, windows: Windows | None = None) -> NDArray[np.int64] | None:
        """The indices of a window that this rank's batches take, ascending, int64 [j]; None for all.

        Padding, which comes back to the epoch's first windows, is left out. `windows` is the order unless
        given.
        """

    def batches_inside(self, window: int) -> range:
        """Full batches, over all ranks, that lie in a window of the order alone, as far as this is known."""
        return range(0)

    @property
    def start(self) -> int:
        """Items done before the first batch: a state's position."""
        return self.batch_plan.start

    @property
    def tail(self) -> Tail:
        """The rule for the last, incomplete global batch."""
        return self.batch_plan.tail

    @property
    def known_from(self) -> int:
        """The first item that is known, of which batches can be made; 0 but for some mixtures."""
        return self.order.known_from

    @property
    def num_batches(self) -> int:
        """Batches of this rank, none of them empty."""
        return self._batch_plan.num_batches  # asked for with each batch

    @property
    def num_steps(self) -> int:
        """See `BatchPlan.num_steps`."""
        return self.batch_plan.num_steps

    @property
    def num_global_batches(self) -> int:
        """Batches that at least one rank gets: the steps left in the epoch."""
        return self.batch_plan.num_global_batches

    @property
    def num_padded(self) -> int:
        """Items this rank gets a second time: the last ones of its last batch."""
        return self.batch_plan.num_padded

    @property
    def num_padded_global(self) -> int:
        """Items delivered a second time, over all ranks."""
        return self.batch_plan.num_padded_global

    @property
    def end(self) -> int:
        """The item after all batches, and what is passed over behind them."""
        dealt = self.batch_plan
        return min(dealt.num_items, dealt.start + dealt.num_steps_global * dealt.global_batch_size)

    def repeats(self, first_batch: int, last_batch: int) -> NDArray[np.bool_]:
        """Return which items of batches [first_batch, last_batch) fill the last one up again, bool [m]."""
        return self.batch_plan.repeats(first_batch, last_batch)

    def position_after(self, num_batches: int) -> int:
        """Items done once all ranks have taken `num_batches` batches: what a state saves.

        Raises `IndexError` unless 0 <= num_batches <= num_global_batches.
        """
        return self.batch_plan.position_after(num_batches)


class EpochPlan(RankPlan):
    """One rank's batches of an order's positions. Raises `ValueError` where an argument is out of range.

    Args:
        order: the epoch's.
        dealing: see `BatchPlan`; `start` is the global position of the first sample to deliver.
    """

    order: Order

    def __init__(self, order: Order, **dealing: Unpack[Dealing]) -> None:
        self.order = order
        self._batch_plan = BatchPlan(num_items=order.num_samples, num_lanes=order.num_lanes, **dealing)

    def rank_indices(self, window: int, windows: Windows | None = None) -> NDArray[np.int64] | None:
        """See `RankPlan.rank_indices`; each comes once. O(samples of the window that are this rank's)."""
        windows = windows or self.order
        positions = self.batch_plan.rank_items(*windows.window_span(window))
        if positions is None:
            return None
        numbers, indices = windows.locate(positions)
        return np.sort(indices[numbers == window])

    def batches_inside(self, window: int) -> range:
        """See `RankPlan.batches_inside`; the windows that a full shuffle is cut into are not the order's."""
        if self.order.shuffle.kind == "full":
            return range(0)
        return self.batch_plan.batches_within(*self.order.window_core(window))


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """The position of a run: enough to go on with any number of ranks.

    Constant in size (< 1 KB of JSON), but for some 50 bytes for each of up to 64 changes of weights.
    """

    seed: int
    epoch: int
    position: int
    """Global position: samples of this epoch that are done, in [0, num_samples]; units with a `batching`."""
    num_samples: int
    shuffle: Shuffle
    """The shuffle as `Order.shuffle` gives it, with nothing left open: other windows or lanes are another
    order."""
    fingerprint: str = ""
    """The identity of the block table, at most 128 printable ASCII characters; "" where nothing identifies
    it."""
    version: int = STATE_VERSION
    batching: Mapping[str, object] | None = None
    """The facts that decide the units of a length-aware plan (`UnitPlanner.token`); None: positions count
    samples."""
    sources: Sequence[int] | None = None
    """Samples that each source of a mixture gave before the epoch, where that follows from nothing else: by
    tokens, between two epochs, and once a mixture went on as another one."""
    weights: Mapping[str, object] | None = None
    """Weights that were set while a mixture ran, and since when (`WeightSteps`); None: its own."""
    data: Facts | None = None
    """Facts behind the fingerprint, for `differing` to name what differs; None: a state of before."""
    passed: Sequence[PassedRange] | None = None
    """Items that are passed over, of this epoch and others; None: none are."""

    def __post_init__(self) -> None:
        _check_version(self.version)
        if self.batching is not None and not isinstance(self.batching, Mapping):
            raise ValueError(f"batching must be an object or missing, got {self.batching!r}")
        if (counts := self.sources) is not None and not (
            isinstance(counts, Sequence) and all(type(v) is int and 0 <= v < 1 << 62 for v in counts)
        ):
            raise ValueError(f"sources must be integers >= 0 or missing, got {self.sources!r}")
        if self.weights is not None and not isinstance(self.weights, Mapping):
            raise ValueError(f"weights must be an object or missing, got {self.weights!r}")
        if self.data is not None and not are_facts(self.data):
            raise ValueError(f"data must be an object of facts or missing, got {self.data!r}")
        object.__setattr__(self, "passed", ranges_from_json(self.passed) or None)
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
        text = self.fingerprint
        if not isinstance(text, str) or len(text) > 128 or not (text.isascii() and text.isprintable()):
            raise ValueError(f"fingerprint must be at most 128 printable ASCII characters, got {text!r}")

    def to_json(self) -> dict[str, object]:
        """The state as JSON types, with the same keys whatever it holds.

        torch.distributed.checkpoint keeps each value of a mapping by itself, and loads those whose keys the
        loader's state has before it is loaded. So mappings (but for the shuffle) are JSON text here.
        """
        fields = asdict(self) | {"shuffle": self.shuffle.to_json()}
        pairs = ((name, getattr(self, name)) for name in _AS_TEXT)
        texts = {n: json.dumps(value, separators=(",", ":")) for n, value in pairs if value is not None}
        return fields | texts

    @classmethod
    def from_json(cls, value: object) -> PlanState:
        """The inverse of `to_json`. Raises `ValueError` naming the field that is wrong."""
        if not isinstance(value, Mapping):
            raise ValueError(f"a state must be an object, got {type(value).__name__}")
        _check_version(value.get("version"))  # first, since another version may have other fields
        names = {field.name for field in fields(cls)}
        if missing := sorted(names - _OPTIONAL - set(value)):
            raise ValueError(f"the state lacks {', '.join(missing)}")
        if unknown := sorted(set(value) - names, key=str):
            raise ValueError(f"the state has unknown fields: {', '.join(map(str, unknown))}")
        state = cast(Mapping[str, object], value)
        held = {name: _from_text(name, state.get(name)) for name in _AS_TEXT}
        return cls(**{**state, **held, "shuffle": Shuffle.from_json(state["shuffle"])})  # type: ignore[arg-type]


def _from_text(name: str, value: object) -> object:
    """A mapping or None; states of before have it as it is, not as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{name} must be JSON text or missing, got {value!r}") from error


def _check_version(version: object) -> None:
    if version != STATE_VERSION or type(version) is not int:
        raise ValueError(f"this is state version {version!r}, and only version {STATE_VERSION} can be read")
