"""What `dataflow inspect` does: measure a plan and a full shuffle of the same data, show them side by side.

Only the catalog is used; no sample is read, unless labels are asked for (`dataflow.tools.inspect.labels`).
"""

from __future__ import annotations

import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dataflow.dataset import ShardedDataset
from dataflow.tools.inspect.figures import Figures, Inspected, figures_of
from dataflow.tools.inspect.labels import labels_of
from dataflow.tools.inspect.quality import MAX_SAMPLES, distinct_per_batch
from dataflow.tools.inspect.read_cost import open_bytes
from dataflow.tools.terminal import pictures
from dataflow.tools.terminal.indexing import bytes_text
from sharding.catalog.table import Catalog
from sharding.order.keyed import keyed_order
from sharding.order.order import Order
from sharding.order.shuffle import Shuffle
from sharding.plan.placement import HotSpot
from sharding.plan.plan import EpochPlan
from sharding.plan.window_size import resolve_windows
from sharding.topology.topology import Topology
from sharding.urls import naming_part, protocol_of


@dataclass(frozen=True)
class Wish:
    """Which plan to look at."""

    batch_size: int = 64
    """Per rank."""
    ranks: int | None = None
    """None: one a node."""
    nodes: int = 1
    shuffle: Shuffle = Shuffle()  # noqa: RUF009 - frozen
    memory_limit: int | None = None
    seed: int = 0
    epoch: int = 0
    label: str | None = None
    max_samples: int = MAX_SAMPLES

    @property
    def topology(self) -> Topology:
        """The job that is assumed: equal nodes."""
        return Topology.even(self.nodes if self.ranks is None else self.ranks, self.nodes)


@dataclass(frozen=True, eq=False)
class Inspection:
    """A plan and its full shuffle, measured."""

    wish: Wish
    catalog: Catalog
    shuffle: Shuffle
    """With nothing left open."""
    window_reason: str
    topology: Topology
    targets: Mapping[str, list[str]]
    """Names of shards, prefixes and hosts."""
    labels_from: str
    """What the label figures are of, or why there are none."""
    plan: Inspected
    full: Inspected

    def to_json(self) -> dict[str, Any]:
        """All figures, as JSON types."""
        stretch, catalog, wish = self.plan.stretch, self.catalog, self.wish
        return {
            "dataset": {
                "format": catalog.format,
                "shards": catalog.num_shards,
                "blocks": catalog.num_blocks,
                "samples": catalog.num_samples,
                "fingerprint": catalog.fingerprint(),
            },
            "asked": {
                "batch_size": wish.batch_size,
                "memory_limit": wish.memory_limit,
                "seed": wish.seed,
                "epoch": wish.epoch,
                "label": wish.label,
            },
            "topology": self.topology.to_json(),
            "shuffle": {**self.shuffle.to_json(), "reason": self.window_reason},
            "measured_batches": [stretch.first_batch, stretch.last_batch, stretch.num_batches],
            "plan": self._named(self.plan.figures),
            "full": self._named(self.full.figures),
        }

    def _named(self, figures: Figures) -> dict[str, Any]:
        """With the hottest targets by name."""
        found = figures.to_json()
        for kind, spot in figures.hot_spots.items():
            found["hot_spots"][kind] |= {"ratio": spot.ratio, "name": self.targets[kind][spot.label]}
        return found


def inspect_dataset(dataset: ShardedDataset, wish: Wish) -> Inspection:
    """Measure the plan that a `DataLoader` with these settings would follow."""
    catalog = dataset.catalog
    table = catalog.blocks
    names, targets = _targets(catalog)
    labels, labels_from = labels_of(dataset, wish.label)
    located = _located(dataset)
    shuffle, reason = resolve_windows(wish.shuffle, table, wish.memory_limit)
    topology = wish.topology

    def measured(shuffle: Shuffle) -> Inspected:
        plans, nodes = _plans(catalog, shuffle, topology, wish)
        most = wish.max_samples
        return figures_of(plans, nodes, table, targets, labels=labels, located=located, max_samples=most)

    plan, full = measured(shuffle), measured(Shuffle("full"))
    return Inspection(wish, catalog, shuffle, reason, topology, names, labels_from, plan, full)


