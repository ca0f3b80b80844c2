"""A format of a user's own whose rows are numbers that lie where `locate` says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from dataflow import DataLoader, ShardedDataset
from sharding.blocks import Block, ColumnSpec, Format, Shard, ShardScan, Spans

ROW_BYTES, ROWS = 16, 100


class FloatRows(Format):
    name = "float-rows"
    locates_numbers = True

    def scan(self, file: BinaryIO, shard: Shard, *, block_bytes: int) -> ShardScan:
        starts = np.arange(0, shard.size, block_bytes // ROW_BYTES * ROW_BYTES)
        lengths = np.diff(starts, append=shard.size)
        schema = {"x": ColumnSpec("fixed", "float32", (4,))}
        return ShardScan(starts, lengths, lengths, lengths // ROW_BYTES, schema=schema)

    def decode(self, block: Block, data: Any, columns: Sequence[str]) -> dict[str, Any]:
        return {"x": np.frombuffer(data, np.float32).reshape(-1, 4)}

    def locate(self, block: Block, columns: Sequence[str]) -> dict[str, Spans]:
        starts = np.arange(block.num_samples) * ROW_BYTES
        return {"x": Spans(np.empty(0, np.uint8), starts, np.full(len(starts), ROW_BYTES))}


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 1}, {"num_workers": 0}])
def test_rows_that_a_format_locates_are_delivered_as_they_are_stored(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    stored = np.arange(4 * ROWS, dtype=np.float32).reshape(-1, 4)
    stored.tofile(tmp_path / "a.rows")
    dataset = ShardedDataset(f"{tmp_path}/a.rows", format=FloatRows(), block_bytes=20 * ROW_BYTES)
    with DataLoader(dataset, batch_size=7, **options) as loader:
        rows = [row for batch in loader for row in batch["x"].tolist()]
    assert sorted(rows) == stored.tolist()
    assert dataset[41]["x"].tolist() == stored[41].tolist()
