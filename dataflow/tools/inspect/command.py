"""`dataflow inspect` measures a plan and a full shuffle of the same data, and shows them side by side.

Only the catalog is used; no sample is read, unless labels are asked for (`dataflow.tools.inspect.labels`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.dataset import ShardedDataset
from dataflow.limits import told_of_memory
from dataflow.tools.inspect.figures import Figures, Inspected, figures_of
from dataflow.tools.inspect.labels import labels_of
from dataflow.tools.inspect.quality import distinct_per_batch
from dataflow.tools.inspect.read_cost import open_bytes
from dataflow.tools.inspect.settings import InspectSettings
from dataflow.tools.terminal.report import Drawing, Page, Table, bytes_text, optional
from dataflow.tools.verdicts.plans import inspection_verdict
from sharding.catalog.table import Catalog
from sharding.order.order import Order
from sharding.order.permutations import seeded_permutation
from sharding.order.selection import check_listed
from sharding.order.shuffle import Shuffle
from sharding.plan.plan import EpochPlan
from sharding.plan.window_size import resolve_windows
from sharding.topology.topology import Topology
from sharding.urls import naming_part, protocol_of

_DOTS = 4000
_COLOURS = {"this plan": "#2060a0", "full shuffle": "#c06020"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Inspection:
    """A plan and its full shuffle, measured."""

    settings: InspectSettings
    catalog: Catalog
    shuffle: Shuffle
    """The shuffle, with nothing left open."""
    window_reason: str
    topology: Topology
    targets: Mapping[str, list[str]]
    """Names of shards, prefixes and hosts."""
    labels_from: str
    """The column that the label figures are of, or why there are none."""
    plan: Inspected
    full: Inspected

    def to_json(self) -> dict[str, Any]:
        """All figures, as JSON types."""
        stretch, catalog = self.plan.stretch, self.catalog
        order = ("kind", "window_blocks", "canonical_nodes", "exchange")
        names = ("batch_size", "memory_limit", "seed", "epoch", "label", *order)
        return {
            "dataset": {
                "format": catalog.format,
                "shards": catalog.num_shards,
                "blocks": catalog.num_blocks,
                "samples": catalog.num_samples,
                "fingerprint": catalog.fingerprint(),
            },
            "asked": {name: getattr(self.settings, name) for name in names},
            "topology": self.topology.to_json(),
            "shuffle": {**self.shuffle.to_json(), "reason": self.window_reason},
            "measured_batches": [stretch.first_batch, stretch.last_batch, stretch.num_batches],
            "plan": self._named(self.plan.figures),
            "full": self._named(self.full.figures),
        }

    def _named(self, figures: Figures) -> dict[str, Any]:
        """Return the figures with the hottest targets by name."""
        values = asdict(figures)
        for kind, spot in figures.hot_spots.items():
            values["hot_spots"][kind] |= {"ratio": spot.ratio, "name": self.targets[kind][spot.label]}
        return values


# ---- measuring ------------------------------------------------------------------------------------------


def inspect_dataset(dataset: ShardedDataset, settings: InspectSettings) -> Inspection:
    """Measure the plan that a `DataLoader` with these settings would follow."""
    catalog = dataset.catalog
    table = catalog.blocks
    names, targets = _targets(catalog)
    labels, labels_from = labels_of(dataset, settings.label)
    first = catalog.block(int(np.flatnonzero(table.num_samples)[0]))
    located = catalog.codec().locate(first, None) is not None  # the format tells where single samples lie
    shuffle, reason = resolve_windows(settings.shuffle, [table], settings.memory_limit)
    topology = settings.topology
    nodes = topology.nodes_of_ranks
    assert nodes is not None

    def measured(shuffle: Shuffle) -> Inspected:
        plans, most = _plans(catalog, shuffle, topology.world_size, settings), settings.max_samples
        with told_of_memory("list the samples of a window", "write shards with smaller blocks", [catalog]):
            check_listed(int(plans[0].order.table.window_lengths.max(initial=0)))
        return figures_of(plans, nodes, table, targets, labels=labels, located=located, max_samples=most)

    return Inspection(
        settings=settings,
        catalog=catalog,
        shuffle=shuffle,
        window_reason=reason,
        topology=topology,
        targets=names,
        labels_from=labels_from,
        plan=measured(shuffle),
        full=measured(Shuffle("full")),
    )


def _plans(catalog: Catalog, shuffle: Shuffle, world_size: int, settings: InspectSettings) -> list[EpochPlan]:
    """Make one plan a shard index: in an even topology, shard indices are ranks."""
    order = Order(catalog.blocks.num_samples, shuffle, seed=settings.seed, epoch=settings.epoch)
    return [
        EpochPlan(
            order,
            batch_size=settings.batch_size,
            rank=shard_index,
            world_size=world_size,
            tail="even" if world_size > 1 else "uneven",
        )
        for shard_index in range(world_size)
    ]


def _targets(catalog: Catalog) -> tuple[dict[str, list[str]], dict[str, NDArray[np.int64]]]:
    """Names of shards, prefixes and hosts, and the number of each block's."""
    names, of_block = {}, {}
    for kind, name_of in (("shard", str), ("prefix", _prefix), ("host", _host)):
        distinct, number = np.unique([name_of(url) for url in catalog.urls], return_inverse=True)
        names[kind] = distinct.tolist()
        of_block[kind] = number[catalog.blocks.shard]
    return names, of_block


def _prefix(url: str) -> str:
    """Everything before the file's name: what object stores partition by."""
    return naming_part(url).rpartition("/")[0] or "."


