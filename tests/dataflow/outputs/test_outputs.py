"""Output classes: what is said of a kind of column in one place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from datasets_kit import Make

from dataflow import DataLoader, Pad
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
    window: Any = SimpleNamespace(staged=dict.fromkeys("ab", absent))
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
