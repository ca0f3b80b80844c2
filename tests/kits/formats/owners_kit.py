"""Compares what is delivered of a fixture with what the owner of its format read, as `told` has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch

from dataflow import DataLoader, Ragged, ShardedDataset

FIXTURES = Path(__file__).parents[2] / "fixtures"


def expected(folder: Path, name: str) -> list[dict[str, Any]]:
    """The samples of a dataset of a folder of fixtures."""
    samples: list[dict[str, Any]] = json.loads((folder / "expected.json").read_text())[name]
    return samples


def samples_of(batch: Any) -> Iterator[dict[str, Any]]:
    columns = {n: v.rows() if isinstance(v, Ragged) else v for n, v in batch.items()}
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def assert_equal(value: Any, told: Any, name: str) -> None:
    """Compare what is delivered with what the owner's reader gave, as `told` of the script has it."""
    if isinstance(told, dict) and set(told) <= {"array", "dtype", "shape"} and "array" in told:
        assert value.dtype == getattr(torch, told["dtype"]), name
        assert list(value.shape) == told["shape"], name
        assert value.tolist() == told["array"], name
    elif isinstance(told, dict) and "number" in told:
        assert (value.item() if isinstance(value, torch.Tensor) else value) == told["number"], name
    elif isinstance(told, dict) and "bytes" in told:
        assert bytes(value.tolist()).hex() == told["bytes"], name
    elif isinstance(told, dict) and "json" in told:
        assert value == told["json"], name
    elif isinstance(told, dict) and "decimal" in told:
        assert value == Decimal(told["decimal"]), name
    elif isinstance(told, dict) and "pixels" in told:
        assert value.tolist() == told["pixels"], name
    elif isinstance(told, list) and told and isinstance(told[0], dict):
        assert len(value) == len(told), name
        for one, other in zip(value, told, strict=True):
            assert_equal(one, other, name)
    else:
        value = value.item() if isinstance(value, torch.Tensor) else value
        assert (value, type(value)) == (told, type(told)), name


def assert_delivers(dataset: ShardedDataset, told: list[dict[str, Any]], **options: Any) -> None:
    with DataLoader(dataset, batch_size=4, num_workers=0, **options) as loader:
        rows = [row for batch in loader for row in samples_of(batch)]
    assert len(rows) == len(told)
    for row, one in zip(rows, told, strict=True):
        assert row.keys() == one.keys()
        for name in one:
            assert_equal(row[name], one[name], name)
