"""Define the shuffle of an epoch: the value a user gives, a loader fills in and a state keeps.

Everything in a `Shuffle` is part of the order, and nothing in it may depend on the world: the number of
lanes is a constant unless the user says otherwise, so that one machine and forty see the same batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from typing import Literal, get_args

Kind = Literal["window", "full", "blocks", "none"]

DEFAULT_WINDOW_BLOCKS = 512
"""Blocks mixed together where nobody says: trains like a full shuffle in published comparisons."""
DEFAULT_CANONICAL_NODES = 8
"""Lanes where nobody says: one block of each is what the first window of an epoch holds anyway, so a single
machine pays nothing for them, and up to eight nodes (or ranks) read no block twice."""
_MOST_LANES = 1 << 12


@dataclass(frozen=True)
class Shuffle:
    """The shuffle of an epoch: `DataLoader(dataset, shuffle=Shuffle("window", window_blocks=256))`.

    `shuffle=True` is `Shuffle()`. More blocks in a window mix better, hold more memory, and delay the first
    batch; docs/guide/order.md helps to choose.

    Args:
        kind: "window": blocks in a seeded permutation, samples mixed inside windows of about `window_blocks`
            blocks. "full": any sample anywhere, at one read per sample. "blocks": blocks in a seeded
            permutation, the samples of a block in file order. "none": everything in file order.
        window_blocks: blocks in a window of all lanes; None leaves it to the loader. More mixes better and
            holds more memory. Under "blocks" and "none" with one lane it only groups reads; "full" has no
            windows.
        canonical_nodes: lanes: sequences of blocks that advance side by side, sample by sample, each for one
            node (or rank) to read. A number of nodes that divides it reads every block once; see
            `sharding.plan.placement`. None: 8 under "window" (less where a window has fewer blocks), 1 under
            "blocks" and "none". With more than one, "none" is file order within each lane.
        exchange: share of the blocks that may change lane from one epoch to the next. 1: all are dealt anew.
            0: a node keeps its blocks, and its cache. The order inside a lane is new in every epoch.
        ramp: True if epoch 0 begins with small windows (8, 16, 32 ... blocks), so that the first batch of a
            training waits for few reads. They mix little, so later epochs have none; under "blocks" and
            "none" windows mix nothing, and every epoch has them. A number: blocks of the first one, also
            where the dataset fits into one window, which has none with True. None: only where the loader
            chooses `window_blocks`; it takes 8 where that one window holds more than 32 MiB.
        source_windows: blocks in a window of each source of a mixture, where the loader chooses them; () for
            `window_blocks`. A source behind the last one has `window_blocks`.

    Raises:
        ValueError: values that contradict each other, or are out of range.

    Examples:
        >>> dataset = ShardedDataset("tokens/*.parquet")
        >>> with DataLoader(dataset, batch_size=4, shuffle=Shuffle("full"), seed=1) as loader:
        ...     sum(len(batch["tokens"].lengths) for batch in loader)
        8
    """

    kind: Kind = "window"
    window_blocks: int | None = None
    canonical_nodes: int | None = None
    exchange: float = 1.0
    _: KW_ONLY
    ramp: bool | int | None = None
    source_windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"shuffle kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        _check_count("window_blocks", self.window_blocks, (1 << 31) - 1)
        _check_count("canonical_nodes", self.canonical_nodes, _MOST_LANES)
        share = self.exchange
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"exchange must be a number in [0, 1], got {share!r}")
        if type(self.ramp) is int:
            _check_count("ramp", self.ramp, (1 << 31) - 1, 2)
        elif self.ramp is not None and type(self.ramp) is not bool:
            raise ValueError(f"ramp must be True, False, None or a number of blocks, got {self.ramp!r}")
        if not isinstance(self.source_windows, tuple):
            raise ValueError(f"source_windows must be a tuple of integers, got {self.source_windows!r}")
        for blocks in self.source_windows:
            _check_count("source_windows", blocks, (1 << 31) - 1)
        settings = (self.window_blocks, self.canonical_nodes, share, self.ramp, self.source_windows)
        if self.kind == "full" and settings != (None, None, 1, None, ()):
            raise ValueError(f"a full shuffle has no windows and no lanes: only a kind is given, got {self}")
        if self.kind == "none" and share != 1:
            raise ValueError("file order deals the same blocks to the same lanes: leave exchange out")
        if self.window_blocks is not None and self.window_blocks < (self.canonical_nodes or 1):
            raise ValueError(
                f"window_blocks must be >= canonical_nodes={self.canonical_nodes}, since a window holds a "
                f"block of every lane, got {self.window_blocks}"
            )

    @property
    def num_lanes(self) -> int:
        """`canonical_nodes`, and 1 where there is none."""
        return self.canonical_nodes or 1

    @property
    def is_file_order(self) -> bool:
        """Return whether positions are the samples' numbers; lanes keep file order in each lane only."""
        return self.kind == "none" and self.num_lanes == 1

    def ramp_in(self, epoch: int) -> int:
        """The `ramp` of an epoch, False for none, of a shuffle with nothing left open."""
        return (epoch == 0 or self.kind != "window") and (self.ramp or False)

    def of_source(self, source: int) -> Shuffle:
        """The order of one source of a mixture, by its number, of a shuffle with nothing left open."""
        if source >= len(self.source_windows):
            return replace(self, source_windows=())
        blocks = max(self.source_windows[source], self.num_lanes)
        return replace(self, window_blocks=blocks, source_windows=())

    def resolved(self, window_blocks: int = DEFAULT_WINDOW_BLOCKS) -> Shuffle:
        """The same with nothing left open: what a state keeps, and a resume must use to get the same order.

        Args:
            window_blocks: used where the shuffle has none; raised to one block a lane.
        """
        if self.kind == "full":
            return self
        window = self.window_blocks or max(window_blocks, self.num_lanes)
        ramp = self.window_blocks is None if self.ramp is None else self.ramp
        lanes = self.canonical_nodes
        if lanes is None:
            # A power of two divides most batches, and the usual numbers of ranks divide it.
            most = 1 << (window.bit_length() - 1)
            lanes = min(DEFAULT_CANONICAL_NODES, most) if self.kind == "window" else 1
        return replace(self, window_blocks=window, canonical_nodes=lanes, ramp=ramp)

    def to_json(self) -> dict[str, object]:
        """The value as JSON types."""
        settings = {"exchange": float(self.exchange), "source_windows": list(self.source_windows)}
        return asdict(self) | settings

    @classmethod
    def from_json(cls, value: object) -> Shuffle:
        """The inverse of `to_json`. Raises `ValueError` saying what is wrong."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise ValueError(f"a shuffle must be an object with {', '.join(sorted(names))}, got {value!r}")
        windows = value["source_windows"]
        return cls(**{**value, "source_windows": tuple(windows) if isinstance(windows, list) else windows})


def _check_count(name: str, value: object, most: int, least: int = 1) -> None:
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ValueError(f"{name} must be an integer in [{least}, {most}], got {value!r}")
