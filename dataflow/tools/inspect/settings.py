"""The options of `dataflow inspect`: the plan that it looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import click

from dataflow.tools.terminal.options import COUNT, SIZE, option

if TYPE_CHECKING:
    from sharding.order.shuffle import Shuffle
    from sharding.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class InspectSettings:
    """A job's batches, nodes and order."""

    batch_size: int = option("Number of samples in a batch of a rank.", COUNT, 64)
    nodes: int = option("Number of machines of the job.", COUNT, 1)
    ranks: int | None = option(
        "Number of ranks, over all machines.", COUNT, None, show_default="one a machine"
    )
    kind: Literal["window", "full", "blocks", "none"] = option(
        "Kind of shuffle, as Shuffle(...) takes it.",
        click.Choice(["window", "full", "blocks", "none"]),
        "window",
        "--shuffle",
    )
    window_blocks: int | None = option(
        "Number of blocks in a window.", COUNT, None, show_default="chosen by the loader"
    )
    canonical_nodes: int | None = option(
        "Number of lanes, as Shuffle(...) takes it.",
        COUNT,
        None,
        show_default="8, or 1 for blocks and none",
    )
    exchange: float = option(
        "Share of the blocks that may change lane from epoch to epoch.", click.FloatRange(0, 1), 1.0
    )
    memory_limit: int | None = option(
        "Bytes that a rank's loader may hold, as DataLoader(memory_limit=) takes it.",
        SIZE,
        None,
        metavar="SIZE",
        show_default="as the DataLoader's",
    )
    seed: int = option("Seed of the order.", int, 0)
    epoch: int = option("Number of the epoch to look at.", click.IntRange(min=0), 0)
    label: str | None = option(
        "Column of labels to read, to show how well they are mixed.", None, None, metavar="COLUMN"
    )
    max_samples: int = option(
        "Largest number of samples of the epoch to look at.", COUNT, 1 << 21, show_default="2,097,152"
    )

    @property
    def shuffle(self) -> Shuffle:
        """The order that is asked for. `ValueError` for settings that do not go together."""
        from sharding.order.shuffle import Shuffle

        return Shuffle(self.kind, self.window_blocks, self.canonical_nodes, self.exchange)

    @property
    def topology(self) -> Topology:
        """The job that is assumed: equal nodes."""
        from sharding.topology.topology import Topology

        return Topology.even(self.nodes if self.ranks is None else self.ranks, self.nodes)
