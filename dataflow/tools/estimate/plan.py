"""`dataflow plan` predicts all reductions, placements and accumulations, and their costs.

Money and energy of a run come from what was given; nothing is made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dataflow.tools.estimate.cluster import Cluster, Link
from dataflow.tools.estimate.collectives import all_reduces
from dataflow.tools.estimate.settings import PlanSettings
from dataflow.tools.estimate.step import Prediction, StepWork, batch_doubts, best_accumulation, predict
from dataflow.tools.terminal.report import Drawing, Page, Part, Sentence, Table
from dataflow.tools.verdicts.plans import plan_verdict

_SHUFFLE_SEED = 0


@dataclass(frozen=True)
class Prices:
    """The prices of a run. None: not known, and not counted."""

    node_hour: float | None = None
    """Price of one node for an hour."""
    egress_gb: float | None = None
    """For 10**9 bytes that leave the store."""
    node_watts: float | None = None
    """Watts of one node under this load."""


@dataclass(frozen=True, kw_only=True)
class Expenses:
    """The expenses of a whole run. None where a price or a power was not given."""

    hours: float
    updates: int
    nodes_cost: float | None
    egress_cost: float | None
    joules_per_update: float | None
    kwh: float | None

    @property
    def cost(self) -> float | None:
        """All that is known; None if nothing is."""
        known = [each for each in (self.nodes_cost, self.egress_cost) if each is not None]
        return sum(known) if known else None


def expenses(step: Prediction, nodes: int, samples: int, sample_bytes: float, prices: Prices) -> Expenses:
    """Return the expenses of a run of so many samples, epochs counted."""
    updates = -(-samples // step.batch)
    hours = updates * step.window_s / 3600
    joules = None if prices.node_watts is None else prices.node_watts * nodes * step.window_s
    return Expenses(
        hours=hours,
        updates=updates,
        nodes_cost=None if prices.node_hour is None else hours * nodes * prices.node_hour,
        egress_cost=None if prices.egress_gb is None else samples * sample_bytes / 1e9 * prices.egress_gb,
        joules_per_update=joules,
        kwh=None if joules is None else joules * updates / 3.6e6,
    )


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """All predictions for a cluster."""

    best: Prediction
    doubts: Sequence[str]
    """Why `best`'s batch may be of no use."""
    accumulations: Sequence[Prediction]
    algorithms: Mapping[str, float]
    """Seconds of all gradients, bucket after bucket, nothing else on the links."""
    placements: Mapping[str, float]
    """Seconds of a step with `best`'s accumulation, reduced by a ring in rank order, for each placement."""
    expenses: Expenses | None

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        figures = asdict(self)
        if self.expenses is not None:
            figures["expenses"]["cost"] = self.expenses.cost
        return figures


def make_plan(settings: PlanSettings) -> ClusterPlan:
    """Predict. `ValueError` for a cluster that cannot be, or a file that is no link."""
    network = Link(settings.network_us * 1e-6, settings.network_gbit * 1e9 / 8)
    if settings.link is not None:
        from dataflow.tools.estimate.measure import load_link  # with torch

        network = load_link(settings.link)
    cluster = Cluster.regular(
        settings.nodes,
        settings.ranks_per_node,
        settings.racks,
        within=Link(settings.within_us * 1e-6, settings.within_gbit * 1e9 / 8),
        network=network,
        oversubscription=settings.oversubscription,
    )
    work = StepWork(
        gradient_bytes=settings.parameters * settings.gradient_bits / 8,
        microbatch_s=settings.microbatch_ms * 1e-3,
        microbatch=settings.microbatch,
        sample_bytes=float(settings.sample_bytes or 0),
        bucket_bytes=settings.bucket_mb * (1 << 20),
        gated=settings.gated,
    )
    most, samples = settings.max_batch, int(settings.samples)
    best, predictions = best_accumulation(cluster, work, settings.accumulate, max_batch=most)
    prices = Prices(settings.node_hour, settings.egress_gb, settings.watts)
    bucket = all_reduces(cluster, work.gradient_bytes / work.buckets)
    chosen = replace(work, accumulate=best.accumulate)
    return ClusterPlan(
        best=best,
        doubts=batch_doubts(best, predictions, samples=samples, max_batch=most),
        accumulations=predictions,
        algorithms={name: work.buckets * cluster.seconds(rounds) for name, rounds in bucket.items()},
        placements={
            name: predict(placed, chosen, "ring").window_s for name, placed in placements(cluster).items()
        },
        expenses=expenses(best, settings.nodes, samples, work.sample_bytes, prices) if samples else None,
    )


def placements(cluster: Cluster) -> Mapping[str, Cluster]:
    """Ways to number ranks: as `Cluster.regular` does, card by card, and nodes without regard to racks."""
    nodes = cluster.nodes
    rank = np.arange(cluster.num_ranks)
    place = rank - np.searchsorted(nodes, nodes)  # of a rank on its node; ranks are sorted by node
    shuffled = np.random.default_rng(_SHUFFLE_SEED).permutation(cluster.num_nodes)
    named = {"node by node, rack by rack": cluster}
    if cluster.num_nodes > 1 and cluster.num_ranks > cluster.num_nodes:
        named["round-robin over nodes"] = cluster.placed(np.lexsort((nodes, place)).tolist())
    if len(set(cluster.racks_of_nodes)) > 1:
        named["node by node, racks mixed"] = cluster.placed(np.lexsort((place, shuffled[nodes])).tolist())
    return named


