"""Output classes: what is said of a kind of column in one place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import Make

from dataflow import DataLoader, Pad, ShardedDataset, ShardError
from dataflow.outputs.columns import ChunkColumns, ChunkRows, Randomness
from dataflow.outputs.output import BuiltColumn, Output
from dataflow.outputs.ragged import PaddedOutput, RaggedOutput
from dataflow.staging.columns import StagedSpans
from dataflow.staging.rows import WindowPart
from prefetch.addresses import memory_at
from prefetch.memory.arena import Arena


@dataclass(frozen=True, kw_only=True)
class LengthOutput(Output):
    """How many bytes each value has: a kind that the product does not know."""

    kind: ClassVar[str] = "length"

    def batch_bytes(self, rows: ChunkRows) -> int:
        return 0

    def build(self, columns: ChunkColumns) -> BuiltColumn:
        lengths = columns.segments(self.name, None)[1]

        def split(sizes: Sequence[int]) -> list[torch.Tensor]:
            return list(torch.from_numpy(np.array(lengths)).split(list(sizes)))

        return BuiltColumn(split=split)


def test_columns_that_all_rows_lack_are_copied_from_zeros_that_stay() -> None:
    """Of a megabyte each: what is freed is unmapped, and whoever reads it ends the process."""
    absent, nbytes = StagedSpans(np.zeros(3, np.int64), np.full(3, -1)), 1 << 20
    window: Any = SimpleNamespace(spans=dict.fromkeys("ab", absent).__getitem__)
    rows = ChunkRows(3, lambda: [WindowPart(window, np.arange(3), slice(0, 3))])
    arena, closing = Arena(limit_bytes=1 << 20), threading.Event()
    columns = ChunkColumns(rows, arena, Randomness(0, 0), may_load=True, closing=closing)
    for addresses in [columns.addresses_of(name, nbytes, None) for name in "ab"]:
        assert all(not memory_at(address, nbytes).any() for address in addresses.tolist())


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_new_kind_of_column_is_one_class(made: Make, shuffle: bool) -> None:
    data = made("tar")
    dataset = data.open(columns=["bin"], decode=None)
    dataset.outputs = (LengthOutput(name="n", sources=("bin",)),)
    with DataLoader(dataset, 3, shuffle=shuffle) as loader:
        lengths = torch.cat([batch["n"] for batch in loader]).tolist()
    assert sorted(lengths) == sorted(len(row["bin"]) for row in data.samples)
    assert dataset[1] == {"n": len(data.samples[1]["bin"])}


def test_outputs_that_deliver_the_same_are_equal_whatever_their_sources() -> None:
    assert RaggedOutput(name="x", sources=("a",)) == RaggedOutput(name="x", sources=("b",))
    assert RaggedOutput(name="x", sources=("a",)) != PaddedOutput(name="x", sources=("a",), pad=Pad())


def test_columns_of_tables_that_are_called_as_what_tars_have_keep_their_values(tmp_path: Path) -> None:
    pq.write_table(pa.table({"__key__": [7, 8], "x": [1, 2]}), tmp_path / "keys.parquet")
    dataset = ShardedDataset(tmp_path / "keys.parquet")
    assert [dict(dataset[i]) for i in range(2)] == [{"__key__": 7, "x": 1}, {"__key__": 8, "x": 2}]
    pq.write_table(pa.table({"__url__": ["a.tar"], "x": [1]}), tmp_path / "urls.parquet")
    with pytest.warns(UserWarning, match=r"'__url__' is left out.*Name the columns that are wanted"):
        assert dict(ShardedDataset(tmp_path / "urls.parquet")[0]) == {"x": 1}
    named = ShardedDataset(tmp_path / "urls.parquet", columns=["x", "__url__"])
    assert dict(named[0]) == {"x": 1, "__url__": f"{tmp_path}/urls.parquet"}


def test_times_of_96_bits_that_nanoseconds_do_not_hold_are_an_error_and_not_of_1816(tmp_path: Path) -> None:
    end, path = 253_402_300_799, str(tmp_path / "a.parquet")  # of the year 9999, as tables say "for ever"
    for times in ([0, -1], [0, end]):
        column = pa.array([time * 10**6 for time in times], pa.timestamp("us"))
        struct = pa.StructArray.from_arrays([column], ["t"])
        table = pa.table({"t": column, "s": struct, "x": range(2)})
        pq.write_table(table, path, use_deprecated_int96_timestamps=True)
        dataset = ShardedDataset(path, catalog=f"{path}.{len(str(times))}.catalog")
        if end in times:
            with pytest.raises(ShardError, match="column 't' has times before 1677 or after 2262"):
                dataset[0]
            assert dict(dataset.select(["x"])[1]) == {"x": 1}
        else:
            assert dict(dataset[1]) == {"t": -(10**9), "s.t": -(10**9), "x": 1}