def _plans(
    catalog: Catalog, shuffle: Shuffle, topology: Topology, wish: Wish
) -> tuple[list[EpochPlan], tuple[int, ...]]:
    """One plan a seat, and the node of each: in an even topology, seats are ranks."""
    order = Order(catalog.blocks.num_samples, shuffle, seed=wish.seed, epoch=wish.epoch)
    size, nodes = topology.world_size, topology.nodes_of_ranks
    assert nodes is not None
    plans = [
        EpochPlan(
            order,
            batch_size=wish.batch_size,
            rank=seat,
            world_size=size,
            tail="even" if size > 1 else "uneven",
        )
        for seat in range(size)
    ]
    return plans, nodes


def _located(dataset: ShardedDataset) -> bool:
    """Whether the format tells where single samples lie."""
    catalog = dataset.catalog
    first = int(np.flatnonzero(catalog.blocks.num_samples)[0])
    return catalog.codec().locate(catalog.block(first), None) is not None


def _targets(catalog: Catalog) -> tuple[dict[str, list[str]], dict[str, NDArray[np.int64]]]:
    """Names of shards, prefixes and hosts, and the number of each block's."""
    urls = catalog.urls
    names, of_block = {}, {}
    for kind, told in (("shard", str), ("prefix", _prefix), ("host", _host)):
        distinct, number = np.unique([told(url) for url in urls], return_inverse=True)
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


def show(found: Inspection, console: Console) -> None:
    """Print the figures as a table."""
    catalog, stretch, wish = found.catalog, found.plan.stretch, found.wish
    order, place = found.shuffle, found.topology
    head = Table(show_header=False, box=None, pad_edge=False)
    head.add_column(style="bold")
    head.add_column()
    head.add_row(
        "dataset",
        f"{catalog.num_samples:,} samples in {catalog.num_blocks:,} blocks of {catalog.num_shards:,} shards",
    )
    head.add_row("shuffle", order.kind if order.kind == "full" else f"{order.kind}, {_lanes(order)}")
    if order.window_blocks:
        head.add_row("window", f"{order.window_blocks:,} blocks: {found.window_reason}")
    head.add_row("topology", _topology(place))
    head.add_row(
        "batches", f"{wish.batch_size:,} samples a rank, {wish.batch_size * place.world_size:,} in all"
    )
    seen = f"{stretch.first_batch:,} to {stretch.last_batch:,} of {stretch.num_batches:,}"
    head.add_row("measured", "the whole epoch" if stretch.whole else f"a sample: batches {seen}")
    head.add_row("labels", found.labels_from)
    console.print(head)
    console.print(_table(found))


def _lanes(order: Shuffle) -> str:
    moved = "" if order.exchange == 1 else f"; {order.exchange:.0%} of the blocks dealt anew each epoch"
    return f"{order.num_lanes} lanes{moved}"


def _topology(place: Topology) -> str:
    """What is assumed of the job."""
    each = place.world_size // place.num_nodes
    if place.num_nodes == 1:
        return f"one node of {each:,} ranks (assumed)"
    return f"{place.num_nodes:,} equal nodes of {each:,} ranks, numbered node by node (assumed)"


