"""What an editor knows of batches, statistics and samples; mypy checks it, nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

from dataflow import DataLoader, LoaderStats, Mixture, ShardedDataset


def total(sample: dict[str, Any]) -> int:
    return sum(sample["x"])


def count(samples: list[Any]) -> int:
    return len(samples)


def what_shards_give(dataset: ShardedDataset, mixture: Mixture) -> None:
    assert_type(dataset[0], dict[str, Any])
    assert_type(dataset.take(3)[0], dict[str, Any])
    assert_type(ShardedDataset("x.tar", transform=total)[0], int)
    loader = DataLoader(dataset, batch_size=4)
    for batch in loader:
        assert_type(batch, dict[str, Any])
    assert_type(loader.stats(), LoaderStats)
    for batch in DataLoader(mixture):
        assert_type(batch, dict[str, Any])
    for number in DataLoader(dataset, collate_fn=count):
        assert_type(number, int)
    with DataLoader(dataset) as entered:
        assert_type(entered.stats().samples, int)


def what_other_datasets_give() -> None:
    for batch in DataLoader([1, 2]):
        assert_type(batch, Any)
