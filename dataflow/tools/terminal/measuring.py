"""`dataflow index --transform` measures all samples that a transform will make, before any training does."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from dataflow.batch.transforms import LengthsAlone, fingerprint_of, has_random_lengths, measure_of
from dataflow.dataset import ShardedDataset
from dataflow.loader import DataLoader
from dataflow.progress.bar import ProgressBar
from dataflow.tools.terminal.options import named_function
from sharding.catalog.table import Catalog
from sharding.lengths.batching import Packed

_ROW = 1 << 16
"""Lengths are all that is wanted: rows of any length do."""
_ANY = 1 << 62
"""A budget that no row reaches, so that costs are measured."""


def measure_samples(
    name: str, column: str | None, catalog: Catalog, path: str, options: Mapping[str, Any]
) -> int:
    """Measure the samples of a catalog, and keep their lengths; how many have one.

    Args:
        name: `package.module:function`, a transform, or what makes one, or the dataset that has it.
        column: whose length counts; None: the first that `measure` tells, or "tokens". Behind it, with
            commas, those that `balance=` or `budget=` name.
        catalog: the dataset's.
        path: where that lies.
        options: of `ShardedDataset`, where `name` says none.

    Raises `ValueError` where nothing would tell the lengths from others.
    """
    value = named_function(name)
    if measure_of(value) is None and not inspect.signature(value).parameters:
        value = value()
    dataset = value if isinstance(value, ShardedDataset) else ShardedDataset(path, transform=value, **options)
    if (transform := dataset.transform) is None or dataset.catalog.fingerprint() != catalog.fingerprint():
        raise ValueError(f"--transform {name} makes a dataset of other shards, or without a transform")
    if not fingerprint_of(transform) or has_random_lengths(transform):
        raise ValueError(
            f"--transform {name}: lengths are kept for a transform with a fingerprint, whose lengths are not "
            "random (rng)"
        )
    dataset = copy.copy(dataset)
    dataset.batch_transform = None  # it would run for nothing
    if (measure := measure_of(transform)) is not None:
        dataset.transform = measure
        column = column or next(iter(dataset[0]))
    lead, *costs = (column or "tokens").split(",")
    batching = Packed(_ROW, lead, budget=dict.fromkeys(costs, _ANY))
    if measure is not None:
        dataset.transform = LengthsAlone(transform, batching)
    bar = ProgressBar("measuring lengths", total=len(dataset), unit="sample")
    with bar, DataLoader(dataset, batching=batching) as loader:
        for _ in loader:
            bar.show(loader.stats().samples)
        return len(dataset) - loader.stats().skipped_samples
