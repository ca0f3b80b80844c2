"""What `dataflow plan` does: predictions of all reductions, placements and accumulations, and their costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dataflow.tools.plan.cluster import Cluster, Link
from dataflow.tools.plan.collectives import all_reduces
from dataflow.tools.plan.expenses import Expenses, Prices, expenses, find_meters
from dataflow.tools.plan.step import Job, Prediction, batch_doubts, best_accumulation, predict

_SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Wish:
    """The command's options."""

    nodes: int
    racks: int
    ranks_per_node: int
    parameters: float
    gradient_bits: int
    microbatch_ms: float
    microbatch: int
    accumulate: Sequence[int]
    max_batch: int | None
    sample_bytes: int | None
    network_gbit: float
    network_us: float
    within_gbit: float
    within_us: float
    link: str | None
    oversubscription: float
    bucket_mb: float
    gated: bool
    samples: float
    node_hour: float | None
    egress_gb: float | None
    watts: float | None

    def cluster(self) -> Cluster:
        """Its nodes, ranks numbered node by node and rack by rack."""
        network = Link(self.network_us * 1e-6, self.network_gbit * 1e9 / 8)
        if self.link is not None:
            from dataflow.tools.plan.measure import load_link

            network = load_link(self.link)
        return Cluster.regular(
            self.nodes,
            self.ranks_per_node,
            self.racks,
            within=Link(self.within_us * 1e-6, self.within_gbit * 1e9 / 8),
            network=network,
            oversubscription=self.oversubscription,
        )

    def job(self) -> Job:
        """Of one microbatch a window, to be replaced."""
        return Job(
            gradient_bytes=self.parameters * self.gradient_bits / 8,
            microbatch_s=self.microbatch_ms * 1e-3,
            microbatch=self.microbatch,
            sample_bytes=float(self.sample_bytes or 0),
            bucket_bytes=self.bucket_mb * (1 << 20),
            gated=self.gated,
        )


@dataclass(frozen=True)
class Plan:
    """What was found."""

    best: Prediction
    doubts: Sequence[str]
    """Why `best`'s batch may be of no use."""
    accumulations: Sequence[Prediction]
    algorithms: Mapping[str, float]
    """Seconds of all gradients, bucket after bucket, nothing else on the links."""
    placements: Mapping[str, float]
    """Seconds of a window with `best`'s accumulation, reduced by a ring in rank order, for each placement."""
    expenses: Expenses | None
    meters: Sequence[str] = field(default=())
    """Energy meters that can be read on this machine, or why not."""


def placements(cluster: Cluster) -> Mapping[str, Cluster]:
    """Ways to number ranks: as `Cluster.regular` does, card by card, and nodes without regard to racks."""
    nodes = cluster.nodes
    rank = np.arange(cluster.num_ranks)
    place = rank - np.searchsorted(nodes, nodes)  # of a rank on its node; ranks are sorted by node
    shuffled = np.random.default_rng(_SHUFFLE_SEED).permutation(cluster.num_nodes)
    found = {"node by node, rack by rack": cluster}
    if cluster.num_nodes > 1 and cluster.num_ranks > cluster.num_nodes:
        found["round-robin over nodes"] = cluster.placed(np.lexsort((nodes, place)).tolist())
    if len(set(cluster.racks_of_nodes)) > 1:
        found["node by node, racks mixed"] = cluster.placed(np.lexsort((place, shuffled[nodes])).tolist())
    return found


def make_plan(wish: Wish) -> Plan:
    """All predictions."""
    cluster, job = wish.cluster(), wish.job()
    best, found = best_accumulation(cluster, job, wish.accumulate, max_batch=wish.max_batch)
    chosen = replace(job, accumulate=best.accumulate)
    prices = Prices(wish.node_hour, wish.egress_gb, wish.watts)
    meters, why = find_meters()
    return Plan(
        best,
        batch_doubts(best, found, samples=int(wish.samples), max_batch=wish.max_batch),
        found,
        {
            name: job.buckets * cluster.seconds(rounds)
            for name, rounds in all_reduces(cluster, job.gradient_bytes / job.buckets).items()
        },
        {name: predict(each, chosen, "ring").window_s for name, each in placements(cluster).items()},
        expenses(best, wish.nodes, int(wish.samples), job.sample_bytes, prices) if wish.samples else None,
        [f"{meter.name}: can be read here" for meter in meters] + why,
    )