# ---- telling --------------------------------------------------------------------------------------------


def page_of(settings: PlanSettings, plan: ClusterPlan) -> Page:
    """Tables of what was tried, and what to make of them."""
    nearest = min(plan.placements, key=lambda name: plan.placements[name])
    parts: list[Part] = [
        Sentence("microbatches a step", "bold"),
        _accumulations(plan),
        Sentence("all-reduce of all gradients", "bold"),
        _ranking("alone", plan.algorithms, plan.best.algorithm),
        Sentence("placement of ranks, reduced by a ring in rank order", "bold"),
        _ranking("step", plan.placements, nearest),
        *_sentences(plan),
    ]
    parts.append(Drawing(11, 4.2, lambda figure: _draw(plan, figure)))
    values = {"asked": asdict(settings), "plan": plan.to_json()}
    return Page("dataflow plan", values, parts, verdict=plan_verdict(values), rows=[*_rows(plan)])


def _rows(plan: ClusterPlan) -> Iterator[dict[str, Any]]:
    """Yield a row of a CSV file for each number of microbatches, all-reduce alone, and placement."""
    measures = ("window_s", "sync_s", "exposed_s", "data_wait_s", "samples_per_s", "batch")
    for each in plan.accumulations:
        values = {name: getattr(each, name) for name in measures}
        yield {"kind": "accumulate", "name": each.accumulate, **values}
    for name, seconds in plan.algorithms.items():
        yield {"kind": "all-reduce", "name": name, **dict.fromkeys(measures), "sync_s": seconds}
    for name, seconds in plan.placements.items():
        yield {"kind": "placement", "name": name, **dict.fromkeys(measures), "window_s": seconds}


def _draw(plan: ClusterPlan, figure: Any) -> None:
    """Draw what a step takes and gives by its microbatches, and the all-reduces."""
    rates, shares, reductions = figure.subplots(1, 3)
    counts = [each.accumulate for each in plan.accumulations]
    rates.plot(counts, [each.samples_per_s for each in plan.accumulations], "o-")
    rates.axvline(plan.best.accumulate, color="black", linestyle=":", label="best")
    rates.set(title="samples a second", xlabel="microbatches a step", ylim=(0, None))
    rates.legend(frameon=False, fontsize="small")
    for name, text in (("compute_s", "computing"), ("exposed_s", "gradients"), ("data_wait_s", "data")):
        part = [getattr(each, name) / max(each.window_s, 1e-12) for each in plan.accumulations]
        shares.plot(counts, part, "o-", label=text)
    shares.set(title="share of a step", xlabel="microbatches a step", ylim=(0, 1.02))
    shares.legend(frameon=False, fontsize="small")
    ranking = sorted(plan.algorithms.items(), key=lambda item: -item[1])
    reductions.barh([name for name, _ in ranking], [seconds * 1e3 for _, seconds in ranking])
    reductions.set(title="all-reduce of all gradients, alone", xlabel="ms")


def _accumulations(plan: ClusterPlan) -> Table:
    columns = ("", "accumulate", "step", "gradients", "not hidden", "waits for data", "samples/s", "batch")
    rows = []
    for each in plan.accumulations:
        times = map(_time, (each.window_s, each.sync_s, each.exposed_s, each.data_wait_s))
        mark = "*" if each.accumulate == plan.best.accumulate else ""
        rows.append((mark, str(each.accumulate), *times, f"{each.samples_per_s:,.0f}", f"{each.batch:,}"))
    return Table(columns, rows)


def _ranking(what: str, seconds: Mapping[str, float], best: str) -> Table:
    ranking = sorted(seconds.items(), key=lambda item: item[1])
    rows = [("*" if name == best else "", name, _time(value)) for name, value in ranking]
    return Table(("", "name", what), rows, left=2)


def _sentences(plan: ClusterPlan) -> Iterator[str]:
    best = plan.best
    yield (
        f"Best: accumulate {best.accumulate} (a batch of {best.batch:,}), all-reduce {best.algorithm!r}: "
        f"{_time(best.window_s)} a step, {best.samples_per_s:,.0f} samples/s. Gradients take "
        f"{_time(best.sync_s)}, of which backward hides {_time(best.sync_s - best.exposed_s)}."
    )
    yield from plan.doubts
    if best.data_wait_s > 0:
        yield (
            f"Data limits it: each step waits {_time(best.data_wait_s)} for "
            f"{best.data_bytes_per_s * 8e-9:.3g} Gbit/s a node. More microbatches do not help; "
            "fewer bytes a sample or a cache do."
        )
    if plan.expenses is not None:
        yield _expenses(plan.expenses)


def _expenses(run: Expenses) -> str:
    parts = [f"The run: {run.updates:,} updates, {run.hours:,.2f} hours"]
    if run.nodes_cost is not None:
        parts.append(f"{run.nodes_cost:,.2f} for nodes")
    if run.egress_cost is not None:
        parts.append(f"{run.egress_cost:,.2f} for egress")
    if run.cost is None:
        parts.append("its price is not known (--node-hour, --egress-gb)")
    if run.joules_per_update is not None:
        parts.append(f"{run.joules_per_update:,.0f} J an update, {run.kwh:,.1f} kWh")
    else:
        parts.append("its energy is not known (--watts)")
    return "; ".join(parts) + "."


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms" if seconds else "0"