def _host(url: str) -> str:
    """Host or bucket; "this machine" for local files."""
    protocol = protocol_of(url)
    if protocol in ("file", "local"):
        return "this machine"
    return f"{protocol}://{naming_part(url).partition('://')[2].partition('/')[0]}"


# ---- telling --------------------------------------------------------------------------------------------


def page_of(inspection: Inspection) -> Page:
    """Return what was looked at, and the figures of both orders; a drawing of them."""
    sides = [_cells(side.figures) for side in (inspection.plan, inspection.full)]
    rows = [(name, plan, full) for (name, plan), (_, full) in zip(*sides, strict=True)]
    drawing = Drawing(11, 7, lambda figure: _draw(inspection, figure))
    parts = (Table((), _facts(inspection)), Table(("", "this plan", "full shuffle"), rows), drawing)
    values = inspection.to_json()
    measured = [
        {"order": name, **side.figures.to_row()}
        for name, side in (("plan", inspection.plan), ("full shuffle", inspection.full))
    ]
    return Page("dataflow inspect", values, parts, verdict=inspection_verdict(values), rows=measured)


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    catalog, order, topology = inspection.catalog, inspection.shuffle, inspection.topology
    stretch, size = inspection.plan.stretch, inspection.settings.batch_size
    mixing: str = order.kind
    if order.kind != "full":
        mixing += f", {order.num_lanes} lanes"
        mixing += "" if order.exchange == 1 else f"; {order.exchange:.0%} of the blocks dealt anew each epoch"
    each = topology.world_size // topology.num_nodes
    job = f"one node of {each:,} ranks (assumed)"
    if topology.num_nodes > 1:
        job = f"{topology.num_nodes:,} equal nodes of {each:,} ranks, numbered node by node (assumed)"
    batches = f"{stretch.first_batch:,} to {stretch.last_batch:,} of {stretch.num_batches:,}"
    window = f"{order.window_blocks:,} blocks: {inspection.window_reason}" if order.window_blocks else ""
    facts = {
        "dataset": f"{catalog.num_samples:,} samples in {catalog.num_blocks:,} blocks of "
        f"{catalog.num_shards:,} shards",
        "shuffle": mixing,
        "window": window,
        "topology": job,
        "batches": f"{size:,} samples a rank, {size * topology.world_size:,} in all",
        "measured": "the whole epoch" if stretch.whole else f"a sample: batches {batches}",
        "labels": inspection.labels_from,
    }
    return [(name, text) for name, text in facts.items() if text]


def _cells(f: Figures) -> list[tuple[str, str]]:
    """Return the figures in words."""
    spots = [(f"hot spot, {kind}", spot) for kind, spot in f.hot_spots.items()]
    return [
        ("distinct blocks a batch", f"{f.blocks_per_batch:,.1f}"),
        ("distinct shards a batch", f"{f.shards_per_batch:,.1f} (at least {f.fewest_shards:,})"),
        ("neighbours apart, median", optional(f.neighbour_distance_median, ".1%")),
        ("neighbours apart, mean", optional(f.neighbour_distance_mean, ".1%")),
        ("lag-1 label correlation", optional(f.label_correlation, ".3g")),
        ("label dispersion", optional(f.label_dispersion, ".3g")),
        ("distinct labels a batch", optional(f.labels_per_batch, ".3g")),
        ("distinct labels a node's part", optional(f.labels_per_node, ".3g")),
        ("requests per 1,000 samples", f"{f.requests_per_1000_samples:,.1f}"),
        ("amplification of reads", optional(f.amplification, ",.2f")),
        ("amplification, worst node", optional(f.worst_amplification, ",.2f")),
        ("amplification, each rank alone", optional(f.rank_amplification, ",.2f")),
        *((name, f"x {spot.ratio:.1f} ({spot.most:,} of {spot.ahead:,})") for name, spot in spots),
        ("open windows, a node", bytes_text(f.open_bytes)),
        ("cache needed, a node", bytes_text(f.cache_bytes)),
        ("first batch reads, a node", bytes_text(f.first_batch_bytes)),
    ]


def _draw(inspection: Inspection, figure: Any) -> None:
    """Draw where samples lie, shards in each batch, and memory of open windows."""
    axes = figure.subplots(2, 2)
    sides = {"this plan": inspection.plan, "full shuffle": inspection.full}
    for column, (name, side) in enumerate(sides.items()):
        colour, stretch = _COLOURS[name], side.stretch
        rows = seeded_permutation(len(stretch.sample), 0)[:_DOTS]  # even steps would see some lanes only
        positions, samples = stretch.position[rows], stretch.sample[rows]
        axes[0, column].plot(positions, samples, ".", markersize=1.5, color=colour)
        title = f"{name}: where each position's sample lies"
        axes[0, column].set(title=title, xlabel="position", ylabel="sample")
        batches = np.arange(stretch.first_batch, stretch.last_batch)
        shards = distinct_per_batch(stretch, inspection.catalog.blocks.shard[stretch.block])
        axes[1, 0].plot(batches, shards, linewidth=0.8, color=colour, label=name)
        nodes = range(stretch.num_nodes)
        megabytes = sum(open_bytes(stretch, side.reads, node) for node in nodes) / np.float64(1e6)
        axes[1, 1].plot(batches, megabytes, linewidth=1, color=colour, label=name)
    axes[1, 0].set(title="distinct shards in a batch", xlabel="batch", ylim=(0, None))
    axes[1, 1].set(title="memory of open windows, all nodes", xlabel="batch", ylabel="MB", ylim=(0, None))
    for below in axes[1]:
        below.legend(frameon=False)