def show_plan(wish: Wish, json_path: str | None) -> None:
    """Print it, or write it as JSON."""
    found = make_plan(wish)
    if json_path is not None:
        text = json.dumps({"asked": _plain(wish), "plan": _plain(found)}, indent=2)
        if json_path == "-":
            print(text)
            return
        Path(json_path).write_text(text + "\n")
    _print(wish, found, Console())


def _plain(value: Any) -> dict[str, Any]:
    plain = asdict(value)
    if isinstance(value, Plan) and value.expenses is not None:
        plain["expenses"]["cost"] = value.expenses.cost
    return plain


def _print(wish: Wish, found: Plan, console: Console) -> None:
    best = found.best
    console.print(_accumulations(found))
    console.print(_named("all-reduce of all gradients", "alone", found.algorithms, best.algorithm))
    title = "placement of ranks, reduced by a ring in rank order"
    nearest = min(found.placements, key=lambda name: found.placements[name])
    console.print(_named(title, "step", found.placements, nearest))
    hidden = best.sync_s - best.exposed_s
    console.print(
        f"Best: accumulate {best.accumulate} (a batch of {best.batch:,}), all-reduce {best.algorithm!r}: "
        f"{_time(best.window_s)} a step, {best.samples_per_s:,.0f} samples/s. Gradients take "
        f"{_time(best.sync_s)}, of which backward hides {_time(hidden)}.",
        highlight=False,
    )
    for doubt in found.doubts:
        console.print(doubt, highlight=False)
    if best.data_wait_s > 0:
        console.print(
            f"Data limits it: each step waits {_time(best.data_wait_s)} for "
            f"{best.data_bytes_per_s * 8e-9:.3g} Gbit/s a node. More microbatches do not help; "
            "fewer bytes a sample or a cache do."
        )
    if found.expenses is not None:
        console.print(_expenses(wish, found.expenses), highlight=False)
    console.print("Energy meters: " + "; ".join(found.meters), highlight=False, style="dim")


def _accumulations(found: Plan) -> Table:
    table = Table(title="microbatches a step", title_justify="left")
    for name in ("", "accumulate", "step", "gradients", "not hidden", "waits for data", "samples/s", "batch"):
        table.add_column(name, justify="right")
    for each in found.accumulations:
        table.add_row(
            "*" if each.accumulate == found.best.accumulate else "",
            str(each.accumulate),
            _time(each.window_s),
            _time(each.sync_s),
            _time(each.exposed_s),
            _time(each.data_wait_s),
            f"{each.samples_per_s:,.0f}",
            f"{each.batch:,}",
        )
    return table


def _named(title: str, what: str, found: Mapping[str, float], best: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("name")
    table.add_column(what, justify="right")
    for name, seconds in sorted(found.items(), key=lambda item: item[1]):
        table.add_row("*" if name == best else "", name, _time(seconds))
    return table


def _expenses(wish: Wish, found: Expenses) -> str:
    parts = [f"The run: {found.updates:,} updates, {found.hours:,.2f} hours"]
    if found.nodes_cost is not None:
        parts.append(f"{found.nodes_cost:,.2f} for nodes")
    if found.egress_cost is not None:
        parts.append(f"{found.egress_cost:,.2f} for egress")
    if found.nodes_cost is None and found.egress_cost is None:
        parts.append("its price is not known (--node-hour, --egress-gb)")
    if found.joules_per_update is not None and found.kwh is not None:
        parts.append(f"{found.joules_per_update:,.0f} J an update, {found.kwh:,.1f} kWh")
    else:
        parts.append("its energy is not known (--watts)")
    return "; ".join(parts) + "."


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms" if seconds else "0"
