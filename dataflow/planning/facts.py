"""Facts that a state tells of its data behind the fingerprint, so that another loader names what differs."""

from __future__ import annotations

from typing import Any

from dataflow.dataset import ShardedDataset
from dataflow.mixture import Mixture
from sharding.plan.difference import SOURCES, bounded, facts_of_catalog, short_digest

MOST_SOURCES = 16
"""Sources that a state tells one by one, for its size."""


def facts_of(dataset: ShardedDataset | Mixture) -> dict[str, Any]:
    """The facts of a dataset or mixture, as `sharding.plan.difference` has them: some 200 bytes."""
    if not isinstance(dataset, Mixture):
        facts = {"data": "dataset", **facts_of_catalog(dataset.catalog)}
        if not dataset.selection.is_whole:
            facts["view"] = f"{len(dataset):,} ({short_digest(dataset.selection.digest)})"
        if dataset.balance:
            facts["balanced"] = dataset.balance.digest[:8]
        if dataset.joins:
            facts["joins"] = short_digest(" ".join(join.other.fingerprint() for join in dataset.joins))
        return facts
    spec, used = dataset.spec, dataset.spec.num_used
    facts = {"data": "mixture", "num_sources": used}
    if len(dataset.sources) <= MOST_SOURCES:
        facts[SOURCES] = " ".join(sources_of(dataset))
    else:
        facts["digest"] = short_digest(repr(sources_of(dataset)[:used]))
    steps = [f"{step}: {' '.join(map(str, weights[:used]))}" for step, weights in spec.steps]
    facts["weights"] = bounded("; ".join(steps).removeprefix("0: "))
    runs = {"run_length": spec.run_length} if spec.run_length > 1 else {}
    return {**facts, "stop": spec.stop or "repeats", **runs, "shares": spec.counts}


def sources_of(mixture: Mixture) -> list[str]:
    """The samples and a digest of each source."""
    return [f"{len(source)}:{short_digest(source.fingerprint(), 3)}" for source in mixture.sources]
