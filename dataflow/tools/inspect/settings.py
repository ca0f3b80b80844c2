"""Which plan `dataflow inspect` looks at: the options of the command."""

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

    batch_size: int = option("A rank's.", COUNT, 64)
    nodes: int = option("Machines of the job.", COUNT, 1)
    ranks: int | None = option("Of all nodes together.  [default: one a node]", COUNT, None)
    kind: Literal["window", "full", "blocks", "none"] = option(
        "How an epoch is mixed, as in Shuffle(...).",
        click.Choice(["window", "full", "blocks", "none"]),
        "window",
        "--shuffle",
    )
    window_blocks: int | None = option("Blocks a window.  [default: chosen]", COUNT, None)
    canonical_nodes: int | None = option("Lanes.  [default: 8, or 1 unmixed]", COUNT, None)
    exchange: float = option(
        "Share of the blocks that may change lane from epoch to epoch.", click.FloatRange(0, 1), 1.0
    )
    memory_limit: int | None = option("As given to the DataLoader.", SIZE, None, metavar="SIZE")
    seed: int = option("Of the order.", int, 0)
    epoch: int = option("To look at.", click.IntRange(min=0), 0)
    label: str | None = option(
        "Read this column too, and tell how labels are mixed.", None, None, metavar="COLUMN"
    )
    max_samples: int = option("Of an epoch to look at.", COUNT, 1 << 21, show_default="2 M")

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