def _table(found: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("", "left"), ("this plan", "right"), ("full shuffle", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for name, plan, full in rows_of(found):
        table.add_row(name, plan, full)
    return table


def rows_of(found: Inspection) -> list[tuple[str, str, str]]:
    """The figures in words: (name, of this plan, of the full shuffle)."""
    sides = [_cells(found, side.figures) for side in (found.plan, found.full)]
    return [(name, plan, full) for (name, plan), (_, full) in zip(*sides, strict=True)]


def _cells(found: Inspection, f: Figures) -> list[tuple[str, str]]:
    return [
        ("distinct blocks a batch", f"{f.blocks_per_batch:,.1f}"),
        ("distinct shards a batch", f"{f.shards_per_batch:,.1f} (at least {f.fewest_shards:,})"),
        ("neighbours apart, median", _percent(f.neighbour_distance_median)),
        ("neighbours apart, mean", _percent(f.neighbour_distance_mean)),
        ("lag-1 label correlation", _number(f.label_correlation)),
        ("label dispersion", _number(f.label_dispersion)),
        ("distinct labels a batch", _number(f.labels_per_batch)),
        ("distinct labels a node's part", _number(f.labels_per_node)),
        ("requests per 1,000 samples", f"{f.requests_per_1000_samples:,.1f}"),
        ("amplification of reads", _ratio(f.amplification)),
        ("amplification, worst node", _ratio(f.worst_amplification)),
        ("amplification, each rank alone", _ratio(f.rank_amplification)),
        *((f"hot spot, {kind}", _spot_text(spot)) for kind, spot in f.hot_spots.items()),
        ("open windows, a node", bytes_text(f.open_bytes)),
        ("cache needed, a node", bytes_text(f.cache_bytes)),
        ("first batch reads, a node", bytes_text(f.first_batch_bytes)),
    ]


def _spot_text(spot: HotSpot) -> str:
    return f"x {spot.ratio:.1f} ({spot.most:,} of {spot.ahead:,})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# ---- the picture ----------------------------------------------------------------------------------------

_DOTS = 4000


_COLOURS = {"this plan": "#2060a0", "full shuffle": "#c06020"}


def check_picture(path: str) -> None:
    """Say early what would fail late: `ValueError` for another ending, `ImportError` without matplotlib."""
    pictures.check_picture(path, (".png", ".html"))


def write_picture(found: Inspection, path: str) -> None:
    """Draw it into a file."""
    figure = _drawn(found)
    if path.endswith(".png"):
        figure.savefig(path, dpi=120)
        return
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    with open(path, "w") as file:
        file.write(_page(found, svg[svg.index("<svg") :]))


def _drawn(found: Inspection) -> Any:
    figure = pictures.figure_class()(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    sides = {"this plan": found.plan, "full shuffle": found.full}
    for name, side in sides.items():
        colour, stretch = _COLOURS[name], side.stretch
        at = keyed_order(len(stretch.sample), 0)[:_DOTS]  # even steps would see some lanes only
        axes[0, 0 if name == "this plan" else 1].plot(
            stretch.position[at], stretch.sample[at], ".", markersize=1.5, color=colour
        )
        batches = np.arange(stretch.first_batch, stretch.last_batch)
        shards = distinct_per_batch(stretch, found.catalog.blocks.shard[stretch.block])
        axes[1, 0].plot(batches, shards, linewidth=0.8, color=colour, label=name)
        held = sum(open_bytes(stretch, side.reads, node) for node in range(stretch.num_nodes))
        axes[1, 1].plot(batches, np.asarray(held) / 1e6, linewidth=1, color=colour, label=name)
    for axis, name in zip(axes[0], sides, strict=True):
        axis.set(title=f"{name}: where each position's sample lies", xlabel="position", ylabel="sample")
    axes[1, 0].set(title="distinct shards in a batch", xlabel="batch", ylim=(0, None))
    axes[1, 1].set(title="memory of open windows, all nodes", xlabel="batch", ylabel="MB", ylim=(0, None))
    for axis in axes[1]:
        axis.legend(frameon=False)
    return figure


def _page(found: Inspection, svg: str) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(plan)}</td><td>{html.escape(full)}</td></tr>\n"
        for name, plan, full in rows_of(found)
    )
    catalog, shuffle = found.catalog, found.shuffle
    about = (
        f"{catalog.num_samples:,} samples, {catalog.num_blocks:,} blocks, {catalog.num_shards:,} shards; "
        f"shuffle {shuffle.kind}, {shuffle.num_lanes} lanes, "
        f"window of {shuffle.window_blocks} blocks: {found.window_reason}"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>dataflow inspect</title>
<style>body {{ font: 14px sans-serif; margin: 2em }} td, th {{ padding: 2px 12px; text-align: right }}
td:first-child {{ text-align: left }} svg {{ max-width: 100%; height: auto }}</style></head>
<body><h1>dataflow inspect</h1><p>{html.escape(about)}</p>
<table><tr><th></th><th>this plan</th><th>full shuffle</th></tr>
{cells}</table>
{svg}</body></html>
"""


def inspect_source(
    source: Sequence[str],
    dataset_options: Mapping[str, Any],
    wish: Wish,
    *,
    json_path: str | None,
    picture: str | None,
) -> Inspection:
    """Inspect, print, and write what was asked for. `json_path` "-" prints JSON instead of the table."""
    if picture is not None:
        check_picture(picture)
    options = {**dataset_options, "on_error": "skip"}  # nothing is delivered
    dataset = ShardedDataset(source[0] if len(source) == 1 else list(source), **options)
    found = inspect_dataset(dataset, wish)
    if json_path == "-":
        print(json.dumps(found.to_json(), indent=1))
    else:
        show(found, Console(highlight=False))
    if json_path not in (None, "-"):
        with open(str(json_path), "w") as file:
            json.dump(found.to_json(), file, indent=1)
    if picture is not None:
        write_picture(found, picture)
    return found
