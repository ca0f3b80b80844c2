"""Batches that are copies alone are made when they are taken: errors come in their place."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow import DataLoader, ShardedDataset, ShardWriter
from sharding.errors import SampleError, ShardReadError

TIMEOUT_S = 30


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """64 samples, each from a page on; tokens count up."""
    path = tmp_path / "tokens.bin"
    np.arange(65 * 1024, dtype=np.uint32).tofile(path)
    return path


def opened(path: Path, **options: Any) -> ShardedDataset:
    return ShardedDataset(str(path), format="tokens", dtype="uint32", length=1024, **options)


def first_tokens(batch: dict[str, Any]) -> list[int]:
    return [int(row[0]) // 1024 for row in batch["tokens"]]


def test_batches_before_a_bad_sample_are_delivered_and_its_error_comes_in_its_place(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/x.tar") as writer:
        for i in range(40):
            value = "no number" if i == 25 else i
            writer.write({"__key__": f"k{i}", "cls": str(value).encode()})
    options: dict[str, Any] = {"decode": {"cls": "int"}, "shuffle": None}
    shuffle = options.pop("shuffle")
    seen: list[int] = []
    with (
        DataLoader(ShardedDataset(f"{tmp_path}/x.tar", **options), 4, shuffle) as loader,
        pytest.raises(SampleError, match="k25"),
    ):
        seen += [int(n) for batch in loader for n in batch["cls"]]
    dataset = ShardedDataset(f"{tmp_path}/x.tar", on_error="skip", **options)
    with DataLoader(dataset, 4, shuffle) as loader:
        batches = [batch["cls"].tolist() for batch in loader]
        assert loader.stats().skipped_samples == 1
    assert batches == [[n for n in range(at, at + 4) if n != 25] for at in range(0, 40, 4)]


@pytest.mark.reads_here
@pytest.mark.parametrize("taken", [1, 2, 5])
def test_a_file_cut_between_two_batches_of_a_chunk_names_the_first_row_that_is_gone(
    tokens: Path, taken: int
) -> None:
    """Whoever cuts it waits for no batch, though those to come were planned as loads."""
    with DataLoader(opened(tokens), 2, memory_limit=1 << 20) as loader:  # at most eight batches lie ready
        loop = iter(loader)
        seen = [first_tokens(next(loop)) for _ in range(taken)]
        cut = threading.Thread(target=os.truncate, args=(tokens, 40 * 4096))
        cut.start()
        cut.join(TIMEOUT_S)
        assert not cut.is_alive()
        with pytest.raises(ShardReadError, match=r"tokens\.bin") as caught:
            seen.extend(map(first_tokens, loop))
    assert seen == [[n, n + 1] for n in range(0, 2 * len(seen), 2)]
    assert max(taken, 19) <= len(seen) <= 20
    assert caught.value.key in {str(n) for n in range(2 * len(seen), 2 * len(seen) + 2)}
